"""Wraps CPU tensors as simulated ones and counts each storage once.

A storage has its ``Allocation`` as an attribute, so views find it, and it is released exactly when the storage is freed. ``cls`` is
always the tensor subclass (``tensor.SimTensor``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphrun.sim.active import ActiveMachine
from graphrun.sim.ledger import Allocation, SimulatedOutOfMemory, release, rounded

_make_wrapper = torch.Tensor._make_wrapper_subclass
_data: Any = torch._C.TensorBase.data  # the original property, also if torch.Tensor.data was replaced


def wrap(cls: Any, raw: torch.Tensor, machine: ActiveMachine) -> Any:
    """The simulated tensor of ``raw``. Counts its storage on ``machine``, unless it is counted already.

    Raises SimulatedOutOfMemory, without counting, if it does not fit.
    """
    storage: Any = raw.untyped_storage()
    allocation = getattr(storage, "graphrun_allocation", None)
    if allocation is None:
        size = rounded(storage.nbytes())
        machine.ledger.admit((size,))
        allocation = storage.graphrun_allocation = Allocation(machine, _enter(machine, size, raw), size)
    tensor = _shell(cls, raw, machine)
    tensor.raw = raw
    tensor.allocation = allocation
    return tensor


def wrap_all(cls: Any, raws: Sequence[Any], machine: ActiveMachine) -> list[Any]:
    """``wrap`` of each tensor in ``raws``; other items are returned unchanged. All are refused if they do not fit together."""
    fresh: dict[int, int] = {}
    for raw in raws:
        if isinstance(raw, torch.Tensor):
            storage = raw.untyped_storage()
            if getattr(storage, "graphrun_allocation", None) is None:
                fresh[storage._cdata] = rounded(storage.nbytes())
    if len(fresh) > 1:
        machine.ledger.admit(tuple(fresh.values()))
    return [wrap(cls, raw, machine) if isinstance(raw, torch.Tensor) else raw for raw in raws]


def sync_storage(cls: Any, tensor: Any) -> None:
    """Updates the ledger and ``tensor``'s shape after an operator that may have resized or replaced the storage of its raw tensor.

    A grown storage is counted as a new one while the old one still exists, as on a device. If that does not fit, the raw tensor is
    restored and SimulatedOutOfMemory is raised.
    """
    raw = tensor.raw
    storage: Any = raw.untyped_storage()
    allocation = getattr(storage, "graphrun_allocation", None)
    size = rounded(storage.nbytes())
    machine = tensor.allocation.machine
    ledger = machine.ledger
    if allocation is None:
        ledger.admit((size,))
        allocation = storage.graphrun_allocation = Allocation(machine, _enter(machine, size, raw), size)
    elif size != allocation.nbytes:
        try:
            ledger.admit((size,))
        except SimulatedOutOfMemory:
            storage.resize_(allocation.nbytes)
            raw.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
            raise
        before = allocation.key, allocation.nbytes
        allocation.key, allocation.nbytes = _enter(machine, size, raw), size
        release(machine, *before)
    tensor.allocation = allocation
    if raw.shape != tensor.shape or raw.stride() != tensor.stride() or raw.storage_offset() != tensor.storage_offset():
        _data.__set__(tensor, _shell(cls, raw, machine))


def replace(cls: Any, tensor: Any, other: Any) -> None:
    """Makes ``tensor`` share the storage and shape of ``other``, as ``tensor.data = other``."""
    _data.__set__(tensor, _shell(cls, other.raw, other.allocation.machine))
    tensor.raw, tensor.allocation = other.raw, other.allocation


def _enter(machine: ActiveMachine, size: int, raw: torch.Tensor) -> int:
    key = machine.ledger.enter(size, raw.shape, raw.dtype)
    if machine.ordering is not None and size:
        machine.ordering.allocated(key, size, machine.clock.current)
    return key


def _shell(cls: Any, raw: torch.Tensor, machine: ActiveMachine) -> Any:
    # positional arguments, because parsing keywords takes a fifth of the time of a call
    return _make_wrapper(cls, raw.shape, raw.stride(), raw.storage_offset(), None, raw.dtype, raw.layout, machine.device)
