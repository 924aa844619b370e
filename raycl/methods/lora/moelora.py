"""MoELoRA: a mixture of LoRA experts under a softmax router, all trained on the tasks in turn.

    y = W h + sum_n w_n s B_n A_n h,    w = softmax(G q),    s = alpha / r

Nothing is frozen, so it is a lower reference for methods that give each task an adapter: as `lora`, with more rank and
a router. Experts and router never know which task a text belongs to. The definition is that of the comparisons in CoIN
(Chen et al. 2024, "CoIN: A Benchmark of Continual Instruction Tuning for Multimodal Large Language Models"; code:
CoIN/peft/tuners/coinmoelora.py): all experts are active, G has no bias, and no term balances their load. Its 8 experts
share a rank of 128 (16 each) at a scale of 2: `r=16 lora_alpha=32`. Others of that name: Liu et al. 2023, whose gate
reads the task id, and Luo et al. 2024, with top-k experts and a contrastive term. MIGU cites the latter and compares "a
vanilla MoE with LoRA number equals to the task number" (section 4.1, table 2), whose router it does not describe; here
that is `experts` set to the number of tasks.

Deviations: A is drawn as `lora` draws it (CoIN: with a standard deviation of 0.01). Routing is by example, not by
token, with one router for all linears instead of one for each. It reads q, the mean of the frozen model's last hidden
states over the text's tokens, where CoIN's read each linear's inputs. So what a text gets does not change while its
answer is decoded, and the served mixture is the trained one. The label head of encoder-only backbones is trained with
the experts, as in `lora`.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from raycl.adapters import AdapterStack
from raycl.backbone import Backbone
from raycl.backbone.base import seed_all
from raycl.methods.base import Learned, Method, RoutedConfig, check_prompts, in_head, phase_labels
from raycl.methods.context import TaskContext
from raycl.methods.lora_settings import BY_LINEAR, LoraSettings
from raycl.methods.queries import TextQueries
from raycl.methods.trained_adapters import head_adapter
from raycl.routing.pools import ExpertGate
from raycl.types import Batch, Mixture, Phase, Task


class MoeLoraConfig(LoraSettings, RoutedConfig):
    """MoELoRA: LoRA experts that a router mixes for each text."""

    name: Literal["moelora"] = "moelora"
    experts: int = Field(8, ge=1, description="number of LoRA experts, each of rank r; usually the number of tasks")

    task_id_in_training: ClassVar[bool] = False
    takes: ClassVar[tuple[str, ...]] = BY_LINEAR


class MoeLora(Method):
    """Experts and a router that every task overwrites."""

    Config = MoeLoraConfig

    def __init__(self, config: MoeLoraConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        names = [f"expert{number:03d}" for number in range(config.experts)]
        self.stack: AdapterStack = AdapterStack(backbone.model, config.adapted(backbone.model))
        seed_all(seed, backbone.device)
        config.begin_training(self.stack, names)
        width = int(backbone.model.config.hidden_size)
        self.gate: ExpertGate = ExpertGate(names, width, seed, backbone.device)
        self.router_module = self.gate
        backbone.add_module("expert_gate", self.gate)
        self._queries = TextQueries(backbone, self.stack)

    def check(self, tasks: Sequence[Task]) -> None:
        check_prompts(self.config.name, tasks)

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """Experts, router and label head are trained, the backbone is frozen."""
        self.backbone.learn_labels(phase_labels(phase))
        for name, parameter in self.backbone.named_parameters():
            trained = ".lora_" in name or name.startswith("expert_gate.") or in_head(name, parameter)
            parameter.requires_grad_(trained)

    def route(self, batch: Batch) -> Mixture:
        return Mixture(self.gate.names, self.gate(self._queries(batch)))

    def end_task(self, context: TaskContext) -> Learned:
        """Return every expert as an adapter, and the label head as one that is active for every text."""
        tensors = context.parameters
        head = head_adapter(self.backbone, tensors)
        experts = self.stack.trainable_states(tensors)
        router = self.gate.state(tensors["expert_gate.weight"], list(head))
        return Learned(head | experts, router=router)
