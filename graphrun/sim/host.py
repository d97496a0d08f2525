"""Counts the FLOPs that the host computes, by the formulas of the simulated machine. It must not know machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from graphrun.sim.flops import FORMULAS


class HostFlops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active: ``flops`` of the operators on tensors of the CPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """The operator as it is, counted."""
        out = func(*args, **(kwargs or {}))
        if (formula := FORMULAS.get(func._schema.name)) is not None:
            self.flops += formula(list(args), out)
        return out
