"""Cases over several axes (backbone kind, method, engine, dtype, workers): sampled by default, all of them on demand.

`make contract` sets RAYCL_CONTRACT=full, and every case of the product runs. `make test` runs a sample in which each
value of each axis appears, with partners that rotate over the other axes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import TypeVar

CaseT = TypeVar("CaseT", bound=tuple[Hashable, ...])

FULL = os.environ.get("RAYCL_CONTRACT") == "full"


def sampled(
    cases: Sequence[CaseT],
    keep: Sequence[CaseT] = (),
    rarely: Collection[Hashable] = (),
    needed: Callable[[CaseT], Sequence[Hashable]] | None = None,
) -> list[CaseT]:
    """Return the cases to run, in their order.

    Args:
        keep: cases that always run.
        rarely: values that take long: once they have appeared, cases without them come first.
        needed: values of a case that must each appear in the sample, for example the family of its method; the values
            of its axes then rotate, and need not all appear. By default these are the ones that must.
    """
    if FULL:
        return list(cases)

    def needs(case: CaseT) -> set[tuple[str, int, Hashable]]:
        return {("" if needed is None else "needed", *slot) for slot in enumerate(needed(case) if needed else case)}

    def values(case: CaseT) -> set[tuple[str, int, Hashable]]:
        return needs(case) | {("", *slot) for slot in enumerate(case)}

    def gain(case: CaseT) -> tuple[int, int, int]:
        """Return values that are new with it, slow ones that are not, and how rare the others are; the first of equals
        wins."""
        new = needs(case) & missing
        slow_again = sum(slot not in new and slot[2] in rarely for slot in values(case))
        return len(new), -slow_again, -sum(counts[slot] for slot in values(case))

    wanted = {slot for case in cases for slot in needs(case)}
    chosen = [case for case in cases if case in keep]
    counts = Counter(slot for case in chosen for slot in values(case))
    while missing := wanted - counts.keys():
        best = max(cases, key=gain)
        chosen.append(best)
        counts.update(values(best))
    return [case for case in cases if case in set(chosen)]
