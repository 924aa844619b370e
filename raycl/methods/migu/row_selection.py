"""The rows of each weight that are updated: the largest by magnitude within every layer, for all layers at once; and
layers whose backward forms the gradients of these rows only.

Rows of one weight that compete with each other are a group. All groups of all layers lie one after another in one flat
vector, so that workers exchange one small tensor and groups of one size are ranked together.

The summary of a phase's masks (rows kept most often, share of gradient norm kept) is counted on the device, goes into
checkpoints, and becomes small JSON at the end of the phase. No step reads it.
"""

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from raycl.kernels.row_gradient import Products, RowChoice, choose_rows, rows_of
from raycl.methods.migu.observed_layers import Layout

Rule = Literal["floor", "quantile"]
"""`floor`: exactly floor(T rows) are masked (the paper). `quantile`: all at or above the T-quantile stay (its code)."""


def masked_count(share: float, rows: int) -> int:
    """Return floor(T rows), safe from products like 0.29 * 100 that land just under an integer."""
    return math.floor(round(share * rows, 9))


def kept(n_KS: Tensor, share: float, rule: Rule) -> Tensor:
    """Return `[K, S]` bool: in each of K groups of S units, those that are updated.

    Args:
        n_KS: magnitudes, float32. share: T, of units that are masked.
    """
    if rule == "quantile":
        return n_KS >= torch.quantile(n_KS, share, dim=1, keepdim=True)
    order_KS = n_KS.argsort(dim=1, stable=True)  # of equal ones the first is masked, on every worker
    found_KS = torch.ones_like(n_KS, dtype=torch.bool)
    return found_KS.scatter_(1, order_KS[:, : masked_count(share, n_KS.shape[1])], False)


@dataclass(frozen=True)
class Groups:
    """All groups of one size S: where they lie in the flat vector `[K, S]`, and their clusters, if rows share bits.

    Attributes:
        clusters: `[K, S]` cluster of each unit; None: each unit by itself.
    """

    places: Tensor
    clusters: Tensor | None = None

    @cached_property
    def _count(self) -> int:
        """The number of clusters; reading it waits for a GPU."""
        return 0 if self.clusters is None else int(self.clusters.max()) + 1

    def choose(self, n_F: Tensor, share: float, rule: Rule, into_F: Tensor) -> None:
        """Fill the places of these groups in `into_F` with the result of `kept` for them."""
        n_KS = n_F[self.places]
        if self.clusters is None:
            chosen_KS = kept(n_KS, share, rule)
        else:  # a cluster's magnitude is the sum of its members' (our reading of MIGU, appendix E)
            sums_KC = n_KS.new_zeros(len(n_KS), self._count).scatter_add_(1, self.clusters, n_KS)
            chosen_KS = kept(sums_KC, share, rule).gather(1, self.clusters)
        into_F[self.places] = chosen_KS


def by_size(sizes: Sequence[int], device: torch.device, clusters_F: Tensor | None = None) -> list[Groups]:
    """Return groups that lie one after another, put together by size.

    Args:
        clusters_F: cluster of every unit within its group.
    """
    starts: dict[int, list[int]] = {}
    first = 0
    for size in sizes:
        starts.setdefault(size, []).append(first)
        first += size
    grouped = []
    for size, begins in starts.items():
        places_KS = torch.tensor(begins, device=device).unsqueeze(1) + torch.arange(size, device=device)
        grouped.append(Groups(places_KS, None if clusters_F is None else clusters_F[places_KS]))
    return grouped


class SparseLayers:
    """Plain linears whose backward forms only the kept rows of their weights' gradients, once a step's mask is known.

    Attributes:
        width: see `rows_of`.
    """

    def __init__(
        self, layers: Mapping[str, tuple[nn.Linear, slice]], device: torch.device, width: int | None = None
    ) -> None:
        """Take the place of their forward passes.

        Args:
            layers: name of the weight -> layer, and its outputs' place in the flat mask.
        """
        self.width = width
        products = Products()
        self._choices = {name: RowChoice(products=products) for name in layers}
        self._undo = [choose_rows(layer, self._choices[name]) for name, (layer, _) in layers.items()]
        named: dict[int, list[str]] = {}
        for name, (_, span) in layers.items():
            named.setdefault(span.stop - span.start, []).append(name)
        self._by_size: list[tuple[Tensor, list[RowChoice]]] = []
        for size, names in named.items():
            starts_K = torch.tensor([layers[name][1].start for name in names], device=device)
            places_KO = starts_K.unsqueeze(1) + torch.arange(size, device=device)
            self._by_size.append((places_KO, [self._choices[name] for name in names]))

    def choose(self, mask_F: Tensor, count: Callable[[int], int] | None) -> None:
        """Let backward form these rows from now on.

        Args:
            count: number of rows that are kept of each group size; None: unknown.
        """
        for places_KO, choices in self._by_size:
            known = None if count is None else count(places_KO.shape[1])
            chosen = rows_of(mask_F[places_KO], known, self.width)
            for choice, rows in zip(choices, chosen, strict=True):
                choice.rows = rows

    def reset(self) -> None:
        """Let backward form all rows from now on."""
        for choice in self._choices.values():
            choice.rows, choice.formed = None, False

    def formed(self, name: str) -> bool:
        """Return whether a weight got a gradient of chosen rows since `reset`."""
        return self._choices[name].formed

    def close(self) -> None:
        """Leave the layers as they were."""
        for undo in self._undo:
            undo()


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
