"""Greedy answers to one batch: a label, or a text by Hugging Face's `generate`.

Evaluation takes those of label heads, and of models whose rows cannot join a running batch. Serving and the evaluation
of all other models decode the same answers token by token (`continuous_batch`), which tests compare.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from raycl.backbone import Backbone
from raycl.backbone.base import GenerationInputs
from raycl.backbone.positions import attends_to_all
from raycl.generation.requests import AllowedTokens, TokenConstraint
from raycl.types import Batch

RELATIVE = ("longt5", "mt5", "t5", "umt5")
"""Encoder-decoder models whose decoder counts positions from the newest one, so rows of unlike length fit together."""

HARMLESS = frozenset(
    (
        *("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id", "max_length", "max_new_tokens"),
        *("do_sample", "temperature", "top_k", "top_p", "typical_p", "num_beams", "num_return_sequences"),
        *("early_stopping", "length_penalty", "use_cache", "cache_implementation", "output_attentions"),
        *("output_hidden_states", "return_dict_in_generate", "transformers_version", "_from_model_config"),
    )
)
"""Settings of `generate` that do not change the most likely token."""


def answers_continuously(backbone: Backbone) -> bool:
    """Return whether `AnswerBatch` gives the answers of `generate`, with the model's own generation settings.

    Where workers share the weights they must run equally many passes, and there each decodes at its own pace.
    """
    capabilities, model = backbone.capabilities, backbone.model
    if capabilities.answers != "text" or backbone.synchronized:
        return False
    if set(model.generation_config.to_diff_dict()) - HARMLESS:
        return False  # for example forced tokens or a penalty on repetitions
    if capabilities.separate_encoder:
        return model.config.model_type in RELATIVE
    # GPT has no cache, and RWKV and Mamba keep something else in it
    return backbone.cache_argument is not None and not model._is_stateful and attends_to_all(model.config)


@torch.no_grad()
def predict(
    backbone: Backbone, batch: Batch, max_new_tokens: int, forms: Sequence[TokenConstraint | None] = ()
) -> list[str]:
    """Return one answer per example, without any task id; the mixture must be active.

    Args:
        max_new_tokens: limit of a generated answer; unused by backbones that answer with labels.
        forms: the form of each generated answer; None: any, as for all of them without forms.

    Returns:
        the label with the largest score among those allowed (`Backbone.allowed_labels`; "" where no label is known),
        or a greedy answer, kept to the allowed labels if there are any, else to its form.
    """
    if backbone.capabilities.answers == "label":
        return _label(backbone, batch)
    with backbone.precision():
        inputs, limits = backbone.generation_inputs(batch), {}
        if backbone.allowed_labels:
            forms = [AllowedTokens(backbone.allowed_labels.values(), backbone.codec.eos_id)] * len(batch)
        if any(form is not None for form in forms):
            limits = {"prefix_allowed_tokens_fn": _limit(inputs, forms, int(backbone.model.config.vocab_size))}
        ids = backbone.model.generate(
            **inputs.arguments,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            synced_gpus=backbone.synchronized,
            **limits,
        )
    return backbone.codec.decode(ids[:, inputs.cut :])


def _limit(
    inputs: GenerationInputs, forms: Sequence[TokenConstraint | None], vocabulary: int
) -> Callable[[int, Tensor], Sequence[int]]:
    """Return the tokens that may follow a row's, as `generate` asks for them."""
    states = [None if form is None else form.started() for form in forms]
    every = range(vocabulary)

    def allowed(row: int, ids_S: Tensor) -> Sequence[int]:
        ids, state = ids_S[inputs.prompt_columns :].tolist(), states[row]
        if inputs.forced is not None:
            if not ids:
                return [inputs.forced]
            ids = ids[1:]
        return every if state is None else state.after(ids)

    return allowed


def _label(backbone: Backbone, batch: Batch) -> list[str]:
    logits_BC, labels = backbone.score_labels(batch)
    if backbone.allowed_labels:
        allowed = torch.tensor([label in backbone.allowed_labels for label in labels], device=logits_BC.device)
        logits_BC = logits_BC.masked_fill(~allowed, -torch.inf)
    best_B, row_B = logits_BC.max(-1)
    known = torch.isfinite(best_B).tolist()
    return [labels[row] if yes else "" for row, yes in zip(row_B.tolist(), known, strict=True)]
