"""Graphs of a class that is no pipeline of diffusers: a `call` stage with a method, and where its
code is to be got."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from programs import FILM, Staged

import graphrun
from graphrun.errors import GraphError
from graphrun.graph.loading import load
from graphrun.modules.build import build


@pytest.fixture
def film(tmp_path: Path) -> Path:
    path = tmp_path / "film.yaml"
    path.write_text(FILM)
    return path


def edited(path: Path, old: str, new: str) -> Path:
    assert FILM.count(old) == 1
    path.write_text(FILM.replace(old, new))
    return path


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "method: generate",
            "method: generates",
            r"film.yaml:\d+: stages.make: method: Staged has no method generates",
        ),
        (
            "method: generate, ",
            "",
            "programs.Staged is not a pipeline: such a class is a DiffusionPipeline",
        ),
        (
            "units: $units",
            "unit: $units",
            "Staged.generate has no argument 'unit'; did you mean 'units'",
        ),
        (
            "{steps: 2}",
            "{steps: 2, texts: $texts}",
            r"film.yaml:\d+: pipeline_config.texts: '\$texts' is not one of pipelines:",
        ),
    ],
)
def test_what_cannot_be_called_is_refused_at_its_line(
    film: Path, old: str, new: str, message: str
) -> None:
    with pytest.raises(GraphError, match=message):
        graphrun.estimate(
            load(edited(film, old, new), ["programs"]), vram="1G", ram="1G", hardware="sim"
        )


def test_a_method_belongs_to_a_call(film: Path) -> None:
    edited(film, "op: call, method: generate, uses", 'op: "programs:make", method: generate, uses')
    with pytest.raises(GraphError, match=r"stages.make.method: only op: call calls a method"):
        load(film, ["programs"])


def test_without_its_code_the_file_is_refused_with_the_place_to_get_it(
    film: Path,
) -> None:
    """The package is imported from Python's path alone: `code` is text."""
    (film.parent / "elsewhere").mkdir()
    film.parent.joinpath("elsewhere", "absent_film.py").write_text(
        "raise AssertionError('imported')\n"
    )
    film.write_text(
        FILM.replace("programs", "absent_film").replace(
            "the tests of graphrun", str(film.parent / "elsewhere")
        )
    )
    with pytest.raises(GraphError, match="only you can trust it"):
        load(film)
    with pytest.raises(
        GraphError,
        match=r"absent_film cannot be imported: get the code from .*elsewhere "
        r"and add .* PYTHONPATH",
    ):
        graphrun.estimate(load(film, ["absent_film"]), vram="1G", ram="1G", hardware="sim")


@pytest.mark.parametrize("given_modules", [False, True])
def test_a_stage_reads_weights_of_components_that_it_does_not_list(
    film: Path, given_modules: bool
) -> None:
    """``text`` is called in an earlier stage, ``spare`` in none."""
    shift = "  shift: {op: call, method: shift, uses: [vae], with: {frames: $make.frames}}\n"
    text = FILM.replace(
        "stages:",
        "  spare: {class: programs.Decoder, config: {}, dtype: float32, seed: 4}\nstages:",
    )
    text = text.replace("uses: [text, dit, vae]", "uses: [text, dit, vae, spare]")
    text = text.replace("outputs: {frames: $make", f"{shift}outputs: {{frames: $shift")
    film.write_text(text)
    graph = load(film, ["programs"])
    modules = {name: build(part, graph) for name, part in graph.components.items()}
    inputs = {"text": "a lighthouse"}
    problem = graphrun.estimate(graph, vram="1G", ram="1G", hardware="sim", inputs=inputs)
    solution = graphrun.plan(problem)
    program = Staged.__new__(Staged)
    vars(program).update(modules, steps=2, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    want = program.shift(program.generate("a lighthouse", generator=generator))
    trace = graphrun.run(solution, graph, inputs, modules=modules if given_modules else None)
    assert torch.equal(trace.outputs["frames"], want)
    assert trace.overruns == ()
