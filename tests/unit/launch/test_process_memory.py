"""A process that has trained a run gives the run's memory back to the system."""

from concurrent.futures import ThreadPoolExecutor

import torch

from raycl.launch.local import in_process_worker
from raycl.training.workers.memory import resident_memory_mb

PIECES = 2000
PIECE = 25_000
"""Numbers of a piece: 100 kB in float32, less than what the C library maps by itself."""


def test_memory_of_a_run_in_a_thread_is_given_back() -> None:
    """Each thread has pieces of memory of its own, which the C library keeps while the last one is in use."""

    def run() -> torch.Tensor:
        with in_process_worker():
            pieces = [torch.ones(PIECE) for _ in range(PIECES)]
            full.append(resident_memory_mb())
            last = pieces[-1]
            del pieces
        return last

    full: list[float] = []
    with ThreadPoolExecutor(1) as pool:
        kept = pool.submit(run).result()
    assert resident_memory_mb() < full[0] - 150
    assert kept.sum() == PIECE
