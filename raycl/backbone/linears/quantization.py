"""Frozen weights in four or eight bits, by bitsandbytes; computation stays in the backbone's dtype.

nf4: Dettmers et al. 2023 (QLoRA), 4-bit NormalFloat in blocks of 64 weights, whose scales are quantized again. int8:
Dettmers et al. 2022 (LLM.int8()), one scale for each output, and in each forward pass one for each token; without the
paper's outlier columns (threshold 0), since they depend on the other texts of a batch; on CPUs inputs stay as they are.
Transformers chooses the linears: all but the output embeddings and what a model keeps in float32 (the second linear of
T5's feed-forward blocks).
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any, Literal

import torch
from torch import nn

from raycl.errors import BackboneError

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
