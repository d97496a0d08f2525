"""Guidance in parallel: every other call of a denoiser on its copy on a secondary device."""

from __future__ import annotations

import numpy as np
import pytest
from whole_pipelines import GRAPHS, pixels, plain_image

import graphrun
from graphrun.modules.build import build
from graphrun.runtime.devices.open import open_device
from graphrun.session import Session

SMALL = {"seed": 3, "steps": 2, "height": 64, "width": 64}


@pytest.mark.parametrize("name", ["wan-tiny"])
@pytest.mark.parametrize("passed", [True, False])
def test_a_copy_computes_every_other_call_at_the_same_time(name: str, passed: bool) -> None:
    graph = graphrun.load(GRAPHS / f"{name}.yaml")
    modules = {key: build(component, graph) for key, component in graph.components.items()}
    expected = pixels(plain_image(graph, modules, graph.resolve(SMALL)))
    options = {"inputs": SMALL, "vram": "64M,64M", "ram": "8G", "hardware": "sim", "runs": 3}
    device = open_device(graphrun.estimate(graph, **options), check_ordering=True)
    arguments = {"modules": modules} if passed else {}
    with Session(graph, device=device, **arguments, **options) as session:
        solution = session.solution
        assert solution.plan.copies == (("transformer", 1),)
        for reports in (solution.simulation.slots, solution.simulation.further_slots):
            trace = session.run()
            output = trace.outputs["image" if "image" in trace.outputs else "video"]
            assert np.array_equal(pixels(output), expected)
            for report, actual in trace.pairs_with(reports):
                print(
                    report.phase,
                    report.part,
                    report.seconds,
                    actual.end_seconds - actual.start_seconds,
                    report.peak_bytes,
                    actual.peak_bytes,
                    report.secondary_peaks,
                    actual.secondary_peaks,
                )
    assert [accelerator.allocated_bytes for accelerator in device.all_devices] == [0, 0]
