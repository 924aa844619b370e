"""Everything one worker needs to run a stream, as one bundle, and the metadata that goes into every result."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from raycl.backbone import Backbone
from raycl.data.router_texts import RouterTexts
from raycl.data.stream import Stream
from raycl.generation.grammars import Grammar, Grammars, forms_of
from raycl.methods.base import Method
from raycl.methods.modifier import Modifiers
from raycl.metrics.settings import EvalConfig
from raycl.plugins import Used
from raycl.training.definition.inputs import Inputs
from raycl.training.definition.settings import BankConfig, CheckpointConfig, EngineConfig
from raycl.training.definition.task_order import Schedule
from raycl.training.optimizers.settings import TrainConfig
from raycl.training.workers.distributed import load_parameters
from raycl.types import Phase


@dataclass(frozen=True)
class RunInfo:
    """The identity of a run.

    Attributes:
        tree: the resolved config. fingerprint: fingerprint of its parts that can change a result.
        singles: task -> score of the task trained alone by the same method, for FWT.
        replaces: fingerprint of the config that the run had so far, where it continues with more tasks.
        plugins: parts of other packages that it uses, which its records name (`raycl.plugins`).
        inputs: fingerprints of what it reads (`raycl.training.definition.inputs`); empty: nothing is to be learned.
    """

    seed: int
    tree: dict[str, Any]
    fingerprint: str
    singles: dict[str, float] | None = None
    replaces: str = ""
    plugins: Used = field(default_factory=dict)
    inputs: Inputs = field(default_factory=dict)


@dataclass
class TrainingContext:
    """One worker's share of a run.

    Attributes:
        identity: hash of the pretrained backbone (`raycl.backbone.identity`).
    """

    info: RunInfo
    stream: Stream
    backbone: Backbone
    method: Method
    modifiers: Modifiers
    train: TrainConfig
    engine: EngineConfig
    evaluation: EvalConfig
    checkpoint: CheckpointConfig
    bank: BankConfig
    identity: str
    schedule: Schedule
    phases: tuple[Phase, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.phases = self.schedule.phases(self.stream)
        self.schedule.attach(self.method, self.backbone)

    def load_learned(self, parameters: Mapping[str, Tensor]) -> None:
        """Put what was learned by the end of a task into the backbone, as precise as the engine leaves it there."""
        own = dict(self.backbone.named_parameters())
        for name in parameters if self.engine.keeps_masters else ():
            own[name].data = own[name].data.float()
        load_parameters(self.backbone, parameters)

    @property
    def router_texts(self) -> RouterTexts:
        """The texts or ids that the method's router reads of rows."""
        method = self.method
        return RouterTexts(self.stream, self.backbone.codec, method.config.routed_text, method.encoder is None)

    @cached_property
    def forms(self) -> dict[str, Grammar]:
        """The form of each task's answers, of those that have one."""
        return forms_of(Grammars(self.backbone.codec.tokenizer, self.backbone.end_ids), self.evaluation.response_format)

    @property
    def own_adapters(self) -> bool:
        """Return whether adapters of a phase were trained on its own tasks alone."""
        return self.schedule.one_model_per_task or self.method.own_adapters
