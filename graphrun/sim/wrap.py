"""Decides how a CPU tensor becomes a simulated one: its storage is counted, once, and a tensor of the subclass stands for it.

A storage carries its ``Allocation`` as an attribute, so views find it, and it ends exactly when the storage does.
It must not know operators. ``cls`` is always the tensor subclass (``tensor.SimTensor``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphrun.sim.active import ActiveMachine
from graphrun.sim.ledger import Allocation, SimulatedOutOfMemory, release, rounded

_make_wrapper = torch.Tensor._make_wrapper_subclass
_data: Any = torch._C.TensorBase.data  # PyTorch's own, whatever torch.Tensor has by now


def wrap(cls: Any, raw: torch.Tensor, machine: ActiveMachine) -> Any:
    """The simulated tensor that stands for ``raw``; its storage is counted on ``machine`` unless something else shares it.

    Raises SimulatedOutOfMemory, counting nothing, if it does not fit.
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
    """``wrap`` of each tensor in ``raws`` (other things pass through), refused together if they do not fit together."""
    fresh: dict[int, int] = {}
    for raw in raws:
        if isinstance(raw, torch.Tensor):
            storage = raw.untyped_storage()
            if getattr(storage, "graphrun_allocation", None) is None:
                fresh[storage._cdata] = rounded(storage.nbytes())
    if len(fresh) > 1:
        machine.ledger.admit(tuple(fresh.values()))
    return [wrap(cls, raw, machine) if isinstance(raw, torch.Tensor) else raw for raw in raws]


def settle(cls: Any, tensor: Any) -> None:
    """Brings the books and ``tensor``'s shape up to date after an operator may have resized or replaced its raw tensor's storage.

    A grown storage is counted like a new one beside the old, as a device would hold both for a moment. If that does not fit,
    the raw tensor is put back as it was and SimulatedOutOfMemory is raised.
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
    """Makes ``tensor`` stand for what ``other`` stands for: ``tensor.data = other``."""
    _data.__set__(tensor, _shell(cls, other.raw, other.allocation.machine))
    tensor.raw, tensor.allocation = other.raw, other.allocation


def _enter(machine: ActiveMachine, size: int, raw: torch.Tensor) -> int:
    key = machine.ledger.enter(size, raw.shape, raw.dtype)
    if machine.ordering is not None and size:
        machine.ordering.allocated(key, size, machine.clock.current)
    return key


def _shell(cls: Any, raw: torch.Tensor, machine: ActiveMachine) -> Any:
    # positional, because parsing keywords costs a fifth of the whole
    return _make_wrapper(cls, raw.shape, raw.stride(), raw.storage_offset(), None, raw.dtype, raw.layout, machine.device)
