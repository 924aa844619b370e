"""The rows of weights that each task of a run kept for its updates, read from its result file (modifier `migu`).

Two tasks that update the same rows disturb each other: the share of rows that both kept most often, layer by layer. The
similarity map of the MIGU paper is measured in the finished model instead (`probe`).
"""

from __future__ import annotations

from dataclasses import dataclass

from raycl.config import Tree
from raycl.errors import RunError
from raycl.metrics.run_results import title_of
from raycl.operations.report.output_rows_by_task import TaskRows, unpacked_rows


@dataclass(frozen=True)
class OutputRows(TaskRows):
    """Kept rows of one run.

    Attributes:
        tasks: names of its phases, those that were evaluated.
        layers: without those that not every task observed.
        masked: the task was trained under the mask, and not only measured (as a skipped first task).
        norm_kept: share of the observed gradient's norm that the mask kept, in percent, if it was measured.
    """

    masked: list[bool]
    norm_kept: list[float | None]

    @staticmethod
    def of(result: Tree) -> OutputRows:
        """Read the kept rows of a run.

        Raises:
            RunError: it had no such modifier, or no phase has ended yet.
        """
        if not has_output_rows(result):
            raise RunError(f"'{title_of(result)}' has no output rows: only runs with modifiers=[migu] do")
        summaries = [phase["modifiers"]["migu"] for phase in result["phase_summaries"]]
        paths = [path for path in summaries[0]["layers"] if all(path in summary["layers"] for summary in summaries)]
        return OutputRows(
            [str(name) for name in result["phases"][: len(summaries)]],
            {path: [unpacked_rows(summary["layers"][path]) for summary in summaries] for path in paths},
            [bool(summary["masked"]) for summary in summaries],
            [_percent(summary["gradient_norm_kept"]) for summary in summaries],
        )


def has_output_rows(result: Tree) -> bool:
    """Return whether the summary of every phase so far has its kept rows."""
    phases = result.get("phase_summaries") or []
    return bool(phases) and all("layers" in phase.get("modifiers", {}).get("migu", {}) for phase in phases)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
