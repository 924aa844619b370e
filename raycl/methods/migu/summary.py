"""Summary of the masks of a phase: rows kept most often, share of gradient norm kept.

It is counted on the device, goes into checkpoints, and becomes small JSON at the end of the phase. No step reads it.
"""

import base64
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raycl.methods.migu.observed_layers import Layout


class RowCounts:
    """One phase's counts.

    Attributes:
        steps: counted so far.
        summary: summary of the last phase that ended: `steps` with a mask; `gradient_norm_kept`, norm of masked over
            unmasked gradient of the observed parameters, over the measured steps; `layers`, path -> `{rows, kept}`,
            with `kept` a bit per row in base64 (`unpacked_rows` reads it), set for the rows kept most often.
    """

    def __init__(self) -> None:
        self.summary: dict[str, Any] = {}
        self.steps: int = 0
        self._counts = torch.zeros(0, dtype=torch.int32)
        self._squared_norms = torch.zeros(2, dtype=torch.float64)
        """Squared norm of what was kept, and of everything."""

    def begin(self, layout: Layout, device: torch.device, resumed: bool) -> None:
        """Start at nothing, or continue."""
        if not resumed or len(self._counts) != layout.size:
            self.steps, self._squared_norms = 0, torch.zeros_like(self._squared_norms)
            self._counts = torch.zeros(layout.size, dtype=torch.int32)
        self._counts, self._squared_norms = self._counts.to(device), self._squared_norms.to(device)

    def count(self, mask_F: Tensor) -> None:
        """Count the rows that a step keeps."""
        self._counts += mask_F
        self.steps += 1

    def measure(self, gradient: Tensor, masked: Tensor) -> None:
        """Measure a complete gradient before it is masked."""
        squares = gradient.detach().double().square()
        self._squared_norms[0] += squares.masked_fill(masked, 0).sum()
        self._squared_norms[1] += squares.sum()

    def end(self, layout: Layout) -> None:
        """Compute the phase's summary; counts are dropped."""
        within, whole = self._squared_norms.tolist()
        counts = self._counts.cpu()
        outputs = {units.path: counts[units.span] for (_, part), units in layout.units.items() if part == "output"}
        layers = {path: _most_often(part, self.steps) for path, part in outputs.items()} if self.steps else {}
        self.summary = {
            "steps": self.steps,
            "gradient_norm_kept": math.sqrt(within / whole) if whole else None,
            "layers": layers,
        }
        self._counts = torch.zeros(0, dtype=torch.int32)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of checkpoints; empty between phases."""
        if not len(self._counts):
            return {}
        return {
            "counts": self._counts.cpu(),
            "squared_norms": self._squared_norms.cpu(),
            "steps": torch.tensor(self.steps),
        }

    def load(self, summary: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Restore `summary` and `tensors`."""
        self.summary = summary
        if "counts" in tensors:
            self._counts, self._squared_norms = tensors["counts"].clone(), tensors["squared_norms"].clone()
            self.steps = int(tensors["steps"])


def _most_often(counts_O: Tensor, steps: int) -> dict[str, Any]:
    """Return as many rows as a step keeps, those that were kept in most steps; of equal ones the first."""
    size = round(float(counts_O.sum()) / steps)
    kept_O = torch.zeros(len(counts_O), dtype=torch.bool)
    kept_O[torch.argsort(counts_O, descending=True, stable=True)[:size]] = True
    return packed_rows(kept_O)


def packed_rows(kept_O: Tensor) -> dict[str, Any]:
    """Return `{rows, kept}` of a layer, as in `RowCounts.summary`."""
    bits = np.packbits(kept_O.numpy().astype(np.uint8))
    return {"rows": len(kept_O), "kept": base64.b64encode(bits.tobytes()).decode()}
