"""The limits of the device: a large bfloat16 matrix product, and a copy within its memory.

Random values, since a product of zeros takes less power and is faster than any real one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.figures import Figure
from benchmarks.gpu.setup import Case, MachineLimits, Setup, check_close, check_equal
from benchmarks.gpu.timing import Times, quartiles

SIDE, TINY_SIDE = 8192, 64
COPIED, TINY_COPIED = 2**32, 2**16
"""Bytes of the copied tensor."""


def cases(setup: Setup) -> Iterator[Case]:
    """Return both measurements as one case."""
    yield Case("product and copy", partial(_figures, setup))


def limits_of(setup: Setup, seconds: float = 2.0) -> MachineLimits:
    """Return those of the device; measured here if this part has not run."""
    if setup.limits is None:
        list(_figures(setup, seconds))
    assert setup.limits is not None
    return setup.limits


def _figures(setup: Setup, seconds: float) -> Iterator[Figure]:
    side = TINY_SIDE if setup.tiny else SIDE
    torch.manual_seed(0)
    a, b = (setup.randn(side, side, dtype=torch.bfloat16) for _ in range(2))
    c = a @ b
    check_close("bfloat16 matrix product", c[0], a[0].float() @ b.float(), 2e-2)
    product = setup.turns({"product": lambda: torch.mm(a, b, out=c)}, seconds / 2)["product"]
    flops = 2 * side**3 / product.median
    size = TINY_COPIED if setup.tiny else COPIED
    source = torch.randint(0, 256, (size,), device=setup.device, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy = setup.turns({"copy": lambda: target.copy_(source)}, seconds / 2)["copy"]
    check_equal("copy", bool(torch.equal(source, target)), True)
    moved = 2 * size / copy.median
    setup.limits = MachineLimits(flops, moved)
    detail = f"{side} x {side} x {side}, random values"
    yield Figure("bfloat16 matrix product", flops / 1e12, "TFLOP/s", detail=detail, spread=_rates(product, 2 * side**3))
    detail = f"{size / 2**30:.3g} GiB within the device, read and written"
    yield Figure("copy", moved / 1e12, "TB/s", detail=detail, spread=_rates(copy, 2 * size))


def _rates(times: Times, work: float) -> tuple[float, float]:
    """Return quartiles of trillions a second."""
    return quartiles(tuple(work / seconds / 1e12 for seconds in times.seconds))
