"""The interface of a backbone: a loss over a batch, answers for a batch, and which linears it has."""

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from raycl.backbone.codec import HFCodec
from raycl.backbone.linears import by_onednn
from raycl.backbone.positions import positions_of
from raycl.errors import BackboneError
from raycl.types import IGNORE, Batch, Capabilities

Side = Literal["source", "target"]
"""The text of a layer's positions: encoder-decoder models read two, all others one (their "source")."""

Attention = Literal["sdpa", "flash_attention_2", "eager"]
"""An implementation of attention in Transformers: torch's fused one, the package flash-attn, or plain products."""


@dataclass
class Output:
    """The result of a forward pass.

    Attributes:
        loss_sum: scalar float32, cross-entropy **summed** over the batch's loss positions (see `loss_count`).
        logits: `[B, C]` of a label head, or `[M, V]` at the M loss positions (`Guesses`), as the model computed them.
        labels: `[M]`, the true column of each position; IGNORE where it carries no loss. A label head has B positions.
        rows: `[M]`, example that each position belongs to.
        competing: the logits of the loss, where labels were left out (`Backbone.competing_labels`).
    """

    loss_sum: Tensor
    logits: Tensor
    labels: Tensor
    rows: Tensor
    competing: Tensor | None = None

    def positions(self) -> Tensor:
        """Return `[P]`: the positions with loss, example by example, in the order of the text."""
        at = (self.labels != IGNORE).nonzero().squeeze(1)
        return at[torch.argsort(self.rows[at], stable=True)]

    def losses(self) -> Tensor:
        """Return `[M]` float32: the cross-entropy of each position, 0 without loss; their sum is `loss_sum`."""
        logits = self.logits if self.competing is None else self.competing
        return nn.functional.cross_entropy(logits.float(), self.labels, ignore_index=IGNORE, reduction="none")


@dataclass
class Guesses:
    """The model's outputs at every loss position, in answers or in texts that are learned themselves.

    Attributes:
        logits: `[M, V]`; batches without a loss position have one that carries no loss.
        labels: `[M]`, the true token. rows: `[M]`, example that each position belongs to.
    """

    logits: Tensor
    labels: Tensor
    rows: Tensor


@dataclass(frozen=True)
class GenerationInputs:
    """Arguments of `generate` for a batch, and the beginning of answers in its result.

    Attributes:
        arguments: arguments of `generate`.
        prompt_columns: tokens in front of an answer in each returned row.
        cut: how many of these tokens are not decoded.
        forced: the model's own first token of every answer (BART), if it has one.
    """

    arguments: dict[str, Any]
    prompt_columns: int
    cut: int
    forced: int | None = None


def seed_all(seed: int, device: torch.device) -> None:
    """Seed torch's random numbers, those of a GPU where it computes on one.

    `torch.manual_seed` formats the stack for each kind of device that is not there, which takes a millisecond, and
    keeps it for as long as the process lives.
    """
    (torch.default_generator.manual_seed if device.type in ("cpu", "meta") else torch.manual_seed)(seed)


def loss_count(batch: Batch) -> int:
    """Return the number of positions that carry loss: target tokens, or examples for encoder-only backbones."""
    labels = batch.target_ids if batch.target_ids.shape[1] else batch.label_ids
    return int((labels != IGNORE).sum())


class Head(Protocol):
    """Scores over label texts: `raycl.backbone.encoder.LabelHead`, or heads that belong to adapters."""

    labels: list[str]

    def grow(self, labels: Sequence[str]) -> None: ...

    def clear(self) -> None:
        """Forget every label."""
        ...

    def __call__(self, pooled_BD: Tensor) -> Tensor:
        """Map `[B, D]` to scores `[B, C]`; -inf where nothing is known of a label."""
        ...


class Prefix(Protocol):
    """Learned positions in front of the text or behind it (soft prompts)."""

    def __call__(self, rows: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Return embeddings `[rows, P, D]` and mask `[rows, P]`, or None for nothing."""
        ...


class Backbone(nn.Module, ABC):
    """A language model of one of three kinds.

    Attributes:
        model: the Hugging Face model.
        codec: converts text to ids and back.
        head: label head of encoder-only backbones, else None.
        prefix: learned positions before every text, or None. suffix: learned positions between text and answer, or
            None.
        dtype: dtype of computation, whatever the dtype in which an engine keeps trained parameters.
        allowed_labels: the only answers that evaluation accepts, and their ids; {}: all.
        competing_labels: in training, the only labels that compete for an example which has one of them; (): all do.
            Read by backbones that answer with labels.
        every_position: logits are computed at every position of a text, though only some carry loss, since something
            observes the output layer there.
        packs: in training, several examples share a row (`raycl.backbone.positions`).
        synchronized: workers share the weights, so that each must run as many forward passes as the others.
        inference_attention: attention under `inference`; None: as in training.
        inference_by_onednn: oneDNN computes products of float32 under `inference`.
        has_untrained_language_head: texts are learned by a head that the checkpoint lacks, so that it starts at random.
        is_compiled: layers are under torch.compile, and run without it under `inference`.
    """

    head: Head | None
    prefix: Prefix | None
    suffix: Prefix | None

    def __init__(self, model: nn.Module, codec: HFCodec) -> None:
        super().__init__()
        self.model: Any = model
        self.codec = codec
        self.head = None
        self.prefix = None
        self.suffix = None
        self.allowed_labels: Mapping[str, Sequence[int]] = {}
        self.competing_labels: tuple[str, ...] = ()
        self.every_position = self.packs = self.synchronized = False
        self.inference_attention: Attention | None = None
        self.inference_by_onednn = False
        self.is_compiled = self.has_untrained_language_head = False
        self.dtype: torch.dtype = next(model.parameters()).dtype

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of this kind of backbone."""
        return self.codec.capabilities

    @property
    def max_positions(self) -> int | None:
        """The most positions of a prompt, with its answer where both are one sequence; None: no limit."""
        return positions_of(self.model.get_encoder() if self.capabilities.separate_encoder else self.model)

    @property
    def max_answer_positions(self) -> int | None:
        """The most positions of an answer, including its prompt where both are one sequence; None: no limit."""
        return positions_of(self.model.get_decoder()) if self.capabilities.separate_encoder else self.max_positions

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end an answer: end-of-sequence, and those of the model's generation settings.

        Many tuned models end a turn with another token than a text. Ids that are ordinary words are left out: a config
        without an end has its class's default, whatever the tokenizer is.
        """
        named = getattr(self.model, "generation_config", None) and self.model.generation_config.eos_token_id
        ids = named if isinstance(named, list) else [] if named is None else [named]
        return frozenset([self.codec.eos_id, *(number for number in ids if number in self.codec.special_ids)])

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def precision(self) -> AbstractContextManager[object]:
        """Return autocast for bfloat16 models, since an engine may keep trained parameters in float32."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    @cached_property
    def cache_argument(self) -> str | None:
        """The argument of the model's forward pass that keeps keys and values between passes; None: there is none.

        Transformers calls it `cache` from 5.24 on, `past_key_values` before.
        """
        names = signature(self.model.forward).parameters
        return next((name for name in ("cache", "past_key_values") if name in names), None)

    def use_attention(self, name: Attention) -> None:
        """Compute attention in this way from now on. A model without weights (meta device) is asked if it could.

        Raises:
            BackboneError: the model does not support it.
        """
        weights = next(self.model.parameters())
        is_flash, has_weights = name == "flash_attention_2", weights.device.type != "meta"
        reason = ""
        if not getattr(self.model, f"_supports_{'flash_attn' if is_flash else 'sdpa'}", False) and name != "eager":
            reason = f"{type(self.model).__name__} has no such attention"
        elif is_flash and find_spec("flash_attn") is None:
            reason = "the package flash-attn is not installed (pip install flash-attn)"
        elif is_flash and has_weights and weights.device.type != "cuda":
            reason = f"the model is on {weights.device.type}, and it needs a GPU"
        elif is_flash and has_weights and self.dtype == torch.float32:
            reason = "the model computes in float32, and it needs backbone.dtype=bfloat16"
        elif has_weights:
            _set_attention(self.model, name)
            self.inference_attention = None
            if self.model.config._attn_implementation != name:
                reason = f"{type(self.model).__name__} cannot change its attention"
        if reason:
            raise BackboneError(f"backbone.attention is {name}, but {reason}: set it to auto")

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Disable gradients inside, and compute attention and products in the way that is faster without them."""
        training_attention = self.model.config._attn_implementation
        if self.inference_attention is not None:
            _set_attention(self.model, self.inference_attention)
        try:
            with (
                torch.compiler.set_stance("force_eager") if self.is_compiled else nullcontext(),
                by_onednn(self.model) if self.inference_by_onednn else nullcontext(),
            ):
                yield
        finally:
            if self.inference_attention is not None:
                _set_attention(self.model, training_attention)

    @contextmanager
    def without_recomputation(self) -> Iterator[None]:
        """Keep activations inside, for passes whose gates are closed again before backward."""
        recomputing = [module for module in self.model.modules() if getattr(module, "gradient_checkpointing", False)]
        for module in recomputing:
            module.gradient_checkpointing = False
        try:
            yield
        finally:
            for module in recomputing:
                module.gradient_checkpointing = True

    def forward(self, batch: Batch) -> Output:
        """Run a teacher-forced pass over `batch`; only examples with weight 1 carry loss."""
        guesses = self.guesses(batch)
        return Output(
            summed_cross_entropy(guesses.logits, guesses.labels), guesses.logits, guesses.labels, guesses.rows
        )

    def true_logits(self, batch: Batch) -> Tensor:
        """Return the logits of the true tokens, or of the true label, summed over all loss positions: a scalar."""
        guesses = self.guesses(batch)
        return summed_at(guesses.logits, guesses.labels)

    @abstractmethod
    def guesses(self, batch: Batch) -> Guesses:
        """Return the language model's outputs at the loss positions, given everything that stands before them."""

    def score_labels(self, batch: Batch) -> tuple[Tensor, list[str]]:
        """Return scores `[B, C]` in float32 and the label of each column, where `capabilities.answers` is `label`."""
        raise AssertionError(f"{type(self).__name__} answers with texts: it has no label scores")

    def generation_inputs(self, batch: Batch) -> GenerationInputs:
        """Return the inputs of the model's `generate` for a batch, where `capabilities.answers` is `text`; call it
        under `precision`."""
        raise AssertionError(f"{type(self).__name__} answers with labels: it generates no text")

    @torch.no_grad()
    def read(self, batch: Batch) -> Tensor:
        """Return `[B, 3]` float64 for texts that are learned: tokens guessed right, tokens, cross-entropy in nats."""
        guesses = self.guesses(batch)
        loss_M = nn.functional.cross_entropy(
            guesses.logits.float(), guesses.labels, ignore_index=IGNORE, reduction="none"
        )
        counted_M = guesses.labels != IGNORE
        right_M = (guesses.logits.argmax(-1) == guesses.labels) & counted_M
        parts = torch.stack([right_M.double(), counted_M.double(), loss_M.double()], dim=1)
        return parts.new_zeros(len(batch), 3).index_add_(0, guesses.rows, parts)

    def exported_name(self, name: str) -> str:
        """Return the name of a parameter in the files of a Hugging Face model folder."""
        return name.removeprefix("model.")

    def side(self, path: str) -> Side:
        """Return the text whose positions the layer at `path` works on."""
        return "source"

    def examples_in_rows(self, batch: Batch) -> Tensor | None:
        """Return `[P, S]`, the example of each position of the model's rows; None: a row is an example."""
        return None

    def check_packing(self) -> None:
        """Check that rows can be packed, before `packs` is set.

        Raises:
            BackboneError: an example in a shared row would not be computed as it is alone.
        """
        raise AssertionError(f"{type(self).__name__} has no rows that examples could share")

    def real_tokens(self, batch: Batch) -> dict[Side, Tensor]:
        """Return for each side `[B, S]` bool: false on padding and in examples of weight 0.

        A prefix comes before these S positions and is not part of the text.
        """
        return {"source": (batch.source_mask > 0) & (batch.weight > 0).unsqueeze(1)}

    def learn_labels(self, labels: Sequence[str]) -> None:
        """Make sure the label head has a row for each of `labels`; nothing to do where there is no head."""

    @torch.no_grad()
    def embedded(self, ids_BL: Tensor) -> Tensor:
        """Return raw token embeddings `[B, L, D]`, before positions, norms and any layer; no gradient."""
        embeddings: Tensor = self.model.get_input_embeddings()(ids_BL)
        return embeddings

    @torch.no_grad()
    def hidden_states(self, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Return last hidden states `[B, L, D]` of a text in float32: no prefix, no dropout, no gradient.

        They are the pretrained model's own where no mixture is active and no weight of it is trained.
        """
        with evaluating(self.model), self.precision():
            return self._encode(ids_BL, mask_BL).float()

    def whole_texts(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return ids and mask `[B, L]` of a batch's texts with nothing hidden, as the layers read them whose states
        `text_states` gives."""
        return batch.source_ids, batch.source_mask

    def text_states(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return last hidden states `[B, L, D]` in float32 with gradients, and dropout in training; and their mask."""
        ids_BL, mask_BL = self.whole_texts(batch)
        with self.precision():
            return self._encode(ids_BL, mask_BL).float(), mask_BL

    def _encode(self, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Return the last hidden states of the layers that read a text."""
        states: Tensor = self.model.base_model(input_ids=ids_BL, attention_mask=mask_BL).last_hidden_state
        return states

    def prefixed(self, ids_BL: Tensor, mask_BL: Tensor) -> tuple[dict[str, Tensor], int]:
        """Return arguments of the model for a text with its prefix and suffix, and the prefix's length P.

        Without either they are plain ids, and P is 0. A suffix stands right behind the last real token of each text, so
        that its positions do not depend on padding.
        """
        rows, device = len(ids_BL), ids_BL.device
        prefix = None if self.prefix is None else self.prefix(rows, device)
        suffix = None if self.suffix is None else self.suffix(rows, device)
        if prefix is None and suffix is None:
            return {"input_ids": ids_BL, "attention_mask": mask_BL}, 0
        text, mask = self.model.get_input_embeddings()(ids_BL), mask_BL
        if suffix is not None:
            text, mask = torch.cat([text, suffix[0].to(text.dtype)], 1), torch.cat([mask, suffix[1].to(mask.dtype)], 1)
            order_BS = real_first(mask)
            text, mask = text.gather(1, order_BS.unsqueeze(-1).expand_as(text)), mask.gather(1, order_BS)
        if prefix is not None:
            text = torch.cat([prefix[0].to(text.dtype), text], dim=1)
            mask = torch.cat([prefix[1].to(mask.dtype), mask], dim=1)
        return {"inputs_embeds": text, "attention_mask": mask}, 0 if prefix is None else prefix[0].shape[1]

    def model_files(self) -> dict[str, bytes]:
        """Write config and tokenizer as the files of a Hugging Face model folder (without weights)."""
        with tempfile.TemporaryDirectory() as folder:
            self.model.config.save_pretrained(folder)
            self.codec.tokenizer.save_pretrained(folder)
            return {path.name: path.read_bytes() for path in Path(folder).iterdir()}

    def label_ids(self) -> dict[str, int]:
        """Return label text -> row of the head; empty where there is no head."""
        return {} if self.head is None else {label: row for row, label in enumerate(self.head.labels)}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode inside, which has no dropout."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def mean_pooled(states_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """Return the mean over real tokens, `[B, D]`; 0 for an example without any."""
    mask_BL1 = mask_BL.unsqueeze(-1).to(states_BLD.dtype)
    return (states_BLD * mask_BL1).sum(1) / mask_BL1.sum(1).clamp(min=1)


def real_first(mask_BS: Tensor) -> Tensor:
    """Return `[B, S]` columns of each row, those of real positions first; their order is kept."""
    return torch.argsort(1 - mask_BS, dim=1, stable=True)


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy in float32 summed over labels but IGNORE; logits `[..., V]`, labels `[...]`."""
    return nn.functional.cross_entropy(
        logits.float().reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=IGNORE, reduction="sum"
    )


def summed_at(logits_MC: Tensor, labels_M: Tensor) -> Tensor:
    """Return the sum in float32 of each row's entry at its label; rows whose label is IGNORE count nothing."""
    picked_M = logits_MC.float().gather(1, labels_M.clamp(min=0).unsqueeze(1)).squeeze(1)
    return picked_M.masked_fill(labels_M == IGNORE, 0.0).sum()


def _set_attention(model: Any, name: str) -> None:
    """Compute a model's attention in this way, and that of its parts."""
    model.set_attn_implementation(name)
    for part in model.modules():  # transformers 5.15 leaves out parts whose config is a copy, such as T5's stacks
        if hasattr(part, "set_attn_implementation") and part.config._attn_implementation != name:
            part.set_attn_implementation(name)


def checkpoint_activations(model: Any) -> None:
    """Recompute activations in the backward pass instead of keeping them (gradient checkpointing)."""
    name = "activation_checkpointing_enable"  # older transformers have only the other name
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
