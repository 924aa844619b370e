"""Result files: their location, their numbers, and the names of runs.

Tables, plots and comparisons share one reading of a result tree, and one way to name a run. A comparison file can name
the numbers that a paper printed for its rows; they are written into its folder, so that later reports show them too.

A result tree is the parsed `results.json` of a run; the keys used here are `config` (with `seed`, `stream`,
`backbone`, `method`, perhaps `modifiers`), `stream` (with `tasks`), `phases`, `matrix`, `metrics`, perhaps `unseen`.
"""

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from raycl import config as configs
from raycl.config import Section, Tree
from raycl.errors import ConfigError, DamagedError, RunError
from raycl.metrics.paired_comparison import RowScores
from raycl.storage import Storage
from raycl.storage.records import without_hash

RESULT_FILE = "results.json"
PUBLISHED_FILE = "published.json"
"""Name in a comparison's folder of the numbers that a paper printed."""
FOLDER = "folder"
"""Key of a result tree's own folder, in trees that `find_results` returned."""
METRICS = {"ap": "AP", "f_ra": "F.Ra", "fwt": "FWT", "bwt": "BWT"}
"""Metrics of a stream: key in the file -> name in the papers, the title of a column."""

PUBLISHABLE = (*METRICS, "accuracy", "accuracy_first_two", "accuracy_last_two", "unseen")
OF_TYPE = "unseen_"
"""Numbers of a comparison's line that a paper may print too; `unseen_<type>` is the mean over the tasks of a type that
were never trained."""


class Published(Section):
    """The numbers that a paper printed."""

    source: str = Field(min_length=1, description="paper, table, benchmark and model of the numbers")
    rows: dict[str, dict[str, float]] = Field(
        min_length=1, description="name of a row -> ap, f_ra, fwt, bwt, accuracy, unseen or unseen_<type> -> number"
    )
    contradicted: dict[str, dict[str, str]] = Field(
        default_factory=dict, description="name of a row -> one of its numbers -> what contradicts it; it gets a mark"
    )

    @field_validator("rows")
    @classmethod
    def _metrics_are_known(cls, rows: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
        for row, numbers in rows.items():
            unknown = [name for name in numbers if name not in PUBLISHABLE and not name.startswith(OF_TYPE)]
            if unknown:
                raise ValueError(f"row '{row}' has the number '{unknown[0]}': expected {', '.join(PUBLISHABLE)}")
        return rows

    @model_validator(mode="after")
    def _marked_numbers_exist(self) -> "Published":
        for row, marks in self.contradicted.items():
            if unknown := sorted(set(marks) - set(self.rows.get(row, ()))):
                raise ValueError(f"contradicted.{row} names '{unknown[0]}', of which rows.{row} has no number: add it")
        return self

    def of(self, row: str) -> Tree | None:
        """Return the numbers of a row with their source and marks; None: it has none."""
        if row not in self.rows:
            return None
        marks = dict(self.contradicted.get(row, {}))
        return {"source": self.source, "numbers": dict(self.rows[row]), "contradicted": marks}

    def beside(self, result: Tree) -> Tree:
        """Return the result tree with its row's published numbers (`<row>-s<seed>`), if any, as `published`."""
        name = str((result["config"].get("output") or {}).get("name") or "")
        published = self.of(name.rpartition("-s")[0])
        return result if published is None else {**result, "published": published}

    def write(self, folder: Storage) -> None:
        """Write the numbers into the comparison's folder for later reports, unless they are there already."""
        tree = configs.as_tree(self)
        if not folder.exists(PUBLISHED_FILE) or folder.read_json(PUBLISHED_FILE) != json.loads(json.dumps(tree)):
            folder.write_json(PUBLISHED_FILE, tree)


def read_results(path: str | Path) -> Tree:
    """Return the result tree of a run folder (path or URI), or of a result file itself.

    Raises:
        RunError: there is no result, or the file is something else.
        StorageError: the file cannot be read.
    """
    folder, name = str(path), RESULT_FILE
    if folder.endswith(".json"):
        folder, _, name = folder.rpartition("/")
        folder = folder or "."
    storage = Storage.at(folder)
    if not storage.exists(name):
        raise RunError(f"there is no {name} in '{folder}': give the folder of a finished run")
    return _read(storage, name)


def finished_results(path: str | Path) -> Tree:
    """Return the result tree of a finished run.

    Raises:
        RunError: it has not learned all of its tasks. See `read_results`.
    """
    tree = read_results(path)
    if tree.get("finished") is False:
        done = sum(any(cell is not None for cell in row) for row in tree["matrix"])
        raise RunError(f"the run in '{path}' has learned {done} of {len(tree['phases'])} phases: let it finish first")
    return tree


def _read(storage: Storage, name: str) -> Tree:
    tree = storage.read_json(name)
    problem = _problem(tree)
    if problem:
        raise RunError(f"'{storage.uri}/{name}' is not the result of a run: {problem}")
    try:
        return without_hash(tree, f"{storage.uri}/{name}")
    except DamagedError as error:
        again = f"`raycl train --resume {shlex.quote(storage.uri)}`"
        raise RunError(f"{error}: restore a copy, or let {again} write it again from the run's journal") from error


def find_results(root: str | Path) -> list[Tree]:
    """Return the result trees of all runs at or below `root`, by path; nothing is searched inside a run's own folder,
    and a folder that a link leads to again counts once.

    Each tree has the address of its run's folder, as `FOLDER`.

    Raises:
        RunError: there is none, or one of the files is something else.
    """
    if str(root).endswith(".json"):
        return [read_results(root) | {FOLDER: Storage.at(str(root).rpartition("/")[0] or ".").address}]
    results = []
    for folder, published in _run_folders(Storage.at(root), set()):
        result = _read(folder, RESULT_FILE) | {FOLDER: folder.address}
        results.append(result if published is None else published.beside(result))
    if not results:
        raise RunError(f"no {RESULT_FILE} at or below '{root}': give the folder of a run, or one that holds runs")
    return results


def _run_folders(
    storage: Storage, seen: set[str], published: Published | None = None
) -> Iterator[tuple[Storage, Published | None]]:
    """Yield folders of runs, each with the published row that the comparison around it has.

    Args:
        seen: local folders that were searched, to which links may lead again.
    """
    place = os.path.realpath(storage.root) if storage.is_local else storage.root
    if place in seen:
        return
    seen.add(place)
    if storage.exists(RESULT_FILE):
        yield storage, published
        return
    if storage.exists(PUBLISHED_FILE):
        try:
            published = configs.validate(Published, dict(storage.read_json(PUBLISHED_FILE)))
        except (ConfigError, TypeError, ValueError) as error:
            raise RunError(f"'{storage.uri}/{PUBLISHED_FILE}' has no published numbers: {error}") from error
    else:
        published = None
    for folder in storage.folders():
        yield from _run_folders(folder, seen, published)


def _problem(tree: Any) -> str:
    """Return what keeps a parsed file from being a result, in words; empty if nothing does."""
    if not isinstance(tree, dict):
        return f"it holds a {type(tree).__name__}, expected a mapping"
    missing = [key for key in ("config", "stream", "phases", "matrix", "metrics") if key not in tree]
    if missing:
        return f"the keys {', '.join(missing)} are missing"
    if not isinstance(tree["stream"], dict) or "tasks" not in tree["stream"]:
        return "its stream has no tasks"
    shape = (len(tree["phases"]), len(tree["stream"]["tasks"]))
    if len(tree["matrix"]) != shape[0] or any(len(row) != shape[1] for row in tree["matrix"]):
        return f"its matrix does not have one row per phase and one column per task ({shape[0]} x {shape[1]})"
    return ""


def tasks_of(result: Tree) -> list[str]:
    """Return the column names of the matrix."""
    return [str(task) for task in result["stream"]["tasks"]]


def values_of(result: Tree) -> list[list[float | None]]:
    """Return scores 0-100, rows of phases, columns of tasks, None where nothing was measured."""
    return [[cell["value"] if cell else None for cell in row] for row in result["matrix"]]


def limits_of(cells: Sequence[Tree | None]) -> list[tuple[float, float] | None]:
    """Return the 95 % intervals of cells, for scores of samples (`eval.subsample`); None where there is none."""
    extras = [cell["extra"] if cell else {} for cell in cells]
    return [(extra["low"], extra["high"]) if "low" in extra else None for extra in extras]


def metric_of(result: Tree, name: str) -> float | None:
    """Return a headline number, None where undefined or absent."""
    value = result["metrics"].get(name)
    return None if value is None else float(value)


def averages_of(result: Tree, number: str) -> dict[str, float | None]:
    """Return means of the last row over all tasks, the first two and the last two.

    Args:
        number: `score`, or `accuracy` where scores have it; the result is {} where the run has no such number.
    """
    return dict((result.get("averages") or {}).get(number) or {})


def last_accuracies(result: Tree) -> list[float | None]:
    """Return the accuracy of each task in the last row, None where its score has none."""
    return [cell["extra"].get("accuracy") if cell else None for cell in result["matrix"][-1]]


def revision_of(result: Tree) -> tuple[str, dict[str, tuple[float | None, float | None]]] | None:
    """Return a task that was learned again, and each task's score before and after; None for other runs."""
    revision = result.get("revision")
    if not revision:
        return None
    before, after = (
        {task: float(cell["value"]) for task, cell in revision[side].items()} for side in ("before", "after")
    )
    return revision["task"], {task: (before.get(task), after.get(task)) for task in tasks_of(result)}


def unseen_of(result: Tree) -> dict[str, float]:
    """Return task -> score of the tasks that were never trained; empty where the run has none."""
    return {str(task): float(cell["value"]) for task, cell in ((result.get("unseen") or {}).get("cells") or {}).items()}


def unseen_mean(result: Tree) -> float | None:
    """Return the mean of those tasks, None where the run has none."""
    value = (result.get("unseen") or {}).get("mean")
    return None if value is None else float(value)


def unseen_types(result: Tree) -> dict[str, float]:
    """Return type -> mean over the tasks of that type that were never trained; empty where no type is known."""
    return {str(name): float(value) for name, value in ((result.get("unseen") or {}).get("types") or {}).items()}


INSTRUCTION = {"given": "with its task's instruction", "chosen": "by the text alone"}
"""`eval.instruction` -> how a text is given."""


def other_row_of(result: Tree) -> tuple[str, list[float | None], float] | None:
    """Return the last row under the other `eval.instruction`: which one, scores by task, mean; None: not scored."""
    other_row = result.get("other_row")
    if not other_row:
        return None
    cells = [other_row["cells"].get(task) for task in tasks_of(result)]
    return other_row["instruction"], [cell and cell["value"] for cell in cells], float(other_row["mean"])


BareKind = Literal["untrained", "in_context"]
"""Scores of the backbone before any training: of texts alone, or with examples in front of them."""

UNTRAINED: BareKind = "untrained"
IN_CONTEXT: BareKind = "in_context"


SHOTS = "in context"
"""Beginning of the title of scores with examples."""


def shots_of(result: Tree) -> str:
    """Return the title of scores with examples."""
    return f"{SHOTS} ({result['config'].get('eval', {}).get('shots', 0)})"


def untrained_of(result: Tree, kind: BareKind = UNTRAINED) -> Tree | None:
    """Return the run's scores before any training as a result of their own, with `metrics.ap`, `unseen`; None without
    them.

    Its matrix has one row.

    Args:
        kind: in_context: with examples in front of each text.
    """
    untrained = result.get(kind)
    if not untrained:
        return None
    never = unseen_of(result)
    cells = {task: cell for task, cell in untrained["cells"].items() if task in never}
    unseen = {"cells": cells, **untrained["unseen"]} if untrained["unseen"] else None
    return _one_row(result, "nothing", untrained["cells"], untrained["mean"]) | {"unseen": unseen}


def fused_of(result: Tree, fused: Tree, cells: Mapping[str, Tree], name: str) -> Tree:
    """Return the scores of one adapter, out of those that a run left, as a result of their own with `metrics.ap`.

    Args:
        fused: `how` they became one, and the other settings of it. cells: task -> its cell. name: of the row and seed.
    """
    config = {**result["config"], "output": {**(result["config"].get("output") or {}), "name": name}}
    mean = fmean(float(cell["value"]) for cell in cells.values())
    row = _one_row(result, f"fusing by {fused['how']}", cells, mean)
    nothing: Tree = {"unseen": None, "general": None, "phase_times": [], "epochs": {}, "variants": {}}
    return row | {"config": config, "fused": fused, **nothing}


def _one_row(result: Tree, phase: str, cells: Mapping[str, Tree], mean: float) -> Tree:
    """Return a result whose matrix has one row, without the costs of the run."""
    return {
        **result,
        "phases": [phase],
        "matrix": [[cells.get(task) for task in tasks_of(result)]],
        "metrics": {"ap": mean},
        **dict.fromkeys(("averages", "revision", "phase_summaries", "untrained", "in_context", "other_row")),
        **dict.fromkeys(("wall_s", "tokens_per_s", "train_s", "prepare_s")),
        **dict.fromkeys(("trained_parameters", "peak_memory_mb", "kept_mb_per_task")),
    }


def general_of(result: Tree) -> dict[str, float | None]:
    """Return the means of general ability: `general_before` any training, `general_after` the stream, `general_delta`,
    the difference of both, and `general_unknown`, the percent of its texts that the last router counted as texts of no
    learned task. A number that was not measured is None."""
    measured = result.get("general") or {}
    before, after = measured.get("before") or {}, measured.get("after") or {}
    shares = unknown_of(result).values()
    return {
        "general_before": before.get("mean"),
        "general_after": after.get("mean"),
        "general_delta": measured.get("delta"),
        "general_unknown": fmean(shares) if shares else None,
    }


def unknown_of(result: Tree) -> dict[str, float]:
    """Return task of lm-eval -> percent of its texts that the last router counted as texts of no learned task."""
    cells = ((result.get("general") or {}).get("after") or {}).get("cells", {})
    return {task: 100 * cell["extra"]["unknown"] for task, cell in cells.items() if "unknown" in cell["extra"]}


def method_of(result: Tree, settings: str = "") -> str:
    """Return the method with its gradient modifiers and its schedule, unless that is sequential: `lora+migu, joint`.

    Of adapters that were fused after the stream, how they were: `lora, fused by ties`.

    Args:
        settings: what tells it from runs of the same method, `r=4`; named behind it.
    """
    modifiers = result["config"].get("modifiers") or {}
    used = [name for name in modifiers if not isinstance(modifiers, dict) or modifiers[name] is not None]
    schedule = (result["config"].get("stream") or {}).get("schedule", "sequential")
    name = "+".join([_name(result, "method"), *used])
    if fused := result.get("fused"):
        name = f"{name}, fused by {fused['how']}"
    elif schedule != "sequential":
        name = f"{name}, {schedule}"
    return f"{name} ({settings})" if settings else name


def stream_of(result: Tree) -> str:
    return str(result["stream"].get("name") or _name(result, "stream"))


def backbone_of(result: Tree) -> str:
    """Return the name of the backbone; of a path only its last part."""
    return _name(result, "backbone").rstrip("/").rpartition("/")[2]


def title_of(result: Tree) -> str:
    """Return a line that identifies the run."""
    seed = result["config"].get("seed")
    run = f"{method_of(result)} on {stream_of(result)}, {backbone_of(result)}"
    return run if seed is None else f"{run}, seed {seed}"


def short_names(names: Sequence[str], limit: int = 14) -> list[str]:
    """Return names of at most `limit` characters: complete, else up to the first `_` of a word, else cut with `…`; all
    different.

    Names that would become equal carry their number, `3:longna…`.
    """
    cut = [_shortened(name, limit) for name in names]
    return [
        short if cut.count(short) == 1 else f"{number}:{_shortened(name, limit - 3)}"
        for number, (short, name) in enumerate(zip(cut, names, strict=True), 1)
    ]


def _shortened(name: str, limit: int) -> str:
    if len(name) <= limit:
        return name
    head = name.partition("_")[0]
    is_word = " " not in name and head != name
    return head if is_word and 0 < len(head) <= limit else f"{name[: limit - 1]}…"


def _name(result: Tree, section: str) -> str:
    node = result["config"].get(section) or {}
    return str(node.get("name", "?") if isinstance(node, dict) else node)


@dataclass(frozen=True)
class AnsweredRow:
    """A test row with its answer.

    Attributes:
        score: 0 to 100; None: the task's metric is no mean of rows, or the run is older than scores of rows.
    """

    text: str
    references: tuple[str, ...]
    answer: str
    score: float | None


def answered_rows(result: Tree, phase: int, task: str) -> list[AnsweredRow]:
    """Return the answers to a task's test rows after a phase; empty where they were not kept.

    Args:
        phase: number of the phase, from 0.
    """
    if FOLDER not in result:
        return []
    name = f"predictions/{phase:03d}-{result['phases'][phase]}/{task}.jsonl"
    storage = Storage.at(result[FOLDER])
    if not storage.exists(name):
        return []
    records = [json.loads(line) for line in storage.read(name).decode().splitlines()]
    return [
        AnsweredRow(record["text"], tuple(record["references"]), record["answer"], record.get("score"))
        for record in records
    ]


def row_scores(result: Tree, phase: int, task: str) -> RowScores | None:
    """Return the scores of a task's test rows after a phase; None where they are not known."""
    rows = answered_rows(result, phase, task)
    scores = [row.score for row in rows if row.score is not None]
    if not rows or len(scores) < len(rows):
        return None
    return RowScores.of(scores, [text for row in rows for text in (row.text, *row.references)])
