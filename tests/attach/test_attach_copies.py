"""Guidance in parallel in attached pipelines: a copy of the denoiser on a second device makes every
other call. Outputs are diffusers', bytes are as planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from campaign import sampled
from test_attach_devices import two_devices
from test_attach_pipelines import equal
from tiny_pipelines import cases

import graphrun
from graphrun.solve import copying

CASES = cases()
# pipelines whose guidance calls the denoiser twice a step
NAMES = ("WanPipeline", "WanImageToVideoPipeline", "SkyReelsV2Pipeline", "ChromaPipeline")
BUDGETS: dict[str, Any] = {"vram": ["64M", "64M"]}


@pytest.fixture(autouse=True)
def always_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose a copy however little it gains, where all is tiny."""
    monkeypatch.setattr(copying, "CLEARLY", 0.0)


def assert_copied(attachment: Any) -> None:
    assert attachment.solution.plan.copies == (("transformer", 1),)
    assert attachment.replans == ()
    assert attachment.trace.overruns == ()
    for report, actual in attachment.trace.pairs_with(attachment.solution.simulation.slots):
        assert actual.secondary_peaks[0] <= report.secondary_peaks[0]
    callers = [event.component for event in attachment.trace.events if event.kind == "run"]
    denoiser_calls = [name for name in callers if name.startswith("transformer")]
    assert denoiser_calls == ["transformer@1", "transformer"] * (len(denoiser_calls) // 2)


@pytest.mark.long
@pytest.mark.parametrize("name", sampled(NAMES, NAMES[:1], "secondaries"))
def test_a_copy_makes_every_other_call(name: str) -> None:
    case, device = CASES[name], two_devices()
    plain, pipe = case.build(), case.build()
    with graphrun.attach(pipe, device=device, **BUDGETS) as attachment:
        moved_bytes = []
        for _ in range(3):
            assert equal(case.call(pipe), case.call(plain))
            assert_copied(attachment)
            moved_bytes.append(attachment.trace.moved_bytes)
            assert attachment.held_bytes == sum(
                single.allocated_bytes for single in device.all_devices
            )
        assert moved_bytes[1] == moved_bytes[2] < moved_bytes[0], "the copy stays"
        attachment.release()
        assert [single.allocated_bytes for single in device.all_devices] == [0, 0]
        assert equal(case.call(pipe), case.call(plain))
    assert [single.allocated_bytes for single in device.all_devices] == [0, 0]
    assert equal(case.call(pipe), case.call(plain))
