"""The tensor subclass of a simulated device: it has a CPU tensor and reports the machine's device.

A storage has its ``Allocation`` as an attribute, so views find it, and it is released exactly when
the storage is freed.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from graphrun.sim.ledger import Allocation, SimulatedOutOfMemory, rounded

_make_wrapper = torch.Tensor._make_wrapper_subclass
# the original property, even if torch.Tensor.data was replaced
_data: Any = torch._C.TensorBase.data


class SimTensor(torch.Tensor):
    """A tensor on a simulated device.

    ``raw``: the CPU tensor with the data. ``allocation``: the counted allocation of the storage.
    C++ sees a tensor on the machine's ``shell_device``, Python reads the machine's ``device``; they
    differ in dry runs (`graphrun.sim.dry`).
    """

    raw: torch.Tensor
    allocation: Allocation

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True) -> Any:
        """Return a Parameter of ``data``, for code that calls ``type(param)`` (accelerate). Use
        ``wrap`` otherwise."""
        return torch.nn.Parameter(data, requires_grad)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        device: torch.device = self.allocation.machine.device
        return device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return self.device.type == "cuda"

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """False: a simulated tensor has values."""
        return False

    def get_device(self) -> int:
        return self.device.index

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As `torch.Tensor.to`, without the tensor's own device, since C++ may see another one."""
        device = self.device
        if device.type == self.allocation.machine.shell_device.type:
            return super().to(*args, **kwargs)
        target = (
            args[0]
            if args and isinstance(args[0], (str, torch.device, int))
            else kwargs.get("device")
        )
        if target is None or torch.device(target).type != device.type:
            return super().to(*args, **kwargs)
        kwargs.pop("device", None)
        args = args[1:] if args and target is args[0] else args
        if args or kwargs:  # positional arguments behind the device: dtype, non_blocking, copy
            for name, value in zip(("dtype", "non_blocking", "copy"), args, strict=False):
                kwargs[name] = value
            dtype = kwargs.pop("dtype", None)
            return super().to(self.dtype if dtype is None else dtype, **kwargs)
        return self

    def cuda(self, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:  # type: ignore[override]
        return self.to(
            torch.device("cuda") if device is None else device, non_blocking=non_blocking, **kwargs
        )

    def _read(self, operation: str, nbytes: int) -> torch.Tensor:
        """Return the raw tensor, after a counted copy of ``nbytes`` to the host."""
        machine = self.allocation.machine
        machine.copy_out(nbytes)
        if machine.ordering is not None:
            machine.ordering.operator(operation, machine.agent(), (self.raw,), ())
            machine.ordering.join(machine.agent())
        return self.raw

    # methods rather than operators, because PyTorch converts the elements of a list
    # (`torch.tensor`) without Python dispatch

    def item(self) -> Any:
        """Return the element as a number, after a copy to the host."""
        return self._read("aten::item", self.raw.dtype.itemsize).item()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __index__(self) -> int:
        return operator.index(self.item())

    def tolist(self) -> Any:
        """Return nested lists, after a copy to the host; PyTorch's own method refuses
        subclasses."""
        return self._read("tolist", self.raw.numel() * self.raw.dtype.itemsize).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return an array on the host. Raises TypeError, as on CUDA, without ``force`` if the
        memory is not the host's."""
        if not force and not self.allocation.machine.unified:
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        return self.detach().cpu().numpy()

    @property
    def data(self) -> torch.Tensor:
        """The tensor detached from autograd. Assigning a sim tensor shares its storage."""
        return self.detach()

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if type(other) is not SimTensor:
            raise RuntimeError(
                f"cannot set .data of a tensor on {self.device} to one on {other.device}"
            )
        replace(self, other)

    def as_strided(self, size: Any, stride: Any, storage_offset: Any = None) -> Any:
        """Return a view. Without gradients it bypasses PyTorch's dispatcher, in a sixth of the
        time: placing weights takes one view per tensor."""
        if torch.is_grad_enabled():
            return super().as_strided(size, stride, storage_offset)
        return wrap(self.raw.as_strided(size, stride, storage_offset), self.allocation.machine)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            twin = self.detach().clone().requires_grad_(self.requires_grad)
            if isinstance(self, torch.nn.Parameter):
                twin = torch.nn.Parameter(twin, requires_grad=self.requires_grad)
            memo[id(self)] = twin
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a sim tensor cannot be pickled; use Tensor.cpu() first")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{self.raw!r}, device='{self.device}'"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec and self.dim() == 0 else str(self)


def wrap(raw: torch.Tensor, machine: Any) -> Any:
    """Return the simulated tensor of ``raw``, and count its storage on ``machine`` once. Raises
    SimulatedOutOfMemory, counting nothing, if it does not fit."""
    allocation = _allocation(raw, machine)
    tensor = _shell(raw, machine)
    tensor.raw, tensor.allocation = raw, allocation
    return tensor


def _allocation(raw: torch.Tensor, machine: Any) -> Allocation:
    """Return the allocation of the storage of ``raw``, and count it on ``machine`` once."""
    storage: Any = raw.untyped_storage()
    allocation: Allocation | None = getattr(storage, "graphrun_allocation", None)
    if allocation is None:
        size = rounded(storage.nbytes())
        machine.admit((size,))
        allocation = storage.graphrun_allocation = Allocation(
            machine, _count(machine, size, raw), size
        )
    return allocation


def wrap_all(raws: Sequence[Any], machine: Any) -> list[Any]:
    """``wrap`` each tensor in ``raws``; leave other items. All or none must fit."""
    fresh: dict[int, int] = {}
    for raw in raws:
        if isinstance(raw, torch.Tensor):
            storage = raw.untyped_storage()
            if getattr(storage, "graphrun_allocation", None) is None:
                fresh[storage._cdata] = rounded(storage.nbytes())
    if len(fresh) > 1:
        machine.admit(tuple(fresh.values()))
    return [wrap(raw, machine) if isinstance(raw, torch.Tensor) else raw for raw in raws]


def page_locked(memory: torch.Tensor) -> bool:
    """Return whether `Machine.page_lock` locked ``memory``, of the host."""
    return getattr(memory.untyped_storage(), "graphrun_page_locked", False)


def sync_storage(tensor: Any) -> None:
    """Update the ledger and ``tensor``'s shape after an operator that may change the raw storage.

    A larger storage is counted as a new one while the old one still exists, as on a device. If that
    does not fit, the raw tensor is restored and SimulatedOutOfMemory is raised.
    """
    raw, machine = tensor.raw, tensor.allocation.machine
    allocation, storage = _allocation(raw, machine), raw.untyped_storage()
    if (size := rounded(storage.nbytes())) != allocation.nbytes:
        try:
            machine.admit((size,))
        except SimulatedOutOfMemory:
            storage.resize_(allocation.nbytes)
            raw.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
            raise
        previous = allocation.key, allocation.nbytes
        allocation.key, allocation.nbytes = _count(machine, size, raw), size
        machine.release(*previous)
    tensor.allocation = allocation
    if (
        raw.shape != tensor.shape
        or raw.stride() != tensor.stride()
        or raw.storage_offset() != tensor.storage_offset()
    ):
        _data.__set__(tensor, _shell(raw, machine))


def replace(tensor: Any, other: Any) -> None:
    """Make ``tensor`` share the storage and shape of ``other``, as ``tensor.data = other``."""
    _data.__set__(tensor, _shell(other.raw, other.allocation.machine))
    tensor.raw, tensor.allocation = other.raw, other.allocation


def _count(machine: Any, size: int, raw: torch.Tensor) -> int:
    key: int = machine.enter(size, raw.shape, raw.dtype)
    if machine.ordering is not None and size:
        machine.ordering.allocated(key, size, machine.agent())
    return key


def _shell(raw: torch.Tensor, machine: Any) -> Any:
    # positional arguments, because parsing keywords takes a fifth of the time of a call
    return _make_wrapper(
        SimTensor,
        raw.shape,
        raw.stride(),
        raw.storage_offset(),
        None,
        raw.dtype,
        raw.layout,
        machine.shell_device,
    )
