"""A second torch device, `pretend`, on machines without an accelerator: it refuses what CUDA refuses.

Its tensors hold their values in CPU memory, but an operation that mixes them with tensors of the CPU raises, as do
`.numpy()` and a generator of the CPU, and random numbers come from a sequence of its own. What CUDA takes is taken:
scalars of the CPU in pointwise operations, indices of the CPU. Dropout alone draws from the CPU's sequence, so that
runs on both devices can be compared. Autocast casts as on CUDA. Importing this file registers the device for the whole
process, so only scripts import it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "pretend"
CPU = torch.device("cpu")
aten = torch.ops.aten

COPIES = {aten.copy_.default, aten._to_copy.default}
"""Operations that may see two devices."""

INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
"""Operations that take indices of the CPU."""

SCALARS = {aten.fill.Tensor, aten.fill_.Tensor, aten.masked_fill.Tensor, aten.masked_fill_.Tensor}
"""Operations that take scalars of the CPU, besides pointwise ones."""

DROPOUT = {aten.native_dropout.default}

TO_NUMPY = frozenset({Tensor.numpy, Tensor.__array__})
OF_VALUES = frozenset({Tensor.tolist, Tensor.storage, Tensor.untyped_storage, Tensor.data_ptr})
SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
"""What a tensor of the device refuses, leaves to its values, and does to these too."""

LOWER = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "mv", "scaled_dot_product_attention")
HIGHER = (
    *("layer_norm", "native_layer_norm", "nll_loss", "cross_entropy_loss", "kl_div", "rsqrt", "reciprocal", "exp"),
    *("log", "logsumexp", "softmax.int", "log_softmax.int", "cumsum", "sum", "sum.dim_IntList", "norm.Scalar"),
    *("pow.Tensor_Scalar", "pow.Tensor_Tensor"),
)
"""Operations whose float inputs CUDA's autocast brings to its lower type, and to float32."""


class _Module(_DummyBackendModule):  # type: ignore[misc]
    """`torch.pretend`.

    Attributes:
        state: of the device's own random numbers.
        drawn: operations that drew from them.
    """

    def __init__(self) -> None:
        self.drawn: list[str] = []
        self.manual_seed_all(0)

    def manual_seed_all(self, seed: int) -> None:
        """Begin another sequence than the CPU does for the same seed."""
        self.state = torch.Generator().manual_seed(seed ^ 0x5EED).get_state()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the dtypes that autocast supports."""
        return [torch.bfloat16, torch.float16]


MODULE = _Module()
_setup_privateuseone_for_python_backend(NAME, backend_module=MODULE)
DEVICE = torch.device(NAME, 0)
torch.__future__.set_swap_module_params_on_conversion(True)  # `Module.to` keeps parameters that are tied, as on CUDA


class PretendTensor(Tensor):
    """A tensor of the device; `values` has the same shape, strides and numbers on the CPU."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> PretendTensor:
        made: PretendTensor = Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=DEVICE,
        )
        made.values = values
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{self.values}, on {NAME}"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TO_NUMPY:
            raise TypeError(f"can't convert a {NAME} tensor to numpy: use Tensor.cpu() first")
        if func in OF_VALUES:
            return func(args[0].values)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func == SET_DATA:
            args[0].values = args[1].values
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the operation on values, its results on the device where it or one of its inputs is."""
    ours, others, devices = list[PretendTensor](), list[Tensor](), list[torch.device]()

    def on_cpu(item: Any) -> Any:
        if isinstance(item, PretendTensor):
            ours.append(item)
            return item.values
        if isinstance(item, Tensor):
            others.append(item)
        elif isinstance(item, torch.device):
            devices.append(item)
            return CPU
        return item

    values, options = [_each(on_cpu, item) for item in args], {key: _each(on_cpu, kwargs[key]) for key in kwargs}
    if ours and others and func not in COPIES:
        _check(func, args, others)
    here = devices[0].type == NAME if devices else bool(ours)
    same = {id(item.values): item for item in ours}
    is_drawn = torch.Tag.nondeterministic_seeded in func.tags
    result = _drawn(func, values, options) if is_drawn else func(*values, **options)

    def placed(item: Any) -> Any:
        if not isinstance(item, Tensor) or any(item is other for other in others):
            return item
        if id(item) not in same:
            return PretendTensor(item) if here else item
        changed = same[id(item)]
        if (changed.size(), changed.stride()) != (item.size(), item.stride()):
            with torch._C.DisableTorchFunctionSubclass():
                changed.data = PretendTensor(item)
        return changed

    return _each(placed, result)


def _each(change: Callable[[Any], Any], item: Any) -> Any:
    """Return the item changed, or each of a list or tuple: operations take and give no other containers."""
    return type(item)([_each(change, part) for part in item]) if type(item) in (list, tuple) else change(item)


def _check(func: Any, args: Any, others: list[Tensor]) -> None:
    """Raise where CUDA would."""
    if func in INDEXED and isinstance(args[0], PretendTensor):
        others = [word for word in args[2:3] if not isinstance(word, PretendTensor)]  # what is put there
    takes = func in INDEXED or func in SCALARS or torch.Tag.pointwise in func.tags
    for word in others:
        if word.dim() or not takes or word is args[0]:
            raise RuntimeError(
                f"expected all tensors to be on the same device, but {func} got one of the CPU, "
                f"{tuple(word.shape)} {word.dtype}, beside those on {NAME}"
            )


def _drawn(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function that draws, with the device's own random numbers."""
    if func in DROPOUT:
        return func(*args, **kwargs)
    given = kwargs.get("generator")
    if given is not None:
        raise RuntimeError(f"expected a '{NAME}' device type for generator but found '{given.device}'")
    MODULE.drawn.append(str(func))
    before = torch.get_rng_state()
    torch.set_rng_state(MODULE.state)
    try:
        return func(*args, **kwargs)
    finally:
        MODULE.state = torch.get_rng_state()
        torch.set_rng_state(before)


def _copied(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy a tensor where torch makes copies below Python (`torch.tensor(..., device=...)`)."""
    values = [item.values if isinstance(item, PretendTensor) else item for item in (source, target)]
    values[1].copy_(values[0])
    return target


def _casting(op: Any, dtype: torch.dtype | None) -> Callable[..., Any]:
    """Return the operation under autocast; None: its lower type."""

    def run(*args: Any, **kwargs: Any) -> Any:
        to = dtype or torch.get_autocast_dtype(NAME)

        def cast(item: Any) -> Any:
            is_half = isinstance(item, Tensor) and item.dtype in (torch.float32, torch.bfloat16, torch.float16)
            return item.to(to) if is_half and item.device.type == NAME else item

        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            return op(*tree_map(cast, args), **tree_map(cast, kwargs))

    return run


def _op(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


FALLBACK = torch.library.Library("_", "IMPL")
FALLBACK.fallback(lambda func, *args, **kwargs: _computed(func, args, kwargs), "PrivateUse1")
FALLBACK.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
KERNELS = torch.library.Library("aten", "IMPL")
KERNELS.impl("_copy_from", _copied, "PrivateUse1")
for names, dtype in ((LOWER, None), (HIGHER, torch.float32)):
    for name in names:
        KERNELS.impl(name, _casting(_op(name), dtype), "AutocastPrivateUse1")
