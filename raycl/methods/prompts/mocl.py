"""MoCL: a module and a key for each task; a text gets the weighted sum of all modules by its cosines with the keys.

    module of a text = sum_i w_i module_i,   w = softmax(scale cos(q, k_1..k_t)),   loss + pull * mean (1 - cos(q, k_t))

The query q is the mean of the frozen model's last hidden states over the text's tokens. A task trains its module and
its key k_t, the latter by the task loss too, through the weights; modules and keys of earlier tasks are frozen (Wang et
al. 2024, "Rehearsal-Free Modular and Compositional Continual Learning for Language Models", section 3; softmax with
scale 8, the matching loss and keys from U(0, 1) as in the code, `key_encoder.py` and the scripts' `--matching_loss_v2`;
`weights=cosine` is its option `--direct_compose`). Encoder-only backbones mix label heads by the same weights:
probabilities, or logits where weights can be negative.
With `task_id` a test text gets the modules of its task and of those before it alone, as in the authors' runs
(`_compose_prompts` of `mtl_prefix_encoder.py` on T5, `keys[:task_id+1]` of `key_encoder.py` on LLaMA). The T5 code that
predicts task ids instead stops with a KeyError (`test_results['cil']`).
Where the authors' code differs:
- Modules are weighted for each text, never by the mean weights of its batch (their LLaMA code).
- Means are over real tokens, theirs on T5 over padding too.
- `value=prefix`: their weights mix the prefixes' keys and values, and on T5 one prefix serves a layer's self-attention
  in encoder and decoder and its cross-attention, inside one softmax with the text. Here each attention has a prefix
  of its own, with a softmax of its own, in which the positions of all prefixes compete with the weights as prior.
  `lora` (LLaMA) and `prompt` are exactly the sum above.
- Keys of prefixes are drawn from U(0, 1), and values start at zero; theirs are both drawn from U(0, 1).
- `value=lora`: their LLaMA code has no factor lora_alpha / r where modules are weighted, a dropout of 0.1, and no
  matching loss (`run_continual_causal_llama2.py` leaves its option out): lora_alpha=r, lora_dropout=0.1, pull=0 here.
- Each example's matching loss counts by its loss positions, so that N workers equal one.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from raycl.adapters.head import Rule as HeadRule
from raycl.backbone import Backbone, Output
from raycl.bank.tensor_groups import TensorGroups
from raycl.methods.base import Learned, RoutedConfig, State, under
from raycl.methods.context import TaskContext
from raycl.methods.lora_settings import LoraAlpha, Rank
from raycl.methods.prompts.task_module import ModulePerTask, ModuleSettings, PromptLength
from raycl.methods.queries import TextQueries, mean_by_positions
from raycl.methods.trained_adapters import is_trainable
from raycl.routing.task_keys import TaskKeys, Weighting
from raycl.types import Batch, Mixture, RouterState


class MoclConfig(ModuleSettings, RoutedConfig):
    """MoCL: a module and a key for each task, and a weighted sum of modules for each text."""

    name: Literal["mocl"] = "mocl"
    r: Rank = 4
    lora_alpha: LoraAlpha = 16.0
    prompt_length: PromptLength = 50
    weights: Weighting = Field(
        "softmax", description="of the modules of a text. softmax: over scaled cosines of query and keys; cosine: these"
    )
    scale: float = Field(8.0, gt=0, description="weights=softmax: what cosines are multiplied by")
    pull: float = Field(1.0, ge=0, description="weight of the matching loss, which draws a task's key to its texts")
    task_id: bool = Field(
        False,
        description="the task id of a test text is given: modules of its task and of those before it are composed, as "
        "in the authors' runs; false: modules of all tasks",
    )

    unused_for_single_task: ClassVar[tuple[str, ...]] = ("router_text", "weights", "scale", "pull", "task_id")
    """A module that is trained alone gets weight 1."""

    @property
    def needs_task(self) -> bool:
        """Return whether the task id is needed, because it restricts the composition."""
        return self.task_id

    @property
    def needs_texts(self) -> bool:
        """Return whether batches name their tasks, which they must where the task id restricts the composition."""
        return self.task_id

    @property
    def chooses_task(self) -> bool:
        return not self.task_id

    def unused_settings(self) -> Iterator[tuple[str, str]]:
        """Yield settings of other modules, and of other weights."""
        yield from super().unused_settings()
        if self.weights != "softmax":
            yield "scale", f"weights={self.weights}"


class Mocl(ModulePerTask):
    """Modules of all tasks, composed for each text by its query's cosines with their keys."""

    Config = MoclConfig

    def __init__(self, config: MoclConfig, backbone: Backbone, seed: int) -> None:
        """Attach the stack and the keys.

        Raises:
            BackboneError: `target_modules` matches no linear, or a prefix finds no query projection.
        """
        rule: HeadRule = "probability" if config.weights == "softmax" else "logit"
        super().__init__(config, backbone, seed, config.form(rule))
        width = int(backbone.model.config.hidden_size)
        self.keys: TaskKeys = TaskKeys(width, config.weights, config.scale, backbone.device)
        self.router_module = self.keys
        backbone.add_module("task_keys", self.keys)
        self._rule = rule
        self._queries = TextQueries(backbone, self.stack)

    def _create(self, task: str) -> None:
        super()._create(task)
        self.keys.begin(task, self.seed + 1 + self._number())

    def _is_trained(self, name: str, parameter: Tensor) -> bool:
        return (not self.task_id_given and name.startswith("task_keys.")) or is_trainable(name, parameter)

    def draw_keys(self, low: Tensor, outputs: int) -> None:
        nn.init.uniform_(low)  # as in the authors' code

    def route(self, batch: Batch) -> Mixture:
        if self.task_id_given:
            return super().route(batch)
        return Mixture(self.keys.names, self.keys.weights(self.keys(self._queries(batch))))

    def penalty(self, batch: Batch, output: Output) -> Tensor | None:
        """Return the matching loss: 1 minus the cosine of each text with the key of the task in training."""
        if not self.config.pull or self.task_id_given:
            return None
        distance_B = 1 - self.keys(self._queries(batch))[:, -1]
        return float(self.config.pull) * mean_by_positions(distance_B, batch)

    def end_task(self, context: TaskContext) -> Learned:
        """Module and key are frozen."""
        key = context.parameters.get("task_keys.key", self.keys.key)
        assert key is not None, "the task has a key"
        states = self._freeze(context)
        self.keys.end_key(key)
        return self._published(context, states)

    def _router(self) -> RouterState:
        """Return the keys; under schedule `separate` the task's own module."""
        if self.task_id_given:
            return RouterState("task", {"head_rule": self._rule})
        kind = "task_keys_given" if self.config.task_id else "task_keys"
        return RouterState(kind, {**self.keys.settings(), "head_rule": self._rule}, self.keys.tensors())

    def state_dict(self) -> State:
        values, tensors = super().state_dict()
        return {**values, "keys": list(self.keys.keys)}, tensors | {
            f"keys/{n}": t for n, t in self.keys.tensors().items()
        }

    def load_state_dict(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.keys.take_keys(values["keys"], under("keys/", tensors))
        super().load_state_dict(values, tensors)

    @classmethod
    def _without(cls, values: dict[str, Any], left: TensorGroups, task: str, adapters: Collection[str]) -> State:
        """Remove the task's key."""
        kept = [name for name in values["keys"] if name != task]
        return {**values, "keys": kept}, left.select(lambda name: name != f"keys/key/{task}")
