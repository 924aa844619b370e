"""Text tables of runs: the accuracy matrix and the routing of one, the comparison of several."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raycl.config import Tree
from raycl.metrics.run_results import (
    IN_CONTEXT,
    INSTRUCTION,
    METRICS,
    UNTRAINED,
    averages_of,
    backbone_of,
    general_of,
    last_accuracies,
    limits_of,
    method_of,
    metric_of,
    other_row_of,
    revision_of,
    short_names,
    shots_of,
    stream_of,
    tasks_of,
    title_of,
    unknown_of,
    unseen_mean,
    unseen_of,
    unseen_types,
    untrained_of,
    values_of,
)
from raycl.operations.report.phase_summaries import (
    KINDS,
    AttentionWeights,
    OutputRows,
    RouterSummary,
    has_attention,
    has_output_rows,
    has_routing,
    mean_of,
)
from raycl.operations.report.run_comparison import (
    Line,
    SeedMatrix,
    Spread,
    grouped,
    has_published,
    points_of,
    seed_matrices,
)
from raycl.routing.score_summary import QUANTILES
from raycl.text_tables import edgeless, grid, render

NOTHING = "–"
"""Stands where a number is undefined."""

PUBLISHED, MARK = "published", "*"
"""Title of a column of a paper's numbers, and the mark of a number that something contradicts."""

GAP = 4
"""Columns between matrices that stand side by side."""


class Page(Group):
    """Tables with the lines around them; `str` gives plain text."""

    def __str__(self) -> str:
        return render(self)


def matrix_table(result: Tree, title: str = "") -> Page:
    """Return the matrix with one decimal, `after <task>` by task, the headline numbers and the stream's notes below.

    Args:
        title: the line above; "": that of the run.
    """
    table = grid(["", *_heads(tasks_of(result))])
    for kind, head in ((UNTRAINED, UNTRAINED), (IN_CONTEXT, shots_of(result))):
        if (bare := untrained_of(result, kind)) is not None:
            table.add_row(head, *map(_number, values_of(bare)[0]))
    for phase, row in zip(result["phases"], values_of(result), strict=True):
        table.add_row(f"after {phase}", *("" if value is None else f"{value:.1f}" for value in row))
    measured = [row for row in result["matrix"] if any(row)]
    _add_limits(table, limits_of(measured[-1] if measured else []))
    other = other_row_of(result)
    if other is not None:
        table.add_section()
        table.add_row(INSTRUCTION[other[0]], *("" if value is None else f"{value:.1f}" for value in other[1]))
    plain = [f"{METRICS[name]} {_number(metric_of(result, name))}" for name in ("ap", "f_ra")]
    signed = [f"{METRICS[name]} {_number(metric_of(result, name), '+z.1f')}" for name in ("fwt", "bwt")]
    over_m, weighted = _number(metric_of(result, "bwt_m"), "+z.1f"), _number(metric_of(result, "average_accuracy"))
    headline = f"{'  '.join([*plain, *signed])} (over M: {over_m})  weighted AP {weighted}"
    parts = (_other_row, _accuracies, _unseen, general_tables, _epochs, _revision, _starts, _routing, _notes)
    below = [content for part in parts for content in part(result)]
    return Page(Text(title or title_of(result)), table, Text(headline), *below)


def mean_matrix_table(matrix: SeedMatrix) -> Page:
    """Return the matrix of several runs of a setting and its headline numbers: mean ± standard deviation."""
    table = grid(["", *_heads(matrix.tasks)])
    for phase, row in zip(matrix.phases, matrix.cells, strict=True):
        table.add_row(f"after {phase}", *("" if cell is None else points(cell) for cell in row))
    numbers = "  ".join(f"{title} {points(matrix.numbers[name])}" for name, title in METRICS.items())
    return Page(Text(matrix.title), table, Text(numbers))


def setting_table(matrix: SeedMatrix) -> Page:
    """Return the matrix of a setting: that of its run, or the mean of several."""
    several = len(matrix.results) > 1
    return mean_matrix_table(matrix) if several else matrix_table(matrix.results[0], matrix.title)


def side_by_side(results: Sequence[Tree], width: int = 160) -> str:
    """Return the matrices of several settings next to each other, as many in a row as fit into `width` characters."""
    blocks = [str(setting_table(matrix)) for matrix in seed_matrices(results)]
    widest = max(cell_len(line) for block in blocks for line in block.split("\n"))
    return render(Columns(map(Text, blocks), padding=(0, GAP, 1, 0)), max(width, widest))


def comparison_table(lines: Sequence[Line]) -> Page:
    """Return a table of a comparison's lines: AP, F.Ra, FWT, BWT, unseen, time, tokens/s; mean ± standard deviation
    over seeds.

    Beside a number that a paper printed for some line stands the paper's, and below the table its source, and what
    contradicts numbers with a mark.
    """
    shown = points_of(lines)
    printed = {name for name in shown if has_published(lines, name)}
    heads = [title for name in shown for title in ([shown[name], PUBLISHED] if name in printed else [shown[name]])]
    table = grid(["method", "stream", "backbone", "runs", *heads, "time", "tokens/s"], left=3)
    for line in lines:
        scores = []
        for name in shown:
            scores.append(points(line.numbers.get(name)))
            if name in printed:
                scores.append(_number(line.published.get(name), ".2f") + MARK * (name in line.contradicted))
        speed = line.numbers["tokens_per_s"]
        cost = [_duration(line.numbers["wall_s"]), _number(None if speed is None else speed.mean, ",.0f")]
        table.add_row(line.title, line.stream, line.backbone, str(line.runs), *scores, *cost)
    sources = dict.fromkeys(line.source for line in lines if line.source)
    marked = [f"{MARK} {line.title}, {shown[name]}: {why}" for line in lines for name, why in line.contradicted.items()]
    return Page(table, *(Text(f"{PUBLISHED}: {source}") for source in sources), *map(Text, marked))


def routing_table(result: Tree) -> Page:
    """Return tasks by routers: percent of dev texts' weight on their own task; `*` marks the router in use."""
    routing = RouterSummary.of(result)
    columns = {
        f"{title} *" if kind == routing.used else title: routing.own_shares[kind] for kind, title in KINDS.items()
    }
    notes = ["*: chose the adapters" if routing.used in KINDS else f"routed by {routing.used}"]
    if routing.novelty:
        columns["novelty"] = routing.novelty
        notes.append("novelty: how well its texts stood out before it was learned (AUROC, 50 is chance)")
    rows = ([task, *(_number(column.get(task)) for column in columns.values())] for task in routing.tasks)
    table = grid(["", *columns], rows)
    table.add_section()
    table.add_row("mean", *(_number(mean_of(column)) for column in columns.values()))
    head = f"weight of dev texts on their own task, in percent: {title_of(result)}"
    return Page(Text(head), table, Text("; ".join(notes)))


def ood_table(result: Tree) -> Page:
    """Return quantiles of the out-of-distribution scores of each task's dev texts, learned and before, and the mean
    of these, which is all that runs of earlier versions have.
    """
    routing = RouterSummary.of(result)
    rows = []
    for task in routing.rated:
        if task in routing.learned:
            rows.append([task, "learned", *(f"{score:.3f}" for score in routing.learned[task]), ""])
        if task in routing.novelty:
            scores = [f"{score:.3f}" for score in routing.outside.get(task, ())] or [""] * len(QUANTILES)
            rows.append([task, "before it was learned", *scores, f"{routing.novelty[task] / 100:.3f}"])
    heads = ["median" if level == 0.5 else f"{100 * level:g} %" for level in QUANTILES] + ["mean"]
    line = routing.threshold
    counts = f"from {line:.3f} on a text counts as one of no learned task" if line is not None else ""
    note = counts or "no threshold: too few kept dev texts, or a run of an earlier version"
    head = f"out-of-distribution scores of dev texts: {title_of(result)}"
    return Page(Text(head), grid(["task", "when", *heads], rows, left=2), Text(note))


def confusion_table(result: Tree) -> Page:
    """Return tasks by tasks: percent of the weight of dev texts of one that the router gives the other."""
    routing = RouterSummary.of(result)
    rows = ([task, *map(_number, shares)] for task, shares in routing.confused.items())
    head = f"weight of each task's dev texts on the adapters of each task, in percent: {title_of(result)}"
    return Page(Text(head), grid(["", *_heads(routing.tasks)], rows))


def texts_table(result: Tree) -> Page:
    """Return the places of dev texts on the map of a run's texts."""
    rows = [[point.task, f"{point.x:.3f}", f"{point.y:.3f}"] for point in RouterSummary.of(result).texts]
    return Page(Text(f"dev texts in the plane: {title_of(result)}"), grid(["task", "x", "y"], rows))


def routing_comparison(results: Sequence[Tree]) -> Page:
    """Return routers of several runs by task, one block per setting: mean ± standard deviation over seeds."""
    groups = [
        (settings, members, [RouterSummary.of(result) for result in members]) for settings, members in grouped(results)
    ]
    tasks = list(dict.fromkeys(task for _, _, group in groups for routing in group for task in routing.tasks))
    table = grid(["method", "stream", "backbone", "runs", "router", "used", *_heads(tasks), "mean"], left=6)
    table.columns[3].justify = "right"
    for settings, members, group in groups:
        first = members[0]
        label = [method_of(first, settings), stream_of(first), backbone_of(first), str(len(members))]
        for row in _routing_rows(group, tasks):
            table.add_row(*label, *row)
            label = [""] * len(label)
        table.add_section()
    head = "routers: weight of dev texts on their own task, in percent; used: * chose the adapters"
    return Page(Text(head), table)


def output_rows_table(result: Tree) -> Page:
    """Return tasks by tasks: percent of the rows that one kept most often which the other kept too; and what the mask
    left.
    """
    kept = OutputRows.of(result)
    table = grid(["", *_heads(kept.tasks), "norm kept"])
    for task, row, norm, masked in zip(kept.tasks, kept.overlap(), kept.norm_kept, kept.masked, strict=True):
        table.add_row(task if masked else f"{task} (not masked)", *map(_number, row), _number(norm))
    head = f"rows kept most often that another task kept too, in percent, mean over {len(kept.layers)} layers"
    note = f"{kept.chance:.1f} is chance; norm kept: of the gradient of these layers, in percent"
    return Page(Text(f"{head}: {title_of(result)}"), table, Text(note))


def attention_table(result: Tree) -> Page:
    """Return tasks by adapters: mean weights in percent, when each task was learned and at the end, on test texts."""
    attention = AttentionWeights.of(result)
    moved = attention.moved()
    parts: list[RenderableType] = []
    maps = {"when it was learned": attention.train, "at the end (test texts)": attention.test}
    for when, weights in maps.items():
        table = grid(["", *_heads(attention.keys), "moved"])
        for task, row in weights.items():
            cells = [_number(100 * weight) for weight in row]
            table.add_row(task, *cells, _number(moved.get(task)) if when.startswith("at") else "")
        parts += [Text(f"mean attention weights of each task's texts, in percent, {when}"), table]
    note = f"moved: weight that is on other adapters now; {sum(attention.pseudo.values())} pseudo-samples in all"
    if fallback := sum(attention.fallback_samples.values()):
        note += f", {fallback} of them stored training inputs, since a generator produced none"
    return Page(Text(title_of(result)), *parts, Text(note))


def tables_of(result: Tree) -> list[Page]:
    """Return every table that the run has: matrix, routing, attention, kept rows."""
    tables = {routing_table: has_routing, attention_table: has_attention, output_rows_table: has_output_rows}
    return [matrix_table(result), *(table(result) for table, has in tables.items() if has(result))]


def _add_limits(table: Table, limits: Sequence[tuple[float, float] | None]) -> None:
    if any(limits):
        table.add_row("95 % interval", *("" if pair is None else f"{pair[0]:.1f}–{pair[1]:.1f}" for pair in limits))


def _other_row(result: Tree) -> list[RenderableType]:
    """Return what an endpoint scores on requests with and without instruction, where a run measured both."""
    other_row = other_row_of(result)
    if other_row is None:
        return []
    means = {"given": metric_of(result, "ap"), "chosen": metric_of(result, "ap"), other_row[0]: other_row[2]}
    shown = (f"{_number(means[kind])} {how}" for kind, how in INSTRUCTION.items())
    return [Text(f"AP at an endpoint: {', '.join(shown)}")]


def _accuracies(result: Tree) -> list[RenderableType]:
    if not averages_of(result, "accuracy"):
        return []
    table = grid(["at the end", *_heads(tasks_of(result)), "mean", "first two", "last two"])
    for number, row in (("score", values_of(result)[-1]), ("accuracy", last_accuracies(result))):
        means = averages_of(result, number)
        table.add_row(number, *map(_number, [*row, means["all"], means["first_two"], means["last_two"]]))
    return [table]


def _revision(result: Tree) -> list[RenderableType]:
    revision = revision_of(result)
    if revision is None:
        return []
    task, scores = revision
    before, after = zip(*scores.values(), strict=True)
    changes = [None if old is None or new is None else new - old for old, new in scores.values()]
    rows = {"before": before, "after": after, "difference": changes}
    return [
        grid([f"{task} learned again", *_heads(scores)], ([name, *map(_number, row)] for name, row in rows.items()))
    ]


def _unseen(result: Tree) -> list[RenderableType]:
    scores = unseen_of(result)
    if not scores:
        return []
    table = grid(["", *_heads(scores), "mean"])
    bare = untrained_of(result)
    rows = {"never trained": result} if bare is None else {"untrained": bare, "never trained": result}
    for name, run_result in rows.items():
        unseen_scores = unseen_of(run_result)
        table.add_row(name, *map(_number, [*(unseen_scores.get(task) for task in scores), unseen_mean(run_result)]))
    _add_limits(table, limits_of([result["unseen"]["cells"][task] for task in scores]))
    types = list(dict.fromkeys(name for run_result in rows.values() for name in unseen_types(run_result)))
    lines = ([name, *(_number(unseen_types(scored).get(kind)) for kind in types)] for name, scored in rows.items())
    return [table, grid(["by type", *types], lines)] if types else [table]


def general_tables(result: Tree) -> list[RenderableType]:
    """Return a table of general ability by task of lm-eval: before any training, after each phase that measured it, and
    the difference; none where it was not measured. Shares of texts of no learned task are percent."""
    measured = result.get("general")
    if not measured:
        return []
    phases = zip(result["phases"], measured["phases"], strict=False)
    rows = {"before": measured["before"], **{f"after {phase}": cells for phase, cells in phases if cells}}
    names = list(measured["before"]["cells"])
    table = grid(["general ability", *names, "mean"])
    for title, cells in rows.items():
        values = [cells["cells"].get(name, {}).get("value") for name in names]
        table.add_row(title, *map(_number, [*values, cells["mean"]]))
    if measured["after"]:
        old, new = ([measured[end]["cells"][name]["value"] for name in names] for end in ("before", "after"))
        changes = [after - before for before, after in zip(old, new, strict=True)]
        table.add_row("delta", *(f"{change:+z.1f}" for change in [*changes, measured["delta"]]))
        shares = [measured["after"]["cells"][name]["extra"].get("unknown") for name in names]
        if any(share is not None for share in shares):
            percent = [None if share is None else 100 * share for share in shares]
            table.add_row("unknown, %", *map(_number, [*percent, general_of(result)["general_unknown"]]))
    return [table]


def unknown_table(result: Tree) -> Page:
    """Return the percent of texts of each task outside the stream that count as texts of no learned task."""
    rows = [[task, _number(share)] for task, share in unknown_of(result).items()]
    return Page(Text(f"texts that count as unknown, in percent: {title_of(result)}"), grid(["task", "unknown"], rows))


def _epochs(result: Tree) -> list[RenderableType]:
    """Return the scores of tasks inside themselves, by epoch (`eval.at_epochs`)."""
    curves = result.get("epochs") or {}
    if not curves:
        return []
    epochs = sorted({int(epoch) for curve in curves.values() for epoch in curve})
    lines = ([task, *(_number(curve.get(str(epoch))) for epoch in epochs)] for task, curve in curves.items())
    return [grid(["after epoch", *map(str, epochs)], lines)]


def _starts(result: Tree) -> list[RenderableType]:
    """Return which tasks' adapters began with the values of another task's, and how similar the texts are; and which
    of them a later task has trained."""
    last = (result.get("phase_summaries") or [{}])[-1]
    nearest, starts, trained = (last.get(kind, {}) for kind in ("nearest", "starts", "trained_on"))
    begun = [
        f"{task} with those of {known}" + (f" ({_compared(nearest[task])})" if task in nearest else "")
        for task, known in starts.items()
    ]
    anew = [
        f"{task} (nearest {near['task']}, {_compared(near)})"
        for task, near in nearest.items()
        if task not in starts and task not in trained
    ]
    changed = [f"{known} with {task} ({_compared(nearest[task])})" for task, known in trained.items()]
    lines = {"adapters began": begun, "adapters began anew": anew, "earlier adapters trained on": changed}
    return [Text(f"{head}: {', '.join(tasks)}") for head, tasks in lines.items() if tasks]


def _compared(near: Mapping[str, Any]) -> str:
    """Return how similar a task is to its nearest, and the losses after trials, where there were any."""
    if "near_loss" not in near:
        return f"cosine {near['cosine']:.3f}"
    losses = ("diverged" if loss is None else f"{loss:.3f}" for loss in (near["near_loss"], near["drawn_loss"]))
    return "cosine {:.3f}; loss after the trial {}, from drawn values {}".format(near["cosine"], *losses)


def _routing(result: Tree) -> list[RenderableType]:
    """Return the router in use, and the weight of dev texts on their own task under each (mean over tasks)."""
    if not has_routing(result):
        return []
    routing = RouterSummary.of(result)
    means = {kind: mean for kind in KINDS if (mean := mean_of(routing.own_shares[kind])) is not None}
    used = Text(f"routed by {routing.used}")
    if not means:
        return [used]
    shares = ", ".join(f"{kind} {mean:.1f}" for kind, mean in means.items() if kind != "eq13")
    eq13 = f"; eq. 13 {means['eq13']:.1f}" if "eq13" in means else ""
    return [used, Text(f"weight of dev texts on their own task: {shares}{eq13}")]


def _routing_rows(group: Sequence[RouterSummary], tasks: Sequence[str]) -> list[list[str]]:
    """Yield for each kind its title, whether it was used, a cell per task and the mean over the tasks."""
    rows = []
    for kind, title in KINDS.items():
        uses = sum(routing.used == kind for routing in group)
        used = "" if not uses else "*" if uses == len(group) else f"{uses} of {len(group)}"
        cells = [Spread.over([routing.own_shares[kind].get(task) for routing in group]) for task in tasks]
        mean = Spread.over([mean_of(routing.own_shares[kind]) for routing in group])
        rows.append([title, used, *map(points, [*cells, mean])])
    return rows


def _notes(result: Tree) -> list[Text]:
    notes = [f"note: {note}" for note in result["stream"].get("notes") or ()]
    notes += [f"warning: {change}" for change in result.get("version_changes") or ()]
    if result.get("finished") is False:
        done = sum(any(row) for row in result["matrix"])
        notes.append(f"note: unfinished, {done} of {len(result['phases'])} phases evaluated")
    return [Text(note) for note in notes]


def points(spread: Spread | None) -> str:
    """Return a mean ± its standard deviation."""
    if spread is None:
        return NOTHING
    return f"{spread.mean:z.1f}" if spread.std is None else f"{spread.mean:z.1f} ± {spread.std:.1f}"


def _number(value: float | None, form: str = "z.1f") -> str:
    return NOTHING if value is None else format(value, form)


def _duration(spread: Spread | None) -> str:
    """Return seconds below two minutes, then `h:mm:ss`."""
    if spread is None:
        return NOTHING
    if spread.mean < 120:
        return f"{spread.mean:.1f} s"
    minutes, seconds = divmod(round(spread.mean), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def _heads(tasks: Collection[str]) -> list[str]:
    return short_names(list(tasks), 14 if len(tasks) <= 6 else 8)


TITLES = {"helpful": "instruction following", "harmless": "safety"}


def judged_table(tree: Tree) -> str:
    """Return percent of wins, ties and losses, and the delta with its 95 % interval, in points."""
    table = edgeless(("", "prompts", "prompts won", "tied", "lost", "delta", "95 % interval"))
    for aspect, scores in tree["scores"].items():
        for name, score in scores.items():
            title = TITLES[aspect] if name == "all" else f"  {name}"
            shares = [f"{score[key]:.1f}" for key in ("win", "tie", "loss")]
            limits = f"{score['low']:+.1f} to {score['high']:+.1f}"
            table.add_row(title, f"{score['prompts']:,}", *shares, f"{score['delta']:+.1f}", limits)
    judge = tree["judge"]
    return render(Group(Text(f"against the backbone without adapters, judged by {judge['model']}"), table))
