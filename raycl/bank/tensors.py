"""An adapter's tensors as one safetensors file, and back without copying a byte.

What it does not know: where the bytes come from (a file map, Ray's object store, a download).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from raycl.bank.manifest import Layout
from raycl.errors import BankError
from raycl.types import AdapterState

A, B, PROMPT, HEAD_WEIGHT, HEAD_BIAS = ".lora_A", ".lora_B", "prompt", "head.weight", "head.bias"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32}
"""The dtypes that a bank holds; float64 and others have no place in an adapter."""

Buffer = Any
"""Anything that speaks the buffer protocol."""


def pack(state: AdapterState) -> bytes:
    """The safetensors file of an adapter."""
    tensors: dict[str, Tensor] = {}
    for path, (a, b) in state.linears.items():
        tensors[path + A], tensors[path + B] = a, b
    if state.prompt is not None:
        tensors[PROMPT] = state.prompt
    if state.head_weight is not None and state.head_bias is not None:
        tensors[HEAD_WEIGHT], tensors[HEAD_BIAS] = state.head_weight, state.head_bias
    data: bytes = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    return data


def views(buffer: Buffer, what: str) -> dict[str, Tensor]:
    """Tensors that look into `buffer` (which must stay unchanged).

    Args:
        what: name for error messages.

    Raises:
        BankError: it is not a whole safetensors file of dtypes that a bank holds.
    """
    memory = memoryview(buffer).cast("B")
    try:
        length = int.from_bytes(memory[:8], "little")
        header = json.loads(bytes(memory[8 : 8 + length]))
        header.pop("__metadata__", None)
        start = 8 + length
        return {name: _view(memory, start, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise BankError(f"{what} is no whole safetensors file of {', '.join(DTYPES)} tensors: {error}") from error


def _view(memory: memoryview, start: int, entry: Mapping[str, Any]) -> Tensor:
    dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
    first, last = entry["data_offsets"]
    count = int(torch.Size(shape).numel())
    if first < 0 or last > len(memory) - start or last - first != count * dtype.itemsize:
        raise ValueError(f"{shape} values of {entry['dtype']} do not fill bytes {first} to {last}")
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=start + first).view(shape)


def unpack(
    buffer: Buffer,
    what: str,
    layout: Layout,
    rank: int,
    scale: float,
    dtype: str,
    prompt: tuple[int, int] | None,
    labels: tuple[str, ...],
) -> AdapterState:
    """The adapter in `buffer`, checked against what its manifest says.

    Raises:
        BankError: a tensor is missing, unexpected, or has another shape or dtype.
    """
    found = views(buffer, what)
    linears = {}
    for path, (inputs, outputs) in layout.items():
        a, b = _take(found, path + A, what), _take(found, path + B, what)
        if a.dim() != 2 or b.dim() != 2 or a.shape[1] != inputs or b.shape[0] != outputs or a.shape[0] != b.shape[1]:
            raise BankError(
                f"{what}, '{path}': A {list(a.shape)} and B {list(b.shape)} are no LoRA of a linear from {inputs} to "
                f"{outputs}, which its manifest promises"
            )
        _check_dtype(what, path, a, dtype)
        _check_dtype(what, path, b, dtype)
        linears[path] = (a, b)
    state = AdapterState(
        linears,
        scale,
        _shaped(found, PROMPT, prompt, what) if prompt is not None else None,
        labels,
        _shaped(found, HEAD_WEIGHT, (len(labels), None), what) if labels else None,
        _shaped(found, HEAD_BIAS, (len(labels),), what) if labels else None,
    )
    if state.rank != rank:
        raise BankError(f"{what} has rank {state.rank}, its manifest says {rank}")
    if found:
        raise BankError(f"{what} holds tensors that its manifest does not name: {', '.join(sorted(found)[:5])}")
    return state


def _take(found: dict[str, Tensor], name: str, what: str) -> Tensor:
    if name not in found:
        raise BankError(f"{what} lacks the tensor '{name}', which its manifest promises")
    return found.pop(name)


def _shaped(found: dict[str, Tensor], name: str, shape: tuple[int | None, ...], what: str) -> Tensor:
    tensor = _take(found, name, what)
    fits = tensor.dim() == len(shape) and all(w is None or w == s for w, s in zip(shape, tensor.shape, strict=True))
    if not fits:
        wanted = [size if size is not None else "any" for size in shape]
        raise BankError(f"{what}, '{name}' has shape {list(tensor.shape)}, its manifest says {wanted}")
    return tensor


def _check_dtype(what: str, path: str, tensor: Tensor, dtype: str) -> None:
    if str(tensor.dtype) != f"torch.{dtype}":
        raise BankError(f"{what}, '{path}' is {str(tensor.dtype).removeprefix('torch.')}, its manifest says {dtype}")


def dtype_of(state: AdapterState) -> str:
    """The dtype of its linears by torch's name."""
    first = next((a for a, _ in state.linears.values()), state.prompt)
    return "float32" if first is None else str(first.dtype).removeprefix("torch.")
