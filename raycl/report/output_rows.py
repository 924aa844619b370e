"""Which rows of the weights each task of a run kept for its updates, read from its result file (modifier `migu`).

Two tasks that update the same rows disturb each other: the share of rows that both kept most often, layer by layer, is
the similarity map of the MIGU paper (there from 100 samples a task, here from the training itself).
What it does not know: how rows were chosen, how anything is shown.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raycl.config import Tree
from raycl.errors import RunError
from raycl.report.results import title_of

Bits = NDArray[np.bool_]


@dataclass(frozen=True)
class OutputRows:
    """Kept rows of one run.

    Attributes:
        tasks: names of its phases, those that were evaluated.
        masked: whether the task was trained under the mask, or only measured (a skipped first task).
        norm_kept: share of the observed gradient's norm that the mask kept, in percent, if it was measured.
        layers: path -> for each task, a bit per row; layers that not every task observed are left out.
    """

    tasks: list[str]
    masked: list[bool]
    norm_kept: list[float | None]
    layers: dict[str, list[Bits]]

    @staticmethod
    def of(result: Tree) -> OutputRows:
        """Of a run.

        Raises:
            RunError: it had no such modifier, or no phase has ended yet.
        """
        if not has_output_rows(result):
            raise RunError(f"'{title_of(result)}' has no output rows: only runs with modifiers=[migu] do")
        summaries = [phase["modifiers"]["migu"] for phase in result["phase_summaries"]]
        paths = [path for path in summaries[0]["layers"] if all(path in summary["layers"] for summary in summaries)]
        return OutputRows(
            [str(name) for name in result["phases"][: len(summaries)]],
            [bool(summary["masked"]) for summary in summaries],
            [_percent(summary["gradient_norm_kept"]) for summary in summaries],
            {path: [_bits(summary["layers"][path]) for summary in summaries] for path in paths},
        )

    @property
    def chance(self) -> float:
        """Percent of rows that a task keeps: the overlap of tasks that have nothing to do with each other."""
        kept = [bits.mean() for layer in self.layers.values() for bits in layer]
        return 100 * float(np.mean(kept)) if kept else 0.0

    def overlap(self, paths: Sequence[str] | None = None) -> list[list[float]]:
        """Percent of the rows that task i kept most often which task j kept too; mean over layers (None: all)."""
        chosen = [self.layers[path] for path in (self.layers if paths is None else paths)]
        places = range(len(self.tasks))
        return [[100 * float(np.mean([_shared(bits[i], bits[j]) for bits in chosen])) for j in places] for i in places]


def has_output_rows(result: Tree) -> bool:
    """Whether the summary of every phase so far has its kept rows."""
    phases = result.get("phase_summaries") or []
    return bool(phases) and all("layers" in phase.get("modifiers", {}).get("migu", {}) for phase in phases)


def _shared(mine: Bits, other: Bits) -> float:
    """Share of `mine` that is in `other`; 0 of nothing."""
    return float((mine & other).sum() / max(1, mine.sum()))


def _bits(summaries: Mapping[str, Any]) -> Bits:
    packed = np.frombuffer(base64.b64decode(summaries["kept"]), dtype=np.uint8)
    return np.unpackbits(packed)[: int(summaries["rows"])].astype(bool)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
