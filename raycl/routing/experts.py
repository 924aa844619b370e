"""The router of a mixture of LoRA experts: the softmax of a linear layer over a text's mean hidden state.

    w = softmax(G q)

G: `[N, D]`, learned with the experts; q: `[D]`, the mean of the backbone's last hidden states over the text's tokens,
without adapters. So w depends on the text alone, not on padding or neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from raycl.backbone.base import mean_pooled
from raycl.routing.router import Need, Owners, PromptRouter, TrainedRouting, uniform
from raycl.routing.sentence_encoder import SentenceEncoder
from raycl.types import Mixture, RouterState


class ExpertGate(TrainedRouting):
    """The linear layer.

    Attributes:
        weight: G `[N, D]`. names: names of the N experts.
    """

    def __init__(self, names: Sequence[str], dimensions: int, seed: int, device: Any = "cpu") -> None:
        """Draw G as torch draws linears."""
        super().__init__()
        self.names, self.dimensions = tuple(names), dimensions
        draw = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(uniform((len(self.names), dimensions), dimensions**-0.5, draw).to(device))

    def forward(self, query_BD: Tensor) -> Tensor:
        """Return weights `[B, N]` that sum to 1, float32."""
        with torch.autocast(query_BD.device.type, enabled=False):
            return linear(query_BD.float(), self.weight.float()).softmax(-1)


class ExpertRouter(PromptRouter):
    """The experts of a snapshot.

    Attributes:
        always: adapters that are active for every text (the label head).
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"hidden_states"})
    kind: ClassVar[str] = "experts"

    def __init__(self, gate: ExpertGate, always: Sequence[str] = ()) -> None:
        self.gate, self.always, self.dimensions = gate, tuple(always), gate.dimensions

    def mixture(self, embeddings_BLD: Tensor, mask_BL: Tensor, tasks: Sequence[str] | None) -> Mixture:
        gate = self.gate
        if gate.weight.device != embeddings_BLD.device:
            gate.to(embeddings_BLD.device)
        weights_BN = gate(mean_pooled(embeddings_BLD, mask_BL)).cpu()
        ones_BM = torch.ones(len(weights_BN), len(self.always))
        return Mixture((*gate.names, *self.always), torch.cat([weights_BN, ones_BM], dim=1))

    @classmethod
    def restored(cls, state: RouterState, owners: Owners, encoders: Sequence[SentenceEncoder] = ()) -> ExpertRouter:
        weight_ND = state.tensors["weight"]
        gate = ExpertGate(state.settings["names"], weight_ND.shape[1], 0)
        gate.weight.data = weight_ND.float()
        return ExpertRouter(gate.requires_grad_(False), state.settings["always"])


def router_state(gate: ExpertGate, weight_ND: Tensor, always: Sequence[str]) -> RouterState:
    """Return a gate as a snapshot holds it."""
    settings = {"names": list(gate.names), "always": list(always), "head_rule": "logit"}
    return RouterState("experts", settings, {"weight": weight_ND.detach().float().cpu().clone()})
