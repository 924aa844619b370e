"""Routing among 10,000 tasks on the device: keys, discriminant and SAPT's attention, for 1 and 32 texts at once.

Search and weights alone: from queries (or embeddings) that are on the device to a mixture with its names. The same on
the CPU is timed in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.figures import Figure
from benchmarks.gpu.setup import Case, Setup
from benchmarks.gpu.timing import quartiles
from benchmarks.serving.banks import LIMITS_MS, WIDTH, drawn_router
from raycl.errors import WrongResultError
from raycl.routing.attention import Attention, AttentionConfig, AttentionRouter, max_pooled
from raycl.routing.slot_keys import cosines, split_groups
from raycl.routing.slot_weights import slot_weights
from raycl.routing.slots import KINDS, Kind, SlotRouter
from raycl.types import Mixture

TASKS, TINY_TASKS = 10_000, 1_500
"""Even the fewer ones are too many for a CPU to look at every key."""
SLOTS, GROUPS, TOP_K = 4, 6, 2
TOKENS = 32

Weights = dict[str, float]
"""Adapter -> weight, of one text."""
DISTANCE, UNLIKE = 1e-3, 16
"""Summed differences of weights up to which two mixtures are the same; of so many texts one may have another mixture,
since the last chosen key may be as near as the next one but for rounding."""


def cases(setup: Setup) -> Iterator[Case]:
    """Yield a case for each kind of router."""
    for kind in KINDS:
        yield Case(kind, partial(_slots, setup, kind))
    yield Case("attention", partial(_attention, setup))


def _tasks(setup: Setup) -> int:
    return TINY_TASKS if setup.tiny else TASKS


def _slots(setup: Setup, kind: Kind, seconds: float) -> Iterator[Figure]:
    (router, keys, texts), (beside, _, _) = (drawn_router(_tasks(setup), SLOTS, GROUPS, TOP_K) for _ in range(2))
    router.kind = beside.kind = kind
    expect = _expected_by_keys if kind == "keys" else _expected_by_discriminant
    for batch, limit in LIMITS_MS.items():
        queries = texts[:batch]
        run = partial(router.route_scored, queries.to(setup.device))
        check_same(f"{kind}, batch {batch}", run(), expect(beside, keys, queries))
        on_cpu = partial(beside.route_scored, queries)
        yield _figure(setup, f"{_tasks(setup):,} tasks by {kind}, batch {batch}", run, on_cpu, batch, limit, seconds)


def _attention(setup: Setup, seconds: float) -> Iterator[Figure]:
    router, beside = (_drawn_attention(_tasks(setup)) for _ in range(2))
    draw = torch.Generator().manual_seed(0)
    for batch, limit in LIMITS_MS.items():
        embeddings_BLD = torch.randn(batch, TOKENS, WIDTH, generator=draw)
        mask_BL = torch.ones(batch, TOKENS, dtype=torch.long)
        run = partial(router.route_embeddings, embeddings_BLD.to(setup.device), mask_BL.to(setup.device))
        expected = _expected_by_attention(beside.attention, max_pooled(embeddings_BLD, mask_BL))
        check_same(f"attention, batch {batch}", run(), expected)
        on_cpu = partial(beside.route_embeddings, embeddings_BLD, mask_BL)
        yield _figure(setup, f"{_tasks(setup):,} tasks by attention, batch {batch}", run, on_cpu, batch, limit, seconds)


def _drawn_attention(tasks: int) -> AttentionRouter:
    """Return keys so large that a text attends to a few tasks, as after training."""
    attention = Attention(WIDTH, AttentionConfig(standardize=False), 0).requires_grad_(False)
    draw = torch.Generator().manual_seed(1)
    attention.keys = {f"t{number}": 20 * torch.randn(WIDTH, generator=draw) for number in range(tasks)}
    return AttentionRouter(attention)


def _figure(
    setup: Setup,
    name: str,
    run: Callable[[], Any],
    on_cpu: Callable[[], Any],
    batch: int,
    limit: float,
    seconds: float,
) -> Figure:
    with torch.no_grad():
        times = setup.turns({"device": run, "cpu": on_cpu}, seconds / len(LIMITS_MS))
    mine = times["device"]
    detail = f"on the CPU {times['cpu'].median * 1e3 / batch:.3g} ms"
    spread = quartiles(tuple(item * 1e3 / batch for item in mine.seconds))
    return Figure(f"{name}, per request", mine.median * 1e3 / batch, "ms", limit, "<=", detail, spread, mine.peak_gib)


# ---- references ------------------------------------------------------------------------------------------------------


def _expected_by_keys(router: SlotRouter, keys_TMC: Tensor, queries_BC: Tensor) -> list[Weights]:
    """Return the expected mixture from all cosines."""
    flat_NgH = keys_TMC.reshape(-1, GROUPS, WIDTH // GROUPS)
    weights_BN = slot_weights(cosines(split_groups(queries_BC, GROUPS), flat_NgH), router.config)
    names = [slot for task in router.tasks for slot in router.slots(task)]
    return [_named(names, row) for row in weights_BN]


def _expected_by_discriminant(router: SlotRouter, keys_TMC: Tensor, queries_BC: Tensor) -> list[Weights]:
    """Task by task of each text."""
    expected = []
    chances_BT = router.discriminant.nearest(queries_BC, TOP_K).chances(TOP_K, len(router.tasks))
    for query, chances_T in zip(queries_BC, chances_BT, strict=True):
        weights: Weights = {}
        for number in chances_T.nonzero().flatten().tolist():
            own_MgH = keys_TMC[number].view(SLOTS, GROUPS, -1)
            own_M = slot_weights(cosines(split_groups(query[None], GROUPS), own_MgH), router.config)[0]
            weights |= _named(router.slots(router.tasks[number]), own_M * chances_T[number])
        expected.append(weights)
    return expected


def _expected_by_attention(attention: Attention, pooled_BD: Tensor) -> list[Weights]:
    """Return the expected mixture of a softmax in double precision, without weights below the pruning threshold."""
    keys_TD = torch.stack(list(attention.keys.values())).double()
    alpha_BT = torch.softmax(attention.query(pooled_BD).double() @ keys_TD.T / attention.tau, dim=1)
    kept_BT = torch.where(alpha_BT >= attention.config.pruning_threshold / len(keys_TD), alpha_BT, 0.0)
    return [_named(list(attention.keys), row) for row in kept_BT]


def _named(names: list[str] | tuple[str, ...], weights_N: Tensor) -> Weights:
    chosen = weights_N.nonzero().flatten().tolist()
    return {names[column]: float(weights_N[column]) for column in chosen}


def check_same(what: str, mixture: Mixture, expected: list[Weights]) -> None:
    """Check that texts have the mixtures of the reference.

    Raises:
        WrongResultError: more than one in `UNLIKE` have another one.
    """
    rows = [_named(mixture.names, row) for row in mixture.weights.cpu()]
    apart = [
        sum(abs(mine.get(name, 0.0) - its.get(name, 0.0)) for name in mine.keys() | its.keys())
        for mine, its in zip(rows, expected, strict=True)
    ]
    wrong = sum(distance > DISTANCE for distance in apart)
    if wrong > len(apart) // UNLIKE:
        raise WrongResultError(
            f"routing by {what}: {wrong} of {len(apart)} texts have another mixture than the reference (summed "
            f"difference up to {max(apart):.2g}, expected at most {DISTANCE:g}): the figures of this case are left out"
        )
