"""The config tree of a run, and what follows from it: its fingerprint, folder and phases."""

import copy
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from raycl import config as configs
from raycl import plugins
from raycl.backbone import BackboneConfig
from raycl.backbone.load import because_of_kind, known_capabilities
from raycl.backbone.markup.chat_templates import with_template_files
from raycl.backbone.model_files import resolve as resolve_backbone
from raycl.config import Section, Tree, trust
from raycl.config.names import problem_of, shown
from raycl.config.trainer_names import batch_of_workers, rename_in
from raycl.config.trust import announce
from raycl.config.unused import refuse, unused_written
from raycl.data.benchmarks.orders import ALIASES, BUILTIN, ORDERS
from raycl.data.resolve import resolve
from raycl.data.settings import TaskSpec, with_specs
from raycl.data.sources.formats import AUTO, FORMATS
from raycl.data.sources.source import SourceFile
from raycl.data.stream import Stream, StreamConfig
from raycl.errors import ConfigError
from raycl.methods.registry import (
    DEFAULT_METHOD,
    METHODS,
    MODIFIER_NAMES,
    MODIFIERS,
    MethodChoice,
    ModifierChoice,
    method_class,
    method_config,
)
from raycl.metrics.per_example import METRICS
from raycl.metrics.settings import EvalConfig
from raycl.routing.routers import ROUTERS
from raycl.storage import Storage
from raycl.training.definition.inputs import Inputs
from raycl.training.definition.settings import (
    EXEMPT,
    BankConfig,
    CheckpointConfig,
    DeepSpeedConfig,
    EngineConfig,
    FSDPConfig,
    LaunchConfig,
    OutputConfig,
    TorchConfig,
)
from raycl.training.definition.task_order import SCHEDULES
from raycl.training.definition.training_context import RunInfo
from raycl.training.optimizers.registry import OPTIMIZERS
from raycl.training.optimizers.settings import TrainConfig
from raycl.training.setup.snapshot_start import read_start, refuse_changes
from raycl.training.tracking.trackers import TrackingConfig
from raycl.types import Phase

if TYPE_CHECKING:
    EngineChoice = EngineConfig
else:
    EngineChoice = Annotated[TorchConfig | FSDPConfig | DeepSpeedConfig, Field(discriminator="name")]

BUILT_IN: Mapping[plugins.Kind, frozenset[str]] = {
    "method": frozenset(METHODS),
    "router": frozenset(ROUTERS),
    "modifier": frozenset(MODIFIERS),
    "metric": frozenset(METRICS),
    "optimizer": frozenset(OPTIMIZERS),
    "format": frozenset({AUTO, *FORMATS}),
    "order": frozenset({BUILTIN, *ORDERS, *map(str.lower, ORDERS), *ALIASES}),
}
"""Kind -> names that no package can have."""

LABEL_HEAD = ("train.head_learning_rate", "train.label_loss")
GENERATION = ("stream.max_target_tokens", "stream.max_target_tokens_by_task", "eval.max_new_tokens")
"""Settings that act on label heads, and on texts that a backbone generates."""


class RunConfig(Section):
    """One continual-learning run."""

    seed: int = Field(42, ge=0, description="seed of all random draws: weights, rows, batches, dropout")
    stream: StreamConfig = StreamConfig()
    backbone: BackboneConfig = BackboneConfig()
    method: MethodChoice = Field(
        method_config({"name": DEFAULT_METHOD}), description="the continual-learning method, with its settings"
    )
    modifiers: dict[str, ModifierChoice] = Field(
        default_factory=dict, description="gradient modifiers by name, for example [migu]"
    )
    train: TrainConfig = TrainConfig()
    engine: EngineChoice = Field(TorchConfig(), description="what runs the optimizer, with its settings")
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    bank: BankConfig = BankConfig()
    launch: LaunchConfig = LaunchConfig()
    output: OutputConfig = OutputConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="before")
    @classmethod
    def _batch_of_workers(cls, tree: Any) -> Any:
        return batch_of_workers(tree) if isinstance(tree, dict) else tree

    @field_validator("method", "engine", mode="before")
    @classmethod
    def _by_name(cls, value: Any, info: ValidationInfo) -> Any:
        return configs.named(value, DEFAULT_METHOD if info.field_name == "method" else "torch")

    @field_validator("modifiers", mode="before")
    @classmethod
    def _modifiers_by_name(cls, value: Any) -> Any:
        return configs.named_each(value, MODIFIER_NAMES)

    def unused_settings(self) -> Iterator[tuple[str, str]]:
        """Yield what belongs to methods or backbones of another kind.

        A hub backbone that is not cached has no known kind yet, so these settings are not checked.
        """
        if not self.method.publishes_samples:
            yield "bank.sample_days", f"method={self.method.name}"
        if not method_class(self.method.innermost.name).trains_backbone:
            yield "checkpoint.export", f"method={self.method.name}"
        if self.stream.schedule == "joint":  # all tasks are one phase
            by_task = ["train.epochs_by_task", "train.learning_rate_by_task"]
            by_task += [f"method.{path}" for path in self.method.by_task]
            yield from ((name, "stream.schedule=joint") for name in by_task)
        if self.stream.schedule == "separate":
            yield from ((f"method.{name}", "stream.schedule=separate") for name in self.method.unused_for_single_task)
        if known := known_capabilities(self.backbone):
            has_label_head = known.answers == "label"
            reason = f"backbone.{because_of_kind(self.backbone)}"
            yield from ((f"method.{path}", why) for path, why in self.method.unused_with(has_label_head, reason))
            yield from ((path, reason) for path in (GENERATION if has_label_head else LABEL_HEAD))

    @model_validator(mode="after")
    def _unseen_tasks_need_no_task_id(self) -> Self:
        if self.stream.unseen and (self.method.needs_task or self.stream.schedule == "separate"):
            separate = self.stream.schedule == "separate"
            needs = "stream.schedule=separate" if separate else f"method '{self.method.name}'"
            raise ValueError(
                f"stream.unseen is set and {needs} needs each text's task id, which does not exist for a task that was "
                "never learned: set stream.unseen=null for this run, or choose another method or schedule"
            )
        return self

    @model_validator(mode="after")
    def _general_texts_have_answers(self) -> Self:
        if not self.eval.general.tasks:
            return self
        if self.method.needs_task or self.stream.schedule == "separate":
            separate = self.stream.schedule == "separate"
            needs = "stream.schedule=separate" if separate else f"method '{self.method.name}'"
            raise ValueError(
                f"eval.general.tasks is set and {needs} needs each text's task id, which texts outside the stream do "
                "not have: leave it out for this run, or choose another method or schedule"
            )
        if self.eval.unknown == "refuse":
            raise ValueError(
                "eval.general.tasks is set and eval.unknown=refuse gives texts outside the stream no answer: expected "
                "eval.unknown nearest or bare"
            )
        return self

    @model_validator(mode="after")
    def _wrapper_has_earlier_tasks(self) -> Self:
        if self.stream.schedule != "sequential" and self.method.innermost is not self.method:
            raise ValueError(
                f"method '{self.method.name}' needs what is kept of earlier tasks, and under stream.schedule="
                f"{self.stream.schedule} there are none: expected its learner as the method, or schedule sequential"
            )
        return self


def load_config(path: str | None, overrides: Sequence[str], present: bool = False) -> RunConfig:
    """Return the validated tree from a file and overrides.

    Args:
        present: the backbone's folder and every file of the stream must be there; nothing is read or fetched.

    Raises:
        ConfigError: see `raycl.config.load`; the file requests what only the command may allow (`config.trust`), or a
            setting that a person wrote has no effect.
        BackboneError, DataError: the backbone, a task or one of its files is not there.
    """
    source = "the config" if path is None else f"config file '{path}'"
    config = from_tree(configs.load_tree(path, overrides))
    trust.require(trust.requested(configs.as_tree(config)), overrides, source)
    if present:
        resolve_backbone(config.backbone.name)
        plan = resolve(config.stream)
        for task in (*plan.tasks, *plan.unseen):
            for file in task.files.values():
                if isinstance(file, SourceFile):
                    file.require()
    # last, since it reads the backbone's config, which takes a second
    refuse(unused_written(path, overrides, config, lambda: from_tree(configs.load_tree(path, []))), source)
    return config


def from_tree(given: Tree) -> RunConfig:
    """Return the validated config of what a user wrote; with `bank.start`, that of the snapshot's run with new tasks.

    Raises:
        ConfigError: an unknown key, a wrong value, or one that the snapshot excludes. BankError: no such snapshot.
    """
    given = copy.deepcopy(given)
    rename_in(given, "the config")
    given = with_specs(with_template_files(given))
    output = given.get("output")
    runs = str((output.get("dir") if isinstance(output, dict) else None) or default_directory())
    announce(given, runs)
    start = read_start(given, runs)
    config = configs.validate(RunConfig, given if start is None else start.tree)
    if start is not None:  # what an older bank does not record has its default, as it has in the run that starts
        before = configs.as_tree(configs.validate(RunConfig, start.base))
        refuse_changes(start, before, configs.as_tree(config))
    return config


def fingerprint(config: RunConfig) -> str:
    """Return the fingerprint of everything that can change what a run learns."""
    return configs.fingerprint(config, without=EXEMPT)


def info_of(
    config: RunConfig, singles: dict[str, float] | None = None, replaces: str = "", inputs: Inputs | None = None
) -> RunInfo:
    """Return what identifies the run of this config."""
    tree, used = configs.as_tree(config), plugins_of(config)
    return RunInfo(config.seed, tree, fingerprint(config), singles, replaces, used, inputs or {})


def plugins_of(config: RunConfig) -> plugins.Used:
    """Return what the run uses of other packages, by its config; routers are named in its snapshots."""
    own = [task for task in (*(config.stream.tasks or ()), *(config.stream.unseen or ())) if isinstance(task, TaskSpec)]
    return plugins.used(
        {
            "method": [config.method.name, config.method.innermost.name],
            "modifier": list(config.modifiers),
            "optimizer": [config.train.optimizer],
            "metric": [task.metric for task in own if task.metric],
            "format": [task.format for task in own],
            "order": [config.stream.name],
        },
        BUILT_IN,
    )


def phases(config: RunConfig, stream: Stream) -> tuple[Phase, ...]:
    """Return what the configured method trains one after another."""
    return SCHEDULES[config.stream.schedule]().phases(stream)


def default_directory() -> str:
    in_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
    return os.environ.get("RAYCL_RUNS") or ("~/raycl-runs" if in_job else "runs")


def directory(config: RunConfig) -> Storage:
    """Return the folder that holds the run's own."""
    return Storage.at(config.output.dir or default_directory())


def name_of(config: RunConfig) -> str | None:
    """Return the name of the run's folder from the config or the environment; None: there is none."""
    return config.output.name or _folder_name(os.environ.get("RAYCL_RUN_NAME") or "", "RAYCL_RUN_NAME") or None


def _folder_name(name: str, source: str) -> str:
    if name and (problem := problem_of(name)):
        raise ConfigError(f"{source} gives the run the name {shown(name)}, which cannot be a folder's: {problem}")
    return name


def free_names(config: RunConfig) -> Iterator[str]:
    """Yield telling names for a run without one: those that no folder next to it has, one after another."""
    backbone = config.backbone.name.rstrip("/").split("/")[-1]
    schedule = "" if config.stream.schedule == "sequential" else f"-{config.stream.schedule}"
    base = _folder_name(
        f"{config.stream.title}-{backbone}-{config.method.name}{schedule}-s{config.seed}", "stream.name"
    )
    root = directory(config)
    taken = set(root.list()) if root.exists() else set()
    names = itertools.chain([base], (f"{base}-{number}" for number in itertools.count(2)))
    return (name for name in names if name not in taken)
