"""Tensor subclass of the simulated device: holds a CPU tensor and reports device ``sim:0``. Operators: ``dispatch.py``."""

from __future__ import annotations

from typing import Any

import torch

from graphrun.sim.dispatch import dispatch
from graphrun.sim.ledger import Allocation
from graphrun.sim.wrap import replace


class SimTensor(torch.Tensor):
    """A tensor on ``sim:0``. ``raw`` is the CPU tensor with its data, ``allocation`` the counted allocation of its storage."""

    raw: torch.Tensor
    allocation: Allocation

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    __torch_dispatch__ = classmethod(dispatch)  # type: ignore[assignment]

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True) -> Any:
        """A Parameter of ``data``, for code that constructs a parameter by ``type(param)`` (accelerate). Use ``wrap`` otherwise."""
        return torch.nn.Parameter(data, requires_grad)

    def tolist(self) -> Any:
        """The elements as nested lists, after a copy to the host (PyTorch's own method refuses subclasses)."""
        machine = self.allocation.machine
        machine.copy_out(self.raw.numel() * self.raw.dtype.itemsize)
        if machine.ordering is not None:
            machine.ordering.operator("tolist", machine.clock.current, (self.raw,), ())
            machine.ordering.join(machine.clock.current)
        return self.raw.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """With ``force``, a copy on the host as an array; otherwise raises TypeError, as on CUDA."""
        if not force:
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        return self.detach().cpu().numpy()

    @property
    def data(self) -> torch.Tensor:
        """The tensor detached from autograd. Assigning a sim tensor makes this one share its storage."""
        return self.detach()

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if type(other) is not SimTensor:
            raise RuntimeError(f"cannot set .data of a tensor on {self.device} to one on {other.device}")
        replace(SimTensor, self, other)

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
