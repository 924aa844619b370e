"""Fusing: one adapter out of those that tasks left, after the stream, by PEFT's functions for merging task vectors.

- average, arithmetic: the sum of the updates by their weights (Ilharco et al. 2023, "Editing Models with Task
  Arithmetic", section 3).
- ties: what is left after trimming, electing signs and disjoint means (Yadav et al. 2023, "TIES-Merging", section 3).
- dare: the sum of updates of which entries were dropped at random and the others rescaled (Yu et al. 2024, "Language
  Models are Super Mario", section 3.1).
- svd: the sum, cut to the rank of one adapter (`combination_type="svd"` of PEFT).

Updates are the products `scale B A`, as the papers have whole weights, not A and B by themselves. The sums are exact,
since the ranks of LoRAs add up. The others have full rank and are cut to `rank` by a singular value decomposition, and
the share of the update that this loses is reported.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from peft.utils.merge_utils import dare_linear, task_arithmetic, ties
from torch import Tensor

from raycl.adapters.state import NO_SUM, check_increment, combine
from raycl.bank import AdapterManifest, Bank, NewSnapshot, Snapshot
from raycl.bank.states import put_router
from raycl.errors import AdapterError, BankError
from raycl.progress import counted_off
from raycl.types import AdapterState, RouterState

How = Literal["average", "arithmetic", "ties", "dare", "svd"]
ONE_AT_A_TIME = threading.Lock()
AVERAGED: tuple[How, ...] = ("average", "dare", "svd")
"""Those in which each adapter has the weight 1 / N where none is given; in the others it has 1."""


@dataclass(frozen=True)
class FusionSettings:
    """How adapters are fused.

    Attributes:
        density: share of an update's entries that are kept: the largest (ties), or drawn ones (dare).
        rank: rank of the fused adapter; None: ranks added up, and the largest rank with svd.
        seed: of the entries that are drawn. record: what else the snapshot's record says of it.
    """

    how: How
    density: float = 0.2
    rank: int | None = None
    seed: int = 0
    record: Mapping[str, Any] = field(default_factory=dict)

    def weights(self, names: Mapping[str, float | None]) -> dict[str, float]:
        """Return the weight of each adapter; None: the default of `how`."""
        default = 1 / len(names) if self.how in AVERAGED else 1.0
        return {name: default if weight is None else weight for name, weight in names.items()}


@dataclass(frozen=True)
class Fused:
    """The result of fusing.

    Attributes:
        snapshot: the new one, whose one adapter answers every text. adapter: its manifest.
        weights: of the adapters that were fused. rank: of the result. lost: share of the update's norm that the cut to
            this rank loses.
    """

    snapshot: Snapshot
    adapter: AdapterManifest
    weights: dict[str, float]
    rank: int
    lost: float


def fuse(
    bank: Bank, snapshot: Snapshot, settings: FusionSettings, names: Mapping[str, float | None], name: str
) -> Fused:
    """Publish the fusion of a snapshot's adapters, and a snapshot in which it answers every text.

    Args:
        names: adapter -> weight, or None for the default; empty: all adapters. name: of the new adapter.

    Raises:
        BankError: there are fewer than two, or the snapshot lacks one. AdapterError: one is no plain LoRA.
    """
    chosen = dict(names) or dict.fromkeys((entry.name for entry in snapshot.adapters), None)
    entries = {key: snapshot.adapter(key) for key in chosen}
    if len(entries) < 2:
        raise BankError(
            f"snapshot {snapshot.number} has {len(entries)} adapter to fuse ({', '.join(entries)}): expected two or "
            "more, as runs with an adapter for each task publish them"
        )
    weights = settings.weights(chosen)
    states = {key: bank.fetch(entry, snapshot.layouts[entry.layout]) for key, entry in entries.items()}
    is_summed = snapshot.router.settings.get("head_rule") in ("logit", "sum")
    state, lost = fused_state(states, weights, settings, is_summed)
    tasks = list(dict.fromkeys(task for entry in entries.values() for task in entry.tasks))
    made = {
        "how": settings.how,
        "weights": weights,
        "density": settings.density,
        "seed": settings.seed,
        **settings.record,
    }
    provenance = {"fused": {**made, "snapshot": snapshot.sha256}}
    adapter = bank.publish(name, state, snapshot.backbone, tasks, provenance)
    router, _ = put_router(bank, RouterState("single"))
    new = bank.snapshot(
        NewSnapshot(
            [adapter],
            snapshot.backbone,
            router,
            [task for task in snapshot.tasks if task.name in tasks],
            parent=snapshot.number,
            provenance={**snapshot.provenance, **provenance},
        )
    )
    return Fused(new, adapter, weights, state.rank, lost)


def fused_state(
    states: Mapping[str, AdapterState], weights: Mapping[str, float], settings: FusionSettings, is_summed: bool
) -> tuple[AdapterState, float]:
    """Return several adapters as one of scale 1, and the share of its update's norm that its rank loses.

    Args:
        is_summed: label heads are increments, which add up; otherwise rows of one label are averaged.

    Raises:
        AdapterError: an adapter is no plain LoRA.
    """
    for name, state in states.items():
        check_increment(f"adapter '{name}'", state)
        if state.is_alone:
            raise AdapterError(f"adapter '{name}' {NO_SUM}")
        if state.prompt is not None or not state.linears:
            raise AdapterError(f"adapter '{name}' is no LoRA (prompt, label head alone): expected adapters of linears")
    bare = {name: replace(state, labels=(), head_weight=None, head_bias=None) for name, state in states.items()}
    if settings.rank is None and settings.how in ("average", "arithmetic"):  # sums, which stay whole
        linears, lost = combine(weights, bare).linears, 0.0
    else:
        ranks = [state.rank for state in states.values()]
        rank = settings.rank or (max(ranks) if settings.how == "svd" else sum(ranks))
        linears, lost = _cut(bare, weights, settings, rank)
    return AdapterState(linears, 1.0, None, *_head(states, is_summed)), lost


def _cut(
    states: Mapping[str, AdapterState], weights: Mapping[str, float], settings: FusionSettings, rank: int
) -> tuple[dict[str, tuple[Tensor, Tensor]], float]:
    """Return A and B of every linear, and the share of the norm that they lack."""
    paths = list(dict.fromkeys(path for state in states.values() for path in state.linears))
    linears, whole, missing = {}, 0.0, 0.0
    with ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):  # PEFT draws from torch's one generator
        torch.manual_seed(settings.seed)
        for path in counted_off(paths, "fusing linears"):
            having = {name: state for name, state in states.items() if path in state.linears}
            updates = [
                state.scale * (state.linears[path][1].float() @ state.linears[path][0].float())
                for state in having.values()
            ]
            fused_OD = _merged(updates, torch.tensor([weights[name] for name in having]), settings)
            left_OK, values_K, right_KD = torch.linalg.svd(fused_OD, full_matrices=False)
            linears[path] = right_KD[:rank].contiguous(), (left_OK[:, :rank] * values_K[:rank]).contiguous()
            whole += float(values_K.square().sum())
            missing += float(values_K[rank:].square().sum())
    return linears, (missing / whole) ** 0.5 if whole else 0.0


def _merged(updates: list[Tensor], weights_N: Tensor, settings: FusionSettings) -> Tensor:
    """Return the fused update `[O, D]`, by PEFT's function."""
    if settings.how == "ties":
        merged: Tensor = ties(updates, weights_N, settings.density)
    elif settings.how == "dare":
        merged = dare_linear(updates, weights_N, settings.density)
    else:
        merged = task_arithmetic(updates, weights_N)
    return merged


def _head(states: Mapping[str, AdapterState], is_summed: bool) -> tuple[tuple[str, ...], Tensor | None, Tensor | None]:
    """Return labels, weight and bias of the one head, with the rows of all."""
    rows: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for state in states.values():
        if state.head_weight is not None and state.head_bias is not None:
            for label, weight, bias in zip(
                state.labels, state.head_weight.float(), state.head_bias.float(), strict=True
            ):
                rows.setdefault(label, []).append((weight, bias))
    if not rows:
        return (), None, None
    reduced = torch.sum if is_summed else torch.mean
    parts = [[reduced(torch.stack(column), 0) for column in zip(*pairs, strict=True)] for pairs in rows.values()]
    return tuple(rows), torch.stack([weight for weight, _ in parts]), torch.stack([bias for _, bias in parts])
