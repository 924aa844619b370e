"""One set of bottleneck adapters trained on the tasks in turn (SeqAdapter; NCL-Adapter in ContinualLM).

    y = W x + B relu(A x),  A [k, D], B [O, k],  k = hidden width // reduction

The bottlenecks of Houlsby et al. 2019 ("Parameter-Efficient Transfer Learning for NLP", section 2.1) at both places of
a layer, after attention and after the feed-forward block, each k = D / 16 wide (`reduction_factor` in ContinualLM's
`config.py`). B begins at zero, so that the first forward pass is the backbone's, and the label head of encoder-only
backbones is trained with the adapters. Where this differs from both: the bottlenecks stand in parallel to the output
projections and read what these read (He et al. 2022, "parallel adapter"), they have no biases, and the backbone's layer
norms stay frozen (Houlsby et al. train them). ContinualLM has bottlenecks behind feed-forward blocks alone
(utils/model.py; `target_modules=[ffn.out]`), draws B with a deviation of 0.02 as it draws A
(networks/adapters/modeling.py), and trains the language head's dense layer, norm and bias too, which are frozen here.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field

from raycl.adapters import AdapterStack
from raycl.backbone import Backbone
from raycl.backbone.roles import linear_names
from raycl.methods.base import MethodConfig
from raycl.methods.lora_settings import TargetModules, kaiming
from raycl.methods.single_adapter import SingleAdapter


class SeqAdapterConfig(MethodConfig):
    """One set of bottleneck adapters that is trained on all tasks in turn (SeqAdapter)."""

    name: Literal["adapter"] = "adapter"
    reduction: int = Field(16, ge=1, description="the backbone's hidden width divided by that of the bottlenecks")
    target_modules: TargetModules = ("attention.out", "ffn.out")

    task_id_in_training: ClassVar[bool] = False


class SeqAdapter(SingleAdapter):
    """The frozen backbone with bottleneck adapters that every task overwrites."""

    Config = SeqAdapterConfig
    adapter = "adapter"
    compiles = True

    def __init__(self, config: SeqAdapterConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        paths = linear_names(backbone.model, config.target_modules)
        self.stack = AdapterStack(backbone.model, paths, activation="relu")
        width = max(1, int(backbone.model.config.hidden_size) // config.reduction)
        torch.manual_seed(seed)
        self.stack.begin_training({self.adapter: width}, 1.0, kaiming)
