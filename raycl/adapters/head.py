"""Label heads as part of adapters: an encoder-only model answers without a task id, its heads mixed like its weights.

Every adapter brings rows for its own labels. Default rule `probability`: each head's own softmax, weighted by the
mixture and added up per label text, so that labels of different tasks compete only in proportion to their adapters'
weights (our own: neither SLM's nor SAPT's paper defines it). Rule `logit`: weighted logits added up per label. Rule
`sum`: logits of all active adapters added up, whatever their weights (SD-LoRA's are of linears alone). Rule
`label_count`, for comparison: SLM's released code picks the head by the true number of labels: one head for each such
number, trained by the first task that has so many and frozen then; the task of each text must be given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, one_hot

from raycl.types import AdapterState

if TYPE_CHECKING:
    from raycl.adapters.stack import AdapterStack

Rule = Literal["probability", "logit", "sum", "label_count"]


@dataclass
class _HeadRows:
    """Head rows of one adapter: weight `[C, D]`, bias `[C]`, index of each row's label."""

    weight: Tensor
    bias: Tensor
    labels: Tensor


class MixedHead(nn.Module):
    """Scores over the labels of all loaded adapters.

    Attributes:
        labels: label texts in the order of first appearance.
        weight: `[M C, D]` rows in training: C labels for each of the M adapters in training. bias: `[M C]`.
        frozen: the rows were taken over from another adapter and stay as they are.
    """

    def __init__(self, stack: AdapterStack, width: int, rule: Rule = "probability") -> None:
        super().__init__()
        self.rule = rule
        self.labels: list[str] = []
        self.trainable_labels: tuple[str, ...] = ()
        self.frozen: bool = False
        self.weight: nn.Parameter = nn.Parameter(torch.zeros(0, width, device=stack.device))
        self.bias: nn.Parameter = nn.Parameter(torch.zeros(0, device=stack.device))
        self._stack = stack
        self._rows: dict[str, tuple[object, _HeadRows]] = {}

    def grow(self, labels: Sequence[str]) -> None:
        """Add labels; no row is added (`begin_training` does that)."""
        self.labels.extend(label for label in dict.fromkeys(labels) if label not in self.labels)

    def clear(self) -> None:
        """Forget every label and all rows in training."""
        self.labels, self.trainable_labels = [], ()
        self._rows.clear()
        self._set_trainable(0)

    def begin_training(self, labels: Sequence[str], shared: AdapterState | None = None) -> None:
        """Add zero rows for `labels` to each adapter in training, or the rows of `shared`, which then stay."""
        self.grow(labels)
        self.trainable_labels = tuple(labels)
        self._set_trainable(len(labels) * self._heads)
        self.frozen = shared is not None
        if shared is not None and shared.head_weight is not None and shared.head_bias is not None:
            self.weight.data.copy_(shared.head_weight)
            self.bias.data.copy_(shared.head_bias)

    def fill(self, states: Mapping[str, AdapterState]) -> None:
        """Initialize rows in training from these adapters, where both have the label."""
        for number, name in enumerate(() if self.frozen else self._stack.trainable):
            state = states.get(name)
            if state is None or state.head_weight is None or state.head_bias is None:
                continue
            first = self._trainable_rows(number).start
            for row, label in enumerate(self.trainable_labels):
                if label in state.labels:
                    old = state.labels.index(label)
                    self.weight.data[first + row].copy_(state.head_weight[old])
                    self.bias.data[first + row].copy_(state.head_bias[old])

    @property
    def _heads(self) -> int:
        """M, the number of heads in training."""
        return 1 if self.rule == "label_count" else len(self._stack.trainable)

    def end_training(self) -> None:
        """Drop the rows in training; the labels stay known."""
        self.trainable_labels = ()
        self._set_trainable(0)

    def with_rows(self, states: Mapping[str, AdapterState], weight: Tensor, bias: Tensor) -> dict[str, AdapterState]:
        """Return the adapters in training, each with its own head rows cut from `weight` `[M C, D]` and `bias`."""
        return {
            name: replace(
                state,
                labels=self.trainable_labels,
                head_weight=weight[self._trainable_rows(number)].clone(),
                head_bias=bias[self._trainable_rows(number)].clone(),
            )
            for number, (name, state) in enumerate(states.items())
        }

    def _trainable_rows(self, number: int) -> slice:
        """Return the rows of an adapter in training, by its position among them."""
        first = min(number, self._heads - 1) * len(self.trainable_labels)
        return slice(first, first + len(self.trainable_labels))

    def _set_trainable(self, rows: int) -> None:
        trainable = rows > 0 and self.weight.requires_grad  # nothing to train without rows
        self.weight = nn.Parameter(self.weight.detach().new_zeros(rows, self.weight.shape[1]), requires_grad=trainable)
        self.bias = nn.Parameter(self.bias.detach().new_zeros(rows), requires_grad=trainable)

    def forward(self, pooled_BD: Tensor) -> Tensor:
        """Return `[B, C]` scores over all known labels, -inf for labels that no active adapter has."""
        rule = self._stack.head_rule or self.rule
        names, weights_BN = self._active_columns(pooled_BD, rule)
        heads = self._head_rows(names)
        if not heads:
            return pooled_BD.new_full((len(pooled_BD), len(self.labels)), -torch.inf)
        logits = linear(
            pooled_BD,
            torch.cat([rows.weight.to(pooled_BD.dtype) for _, rows in heads]),
            torch.cat([rows.bias.to(pooled_BD.dtype) for _, rows in heads]),
        ).float()
        device = pooled_BD.device
        owner = torch.cat([torch.full_like(rows.labels, number) for number, (_, rows) in enumerate(heads)])
        label = torch.cat([rows.labels for _, rows in heads])
        row_weights = weights_BN[:, torch.tensor([column for column, _ in heads], device=device)[owner]].float()
        if rule in ("logit", "sum"):
            row_weights = row_weights if rule == "logit" else (row_weights != 0).float()
            none = torch.zeros(len(logits), len(self.labels), device=device)
            # grouped by each example's active adapters
            known = none.index_add(1, label, (row_weights != 0).float()) > 0
            return none.index_add(1, label, logits * row_weights).masked_fill(~known, -torch.inf)
        chances = logits - logsumexp_by(logits, owner, len(heads))[:, owner]
        log_weights = torch.where(row_weights > 0, row_weights.clamp_min(1e-30).log(), -torch.inf)
        return logsumexp_by(chances + log_weights, label, len(self.labels))

    def _active_columns(self, pooled_BD: Tensor, rule: Rule) -> tuple[dict[str, int], Tensor]:
        """Return adapters whose heads are used: adapter -> column of the weights `[B, N]`."""
        if rule == "label_count":
            heads = self._stack.heads
            assert len(heads) == len(pooled_BD), "head rule label_count needs a mixture with each example's head"
            missing = set(heads) - self._stack.states.keys() - self._stack.trainable.keys()
            assert not missing, f"heads of {missing} are not loaded"
            names = {name: column for column, name in enumerate(dict.fromkeys(heads))}
            columns = torch.tensor([names[name] for name in heads], device=pooled_BD.device)
            return names, one_hot(columns, len(names)).to(pooled_BD.dtype)
        plan = self._stack.plan
        if plan is None:
            return {}, pooled_BD
        used = {name: column for column, name in enumerate(plan.mixture.names) if name in plan.used}
        return used, plan.for_rows(plan.mixture.weights, len(pooled_BD)).to(pooled_BD.dtype)

    def _head_rows(self, names: Mapping[str, int]) -> list[tuple[int, _HeadRows]]:
        """Return (column of the mixture, head rows) of every active adapter with labels."""
        heads = []
        trainable = list(self._stack.trainable)
        for name, column in names.items():
            if name in self._stack.states and self._stack.states[name].labels:
                heads.append((column, self._loaded(name)))
            elif name in trainable and self.trainable_labels:
                rows = self._trainable_rows(trainable.index(name))
                heads.append(
                    (column, _HeadRows(self.weight[rows], self.bias[rows], self._index(self.trainable_labels)))
                )
        return heads

    def _loaded(self, name: str) -> _HeadRows:
        state = self._stack.states[name]
        if name not in self._rows or self._rows[name][0] is not state:
            assert state.head_weight is not None and state.head_bias is not None
            self.grow(state.labels)
            device = self.weight.device
            rows = _HeadRows(state.head_weight.to(device), state.head_bias.to(device), self._index(state.labels))
            self._rows = {key: kept for key, kept in self._rows.items() if key in self._stack.states}
            self._rows[name] = (state, rows)
        return self._rows[name][1]

    def _index(self, labels: Sequence[str]) -> Tensor:
        return torch.tensor([self.labels.index(label) for label in labels], device=self.weight.device)


def logsumexp_by(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """Return the log-sum-exp of each group's columns, `[B, K]` to `[B, groups]`; -inf where it has no other."""
    index = group.expand_as(values)
    empty = values.new_full((len(values), groups), -torch.inf)
    top = empty.scatter_reduce(1, index, values.detach(), "amax")
    top = torch.where(torch.isfinite(top), top, 0.0)
    total = torch.zeros_like(top).index_add(1, group, (values - top.gather(1, index)).exp())
    return torch.where(total > 0, total.clamp_min(1e-38).log() + top, -torch.inf)
