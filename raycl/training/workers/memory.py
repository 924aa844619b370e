"""The memory of a worker: how much it holds, how much it held, and which setting to lower where there is not enough."""

import ctypes
import gc
import re
import resource
import sys
from bisect import bisect_right
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch


def peak_memory_mb(device: torch.device) -> float:
    """Return the most memory this process held so far: the GPU's if `device` is one, else resident memory, in MiB."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)) / 2**20
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def gpus_in_use() -> range:
    """Return the GPUs, or none where they are seen and not used yet: to ask one for anything would make a context."""
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return range(torch.cuda.device_count() if is_used else 0)


def forget_peak() -> None:
    """Reset the peak; where the system cannot, the peak counts from the start of the process."""
    if gpus_in_use():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def resident_memory_mb() -> float:
    """Return what this process holds now, in MiB; it must not grow from task to task."""
    return float(psutil.Process().memory_info().rss) / 2**20


class MappedFiles:
    """The mapped files of this process, whose pages other processes of the node may share.

    Where the system does not tell (it has no `/proc`), nowhere. The system lists them by address.
    """

    def __init__(self) -> None:
        self._ranges: list[range] = []
        with suppress(OSError):
            for line in Path("/proc/self/maps").read_text().splitlines():
                addresses, _, _, _, inode, *_ = line.split(maxsplit=5)
                if inode != "0":
                    first, end = (int(address, 16) for address in addresses.split("-"))
                    self._ranges.append(range(first, end))

    def hold(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's memory is there."""
        if tensor.device.type != "cpu":
            return False
        address = tensor.data_ptr()
        after = bisect_right(self._ranges, address, key=lambda span: span.start)
        return after > 0 and address in self._ranges[after - 1]


def return_freed_memory() -> None:
    """Give what is freed back to the system: glibc keeps pieces between those in use, and they count as held.

    Where the C library has no word for it (`malloc_trim` is glibc's), they stay.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out: a device's, the system's or Python's. On CPUs torch's error has no type."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError)
        and re.search(r"(can't|cannot|not enough) (allocate )?memory", str(error)) is not None
    )


def out_of_memory(activity: str, tree: dict[str, Any], workers: int, where: str) -> str:
    """Return what was out of memory, and which settings to lower, in one sentence.

    Args:
        activity: the worker's activity (`Control.activity`). tree: the run's config. where: the worker.
    """
    train, evaluation, backbone = tree["train"], tree["eval"], tree["backbone"]
    micro = train["micro_batch_size"] or max(1, train["batch_size"] // workers)
    advice = []
    if activity == "training" and micro > 1:
        advice.append(f"lower train.micro_batch_size (now {micro})")
    if activity == "training" and not backbone["gradient_checkpointing"]:
        advice.append("set backbone.gradient_checkpointing=true")
    if activity == "evaluating" and evaluation["batch_size"] > 1:
        advice.append(f"lower eval.batch_size (now {evaluation['batch_size']})")
    if not advice and activity in ("training", "evaluating"):
        stream = tree["stream"]
        limits = (stream["max_source_tokens"], *stream["max_source_tokens_by_task"].values())
        longest = max((limit for limit in limits if limit != "auto"), default="auto")
        advice.append(f"lower stream.max_source_tokens (now {longest})")
    if not advice:
        advice.append(f"use a smaller backbone or another backbone.dtype (now {backbone['dtype']})")
    return f"out of memory while {activity} ({where}): {' or '.join(advice)}, in a new run"
