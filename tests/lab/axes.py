"""Cases over several axes (backbone kind, method, engine, dtype, workers): sampled by default, all of them on demand.

`make contract` sets RAYCL_CONTRACT=full, and every case of the product runs. `make test` runs a sample in which each
value of each axis appears, with partners that rotate over the other axes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from typing import TypeVar

CaseT = TypeVar("CaseT", bound=tuple[Hashable, ...])

FULL = os.environ.get("RAYCL_CONTRACT") == "full"


def sampled(cases: Sequence[CaseT], keep: Sequence[CaseT] = (), rarely: Collection[Hashable] = ()) -> list[CaseT]:
    """Return the cases to run, in their order.

    Args:
        keep: cases that always run.
        rarely: values that take long: once they have appeared, cases without them come first.
    """
    if FULL:
        return list(cases)
    wanted = {(axis, value) for case in cases for axis, value in enumerate(case)}
    chosen = [case for case in cases if case in keep]
    counts = Counter((axis, value) for case in chosen for axis, value in enumerate(case))
    while missing := wanted - counts.keys():
        best = max(cases, key=lambda case: _gain(case, missing, counts, rarely))
        chosen.append(best)
        counts.update(enumerate(best))
    return [case for case in cases if case in set(chosen)]


def _gain(
    case: CaseT,
    missing: set[tuple[int, Hashable]],
    counts: Counter[tuple[int, Hashable]],
    rarely: Collection[Hashable],
) -> tuple[int, int, int]:
    """Return values that are new with it, slow ones that are not, and how rare the others are; the first of equals
    wins."""
    places = list(enumerate(case))
    slow_again = sum(slot not in missing and slot[1] in rarely for slot in places)
    return sum(slot in missing for slot in places), -slow_again, -sum(counts[slot] for slot in places)
