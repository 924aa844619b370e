"""Sources of pseudo-samples: training rows, a generator, or files."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import torch

from raycl.adapters import AdapterStack
from raycl.backbone.base import evaluating
from raycl.data.loader import batches_of
from raycl.data.sources.fields import half_character
from raycl.errors import DataError
from raycl.generation.batch_answers import predict
from raycl.methods.base import Method, activate_batch, phase_labels
from raycl.methods.context import TaskContext
from raycl.methods.pseudo_samples.generator import Generator, GeneratorConfig, check_generator
from raycl.methods.pseudo_samples.samples import PseudoSamples, Volume, same_everywhere, take_real
from raycl.types import Task

Kind = Literal["real", "generated", "file"]


@dataclass(frozen=True)
class SampleSource:
    """A source as a method's settings describe it.

    Attributes:
        kind: which it is. setting: its dotted name in messages. files: folder of `file`.
        volume: number of samples of a task. generator: settings of `generated`.
        answers: samples come with answers, since they are trained on.
    """

    kind: Kind
    setting: str
    files: str | None
    volume: Volume
    generator: GeneratorConfig
    answers: bool

    def check(self, tasks: Sequence[Task], method: Method) -> None:
        """Check the source before any work.

        Raises:
            ConfigError: no generator for inputs. BackboneError: its backbone does not exist. DataError: see
                `read_texts`.
        """
        if self.kind == "generated":
            check_generator(self.generator, method.backbone, self.setting)
        if self.kind == "file":
            for task in tasks:
                read_texts(self.files or "", task, self.setting, self.answers)

    def samples(self, context: TaskContext, method: Method, seed: int) -> PseudoSamples:
        """Return the samples of the phase that has just ended, the same on all workers.

        Args:
            method: the one that learned the phase; answers that a source lacks are its own.
        """
        if self.kind == "real":
            return same_everywhere(take_real(context, self.volume, seed, self.answers), method.backbone.device)
        given: list[str] = []
        if self.kind == "file":
            samples, given = read_file(context, self.files or "", self.volume, self.setting, self.answers)
        else:
            stack = method.stack if isinstance(method.stack, AdapterStack) else None
            samples = Generator(self.generator, method.backbone, stack, seed).write(context, self.volume)
        if self.answers:
            samples = answered(samples, given, context, method)
        return same_everywhere(samples, method.backbone.device)


def check_files(kind: Kind, files: str | None, setting: str) -> None:
    """Check the files in the settings of a source.

    Args:
        setting: dotted name of the source, beside which `files` stands.

    Raises:
        ValueError: a folder without the source `file`, or the other way round.
    """
    if (kind == "file") != (files is not None):
        beside = f"{setting.rpartition('.')[0]}.files"
        raise ValueError(f"{setting}=file needs {beside}, the folder of <task>.jsonl, and no other source does")


def read_file(
    context: TaskContext, folder: str, volume: Volume, setting: str = "method.arm.source", answers: bool = False
) -> tuple[PseudoSamples, list[str]]:
    """Return those of each of the phase's tasks: the first ones, as many as count; and their answers, "" where there is
    none.

    From `<task>.jsonl`, lines of `{"text": ..., "label": ...}` (label is optional); or from `<task>/train.json`, as
    SAPT's authors publish theirs: `{"Instances": [{"input": ..., "output": ...}, ...]}`, of which the instruction is
    left alone.

    Raises:
        DataError: a file is missing, empty or not UTF-8, an input has no text, or an answer is no label of the task.
    """
    sources: list[list[int]] = []
    given: list[str] = []
    counts = {table.task.name: len(table) for table in context.tables("train")}
    for task in context.phase.tasks:
        pairs = read_texts(folder, task, setting, answers)
        kept = pairs[: volume.of(counts.get(task.name, len(pairs)))]
        sources += context.routed_samples(task, [text for text, _ in kept])
        given += [answer for _, answer in kept]
    return PseudoSamples(sources, [], []), given


def read_texts(
    folder: str, task: Task, setting: str = "method.arm.source", answers: bool = False
) -> list[tuple[str, str]]:
    """Return texts and answers of `<task>.jsonl`, or of `<task>/train.json` as SAPT's authors publish theirs.

    Args:
        answers: those of a task with labels must be some of them.

    Raises:
        DataError: the file is missing, not in UTF-8 or empty, a line has no text, or an answer is no label of the task.
    """
    path, released = Path(folder) / f"{task.name}.jsonl", Path(folder) / task.name / "train.json"
    if not path.is_file() and released.is_file():
        path, texts = released, _released(released)
    elif path.is_file():
        texts = _lines(path)
    else:
        raise DataError(
            f"'{path}' with pseudo-samples is missing: expected one JSON line {{\"text\": ...}} for each of them "
            f"({setting.rpartition('.')[0]}.files), or choose {setting}=real"
        )
    for number, pair in enumerate(texts, 1):
        if problem := half_character("".join(pair)):
            raise DataError(f"'{path}', pseudo-sample {number}: {problem}")
    known = task.labels
    unknown = [answer for _, answer in texts if answers and answer and known is not None and answer not in known]
    if unknown:
        raise DataError(
            f"'{path}' has the answer '{unknown[0]}', which is no label of task '{task.name}': expected one of "
            f"{', '.join(task.labels or ())}, or none"
        )
    return texts


def _lines(path: Path) -> list[tuple[str, str]]:
    lines = []
    for number, line in enumerate(StringIO(_utf8(path, 'a JSON line {"text": ...} for each input')), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text, answer = row["text"], row.get("label")
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"'{path}' line {number} is no pseudo-sample: expected {{\"text\": ...}}") from error
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"'{path}' line {number} has no text: remove the line, or write an input")
        lines.append((text, _answer(answer)))
    if not lines:
        raise DataError(f"'{path}' holds no pseudo-sample: write at least one line {{\"text\": ...}}")
    return lines


def _released(path: Path) -> list[tuple[str, str]]:
    expected = '{"Instances": [{"input": ...}, ...]}'
    try:
        pairs = [
            (instance["input"], instance.get("output")) for instance in json.loads(_utf8(path, expected))["Instances"]
        ]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"'{path}' holds no pseudo-samples: expected {expected}") from error
    if not pairs or not all(isinstance(text, str) and text.strip() for text, _ in pairs):
        raise DataError(f"'{path}' holds an empty pseudo-sample, or none: expected {expected}, each input with text")
    return [(text, _answer(answer)) for text, answer in pairs]


def _answer(value: Any) -> str:
    """Return an answer, the first of several references, or "" for none."""
    first = (value[0] if value else None) if isinstance(value, list) else value
    return "" if first is None else str(first).strip()


def _utf8(path: Path, expected: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"'{path}' with pseudo-samples is not UTF-8 (byte {error.start}): expected {expected}; save it as UTF-8"
        ) from error


AT_ONCE = 32
"""Inputs that are answered together."""


def answered(samples: PseudoSamples, given: Sequence[str], context: TaskContext, method: Method) -> PseudoSamples:
    """Return the samples that get an answer: one that is given, or else the method's own.

    Generators write inputs, as SAPT's do. The model that has just learned their task answers them, greedily and with
    the task's own labels: a later task then trains on what this one would have said.

    Args:
        given: answers by sample, "" for none; empty if there are none at all.
        method: after the end of the phase, as it is evaluated.
    """
    answers = list(given) or [""] * len(samples)
    missing = [number for number, answer in enumerate(answers) if not answer]
    for number, answer in zip(missing, _own(method, [samples.sources[n] for n in missing], context), strict=True):
        answers[number] = answer.strip()
    kept = [number for number, answer in enumerate(answers) if answer]
    labels = phase_labels(context.phase)
    return PseudoSamples(
        [samples.sources[number] for number in kept],
        context.targets(context.phase.tasks[0], [answers[number] for number in kept]),
        [labels.index(answers[number]) if answers[number] in labels else -1 for number in kept],
        samples.fallback_samples,
    )


@torch.no_grad()
def _own(method: Method, sources: Sequence[Sequence[int]], context: TaskContext) -> list[str]:
    """Return the method's answers, restricted to the labels of the phase, if it has any."""
    backbone, limit = method.backbone, context.target_limit(context.phase.tasks[0])
    labels, allowed = phase_labels(context.phase), backbone.allowed_labels
    backbone.allowed_labels = dict(zip(labels, context.targets(context.phase.tasks[0], labels), strict=True))
    answers: list[str] = []
    try:
        with evaluating(backbone):
            for batch in batches_of(sources, AT_ONCE, backbone.codec.pad_id, backbone.device):
                with activate_batch(method, batch):
                    answers += predict(backbone, batch, limit)
    finally:
        backbone.allowed_labels = allowed
    return answers
