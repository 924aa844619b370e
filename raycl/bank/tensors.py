"""An adapter's tensors as one safetensors file, and back without copying a byte.

The format (huggingface.co/docs/safetensors): length of the header as 8 bytes, the header as JSON, the tensors.
"""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from raycl.bank.manifest import AdapterManifest, Layout, ObjectInfo, SnapshotAdapter
from raycl.errors import BankError
from raycl.storage.unfinished import Buffer
from raycl.types import COPY, MAGNITUDE, Activation, AdapterState

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

TensorInfo = tuple[torch.dtype, tuple[int, ...], int, int]
"""Dtype and shape of a tensor, its first byte and the one after its last."""

MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 64
"""The most dimensions of a tensor in torch."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def pack(tensors: Mapping[str, Tensor]) -> list[Buffer]:
    """Return a safetensors file in parts: the header, then each tensor's own memory, nothing copied."""
    return list(packed(tensors, tensors.__getitem__))


def packed(
    tensors: Mapping[str, Tensor], fetch: Callable[[str], Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[Buffer]:
    """Yield the file part by part; each tensor is fetched in its turn, so that one at a time is in host memory.

    Args:
        tensors: give dtypes and full shapes, on any device. fetch: returns the full tensor of a name.
        metadata: metadata of the header.
    """
    # keeps every tensor aligned
    largest_first = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in largest_first:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield from (len(text).to_bytes(8, "little"), text)
    for name in largest_first:  # no variable holds a tensor while the next one is fetched
        yield fetch(name).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def views(buffer: Buffer, what: str) -> dict[str, Tensor]:
    """Return tensors that look into `buffer` (which must stay unchanged).

    Args:
        what: name for error messages.

    Raises:
        BankError: it is not a complete safetensors file of dtypes that a bank holds.
    """
    memory = memoryview(buffer).cast("B")
    header, start = _opened(memory, what)
    flat = _flat(memory)
    return {name: tensor for block in header.blocks for name, tensor in block.views(flat, start)}


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of one object by name: each is created when it is looked up, as a view of the object's bytes.

    Created tensors are not kept: a thousand adapters of which few are used cost no more than their names.

    Attributes:
        info: the object.
    """

    __slots__ = ("_header", "_memory", "_start", "info")

    def __init__(self, buffer: Buffer, what: str, info: ObjectInfo) -> None:
        """Read the header; see `views`."""
        self.info: ObjectInfo = info
        self._memory = memoryview(buffer).cast("B")
        self._header, self._start = _opened(self._memory, what)

    def __getitem__(self, name: str) -> Tensor:
        dtype, shape, first, last = self._header.places[name]
        if first == last:
            return torch.empty(shape, dtype=dtype)
        return _flat(self._memory[self._start + first : self._start + last]).view(dtype).view(shape)

    def __contains__(self, name: object) -> bool:
        """Check for a name without creating a tensor, unlike the default."""
        return name in self._header.places

    def __iter__(self) -> Iterator[str]:
        return iter(self._header.places)

    def __len__(self) -> int:
        return len(self._header.places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without creating it."""
        return self._header.places[name][1]


class StoredAdapter(AdapterState):
    """An adapter whose tensors are created at each access; see `StoredTensors`."""

    _tensors: StoredTensors

    def __init__(
        self, tensors: StoredTensors, scale: float, labels: Sequence[str], activation: Activation = ""
    ) -> None:
        values = {"_tensors": tensors, "scale": scale, "labels": tuple(labels), "activation": activation}
        self.__dict__.update(values)  # the base class is frozen

    @property
    def linears(self) -> dict[str, tuple[Tensor, Tensor]]:
        paths = [name.removesuffix(A) for name in self._tensors if name.endswith(A)]
        return {path: (self._tensors[path + A], self._tensors[path + B]) for path in paths}

    @property
    def magnitudes(self) -> dict[str, Tensor]:
        return {name.removesuffix(MAGNITUDE): self._tensors[name] for name in self._tensors if name.endswith(MAGNITUDE)}

    @property
    def copies(self) -> dict[str, Tensor]:
        return {name.removesuffix(COPY): self._tensors[name] for name in self._tensors if name.endswith(COPY)}

    @cached_property
    def prompt(self) -> Tensor | None:
        """See `AdapterState`; it is kept, because every forward pass reads it."""
        return self._tensors.get(PROMPT)

    @property
    def head_weight(self) -> Tensor | None:
        return self._tensors.get(HEAD_WEIGHT)

    @property
    def head_bias(self) -> Tensor | None:
        return self._tensors.get(HEAD_BIAS)

    @property
    def rank(self) -> int:
        return max((self._tensors.shape(name)[0] for name in self._tensors if name.endswith(A)), default=0)

    def tensors(self) -> StoredTensors:
        """Return the tensors by their stored names."""
        return self._tensors


@dataclass(frozen=True)
class _Header:
    blocks: tuple[_Block, ...]
    places: Mapping[str, TensorInfo]


def _opened(memory: memoryview, what: str) -> tuple[_Header, int]:
    """Return the header of a whole file, and where its tensors begin."""
    try:
        start = 8 + int.from_bytes(memory[:8], "little")
        if start > MAX_HEADER_BYTES:
            raise ValueError(f"its header has {start:,} bytes, and safetensors read {MAX_HEADER_BYTES:,}")
        header = _header(bytes(memory[8:start]))
        if header.blocks and header.blocks[-1].last > len(memory) - start:
            raise ValueError(f"it ends after {len(memory)} bytes of {start + header.blocks[-1].last}")
        return header, start
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise BankError(f"{what} is no whole safetensors file of {', '.join(DTYPES)} tensors: {error}") from error


@dataclass(frozen=True)
class _Block:
    """Neighbouring tensors of one dtype, which three calls cut out, however many they are."""

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
def _header(header: bytes) -> _Header:
    """Return a parsed header; adapters of one layout share it, so a bank of thousands parses it once."""
    tree = json.loads(header)
    tree.pop("__metadata__", None)
    places = {}
    end = 0
    for name, entry in sorted(tree.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, (first, last) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        if len(shape) > MAX_DIMENSIONS or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"the shape of '{name}' is {shape!s:.80}: expected up to {MAX_DIMENSIONS} sizes")
        if first != end or last - first != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{list(shape)} values of {entry['dtype']} do not fill bytes {first} to {last}")
        end = last
        places[name] = (dtype, shape, first, last)
    return _Header(tuple(_blocks(places)), places)


def _blocks(places: Mapping[str, TensorInfo]) -> Iterator[_Block]:
    for dtype, group in itertools.groupby(places.items(), lambda item: item[1][0]):
        names, infos = zip(*group, strict=True)
        shapes = tuple(shape for _, shape, _, _ in infos)
        yield _Block(dtype, infos[0][2], infos[-1][3], names, shapes, tuple(map(math.prod, shapes)))


def _flat(memory: memoryview) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)


def unpack(buffer: Buffer, entry: AdapterManifest | SnapshotAdapter, layout: Layout | None = None) -> AdapterState:
    """Return the adapter in bytes whose hash was checked, compared with its manifest.

    Args:
        layout: layout of a snapshot's entry (`Snapshot.layouts`).

    Raises:
        BankError: a tensor is missing, unexpected, or has another shape or dtype.
    """
    what = str(entry)
    layout = entry.layout if isinstance(entry, AdapterManifest) else layout
    assert layout is not None, "an entry of a snapshot needs its layout"
    tensors = views(buffer, what)
    linears, magnitudes = {}, {}
    prompt, labels = entry.prompt, entry.labels
    for path, (inputs, outputs) in layout.items():
        a, b = _take(tensors, path + A, what), _take(tensors, path + B, what)
        if a.dim() != 2 or b.dim() != 2 or a.shape[1] != inputs or b.shape[0] != outputs or a.shape[0] != b.shape[1]:
            raise BankError(
                f"{what}, '{path}': A {list(a.shape)} and B {list(b.shape)} are no LoRA of a linear from {inputs} to "
                f"{outputs}, which its manifest promises"
            )
        _check_dtype(what, path, a, entry.dtype)
        _check_dtype(what, path, b, entry.dtype)
        linears[path] = (a, b)
        if entry.use_dora:
            magnitudes[path] = _shaped(tensors, path + MAGNITUDE, (outputs,), what)
            _check_dtype(what, path, magnitudes[path], entry.dtype)
    state = AdapterState(
        linears,
        entry.scale,
        _shaped(tensors, PROMPT, prompt, what) if prompt is not None else None,
        labels,
        _shaped(tensors, HEAD_WEIGHT, (len(labels), None), what) if labels else None,
        _shaped(tensors, HEAD_BIAS, (len(labels),), what) if labels else None,
        entry.activation,
        magnitudes,
        {path: _shaped(tensors, path + COPY, shape, what) for path, shape in entry.copies.items()},
    )
    if state.rank != entry.rank:
        raise BankError(f"{what} has rank {state.rank}, its manifest has {entry.rank}")
    if tensors:
        raise BankError(f"{what} holds tensors that its manifest does not name: {', '.join(sorted(tensors)[:5])}")
    return state


def _take(tensors: dict[str, Tensor], name: str, what: str) -> Tensor:
    if name not in tensors:
        raise BankError(f"{what} lacks the tensor '{name}', which its manifest promises")
    return tensors.pop(name)


def _shaped(tensors: dict[str, Tensor], name: str, shape: tuple[int | None, ...], what: str) -> Tensor:
    tensor = _take(tensors, name, what)
    fits = tensor.dim() == len(shape) and all(w is None or w == s for w, s in zip(shape, tensor.shape, strict=True))
    if not fits:
        wanted = [size if size is not None else "any" for size in shape]
        raise BankError(f"{what}, '{name}' has shape {list(tensor.shape)}, its manifest has {wanted}")
    return tensor


def _check_dtype(what: str, path: str, tensor: Tensor, dtype: str) -> None:
    if str(tensor.dtype) != f"torch.{dtype}":
        raise BankError(f"{what}, '{path}' is {str(tensor.dtype).removeprefix('torch.')}, its manifest has {dtype}")
