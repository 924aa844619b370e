"""An adapter's tensors as one safetensors file, and back without copying a byte.

The format (huggingface.co/docs/safetensors): length of the header as 8 bytes, the header as JSON, the tensors.
What it does not know: where the bytes come from (a file map, Ray's object store, a download).
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from raycl.bank.manifest import Layout
from raycl.errors import BankError
from raycl.storage.unfinished import Buffer
from raycl.types import Activation, AdapterState

A, B, PROMPT, HEAD_WEIGHT, HEAD_BIAS = ".lora_A", ".lora_B", "prompt", "head.weight", "head.bias"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes that a bank holds."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def pack(tensors: Mapping[str, Tensor]) -> list[Buffer]:
    """A safetensors file in parts: the header, then each tensor's own memory, nothing copied."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    largest_first = sorted(plain, key=lambda name: (-plain[name].dtype.itemsize, name))  # keeps every one aligned
    header, end = {}, 0
    for name in largest_first:
        start, end = end, end + plain[name].nbytes
        header[name] = {
            "dtype": _NAMES[plain[name].dtype],
            "shape": list(plain[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *(_bytes(plain[name]) for name in largest_first)]


def _bytes(tensor: Tensor) -> Buffer:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def views(buffer: Buffer, what: str) -> dict[str, Tensor]:
    """Tensors that look into `buffer` (which must stay unchanged).

    Args:
        what: name for error messages.

    Raises:
        BankError: it is not a whole safetensors file of dtypes that a bank holds.
    """
    memory = memoryview(buffer).cast("B")
    try:
        start = 8 + int.from_bytes(memory[:8], "little")
        blocks = _blocks(bytes(memory[8:start]))
        if blocks and blocks[-1].last > len(memory) - start:
            raise ValueError(f"it ends after {len(memory)} bytes of {start + blocks[-1].last}")
        flat = _flat(memory)
        return {name: tensor for block in blocks for name, tensor in block.views(flat, start)}
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise BankError(f"{what} is no whole safetensors file of {', '.join(DTYPES)} tensors: {error}") from error


@dataclass(frozen=True)
class _Block:
    """Neighbouring tensors of one dtype: cut out with three calls, however many they are."""

    dtype: torch.dtype
    first: int
    last: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]

    def views(self, flat: Tensor, start: int) -> Iterator[tuple[str, Tensor]]:
        if self.first == self.last:
            return zip(self.names, (torch.empty(shape, dtype=self.dtype) for shape in self.shapes), strict=True)
        parts = flat[start + self.first : start + self.last].view(self.dtype).split_with_sizes(self.sizes)
        return zip(self.names, (part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)), strict=True)


@lru_cache(maxsize=64)
def _blocks(header: bytes) -> tuple[_Block, ...]:
    """Adapters of one layout share one header, so a bank of thousands parses it once."""
    tree = json.loads(header)
    tree.pop("__metadata__", None)
    blocks: list[_Block] = []
    end = 0
    for name, entry in sorted(tree.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, (first, last) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        size = math.prod(shape)
        if min(shape, default=0) < 0 or first != end or last - first != size * dtype.itemsize:
            raise ValueError(f"{list(shape)} values of {entry['dtype']} do not fill bytes {first} to {last}")
        end = last
        if blocks and blocks[-1].dtype == dtype:
            old = blocks.pop()
            blocks.append(_Block(dtype, old.first, last, (*old.names, name), (*old.shapes, shape), (*old.sizes, size)))
        else:
            blocks.append(_Block(dtype, first, last, (name,), (shape,), (size,)))
    return tuple(blocks)


def _flat(memory: memoryview) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)


def unpack(
    buffer: Buffer,
    what: str,
    layout: Layout,
    rank: int,
    scale: float,
    dtype: str,
    prompt: tuple[int, int] | None,
    labels: tuple[str, ...],
    activation: Activation,
) -> AdapterState:
    """The adapter in `buffer`, checked against its manifest.

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
        activation,
    )
    if state.rank != rank:
        raise BankError(f"{what} has rank {state.rank}, its manifest has {rank}")
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
        raise BankError(f"{what}, '{name}' has shape {list(tensor.shape)}, its manifest has {wanted}")
    return tensor


def _check_dtype(what: str, path: str, tensor: Tensor, dtype: str) -> None:
    if str(tensor.dtype) != f"torch.{dtype}":
        raise BankError(f"{what}, '{path}' is {str(tensor.dtype).removeprefix('torch.')}, its manifest has {dtype}")


def dtype_of(state: AdapterState) -> str:
    """The dtype of its linears by torch's name."""
    first = next((a for a, _ in state.linears.values()), state.prompt)
    return "float32" if first is None else str(first.dtype).removeprefix("torch.")
