"""Handlers of operators with special rules: factory functions, copies, resizing in place. A handler
gets the operator and its arguments. All other operators are computed on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.nn import functional

from graphrun.sim.active import active_machine, is_simulated
from graphrun.sim.ledger import rounded
from graphrun.sim.tensor import SimTensor, page_locked, replace, sync_storage, wrap

OperatorHandler = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]

LEAVES = frozenset({"aten::scaled_dot_product_attention", "aten::linear", "aten::_fused_rms_norm"})
"""Composite operators that are not decomposed. Attention: devices other than CUDA, CPU and XPU
get the math form, which materializes the S x S scores and rounds differently. ``linear``: its
decomposition differs by device, and it is the most frequent operator. RMS norm: CUDA has one
kernel for it, without the fp32 copies of its decomposition."""

CONTIGUOUS: Mapping[str, tuple[Callable[..., torch.Tensor], ...]] = {
    "aten::_fused_rms_norm": (torch.rms_norm, functional.rms_norm),
    "aten::native_layer_norm": (torch.layer_norm, functional.layer_norm),
    "aten::_softmax": (torch.softmax, functional.softmax, torch.Tensor.softmax),
}
"""Operators that read a contiguous copy of an input that is not (``expect_contiguous`` in ATen's
layer_norm.cpp, ``contiguous`` in its SoftMax.cpp, and the same for CUDA), and the functions that
call them."""

INDEXING = frozenset(
    f"aten::{name}"
    for name in (
        "index",
        "index_put",
        "index_put_",
        "_index_put_impl_",
        "_unsafe_index",
        "_unsafe_index_put",
    )
)
"""Operators whose second argument may contain index tensors on the CPU, as on CUDA."""

INDEX_WRITES = INDEXING - {"aten::index", "aten::_unsafe_index"}
"""Operators that also take index tensors on the device for a tensor on the CPU, as on CUDA.
`_index_put_impl_` copies indices to the tensor they index (`expandTensors` in PyTorch's
ATen/native/IndexingUtils.h); `index` refuses them (`check_indices_on_cpu_or_selfdevice` in
ATen/native/TensorAdvancedIndexing.cpp)."""


def _new(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``empty(size)``, ``empty_strided(size, stride)``: refused before the host allocates
    anything."""
    machine = active_machine(kwargs.get("device"))
    if kwargs.get("pin_memory"):
        raise RuntimeError(f"only tensors on the CPU can be pinned, not on {machine.name}")
    size = args[0]
    elements = prod(size) if len(args) == 1 else _extent(size, args[1])
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    machine.admit((rounded(elements * dtype.itemsize),))
    return wrap(func(*args, **{**kwargs, "device": "cpu"}), machine)


def _extent(size: Sequence[int], stride: Sequence[int]) -> int:
    return 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


def _to_copy(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``_to_copy(source, dtype=, ...)``: converts on the source device, as CUDA's copies do."""
    source = args[0]
    options = {
        key: value for key, value in kwargs.items() if key in ("dtype", "layout", "memory_format")
    }
    is_from_sim = type(source) is SimTensor
    target = kwargs.get("device")
    is_to_sim = is_from_sim if target is None else is_simulated(target)
    is_to_meta = target is not None and not is_to_sim and torch.device(target).type == "meta"
    raw = source.raw if is_from_sim else source
    nbytes = raw.numel() * (options.get("dtype") or raw.dtype).itemsize
    machine = source.allocation.machine if is_from_sim else active_machine(target)
    if (
        is_from_sim
        and is_to_sim
        and target is not None
        and (other := active_machine(target)) is not machine
    ):
        return _across(func, raw, options, nbytes, machine, other)
    non_blocking = bool(kwargs.get("non_blocking"))
    if not is_to_sim:
        options["device"] = target
        if not is_to_meta:
            # CUDA's result is page-locked if non_blocking
            is_blocking = machine.copy_out(nbytes, non_blocking, pageable=not non_blocking)
    elif not is_from_sim:
        machine.admit((rounded(nbytes),))
        is_blocking = machine.copy_in(nbytes, non_blocking, pageable=not page_locked(raw))
    else:
        machine.clock.launch()
    raw_copy = func(raw, **options)
    result = wrap(raw_copy, machine) if is_to_sim else raw_copy
    if machine.ordering is not None and not is_to_meta:
        if is_from_sim and is_to_sim:
            machine.ordering.operator("aten::_to_copy", machine.agent(), (raw,), (raw_copy,))
        else:
            machine.ordering.copied(machine.agent(), raw_copy, raw, is_blocking)
    return result


def _across(
    func: Any, raw: torch.Tensor, options: Mapping[str, Any], nbytes: int, machine: Any, other: Any
) -> Any:
    """Copy ``raw``, which is on ``machine``, to the machine ``other``."""
    other.admit((rounded(nbytes),))
    machine.copy_across(nbytes, other)
    raw_copy = func(raw, **options)
    result = wrap(raw_copy, other)
    if machine.ordering is not None:
        machine.ordering.transferred(machine.agent(), other.agent(), raw_copy, raw)
    return result


def _copy_(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``copy_(destination, source, non_blocking)``, counted with the bytes of the destination."""
    return _copy(args[0], args[1], bool(args[2] if len(args) > 2 else kwargs.get("non_blocking")))


def _copy_from(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``_copy_from(source, destination, non_blocking)``: ``copy_`` where C++ excludes Python
    dispatch."""
    return _copy(args[1], args[0], bool(args[2] if len(args) > 2 else kwargs.get("non_blocking")))


def _copy_from_and_resize(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    source, destination = args
    if type(destination) is SimTensor:
        destination.raw.resize_(source.shape)
        sync_storage(destination)
    else:
        destination.resize_(source.shape)
    return _copy(destination, source)


def _copy(destination: Any, source: Any, non_blocking: bool = False) -> Any:
    is_to_sim, is_from_sim = type(destination) is SimTensor, type(source) is SimTensor
    machine = (destination if is_to_sim else source).allocation.machine
    nbytes = destination.numel() * destination.dtype.itemsize
    is_blocking = False
    if is_to_sim and not is_from_sim:
        is_blocking = machine.copy_in(nbytes, non_blocking, pageable=not page_locked(source))
    elif is_from_sim and not is_to_sim:
        is_blocking = machine.copy_out(nbytes, non_blocking, pageable=not page_locked(destination))
    elif (origin_machine := source.allocation.machine) is not machine:
        origin_machine.copy_across(nbytes, machine)
    else:
        machine.clock.launch()
    target, origin = (
        destination.raw if is_to_sim else destination,
        source.raw if is_from_sim else source,
    )
    target.copy_(origin)
    if machine.ordering is not None:
        if is_to_sim and is_from_sim and source.allocation.machine is not machine:
            machine.ordering.transferred(
                source.allocation.machine.agent(), machine.agent(), target, origin
            )
        elif is_to_sim and is_from_sim:
            machine.ordering.operator("aten::copy_", machine.agent(), (origin,), (target,))
        else:
            machine.ordering.copied(machine.agent(), target, origin, is_blocking)
    return destination


def _item(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``item()``: a copy of one element to the host."""
    return args[0].item()


def _resize_(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``resize_(tensor, size)``: refused before anything changes."""
    tensor, size = args[0], args[1]
    raw = tensor.raw
    size_bytes = rounded((raw.storage_offset() + prod(size)) * raw.dtype.itemsize)
    if size_bytes > tensor.allocation.nbytes:
        tensor.allocation.machine.admit((size_bytes,))
    func(raw, *args[1:], **kwargs)
    sync_storage(tensor)
    return tensor


def _set_(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``set_()`` and ``set_(other)``: the tensor gets another storage."""
    tensor = args[0]
    if len(args) == 1:
        replace(
            tensor,
            wrap(torch.empty(0, dtype=tensor.dtype, device="cpu"), tensor.allocation.machine),
        )
    elif type(args[1]) is SimTensor and len(args) == 2:
        replace(tensor, wrap(args[1].raw.detach(), args[1].allocation.machine))
    else:
        raise NotImplementedError(
            "sim: set_ takes a sim tensor, not a storage: storages of sim tensors have no memory"
        )
    return tensor


def _compatible(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Called for ``tensor.data = other``: both must be sim tensors."""
    return type(args[0]) is SimTensor and type(args[1]) is SimTensor


SPECIAL: Mapping[str, OperatorHandler] = {
    "aten::empty.memory_format": _new,
    "aten::empty_strided": _new,
    "aten::_to_copy": _to_copy,
    "aten::copy_": _copy_,
    "aten::_copy_from": _copy_from,
    "aten::_copy_from_and_resize": _copy_from_and_resize,
    "aten::_local_scalar_dense": _item,
    "aten::resize_": _resize_,
    "aten::set_": _set_,
    "aten::set_.source_Tensor": _set_,
    "aten::set_.source_Storage": _set_,
    "aten::set_.source_Storage_storage_offset": _set_,
    "aten::set_.source_Tensor_storage_offset": _set_,
    "aten::_has_compatible_shallow_copy_type": _compatible,
}
