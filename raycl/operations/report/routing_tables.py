"""The quality of a run's router after its last phase, read from its result file.

Tables and pictures of routing share one reading of `phase_summary`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raycl.config import Tree
from raycl.errors import RunError
from raycl.metrics.run_results import title_of

KINDS = {"keys": "keys", "discriminant": "discriminant", "eq13": "eq. 13"}
"""Way of finding a text's task -> title; eq. 13 is the paper's measure of the keys, no router."""


@dataclass(frozen=True)
class Point:
    """A sub-key in the plane of t-SNE."""

    task: str
    x: float
    y: float


@dataclass(frozen=True)
class RouterSummary:
    """Summary of one run's router.

    Attributes:
        used: the kind that chose in the evaluation of the last phase; `task` where the task id was given.
        tasks: tasks in the order in which they were learned.
        found: kind -> task -> percent of its dev texts that find it; tasks without dev texts are missing.
        novelty: task -> how well its dev texts stood out before it was learned (AUROC in percent), if known.
        owners: task of each row of `cosines`: one a slot, or (runs of earlier versions) one a task.
        cosines: symmetric, mean over groups.
        points: may be empty: t-SNE is left out for too few keys and for too many.
    """

    used: str
    tasks: list[str]
    found: dict[str, dict[str, float]]
    novelty: dict[str, float]
    owners: list[str]
    cosines: list[list[float]]
    points: list[Point]

    @staticmethod
    def of(result: Tree) -> RouterSummary:
        """Read the routing of a run.

        Raises:
            RunError: it has no router, or none was measured yet.
        """
        if not has_routing(result):
            raise RunError(
                f"'{title_of(result)}' has no router in its phase_summaries: only runs of methods that route by "
                "text (slm) have them, after their first phase"
            )
        phases: Sequence[Tree] = result["phase_summaries"]
        last, names = phases[-1], [str(name) for name in result["phases"]]
        shares_by_kind = {kind: dict(last.get("found", {}).get(kind) or {}) for kind in KINDS}
        owners, cosines = _by_slot(phases, names) or _by_task(last, names)
        measured = [task for shares in shares_by_kind.values() for task in shares]
        return RouterSummary(
            used=str(last["router"]),
            tasks=list(dict.fromkeys([*owners, *measured])),
            found=shares_by_kind,
            novelty={task: share for summary in phases for task, share in summary.get("novelty", {}).items()},
            owners=owners,
            cosines=cosines,
            points=[_point(point) for point in last.get("key_plane", ())],
        )


def has_routing(result: Tree) -> bool:
    """Return whether the summary of the run's last phase has a router."""
    return "router" in (result.get("phase_summaries") or [{}])[-1]


def mean_of(shares: Mapping[str, float]) -> float | None:
    """Return the mean over tasks; None where no task was measured."""
    return sum(shares.values()) / len(shares) if shares else None


def _by_slot(phases: Sequence[Tree], names: Sequence[str]) -> tuple[list[str], list[list[float]]] | None:
    """Return the rows of each phase's own slots; None if a phase did not write them."""
    if not all(summary.get("slot_similarity") for summary in phases):
        return None
    rows = [row for summary in phases for row in summary["slot_similarity"]]
    owners = [name for name, summary in zip(names, phases, strict=False) for _ in summary["slot_similarity"]]
    places = range(len(rows))
    return owners, [[float(rows[max(i, j)][min(i, j)]) for j in places] for i in places]


def _by_task(last: Tree, names: Sequence[str]) -> tuple[list[str], list[list[float]]]:
    cosines = [[float(value) for value in row] for row in last.get("key_similarity", ())]
    return list(names[: len(cosines)]), cosines


def _point(coordinates: dict[str, Any]) -> Point:
    return Point(str(coordinates["slot"]).rpartition(".")[0], float(coordinates["x"]), float(coordinates["y"]))
