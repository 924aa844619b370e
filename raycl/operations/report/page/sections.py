"""Sections of a report's page: what the runs have numbers for, as pictures and tables."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from matplotlib.figure import Figure
from rich.text import Text

from raycl.config import Tree, flatten
from raycl.metrics.run_results import (
    FOLDER,
    answered_rows,
    backbone_of,
    short_names,
    stream_of,
    tasks_of,
    title_of,
    unknown_of,
)
from raycl.operations.report import plots, router_plots
from raycl.operations.report.page.page_figures import (
    PANEL_WIDTH,
    curves_figure,
    epochs_figure,
    general_figure,
    overlap_figure,
    scores_figure,
    transfer_figure,
    unknown_figure,
    verdicts_figure,
)
from raycl.operations.report.phase_summaries import RouterSummary, has_attention, has_output_rows, has_routing
from raycl.operations.report.plots import MOST_PANELS, MOST_RUNS, attention_figure, matrix_figure
from raycl.operations.report.router_plots import confusion_figure, ood_figure, router_figure, texts_figure
from raycl.operations.report.run_comparison import Line, SeedMatrix, Spread, compare, grouped, seed_matrices
from raycl.operations.report.tables import (
    NOTHING,
    Page,
    attention_table,
    comparison_table,
    confusion_table,
    general_tables,
    matrix_table,
    ood_table,
    output_rows_table,
    points,
    routing_table,
    setting_table,
    texts_table,
    unknown_table,
)
from raycl.operations.report.verdicts import Verdict, verdict_table, verdicts_of
from raycl.text_tables import grid, short_number

MOST_CURVES = 7
"""Methods in a picture of curves and in the table of answers; as many as differ in colour and marker."""
MOST_SENTENCES = 12
"""Verdicts that are written as sentences; the table has all of them."""
SAMPLES, SAMPLE_CHARACTERS = 3, 240
"""Rows of each task whose answers are shown, and characters of a text."""


@dataclass(frozen=True)
class PageSection:
    """A part of the page.

    Attributes:
        figure: its picture. lead: paragraphs in front. tables: shown. numbers: those of the picture, folded.
    """

    title: str
    figure: Figure | None = None
    lead: Sequence[str] = ()
    tables: Sequence[Page] = ()
    numbers: Sequence[Page] = ()


def sections_of(results: Sequence[Tree], against: str | None = None) -> list[PageSection]:
    """Return all sections that these runs have numbers for, in reading order.

    Args:
        against: reference of the verdicts, see `verdicts_of`.

    Raises:
        RunError: no method has this name.
    """
    verdicts = [verdicts_of(results, against, measure) for measure in ("ap", "f_ra")]
    by_stream: dict[str, list[Tree]] = {}
    for result in results:
        by_stream.setdefault(f"{stream_of(result)}, {backbone_of(result)}", []).append(result)
    if len(by_stream) < 2:
        return [*_of_one_stream(results, verdicts), _origin(results)]
    made = []
    for stream, some in by_stream.items():
        theirs = [[verdict for verdict in each if verdict.where == stream] for each in verdicts]
        made += [replace(part, title=f"{part.title}: {stream}") for part in _of_one_stream(some, theirs)]
    return [*made, _origin(results)]


def _of_one_stream(results: Sequence[Tree], verdicts: Sequence[Sequence[Verdict]]) -> list[PageSection]:
    """Return the sections of runs on one stream with one backbone; methods on different ones are not compared."""
    matrices = sorted(seed_matrices(results), key=lambda matrix: -(matrix.numbers["ap"] or Spread(-1.0, None)).mean)
    lines = compare(results)
    made = [
        comparison_section(lines),
        *(verdict_section(some) for some in verdicts if some),
        _matrices(matrices),
        _curves(matrices),
        _epochs(results),
        transfer_section(lines),
        _general(results, lines),
        _unknown(results),
        _attention(results),
        _routing(results),
        _scores(results),
        _texts(results),
        _confusion(results),
        _overlap(results),
        cost_section(lines),
        _answers(matrices),
    ]
    return [section for section in made if section is not None]


def comparison_section(lines: Sequence[Line], drawn: Sequence[Line] = ()) -> PageSection:
    """Return AP of each line, and all its numbers; `drawn`: lines in the picture; (): all."""
    scored = [line for line in drawn or lines if line.numbers["ap"] is not None]
    return PageSection("Comparison", scores_figure(scored) if scored else None, tables=[comparison_table(lines)])


def verdict_section(verdicts: Sequence[Verdict]) -> PageSection:
    """Return the verdicts by one measure: intervals, the first ones as sentences, and a table of all."""
    title = "Verdicts" if verdicts[0].measure == "ap" else "Verdicts on forgetting"
    sentences = [verdict.sentence for verdict in verdicts[:MOST_SENTENCES]]
    return PageSection(title, verdicts_figure(verdicts), sentences, numbers=[verdict_table(verdicts)])


def _matrices(matrices: Sequence[SeedMatrix]) -> PageSection:
    shown = matrices[:MOST_PANELS]
    results = [result for matrix in shown for result in matrix.results]
    lead = [f"The {len(shown)} settings with the highest AP are drawn."] if len(shown) < len(matrices) else []
    return PageSection(
        "Accuracy matrices", matrix_figure(results, PANEL_WIDTH), lead, numbers=list(map(setting_table, matrices))
    )


def _curves(matrices: Sequence[SeedMatrix]) -> PageSection | None:
    several = [matrix for matrix in matrices if len(matrix.phases) > 1]
    shown = several[:MOST_CURVES]
    if not shown:
        return None
    tables = []
    for matrix in shown:
        rows = [
            [task, *("" if row[place] is None else points(row[place]) for row in matrix.cells)]
            for place, task in enumerate(matrix.tasks)
        ]
        heads = ["score after", *short_names(matrix.phases)]
        tables.append(Page(Text(matrix.title), grid(heads, rows)))
    lead = [f"The {len(shown)} settings with the highest AP."] if len(shown) < len(several) else []
    return PageSection("Accuracy over time", curves_figure(shown), lead, numbers=tables)


def transfer_section(lines: Sequence[Line]) -> PageSection | None:
    """Return F.Ra, BWT and FWT of the lines that have them; None: no line has."""
    lines = [line for line in lines if line.numbers["f_ra"] is not None]
    if not lines:
        return None
    names = ("f_ra", "bwt", "fwt")
    rows = [[line.title, *(points(line.numbers[name]) for name in names)] for line in lines]
    lead = [
        "F.Ra is the mean drop from each earlier task's best score, BWT the mean change since it was learned, and FWT "
        "the difference from the same method trained on the task alone."
    ]
    numbers = [Page(grid(["method", "F.Ra", "BWT", "FWT"], rows))]
    return PageSection("Forgetting and transfer", transfer_figure(lines), lead, numbers=numbers)


def _of_first_runs(
    title: str,
    results: Sequence[Tree],
    lead: str,
    figure: Callable[[Sequence[Tree]], Figure],
    table: Callable[[Tree], Page],
) -> PageSection | None:
    """Return what the first run of each setting has, of as many as a picture has room for; None: there is none."""
    runs = [group[0] for _, group in grouped(results)][:MOST_RUNS]
    return PageSection(title, figure(runs), [lead], numbers=list(map(table, runs))) if runs else None


def _up_to(most: int, results: Sequence[Tree]) -> list[Tree]:
    return [result for result in results if len(tasks_of(result)) <= most]


def _attention(results: Sequence[Tree]) -> PageSection | None:
    runs = list(filter(has_attention, _up_to(plots.MOST_TASKS, results)))
    lead = "Mean weights of the adapters for each task's texts, of the first run of each setting."
    return _of_first_runs("Attention over adapters", runs, lead, attention_figure, attention_table)


def _routing(results: Sequence[Tree]) -> PageSection | None:
    runs = list(filter(has_routing, _up_to(router_plots.MOST_TASKS, results)))
    lead = (
        "How similar the keys of tasks are, and how many dev texts find their own task. Novelty: how well the texts of "
        "a task stood out by their out-of-distribution score before it was learned. Of the first run of each setting."
    )
    return _of_first_runs("Routing", runs, lead, router_figure, routing_table)


def _scores(results: Sequence[Tree]) -> PageSection | None:
    routed = filter(has_routing, _up_to(router_plots.MOST_TASKS, results))
    runs = [result for result in routed if any(RouterSummary.of(result).rated)]
    lead = (
        "The share of kept dev texts of all learned tasks that lie nearer to a task than a text: near 1 for a text "
        "unlike all. Of each task's dev texts the median, half of them (thick) and 90 % of them (thin), after the last "
        "task, and before the task was learned, by the router of that time, with the mean, which is its novelty. Texts "
        "from the threshold on (eval.false_alarms) count as texts of no learned task. Of the first run of each setting."
    )
    return _of_first_runs("Out-of-distribution scores", runs, lead, ood_figure, ood_table)


def _texts(results: Sequence[Tree]) -> PageSection | None:
    routed = filter(has_routing, _up_to(router_plots.MOST_TASKS, results))
    runs = [result for result in routed if RouterSummary.of(result).texts]
    lead = "Dev texts by the embeddings that the router reads: near ones are alike. Of the first run of each setting."
    return _of_first_runs("Map of texts", runs, lead, texts_figure, texts_table)


def _confusion(results: Sequence[Tree]) -> PageSection | None:
    routed = filter(has_routing, _up_to(plots.MOST_TASKS, results))
    runs = [result for result in routed if RouterSummary.of(result).confused]
    lead = "The mean weight of each task's adapters on the dev texts of each task. Of the first run of each setting."
    return _of_first_runs("Router confusion", runs, lead, confusion_figure, confusion_table)


def _overlap(results: Sequence[Tree]) -> PageSection | None:
    runs = list(filter(has_output_rows, results))
    lead = (
        "Percent of the output rows kept most often for a task that another task kept too, of each setting's first run."
    )
    return _of_first_runs("Overlap under MIGU", runs, lead, overlap_figure, output_rows_table)


def _epochs(results: Sequence[Tree]) -> PageSection | None:
    """Return the scores of tasks inside themselves over their epochs, where some run measured them."""
    curved = [result for result in results if result.get("epochs")][:MOST_CURVES]
    if not curved:
        return None
    tables = [matrix_table(result) for result in curved]
    lead = [
        "The score of a task while it is trained, by the model in training, after its epochs (eval.at_epochs), and "
        "general ability there where it was measured."
    ]
    return PageSection("Epochs of a task", epochs_figure(curved), lead, numbers=tables)


def _general(results: Sequence[Tree], lines: Sequence[Line]) -> PageSection | None:
    """Return what runs could do outside their streams before and after them, where some of them measured it."""
    lines = [line for line in lines if line.numbers["general_after"]]
    if not lines:
        return None
    names = ("general_before", "general_after", "general_delta", "general_unknown")
    heads = ["method", "before", "after", "delta", "unknown, %"]
    rows = [[line.title, *(points(line.numbers[name]) for name in names)] for line in lines]
    lead = [
        "Mean score of tasks of lm-eval outside the stream, before any training and after the last task. Unknown is "
        "the share of their texts that the router counts as texts of no learned task."
    ]
    by_task = [Page(Text(title_of(result)), *tables) for result in results if (tables := general_tables(result))]
    return PageSection("General ability", general_figure(lines), lead, [Page(grid(heads, rows))], by_task)


def _unknown(results: Sequence[Tree]) -> PageSection | None:
    """Return how many texts outside their streams runs counted as unknown, where general ability was measured."""
    lead = (
        "Percent of the texts of each task of lm-eval whose out-of-distribution distance is above the threshold after "
        "the last task, so that the router counts them as texts of no learned task; of texts of the learned tasks at "
        "most eval.false_alarms may be. Of the first run of each setting."
    )
    runs = [result for result in results if unknown_of(result)]
    return _of_first_runs("Texts outside the stream", runs, lead, unknown_figure, unknown_table)


def cost_section(lines: Sequence[Line]) -> PageSection:
    """Return time, speed, parameters, memory and what is kept of each line; numbers that no line has are left out."""
    shown = {name: title for name, title in _COSTS.items() if any(line.numbers[name] for line in lines)}
    rows = [[line.title, str(line.runs), *(_cost(name, line.numbers[name]) for name in shown)] for line in lines]
    lead = [
        "Means over seeds. Before steps: encoding texts and making keys. Kept for each task: what the run has learned "
        "and stored at its end, such as adapters, keys and rows of earlier tasks."
    ]
    return PageSection("Cost", lead=lead, tables=[Page(grid(["method", "runs", *shown.values()], rows))])


_COSTS = {
    "wall_s": "time, s",
    "train_s": "training, s",
    "prepare_s": "before steps, s",
    "tokens_per_s": "tokens/s",
    "trained_parameters": "trained parameters",
    "peak_memory_mb": "memory, MiB",
    "kept_mb_per_task": "kept for each task, MiB",
}


def _cost(name: str, spread: Spread | None) -> str:
    if spread is None:
        return NOTHING
    if name == "trained_parameters":
        return short_number(spread.mean)
    return f"{spread.mean:,.{2 if name == 'kept_mb_per_task' else 0}f}"


def _answers(matrices: Sequence[SeedMatrix]) -> PageSection | None:
    """Return the same texts answered by each method when their task was new and after the last one."""
    runs = [matrix.results[0] for matrix in matrices][:MOST_CURVES]
    titles = [matrix.title.partition(" on ")[0] for matrix in matrices][:MOST_CURVES]
    pages = []
    for task in dict.fromkeys(task for run in runs for task in tasks_of(run)):
        rows = []
        at_the_end = [answered_rows(run, _last(run), task) for run in runs]
        last = [{row.text: row.answer for row in answered} for answered in at_the_end]
        new = [_when_new(run, task) for run in runs]
        for sample in next(filter(None, at_the_end), [])[:SAMPLES]:
            text, reference = _cut(sample.text), _cut(" | ".join(sample.references))
            for title, before, after in zip(titles, new, last, strict=True):
                if sample.text in after:
                    answers = (before.get(sample.text, NOTHING), after[sample.text])
                    rows.append([text, reference, title, *map(_cut, answers)])
                    text = reference = ""
        if rows:
            heads = ["text", "reference", "method", "when its task was new", "after the last task"]
            pages.append(Page(Text(task), grid(heads, rows, left=5)))
    lead = ["The first test rows of each task, answered by the first run of each setting."]
    return PageSection("Sample answers", lead=lead, tables=pages) if pages else None


def _last(run: Tree) -> int:
    """Return the last phase that was evaluated, of a run that is not finished too."""
    return max((place for place, row in enumerate(run["matrix"]) if any(row)), default=0)


def _when_new(run: Tree, task: str) -> dict[str, str]:
    phases = [str(phase) for phase in run["phases"]]
    rows = answered_rows(run, phases.index(task), task) if task in phases else []
    return {row.text: row.answer for row in rows}


def _cut(text: str) -> str:
    return text if len(text) <= SAMPLE_CHARACTERS else f"{text[: SAMPLE_CHARACTERS - 1]}…"


def _origin(results: Sequence[Tree]) -> PageSection:
    """Return what is needed to trust and repeat the runs: folders, seeds, fingerprints, versions and settings."""
    heads = ["run", "seed", "fingerprint", "raycl", "finished"]
    rows = [
        [
            str(result.get(FOLDER) or (result["config"].get("output") or {}).get("name") or NOTHING),
            str(result["config"].get("seed")),
            str(result.get("fingerprint", NOTHING)),
            str(result.get("raycl", NOTHING)),
            "no" if result.get("finished") is False else "yes",
        ]
        for result in results
    ]
    versions = sorted(
        {(name, version) for result in results for name, version in (result.get("versions") or {}).items()}
    )
    pages = [
        Page(Text("runs"), grid(heads, rows, left=5)),
        Page(Text("versions"), grid(["library", "version"], versions, left=2)),
    ]
    for settings, group in grouped(results):
        matrix = SeedMatrix.over(group[:1], settings)
        leaves = flatten({name: part for name, part in group[0]["config"].items() if name != "output"})
        pages.append(
            Page(
                Text(f"settings of {matrix.title}"),
                grid(["setting", "value"], [[key, str(value)] for key, value in sorted(leaves.items())], left=2),
            )
        )
    folders = [str(result[FOLDER]) for result in results if FOLDER in result]
    if folders:
        commands = {
            "write this page again": f"raycl report {shlex.join(folders)} --html report.html",
            "state of a run, and its next command": f"raycl status {shlex.quote(folders[0])}",
            "continue a run that is not finished": f"raycl train --resume {shlex.quote(folders[0])}",
        }
        pages.insert(0, Page(Text("commands"), grid(["to", "run"], commands.items(), left=2)))
    return PageSection("Runs, versions and settings", numbers=pages)
