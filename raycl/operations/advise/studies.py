"""The measured comparisons of methods: scores and costs from their CSV files, capabilities from the methods' classes.

A study is a comparison file and the runs that were made of it: `jobs/configs/compare/NAME.yaml` and `results/NAME.csv`
among the files that are installed with raycl. Studies compare many methods, each with the same search for its settings;
other CSV files there answer one question each, and recommend nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raycl import config as configs
from raycl.backbone import BackboneConfig
from raycl.errors import ConfigError
from raycl.methods.registry import method_class, method_config
from raycl.operations.report.recorded_runs import RecordedRuns
from raycl.operations.report.run_comparison import Spread
from raycl.operations.report.verdicts import Verdict
from raycl.operations.sweep.comparison import ComparisonConfig

STUDIES = ("methods-long8", "methods-superni6-mini-t5", "methods-superni6-mini-llama")

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
        """Average performance."""
        return self.numbers["ap"]


@dataclass(frozen=True)
class Study:
    """A comparison of methods on one stream and backbone.

    Attributes:
        kind: of the backbone. tasks, rows: tasks of the stream, and training rows of each. parameters: of the backbone.
        measured: rows in the order of their AP, best first. runs: the runs that they are made of.
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

    def undecided(self, best: Measured, others: Sequence[Measured]) -> list[tuple[Measured, Verdict]]:
        """Return the rows that cannot be told from `best`, with their verdicts.

        Holm's correction counts the comparisons with `best` alone.
        """
        pairs = [(row.name, best.name) for row in others]
        made = zip(others, self.runs.verdicts(pairs), strict=True)
        return [(row, verdict) for row, verdict in made if verdict.word == "cannot be told"]


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
    measured = []
    for row, entry in comparison.runs.items():
        tree = configs.load_tree(None, entry.set)
        searched = entry.singles is not None and row not in CHOSEN_ON_TEST
        labels_given = tree.get("eval", {}).get("labels") == "task"
        seeds = list(recorded.runs.get(row, {}).values())
        if seeds and (searched or labels_given):
            measured.append(_measured(row, entry.set, tree, seeds, labels_given))
    stream = comparison.base["stream"]
    runs = [run for seeds in recorded.runs.values() for run in seeds.values()]
    return Study(
        comparison.name,
        kind,
        runs[0]["stream"],
        runs[0]["backbone"],
        len(stream["tasks"]),
        stream["train_rows"],
        max(float(run["trained_parameters"]) for run in runs),
        sorted(measured, key=lambda row: -row.ap.mean),
        recorded,
    )


def _measured(
    row: str, overrides: Sequence[str], tree: dict[str, Any], runs: Sequence[dict[str, str]], labels_given: bool
) -> Measured:
    method = tree["method"] if isinstance(tree["method"], dict) else {"name": tree["method"]}
    config = method_config(method)
    outer, learner = method_class(config.name), method_class(config.innermost.name)
    not_served = outer.not_served or learner.not_served
    if not not_served and learner.trains_backbone:
        not_served = "it is a whole model, and an endpoint of raycl serves adapters"
    return Measured(
        row,
        tuple(word for word in overrides if not word.startswith("eval.subsample")),
        len(runs),
        {name: spread for name in NUMBERS if (spread := Spread.over([float(run[name]) for run in runs])) is not None},
        config.keeps_data,
        config.needs_task or labels_given,
        learner.trains_backbone,
        learner.own_adapters,
        not_served,
    )
