"""L2P's router: a pool of prompts with learned keys, of which each text gets the ones whose keys are nearest.

The query of a text is the mean of the backbone's last hidden states over its tokens, without adapters, padding or
neighbours (the authors' configs select by majority of the batch, which is left out). The prompts
with the largest cosine of key and query are active, each with weight 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from raycl.backbone.base import mean_pooled
from raycl.routing.router import Need, Owners, PromptRouter, TrainedRouting, uniform
from raycl.routing.sentence_encoder import SentenceEncoder
from raycl.types import Mixture, RouterState


class PromptPool(TrainedRouting):
    """The keys of a pool.

    Attributes:
        keys: `[N, D]`, one for each prompt.
        names: names of the prompts. dimensions: D of queries and keys.
        top_k: number of prompts that a text gets.
    """

    def __init__(self, names: Sequence[str], dimensions: int, top_k: int, seed: int, device: Any = "cpu") -> None:
        """Draw keys from U(-1, 1); in the authors' code they are from U(0, 0.01), in EPI's L2P zeros."""
        super().__init__()
        self.names, self.dimensions, self.top_k = tuple(names), dimensions, top_k
        draw = torch.Generator().manual_seed(seed)
        self.keys = nn.Parameter(uniform((len(self.names), dimensions), 1.0, draw).to(device))

    def forward(self, query_BD: Tensor) -> Tensor:
        """Return cosines `[B, N]` of each query with each key."""
        return normalize(query_BD.float(), dim=1) @ normalize(self.keys.float(), dim=1).T

    def selected(self, query_BD: Tensor) -> Tensor:
        """Return `[B, N]`, 1 for the `top_k` prompts with the largest cosines, else 0; of equals the first."""
        with torch.no_grad():
            cosines_BN: Tensor = self(query_BD)
        order_BN = cosines_BN.argsort(dim=1, descending=True, stable=True)
        chosen_BK = order_BN[:, : self.top_k]
        return torch.zeros_like(order_BN, dtype=torch.float32).scatter_(1, chosen_BK, 1.0)


class PromptPoolRouter(PromptRouter):
    """The pool of a snapshot.

    Attributes:
        always: adapters that are active for every text (the label head).
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"hidden_states"})
    kind: ClassVar[str] = "prompt_pool"

    def __init__(self, pool: PromptPool, always: Sequence[str] = ()) -> None:
        self.pool, self.always, self.dimensions = pool, tuple(always), pool.dimensions

    def mixture(self, embeddings_BLD: Tensor, mask_BL: Tensor, tasks: Sequence[str] | None) -> Mixture:
        pool = self.pool
        if pool.keys.device != embeddings_BLD.device:
            pool.to(embeddings_BLD.device)
        weights_BN = pool.selected(mean_pooled(embeddings_BLD, mask_BL)).cpu()
        ones_BM = torch.ones(len(weights_BN), len(self.always))
        return Mixture((*pool.names, *self.always), torch.cat([weights_BN, ones_BM], dim=1))

    @classmethod
    def restored(cls, state: RouterState, owners: Owners, encoders: Sequence[SentenceEncoder] = ()) -> PromptPoolRouter:
        settings, keys_ND = state.settings, state.tensors["keys"]
        pool = PromptPool(settings["names"], keys_ND.shape[1], settings["top_k"], 0)
        pool.keys.data = keys_ND.float()
        return PromptPoolRouter(pool.requires_grad_(False), settings["always"])


def router_state(pool: PromptPool, keys_ND: Tensor, always: Sequence[str]) -> RouterState:
    """Return a pool as a snapshot holds it."""
    settings = {
        "names": list(pool.names),
        "top_k": pool.top_k,
        "always": list(always),
        "prompt_mixing": "concat",
        "head_rule": "logit",
    }
    return RouterState("prompt_pool", settings, {"keys": keys_ND.detach().float().cpu().clone()})
