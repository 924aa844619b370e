"""The nouns that every package shares, and the legend of shapes.

Shapes: B examples in a batch, L source tokens, T target tokens, V vocabulary, C labels, D hidden width (or a linear's
inputs), O a linear's outputs, N adapters, r the rank of one, R the ranks of several together. Suffixes on tensor names
follow the legend where a function handles several (`source_BL`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal, Protocol

import torch
from pydantic import StringConstraints
from torch import Tensor

IGNORE = -100
"""Target positions with this id carry no loss (the convention of torch's cross_entropy)."""

MAGNITUDE = ".lora_magnitude_vector"
"""The end of the name of an adapter's magnitudes of a linear (`AdapterState.magnitudes`)."""

COPY = ".lora_copy"
"""The end of the name of an adapter's copy of a module's weight (`AdapterState.copies`)."""

Activation = Annotated[str, StringConstraints(pattern=r"^(relu|softmax|self\([a-z0-9_=.,+-]+\))?$")]
"""The function between A and B of an adapter: "", none (a weight increment, LoRA); relu, a non-linearity (a
bottleneck); softmax, that of attention, for which A holds keys and B values of learned positions (a prefix); or
self(...), for which they are those of a memory (`raycl.adapters.formula`)."""

PromptName = Literal["auto", "superni", "long", "olora", "llama2_chat", "trace", "chat", "plain"]
"""The prompt around the texts of a task: the wording of a paper, a chat template, or none."""

RouterText = Literal["input", "prompt"]
"""The text that a router is fitted on and reads: an input alone, or in its task's prompt."""

FormKind = Literal["json", "regex", "grammar"]
"""The form of generated answers: JSON of a schema, a regular expression, or a grammar in GBNF or Lark."""

UnknownPolicy = Literal["nearest", "bare", "refuse"]
"""The answer to a text of no learned task: by the adapters of the nearest task, by the backbone alone, or none."""

Objective = Literal["answer", "mlm", "clm"]
"""The objective of learning from a text: its answer, or the text itself, by guessing hidden words (encoder-only
backbones) or each next word (decoder-only ones)."""


@dataclass(frozen=True)
class Capabilities:
    """The capabilities of a kind of backbone. Callers read these instead of the kind or the class.

    Attributes:
        answers: label: a score for every label, so each task needs a closed label set; text: generated tokens.
        separate_encoder: an encoder reads the prompt, and the answer has positions of its own.
        text_objective: the objective by which texts themselves are learned; None: they cannot be.
        task_type: PEFT's name for such a model.
    """

    answers: Literal["label", "text"]
    separate_encoder: bool
    text_objective: Objective | None
    task_type: str

    @property
    def one_sequence(self) -> bool:
        """Return whether prompt and answer share one sequence of positions."""
        return self.answers == "text" and not self.separate_encoder


@dataclass(frozen=True)
class Task:
    """One task of a stream.

    Attributes:
        name: unique in its stream, safe as a file name.
        labels: the closed label set in a fixed order, or None for free text.
        metric: name of its score in `raycl.metrics.per_example`; `token_accuracy` where texts themselves are learned.
        type: kind of task (dialogue, summary, ...), for means by type; "" where it is unknown.
    """

    name: str
    labels: tuple[str, ...] | None
    metric: str
    objective: Objective = "answer"
    type: str = ""


@dataclass(frozen=True)
class Phase:
    """The tasks that are trained at once: one task, or all tasks together under the schedule `joint`."""

    index: int
    name: str
    tasks: tuple[Task, ...]


TENSORS = ("source_ids", "source_mask", "target_ids", "label_ids", "weight", "rows")
"""Tensor fields of a batch, in order."""


@dataclass
class Batch:
    """One micro-batch, right-padded.

    Attributes:
        source_ids: `[B, L]` int64, tokens of the prompt.
        source_mask: `[B, L]` int64, 1 on real tokens.
        target_ids: `[B, T]` int64 with IGNORE on padding; T may be 0 (encoder-only backbones).
        label_ids: `[B]` int64 row of the label head, IGNORE where the task has no closed label set.
        weight: `[B]` float32, 0 for examples that only fill the batch up, else 1.
        rows: `[B]` int64 position of each example in its split, -1 for fill-ups; of examples that a method has mixed in
            below 0.
        texts, tasks: inputs without the prompt (or whole prompts, where the method's router reads these) and their
            tasks' names, "" for fill-ups; empty unless the loader was asked for them.
        input_ids, input_mask: `[B, L']` as `source_ids` and `source_mask`, of inputs without the prompt, where the
            method's router reads these by the backbone; else None.
    """

    source_ids: Tensor
    source_mask: Tensor
    target_ids: Tensor
    label_ids: Tensor
    weight: Tensor
    rows: Tensor
    texts: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    input_ids: Tensor | None = None
    input_mask: Tensor | None = None

    def to(self, device: torch.device | str) -> Batch:
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def first(self, count: int) -> Batch:
        cut = self._each(lambda tensor: tensor[:count])
        return replace(cut, texts=self.texts[:count], tasks=self.tasks[:count])

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        held = {name: getattr(self, name) for name in (*TENSORS, "input_ids", "input_mask")}
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in held.items() if tensor is not None}
        return replace(self, **changed)

    @property
    def routed(self) -> tuple[Tensor, Tensor]:
        """Return ids and mask of what a router reads by the backbone: the inputs where they are there, else prompts."""
        if self.input_ids is None or self.input_mask is None:
            return self.source_ids, self.source_mask
        return self.input_ids, self.input_mask

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors in field order."""
        return tuple(getattr(self, name) for name in TENSORS)

    def __len__(self) -> int:
        return int(self.source_ids.shape[0])


class TextCodec(Protocol):
    """Text to token ids and back, as the backbone expects them; data code uses the tokenizer only through this."""

    pad_id: int
    max_source_tokens: int
    max_target_tokens: int
    fingerprint: str
    """A hash that changes whenever the same text could give other ids; part of the cache key of tokenised data."""
    needs_labels: bool
    """True for encoder-only backbones: every task must have a closed label set, targets stay empty."""
    kind: str
    """Name of the backbone's kind, for messages and records."""
    capabilities: Capabilities
    """The capabilities of the backbone."""
    mask_id: int
    """The id that replaces a hidden token; -1 where the tokenizer has no such token."""
    special_ids: frozenset[int]
    """Ids that are not part of a text."""
    vocabulary: int
    """The number of ids."""
    chat_template: str
    """Jinja source that renders conversations; "" where the tokenizer has none."""

    def encode_source(self, texts: Sequence[str]) -> list[list[int]]:
        """Return ids of whole prompts with the model's special tokens, **not** truncated."""
        ...

    def encode_target(self, texts: Sequence[str]) -> list[list[int]]:
        """Return ids of answers, ending in the end-of-sequence id, not truncated; empty lists if `needs_labels`."""
        ...

    def encode_chat(self, conversations: Sequence[Sequence[tuple[str, str]]], template: str) -> list[list[int]]:
        """Return ids of conversations of (role, content) up to where the assistant answers, **not** truncated."""
        ...

    def encode_chat_answers(
        self,
        conversations: Sequence[Sequence[tuple[str, str]]],
        answers: Sequence[Sequence[tuple[str, str]]],
        template: str,
    ) -> list[list[int]]:
        """Return ids of answers, messages of the assistant, with what the template puts behind them, ending in the
        end-of-sequence id, not truncated."""
        ...

    def clip(self, text: str, tokens: int) -> str:
        """Return the longest prefix of `text` that has at most `tokens` tokens (no special tokens counted)."""
        ...

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary has it, for people to read."""
        ...

    def shown(self, ids: Sequence[int]) -> str:
        """Return the text of ids with special tokens, for people to read."""
        ...

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of generated ids, without special tokens and outer white space."""
        ...


@dataclass
class Score:
    """One cell of the accuracy matrix with what is needed to trust it.

    Attributes:
        value: 0 to 100.
        count: number of test examples behind it.
        extra: further named numbers of the same evaluation (`off_task`, `empty`, `precision`, ...).
    """

    value: float
    count: int
    extra: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Mixture:
    """The adapters of each example, with their weights.

    Attributes:
        names: the N adapters.
        weights: `[B, N]`; a row of zeros is the bare backbone. They may carry gradients.
        heads: adapter whose label head answers each example, for head rule `label_count`; else empty.
        unpruned: the weights before small ones were set to zero, for reports; None: these.
        ood_scores: `[B]` out-of-distribution scores from 0 to 1, of routers of snapshots that have such a score; else
            None.
        ood_distances: `[B]` the distances behind these scores, which have no upper limit; else None.
        unknown: `[B]` bool, which texts are of no learned task (`raycl.routing.unknown_texts`); None: not known.
        by_text: how probable each adapter is for a text that is read in no prompt, of routers that read prompts and
            know how texts are without them; else None.
    """

    names: tuple[str, ...]
    weights: Tensor
    heads: tuple[str, ...] = ()
    unpruned: Mixture | None = None
    ood_scores: Tensor | None = None
    ood_distances: Tensor | None = None
    unknown: Tensor | None = None
    by_text: Mixture | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.weights.shape)
        assert len(shape) == 2 and shape[1] == len(self.names), f"weights are {shape} for {len(self.names)} adapters"
        assert len(set(self.names)) == len(self.names), f"an adapter stands twice in {self.names}"

    @property
    def bare(self) -> list[bool]:
        """The flags of the texts that are of no learned task and therefore have no adapters."""
        if self.unknown is None:
            return [False] * len(self.weights)
        places: list[bool] = (self.unknown & (self.weights == 0).all(1).cpu()).tolist()
        return places

    def active(self) -> list[list[tuple[int, float]]]:
        """Return the columns and weights of each example's active adapters."""
        rows: list[list[float]] = self.weights.tolist()
        return [[(column, weight) for column, weight in enumerate(row) if weight] for row in rows]

    def over(self, names: Collection[str]) -> Mixture:
        """Return the same without adapters that have none of these names."""
        columns = [column for column, name in enumerate(self.names) if name in names]
        if len(columns) == len(self.names):
            return self
        return replace(self, names=tuple(self.names[column] for column in columns), weights=self.weights[:, columns])

    def on(self, device: torch.device) -> Mixture:
        """Return the same with its weights on `device`."""
        return replace(self, weights=self.weights.to(device))

    @staticmethod
    def same(weights: Mapping[str, float], examples: int) -> Mixture:
        """Return the same mixture for each of `examples` examples."""
        row = torch.tensor([list(weights.values())], dtype=torch.float32).reshape(1, len(weights))
        return Mixture(tuple(weights), row.expand(examples, -1))

    @staticmethod
    def stacked(mixtures: Sequence[Mixture]) -> Mixture:
        """Return the examples of several mixtures below each other, over the adapters of all."""
        names = tuple(dict.fromkeys(name for mixture in mixtures for name in mixture.names))
        column_of = {name: number for number, name in enumerate(names)}
        rows: list[list[float]] = []  # lists, because tensors of one row cost more than their numbers
        for mixture in mixtures:
            columns = [column_of[name] for name in mixture.names]
            for weights in mixture.weights.tolist():
                row = [0.0] * len(names)
                for column, weight in zip(columns, weights, strict=True):
                    row[column] = weight
                rows.append(row)
        return Mixture(names, torch.tensor(rows, dtype=torch.float32).reshape(len(rows), len(names)))


@dataclass(frozen=True)
class AdapterState:
    """The tensors and settings of an adapter, on the CPU.

    Attributes:
        linears: path of a linear inside the backbone's model -> A `[r, D]` and B `[O, r]`; ranks may differ. Of a
            prefix of r positions: keys `[r, D]` and values `[D, r]`, at an attention layer's output projection.
        scale: the update of a linear is `scale * B A`, or `scale * B f(A x)` with an activation f.
        prompt: `[P, D]` soft prompt, or None.
        labels: label texts of the head's rows; empty where there is no head.
        head_weight: `[C, D]` weights of the head. head_bias: `[C]` biases.
        activation: the activation f of its linears.
        magnitudes: path -> `[O]` norms that the rows of the linear's weight have with the update (DoRA, Liu et al.
            2024); empty: the update is added and nothing else.
        copies: path of an embedding or a linear -> the weight that takes the place of its own.
    """

    linears: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    scale: float = 1.0
    prompt: Tensor | None = None
    labels: tuple[str, ...] = ()
    head_weight: Tensor | None = None
    head_bias: Tensor | None = None
    activation: Activation = ""
    magnitudes: dict[str, Tensor] = field(default_factory=dict)
    copies: dict[str, Tensor] = field(default_factory=dict)

    @property
    def is_alone(self) -> bool:
        """Return whether it is no sum with other adapters."""
        return bool(self.magnitudes or self.copies)

    @cached_property
    def rank(self) -> int:
        """The largest rank of its linears; 0 if it has none."""
        return max((int(a.shape[0]) for a, _ in self.linears.values()), default=0)

    def tensors(self) -> Mapping[str, Tensor]:
        """Return everything that it holds by name: `<path>.lora_A`, `<path>.lora_B`, `<path>.lora_magnitude_vector`,
        `<path>.lora_copy`, `prompt`, `head.weight`, `head.bias`."""
        tensors: dict[str, Tensor] = {}
        for path, (low, high) in self.linears.items():
            tensors[f"{path}.lora_A"], tensors[f"{path}.lora_B"] = low, high
        tensors |= {f"{path}{MAGNITUDE}": norms for path, norms in self.magnitudes.items()}
        tensors |= {f"{path}{COPY}": weight for path, weight in self.copies.items()}
        if self.prompt is not None:
            tensors["prompt"] = self.prompt
        if self.head_weight is not None and self.head_bias is not None:
            tensors["head.weight"], tensors["head.bias"] = self.head_weight, self.head_bias
        return tensors

    @staticmethod
    def from_tensors(
        tensors: Mapping[str, Tensor], scale: float, labels: Sequence[str], activation: Activation = ""
    ) -> AdapterState:
        """Invert `tensors`."""
        paths = [name.removesuffix(".lora_A") for name in tensors if name.endswith(".lora_A")]
        linears = {path: (tensors[f"{path}.lora_A"], tensors[f"{path}.lora_B"]) for path in paths}
        head = tensors.get("head.weight"), tensors.get("head.bias")
        copies = {name.removesuffix(COPY): tensors[name] for name in tensors if name.endswith(COPY)}
        norms = {path: tensors[path + MAGNITUDE] for path in paths if path + MAGNITUDE in tensors}
        return AdapterState(linears, scale, tensors.get("prompt"), tuple(labels), *head, activation, norms, copies)


@dataclass(frozen=True)
class RouterState:
    """The state that serving needs to choose adapters as training did.

    Attributes:
        kind: name of the router's kind.
        settings: JSON-able settings.
        tensors: `<what>/<adapter or task>` -> values on the CPU, so that an adapter or task can be removed.
        encoder: settings of the sentence encoder, or None for kinds that read no text.
        encoder_sha256: hash of that encoder.
        package: `name version` of the package that the kind comes from; empty: raycl.
    """

    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    encoder: dict[str, Any] | None = None
    encoder_sha256: str = ""
    package: str = ""
