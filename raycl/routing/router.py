"""The base class of routers: a mixture for each text, and the inputs that a router needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from raycl.errors import BankError, RetrievalError
from raycl.routing.sentence_encoder import SentenceEncoder
from raycl.routing.statistics import BareTexts
from raycl.types import Mixture, RouterState

Owners = Mapping[str, tuple[str, ...]]
"""Adapter -> tasks that it was trained on."""

Need = Literal["text", "embeddings", "hidden_states", "task_id"]
"""text: the text itself; embeddings: the backbone's token embeddings of the whole prompt; hidden_states: the backbone's
last hidden states of the whole prompt, without adapters; task_id: the text's task."""


class TrainedRouting(nn.Module):
    """A module that routes and is trained with the adapters (`raycl.methods.capabilities.RouterModule`).

    Attributes:
        dimensions: D of the vectors `[B, D]` that it reads.
    """

    dimensions: int

    def zero(self, examples: int) -> Tensor:
        """Return `[examples, 1]` zeros in whose graph every trained parameter of the module takes part."""
        anything_ED = torch.ones(examples, self.dimensions, device=next(self.parameters()).device)
        result: Tensor = self(anything_ED).sum(1, keepdim=True) * 0.0
        return result


class KeyedRouting(TrainedRouting):
    """A module that routes by one learned key for each task; subclasses register the parameter `key`.

    Attributes:
        key: key `[D]` of the task in training; None between tasks.
        keys: earlier task -> its key `[D]`, frozen, on the CPU.
        trainable: task in training, "" for none.
    """

    key: nn.Parameter | None

    def __init__(self, dimensions: int) -> None:
        super().__init__()
        self.dimensions = dimensions
        self.keys: dict[str, Tensor] = {}
        self.trainable: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The tasks of the weights' columns, in the order of learning."""
        return (*self.keys, self.trainable) if self.trainable else tuple(self.keys)

    def begin_key(self, task: str, key_D: Tensor) -> None:
        """Train a key for a new task from this one on."""
        assert task not in self.keys, f"'{task}' has a key already"
        self.key, self.trainable = nn.Parameter(key_D), task

    def end_key(self, key_D: Tensor) -> None:
        """Freeze the key of the task in training as exactly this."""
        task, self.trainable, self.key = self.trainable, "", None
        self.keys[task] = key_D.detach().float().cpu().clone()

    def take_keys(self, tasks: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        """Restore the keys of earlier tasks; tasks whose keys were removed are left out."""
        self.keys = {task: tensors[f"key/{task}"].float() for task in tasks if f"key/{task}" in tensors}

    def tensors(self) -> dict[str, Tensor]:
        """Return `key/<task>` of earlier tasks."""
        return {f"key/{task}": key for task, key in self.keys.items()}


def uniform(shape: tuple[int, ...], bound: float, draw: torch.Generator) -> Tensor:
    """Draw from U(-bound, bound) on the CPU, the same on every device."""
    return (torch.rand(shape, generator=draw) * 2 - 1) * bound


def columns_of(kind: str, columns: Mapping[str, int], tasks: Sequence[str] | None) -> Tensor:
    """Return `[B]`, the column of each text's task, for kinds of routers that need the task id.

    Args:
        columns: task -> its column.

    Raises:
        BankError: no tasks are given, or one is unknown.
    """
    if tasks is None:
        raise BankError(f"the snapshot's router is '{kind}', which needs the task of each text: name it")
    if unknown := sorted(set(tasks) - columns.keys()):
        raise BankError(f"no adapter was trained on {', '.join(unknown)}: expected {', '.join(columns)}")
    return torch.tensor([columns[task] for task in tasks], dtype=torch.long)


def heads_of_tasks(owners: Owners) -> dict[str, str]:
    """Return task -> the first adapter that was trained on it, whose head answers where heads go by the task."""
    return {task: name for name, tasks in reversed(list(owners.items())) for task in tasks}


class Router(ABC):
    """A router of a snapshot. Callers read `needs` and `chooses` instead of the class or the kind.

    Attributes:
        needs: inputs from which the mixture is computed; empty: none.
        chooses: the text or its task determines the mixture; False: every text gets the same one.
        encoder: its sentence encoder, or None.
    """

    needs: ClassVar[frozenset[Need]]
    chooses: ClassVar[bool]
    encoder: SentenceEncoder | None = None

    @classmethod
    @abstractmethod
    def restored(cls, state: RouterState, owners: Owners, encoders: Sequence[SentenceEncoder] = ()) -> Router:
        """Return the router that a snapshot holds.

        Args:
            encoders: those that are loaded; the router's own is used if it is among them.

        Raises:
            BankError: the adapters do not fit this kind. RetrievalError: another sentence encoder.
        """

    @abstractmethod
    def route(self, texts: Sequence[str], tasks: Sequence[str] | None) -> Mixture:
        """Return weights `[B, N]` over the snapshot's adapters.

        Args:
            tasks: task of each text where it is known; kinds that work without a task id ignore it.

        Raises:
            BankError: `needs` names an input that is not given.
        """

    def route_embeddings(self, embeddings_BLD: Tensor, mask_BL: Tensor, tasks: Sequence[str] | None = None) -> Mixture:
        """Return weights `[B, N]` from the backbone's vectors, for routers that need `embeddings` or `hidden_states`.

        Args:
            tasks: task of each text where it is known; kinds that work without a task id ignore it.

        Raises:
            BankError: `needs` names the task id, and it is not given.
        """
        raise AssertionError(f"{type(self).__name__} needs {', '.join(sorted(self.needs)) or 'nothing'}: call route")

    def unknown_above(self, false_alarms: float) -> float:
        """Return the out-of-distribution distance above which a text is of no learned task.

        Args:
            false_alarms: the largest share of texts of the learned tasks that may be above it.

        Raises:
            RetrievalError: nothing is kept of the tasks' texts that distances could be compared with, or too little.
        """
        raise RetrievalError(
            "its router keeps no statistics of the tasks' texts, with which a text of none of them would be found"
        )

    @property
    def reads_task(self) -> bool:
        """Return whether the mixture depends on the task of a text, where it is given."""
        return "task_id" in self.needs

    @classmethod
    def selected(cls, state: RouterState, dev: Mapping[str, Tensor]) -> RouterState:
        """Return the state with the kind of router that suits these tasks best, where a kind is selected at all.

        Args:
            dev: task -> queries of its dev texts.
        """
        return state

    @classmethod
    def own_weights(cls, state: RouterState, adapters: Collection[str]) -> dict[str, float] | None:
        """Return one weight for each of the adapters of a task that has several, for use without a router.

        They are the means over texts of the task; None: this kind has none.
        """
        return None

    @classmethod
    def with_task(
        cls, state: RouterState, task: str, queries_BC: Tensor, select: bool
    ) -> tuple[RouterState, list[str]]:
        """Return the state with a task that was learned elsewhere, and the names that its adapter gets.

        Args:
            queries_BC: vectors of a few of the task's texts, as `encoder` computes them.
            select: also select the kind anew, as `selected` does.

        Raises:
            BankError: this kind does not know tasks by statistics of their texts alone.
        """
        raise BankError(
            f"router '{state.kind}' cannot select '{task}' by examples, since only routers that know tasks by "
            "statistics of their texts alone can (keys, discriminant): expected a snapshot with one of these, or no "
            "examples"
        )

    @classmethod
    def task_of(cls, tensor: str) -> str:
        """Return the task of a tensor of the router's state, by the tensor's name; "": all tasks share it."""
        return tensor.partition("/")[2]


class PromptRouter(Router):
    """A router that reads prompts with the backbone.

    Attributes:
        dimensions: D of the vectors that it has learned on.

        bare: statistics of each task's texts without its prompt.

    Class attributes:
        kind: its name in snapshots.
    """

    dimensions: int
    bare: BareTexts = BareTexts()
    kind: ClassVar[str]
    chooses = True

    def route(self, texts: Sequence[str], tasks: Sequence[str] | None) -> Mixture:
        """Refuse texts alone, which are not enough.

        Raises:
            BankError: always.
        """
        raise BankError(
            f"the snapshot's router is '{self.kind}', which reads prompts with the backbone: use it beside the model"
        )

    def unknown_above(self, false_alarms: float) -> float:
        return self.bare.calibrated().threshold(false_alarms)

    @abstractmethod
    def mixture(self, embeddings_BLD: Tensor, mask_BL: Tensor, tasks: Sequence[str] | None) -> Mixture:
        """Return weights `[B, N]` from vectors of those dimensions; see `route_embeddings`."""

    @torch.no_grad()
    def route_embeddings(self, embeddings_BLD: Tensor, mask_BL: Tensor, tasks: Sequence[str] | None = None) -> Mixture:
        """Return weights `[B, N]` from the backbone's vectors.

        Raises:
            RetrievalError: they have other dimensions. BankError: `needs` names the task id, and it is not given.
        """
        if embeddings_BLD.shape[-1] != self.dimensions:
            raise RetrievalError(
                f"the router '{self.kind}' was learned on vectors of {self.dimensions} dimensions, this backbone's "
                f"have {embeddings_BLD.shape[-1]}: use the backbone that the snapshot was trained on"
            )
        return self.mixture(embeddings_BLD, mask_BL, tasks)
