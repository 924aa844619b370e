"""Logits at chosen positions: the output layer of a language model reads their hidden states and no others.

Why it exists: most tokens of a batch carry no loss (prompts, padding), and a vocabulary is many times as wide as a
hidden state, so logits of all tokens are the largest tensors of a training step. The model's own forward pass runs, and
only the input of its output layer is cut, so what a model does before and behind it stays as it is (T5's scaling of
tied embeddings, BART's bias, Gemma's soft capping, Cohere's scale), and an engine's hooks on the layer fire as always.
What it does not know: what the labels are of.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from raycl.backbone.roles import is_linear
from raycl.types import IGNORE


def loss_positions(labels_BS: Tensor) -> Tensor:
    """`[B, S]` bool: where labels are; the very first position where there are none, since a model must read one."""
    chosen_BS = labels_BS != IGNORE
    chosen_BS[0, 0] |= ~chosen_BS.any()
    return chosen_BS


def decoder_inputs(model: Any, labels_BT: Tensor) -> dict[str, Any]:
    """What the decoder of an encoder-decoder model reads to predict these labels, as arguments of the model.

    Given the labels themselves, a model computes a loss of its own beside ours.
    """
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    return {"labels": labels_BT} if shift is None else {"decoder_input_ids": shift(labels_BT)}


def logits_at(model: Any, chosen_BS: Tensor, inputs: dict[str, Any], every_position: bool = False) -> Tensor:
    """`[M, V]`: the model's logits at the chosen positions, row by row.

    Args:
        chosen_BS: bool, of the positions that the model gives logits for.
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

    handle = layer.register_forward_pre_hook(cut)
    try:
        logits = model(**inputs).logits
    finally:
        handle.remove()
    return logits[0] if was_cut else _picked(logits, index_M)


def _picked(states_BSD: Tensor, index_M: Tensor) -> Tensor:
    """`[M, D]` of `[B, S, D]`."""
    return states_BSD.flatten(0, 1).index_select(0, index_M)
