"""The numbers of a plan, read from the parts of a run on torch's meta device: without weights and perhaps data.

Every method allocates what it would train.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from raycl.adapters.layer import linear_shape
from raycl.adapters.soft_prompts import MixedPrompts
from raycl.backbone import Backbone
from raycl.backbone.architecture import architecture
from raycl.backbone.model_files import present_folder
from raycl.backbone.positions import check_limits
from raycl.backbone.roles import ROLES, is_linear, linear_shapes, matching
from raycl.data.benchmarks.orders import find
from raycl.data.prepare import fit_sources, fit_targets
from raycl.data.sources.cache import cache_folder
from raycl.data.stream import Stream, open_stream
from raycl.errors import BackboneError, ConfigError, DataError, StorageError
from raycl.methods.base import MethodConfig
from raycl.methods.context import TaskContext
from raycl.methods.modifier import ModifierConfig
from raycl.methods.registry import method_class
from raycl.operations.plan.arithmetic import MASTER, EngineLoad, Linear, ModelLoad, RunLoad, StepLoad
from raycl.routing.sentence_encoder import EncoderConfig
from raycl.training.definition.settings import DeepSpeedConfig, EngineConfig, FSDPConfig
from raycl.training.definition.task_order import SCHEDULES, epochs_of
from raycl.training.definition.training_context import TrainingContext
from raycl.training.engines.compilation import layers
from raycl.training.optimizers.parameters import specs_of, state_bytes
from raycl.training.optimizers.registry import optimizer_kind
from raycl.training.phase.data import order_of
from raycl.training.phase.disk_space import answers_of, growth, plan_from
from raycl.training.setup.checks import check_settings, check_stream, make_modifiers
from raycl.training.setup.lengths import with_lengths
from raycl.training.setup.run_config import RunConfig, info_of
from raycl.types import Task

SAMPLE = 64
"""Rows of each task whose length is measured."""

NO_WORDS = 8
"""A tokenizer with fewer tokens stands for one that is not there."""


@dataclass(frozen=True)
class SampledLengths:
    """Tokens of a sample of a task's rows: sources and their targets. rows: how many the task has."""

    rows: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]

    @property
    def joined(self) -> tuple[int, ...]:
        """Source and target in one sequence."""
        return tuple(map(sum, zip(self.sources, self.targets, strict=True)))


@dataclass
class Opened:
    """A run to make a plan for.

    Attributes:
        config: config of the run. context: its parts. notes: assumptions about missing data.
        steps: number of steps of each phase; empty if unknown.
        lengths: lengths of texts of each task; empty if unknown.
    """

    config: RunConfig
    context: TrainingContext
    notes: list[str]
    steps: tuple[int, ...]
    lengths: tuple[SampledLengths, ...]


def opened(config: RunConfig) -> Opened:
    """Return the run's backbone, method and stream.

    Raises:
        BackboneError: there is no config.json. ConfigError: settings that do not fit each other.
    """
    backbone = architecture(config.backbone, 8, 2)
    assumed = "backbone.dtype=float32: the GPU's FLOP/s are those of bfloat16"
    notes = [assumed] if config.backbone.dtype == "float32" else []
    if config.method.keeps_data or method_class(config.method.name).computes_gradients:
        notes.append(
            "the time is without passes over stored rows, and gradients that the method computes between steps"
        )
    config = config.model_copy(update={"method": _with_encoder_at_hand(config.method, notes)})
    method = check_settings(config, backbone)
    stream, has_rows = _stream(config, notes)
    has_words = backbone.codec.vocabulary >= NO_WORDS
    if has_rows and has_words:
        config, stream = with_lengths(config, stream, backbone)
        check_stream(config, stream, method)
    else:
        backbone.codec.max_source_tokens, backbone.codec.max_target_tokens = config.stream.token_limits
        check_limits(backbone.model, backbone.codec)
    evaluation = config.eval if has_rows else config.eval.model_copy(update={"save_predictions": False})
    context = TrainingContext(
        info=info_of(config),
        stream=stream,
        backbone=backbone,
        method=method,
        modifiers=make_modifiers(config, method),
        train=config.train,
        engine=config.engine,
        evaluation=evaluation,
        checkpoint=config.checkpoint,
        bank=config.bank,
        schedule=SCHEDULES[config.stream.schedule](),
        identity="",
    )
    if not has_rows:
        return Opened(config, context, notes, (), ())
    steps = tuple(order_of(context, phase).steps for phase in context.phases)
    if not has_words:
        notes.append("no tokenizer: every text is taken to be as long as the config allows")
        return Opened(config, context, notes, steps, ())
    return Opened(config, context, notes, steps, _lengths(context))


def _with_encoder_at_hand(method: MethodConfig, notes: list[str]) -> MethodConfig:
    """Return the packaged sentence encoder in the place of one that would have to be fetched: adapters are as large."""
    encoder = method.sentence_encoder
    if encoder is None or present_folder(encoder.name, encoder.revision) is not None:
        return method
    notes.append(f"sentence encoder '{encoder.name}' is not on this machine: taken to be as wide as the packaged one")
    return method.model_copy(update={"encoder": EncoderConfig()})


def _stream(config: RunConfig, notes: list[str]) -> tuple[Stream, bool]:
    """Return the stream and whether it has its rows; else it has tasks by name alone."""
    try:
        return open_stream(config.stream, config.seed), True
    except (DataError, StorageError, ConfigError) as error:
        given, known = config.stream.tasks, find(config.stream.name)
        names = given or (known.tasks if known else ())
        if not names or (isinstance(error, ConfigError) and not (known and config.stream.root is None)):
            raise  # no missing data, but a setting that is wrong
        tasks = tuple(Task(task if isinstance(task, str) else task.name, None, "exact_match") for task in names)
        notes.append(f"steps, labels and text lengths are not known without the data ({error})")
        cache = cache_folder(config.stream.cache_dir)
        return Stream(config.stream.title, tasks, (), [], config.stream, config.seed, {}, cache), False


def _lengths(context: TrainingContext) -> tuple[SampledLengths, ...]:
    stream, codec = context.stream, context.backbone.codec
    lengths = []
    for task in stream.tasks:
        raw, rows = stream.source(task, "train"), stream.rows(task, "train")
        if raw is None or not len(rows):
            continue
        chosen = rows[np.linspace(0, len(rows) - 1, min(SAMPLE, len(rows))).astype(np.int64)]
        reader, prompt = raw.open(), stream.prompt(task, codec)
        texts, limits = reader.values("text", chosen), stream.limits(task, codec)
        sources = fit_sources(texts, prompt, codec, limits.source)[0]
        targets: list[list[int]] = [[]] * len(texts)
        if task.objective == "answer":
            answers = [names[0] for names in reader.values("references", chosen)]
            targets = fit_targets(texts, answers, prompt, codec, limits.target)[0]
        lengths.append(SampledLengths(len(rows), tuple(map(len, sources)), tuple(map(len, targets))))
    return tuple(lengths)


REDUCE_BUCKET = 500_000_000
"""DeepSpeed's default, in elements: `reduce_bucket_size`."""


def numbers(opened: Opened) -> tuple[ModelLoad, StepLoad, EngineLoad, RunLoad]:
    """Return everything that the arithmetic needs."""
    context = opened.context
    phases = list(phases_of(context))
    model = _model(opened, phases)
    return (
        model,
        _step(opened),
        engine_of(opened.config.engine, model, opened.config.launch.workers),
        _run(opened, max(phases, key=lambda phase: phase.count)),
    )


# ---- what is trained ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """Parameters that a phase trains.

    Attributes:
        base: the backbone's parameters. linears: adapters of linears. shared: parts of the router. ranks: ranks of
            adapters.
        adapters: parameters of the adapters in training, frozen ones among them too; without label heads.
        state: bytes that the optimizer keeps for all.
    """

    count: int
    base: int
    linears: int
    shared: int
    ranks: int
    adapters: int
    state: int


def phases_of(context: TrainingContext) -> Iterator[Trained]:
    """Yield what each phase trains."""
    method = context.method.learner
    for phase in context.phases:
        context.schedule.begin(context.method)
        if method.allocation is not None:
            method.allocation(phase)
        else:
            method.begin_task(phase, TaskContext(phase, 1, context.stream, context.backbone.codec))
        trained = {name: p.numel() for name, p in context.backbone.named_parameters() if p.requires_grad}
        stack = method.stack
        yield Trained(
            sum(trained.values()),
            base=sum(count for name, count in trained.items() if name.startswith("model.") and ".lora_" not in name),
            linears=sum(count for name, count in trained.items() if ".lora_" in name),
            shared=sum(count for name, count in trained.items() if name in method.shared_parameters),
            ranks=sum(stack.trainable.values()) if stack is not None and stack.layers else 0,
            adapters=sum(
                p.numel()
                for name, p in context.backbone.named_parameters()
                if ".lora_" in name or name.startswith("prefix.")
            ),
            state=state_bytes(optimizer_kind(context.train), specs_of(context.backbone, context.train, {}).values()),
        )


def _model(opened: Opened, phases: list[Trained]) -> ModelLoad:
    context = opened.context
    backbone, config = context.backbone, context.backbone.model.config
    method = context.method.learner
    own = phases if method.without_task is not None else phases[-1:]  # each task's stay, or change with the next
    wanted = opened.config.backbone.dtype
    dtype = torch.float32 if wanted == "float32" else torch.bfloat16  # auto: every GPU of the table has bfloat16
    adapted = set(method.stack.layers) if method.stack else set()
    parameters = {name: p.numel() for name, p in backbone.model.named_parameters() if ".lora_" not in name}
    in_layers = [
        sum(p.numel() for name, p in layer.named_parameters() if ".lora_" not in name)
        for layer in layers(backbone.model)
    ]
    return ModelLoad(
        parameters=sum(parameters.values()),
        trained=tuple(phase.count for phase in phases),
        trained_base=tuple(phase.base for phase in phases),
        adapters=sum(phase.count - phase.base - phase.shared for phase in own) + own[-1].shared,
        rows=sum(phase.ranks for phase in own),
        pool=sum(phase.linears for phase in own[:-1]),
        method=opened.config.method.values_kept(len(phases)),
        linears=tuple(_linears(backbone, adapted, bool(own[-1].base))),
        vocabulary=0 if backbone.codec.needs_labels and not context.stream.learns_texts else int(config.vocab_size),
        heads=int(getattr(config, "num_attention_heads", 1)),
        score_bytes=_score_bytes(config, opened.config.backbone.attention, dtype.itemsize),
        in_layers=sum(in_layers),
        largest_layer=max(in_layers, default=0),
        weight_bytes=_weight_bytes(
            backbone, opened.config.backbone.quantization, dtype.itemsize, sum(parameters.values())
        ),
        compute_bytes=dtype.itemsize,
        mapped=getattr(config, "dtype", None) == dtype and opened.config.backbone.quantization == "none",
    )


def _score_bytes(config: Any, attention: str, compute_bytes: int) -> int:
    """Eager attention keeps each score as computed and in float32; others, T5's learned bias of each."""
    used = getattr(config, "_attn_implementation", "eager") if attention == "auto" else attention
    if used == "eager":
        return compute_bytes + (MASTER if compute_bytes < MASTER else 0)
    return compute_bytes if hasattr(config, "relative_attention_num_buckets") else 0


SCALES = {"nf4": 1 / 64 + 4 / (64 * 256), "int8": 0.0}
"""Bytes of a weight's scales: nf4 has one byte for 64, and a float32 for 256 of those. int8 has a float32 for each
output of a linear (`_weight_bytes`)."""


def _weight_bytes(backbone: Backbone, quantization: str, computed: int, parameters: int) -> float:
    """Return the mean bytes of a frozen parameter; output words and float32 linears are not quantized."""
    if quantization == "none":
        return float(computed)
    kept = tuple(getattr(backbone.model, "_keep_in_fp32_modules", None) or ())
    words, total = backbone.model.get_output_embeddings(), float(computed * parameters)
    for path, module in backbone.model.named_modules():
        if not is_linear(module) or module is words:
            continue
        inputs, outputs = linear_shape(module)
        if path.removesuffix(".base").rpartition(".")[2] in kept:
            total += inputs * outputs * (MASTER - computed)
            continue
        each = 1.0 if quantization == "int8" else 0.5
        total += inputs * outputs * (each + SCALES[quantization] - computed)
        total += MASTER * outputs if quantization == "int8" else 0
    return total / parameters


# ---- linears -----------------------------------------------------------------------------------------------------


def _linears(backbone: Backbone, adapted: set[str], trained: bool) -> Iterator[Linear]:
    """Yield all of them; a base linear under an adapter has the path of the layer that took its place."""
    shapes = {path.removesuffix(".base"): shape for path, shape in linear_shapes(backbone.model).items()}
    roles = _roles(list(shapes))
    read: set[str] = set()
    for path, (inputs, outputs) in shapes.items():
        role, parent = roles.get(path, ""), path.rpartition(".")[0]
        is_adapted, side = path in adapted, backbone.side(path)
        reads = "" if role == "attention.out" else f"{parent} {side} {'' if role.startswith('attention') else role}"
        keeps = bool(reads) and (is_adapted or trained) and reads not in read
        read |= {reads} if keeps else set()
        beside = {other: sibling for sibling, other in roles.items() if sibling.rpartition(".")[0] == parent}
        gated = role == "ffn.in" and beside.get(role) != path
        query = beside.get("attention.query", path)
        kept = shapes[query][1] if role in ("attention.key", "attention.value") else outputs
        attends = role in ("attention.query", "attention.qkv")
        keys = backbone.side(beside.get("attention.key", path)) if attends else ""
        yield Linear(role, inputs, outputs, side, keys, is_adapted, trained, gated, keeps, kept)


def _roles(paths: list[str]) -> dict[str, str]:
    roles: dict[str, str] = {}
    for role in ROLES:
        try:
            roles |= dict.fromkeys(matching(paths, (role,)), role)
        except BackboneError:  # a model without such layers
            continue
    return roles


# ---- the rest ----------------------------------------------------------------------------------------------------


def _step(opened: Opened) -> StepLoad:
    config = opened.config
    stream, train, workers = config.stream, config.train, config.launch.workers
    micro = train.examples_per_pass(workers)
    capabilities = opened.context.backbone.capabilities
    prompts = (opened.context.method.backbone.prefix, opened.context.method.backbone.suffix)
    in_training = [part.trainable for part in prompts if isinstance(part, MixedPrompts)]
    prefix = sum(int(trained.shape[1]) for trained in in_training if trained is not None)
    joined = capabilities.one_sequence
    source, target = stream.token_limits
    target = 0 if capabilities.answers == "label" else target
    longest = {"source": source + (target if joined else 0) + prefix, "target": target}
    means = {side: float(tokens) for side, tokens in longest.items()}
    if opened.lengths:
        in_batch = 1 if train.packing else micro
        sources = [lengths.joined if joined else lengths.sources for lengths in opened.lengths]
        means["source"] = _mean(opened, [longest_of(lengths, in_batch) for lengths in sources]) + prefix
        means["target"] = _mean(
            opened, [longest_of(lengths.targets, 1 if joined else micro) for lengths in opened.lengths]
        )
    losses = float(longest["target"]), means["target"]
    if opened.context.stream.learns_texts:
        share = 1.0 if joined else stream.mask_share
        losses = share * longest["source"], share * means["source"]
    return StepLoad(
        micro=micro,
        accumulation=max(1, train.batch_size // (micro * workers)),
        longest=longest,
        mean=means,
        logits=losses,
        recompute=config.backbone.gradient_checkpointing,
    )


def _mean(opened: Opened, of_task: Sequence[float]) -> float:
    rows = [lengths.rows for lengths in opened.lengths]
    return sum(count * value for count, value in zip(rows, of_task, strict=True)) / sum(rows)


def longest_of(lengths: Sequence[int], count: int) -> float:
    """Return the expected longest of `count` draws, to which rows of a micro-batch are padded."""
    ordered, total = sorted(lengths), len(lengths)
    chances = [(number / total) ** count for number in range(total + 1)]
    return sum(length * (chances[rank + 1] - chances[rank]) for rank, length in enumerate(ordered))


def engine_of(config: EngineConfig, model: ModelLoad, workers: int) -> EngineLoad:
    """Return how a configured engine divides this model."""
    several = workers > 1
    gathered = 2 * model.largest_layer * several  # one that computes, and the next
    if not isinstance(config, DeepSpeedConfig):
        whole = model.most_trained - (model.trained_layers if config.name == "fsdp" else 0)  # copied for the sum
        if not isinstance(config, FSDPConfig):
            return EngineLoad(config.name, workers, bucket=whole * several)
        return EngineLoad(
            *("fsdp", workers, workers, workers, workers),
            bucket=whole * several,
            gathered=gathered,
            layers_alone=True,
            loads_whole=False,
        )
    zero = config.zero_stage
    if not zero:
        return EngineLoad("deepspeed zero 0", workers)
    return EngineLoad(
        f"deepspeed zero {zero}",
        workers,
        weights=workers if zero == 3 else 1,
        gradients=workers if zero >= 2 else 1,
        optimizer=workers,
        separate_masters=True,
        gradient_bytes=model.compute_bytes,
        bucket=REDUCE_BUCKET if zero >= 2 else 0,
        gathered=gathered if zero == 3 else 0,
        on_host=config.offload_optimizer,
    )


def _run(opened: Opened, most: Trained) -> RunLoad:
    """Return steps, and what `raycl.training.phase.disk_space` says, without what a method keeps beside adapters (keys,
    texts)."""
    context = opened.context
    phase = context.phases[-1]
    steps = opened.steps or (1,) * len(context.phases)
    answers = answers_of(context, phase) if opened.lengths else [0] * len(steps)
    written = plan_from(context, phase, steps, MASTER * most.count, most.state, {}, answers)
    disk = {
        "checkpoint": written.inside,
        "task_end": written.end,
        "published_per_task": max(written.published),
        "stays_per_task": max(written.stays),
        "growth": growth(written).both,
    }
    codec = context.backbone.codec
    epochs = [
        epochs_of(context.train, context.stream, phase, codec) if opened.steps else context.train.epochs_of(phase.name)
        for phase in context.phases
    ]
    settings: list[MethodConfig | ModifierConfig] = [opened.config.method, *opened.config.modifiers.values()]
    passes = [sum(part.extra_passes(*of) for part in settings) for of in zip(epochs, steps, strict=True)]
    extra = sum(count * more for count, more in zip(steps, passes, strict=True)) / sum(steps)
    return RunLoad(opened.steps, most.state / most.count, disk, extra, opened.config.launch.parallel_tasks)
