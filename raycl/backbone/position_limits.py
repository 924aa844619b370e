"""The number of positions that a stack of layers can read, and checks that a codec's texts fit them.

Where positions have a table, its size is the limit: RoBERTa and its kin begin behind the padding id, so that they have
fewer positions than rows, and BART keeps two rows in front of the first. Positions without a table (rotary ones) can be
computed beyond those that a model was trained on, but are not.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from raycl.backbone.codec import HFCodec
from raycl.errors import BackboneError

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
    return None if limit is None else int(limit)


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
