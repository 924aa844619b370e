"""Verdicts: which method of a comparison is better than a reference, by its runs alone, and what they do not decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean
from typing import Any, Literal

from rich.text import Text

from raycl.config import Tree
from raycl.errors import RunError, counted
from raycl.metrics.matrix import drops
from raycl.metrics.paired_comparison import (
    LEVEL,
    MOST_SEEDS,
    POWER,
    Difference,
    RunScores,
    TaskScore,
    difference,
    holm,
)
from raycl.metrics.run_results import (
    METRICS,
    backbone_of,
    method_of,
    metric_of,
    row_scores,
    stream_of,
    tasks_of,
    values_of,
)
from raycl.operations.report.run_comparison import grouped
from raycl.operations.report.tables import NOTHING, Page
from raycl.text_tables import grid

Word = Literal["better", "worse", "cannot be told"]


@dataclass(frozen=True)
class Verdict:
    """Two methods compared by one number.

    Attributes:
        first, second: names of the methods. measure: key of `METRICS`.
        difference: first minus second; None: no seed in common.
        corrected: p-value by Holm. level: what the p-value had to reach. Both None where there is no p-value.
        compared: comparisons that the correction counts. where: stream and backbone.
        variance_of_a_seed: mean of the table's differences over several seeds; None where it has none.
    """

    first: str
    second: str
    measure: str
    difference: Difference | None
    corrected: float | None = None
    level: float | None = None
    compared: int = 1
    where: str = ""
    variance_of_a_seed: float | None = None

    @property
    def word(self) -> Word:
        """Return what can be said of the first."""
        if self.difference is None or self.corrected is None or self.corrected >= LEVEL:
            return "cannot be told"
        return "better" if (self.difference.mean > 0) != (self.measure in LOWER_IS_BETTER) else "worse"

    @property
    def seeds_needed(self) -> int | None:
        """Return how many seeds could tell; None: not known, or more than `MOST_SEEDS`."""
        if self.difference is None:
            return None
        return self.difference.seeds_needed(self.level or LEVEL, self.variance_of_a_seed)

    @property
    def what_could_tell(self) -> str:
        """Return the number of seeds that could decide, in words; empty where the verdict is decided."""
        if self.word != "cannot be told":
            return ""
        if self.difference is None:
            return "runs with a seed in common"
        if self.difference.seeds < 2 and self.variance_of_a_seed is None:
            return "not known from one seed"
        return counted(needed, "seed") if (needed := self.seeds_needed) else f"more than {MOST_SEEDS} seeds"

    @property
    def sentence(self) -> str:
        number = METRICS[self.measure]
        if self.difference is None:
            return f"Whether {self.first} or {self.second} is better cannot be told: they have no seed in common."
        mean, over = self.difference.mean, self.difference.over
        limits = interval_text(self.difference)
        figures = f"{number} {mean:+.1f}{f', 95 % interval {limits}' if limits != NOTHING else ''}"
        paired = f"{counted(self.difference.seeds, 'seed')}, paired over {over}"
        if self.word == "cannot be told":
            return (
                f"Whether {self.first} or {self.second} is better cannot be told ({figures}; {paired}); what could "
                f"tell: {self.what_could_tell}."
            )
        return f"{self.first} is {self.word} than {self.second} ({figures}; {paired})."

    @property
    def tree(self) -> Tree:
        known = self.difference
        low, high = (known.interval if known else None) or (None, None)
        return {
            "first": self.first,
            "second": self.second,
            "where": self.where,
            "measure": self.measure,
            "difference": known and known.mean,
            "low": low,
            "high": high,
            "p": known and known.p,
            "p_holm": self.corrected,
            "comparisons": self.compared,
            "seeds": known.seeds if known else 0,
            "paired_over": known.over if known else None,
            "verdict": self.word,
            "seeds_needed": self.seeds_needed if self.word == "cannot be told" else None,
            "sentence": self.sentence,
        }


LOWER_IS_BETTER = ("f_ra",)


def corrected(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts of one table with the p-values that Holm's procedure gives over all of them."""
    known = [verdict.difference for verdict in verdicts]
    values = holm([difference.p if difference else None for difference in known])
    variances = [difference.variance_of_a_seed for difference in known if difference and difference.seeds > 1]
    typical = fmean(variance or 0.0 for variance in variances) if variances else None
    count = sum(value is not None for value in values)
    counted_in = [replace(verdict, compared=count, variance_of_a_seed=typical) for verdict in verdicts]
    return [
        replace(verdict, corrected=value[0], level=value[1]) if value else verdict
        for verdict, value in zip(counted_in, values, strict=True)
    ]


# ---- of result trees -----------------------------------------------------------------------------------------------


def _last_scores(result: Tree) -> dict[str, TaskScore]:
    last = len(result["phases"]) - 1
    return {
        task: TaskScore(value, row_scores(result, last, task))
        for task, value in zip(tasks_of(result), values_of(result)[-1], strict=True)
        if value is not None
    }


def _forgotten(result: Tree) -> dict[str, TaskScore]:
    """Return by how much each task fell from its best score; rows are those of that phase minus those of the last."""
    values = values_of(result)
    scores = {}
    for place, (task, drop) in enumerate(zip(tasks_of(result), drops(values), strict=False)):
        best = max(range(place, len(values) - 1), key=lambda phase: values[phase][place] or 0.0)
        before, after = row_scores(result, best, task), row_scores(result, len(values) - 1, task)
        if before is not None and after is not None and before.texts == after.texts:
            rows = replace(before, scores=before.scores - after.scores)
        else:
            rows = None
        if drop is not None:
            scores[task] = TaskScore(drop, rows)
    return scores


MEASURES: dict[str, Callable[[Tree], dict[str, TaskScore]]] = {"ap": _last_scores, "f_ra": _forgotten}
"""Number that methods are compared by -> a run's scores by task, whose mean it is."""


@dataclass(frozen=True)
class ComparedMethod:
    """The runs of one setting, of which verdicts are made.

    Attributes:
        title: as the comparison names it. names: of its rows in a comparison file. bench: what it can be compared on.
        ap: mean over its runs. competes: its tasks come one after another.
        runs: seed (and which of its runs with that seed) -> scores.
    """

    title: str
    names: frozenset[str]
    bench: tuple[Any, ...]
    ap: float
    competes: bool
    runs: Mapping[tuple[Any, int], RunScores]

    def against(self, other: ComparedMethod, measure: str) -> Verdict:
        """Return the verdict on this one against another, not corrected yet."""
        pairs = [(scores, other.runs[key]) for key, scores in self.runs.items() if key in other.runs]
        return Verdict(self.title, other.title, measure, difference(pairs), where=", ".join(self.bench[:2]))


def methods_of(results: Sequence[Tree], measure: str) -> list[ComparedMethod]:
    """Return the settings that have this measure, in the order of a comparison's lines."""
    found = []
    for settings, group in grouped(results):
        if any(metric_of(result, measure) is None for result in group):
            continue
        by_seed: dict[Any, list[RunScores]] = {}
        for result in group:
            by_seed.setdefault(result["config"].get("seed"), []).append(MEASURES[measure](result))
        runs = {seed: _mean(some) for seed, some in by_seed.items()}
        first = group[0]
        bench = (stream_of(first), backbone_of(first), *sorted(next(iter(runs.values()))))
        schedule = (first["config"].get("stream") or {}).get("schedule", "sequential")
        ap = fmean(metric_of(result, "ap") or 0.0 for result in group)
        title = method_of(first, settings)
        competes = schedule == "sequential" and not first.get("fused")
        found.append(ComparedMethod(title, _rows(group), bench, ap, competes, runs))
    return found


def _mean(runs: Sequence[RunScores]) -> RunScores:
    """Return the mean scores of runs with the same seed, which are no draws of their own."""
    if len(runs) == 1:
        return runs[0]
    return {task: TaskScore(fmean(scores[task].value for scores in runs)) for task in runs[0]}


def _rows(group: Sequence[Tree]) -> frozenset[str]:
    """Return the names of these runs (`lora-s0`), and of their rows in a comparison file (`lora`)."""
    names = {str((result["config"].get("output") or {}).get("name") or "") for result in group}
    return frozenset(names | {name.rpartition("-s")[0] for name in names}) - {""}


def verdicts_of(results: Sequence[Tree], against: str | None = None, measure: str = "ap") -> list[Verdict]:
    """Return the verdict on each method against a reference on the same stream, backbone and tasks.

    Args:
        against: name of the reference, as in the comparison's table or file; None: on each stream the method with the
            highest AP of those that learn the tasks one after another. Since any method could have been the highest,
            the correction counts all pairs then, and else those shown.
        measure: `ap` or `f_ra`. A reference that lacks it has no verdicts.

    Raises:
        RunError: no method has this name.
    """
    methods = methods_of(results, measure)
    if against is not None:
        titles = {method_of(group[0], settings): _rows(group) for settings, group in grouped(results)}
        if not any(against == title or against in rows for title, rows in titles.items()):
            raise RunError(f"no method of these runs is named '{against}': expected one of {', '.join(titles)}")
        named = [method for method in methods if against in (method.title, *method.names)]
        pairs = [
            (method, reference)
            for reference in named
            for method in methods
            if method.bench == reference.bench and method is not reference
        ]
        return corrected([method.against(reference, measure) for method, reference in pairs])
    by_bench: dict[tuple[Any, ...], list[ComparedMethod]] = {}
    for method in methods:
        by_bench.setdefault(method.bench, []).append(method)
    shown, counted_too = [], []
    for some in by_bench.values():
        best = max(some, key=lambda method: (method.competes, method.ap))
        others = [method for method in some if method is not best]
        shown += [method.against(best, measure) for method in others]
        counted_too += [one.against(other, measure) for one, other in combinations(others, 2)]
    return corrected([*shown, *counted_too])[: len(shown)]


# ---- as a table ----------------------------------------------------------------------------------------------------


def verdict_table(verdicts: Sequence[Verdict]) -> Page:
    """Return a line for each verdict: difference, 95 % interval, corrected p-value, the word and what could tell."""
    measure = METRICS[verdicts[0].measure]
    several = len({verdict.where for verdict in verdicts}) > 1
    heads = [*(["on"] if several else []), "method", "against", measure, "95 % interval", "p (Holm)", "verdict"]
    table = grid([*heads, "seeds", "paired over", "seeds that could tell"], left=2 + several)
    for place in (-4, -2, -1):
        table.columns[place].justify = "left"
    for verdict in verdicts:
        known = verdict.difference
        table.add_row(
            *([verdict.where] if several else []),
            verdict.first,
            verdict.second,
            NOTHING if known is None else f"{known.mean:+z.1f}",
            interval_text(known),
            p_text(verdict.corrected),
            verdict.word,
            str(known.seeds if known else 0),
            known.over if known else NOTHING,
            verdict.what_could_tell,
        )
    head = f"verdicts: {measure} of each method minus that of the reference, in points"
    count = verdicts[0].compared
    note = (
        f"p by Holm over {counted(count, 'comparison')}, told below {LEVEL:g}; seeds that could tell: with them a "
        f"difference of this size is told with a power of {POWER:g}"
    )
    return Page(Text(head), table, Text(note))


def interval_text(known: Difference | None) -> str:
    """Return the limits of the 95 % interval."""
    limits = known.interval if known else None
    return NOTHING if limits is None else f"{limits[0]:z.1f} to {limits[1]:z.1f}"


def p_text(p: float | None) -> str:
    """Return a p-value with two digits; small ones as below 0.001."""
    return NOTHING if p is None else "< 0.001" if p < 0.001 else f"{p:.2g}"
