"""Handlers of the operators that do more than "compute on the CPU and wrap": factory functions,
copies, resizing in place.

A handler gets the operator and its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from graphrun.sim.active import active_machine, is_simulated
from graphrun.sim.ledger import rounded
from graphrun.sim.tensor import SimTensor, page_locked, replace, sync_storage, wrap

Handler = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]

LEAVES = frozenset({"aten::scaled_dot_product_attention", "aten::linear"})
"""Composite operators that are not decomposed: attention, because devices other than CUDA, CPU and
XPU get the math form, which materializes the S x S scores and rounds differently; ``linear``,
because its decomposition differs by device and it is the most frequent operator."""

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
"""Operators whose second argument may hold index tensors on the CPU, as on CUDA."""


def _new(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``empty(size)`` and ``empty_strided(size, stride)``: refused before the host allocates
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
    """``_to_copy(source, dtype=, device=, ...)``. The dtype is converted on the source device, as
    in CUDA's copies."""
    source = args[0]
    options = {
        key: value for key, value in kwargs.items() if key in ("dtype", "layout", "memory_format")
    }
    from_sim = type(source) is SimTensor
    target = kwargs.get("device")
    to_sim = from_sim if target is None else is_simulated(target)
    to_meta = target is not None and not to_sim and torch.device(target).type == "meta"
    raw = source.raw if from_sim else source
    nbytes = raw.numel() * (options.get("dtype") or raw.dtype).itemsize
    machine = source.allocation.machine if from_sim else active_machine(target)
    if (
        from_sim
        and to_sim
        and target is not None
        and (other := active_machine(target)) is not machine
    ):
        return _across(func, raw, options, nbytes, machine, other)
    non_blocking = bool(kwargs.get("non_blocking"))
    if not to_sim:
        options["device"] = target
        if not to_meta:
            # CUDA's result is page-locked if non_blocking
            waits = machine.copy_out(nbytes, non_blocking, pageable=not non_blocking)
    elif not from_sim:
        machine.admit((rounded(nbytes),))
        waits = machine.copy_in(nbytes, non_blocking, pageable=not page_locked(raw))
    else:
        machine.clock.launch()
    copied = func(raw, **options)
    made = wrap(copied, machine) if to_sim else copied
    if machine.ordering is not None and not to_meta:
        if from_sim and to_sim:
            machine.ordering.operator("aten::_to_copy", machine.agent(), (raw,), (copied,))
        else:
            machine.ordering.copied(machine.agent(), copied, raw, waits)
    return made


def _across(
    func: Any, raw: torch.Tensor, options: Mapping[str, Any], nbytes: int, machine: Any, other: Any
) -> Any:
    """A copy of ``raw``, which is on ``machine``, on the machine ``other``."""
    other.admit((rounded(nbytes),))
    machine.copy_across(nbytes, other)
    copied = func(raw, **options)
    made = wrap(copied, other)
    if machine.ordering is not None:
        machine.ordering.crossed(machine.agent(), other.agent(), copied, raw)
    return made


def _copy_(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``copy_(destination, source, non_blocking)``, counted with the bytes of the destination."""
    return _copy(args[0], args[1], bool(args[2] if len(args) > 2 else kwargs.get("non_blocking")))


def _copy_from(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``_copy_from(source, destination, non_blocking)``: replaces ``copy_`` where C++ excludes
    Python dispatch."""
    return _copy(args[1], args[0], bool(args[2] if len(args) > 2 else kwargs.get("non_blocking")))


def _copy_from_and_resize(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``_copy_from_and_resize(source, destination)``."""
    source, destination = args
    if type(destination) is SimTensor:
        destination.raw.resize_(source.shape)
        sync_storage(destination)
    else:
        destination.resize_(source.shape)
    return _copy(destination, source)


def _copy(destination: Any, source: Any, non_blocking: bool = False) -> Any:
    into, from_ = type(destination) is SimTensor, type(source) is SimTensor
    machine = (destination if into else source).allocation.machine
    nbytes = destination.numel() * destination.dtype.itemsize
    waits = False
    if into and not from_:
        waits = machine.copy_in(nbytes, non_blocking, pageable=not page_locked(source))
    elif from_ and not into:
        waits = machine.copy_out(nbytes, non_blocking, pageable=not page_locked(destination))
    elif (origin_machine := source.allocation.machine) is not machine:
        origin_machine.copy_across(nbytes, machine)
    else:
        machine.clock.launch()
    target, origin = destination.raw if into else destination, source.raw if from_ else source
    target.copy_(origin)
    if machine.ordering is not None:
        if into and from_ and source.allocation.machine is not machine:
            machine.ordering.crossed(
                source.allocation.machine.agent(), machine.agent(), target, origin
            )
        elif into and from_:
            machine.ordering.operator("aten::copy_", machine.agent(), (origin,), (target,))
        else:
            machine.ordering.copied(machine.agent(), target, origin, waits)
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


SPECIAL: Mapping[str, Handler] = {
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
