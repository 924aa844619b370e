"""A recommendation for a case, with its reasons: the rows of a study that the case allows, by their AP. Scores and
costs come from the CSV files of measured comparisons, capabilities from the methods' classes.

A study is a comparison file and the runs that were made of it: `jobs/configs/compare/NAME.yaml` and `results/NAME.csv`
among the files that are installed with raycl. Studies compare many methods, each with the same search for its settings;
other CSV files there answer one question each, and recommend nothing.
"""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from raycl import config as configs
from raycl.backbone import BackboneConfig
from raycl.errors import ConfigError, counted
from raycl.methods.registry import DEFAULT_METHOD, method_class, method_config
from raycl.metrics.paired_comparison import LEVEL
from raycl.operations.report.recorded_runs import RecordedRuns
from raycl.operations.report.run_comparison import Line, Spread
from raycl.operations.report.tables import points
from raycl.operations.sweep.comparison import ComparisonConfig
from raycl.text_tables import edgeless, render, short_number

SHOWN = 3
FAR = 3.0
"""A case is another than the study's where it has this many times the rows or parameters, or one part of so many."""

BYTES_FROZEN, BYTES_TRAINED = 2, 16
"""Bytes of a parameter in training: bfloat16 weights alone; with a gradient, two moments and a float32 master too."""


STUDIES = ("methods-long8", "methods-superni6-mini-t5", "methods-superni6-mini-llama")

LABELS_GIVEN = "eval.labels=task"
"""The override of rows whose texts are answered among the labels of their own task; such rows are named NAME-own."""

CHOSEN_ON_TEST = ("inflora-0.98",)
"""Rows whose settings were chosen by test scores; they recommend nothing."""

NUMBERS = ("ap", "f_ra", "wall_s", "trained_parameters", "peak_memory_mb")


@dataclass(frozen=True)
class Measured:
    """A row of a study: a method with its settings.

    Attributes:
        settings: overrides of the row, as on the command line. seeds: number of its runs.
        numbers: `NUMBERS` over the seeds.
        keeps_data: rows, samples or features of earlier tasks are kept. needs_task: a text's task is given at test.
        trains_backbone: the backbone's own weights are trained. own_adapters: every task leaves an adapter of its own.
        not_served: why what it learned cannot be served; "" where it can.
    """

    name: str
    settings: tuple[str, ...]
    seeds: int
    numbers: dict[str, Spread]
    keeps_data: bool
    needs_task: bool
    trains_backbone: bool
    own_adapters: bool
    not_served: str

    @property
    def ap(self) -> Spread:
        return self.numbers["ap"]


@dataclass(frozen=True)
class Study:
    """A comparison of methods on one stream and backbone.

    Attributes:
        kind: of the backbone. tasks, rows: tasks of the stream, and training rows of each. parameters: of the backbone.
        measured: rows in the order of their AP, best first. runs: the runs that they are made of.
        is_default: the backbone is that of a run that names none.
    """

    name: str
    kind: str
    stream: str
    backbone: str
    tasks: int
    rows: int
    parameters: float
    measured: list[Measured]
    runs: RecordedRuns
    is_default: bool


def read_study(files: Path, kind: str | None = None) -> Study:
    """Return the study on this kind of backbone; None: on that of a run by default.

    Args:
        files: folder of `results/` and `jobs/configs/compare/`.

    Raises:
        ConfigError: no study has such a backbone.
    """
    comparisons = {}
    for name in STUDIES:
        comparison = configs.load(ComparisonConfig, str(files / f"jobs/configs/compare/{name}.yaml"))
        backbone = BackboneConfig(**comparison.base["backbone"])
        comparisons[backbone.kind] = comparison
        if kind is None and backbone.name == BackboneConfig().name:
            kind = backbone.kind
    if kind not in comparisons:
        raise ConfigError(f"there is no study on backbones of kind '{kind}': expected {', '.join(comparisons)}")
    comparison = comparisons[kind]
    recorded = RecordedRuns(files / f"results/{comparison.name}.csv")
    lines = {line.method: line for line in recorded.lines()}
    measured = []
    trained = [f"train.{key}={value}" for key, value in configs.flatten(comparison.base["train"]).items()]
    for row, entry in comparison.runs.items():
        tree = configs.load_tree(None, entry.set)
        searched = entry.singles is not None and row not in CHOSEN_ON_TEST
        labels_given = LABELS_GIVEN in entry.set
        if row in lines and (searched or labels_given):
            measured.append(_measured(lines[row], (*entry.set, *trained), tree, labels_given))
    stream, first = comparison.base["stream"], next(iter(lines.values()))
    return Study(
        comparison.name,
        kind,
        first.stream,
        first.backbone,
        len(stream["tasks"]),
        stream["train_rows"],
        max(number for row in lines for number in recorded.numbers(row, "trained_parameters")),
        sorted(measured, key=lambda row: -row.ap.mean),
        recorded,
        BackboneConfig(**comparison.base["backbone"]).name == BackboneConfig().name,
    )


def _measured(line: Line, overrides: Sequence[str], tree: dict[str, Any], labels_given: bool) -> Measured:
    method = tree["method"] if isinstance(tree["method"], dict) else {"name": tree["method"]}
    config = method_config(method)
    outer, learner = method_class(config.name), method_class(config.innermost.name)
    not_served = outer.not_served or learner.not_served
    if not not_served and learner.trains_backbone:
        not_served = "it is a whole model, and an endpoint of raycl serves adapters"
    return Measured(
        line.method,
        tuple(word for word in overrides if not word.startswith("eval.subsample")),
        line.runs,
        {name: spread for name in NUMBERS if (spread := line.numbers[name]) is not None},
        config.keeps_data,
        config.needs_task or labels_given,
        learner.trains_backbone,
        learner.own_adapters,
        not_served,
    )


@dataclass(frozen=True)
class Case:
    """The known facts of a problem; None: not known.

    Attributes:
        tasks, rows: tasks in all, and training rows of each. parameters: of the backbone.
        may_keep_data: rows of earlier tasks may be stored. task_known: a text's task is known when it is answered.
        memory_gib: memory of the device that trains. serves: an endpoint answers from what was learned.
        words: overrides of the command that the recommendation shows, such as the tasks and the backbone.
    """

    tasks: int | None = None
    rows: int | None = None
    parameters: float | None = None
    may_keep_data: bool = True
    task_known: bool = False
    memory_gib: float | None = None
    serves: bool = False
    words: tuple[str, ...] = ()

    def obstacles(self) -> dict[str, Callable[[Measured], bool]]:
        """Return reason -> whether it rules a row out."""
        return {
            "keep data of earlier tasks": lambda row: row.keeps_data and not self.may_keep_data,
            "need the task of a text at test": lambda row: row.needs_task and not self.task_known,
            "cannot be served": lambda row: bool(row.not_served) and self.serves,
            f"need more than {self.memory_gib} GiB for weights and optimizer alone": self._is_too_large,
        }

    def _is_too_large(self, row: Measured) -> bool:
        if self.memory_gib is None or self.parameters is None:
            return False
        each = BYTES_TRAINED if row.trains_backbone else BYTES_FROZEN
        return each * self.parameters > self.memory_gib * 2**30


@dataclass(frozen=True)
class Advice:
    """The best rows of a study for a case.

    Attributes:
        left_out: reason -> names of the rows that it rules out. notes: sentences on what the figures cannot tell.
    """

    study: Study
    case: Case
    best: list[Measured]
    left_out: dict[str, list[str]]
    notes: list[str]

    @property
    def tree(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        rows = [
            {
                "row": row.name,
                "seeds": row.seeds,
                **{name: {"mean": spread.mean, "std": spread.std} for name, spread in row.numbers.items()},
                "keeps": keeps(row),
                "needs_task": row.needs_task,
                "not_served": row.not_served,
                "command": command(self.study, row, self.case),
            }
            for row in self.best
        ]
        study = {"name": self.study.name, "stream": self.study.stream, "backbone": self.study.backbone}
        return {"study": study, "best": rows, "left_out": self.left_out, "notes": self.notes}

    def __str__(self) -> str:
        study, case = self.study, self.case
        head = (
            f"measured on {counted(study.tasks, 'task')} of {study.rows} rows, {study.backbone} "
            f"({study.parameters / 1e6:.0f}M): {study.name}.csv"
        )
        table = edgeless(("method", "seeds", "AP", "F.Ra", "time", "trained", "memory", "what it keeps"), words=(0, 7))
        for row in self.best:
            cost = [
                short_number(row.numbers["trained_parameters"].mean),
                f"{row.numbers['peak_memory_mb'].mean:,.0f} MiB",
            ]
            scores = [points(row.ap), points(row.numbers["f_ra"]), f"{row.numbers['wall_s'].mean:.0f} s"]
            table.add_row(row.name, str(row.seeds), *scores, *cost, keeps(row))
        lines = [f"{self.best[0].name}: {_reason(self)}", *self.notes]
        lines += [f"left out, since they {why}: {', '.join(names)}" for why, names in self.left_out.items()]
        if any(LABELS_GIVEN in row.settings for row in study.measured):
            lines.append(f"rows named -own choose among the labels of the text's own task ({LABELS_GIVEN})")
        commands = "\n".join(f"  {command(study, row, case)}" for row in self.best)
        listed = "\n".join(f"- {line}" for line in lines)
        return render(Group(Text(head), table, Text(listed), Text(f"\nto train it, and the others:\n{commands}")))


def advise(study: Study, case: Case) -> Advice:
    """Return the recommendation of a study.

    Raises:
        ConfigError: the case allows no row.
    """
    left_out: dict[str, list[str]] = {}
    allowed = []
    for row in study.measured:
        reason = next((why for why, rules_out in case.obstacles().items() if rules_out(row)), None)
        if reason is None:
            allowed.append(row)
        else:
            left_out.setdefault(reason, []).append(row.name)
    if not allowed:
        given = "; ".join(f"{len(names)} {why}" for why, names in left_out.items())
        raise ConfigError(
            f"no measured method fits: {given}: allow data to be kept, more memory, or a smaller backbone"
        )
    return Advice(study, case, allowed[:SHOWN], left_out, [*_undecided(study, allowed), *_far(study, case, allowed[0])])


def command(study: Study, row: Measured, case: Case) -> str:
    """Return the command that trains as the row was measured; a backbone that the case does not name is `MODEL`."""
    is_named = study.is_default or any(word.startswith("backbone.name=") for word in case.words)
    return shlex.join(["raycl", "train", *row.settings, *case.words, *([] if is_named else ["backbone.name=MODEL"])])


def keeps(row: Measured) -> str:
    """Return what a method keeps of earlier tasks."""
    weights = "an adapter of each task" if row.own_adapters else "one adapter"
    kept = ["the whole model" if row.trains_backbone else weights]
    return ", ".join(kept + ["rows of earlier tasks"] * row.keeps_data)


def _reason(advice: Advice) -> str:
    best, rows = advice.best[0], advice.study.measured
    plain = next((row for row in rows if row.name == DEFAULT_METHOD), best)
    beside = "" if plain is best else f"; {plain.name}, the default, has {points(plain.ap)}"
    allowed = len(rows) - sum(map(len, advice.left_out.values()))
    return f"AP {points(best.ap)} is the highest of the {counted(allowed, 'row')} that fit{beside}"


def _undecided(study: Study, allowed: list[Measured]) -> list[str]:
    best, *others = allowed
    verdicts = study.runs.verdicts([(row.name, best.name) for row in others])  # Holm's correction counts these alone
    equal = [pair for pair in zip(others, verdicts, strict=True) if pair[1].word == "cannot be told"]
    notes = []
    if several := [(row, verdict) for row, verdict in equal if row.seeds > 1]:
        names = ", ".join(
            f"{row.name} ({points(row.ap)}; could tell: {verdict.what_could_tell})" for row, verdict in several
        )
        fastest = min([best, *(row for row, _ in several)], key=lambda row: row.numbers["wall_s"].mean)
        notes.append(
            f"the figures cannot tell {best.name} from {names}; of these {fastest.name} took the shortest time"
        )
        notes.append(
            "'cannot tell': between methods that are equally good, chance makes so large a difference with a "
            f"probability p of {LEVEL:g} or more (p by Holm: corrected for comparing several methods at once)"
        )
    if single := [row.name for row, _ in equal if row.seeds == 1]:
        rest = f" and {len(single) - SHOWN} more" if len(single) > SHOWN else ""
        notes.append(f"rows of one seed cannot be told from {best.name} either: {', '.join(single[:SHOWN])}{rest}")
    return notes


def _far(study: Study, case: Case, best: Measured) -> list[str]:
    pairs = {"rows a task": (case.rows, study.rows), "parameters": (case.parameters, study.parameters)}
    notes = [
        f"not measured at your size: {short_number(given)} {what}, {short_number(measured)} in the study; the order "
        "may be another, and so may the best rates"
        for what, (given, measured) in pairs.items()
        if given is not None and not 1 / FAR <= given / measured <= FAR
    ]
    if case.tasks is not None and case.tasks > FAR * study.tasks and best.own_adapters:
        trained = short_number(best.numbers["trained_parameters"].mean)
        notes.append(
            f"{counted(case.tasks, 'task')}, {study.tasks} in the study: {best.name} keeps an adapter of each, at most "
            f"{trained} parameters there"
        )
    return notes
