"""GainLoRA's router: every task has a gate, which says how much of the task's adapter a text gets.

    u = SiLU(U SiLU(D e)),    g = |2 sigmoid(4 cos(k, u)) - 1|

e: `[d]`, the mean of the text's raw token embeddings; D: `[p, d]`, U: `[d, p]` and k: `[d]` of each task. Gates do not
compete: each lies in [0, 0.964], whatever the others are. They depend on the text's own tokens alone: padding takes no
part, and neither do neighbours. Computed in float32 whatever the model is in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, silu

from raycl.backbone.base import mean_pooled
from raycl.errors import RetrievalError
from raycl.routing.router import Need, Owners, PromptRouter, TrainedRouting, uniform
from raycl.routing.sentence_encoder import SentenceEncoder
from raycl.types import Mixture, RouterState

PARTS = ("down", "up", "key")
"""D, U and k by name."""

LEAST_GATE = 1e-30
"""Smallest gate: at exactly zero an adapter's labels would count as unknown."""


class TaskGates(TrainedRouting):
    """The gates of all tasks.

    Attributes:
        down, up, key: tensors of the task in training; None between tasks.
        trainable: task in training, "" for none.
        frozen: earlier task -> its tensors by `PARTS`, float32 on the CPU, in the order of learning.
    """

    def __init__(self, dimensions: int, width: int, device: torch.device | str = "cpu") -> None:
        """Start without gates.

        Args:
            width: p.
        """
        super().__init__()
        self.dimensions = dimensions
        self.width = width
        self.device = device
        for part in PARTS:
            self.register_parameter(part, None)
        self.down: nn.Parameter | None
        self.up: nn.Parameter | None
        self.key: nn.Parameter | None
        self.trainable: str = ""
        self.frozen: dict[str, dict[str, Tensor]] = {}
        self._stacked: dict[str, Tensor] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The tasks of the gates' columns, in the order of learning."""
        return (*self.frozen, self.trainable) if self.trainable else tuple(self.frozen)

    # ---- a task ----------------------------------------------------------------------------------------------

    def begin(self, task: str, seed: int) -> None:
        """Begin a gate: D and U of the previous task, or drawn as torch draws linears; k from U(-1, 1)."""
        assert task not in self.frozen, f"'{task}' has a gate already"
        draw = torch.Generator().manual_seed(seed)
        d, p = self.dimensions, self.width
        drawn = {
            "down": uniform((p, d), d**-0.5, draw),
            "up": uniform((d, p), p**-0.5, draw),
            "key": uniform((d,), 1.0, draw),
        }
        if self.frozen:
            last = next(reversed(self.frozen.values()))
            drawn |= {part: last[part].clone() for part in ("down", "up")}
        self.trainable = task
        for part, value in drawn.items():
            setattr(self, part, nn.Parameter(value.to(self.device)))

    def end(self, values: Mapping[str, Tensor]) -> None:
        """Freeze the gate of the task in training, which becomes exactly `values`."""
        task, self.trainable = self.trainable, ""
        for part in PARTS:
            setattr(self, part, None)
        self.freeze({**self.frozen, task: values})

    def freeze(self, gates: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Set the frozen gates of earlier tasks."""
        self.frozen = {
            task: {part: held[part].detach().float().cpu().clone() for part in PARTS} for task, held in gates.items()
        }
        self._stacked = {}

    # ---- gates -----------------------------------------------------------------------------------------------

    def forward(self, mean_BD: Tensor) -> Tensor:
        """Return gates `[B, T]` over `names`, float32.

        Args:
            mean_BD: see `mean_embedding`.

        Raises:
            RetrievalError: no task was learned yet.
        """
        if not self.names:
            raise RetrievalError("no task has been learned yet: there are no gates")
        with torch.autocast(mean_BD.device.type, enabled=False):
            columns = [gates(mean_BD, self._earlier(mean_BD.device))] if self.frozen else []
            if self.trainable:
                trained = {part: getattr(self, part).float()[None] for part in PARTS}
                columns.append(gates(mean_BD, trained))
            return torch.cat(columns, dim=1)

    def _earlier(self, device: torch.device) -> dict[str, Tensor]:
        """Return the frozen gates by part, each `[T, ...]`."""
        if not self._stacked or self._stacked["key"].device != device:
            held = self.frozen.values()
            self._stacked = {part: torch.stack([gate[part] for gate in held]).to(device) for part in PARTS}
        return self._stacked


class GateRouter(PromptRouter):
    """The gates of a snapshot, over the backbone's token embeddings of whole prompts."""

    needs: ClassVar[frozenset[Need]] = frozenset({"embeddings"})
    kind: ClassVar[str] = "gates"

    def __init__(self, gates: TaskGates) -> None:
        self.gates = gates
        self.dimensions: int = gates.dimensions

    def mixture(self, embeddings_BLD: Tensor, mask_BL: Tensor, tasks: Sequence[str] | None) -> Mixture:
        return Mixture(self.gates.names, self.gates(mean_embedding(embeddings_BLD, mask_BL)).cpu())

    @classmethod
    def restored(cls, state: RouterState, owners: Owners, encoders: Sequence[SentenceEncoder] = ()) -> GateRouter:
        tasks = [task for task in state.settings["tasks"] if f"key/{task}" in state.tensors]
        held = {task: {part: state.tensors[f"{part}/{task}"] for part in PARTS} for task in tasks}
        width, dimensions = next(iter(held.values()))["down"].shape if held else (0, 0)
        task_gates = TaskGates(dimensions, width)
        task_gates.freeze(held)
        return GateRouter(task_gates)


def router_state(task_gates: TaskGates, settings: Mapping[str, Any]) -> RouterState:
    """Return gates as a snapshot holds them."""
    tensors = {f"{part}/{task}": tensor for task, held in task_gates.frozen.items() for part, tensor in held.items()}
    return RouterState("gates", {**settings, "tasks": list(task_gates.frozen)}, tensors)


def mean_embedding(embeddings_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """Return e, the mean over real tokens, `[B, d]` in float32; 0 for an example without tokens."""
    return mean_pooled(embeddings_BLD.float(), mask_BL)


def features(mean_BD: Tensor, down_TPD: Tensor, up_TDP: Tensor) -> tuple[Tensor, Tensor]:
    """Return SiLU(D e) `[B, T, p]` and u `[B, T, d]` of T gates."""
    low_BTP = silu(torch.einsum("bd,tpd->btp", mean_BD, down_TPD))
    return low_BTP, silu(torch.einsum("btp,tdp->btd", low_BTP, up_TDP))


def gates(mean_BD: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
    """Return g `[B, T]` of T gates.

    Args:
        parts: `PARTS` -> `[T, ...]`.
    """
    _, u_BTD = features(mean_BD, parts["down"], parts["up"])
    cosine_BT = cosine_similarity(u_BTD, parts["key"][None], dim=-1)
    return (2 * torch.sigmoid(4 * cosine_BT) - 1).abs().clamp_min(LEAST_GATE)
