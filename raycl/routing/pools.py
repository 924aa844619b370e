"""Routers over a pool of adapters that does not grow: L2P's prompts with learned keys, and a mixture of LoRA experts.

The query q `[D]` of a text is the mean of the backbone's last hidden states over its tokens, without adapters. So
weights depend on the text alone, not on padding or neighbours (the authors' configs of L2P select by majority of the
batch, which is left out). L2P: the prompts with the largest cosine of key and query are active, each with weight 1.
Experts: `w = softmax(G q)`, with G `[N, D]` learned with the experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from raycl.backbone.base import mean_pooled
from raycl.routing.router import Need, Owners, PromptRouter, TrainedRouting, uniform
from raycl.routing.sentence_encoder import SentenceEncoder
from raycl.types import Mixture, RouterState


class AdapterPool(TrainedRouting, ABC):
    """A pool of adapters.

    Attributes:
        names: names of the N adapters. dimensions: D of queries.
    """

    def __init__(self, names: Sequence[str], dimensions: int) -> None:
        super().__init__()
        self.names: tuple[str, ...] = tuple(names)
        self.dimensions = dimensions

    @abstractmethod
    def selected(self, query_BD: Tensor) -> Tensor:
        """Return the weights `[B, N]` of the adapters, float32."""

    def _drawn(self, bound: float, seed: int, device: Any) -> nn.Parameter:
        """Draw `[N, D]` from U(-bound, bound)."""
        draw = torch.Generator().manual_seed(seed)
        return nn.Parameter(uniform((len(self.names), self.dimensions), bound, draw).to(device))


class PromptPool(AdapterPool):
    """The keys of a pool of prompts.

    Attributes:
        keys: `[N, D]`, one for each prompt.
        top_k: number of prompts that a text gets.
    """

    def __init__(self, names: Sequence[str], dimensions: int, top_k: int, seed: int, device: Any = "cpu") -> None:
        """Draw keys from U(-1, 1); in the authors' code they are from U(0, 0.01), in EPI's L2P zeros."""
        super().__init__(names, dimensions)
        self.top_k = top_k
        self.keys: nn.Parameter = self._drawn(1.0, seed, device)

    def forward(self, query_BD: Tensor) -> Tensor:
        """Return cosines `[B, N]` of each query with each key."""
        return normalize(query_BD.float(), dim=1) @ normalize(self.keys.float(), dim=1).T

    @torch.no_grad()
    def selected(self, query_BD: Tensor) -> Tensor:
        """Return `[B, N]`, 1 for the `top_k` prompts with the largest cosines, else 0; of equals the first."""
        cosines_BN: Tensor = self(query_BD)
        order_BN = cosines_BN.argsort(dim=1, descending=True, stable=True)
        return torch.zeros_like(order_BN, dtype=torch.float32).scatter_(1, order_BN[:, : self.top_k], 1.0)

    def state(self, keys_ND: Tensor, always: Sequence[str]) -> RouterState:
        """Return the pool with these keys as a snapshot holds it."""
        settings = {"names": list(self.names), "top_k": self.top_k, "always": list(always), "prompt_mixing": "concat"}
        tensors = {"keys": keys_ND.detach().float().cpu().clone()}
        return RouterState("prompt_pool", {**settings, "head_rule": "logit"}, tensors)


class ExpertGate(AdapterPool):
    """The linear layer over experts.

    Attributes:
        weight: G `[N, D]`.
    """

    def __init__(self, names: Sequence[str], dimensions: int, seed: int, device: Any = "cpu") -> None:
        """Draw G as torch draws linears."""
        super().__init__(names, dimensions)
        self.weight: nn.Parameter = self._drawn(dimensions**-0.5, seed, device)

    def forward(self, query_BD: Tensor) -> Tensor:
        """Return weights `[B, N]` that sum to 1, float32."""
        with torch.autocast(query_BD.device.type, enabled=False):
            return linear(query_BD.float(), self.weight.float()).softmax(-1)

    def selected(self, query_BD: Tensor) -> Tensor:
        weights_BN: Tensor = self(query_BD)
        return weights_BN

    def state(self, weight_ND: Tensor, always: Sequence[str]) -> RouterState:
        """Return the gate with these weights as a snapshot holds it."""
        settings = {"names": list(self.names), "always": list(always), "head_rule": "logit"}
        return RouterState("experts", settings, {"weight": weight_ND.detach().float().cpu().clone()})


class PoolRouter(PromptRouter):
    """The pool of a snapshot.

    Attributes:
        always: adapters that are active for every text (the label head).
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"hidden_states"})

    def __init__(self, pool: AdapterPool, always: Sequence[str] = ()) -> None:
        self.pool: AdapterPool = pool.requires_grad_(False)
        self.always: tuple[str, ...] = tuple(always)
        self.dimensions: int = pool.dimensions

    def mixture(self, embeddings_BLD: Tensor, mask_BL: Tensor, tasks: Sequence[str] | None) -> Mixture:
        pool = self.pool.to(embeddings_BLD.device)
        weights_BN = pool.selected(mean_pooled(embeddings_BLD, mask_BL)).cpu()
        ones_BM = torch.ones(len(weights_BN), len(self.always))
        return Mixture((*pool.names, *self.always), torch.cat([weights_BN, ones_BM], dim=1))


class PromptPoolRouter(PoolRouter):
    """The prompts whose keys are nearest (L2P)."""

    kind: ClassVar[str] = "prompt_pool"

    @classmethod
    def restored(cls, state: RouterState, owners: Owners, encoders: Sequence[SentenceEncoder] = ()) -> PromptPoolRouter:
        settings, keys_ND = state.settings, state.tensors["keys"]
        pool = PromptPool(settings["names"], keys_ND.shape[1], settings["top_k"], 0)
        pool.keys.data = keys_ND.float()
        return cls(pool, settings["always"])


class ExpertRouter(PoolRouter):
    """The experts of a snapshot, weighted by the softmax of a linear layer."""

    kind: ClassVar[str] = "experts"

    @classmethod
    def restored(cls, state: RouterState, owners: Owners, encoders: Sequence[SentenceEncoder] = ()) -> ExpertRouter:
        weight_ND = state.tensors["weight"]
        gate = ExpertGate(state.settings["names"], weight_ND.shape[1], 0)
        gate.weight.data = weight_ND.float()
        return cls(gate, state.settings["always"])
