"""MoCL's router: every learned task has a key, and a text gets all tasks' modules, weighted by cosines with their keys.

    w = softmax(scale cos(q, K))  or  w = cos(q, K),    q [B, D], K [T, D], w [B, T]

Where the task ids of texts are given, K are the keys of a text's task and of those that were learned before it, and the
modules of later tasks have weight 0. The query of a text is the mean of the backbone's last hidden states over its
tokens, without adapters, padding or neighbours. Weights are computed in float32 whatever the model's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from raycl.backbone.base import mean_pooled
from raycl.errors import RetrievalError
from raycl.routing.router import KeyedRouting, Need, Owners, PromptRouter, columns_of
from raycl.routing.sentence_encoder import SentenceEncoder
from raycl.types import Mixture, RouterState

Weighting = Literal["softmax", "cosine"]


class TaskKeys(KeyedRouting):
    """One key for each task."""

    def __init__(self, dimensions: int, weighting: Weighting, scale: float, device: Any = "cpu") -> None:
        super().__init__(dimensions)
        self.scale = scale
        self.weighting = weighting
        self.register_parameter("key", None)
        self._device = torch.device(device)

    def begin(self, task: str, seed: int) -> None:
        """Draw a key for a new task from U(0, 1) (the authors' code)."""
        drawn = torch.rand(self.dimensions, generator=torch.Generator().manual_seed(seed))
        self.begin_key(task, drawn.to(self._device))

    def forward(self, query_BD: Tensor) -> Tensor:
        """Return cosines `[B, T]` of each query with the key of each task in `names`; gradients reach the newest key
        alone.

        Raises:
            RetrievalError: no task was learned yet.
        """
        if not self.names:
            raise RetrievalError("no task has been learned yet: there are no keys to compare with")
        rows = [key.to(query_BD.device) for key in self.keys.values()]
        if self.key is not None:
            rows.append(self.key.float())
        return normalize(query_BD.float(), dim=1) @ normalize(torch.stack(rows), dim=1).T

    def weights(self, cosines_BT: Tensor, last_B: Tensor | None = None) -> Tensor:
        """Return the weights `[B, T]` of the tasks' modules.

        Args:
            last_B: column of each text's task; later columns get weight 0. None: no task is left out.
        """
        columns_T = torch.arange(cosines_BT.shape[1], device=cosines_BT.device)
        later_BT = None if last_B is None else columns_T > last_B.to(cosines_BT.device)[:, None]
        if self.weighting == "cosine":
            return cosines_BT if later_BT is None else cosines_BT.masked_fill(later_BT, 0.0)
        scaled_BT = self.scale * cosines_BT
        return (scaled_BT if later_BT is None else scaled_BT.masked_fill(later_BT, -torch.inf)).softmax(1)

    def settings(self) -> dict[str, Any]:
        """Return the JSON-able settings, everything but the keys."""
        weights = {"weights": self.weighting, "scale": self.scale}
        return {"dimensions": self.dimensions, **weights, "tasks": list(self.keys)}


class TaskKeysRouter(PromptRouter):
    """The keys of a snapshot."""

    needs: ClassVar[frozenset[Need]] = frozenset({"hidden_states"})
    kind: ClassVar[str] = "task_keys"

    def __init__(self, keys: TaskKeys, owners: Owners) -> None:
        self.keys = keys
        self.dimensions: int = keys.dimensions
        self._columns = {task: column for column, name in enumerate(keys.names) for task in owners.get(name, ())}

    def mixture(self, embeddings_BLD: Tensor, mask_BL: Tensor, tasks: Sequence[str] | None) -> Mixture:
        keys, last_B = self.keys, self._last(tasks)
        return Mixture(keys.names, keys.weights(keys(mean_pooled(embeddings_BLD, mask_BL)), last_B).cpu())

    def _last(self, tasks: Sequence[str] | None) -> Tensor | None:
        """Return the column of the last key that each text is compared with; None: of all."""
        return None

    @classmethod
    def restored(cls, state: RouterState, owners: Owners, encoders: Sequence[SentenceEncoder] = ()) -> TaskKeysRouter:
        settings = state.settings
        keys = TaskKeys(settings["dimensions"], settings["weights"], settings["scale"])
        keys.take_keys(settings["tasks"], state.tensors)
        return cls(keys, owners)


class GivenTaskKeysRouter(TaskKeysRouter):
    """The keys of a snapshot, of which each text gets those of its task and of the tasks before it."""

    needs: ClassVar[frozenset[Need]] = frozenset({"hidden_states", "task_id"})
    kind: ClassVar[str] = "task_keys_given"

    def _last(self, tasks: Sequence[str] | None) -> Tensor:
        """Return the column of each text's task."""
        return columns_of(self.kind, self._columns, tasks)
