"""L2P: a frozen model with a pool of prompts, of which each text gets the ones whose keys are nearest.

    loss - pull * mean over the selected prompts of cos(key, query)

The query is the mean of the frozen model's last hidden states over the text's tokens; the `top_k` prompts with the
largest cosines stand before the text, one after another in the order of the pool. Prompts, keys and the label head of
encoder-only backbones are trained on the tasks in turn, and shared by all of them (Wang et al. 2022, "Learning to
Prompt for Continual Learning", eq. 5; pool, lengths and weight as in TRACE's code).
Where code differs, the authors' for images (google-research/l2p), and for texts TRACE's and EPI's (model/l2p.py):
- The pull is a mean over the K selected prompts, as in EPI's code. The authors' (models/prompt.py, line 249) and
  TRACE's sum it, with weight 1.0 or 0.5 in the authors' configs and 0.5 in TRACE: `pull` = K times that weight is the
  same.
- The selected prompts stand in the order of the pool. In all three codes the one with the largest cosine is first (in
  the authors' configs, the one that most of the batch selects), so the same prompts may stand otherwise for each text.
- Selection is by example. The authors' configs take the K prompts that most of the batch selects, at test too.
- Keys begin as U(-1, 1); the authors' as U(0, 0.01) (flax's default), EPI's as zeros, and TRACE's are the means of the
  initial prompts and never updated, compared with mean input embeddings with padding.
- The authors' code (but for CORe50) and EPI's leave labels of other tasks out of the training loss of a task:
  `train.label_loss=task`.
- The authors' classifier reads the outputs at the prompts' positions; label heads here read those of the text.
- Each example's pull counts by its loss positions, so that N workers equal one.
"""

from functools import partial
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from raycl.adapters import AdapterStack
from raycl.adapters.soft_prompts import used_alike
from raycl.backbone import Backbone, Output
from raycl.methods.base import Learned, Method, RoutedConfig, in_head, phase_labels
from raycl.methods.context import TaskContext
from raycl.methods.queries import TextQueries, mean_by_positions
from raycl.methods.single_adapter import drawn_prompts
from raycl.methods.trained_adapters import head_adapter
from raycl.routing.pools import PromptPool
from raycl.types import AdapterState, Batch, Mixture, Phase


class L2pConfig(RoutedConfig):
    """L2P: a pool of prompts, of which each text selects some."""

    name: Literal["l2p"] = "l2p"
    pool_size: int = Field(10, ge=1, description="number of prompts in the pool")
    prompt_length: int = Field(5, ge=1, description="positions of one prompt")
    top_k: int = Field(3, ge=1, description="prompts that each text gets")
    pull: float = Field(0.5, ge=0, description="weight of the cosine between a text's query and its selected keys")

    task_id_in_training: ClassVar[bool] = False

    def prompt_positions(self, tasks: int) -> int:
        return self.top_k * self.prompt_length

    @model_validator(mode="after")
    def _pool_is_large_enough(self) -> Self:
        if self.top_k > self.pool_size:
            raise ValueError(
                f"top_k is {self.top_k} and pool_size {self.pool_size}: a text cannot get more prompts than there are"
            )
        return self


class L2p(Method):
    """One pool of prompts for all tasks."""

    Config = L2pConfig

    def __init__(self, config: L2pConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        names = [f"prompt{number:03d}" for number in range(config.pool_size)]
        self.stack: AdapterStack = AdapterStack(backbone.model, [])
        self.stack.begin_training(dict.fromkeys(names, 0), 1.0)
        use = partial(used_alike, "concat")
        backbone.prefix = drawn_prompts(backbone, self.stack, config.prompt_length, seed, use)
        width = int(backbone.model.config.hidden_size)
        self.pool: PromptPool = PromptPool(names, width, config.top_k, seed, backbone.device)
        self.router_module = self.pool
        backbone.add_module("prompt_pool", self.pool)
        self._queries = TextQueries(backbone, self.stack)

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """Prompts, keys and label head are trained, the backbone is frozen."""
        self.backbone.learn_labels(phase_labels(phase))
        for name, parameter in self.backbone.named_parameters():
            trained = name == "prefix.trainable" or name.startswith("prompt_pool.") or in_head(name, parameter)
            parameter.requires_grad_(trained)

    def route(self, batch: Batch) -> Mixture:
        return Mixture(self.pool.names, self.pool.selected(self._queries(batch)))

    def penalty(self, batch: Batch, output: Output) -> Tensor | None:
        """Pulls the selected keys towards the queries that selected them."""
        if not self.config.pull:
            return None
        query_BD = self._queries(batch)
        mean_B = (self.pool(query_BD) * self.pool.selected(query_BD)).sum(1) / self.config.top_k
        return -float(self.config.pull) * mean_by_positions(mean_B, batch)

    def end_task(self, context: TaskContext) -> Learned:
        """Return every prompt of the pool as an adapter, and the label head as one that is active for every text."""
        tensors = context.parameters
        head = head_adapter(self.backbone, tensors)
        always = list(head)
        prompts = zip(self.pool.names, tensors["prefix.trainable"], strict=True)
        head |= {name: AdapterState(prompt=prompt.clone()) for name, prompt in prompts}
        return Learned(head, router=self.pool.state(tensors["prompt_pool.keys"], always))
