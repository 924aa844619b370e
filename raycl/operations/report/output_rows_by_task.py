"""Rows of the weights of each layer that belong to each task, and how far two tasks have the same ones.

The overlap of two tasks in a layer is the share of the rows of one that are rows of the other too: as many of each
layer belong to every task, so it is the same seen from the other. By chance it is the share of rows that belong to a
task.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.bool_]


@dataclass(frozen=True)
class TaskRows:
    """Rows of each task in one model.

    Attributes:
        tasks: their names.
        layers: path -> for each task, a bit per row.
    """

    tasks: list[str]
    layers: dict[str, list[Bits]]

    @property
    def chance(self) -> float:
        """Percent of rows that belong to a task: the overlap of tasks that have nothing to do with each other."""
        kept = [bits.mean() for layer in self.layers.values() for bits in layer]
        return 100 * float(np.mean(kept)) if kept else 0.0

    def overlap(self, paths: Sequence[str] | None = None) -> list[list[float]]:
        """Return percent of the rows of task i that are rows of task j too; mean over layers (None: all)."""
        chosen = [self.layers[path] for path in (self.layers if paths is None else paths)]
        places = range(len(self.tasks))
        return [[100 * float(np.mean([_shared(bits[i], bits[j]) for bits in chosen])) for j in places] for i in places]

    def mean_overlap(self, paths: Sequence[str] | None = None) -> float | None:
        """Return the mean over all pairs of different tasks; None of fewer than two."""
        shares = np.array(self.overlap(paths))
        others = ~np.eye(len(shares), dtype=bool)
        return float(shares[others].mean()) if len(shares) > 1 else None

    @property
    def kinds(self) -> dict[str, list[str]]:
        """`encoder.block.*.layer.*.SelfAttention.q` -> paths of the layers of that kind, whatever their numbers."""
        paths_by_kind: dict[str, list[str]] = {}
        for path in self.layers:
            paths_by_kind.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", path), []).append(path)
        return paths_by_kind


def unpacked_rows(packed: Mapping[str, Any]) -> Bits:
    """Return a bit per row of `{rows, kept}`, where `kept` has them in base64."""
    packed_bits = np.frombuffer(base64.b64decode(packed["kept"]), dtype=np.uint8)
    return np.unpackbits(packed_bits)[: int(packed["rows"])].astype(bool)


def _shared(mine: Bits, other: Bits) -> float:
    """Return the share of `mine` that is in `other`; 0 of nothing."""
    return float((mine & other).sum() / max(1, mine.sum()))
