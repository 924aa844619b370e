"""Damage that a stored file can have, for tests of everything that reads one."""

from __future__ import annotations

import random
from collections.abc import Iterator

KINDS = ("gone", "empty", "cut", "flipped", "other")


def flips(whole: bytes, times: int) -> Iterator[bytes]:
    """Yield the file with one bit changed, each time another one, at places that do not depend on the run."""
    places = random.Random(0)
    for _ in range(times):
        bit = places.randrange(8 * len(whole))
        yield whole[: bit // 8] + bytes([whole[bit // 8] ^ 1 << bit % 8]) + whole[bit // 8 + 1 :]


def damaged(whole: bytes, kind: str, other: bytes = b"{}") -> bytes | None:
    """Return the file after one kind of damage; None: it is gone.

    Args:
        other: what another file of the same sort holds.
    """
    middle = len(whole) // 2
    return {
        "gone": None,
        "empty": b"",
        "cut": whole[:middle],
        "flipped": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
        "other": other,
    }[kind]
