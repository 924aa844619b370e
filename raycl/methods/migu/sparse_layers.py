"""Layers whose backward forms only the kept rows of their weights' gradients, once a step's mask is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from raycl.kernels.row_gradient import Products, RowChoice, choose_rows, rows_of


class SparseLayers:
    """Plain linears, and the rows of each that get a gradient.

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

    def __bool__(self) -> bool:
        return bool(self._choices)

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

    @property
    def chosen(self) -> bool:
        """Return whether backward forms some rows only."""
        return any(choice.rows is not None for choice in self._choices.values())

    def formed(self, name: str) -> bool:
        """Return whether a weight got a gradient of chosen rows since `reset`."""
        choice = self._choices.get(name)
        return choice is not None and choice.formed

    def close(self) -> None:
        """Leave the layers as they were."""
        for undo in self._undo:
            undo()
