"""The whole config tree, and `build`: the one place that knows every concrete class.

What it does not know: Ray (`raycl.launch.driver` starts workers that call `build`).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from raycl import config as configs
from raycl.backbone import BackboneConfig, identity, load_backbone, load_codec, load_skeleton
from raycl.backbone.base import Backbone
from raycl.backbone.load import because_of_kind, known_capabilities
from raycl.bank.tensors import views
from raycl.config import Section, Tree, trust
from raycl.config.unused import found_in, idle_in, refuse, written
from raycl.data.loader import check_batch
from raycl.data.stream import Stream, StreamConfig, open_stream
from raycl.errors import ConfigError
from raycl.eval.metrics import check_metric
from raycl.eval.settings import EvalConfig
from raycl.methods.base import Method
from raycl.methods.lora.lora import LoraConfig
from raycl.methods.modifier import Modifiers
from raycl.methods.registry import MODIFIERS, WRAPPERS, MethodChoice, ModifierChoice, method_class, modifier_class
from raycl.report.results import read_results
from raycl.storage import Storage
from raycl.storage.unfinished import Buffer
from raycl.tracking import TrackingConfig
from raycl.training.distributed import DistributedContext
from raycl.training.engines.engine import Engine, TorchEngine
from raycl.training.schedule import SCHEDULES
from raycl.training.seeds import micro_batch_size
from raycl.training.settings import (
    EXEMPT,
    BankConfig,
    CheckpointConfig,
    DeepSpeedConfig,
    EngineConfig,
    TorchConfig,
    TrainConfig,
)
from raycl.training.task_trainer import OpenEngine
from raycl.training.training_context import RunInfo, TrainingContext
from raycl.types import Phase, TextCodec

if TYPE_CHECKING:
    EngineChoice = EngineConfig
else:
    EngineChoice = Annotated[TorchConfig | DeepSpeedConfig, Field(discriminator="name")]


LABEL_HEAD = ("train.head_learning_rate", "train.label_loss")
GENERATION = ("stream.max_target_tokens", "eval.max_new_tokens")
"""Settings that act on label heads, and on texts that a backbone generates."""


class LaunchConfig(Section):
    """Where the workers run."""

    workers: int = Field(1, ge=1, description="processes that train together")
    cpus_per_worker: float | None = Field(None, gt=0, description="null: the cluster's CPUs shared evenly")
    gpus_per_worker: float | None = Field(None, ge=0, description="null: 1 where the cluster has one for each worker")
    address: str | None = Field(None, description="Ray cluster to join; null: $RAY_ADDRESS, else one is started here")
    max_failures: int = Field(3, ge=-1, description="restarts of the worker group after crashes; -1: no limit")
    wait_for_nodes: bool = Field(False, description="the cluster grows: wait for workers it cannot hold today")
    grace_s: float = Field(
        110.0,
        ge=0,
        description="seconds after SIGTERM in which workers may write a checkpoint, before the command ends",
    )
    hang_s: float | None = Field(
        None,
        gt=0,
        description="a worker that makes no progress for so many seconds is ended, and the group starts again; null: "
        "never. Longer than its longest step: an optimizer step, the evaluation of one task, preparing one",
    )
    fresh_workers_per_task: bool = Field(False, description="new worker processes for every stage")


class OutputConfig(Section):
    """Where the run writes."""

    dir: str | None = Field(
        None,
        description="folder or s3:// URI that every worker reaches; null: $RAYCL_RUNS, else ~/raycl-runs in a "
        "submitted job (whose own folder is temporary), else ./runs",
    )
    name: str | None = Field(
        None, description="folder of this run; null: $RAYCL_RUN_NAME, else made from stream, backbone, method, seed"
    )
    retry_s: float = Field(
        180.0, ge=0, description="seconds that a store which does not answer is asked again, with growing pauses"
    )
    exists: str = Field("error", pattern="^(error|resume)$", description="resume: go on if the run is there already")


class RunConfig(Section):
    """One continual-learning run."""

    seed: int = Field(42, ge=0, description="seed of all random draws: weights, rows, batches, dropout")
    stream: StreamConfig = StreamConfig()
    backbone: BackboneConfig = BackboneConfig()
    method: MethodChoice = Field(LoraConfig(), description="the continual-learning method, with its settings")
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

    @field_validator("method", mode="before")
    @classmethod
    def _method_by_name(cls, value: Any) -> Any:
        return configs.named(value, "lora")

    @field_validator("engine", mode="before")
    @classmethod
    def _engine_by_name(cls, value: Any) -> Any:
        return configs.named(value, "torch")

    @field_validator("modifiers", mode="before")
    @classmethod
    def _modifiers_by_name(cls, value: Any) -> Any:
        return configs.named_each(value, MODIFIERS)

    def idle(self) -> Iterator[tuple[str, str]]:
        """What belongs to methods or backbones of another kind.

        A hub backbone that is not cached has no known kind yet; once it is fetched, nobody knows what a person wrote.
        """
        names = {self.method.name, getattr(getattr(self.method, "learner", None), "name", "")}
        if "sapt" not in names:
            yield "train.attention_learning_rate", f"method={self.method.name}"
        if "finetune" not in names:
            yield "checkpoint.export", f"method={self.method.name}"
        if self.stream.schedule == "separate":
            yield from ((f"method.{name}", "stream.schedule=separate") for name in self.method.unused_for_single_task)
        if known := known_capabilities(self.backbone):
            has_label_head = known.answers == "label"
            reason = f"backbone.{because_of_kind(self.backbone)}"
            yield from ((f"method.{path}", why) for path, why in self.method.idle_beside(has_label_head, reason))
            yield from ((path, reason) for path in (GENERATION if has_label_head else LABEL_HEAD))

    @model_validator(mode="after")
    def _unseen_are_not_told(self) -> Self:
        if self.stream.unseen and (self.method.needs_task or self.stream.schedule == "separate"):
            separate = self.stream.schedule == "separate"
            needs = "stream.schedule=separate" if separate else f"method '{self.method.name}'"
            raise ValueError(
                f"stream.unseen is set and {needs} needs each text's task id, which does not exist for a task that was "
                "never learned: set stream.unseen=null for this run, or choose another method or schedule"
            )
        return self

    @model_validator(mode="after")
    def _replay_has_earlier_tasks(self) -> Self:
        if self.stream.schedule != "sequential" and self.method.name in WRAPPERS:
            raise ValueError(
                f"method '{self.method.name}' trains on rows of earlier tasks, which stream.schedule="
                f"{self.stream.schedule} does not have: expected its learner as the method, or schedule sequential"
            )
        return self


def load_config(path: str | None, overrides: Sequence[str]) -> RunConfig:
    """The validated tree from a file and overrides.

    Raises:
        ConfigError: see `raycl.config.load`; or the file asks for what only the command may allow (`config.trust`).
    """
    config = configs.load(RunConfig, path, overrides)
    source = "the config" if path is None else f"config file '{path}'"
    trust.require(trust.asked(configs.as_tree(config)), overrides, source)
    refuse(found_in(written(path, overrides), idle_in(config)), source)
    return config


def fingerprint(config: RunConfig) -> str:
    """Of everything that can change what a run learns."""
    return configs.fingerprint(config, without=EXEMPT)


def info_of(config: RunConfig, singles: dict[str, float] | None = None, replaces: str = "") -> RunInfo:
    """What identifies the run of this config."""
    return RunInfo(config.seed, configs.as_tree(config), fingerprint(config), singles, replaces)


def phases(config: RunConfig, stream: Stream) -> tuple[Phase, ...]:
    """What the configured method trains one after another."""
    return SCHEDULES[config.stream.schedule]().phases(stream)


def check(config: RunConfig) -> Stream:
    """Everything that can be known before any worker starts; returns the stream, read and validated.

    Raises:
        RayclError: the first thing that is wrong.
    """
    codec = load_codec(config.backbone, config.stream.max_source_tokens, config.stream.max_target_tokens)
    check_engine(config)
    if config.train.label_loss != "seen" and not codec.needs_labels:
        raise ConfigError(
            f"train.label_loss is '{config.train.label_loss}', but backbone '{config.backbone.name}' writes its "
            "answers and has no label head: leave it at seen, or use an encoder-only backbone"
        )
    workers = config.launch.workers
    check_batch(
        config.train.batch_size,
        micro_batch_size(config.train.batch_size, config.train.micro_batch_size, workers),
        workers,
    )
    skeleton = load_skeleton(config.backbone, codec)
    method = method_class(config.method.name)(config.method, skeleton, config.seed)
    make_modifiers(config, method)
    stream = open_stream(config.stream, config.seed)
    stream.check(codec)
    method.check(stream.tasks)
    check_unseen(config, stream, codec)
    for task in (*stream.tasks, *stream.unseen):
        if task.objective == "answer":
            check_metric(task.metric)
    by_task = {
        "train.epochs_by_task": config.train.epochs_by_task,
        "stream.train_rows_by_task": config.stream.train_rows_by_task,
    }
    for key, given in by_task.items():
        unknown = set(given) - {task.name for task in stream.tasks}
        if unknown:
            names = ", ".join(task.name for task in stream.tasks)
            raise ConfigError(f"{key} names {sorted(unknown)}, which the stream lacks: expected some of {names}")
    return stream


def check_unseen(config: RunConfig, stream: Stream, codec: TextCodec) -> None:
    """What is never trained must have rows, and a label head can answer with learned labels alone.

    Raises:
        ConfigError: a task without dev rows where `eval.split` is dev, or with labels that no task teaches.
    """
    learned = {label for task in stream.tasks for label in task.labels or ()}
    for task in stream.unseen:
        if not len(stream.rows(task, config.eval.split)):
            raise ConfigError(
                f"unseen task '{task.name}' has no {config.eval.split} rows and eval.split is {config.eval.split}: "
                "leave it out of stream.unseen, or use eval.split=test"
            )
        foreign = [label for label in task.labels or () if label not in learned]
        if codec.needs_labels and foreign:
            raise ConfigError(
                f"unseen task '{task.name}' has labels that no task of the stream teaches ({', '.join(foreign)}), and "
                f"encoder-only backbone '{config.backbone.name}' answers with learned labels alone: leave it out of "
                "stream.unseen, add a task with these labels to the stream, or use a backbone that writes its answers"
            )


def check_engine(config: RunConfig) -> None:
    """ZeRO 0 in bfloat16 trains without float32 masters (observed: other losses, resume not exact), so it is refused.

    Raises:
        ConfigError: that combination.
    """
    engine = config.engine
    if isinstance(engine, DeepSpeedConfig) and engine.zero_stage == 0 and config.backbone.dtype == "bfloat16":
        raise ConfigError(
            "engine.zero_stage=0 with backbone.dtype=bfloat16 keeps no float32 copy of trained weights: "
            "use zero_stage 1, 2 or 3, or engine=torch"
        )


def make_modifiers(config: RunConfig, method: Method) -> Modifiers:
    """The configured gradient modifiers over the method's backbone."""
    return Modifiers({name: modifier_class(name)(chosen, method) for name, chosen in config.modifiers.items()})


def build(
    config: RunConfig,
    world: DistributedContext,
    singles: dict[str, float] | None = None,
    files: Sequence[Buffer] = (),
    replaces: str = "",
) -> tuple[TrainingContext, OpenEngine]:
    """One worker's parts of the run, and what opens an engine for a stage.

    Args:
        files: the backbone's safetensors files, if they are in memory already; never written to.
        replaces: see `RunInfo`.
    """
    codec = load_codec(config.backbone, config.stream.max_source_tokens, config.stream.max_target_tokens)
    stream = open_stream(config.stream, config.seed)
    weights = {name: tensor for file in files for name, tensor in views(file, config.backbone.name).items()}
    backbone = load_backbone(config.backbone, codec, world.device, config.seed, stream.learns_texts, weights, True)
    method = method_class(config.method.name)(config.method, backbone, config.seed)
    if weights and (method.stack is None or config.engine.name != "torch"):
        _own(backbone)
    check_language_head(method)
    info = info_of(config, singles, replaces)
    context = TrainingContext(
        info=info,
        stream=stream,
        backbone=backbone,
        method=method,
        modifiers=make_modifiers(config, method),
        train=config.train,
        engine=config.engine,
        evaluation=config.eval,
        checkpoint=config.checkpoint,
        bank=config.bank,
        schedule=SCHEDULES[config.stream.schedule](),
        identity=identity(config.backbone) if world.is_first else "",
    )
    return context, partial(open_engine, context, world)


def _own(backbone: Backbone) -> None:
    """Weights of its own instead of shared ones: they will be trained, or an engine moves them about."""
    for tensor in (*backbone.parameters(), *backbone.buffers()):
        tensor.data = tensor.data.clone()


def check_language_head(method: Method) -> None:
    """Adapters are learned beside a language head, which stays as it is: a new one would stay at random.

    Raises:
        ConfigError: the backbone came without one.
    """
    backbone = method.backbone
    if backbone.has_untrained_language_head and method.stack:
        raise ConfigError(
            f"stream.objective is mlm and method '{method.config.name}' trains adapters alone, but the backbone has no "
            "language head: use method=finetune, or name as backbone what such a run left (RUN/learned/...) or a "
            "checkpoint with that head"
        )


def open_engine(context: TrainingContext, world: DistributedContext, accumulation: int, steps: int) -> Engine:
    """The configured engine around the backbone for one stage."""
    if isinstance(context.engine, DeepSpeedConfig):
        from raycl.training.engines.deepspeed import DeepSpeedEngine  # heavy, and needed by those who ask for it only

        return DeepSpeedEngine(context.backbone, context.train, context.engine, accumulation, steps, world)
    return TorchEngine(context.backbone, context.train, steps, world)


def read_singles(config: RunConfig) -> dict[str, float] | None:
    """Task -> score when trained alone, from `eval.singles`.

    Raises:
        ConfigError: that run was not the same method and modifiers on the same data, backbone, training and seed.
    """
    if config.eval.singles is None:
        return None
    results = read_results(config.eval.singles)
    mine, theirs = configs.as_tree(config), results["config"]
    schedule = theirs["stream"].get("schedule", "sequential")
    if schedule != "separate":
        raise ConfigError(
            f"eval.singles '{config.eval.singles}' is a run under stream.schedule={schedule}: expected separate"
        )
    learner = mine["method"]["learner"] if config.method.name in WRAPPERS else mine["method"]
    shared = ("seed", "stream", "backbone", "train", "modifiers")
    expected = {"method": learner, **{key: mine[key] for key in shared}}
    found = {"method": theirs["method"], **{key: theirs.get(key, {}) for key in shared}}
    found["stream"] = {**configs.as_tree(StreamConfig()), **found["stream"]}  # older runs lack younger settings
    differing = _single_differences(expected, found)
    if differing:
        raise ConfigError(
            f"eval.singles '{config.eval.singles}' is another setting; it differs in {', '.join(differing)}: "
            "repeat the separate run with this run's settings"
        )
    last = [row for row in results["matrix"] if any(row)][-1]
    return {task: cell["value"] for task, cell in zip(results["stream"]["tasks"], last, strict=True) if cell}


def _single_differences(expected: Tree, found: Tree) -> list[str]:
    """Dotted keys that matter for a task trained alone: the order of tasks does not."""
    idle = {("method", key) for key in method_class(str(expected["method"]["name"])).Config.unused_for_single_task}
    idle |= {("stream", "name"), ("stream", "tasks"), ("stream", "unseen"), ("stream", "schedule")}
    return [key for key in configs.differences(found, expected) if tuple(key.split(".")[:2]) not in idle]


def default_directory() -> str:
    """Where runs go when the config does not say."""
    in_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
    return os.environ.get("RAYCL_RUNS") or ("~/raycl-runs" if in_job else "runs")


def directory(config: RunConfig) -> Storage:
    """The folder that holds the run's own."""
    return Storage.at(config.output.dir or default_directory())


def name_of(config: RunConfig) -> str | None:
    """The name of the run's folder from the config or the environment; None: there is none."""
    return config.output.name or os.environ.get("RAYCL_RUN_NAME") or None


def free_names(config: RunConfig) -> Iterator[str]:
    """Telling names for a run that has none: those that no folder beside it has, one after another."""
    backbone = config.backbone.name.rstrip("/").split("/")[-1]
    schedule = "" if config.stream.schedule == "sequential" else f"-{config.stream.schedule}"
    base = f"{config.stream.name}-{backbone}-{config.method.name}{schedule}-s{config.seed}"
    root = directory(config)
    taken = set(root.list()) if root.exists() else set()
    names = itertools.chain([base], (f"{base}-{number}" for number in itertools.count(2)))
    return (name for name in names if name not in taken)
