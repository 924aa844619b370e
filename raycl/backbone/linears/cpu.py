"""Linears in float32 on CPUs where oneDNN multiplies faster than MKL, in passes that nothing differentiates.

torch gives products of float32 to MKL, whose kernels for other vendors' CPUs use AVX2 at most. oneDNN, which torch has
for bfloat16, uses AVX-512 on those too: on an EPYC of the fifth generation it took 0.45 to 0.6 of the time, for 16 to
1,600 positions and weights of 384 x 384 to 384 x 1536. Sums are rounded in another order. And a warning where bfloat16
is slower than float32.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

log = logging.getLogger("raycl")

CPU_INFO = Path("/proc/cpuinfo")

BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Linux's names of instructions that multiply bfloat16 (the last: Arm)."""


@lru_cache(maxsize=1)
def prefers_onednn(cpu_info: Path = CPU_INFO) -> bool:
    """Return whether this is an AMD CPU with AVX-512, and torch has oneDNN.

    Args:
        cpu_info: Linux's description of the CPU; it may be absent.
    """
    onednn: Any = torch.backends.mkldnn
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not onednn.is_available():
        return False
    return (
        hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and cpu_info.is_file()
        and "AuthenticAMD" in cpu_info.read_text(encoding="utf-8")
    )


@lru_cache(maxsize=8)
def warn_of_slow_bfloat16(backbone: str, cpu_info: Path = CPU_INFO) -> None:
    """Say once of each backbone if it computes in bfloat16 on a CPU that converts every number.

    Such a CPU decodes a tenth as many tokens as in float32, or fewer. An unknown CPU counts as a fast one.

    Args:
        cpu_info: Linux's description of the CPU; it may be absent.
    """
    known = set(cpu_info.read_text(encoding="utf-8").split()) if cpu_info.is_file() else BFLOAT16_FLAGS
    if not known & BFLOAT16_FLAGS:
        log.warning(
            "backbone '%s' computes in bfloat16, for which this CPU has no instructions (AVX-512 BF16 or AMX): expect "
            "a tenth of the speed of backbone.dtype=float32, or less",
            backbone,
        )


@contextmanager
def by_onednn(model: nn.Module) -> Iterator[None]:
    """Multiply a model's linears of float32 weights on the CPU by oneDNN inside, without adapters' small ones.

    Layers keep their weights, hooks and names: only how the product is computed is replaced.
    """
    chosen = [module for module in model.modules() if type(module) is nn.Linear]
    for module in chosen:
        vars(module)["forward"] = partial(_product, module)
    try:
        yield
    finally:
        for module in chosen:
            del vars(module)["forward"]


def _product(module: nn.Linear, x: Tensor) -> Tensor:
    weight = module.weight
    if torch.is_grad_enabled() or not _is_plain(x) or not _is_plain(weight.data):
        return linear(x, weight, module.bias)
    product: Any = torch.ops.mkldnn._linear_pointwise
    output: Tensor = product(x, weight, module.bias, "none", [], "")
    return output


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a weight is float32 on the CPU, and complete on this worker."""
    return type(tensor) is Tensor and tensor.dtype == torch.float32 and tensor.device.type == "cpu"
