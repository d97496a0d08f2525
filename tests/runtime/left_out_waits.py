"""Runs of one plan on one device, each without one of its waits.

    wait                     0   1   2   3  ...
    run without wait 2       x   x       x          races, or another result?

``python left_out_waits.py PLAN [NUMBER ...]`` runs the plan on the backend from outside, with late
copies and with late kernels, and prints which waits change the result.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from small_component import (
    PREFETCH,
    WIDE,
    Block,
    Small,
    calls_to,
    plain,
    plan_of,
    small_hardware,
    small_problem,
    use,
)

from graphrun.model.hardware import Hardware
from graphrun.runtime.devices.device import Device
from graphrun.runtime.devices.open import open_device
from graphrun.runtime.executor import follow
from graphrun.runtime.host import Host
from graphrun.sim.ordering import RaceError
from graphrun.verify.solution import solution_of

sys.path.insert(0, str(Path(__file__).parent.parent / "outside"))


class SmallPlan(NamedTuple):
    """A plan as text, and the calls that it is for."""

    text: str
    calls: tuple[str, ...]


PLANS = {
    # some blocks are loaded and others streamed
    "loaded and streamed": SmallPlan(
        f"""
    slot s0/0:a load
      load a unblocked[0] thin[0-5] from pinned
    slot s0/0:a first
      stream a keep unblocked[0] thin[0-5] ring buffer {2 * WIDE} B
      run
    slot s0/0:a steady x1
      stream a keep unblocked[0] thin[0-5] ring buffer {2 * WIDE} B
      run
    slot end
      evict a unblocked[0] thin[0-5]
""",
        ("a", "a"),
    ),
    # all blocks are streamed, and the next component is loaded at the same time
    "streamed": SmallPlan(PREFETCH.format(ring_buffer=2 * WIDE), ("a", "a", "a", "a", "b")),
}


class Waits:
    """Counts the waits of devices for a mark, and leaves out number ``left_out`` (-1: none)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device_class: type[Device]) -> None:
        self.streams: list[str] = []
        self.left_out = -1
        wait = device_class.wait

        def counted(device: Device, stream: Any, mark: Any) -> None:
            self.streams.append(stream)
            if len(self.streams) - 1 != self.left_out:
                wait(device, stream, mark)

        monkeypatch.setattr(device_class, "wait", counted)

    @property
    def count(self) -> int:
        return len(self.streams)


class Runs:
    """Runs of the plan called ``name`` on one device with ``hardware``."""

    def __init__(
        self, waits: Waits, name: str = "loaded and streamed", hardware: Hardware | None = None
    ) -> None:
        self.waits, self._plan = waits, PLANS[name]
        hardware = hardware or small_hardware()
        names = sorted(set(self._plan.calls))
        self.modules = {name: Small(number) for number, name in enumerate(names)}
        uses = [[use(name, self._plan.calls.count(name), hardware)] for name in names]
        self.problem = small_problem(self.modules, uses, hardware)
        self.device = open_device(self.problem)
        self.host = Host(self.modules, self.problem, self.device)

    def races(self, left_out: int = -1) -> bool:
        """Whether a run without wait number ``left_out`` raises RaceError."""
        try:
            self.result(left_out)
        except RaceError:
            return True
        return False

    def result(self, left_out: int = -1) -> torch.Tensor:
        """The result of a run without wait number ``left_out``."""
        self.waits.streams.clear()
        self.waits.left_out = left_out
        return self.run()

    def run(self) -> torch.Tensor:
        solution = solution_of(self.problem, plan_of(self.problem, self._plan.text))
        trace = follow(
            solution,
            self.host,
            self.device,
            lambda: calls_to(self.host.modules, self._plan.calls, self.device.torch_device),
        )
        result: torch.Tensor = trace.outputs["x"]
        return result


def changed_on_brook(name: str, numbers: list[int]) -> dict[str, Any]:
    """The streams of the waits of plan ``name``, and by what is late the numbers of the waits that
    change the result if they are left out. No number: all waits."""
    import brook

    from graphrun.runtime.devices.accelerator import AcceleratorDevice

    backend = brook.register()
    hardware = replace(small_hardware(), name="brook", device="brook")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Block, "forward", late_forward(backend))
        waits = Waits(patch, AcceleratorDevice)
        runs = Runs(waits, name, hardware)
        expected = plain(runs.modules, PLANS[name].calls)
        assert torch.equal(runs.result(), expected)
        streams = list(waits.streams)
        changes = dict[str, list[int]]()
        for late in ("copies", "kernels"):
            backend.set_late(late)
            assert torch.equal(runs.result(), expected)
            changes[late] = [
                number
                for number in numbers or range(len(streams))
                if not torch.equal(runs.result(number), expected)
            ]
            assert torch.equal(runs.result(), expected), "no bits are left over"
    return {"streams": streams, **changes}


def late_forward(backend: Any) -> Any:
    """`Block.forward` as one asynchronous kernel of ``backend``; on other devices as it is."""
    forward = Block.forward

    def late(block: Block, x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cpu":
            return forward(block, x)
        weights = block.expand.weight, block.expand.bias, block.project.weight, block.gain
        result: torch.Tensor = backend.late_block(x, *weights)
        return result

    return late


if __name__ == "__main__":
    print(json.dumps(changed_on_brook(sys.argv[1], [int(text) for text in sys.argv[2:]])))
