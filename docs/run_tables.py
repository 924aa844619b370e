"""Tables and verdicts of measured runs in the pages: `make docs-excerpts` writes them, and a test keeps them true.

A page names a table of `docs/results/tables.yaml` in a comment; what stands up to the closing comment is generated from
the CSV files beside it, which have one line a run. Verdicts are those of `raycl report`, on these files. A table of
`docs/results/printed.yaml` has figures that a command printed, and its source below:

    <!-- table: readme -->
    <!-- /table -->
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from raycl.config import flatten, load, load_tree
from raycl.metrics.paired_comparison import TaskScore, difference
from raycl.operations.report.recorded_runs import RecordedRuns
from raycl.operations.report.run_comparison import Spread
from raycl.operations.report.tables import NOTHING, points
from raycl.operations.report.verdicts import Verdict, corrected, interval_text
from raycl.operations.sweep.comparison import ComparisonConfig, ComparisonEntry
from raycl.text_tables import short_number

REPO = Path(__file__).resolve().parents[1]
RESULTS = REPO / "docs" / "results"
TABLE = re.compile(r"^<!-- table: (\S+) -->\n.*?^<!-- /table -->$", re.MULTILINE | re.DOTALL)


class Study(RecordedRuns):
    """The runs of a comparison: its CSV file, and the file that says what each row sets."""

    def __init__(self, results: Path, name: str) -> None:
        super().__init__(results / f"{name}.csv")
        self.entries = _entries(name)

    def streams(self, compared: bool | None = None) -> list[str]:
        """Return the names of the rows that learn the tasks one after another, the highest AP first.

        Args:
            compared: those with a run of each task alone, or those without; None: both.
        """
        names = [
            row
            for row, entry in self.entries.items()
            if row in self.runs
            and "stream.schedule=separate" not in entry.set
            and entry.fused is None
            and compared in (None, entry.singles is not None)
        ]
        return sorted(names, key=lambda row: fmean(self.numbers(row, "ap")), reverse=True)

    def alone(self, row: str) -> list[float]:
        """Return AP of the tasks learned alone, for the seeds of a row."""
        singles = self.entries[row].singles if row in self.entries else None  # `untrained` is no row of its own
        return [] if singles is None else self.numbers(singles, "ap", list(self.runs[row]))


@cache
def _entries(name: str) -> dict[str, ComparisonEntry]:
    return load(ComparisonConfig, str(REPO / f"jobs/configs/compare/{name}.yaml")).runs


def _points(column: str) -> Callable[[Study, str], str]:
    return lambda study, row: points(Spread.over(study.numbers(row, column)))


TYPES = ("dialogue", "extraction", "question answering", "summary", "sentiment")
"""Types of SuperNI's tasks."""

COLUMNS: dict[str, Callable[[Study, str], str]] = {
    "seeds": lambda study, row: str(len(study.numbers(row, "ap"))),
    "AP": _points("ap"),
    "F.Ra": _points("f_ra"),
    "FWT": _points("fwt"),
    "BWT": _points("bwt"),
    "alone": lambda study, row: points(Spread.over(study.alone(row))),
    "time": lambda study, row: f"{times[0]:.0f} s" if (times := study.numbers(row, "wall_s")) else NOTHING,
    "before": _points("general_before"),
    "after": _points("general_after"),
    "change": _points("general_delta"),
    "to the bare model": _points("general_unknown"),
    "unseen": _points("unseen"),
    **{kind: _points(f"unseen_{kind}") for kind in TYPES},
    "trained": lambda study, row: short_number(max(study.numbers(row, "trained_parameters"), default=0)),
    "memory": lambda study, row: (
        f"{fmean(sizes):,.0f} MiB" if (sizes := study.numbers(row, "peak_memory_mb")) else NOTHING
    ),
}
"""Head -> cell of a row. The time is that of the first seed. Any other head is a task's name: its last score."""


def _cell(column: str, study: Study, row: str) -> str:
    return COLUMNS.get(column, _points(f"score_{column}"))(study, row)


def table(definition: dict[str, Any], results: Path = RESULTS) -> str:
    """Return a table of Markdown: a line for each row of runs, a column for each number of each study.

    Args:
        definition: `runs`: a CSV file, or several with the head that stands for each one's AP. `columns`: of `COLUMNS`,
            or tasks.
            `rows`: `all`, `compared` (those with a run of each task alone) or `others`, or names of rows with further
            cells, under `heads`. `without`: rows that are left out of these.
        results: folder of the CSV files.
    """
    runs, rows = definition["runs"], definition["rows"]
    columns = definition.get("columns", ["AP"])
    studies = [Study(results, name) for name in ([runs] if isinstance(runs, str) else runs)]
    heads = columns if isinstance(runs, str) else list(runs.values())
    if isinstance(rows, str):
        chosen = studies[0].streams({"all": None, "compared": True, "others": False}[rows])
        rows = {row: [f"`{row}`"] for row in chosen if row not in definition.get("without", ())}
    lines = [
        [*map(str, cells), *(_cell(column, study, row) for study in studies for column in columns)]
        for row, cells in rows.items()
    ]
    heads = [*definition.get("heads", ["method"]), *heads]
    return markdown(heads, lines)


def claims(definition: dict[str, Any], results: Path = RESULTS) -> str:
    """Return a table of Markdown: what papers say is better than what, and the verdict on it by the runs.

    Args:
        definition: `runs`: a CSV file. `claims`: each with its `source`, the numbers `published` for rows, and `order`:
            rows with `>` between them, each better than the next.
        results: folder of the CSV file.
    """
    study = Study(results, definition["runs"])
    pairs = [
        (claim, first, second)
        for claim in definition["claims"]
        for order in claim["order"]
        for first, second in pairwise(order.split(" > "))
    ]
    lines = []
    before = None
    for (claim, first, second), verdict in zip(
        pairs, study.verdicts([(first, second) for _, first, second in pairs]), strict=True
    ):
        published = claim.get("published", {})
        known = [published[row] for row in (first, second) if row in published]
        lines.append(
            [
                "" if claim is before else claim["source"],
                f"`{first}` > `{second}`",
                f"{known[0] - known[1]:+z.1f}" if len(known) == 2 else "",
                "" if verdict.difference is None else f"{verdict.difference.mean:+z.1f}",
                interval_text(verdict.difference),
                *_told(verdict, {"better": "yes", "worse": "no, the reverse"}),
            ]
        )
        before = claim
    heads = ["source", "claim", "published difference", "here", "95 % interval", "seeds", "holds?", "could tell"]
    return markdown(heads, lines)


def searched(definition: dict[str, Any], results: Path = RESULTS) -> str:
    """Return a table of Markdown: what each method was searched over, with how many trials, and what was chosen.

    Args:
        definition: `searched`: a CSV file of a sweep's trials in `searches/`. `rows`: what the trials were scored on.
            `ties`: `learned` where of equal trials the one counts that learned its first task best; else the first.
        results: folder of `searches/`.
    """
    with (results / "searches" / f"{definition['searched']}.csv").open(encoding="utf-8", newline="") as lines:
        trials = [trial for trial in csv.DictReader(lines) if trial["state"] == "done"]
    by_method: dict[str, list[dict[str, str]]] = {}
    for trial in sorted(trials, key=lambda trial: int(trial["trial"])):
        method, modifiers = json.loads(trial["method"]), trial.get("modifiers", "")
        by_method.setdefault("+".join([method["name"], *json.loads(modifiers or "[]")]), []).append(trial)
    written = []
    for name, some in sorted(by_method.items()):
        methods = [json.loads(trial["method"]) for trial in some]
        own = {key: list(dict.fromkeys(json.dumps(method.get(key)) for method in methods)) for key in methods[0]}
        varied = [f"{key}: {' or '.join(values)}" for key, values in own.items() if len(values) > 1]
        rates = list(dict.fromkeys(trial["train.learning_rate"] for trial in some))
        scores = [float(trial["ap"]) for trial in some]
        learned = [float(trial["f_ra"] or 0) if definition.get("ties") == "learned" else 0.0 for trial in some]
        chosen = max(zip(scores, learned, some, strict=True), key=lambda of: of[:2])[2]
        kept = [f"{key}: {json.dumps(json.loads(chosen['method'])[key])}" for key in own if len(own[key]) > 1]
        cells = [f"`{name}`", str(len(some)), " or ".join(rates), ", ".join(varied)]
        cells += [", ".join([chosen["train.learning_rate"], *kept]), f"{max(scores):.1f}", f"{min(scores):.1f}"]
        written.append(cells)
    heads = ["method", "trials", "rates", "its own setting", "chosen", "AP of the chosen", "of the worst"]
    return markdown(heads, written)


def planned(definition: dict[str, Any], results: Path = RESULTS) -> str:
    """Return a table of Markdown: what each method of a comparison was searched over, with how many trials, and what
    its row has of it.

    Args:
        definition: `planned`: a comparison and the CSV file of its runs. `sweeps`: files in `sweeps/`, whose spaces are
            grids. Methods that have not run, or have a rate that no sweep has, were not searched and have no line.
        results: folder of the CSV file.
    """
    study = Study(results, definition["planned"])
    spaces: dict[str, list[tuple[dict[str, Any], list[float], list[float]]]] = {}
    for name in definition["sweeps"]:
        space = load_tree(str(REPO / f"sweeps/{name}.yaml"))["space"]
        rates = space["train.learning_rate"]["grid"]
        head_rates = space.get("train.head_learning_rate", {}).get("grid", [])
        for method in space["method"]["grid"]:
            row = "-".join(filter(None, (method["name"], method.get("base"))))
            spaces.setdefault(row, []).append((flatten(method), rates, head_rates))
    written = []
    for row in study.streams(compared=None):
        chosen = flatten(load_tree(None, study.entries[row].set))
        rates = [rate for _, some, _ in spaces.get(row, []) for rate in some]
        if chosen["train.learning_rate"] not in rates:
            continue
        head_rates = [rate for *_, some in spaces[row] for rate in some]
        keys = _distinct(key for known, *_ in spaces[row] for key in known)
        own = {key: _distinct(known.get(key, "default") for known, *_ in spaces[row]) for key in keys}
        own = {key: values for key, values in own.items() if len(values) > 1}
        kept = [f"{key}: {_short(chosen[f'method.{key}'])}" for key in own if f"method.{key}" in chosen]
        kept += [f"head: {chosen['train.head_learning_rate']:g}"] if "train.head_learning_rate" in chosen else []
        varied = [f"{key}: {_choice(values)}" for key, values in own.items()]
        varied += [f"rate of the label head: {_choice(_distinct(head_rates))}"] if head_rates else []
        trials = sum(len(some) * max(1, len(heads)) for _, some, heads in spaces[row])
        cells = [_choice(sorted(_distinct(rates))), "; ".join(varied)]
        written.append([f"`{row}`", str(trials), *cells, ", ".join([f"{chosen['train.learning_rate']:g}", *kept])])
    return markdown(["method", "trials", "rates", "its own settings", "chosen"], sorted(written))


def _distinct(values: Iterable[Any]) -> list[Any]:
    """Return values without repeats, in their order; lists among them too."""
    return list({json.dumps(value): value for value in values}.values())


def _choice(values: Sequence[Any]) -> str:
    """Return values in words: `1, 2 or 3`."""
    return _listed([_short(value) for value in values], "or")


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def best(definition: dict[str, Any], results: Path = RESULTS) -> str:
    """A table of Markdown: rows of several seeds, in groups by their verdict against the one with the highest AP.

    Args:
        definition: `best`: a CSV file.
        results: folder of the CSV file.
    """
    study = Study(results, definition["best"])
    first, *others = [row for row in study.streams(compared=True) if len(study.numbers(row, "ap")) > 1]
    pairs = [(row, first) for row in others] + list(combinations(others, 2))
    made = study.verdicts(pairs)[: len(others)]
    words = {"worse": f"worse than `{first}`", "cannot be told": f"cannot be told from `{first}`"}
    groups = {head: [verdict for verdict in made if verdict.word == word] for word, head in words.items()}
    lines = [[head, ", ".join(map(_named, group))] for head, group in groups.items() if group]
    return markdown([f"AP, p by Holm over all {len(pairs)} pairs", "methods with several seeds"], lines)


def _named(verdict: Verdict) -> str:
    return f"`{verdict.first}`" + (f" ({verdict.what_could_tell} could)" if verdict.what_could_tell else "")


def _told(verdict: Verdict, words: dict[str, str]) -> list[str]:
    seeds = str(verdict.difference.seeds) if verdict.difference else "0"
    return [seeds, words.get(verdict.word, verdict.word), verdict.what_could_tell]


def backwards(definition: dict[str, Any], results: Path = RESULTS) -> str:
    """Return a table of Markdown: BWT of rows with several seeds, its 95 % interval, and the verdict on its sign.

    Args:
        definition: `backwards`: CSV files, each with the head that stands for its stream. `least`: BWT below it is left
            out, where no question is open.
        results: folder of the CSV files.
    """
    rows: list[tuple[str, str, Verdict]] = []
    for name, head in definition["backwards"].items():
        study = Study(results, name)
        for row in study.streams():
            changes = [{"bwt": TaskScore(value)} for value in study.numbers(row, "bwt")]
            if len(changes) > 1:
                change = difference([(one, {"bwt": TaskScore(0.0)}) for one in changes])
                rows.append((head, row, Verdict(row, "", "bwt", change)))
    rows.sort(key=lambda row: -row[2].difference.mean if row[2].difference else 0.0)
    made = corrected([verdict for *_, verdict in rows])
    lines = [
        [head, f"`{row}`", f"{change.mean:+z.1f}", interval_text(change), *_told(verdict, RAISED)]
        for (head, row, _), verdict in zip(rows, made, strict=True)
        if (change := verdict.difference) is not None and change.mean >= definition["least"]
    ]
    heads = ["stream", "method", "BWT", "95 % interval", "seeds", "do later tasks raise earlier ones?", "could tell"]
    return markdown(heads, lines)


RAISED = {"better": "yes", "worse": "no, they lower them"}
"""Word of a verdict on BWT against none -> what it says of earlier tasks."""

KINDS = {"claims": claims, "best": best, "searched": searched, "planned": planned, "backwards": backwards}
"""Key of a definition -> what writes its table; without such a key it is a table of runs."""


def printed(figures: dict[str, Any]) -> str:
    """Return a table of Markdown, and below it what printed its figures and when they were recorded.

    Args:
        figures: `heads` and `rows`; `commands`, where they are known; `recorded`: day -> commits, where they are known.
    """
    commands = " and ".join(f"`{command}`" for command in figures.get("commands", ()))
    days = [f"{day} ({', '.join(map(str, commits))})" for day, commits in figures.get("recorded", {}).items()]
    source = "; ".join(filter(None, (commands and f"printed by {commands}", "recorded on " + _listed(days))))
    made = markdown(figures["heads"], [[str(cell) for cell in row] for row in figures["rows"]])
    return f"{made}\n\n{source[0].upper()}{source[1:]}."


def _listed(words: Sequence[str], before_last: str = "and") -> str:
    *some, last = words
    return f" {before_last} ".join(filter(None, (", ".join(some), last)))


def markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    rows = [heads, *lines]
    written = ["|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in rows]
    return "\n".join([written[0], "|" + "---|" * len(heads), *written[1:]])


def with_tables(page: str, results: Path = RESULTS) -> str:
    """Return the page with all its tables as the CSV files have the figures now.

    Raises:
        ValueError: it names a table or a row that does not exist.
    """
    defined = yaml.safe_load((RESULTS / "tables.yaml").read_text(encoding="utf-8"))
    copied = yaml.safe_load((results / "printed.yaml").read_text(encoding="utf-8"))

    def block(match: re.Match[str]) -> str:
        if match[1] in copied:
            made = printed(copied[match[1]])
        elif match[1] in defined:
            definition = defined[match[1]]
            make = next((KINDS[key] for key in KINDS if key in definition), table)
            made = make(definition, results)
        else:
            known = ", ".join([*defined, *copied])
            raise ValueError(f"tables.yaml and printed.yaml have no table '{match[1]}': expected one of {known}")
        return f"<!-- table: {match[1]} -->\n\n{made}\n\n<!-- /table -->"

    return TABLE.sub(block, page)
