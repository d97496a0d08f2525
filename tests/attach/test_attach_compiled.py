"""Pipelines with compiled blocks: weights are placed anew without compiling again, and results are those of the plain compiled one.

On the CPU as a device of the executor, since there is a compiler for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign import sampled
from test_attach_pipelines import equal, weight_bytes
from tiny_pipelines import Case, cases

import graphrun
from graphrun.diffusers_.attach import Attachment
from graphrun.errors import InputError
from graphrun.model.problem import BlockGroup
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.runtime.host import Host
from graphrun.runtime.residency import Residency
from graphrun.sim import Machine

sys.path += [str(Path(__file__).parent.parent.parent / folder) for folder in ("benchmarks", "tests/runtime")]
from cpu_device import CpuDevice  # noqa: E402
from small_component import Small, hardware, problem, use  # noqa: E402

FLUX: Case = cases()["FluxPipeline"]
STREAMED: dict[str, Any] = {"exclude": ["transformer"]}


class Cpu(CpuDevice):
    """Planned for with the rates of the simulated accelerator."""

    name = "sim"


class Compilations:
    """A compiler that counts, and runs what it was given as it is."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.count += 1
        return graph.forward


@pytest.fixture(autouse=True)
def forget_compiled() -> Iterator[None]:
    yield
    torch.compiler.reset()


def repeated(pipe: Any, backend: Any) -> None:
    pipe.transformer.compile_repeated_blocks(fullgraph=True, backend=backend)


def single(pipe: Any, backend: Any) -> None:
    """The blocks one by one, except for one; of the last the attention alone."""
    blocks = pipe.transformer.transformer_blocks
    blocks[0] = torch.compile(blocks[0], backend=backend)
    for block in pipe.transformer.single_transformer_blocks[1:3]:
        block.compile(backend=backend)
    pipe.transformer.single_transformer_blocks[3].attn.compile(backend=backend)


CASES: dict[str, tuple[dict[str, Any], Callable[[Any, Any], None], str]] = {
    "streamed, compiled while attached": (STREAMED, repeated, "attached"),
    "resident": ({}, repeated, "compiled"),
    "streamed, single blocks": (STREAMED, single, "compiled"),
}


def attach(pipe: Any, **options: Any) -> Attachment:
    return graphrun.attach(pipe, **{"vram": 10 * weight_bytes(pipe), "hardware": "sim", "device": Cpu(), **options})


def called(pipe: Any, number: int) -> Any:
    return pipe("a lighthouse", height=16 + 16 * (number % 2), width=16, num_inference_steps=2, max_sequence_length=16,
                generator=torch.Generator().manual_seed(number), output_type="np").images  # fmt: skip


def plain_calls(change: Callable[[Any, Any], None], backend: Any, count: int) -> list[Any]:
    plain = FLUX.build()
    change(plain, backend)
    found = [called(plain, number) for number in range(count)]
    torch.compiler.reset()
    return found


@pytest.mark.parametrize("case", sampled(CASES, ["streamed, compiled while attached"], "warm"))
def test_blocks_are_compiled_as_often_as_those_of_the_plain_pipeline(case: str) -> None:
    """Two sizes in turn, so that blocks are compiled for the second, too."""
    options, change, first = CASES[case]
    plain, own = Compilations(), Compilations()
    want = plain_calls(change, plain, 4)
    pipe = FLUX.build()
    if first == "compiled":
        change(pipe, own)
    with attach(pipe, **options) as attached:
        if first == "attached":
            called(pipe, 0)
            change(pipe, own)
        for number, image in enumerate(want):
            assert equal(called(pipe, number), image)
            assert attached.trace is not None
            assert attached.replans == ()
            streamed = {event.component for event in attached.trace.events if event.kind == "stream"}
            assert streamed == set(options.get("exclude", ()))
        assert own.count == plain.count > 0
    assert equal(called(pipe, 0), want[0])


def test_a_plan_that_moves_parts_of_a_compiled_block_is_refused() -> None:
    module = Small()
    module.wide[1] = torch.compile(module.wide[1])
    Host({"a": module}, problem({"a": module}, [[use("a", 1, hardware())]]), SimulatedDevice(Machine()))
    module = Small()
    groups = (BlockGroup("remainder", ("",), False), BlockGroup("wide", ("wide.0.up", "wide.1.up"), True))
    of = problem({"a": module}, [[use("a", 1, hardware())]])
    (numbers,) = of.components
    variant = replace(numbers.variants[0], block_bytes=(1 << 20,) * 2)
    module.wide[1].compile()
    with pytest.raises(InputError, match=r"wide\.1\.up is moved by itself, but is a part of what is compiled"):
        Residency(module, replace(numbers, groups=groups, variants=(variant,)), SimulatedDevice(Machine()))


def test_compiled_blocks_run_as_written_on_the_simulated_accelerator() -> None:
    pipe, own = FLUX.build(), Compilations()
    want = called(pipe, 0)
    repeated(pipe, own)
    with attach(pipe, **STREAMED, device=SimulatedDevice(Machine())):
        assert equal(called(pipe, 0), want)
    assert own.count == 0
    assert equal(called(pipe, 0), want)
    assert own.count > 0


@pytest.mark.parametrize("whole", [torch.compile, lambda module: module.compile() or module])
def test_a_component_compiled_as_a_whole_is_refused_with_what_to_do(whole: Any) -> None:
    pipe = FLUX.build()
    pipe.transformer = whole(pipe.transformer)
    with pytest.raises(InputError, match=r"transformer is compiled as a whole.*compile_repeated_blocks\(fullgraph=True\)"):
        attach(pipe)
