"""Count the FLOPs of operators on the CPU, with the formulas of the simulated machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from graphrun.sim.flops import FORMULAS


class HostFlops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, counts the FLOPs of all operators in ``flops``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if (formula := FORMULAS.get(func._schema.name)) is not None:
            self.flops += formula(list(args), output)
        return output
