"""Linears of a backbone that torch does not compute alone: products on CPUs, quantized weights; and shared weights.

torch gives products of float32 to MKL, whose kernels for other vendors' CPUs use AVX2 at most. oneDNN, which torch has
for bfloat16, uses AVX-512 on those too: on an EPYC of the fifth generation it took 0.45 to 0.6 of the time, for 16 to
1,600 positions and weights of 384 x 384 to 384 x 1536. Sums are rounded in another order.

Frozen weights in four or eight bits are those of bitsandbytes; computation stays in the backbone's dtype.
nf4: Dettmers et al. 2023 (QLoRA), 4-bit NormalFloat in blocks of 64 weights, whose scales are quantized again. int8:
Dettmers et al. 2022 (LLM.int8()), one scale for each output, and in each forward pass one for each token; without the
paper's outlier columns (threshold 0), since they depend on the other texts of a batch; on CPUs inputs stay as they are.
Transformers chooses the linears: all but the output embeddings and what a model keeps in float32 (the second linear of
T5's feed-forward blocks).
"""

import importlib.util
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from raycl.errors import BackboneError

log: logging.Logger = logging.getLogger("raycl")

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


Quantization = Literal["none", "nf4", "int8"]

BLOCK = 64
"""The number of nf4 weights that share a scale."""

CHATTER = ("bitsandbytes.autograd._functions", "bitsandbytes.backends.cpu.ops")
"""Loggers that warn in every layer that inputs are cast, and that an optional kernel is not there; peft imports the
library too, wherever it is installed."""

for name in CHATTER:
    logging.getLogger(name).setLevel(logging.ERROR)


def check_quantization(chosen: Quantization) -> None:
    """Raise a BackboneError if weights are to be quantized and the library is missing."""
    if chosen != "none" and importlib.util.find_spec("bitsandbytes") is None:
        raise BackboneError(
            f"backbone.quantization={chosen} needs the package bitsandbytes: pip install 'raycl[quantization]', or use "
            "backbone.quantization=none"
        )


def quantized(chosen: Quantization, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Return arguments of `from_pretrained` that quantize weights while they are read to the device; {} for none.

    Raises:
        BackboneError: see `check_quantization`.
    """
    if chosen == "none":
        return {}
    check_quantization(chosen)
    from transformers import BitsAndBytesConfig

    if chosen == "int8":
        config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    else:
        four = {"quant_type": "nf4", "use_double_quant": True, "compute_dtype": dtype}
        config = BitsAndBytesConfig(load_in_4bit=True, **{f"bnb_4bit_{name}": value for name, value in four.items()})
    return {"quantization_config": config, "device_map": {"": device}}


def make_consistent(model: nn.Module, dtype: torch.dtype) -> None:
    """Make quantized linears compute the same in training and evaluation, in `dtype`, which each of them records.

    On CPUs, bitsandbytes 0.50.2 computes in another way in evaluation mode: with AVX-512 BF16 it packs a 4-bit weight
    anew, rounds its scales to bfloat16 and computes in bfloat16 from then on, and at 8 bits it rounds inputs too. On
    these CPUs it also reads 4-bit weights with the scales of other blocks where a row is no whole number of blocks.

    Raises:
        BackboneError: a 4-bit linear on a CPU has such rows.
    """
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear) or module.weight.is_floating_point():
            continue
        on_cpu, is_nf4 = module.weight.device.type == "cpu", module.weight.dtype == torch.uint8
        if on_cpu and is_nf4 and module.in_features % BLOCK:
            raise BackboneError(
                f"backbone.quantization=nf4 on a CPU: '{path}' has {module.in_features} inputs, and bitsandbytes "
                f"computes wrongly there unless that is a multiple of {BLOCK}: use backbone.quantization=int8, or a "
                "GPU"
            )
        module.compute_dtype = dtype  # type: ignore[assignment]
        if on_cpu:
            module.train(True).train = lambda mode=True, linear=module: linear  # type: ignore[method-assign, misc]


def untie(model: Any, paths: Iterable[str]) -> bool:
    """Give those linears at `paths` whose weights are shared a copy of their own; the model's config says so.

    Returns:
        whether there was such a linear.

    Raises:
        BackboneError: an encoder-decoder model, since some of them scale what shared output words read, and no other.
    """
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    shared = [path for path in paths if len(owners.get(id(model.get_submodule(path).weight), ())) > 1]
    if shared and model.config.is_encoder_decoder:
        others = [name for name in owners[id(model.get_submodule(shared[0]).weight)] if name != f"{shared[0]}.weight"]
        raise BackboneError(
            f"the adapter changes '{shared[0]}', whose weights {type(model).__name__} shares with {', '.join(others)}: "
            "export the adapter itself, without --merged, or leave it out of method.target_modules and "
            "method.modules_to_save"
        )
    for path in shared:
        linear = model.get_submodule(path)
        linear.weight = nn.Parameter(linear.weight.detach().clone(), requires_grad=linear.weight.requires_grad)
        model.config.tie_word_embeddings = False
    return bool(shared)
