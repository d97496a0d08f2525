"""Pipelines with compiled blocks: weights are placed again without compiling again, and results are
those of the plain compiled one.

On the CPU, since there is a compiler for it. Weights are read from files."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign import sampled
from diffusers import FluxPipeline
from saved_pipelines import load, save
from small_component import Small, small_hardware, small_problem, use
from test_attach_pipelines import equal
from tiny_pipelines import Case, cases

import graphrun
from graphrun.batch.cache.keys import StageKeys
from graphrun.diffusers_.attach import Attachment
from graphrun.errors import GraphError, InputError, PlanError
from graphrun.model.problem import BlockGroup
from graphrun.modules.build import build, build_part
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.runtime.host import Host
from graphrun.runtime.residency import Residency
from graphrun.sim import Machine

FLUX: Case = cases()["FluxPipeline"]
STREAMED: dict[str, Any] = {"exclude": ["transformer"]}


class Compilations:
    """A compiler that counts, and runs what it was given as it is, or as Inductor compiles it."""

    def __init__(self, inductor: bool = False) -> None:
        self.count, self.inductor = 0, inductor
        if inductor and not (shutil.which("g++") or shutil.which("clang++")):
            pytest.skip("Inductor needs a C++ compiler for the CPU: g++ or clang++")

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.count += 1
        if not self.inductor:
            return graph.forward
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, inputs)


@pytest.fixture(autouse=True)
def forget_compiled() -> Iterator[None]:
    yield
    torch.compiler.reset()


def repeated(pipe: Any, backend: Any) -> None:
    pipe.transformer.compile_repeated_blocks(fullgraph=True, backend=backend)


def single(pipe: Any, backend: Any) -> None:
    """Some blocks one by one; of the last the attention alone."""
    blocks, single_blocks = (
        pipe.transformer.transformer_blocks,
        pipe.transformer.single_transformer_blocks,
    )
    blocks[0] = torch.compile(blocks[0], backend=backend)
    single_blocks[1].compile(backend=backend)
    single_blocks[3].attn.compile(backend=backend)


CASES: dict[str, tuple[dict[str, Any], Callable[[Any, Any], None], str]] = {
    "streamed, compiled while attached": (STREAMED, repeated, "attached"),
    "resident": ({}, repeated, "compiled"),
    "streamed, single blocks": (STREAMED, single, "compiled"),
}


def attach(pipe: Any, **options: Any) -> Attachment:
    return graphrun.attach(pipe, **{"memory": "8G", "device": "cpu", **options})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(FLUX, tmp_path / "flux")


def called(pipe: Any, number: int) -> Any:
    return pipe(
        "a lighthouse",
        height=16 + 16 * (number % 2),
        width=16,
        num_inference_steps=2,
        max_sequence_length=16,
        generator=torch.Generator().manual_seed(number),
        output_type="np",
    ).images


def plain_calls(
    folder: Path, change: Callable[[Any, Any], None], backend: Any, count: int
) -> list[Any]:
    plain = load(FLUX, folder)
    change(plain, backend)
    outputs = [called(plain, number) for number in range(count)]
    torch.compiler.reset()
    return outputs


@pytest.mark.parametrize(
    "case",
    sampled(
        [*CASES, *(f"{case}, Inductor" for case in CASES)],
        ["streamed, compiled while attached"],
        "warm",
    ),
)
def test_blocks_are_compiled_as_often_as_those_of_the_plain_pipeline(
    case: str, folder: Path
) -> None:
    """Two sizes in turn, so that blocks are compiled for the second, too."""
    options, change, first = CASES[case.removesuffix(", Inductor")]
    plain, attachment_compilations = (Compilations(case.endswith("Inductor")) for _ in range(2))
    want = plain_calls(folder, change, plain, 20 if plain.inductor and change is repeated else 4)
    pipe = load(FLUX, folder)
    if first == "compiled":
        change(pipe, attachment_compilations)
    with attach(pipe, **options) as attachment:
        if first == "attached":
            called(pipe, 0)
            change(pipe, attachment_compilations)
        for number, image in enumerate(want):
            assert equal(called(pipe, number), image)
            assert attachment.trace is not None
            assert attachment.replans == ()
            streamed = {
                event.component for event in attachment.trace.events if event.kind == "stream"
            }
            assert streamed == set(options.get("exclude", ()))
        assert attachment_compilations.count == plain.count > 0
    assert equal(called(pipe, 0), want[0])


def test_a_plan_that_moves_parts_of_a_compiled_block_is_refused() -> None:
    module = Small()
    module.wide[1] = torch.compile(module.wide[1])
    Host(
        {"a": module},
        small_problem({"a": module}, [[use("a", 1, small_hardware())]]),
        SimulatedDevice(Machine()),
    )
    module = Small()
    groups = (
        BlockGroup("unblocked", ("",), False),
        BlockGroup("wide", ("wide.0.expand", "wide.1.expand"), True),
    )
    problem = small_problem({"a": module}, [[use("a", 1, small_hardware())]])
    (numbers,) = problem.components
    variant = replace(numbers.variants[0], block_bytes=(1 << 20,) * 2)
    module.wide[1].compile()
    with pytest.raises(
        InputError, match=r"wide\.1\.expand is moved by itself, but is a part of what is compiled"
    ):
        Residency(
            module, replace(numbers, groups=groups, variants=(variant,)), SimulatedDevice(Machine())
        )


@pytest.mark.sweep("more")
def test_compiled_blocks_run_as_written_on_the_simulated_accelerator() -> None:
    """However many calls of however many sizes there are, none of them compiles. PyTorch has no
    compiler for ``sim``, and refuses the plain compiled pipeline there."""
    pipe, compilations = FLUX.build(), Compilations()
    want = [called(pipe, number) for number in range(2)]
    repeated(pipe, compilations)
    device = SimulatedDevice(Machine())
    with attach(pipe, **STREAMED, device=device, memory=None, vram="1G"):
        for number in (0, 1, 2):
            image = called(pipe, number)
            assert number == 2 or equal(image, want[number])
    assert compilations.count == 0
    assert equal(called(pipe, 0), want[0])
    assert compilations.count > 0


@pytest.mark.parametrize("whole", [torch.compile, lambda module: module.compile() or module])
def test_a_component_compiled_as_a_whole_is_refused_with_what_to_do(whole: Any) -> None:
    pipe = FLUX.build()
    pipe.transformer = whole(pipe.transformer)
    with pytest.raises(
        InputError,
        match=r"transformer is compiled as a whole.*compile_repeated_blocks\(fullgraph=True\)",
    ):
        attach(pipe)


# -- compile: blocks in graph files

ASKING = (
    "tiny-flux-transformer.json, dtype: bfloat16}",
    "tiny-flux-transformer.json, dtype: bfloat16, compile: blocks}",
)
SMALL = {"height": 32, "width": 32, "steps": 2, "max_sequence_length": 16}
GRANTED: dict[str, Any] = {"memory": "8G", "allow": ["compile"]}


@pytest.fixture
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Compilations:
    """The compiler of every module that is compiled without naming one; Inductor where the
    parameter says so."""
    compilations, plain = Compilations(getattr(request, "param", False)), torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda module, **options: plain(module, **{"backend": compilations, **options}),
    )
    return compilations


def plain_pipeline(graph: Any) -> Any:
    parts = {name: build(component, graph) for name, component in graph.components.items()}
    return FluxPipeline(
        **parts, **{name: build_part(part, graph) for name, part in graph.parts.items()}
    )


def sized(number: int) -> dict[str, Any]:
    return {**SMALL, "height": 32 + 16 * (number % 2), "seed": number, "prompt": f"take {number}"}


def plain_pictures(graph: Any, count: int) -> list[Any]:
    """Pictures of the pipeline with compiled blocks, without graphrun."""
    pipe = plain_pipeline(graph)
    pipe.set_progress_bar_config(disable=True)
    for blocks in (pipe.transformer.transformer_blocks, pipe.transformer.single_transformer_blocks):
        for block in blocks:
            block.compile()
    outputs = []
    for request in map(sized, range(count)):
        steps, generator = request.pop("steps"), torch.Generator().manual_seed(request.pop("seed"))
        outputs.append(pipe(**request, num_inference_steps=steps, generator=generator).images[0])
    torch.compiler.reset()
    return outputs


@pytest.mark.sweep("warm")
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("compiler", [False, True], indirect=True, ids=["counted", "Inductor"])
def test_a_session_compiles_the_blocks_that_the_graph_asks_for_once(
    edit_graph: Callable[..., Any], compiler: Compilations, streamed: bool
) -> None:
    graph = edit_graph("flux-tiny", ASKING)
    want = plain_pictures(graph, 20 if compiler.inductor else 4)
    compile_count, compiler.count = compiler.count, 0
    demands = {"exclude": ["transformer"]} if streamed else {}
    with graphrun.Session(graph, inputs=SMALL, **GRANTED, **demands) as session:
        traces = [session.run(sized(number)) for number in range(len(want))]
    assert [trace.outputs["image"].tobytes() for trace in traces] == [
        image.tobytes() for image in want
    ]
    assert any(event.kind == "stream" for event in traces[-1].events) == streamed
    assert compiler.count == compile_count > 0


@pytest.mark.sweep("more")
def test_nothing_is_compiled_unless_the_caller_allows_what_the_graph_asks_for(
    edit_graph: Callable[..., Any], compiler: Compilations
) -> None:
    asking = (
        "tiny-clip.json, dtype: bfloat16}",
        "tiny-clip.json, dtype: bfloat16, compile: blocks}",
    )
    graph, budgets = edit_graph("flux-tiny", asking), {**GRANTED, "allow": ()}
    eager_plan = graphrun.plan(graphrun.estimate(graph, inputs=SMALL, **budgets))
    compiled_plan = graphrun.plan(graphrun.estimate(graph, inputs=SMALL, **GRANTED))
    graphrun.run(eager_plan, graph)
    assert compiler.count == 0
    graphrun.run(compiled_plan, graph)
    assert compiler.count > 0
    assert compiled_plan.problem.component("text_encoder").layers is None
    on_sim = graphrun.estimate(
        graph, inputs=SMALL, vram="1G", ram="8G", hardware="sim", allow=["compile"]
    )
    compile_count = compiler.count
    graphrun.run(graphrun.plan(on_sim), graph)  # for which there is no compiler
    assert compiler.count == compile_count
    with pytest.raises(PlanError, match="digest"):
        graphrun.run(compiled_plan, edit_graph("flux-tiny"))


def test_outputs_of_compiled_blocks_are_cached_apart(edit_graph: Callable[..., Any]) -> None:
    graph = edit_graph("flux-tiny", ASKING)
    keys = StageKeys(graph, graph.resolve(SMALL), "sim", str)
    plain, compiled = keys.candidates("denoise", ["compile"])
    assert keys.key("denoise", plain) == keys.key("denoise") != keys.key("denoise", compiled)
    assert keys.key("encode", plain) == keys.key("encode", compiled)
    base = edit_graph("flux-tiny")
    assert StageKeys(base, base.resolve(SMALL), "sim", str).key("denoise") == keys.key("denoise")


def test_components_are_not_compiled_as_a_whole(edit_graph: Callable[..., Any]) -> None:
    whole = (
        r"flux-tiny.yaml:19: components.transformer.compile: 'whole' is not known; use blocks, "
        r".* placed block by block"
    )
    with pytest.raises(GraphError, match=whole):
        edit_graph("flux-tiny", (ASKING[0], ASKING[1].replace("blocks", "whole")))
    graph = edit_graph("flux-tiny")
    clip = graph.components["text_encoder"]
    single = replace(clip, config={**clip.config, "num_hidden_layers": 1}, compile="blocks")
    graph = replace(graph, components={**graph.components, "text_encoder": single})
    message = (
        r"flux-tiny.yaml:17: components.text_encoder.compile: text_encoder has no repeated "
        r"blocks.*leave it out"
    )
    with pytest.raises(InputError, match=message):
        graphrun.estimate(graph, inputs=SMALL, **GRANTED)
    with pytest.raises(InputError, match="allow compile: this graph knows cpu, precision"):
        graphrun.estimate(edit_graph("flux-tiny"), inputs=SMALL, **GRANTED)
