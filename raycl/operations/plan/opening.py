"""The parts of a run on torch's meta device: without weights, and without its data where that is not there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raycl.backbone.architecture import architecture
from raycl.backbone.pretrained import present_folder
from raycl.data.benchmarks.orders import find
from raycl.data.prepare import fit_sources, fit_targets
from raycl.data.sources.cache import cache_folder
from raycl.data.stream import Stream, open_stream
from raycl.errors import ConfigError, DataError, StorageError
from raycl.methods.base import MethodConfig
from raycl.methods.registry import method_class
from raycl.routing.sentence_encoder import EncoderConfig
from raycl.run.checks import make_modifiers
from raycl.run.config import RunConfig, info_of
from raycl.run.method_checks import check_engine, check_quantized
from raycl.training.phase.data import order_of, rows_of
from raycl.training.schedule import SCHEDULES
from raycl.training.training_context import TrainingContext
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
        config: of the run. context: its parts. notes: what was assumed in the place of what is not there.
        steps: of each phase; empty if not known.
        lengths: of texts of each task; empty if not known.
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
    check_engine(config)
    backbone = architecture(config.backbone, *config.stream.token_limits)
    notes = (
        ["backbone.dtype=float32: the GPU's FLOP/s are those of bfloat16"] if config.backbone.dtype == "float32" else []
    )
    stream = _stream(config, notes)
    evaluation = config.eval if stream.has_rows else config.eval.model_copy(update={"save_predictions": False})
    settings = _with_encoder_at_hand(config.method, notes)
    method = method_class(config.method.name)(settings, backbone, config.seed)
    check_quantized(config, method)
    context = TrainingContext(
        info=info_of(config),
        stream=stream.stream,
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
    if not stream.has_rows:
        return Opened(config, context, notes, (), ())
    steps = tuple(order_of(context, phase, rows_of(context, phase)).steps for phase in context.phases)
    if backbone.codec.vocabulary < NO_WORDS:
        notes.append("no tokenizer: every text is taken to be as long as the config allows")
        return Opened(config, context, notes, steps, ())
    return Opened(config, context, notes, steps, _lengths(context))


def _with_encoder_at_hand(method: MethodConfig, notes: list[str]) -> MethodConfig:
    """Return the packaged sentence encoder in the place of one that would have to be fetched: adapters are as large."""
    encoder = getattr(method, "encoder", None)
    if not isinstance(encoder, EncoderConfig) or present_folder(encoder.name, encoder.revision) is not None:
        return method
    notes.append(f"sentence encoder '{encoder.name}' is not on this machine: taken to be as wide as the packaged one")
    return method.model_copy(update={"encoder": EncoderConfig()})


@dataclass(frozen=True)
class _SampledRows:
    stream: Stream
    has_rows: bool


def _stream(config: RunConfig, notes: list[str]) -> _SampledRows:
    """With its rows, else tasks by name alone."""
    try:
        return _SampledRows(open_stream(config.stream, config.seed), True)
    except (DataError, StorageError, ConfigError) as error:
        given, known = config.stream.tasks, find(config.stream.name)
        names = given or (known.tasks if known else ())
        if not names or (isinstance(error, ConfigError) and not (known and config.stream.root is None)):
            raise  # no missing data, but a setting that is wrong
        tasks = tuple(Task(one if isinstance(one, str) else one.name, None, "exact_match") for one in names)
        notes.append(f"steps, labels and text lengths are not known without the data ({error})")
        cache = cache_folder(config.stream.cache_dir)
        return _SampledRows(Stream(config.stream.name, tasks, (), [], config.stream, config.seed, {}, cache), False)


def _lengths(context: TrainingContext) -> tuple[SampledLengths, ...]:
    """Of a sample of each task's training rows."""
    stream, codec = context.stream, context.backbone.codec
    found = []
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
        found.append(SampledLengths(len(rows), tuple(map(len, sources)), tuple(map(len, targets))))
    return tuple(found)
