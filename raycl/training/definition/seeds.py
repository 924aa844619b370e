"""Seeds and sizes that follow from the config alone, the same on every worker and machine."""

from __future__ import annotations

import hashlib


def stable_seed(*words: int | str) -> int:
    """Return a 62-bit seed that these words always give."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, words)).encode()).digest()[:8], "big") >> 2


def micro_batch_size(batch_size: int, micro: int | None, workers: int) -> int:
    """Return the configured size, or a worker's whole share of the batch."""
    return micro or max(1, batch_size // workers)
