"""Positions: those of a batch whose logits are computed, rows that several examples share, and how many a model has.

Logits: most tokens of a batch carry no loss (prompts, padding), and a vocabulary is many times as wide as a hidden
state, so logits of all tokens are the largest tensors of a training step. The model's own forward pass runs, and only
the input of its output layer is cut, so what a model does before and behind it stays as it is (T5's scaling of tied
embeddings, BART's bias, Gemma's soft capping, Cohere's scale), and an engine's hooks on the layer fire as always.
Packing: examples of unlike lengths stand one after another in rows as long as the longest of them. Where position ids
begin at 0 again, Transformers' attention begins anew, in every implementation of it and in sliding windows as well.

Limits: where positions have a table, its size is the limit: RoBERTa and its kin begin behind the padding id, so that
they have fewer positions than rows, and BART keeps two rows in front of the first. Positions without a table (rotary
ones) can be computed beyond those that a model was trained on, but are not.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from raycl.backbone.codec import HFCodec
from raycl.backbone.roles import is_linear
from raycl.errors import BackboneError
from raycl.types import IGNORE


def loss_positions(labels_BS: Tensor) -> Tensor:
    """Return `[B, S]` bool: where labels are; the first position where there are none: a model must read one."""
    chosen_BS = labels_BS != IGNORE
    chosen_BS[0, 0] |= ~chosen_BS.any()
    return chosen_BS


def decoder_inputs(model: Any, labels_BT: Tensor) -> dict[str, Any]:
    """Return the decoder's inputs for these labels in an encoder-decoder model, as arguments of the model.

    The token that answers begin with when they are generated stands first. Some models' own shift begins with a row's
    last token instead (mBART, whose labels end in a language), which a row without labels does not have. Where no token
    is known the labels themselves are given, and the model computes a loss of its own in addition to ours.
    """
    settings = [config for config in (getattr(model, "generation_config", None), model.config) if config is not None]
    tokens = [getattr(config, f"{name}_token_id", None) for name in ("decoder_start", "bos") for config in settings]
    start = next((token for token in tokens if token is not None), None)
    if start is None:
        return {"labels": labels_BT}
    shifted_BT = nn.functional.pad(labels_BT[:, :-1], (1, 0), value=int(start))
    return {"decoder_input_ids": shifted_BT.masked_fill(shifted_BT == IGNORE, int(model.config.pad_token_id or 0))}


def logits_at(model: Any, chosen_BS: Tensor, inputs: dict[str, Any], every_position: bool = False) -> Tensor:
    """Return `[M, V]`, the model's logits at the chosen positions, row by row.

    Args:
        chosen_BS: bool, over the positions of the model's logits.
        inputs: arguments of the model.
        every_position: the output layer runs at all positions, and logits are picked afterwards. So they are as well
            where it is no plain linear (adapters on it look at whole rows) or the model computes a loss of its own.
    """
    index_M = chosen_BS.flatten().nonzero().squeeze(1)
    layer = model.get_output_embeddings()
    if every_position or layer is None or not is_linear(layer) or "labels" in inputs:
        return _picked(model(**inputs).logits, index_M)
    was_cut = False

    def cut(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        nonlocal was_cut
        if not given or given[0].shape[:2] != chosen_BS.shape:
            return None
        was_cut = True
        return (_picked(given[0], index_M)[None], *given[1:])

    with layer.register_forward_pre_hook(cut):
        logits = model(**inputs).logits
    return logits[0] if was_cut else _picked(logits, index_M)


def _picked(states_BSD: Tensor, index_M: Tensor) -> Tensor:
    """Return the chosen `[M, D]` of `[B, S, D]`."""
    return states_BSD.flatten(0, 1).index_select(0, index_M)


@dataclass(frozen=True)
class PackedRows:
    """The positions of B examples' tokens in P rows of S positions.

    Attributes:
        examples: `[P, S]` int64, whose position it is; padding behind a row's last example is counted as of that one.
        positions: `[P, S]` int64, from 0 in every example, and in the padding.
        real: `[P, S]` bool, false on padding.
    """

    examples: Tensor
    positions: Tensor
    real: Tensor

    def take(self, tokens_BL: Tensor, padding: int) -> Tensor:
        """Return `[P, S]`, the tokens of right-padded rows at their packed positions."""
        return tokens_BL[self.examples, self.positions * self.real].masked_fill(~self.real, padding)


def pack(lengths: Sequence[int], device: torch.device, in_one_row: bool = False) -> PackedRows:
    """Return rows for examples of these lengths, each 1 or more: the longest first, each in the first row with room for
    it.

    Args:
        in_one_row: all in a single row, which variable-length attention kernels read without computing padding.
    """
    room = sum(lengths) if in_one_row else max(lengths)
    rows: list[list[int]] = []
    left: list[int] = []
    for example in sorted(range(len(lengths)), key=lambda row_example: -lengths[row_example]):
        row = next((number for number, free in enumerate(left) if free >= lengths[example]), len(rows))
        if row == len(rows):
            rows.append([])
            left.append(room)
        rows[row].append(example)
        left[row] -= lengths[example]
    parts = [
        [*((row_example, lengths[row_example]) for row_example in row), (row[-1], free)]
        for row, free in zip(rows, left, strict=True)
    ]
    examples = [[row_example for row_example, length in row for _ in range(length)] for row in parts]
    positions = [[position for _, length in row for position in range(length)] for row in parts]
    real = torch.arange(room) < room - torch.tensor(left).unsqueeze(1)
    return PackedRows(torch.tensor(examples, device=device), torch.tensor(positions, device=device), real.to(device))


def join_last_states(model: Any) -> None:
    """Make the output layer read contiguous states where a model takes a view of the last positions.

    torch 2.13 multiplies a frozen weight by such a view once for each row, in bfloat16 on a CPU without its fast
    kernels: 600 times the time, for 16 prompts and 12,000 words (in float32 4 times).
    """
    head = model.get_output_embeddings()
    if head is not None:
        head.register_forward_pre_hook(_joined)


def _joined(head: nn.Module, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Copy states that are not contiguous; `is_contiguous` ignores the stride of a single row."""
    return tuple(
        x if x.dim() != 3 or x.stride(0) == x.shape[1] * x.stride(1) else x.clone(memory_format=torch.contiguous_format)
        for x in states
    )


TABLE = re.compile(r"(^|\.)(\w*position\w*|wpe)$")
"""Matches the end of the path of a table of positions (BERT, BART, GPT-2 and similar models)."""


def positions_of(stack: Any) -> int | None:
    """Return positions of one sequence that a stack of layers can read; None: no limit."""
    tables = [
        table
        for path, table in stack.named_modules()
        if isinstance(table, nn.Embedding) and TABLE.search(path) and "relative" not in path
    ]
    if tables:
        # RoBERTa's tables begin behind the padding id, BART's with an offset
        in_front = [
            int(getattr(table, "offset", 0)) if table.padding_idx is None else table.padding_idx + 1 for table in tables
        ]
        return min(table.num_embeddings - rows for table, rows in zip(tables, in_front, strict=True))
    limit = None if stack.config.is_encoder_decoder else getattr(stack.config, "max_position_embeddings", None)
    return None if limit is None or limit < 0 else int(limit)  # XLNet has -1, for no limit


def check_limits(model: Any, codec: HFCodec) -> None:
    """Check that the codec's texts fit a model, which may have no weights.

    Raises:
        BackboneError: they may be longer than its positions, or have tokens without an embedding.
    """
    source = ("stream.max_source_tokens", codec.max_source_tokens)
    target = ("max_target_tokens", codec.max_target_tokens)
    if codec.capabilities.one_sequence:
        _check_positions(positions_of(model), (source, target))
    elif codec.capabilities.separate_encoder:
        _check_positions(positions_of(model.get_encoder()), (source,))
        _check_positions(positions_of(model.get_decoder()), ((f"stream.{target[0]}", target[1]),))
    else:
        _check_positions(positions_of(model), (source,))
    _check_vocabulary(getattr(model.get_input_embeddings(), "num_embeddings", None), codec)


def _check_positions(limit: int | None, wanted: tuple[tuple[str, int], ...]) -> None:
    if limit is not None and sum(tokens for _, tokens in wanted) > limit:
        named = " + ".join(f"{setting} {tokens}" for setting, tokens in wanted)
        raise BackboneError(f"{named} is more than the {limit} positions of this backbone: lower it to fit")


def _check_vocabulary(rows: int | None, codec: HFCodec) -> None:
    """Check ids against the embeddings; special tokens that frame no text may lie beyond (Gemma 3's image token)."""
    tokenizer = codec.tokenizer
    if rows is None or max(codec.vocabulary - 1, *tokenizer.get_added_vocab().values()) < rows:
        return
    unused = codec.special_ids - {tokenizer.bos_token_id, tokenizer.eos_token_id, codec.pad_id, tokenizer.sep_token_id}
    numbers = ((number, token) for token, number in tokenizer.get_vocab().items())
    beyond = sorted(pair for pair in numbers if pair[0] >= rows and pair[0] not in unused)
    if not beyond:
        return
    raise BackboneError(
        f"the tokenizer of this backbone has {len(beyond)} tokens without a row among the model's {rows} input "
        f"embeddings, such as '{beyond[0][1]}' ({beyond[0][0]}): save the model with as many rows "
        "(resize_token_embeddings), or take them out of tokenizer.json"
    )


def attends_to_all(config: Any) -> bool:
    """Return whether every layer of a model attends to all earlier positions: no window, no recurrent state."""
    windowed = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None) is not None
    return not windowed and all(kind == "full_attention" for kind in getattr(config, "layer_types", None) or ())
