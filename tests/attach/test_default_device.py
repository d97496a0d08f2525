"""`torch.set_default_device` of the caller: graphrun still allocates its host tensors on the
CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from test_attach import SD, seeded
from test_attach_pipelines import equal, weight_bytes

import graphrun
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.sim import Machine

GRAPH = Path(__file__).parents[2] / "graphs/flux-tiny.yaml"


@contextmanager
def meta_default() -> Iterator[None]:
    """Makes meta the default device, so that a tensor made without a device has no values."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def image() -> np.ndarray:
    graph, inputs = graphrun.load(GRAPH), {"prompt": "a lighthouse", "steps": 1, "seed": 3}
    solution = graphrun.plan(
        graphrun.estimate(graph, vram="6M", hardware="sim", inputs=inputs, cache=None), cache=None
    )
    return np.asarray(graphrun.run(solution, graph, inputs=inputs).outputs["image"])


@pytest.mark.sweep("more")
def test_a_graph_is_planned_and_run_with_the_same_bits() -> None:
    plain = image()
    with meta_default():
        output = image()
        assert torch.empty(1).is_meta
    assert np.array_equal(plain, output)


def test_an_attached_pipeline_gives_the_same_bits_and_its_weights_come_back() -> None:
    plain, pipe = seeded(SD.build()), SD.build()
    with (
        meta_default(),
        graphrun.attach(
            pipe, vram=int(0.95 * weight_bytes(pipe)), device=SimulatedDevice(Machine())
        ),
    ):
        output = seeded(pipe)
        assert torch.empty(1).is_meta
    assert equal(plain, output)
    assert equal(plain, seeded(pipe))
