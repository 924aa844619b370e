"""An active mixture, prepared for the layers: which rows, which gates, in which of the two forms.

Everything is computed once when the mixture is activated, not once per layer or decoding step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

import torch
from torch import Tensor

from raycl.adapters.formula import OWN_GAIN
from raycl.adapters.rows import RowPool
from raycl.types import Mixture


@dataclass
class MixturePlan:
    """The rows and gates that layers need while a mixture is active.

    Attributes:
        mixture: the mixture that was activated.
        used: adapters that are active for some example.
        pool: rows that `index` points into. index: `[R]` rows in use, or a slice of neighbours.
        gate: `[B, R]` weight times scale per row; None if no loaded adapter is active. Where examples share rows of the
            batch, gates are of each position, `[P, S, R]`.
        own: `[B, K]` rows of each example and their gates, where that form is cheaper.
        trainable_gate: `[B, R_live]` for adapters in training.
        alone: adapter that is no sum with others -> `[B, 1]` its weight, 0 or 1, or `[P, S, 1]` of each position.
        everywhere: those of them that every example uses.
    """

    mixture: Mixture
    used: frozenset[str]
    pool: RowPool
    index: slice | Tensor | None = None
    gate: Tensor | None = None
    own: tuple[Tensor, Tensor] | None = None
    trainable_gate: Tensor | None = None
    alone: dict[str, Tensor] = field(default_factory=dict)
    everywhere: frozenset[str] = frozenset()
    _picked: RowPool | None = None

    def share_rows(self, examples_PS: Tensor) -> None:
        """Let examples share rows of the batch, before any layer; `examples_PS` gives the example of each position."""
        examples_PS = examples_PS.to(self.mixture.weights.device)
        self.gate = None if self.gate is None else self.gate[examples_PS]
        self.trainable_gate = None if self.trainable_gate is None else self.trainable_gate[examples_PS]
        self.alone = {name: weight_B1[examples_PS] for name, weight_B1 in self.alone.items()}
        self.own = None  # a row of the batch has no rows of its own then

    def shared_rows(self, path: str) -> tuple[Tensor, Tensor]:
        """Return a `[R, D]` and B `[R, O]` of one linear: neighbours as views, others copied once for all linears."""
        if isinstance(self.index, slice):
            a_RD, b_RO = self.pool.layer(path)
            return a_RD[self.index], b_RO[self.index]
        assert self.index is not None, "no loaded adapter is active"
        if self._picked is None:
            self._picked = self.pool.picked(self.index)
        return self._picked.layer(path)

    def own_rows(self, path: str, rows: int) -> tuple[Tensor, Tensor]:
        """Return a `[rows, K, D]` and B `[rows, K, O]` of one linear."""
        assert self.own is not None
        index = self.for_rows(self.own[0], rows)
        a_RD, b_RO = self.pool.layer(path)
        flat = index.reshape(-1)
        a_KD, b_KO = a_RD.index_select(0, flat), b_RO.index_select(0, flat)  # several times faster than a_RD[flat]
        return a_KD.view(*index.shape, -1), b_KO.view(*index.shape, -1)

    def for_rows(self, tensor: Tensor, rows: int) -> Tensor:
        """Return a tensor of the plan, whose rows must be those of the batch that a layer sees."""
        examples = tensor.shape[0]
        assert rows == examples, f"a layer saw {rows} rows while the active mixture is for {examples} examples"
        return tensor


def gate_of(weights_BN: Tensor, owners: Sequence[tuple[int, int, float]]) -> Tensor:
    """Return `[B, R]`, weight times scale of each row.

    Args:
        owners: for each adapter its column of `weights_BN`, its number of rows and its scale.
    """
    columns = [column for column, count, _ in owners for _ in range(count)]
    scales = torch.tensor([scale for _, count, scale in owners for _ in range(count)])
    index = torch.tensor(columns, dtype=torch.long)
    return weights_BN[:, index.to(weights_BN.device)] * scales.to(weights_BN)


def neighbours(rows: Tensor) -> slice | Tensor:
    """Return ascending rows without gaps as a slice, which costs no copy; others unchanged."""
    first = int(rows[0])
    return slice(first, first + len(rows)) if bool((rows.diff() == 1).all()) else rows


def own_form(
    weights_BN: Tensor, owners: Sequence[tuple[int, int, float]], rows: Mapping[int, Sequence[int]]
) -> tuple[Tensor, Tensor] | None:
    """Return each example's own rows `[B, K]` and gates `[B, K]`, or None where the shared form is cheaper.

    Args:
        rows: column -> rows of the pool.
    """
    total = sum(count for _, count, _ in owners)
    active = weights_BN[:, [column for column, _, _ in owners]] != 0
    counts = torch.tensor([count for _, count, _ in owners])
    most = int((active.cpu() * counts).sum(1).max())
    if most == 0 or most * OWN_GAIN > total:
        return None
    index, gate = [], []
    for weights, active_row in zip(weights_BN.tolist(), active.tolist(), strict=True):
        mine = list(compress(owners, active_row))
        own_rows = [row for column, _, _ in mine for row in rows[column]]
        gates = [weights[column] * scale for column, count, scale in mine for _ in range(count)]
        index.append(own_rows + [0] * (most - len(own_rows)))
        gate.append(gates + [0.0] * (most - len(own_rows)))
    device = weights_BN.device
    return torch.tensor(index, device=device), torch.tensor(gate, device=device)
