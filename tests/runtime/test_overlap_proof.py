"""The proof that copies overlap compute, on a device that needs no card: its clock moves only while
the host waits."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphrun.runtime.devices import accelerator
from graphrun.runtime.devices.accelerator import PROOF_BYTES, PROOF_COPIES, overlap_fault


class TimedDevice:
    """A copy from page-locked memory takes a second. ``waits``: who waits for copies, the host or a
    kernel; "host, at first": the host, in the first test only."""

    def __init__(self, waits: str) -> None:
        self.waits, self.now_seconds, self.copies_end_seconds = waits, 0.0, 0.0
        self.copy_counts = [0]

    def arena(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        assert (nbytes, pinned) == (PROOF_BYTES, True)
        return torch.empty(0)

    def pin(self, arena: torch.Tensor) -> None: ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(0)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copy_counts[-1] += 1
        self.copies_end_seconds = max(self.copies_end_seconds, self.now_seconds) + 1
        is_first_test = len(self.copy_counts) == 2
        if self.waits == "host" or (self.waits == "host, at first" and is_first_test):
            self.now_seconds = self.copies_end_seconds

    def mark(self, stream: str) -> Any:
        kernel_waits = self.waits == "kernel"
        end = self.copies_end_seconds if stream == "copy" or kernel_waits else self.now_seconds

        def synchronize() -> None:
            self.now_seconds = max(self.now_seconds, end)

        return SimpleNamespace(query=lambda: self.now_seconds >= end, synchronize=synchronize)

    def wait(self, stream: str, mark: Any) -> None: ...

    def _on(self, stream: str) -> AbstractContextManager[None]:
        return nullcontext()

    def barrier(self) -> None:
        self.now_seconds = max(self.now_seconds, self.copies_end_seconds)
        self.copy_counts.append(0)


@pytest.mark.parametrize(
    ("waits", "fault", "tests"),
    [
        ("nobody", "", 1),
        ("host", "a copy from page-locked memory makes the host wait", 3),
        ("kernel", "a kernel waits for copies on another stream", 3),
        ("host, at first", "", 2),
    ],
)
def test_who_waits_for_copies_is_found(
    waits: str, fault: str, tests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device: Any = TimedDevice(waits)
    clock = SimpleNamespace(perf_counter=lambda: device.now_seconds)
    monkeypatch.setattr(accelerator, "time", clock)
    assert overlap_fault(device) == fault
    assert device.copy_counts == [1, *PROOF_COPIES[:tests], 0]
