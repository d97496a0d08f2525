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

HOST = "a copy from page-locked memory makes the host wait"
KERNEL = "a kernel waits for copies on another stream"


class TimedDevice:
    """A copy from page-locked memory takes a second. ``host_share``, ``kernel_share``: the share of
    the copies that the host and a kernel wait for. ``is_once``: only in the first test."""

    def __init__(self, host_share: float, kernel_share: float, is_once: bool) -> None:
        self.host_share, self.kernel_share, self.is_once = host_share, kernel_share, is_once
        self.now_seconds = self.begin_seconds = self.copies_end_seconds = 0.0
        self.copy_counts = [0]

    def end_of(self, share: float) -> float:
        """The end of this share of the copies since the last barrier."""
        copies_seconds = self.copies_end_seconds - self.begin_seconds
        return max(self.now_seconds, self.begin_seconds + share * copies_seconds)

    def arena(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        assert (nbytes, pinned) == (PROOF_BYTES, True)
        return torch.empty(0)

    def pin(self, arena: torch.Tensor) -> None: ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(0)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copy_counts[-1] += 1
        self.copies_end_seconds = max(self.copies_end_seconds, self.now_seconds) + 1
        if not self.is_once or len(self.copy_counts) == 2:
            self.now_seconds = self.end_of(self.host_share)

    def mark(self, stream: str) -> Any:
        end = self.end_of(1.0 if stream == "copy" else self.kernel_share)

        def synchronize() -> None:
            self.now_seconds = max(self.now_seconds, end)

        return SimpleNamespace(query=lambda: self.now_seconds >= end, synchronize=synchronize)

    def wait(self, stream: str, mark: Any) -> None: ...

    def _on(self, stream: str) -> AbstractContextManager[None]:
        return nullcontext()

    def barrier(self) -> None:
        self.now_seconds = self.begin_seconds = max(self.now_seconds, self.copies_end_seconds)
        self.copy_counts.append(0)


@pytest.mark.parametrize(
    ("host_share", "kernel_share", "is_once", "fault", "tests"),
    [
        (0.0, 0.0, False, "", 1),
        (1.0, 0.0, False, HOST, 3),
        (0.6, 0.0, False, HOST, 3),
        (0.4, 0.0, False, "", 1),
        (0.0, 1.0, False, KERNEL, 3),
        (0.0, 0.9, False, KERNEL, 3),
        (0.0, 0.7, False, "", 1),
        (1.0, 0.0, True, "", 2),
    ],
)
def test_who_waits_for_copies_is_found(
    host_share: float,
    kernel_share: float,
    is_once: bool,
    fault: str,
    tests: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device: Any = TimedDevice(host_share, kernel_share, is_once)
    clock = SimpleNamespace(perf_counter=lambda: device.now_seconds)
    monkeypatch.setattr(accelerator, "time", clock)
    assert overlap_fault(device) == fault
    assert device.copy_counts == [1, *PROOF_COPIES[:tests], 0]
