"""Progressive Prompts: every task trains a prompt of its own in front of those of all earlier tasks, which are frozen.

    input of task k:  [P_k; P_{k-1}; ..; P_1; x],  P_i [length, D]

The prompt begins as the embeddings of drawn tokens; with `prompt_form=mlp` what is trained is P' = MLP(P) + P, and that
is kept (Razdaibiedina et al. 2023, "Progressive Prompts: Continual Learning for Language Models", section 3; length 10
and learning rate 0.3 as in the authors' `T5_codebase`, which trains without the MLP unless `--prefix_MLP` names one).
The MLP is MLP1 of that code (two layers with tanh), which stops with a NameError there (`layer_norm`): only MLP2, of
three layers, runs.
At test the task id of a text picks the prompts with which its task was trained. Without task ids (`task_id=false`)
every text gets all of them.
Encoder-only backbones train a label head for each task (the authors' default): the task id picks the head too. Without
task ids the heads' probabilities compete, each head with the same weight.
Where the authors' code differs: it cuts prompts and text together at 512 positions, so that texts get shorter from task
to task; here `stream.max_source_tokens` is the text's alone. Its early stopping is `eval.select=best_dev`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from raycl.adapters.head import Rule as HeadRule
from raycl.adapters.soft_prompts import PLAIN, PromptForm, PromptUse
from raycl.backbone import Backbone
from raycl.methods.base import MethodConfig, State
from raycl.methods.per_task_adapter import AdapterForm, PerTaskAdapter
from raycl.types import Batch, Mixture, RouterState


class GrowingPromptsConfig(MethodConfig):
    """Settings of methods that put the prompt of each task in front of those of all earlier ones."""

    prompt_length: int = Field(10, ge=1, description="positions of the prompt of one task")

    def prompt_positions(self, tasks: int) -> int:
        return tasks * self.prompt_length


class ProgPromptConfig(GrowingPromptsConfig):
    """Progressive Prompts: a soft prompt for each task in front of those of all earlier tasks."""

    name: Literal["progprompt"] = "progprompt"
    prompt_form: Literal["plain", "mlp"] = Field(
        "plain", description="what a task trains. plain: the prompt P; mlp: also a residual MLP, P' = MLP(P) + P"
    )
    task_id: bool = Field(
        True,
        description="the task id of a test text is given, and picks the prompts of its task and of all earlier ones "
        "(as in the paper); false: every text gets all prompts",
    )

    unused_for_single_task: ClassVar[tuple[str, ...]] = ("task_id",)

    @property
    def needs_task(self) -> bool:
        """Return whether the task id is needed, because it selects the prompts."""
        return self.task_id

    @property
    def needs_texts(self) -> bool:
        """Return whether batches name their tasks, which they must where the task id selects the prompts."""
        return self.task_id


class GrowingPrompts(PerTaskAdapter):
    """A growing row of prompts, of which the newest is trained.

    Where the schedule gives the task id (`separate`), each prompt is trained and stands in front of texts alone.
    """

    def __init__(self, config: GrowingPromptsConfig, backbone: Backbone, seed: int, by_task: bool) -> None:
        """Start without prompts.

        Args:
            by_task: the task id of a text picks its prompts.
        """
        self._rule: HeadRule = "label_count" if by_task else "probability"  # the head that a mixture names
        self._by_task = by_task
        self._places: dict[str, int] = {}
        super().__init__(config, backbone, seed, AdapterForm((), 1.0, self._rule, prompts="concat"))

    def _prompt_use(self, adapter: str) -> PromptUse:
        """Order prompts in front of the text: in the order of their numbers, the largest first."""
        return PromptUse(True, (-self._places.get(adapter, 0), adapter))

    def _create_prompts(self, names: Sequence[str], form: PromptForm = PLAIN) -> None:
        """Have prompts in training, the first one that of the task, which stands in front of all others."""
        self.stack.begin_training(dict.fromkeys(names, 0), self.scale)
        self._begin_prompts(len(names), self.config.prompt_length, form)
        self._places[names[0]] = 1 + max(self._places.values(), default=0)

    def route(self, batch: Batch) -> Mixture:
        """Return all prompts, and the task's label head."""
        names = [*self._learned, *([self._task] if self._task else [])]
        mixture = Mixture.same(dict.fromkeys(names[-1:] if self.task_id_given else names, 1.0), len(batch))
        return replace(mixture, heads=tuple(names[-1:]) * len(batch)) if self._rule == "label_count" else mixture

    def _router(self) -> RouterState:
        """Return the prompts of the task and of all earlier ones by its task id; all of them without."""
        kind = "task" if self.task_id_given else "progressive" if self._by_task else "sum"
        places = {name: self._places[name] for name in self._learned}
        return RouterState(kind, {"prompt_mixing": "concat", "prompt_order": places, "head_rule": self._rule})

    def state_dict(self) -> State:
        values, tensors = super().state_dict()
        return {**values, "places": {name: self._places[name] for name in self._learned}}, tensors

    def load_state_dict(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        learned = dict(values["learned"])
        self._places |= {name: number for name, number in values["places"].items() if name in learned}
        super().load_state_dict(values, tensors)


class ProgPrompt(GrowingPrompts):
    """Prompts of which those of earlier tasks are frozen."""

    Config = ProgPromptConfig

    def __init__(self, config: ProgPromptConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed, by_task=config.task_id)

    def _create(self, task: str) -> None:
        self._create_prompts([task], PromptForm(self.config.prompt_form))
