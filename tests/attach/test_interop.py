"""Plans exported for other programs: diffusers scripts that make the same picture, and accelerate
device maps that dispatch."""

from __future__ import annotations

import ast
import json
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

import graphrun
from graphrun import sim
from graphrun.diffusers_.device_map import device_maps, plan_for
from graphrun.diffusers_.script import accelerate_script, diffusers_script
from graphrun.errors import InputError, PlanError
from graphrun.graph.graph import Graph
from graphrun.model.plan import Load, Stream
from graphrun.model.solution import Solution
from graphrun.modules.build import build, build_part
from graphrun.report import plan_files as planfile
from graphrun.verify.check import check
from graphrun.verify.simulate import simulate

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from peers_machine import Sim  # noqa: E402

GRAPHS = Path(__file__).parents[2] / "graphs"
OPTIONS: dict[str, Any] = {"ram": "1G", "hardware": "sim", "inputs": {"steps": 2}}


@pytest.fixture(scope="module")
def saved_graph(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny graph whose weights are in folders, as a file."""
    paths: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in paths:
            folder, graph = tmp_path_factory.mktemp(name), graphrun.load(GRAPHS / f"{name}.yaml")
            for component in graph.components.values():
                build(component, graph).save_pretrained(folder / component.name)  # type: ignore[operator]
            for part in graph.parts.values():
                build_part(part, graph).save_pretrained(folder / part.name)
            text = (
                (GRAPHS / f"{name}.yaml")
                .read_text()
                .replace(f"name: {name}", f"name: {name}\nsource: {folder}")
            )
            paths[name] = folder / "graph.yaml"
            paths[name].write_text(
                text.replace("configs/", f"{GRAPHS}/configs/").replace(
                    "tokenizers/", f"{GRAPHS}/tokenizers/"
                )
            )
        return paths[name]

    return make


def solved(graph: Graph, vram: str, **settings: Any) -> Solution:
    return graphrun.plan(graphrun.estimate(graph, vram=vram, **{**OPTIONS, **settings}))


@pytest.mark.sweep("more")
@pytest.mark.parametrize("vram", ["64M", "5M"])
def test_a_script_runs_with_the_picture_of_the_plan(
    saved_graph: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vram: str
) -> None:
    graph = graphrun.load(saved_graph("flux-tiny"))
    solution = solved(graph, vram)
    script, picture = tmp_path / "script.py", tmp_path / "picture.png"
    script.write_text(diffusers_script(graph, solution))
    monkeypatch.setattr(sys, "argv", ["script.py", "cpu", str(picture)])
    runpy.run_path(str(script), run_name="__main__")
    trace = graphrun.run(solution, graph, {"steps": 2})
    assert numpy.array_equal(
        numpy.asarray(Image.open(picture)), numpy.asarray(trace.outputs["image"])
    )


@pytest.mark.sweep("more", sample=1)
@pytest.mark.long
@pytest.mark.parametrize("vram", ["64M", "5M"])
@pytest.mark.parametrize("engine", ["diffusers", "accelerate"])
def test_a_script_runs_on_the_simulated_accelerator_with_the_picture_of_the_plan(
    saved_graph: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    vram: str,
) -> None:
    graph = graphrun.load(saved_graph("flux-tiny"))
    solution = solved(graph, vram)
    script, picture = tmp_path / "script.py", tmp_path / "picture.png"
    script.write_text(
        diffusers_script(graph, solution)
        if engine == "diffusers"
        else accelerate_script(graph, solution, device_maps(graph, solution))
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py", "sim", str(picture)])
    simulator = Sim(None)
    with simulator.open():
        runpy.run_path(str(script), run_name="__main__")
    trace = graphrun.run(solution, graph, {"steps": 2})
    assert numpy.array_equal(
        numpy.asarray(Image.open(picture)), numpy.asarray(trace.outputs["image"])
    )
    weights = [solution.problem.component(name).weight_bytes() for name in graph.components]
    # block sizes of plans are rounded up to allocations
    assert simulator.moved()["in"] > 0.95 * sum(weights)


def test_a_script_lists_what_is_lost_and_streams_what_the_plan_streams(
    saved_graph: Callable[[str], Path],
) -> None:
    graph = graphrun.load(saved_graph("flux-tiny"))
    solution = solved(graph, "5M")
    text = diffusers_script(graph, solution)
    streams = {
        a.component: a
        for slot in solution.plan.slots
        for a in slot.actions
        if isinstance(a, Stream)
    }
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert solution.plan.digest in docstring
    for name in graph.components:
        assert (f"apply_group_offloading({name}," in text) == (name in streams)
    resident_blocks = dict(streams["transformer"].keep or ())
    blocks = {k.name: len(k.blocks) for k in solution.problem.component("transformer").groups}
    assert any(len(numbers) < blocks[name] for name, numbers in resident_blocks.items())
    for name, numbers in resident_blocks.items():
        assert f"{len(numbers)} of {blocks[name]} {name}" in docstring
    assert "no budget" in docstring
    assert "evicted before" in docstring
    resident = diffusers_script(graph, solved(graph, "64M", keep=["transformer"]))
    assert "transformer.to(DEVICE)" in resident
    assert 'offload_type="block_level"' not in resident


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize(
    "name",
    ["sdxl-tiny", "sd3-tiny", "hunyuan-dit-tiny", "wan-tiny", "qwen-image-tiny", "hidream-tiny"],
)
def test_scripts_of_other_graphs_compile(saved_graph: Callable[[str], Path], name: str) -> None:
    graph = graphrun.load(saved_graph(name))
    solution = solved(graph, "1G")
    text = diffusers_script(graph, solution)
    compile(text, "script.py", "exec")
    loaded_names = [
        line.split(" = ")[0] for line in text.splitlines() if ".from_pretrained(" in line
    ]
    assert {component.name for component in solution.problem.components} <= set(loaded_names)


def test_a_graph_that_cannot_be_exported_is_refused(saved_graph: Callable[[str], Path]) -> None:
    graph = graphrun.load(saved_graph("flux-tiny"))
    half = graphrun.plan(
        graphrun.estimate(graph, vram="64M", until="encode", **{**OPTIONS, "inputs": {}})
    )
    with pytest.raises(InputError, match="this plan has encode_prompt"):
        diffusers_script(graph.until("encode"), half)
    random = graphrun.load(GRAPHS / "flux-tiny.yaml")
    solution = solved(random, "64M")
    with pytest.raises(InputError, match="text_encoder, .* random weights are graphrun's own"):
        diffusers_script(random, solution)


@pytest.mark.sweep("more")
def test_a_device_map_dispatches_with_the_same_output(tmp_path: Path) -> None:
    from accelerate import dispatch_model

    graph = graphrun.load(GRAPHS / "flux-tiny.yaml")
    solution = solved(graph, "5M")
    placements = device_maps(graph, solution)["transformer"]
    streams = [
        a
        for slot in solution.plan.slots
        for a in slot.actions
        if isinstance(a, Stream) and a.component == "transformer"
    ]
    kept_blocks = dict(streams[-1].keep or ())
    blocks = {k.name: k.blocks for k in solution.problem.component("transformer").groups}
    stay = {blocks[k][i] for k, indices in kept_blocks.items() if k != "unblocked" for i in indices}
    assert stay
    assert stay == {path for path, place in placements.items() if place == 0} & {
        path for paths in blocks.values() for path in paths
    }
    module = build(graph.component("transformer"), graph)
    generator, config = torch.Generator().manual_seed(0), graph.component("transformer").config

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    arguments = {
        "hidden_states": random(1, 16, config["in_channels"]),
        "encoder_hidden_states": random(1, 8, config["joint_attention_dim"]),
        "pooled_projections": random(1, config["pooled_projection_dim"]),
        "timestep": torch.tensor([0.5], dtype=torch.bfloat16),
        "guidance": torch.tensor([3.5], dtype=torch.bfloat16),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(8, 3),
    }
    with torch.no_grad():
        expected = module(**arguments, return_dict=False)[0]
    swapped = torch.__future__.get_swap_module_params_on_conversion()
    # without it accelerate cannot move parameters to sim
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with sim.Machine():
            device_placements = {
                path: sim.device if place == 0 else place for path, place in placements.items()
            }
            dispatch_model(
                module,
                device_placements,
                main_device=sim.device,
                offload_dir=str(tmp_path),
                force_hooks=True,
            )
            parameter_devices = {
                name: parameter.device.type for name, parameter in module.named_parameters()
            }
            with torch.no_grad():
                output = module(
                    **{name: value.to(sim.device) for name, value in arguments.items()},
                    return_dict=False,
                )[0].cpu()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swapped)
    assert torch.equal(output, expected)
    for name, kind in parameter_devices.items():
        place = max(
            (path for path in placements if name == path or name.startswith(f"{path}.")), key=len
        )
        assert kind == ("sim" if placements[place] == 0 else "meta"), name


def test_a_component_that_is_whole_on_the_device_has_one_entry() -> None:
    graph = graphrun.load(GRAPHS / "flux-tiny.yaml")
    solution = solved(graph, "64M", keep=["transformer"])
    assert device_maps(graph, solution)["transformer"] == {"": 0}


def test_a_plan_follows_its_device_map() -> None:
    """Half of the transformer stays from the first slot to the last; streaming the remainder costs
    what the simulation says."""
    graph = graphrun.load(GRAPHS / "flux-tiny.yaml")
    problem = graphrun.estimate(graph, vram="64M", **OPTIONS)
    names = [f"transformer_blocks.{i}" for i in range(4)] + [
        f"single_transformer_blocks.{i}" for i in range(8)
    ]
    unblocked = dict.fromkeys(
        ("x_embedder", "context_embedder", "time_text_embed", "norm_out", "proj_out", "pos_embed"),
        0,
    )

    def plan(resident: int) -> Solution:
        return plan_for(
            problem,
            {
                "transformer": unblocked
                | {n: 0 if i < resident else "cpu" for i, n in enumerate(names)}
            },
        )

    solutions = [plan(resident) for resident in (0, 6, 12)]
    assert [check(problem, solution.plan) for solution in solutions] == [(), (), ()]
    times = [simulate(problem, solution.plan).total_seconds for solution in solutions]
    peaks = [simulate(problem, solution.plan).peak_bytes for solution in solutions]
    moved_bytes = [simulate(problem, solution.plan).total_moved_bytes for solution in solutions]
    assert moved_bytes[0] > moved_bytes[1] > moved_bytes[2]
    assert peaks[0] < peaks[1] < peaks[2]
    assert min(times) >= solved(graph, "64M").objective_seconds
    first = solutions[1].plan.slots[0]
    (load,) = [a for a in first.actions if isinstance(a, Load) and a.component == "transformer"]
    assert {name: len(indices) for name, indices in load.blocks or ()} == {
        "unblocked": 1,
        "transformer_blocks": 4,
        "single_transformer_blocks": 2,
    }
    streamed = {
        a.component
        for slot in solutions[1].plan.slots
        for a in slot.actions
        if isinstance(a, Stream)
    }
    assert streamed == {"transformer"}  # components without a map are loaded for their phases
    tight = graphrun.estimate(graph, vram="6M", **OPTIONS)
    # a map that does not fit is reported
    assert check(tight, plan_for(tight, {"transformer": {"": 0}}).plan)
    trace = graphrun.run(solutions[1], graph, {"steps": 2})
    assert trace.peak_bytes <= peaks[1]
    assert trace.left_bytes == 0


def test_the_map_of_a_plan_gives_a_plan_close_to_it() -> None:
    graph = graphrun.load(GRAPHS / "flux-tiny.yaml")
    tight = graphrun.estimate(graph, vram="5M", **OPTIONS)
    solution = graphrun.plan(
        replace(tight, components=tuple(replace(c, layers=None) for c in tight.components))
    )
    maps = device_maps(graph, solution)
    wide = graphrun.estimate(graph, vram="64M", **OPTIONS)
    solution_back = plan_for(wide, maps)
    assert check(wide, solution_back.plan) == ()
    mapped_simulation, original = (
        simulate(wide, solution_back.plan),
        simulate(solution.problem, solution.plan),
    )
    assert original.total_seconds < mapped_simulation.total_seconds < 2 * original.total_seconds
    # blocks of a map never leave the device
    assert original.peak_bytes < mapped_simulation.peak_bytes


@pytest.mark.parametrize(
    ("maps", "message"),
    [
        ({"unet": {"": 0}}, "there is no such component; the problem has text_encoder"),
        ({"transformer": {"proj_out": 0}}, "it has no entry for transformer_blocks.0"),
    ],
)
def test_an_incomplete_device_map_is_refused(
    maps: dict[str, dict[str, int | str]], message: str
) -> None:
    problem = graphrun.estimate(graphrun.load(GRAPHS / "flux-tiny.yaml"), vram="64M", **OPTIONS)
    with pytest.raises(InputError, match=message):
        plan_for(problem, maps)


@pytest.mark.sweep("more")
def test_the_commands_write_both_and_plan_a_map(
    saved_graph: Callable[[str], Path], tmp_path: Path
) -> None:
    from typer.testing import CliRunner

    from graphrun.cli import main as cli

    run, plan = CliRunner().invoke, tmp_path / "plan.json"
    arguments = [
        "plan",
        str(saved_graph("flux-tiny")),
        "--vram",
        "5M",
        "--ram",
        "1G",
        "--hardware",
        "sim",
        "--no-cache",
        "-o",
        str(plan),
    ]
    assert run(cli.app, arguments).exit_code == 0
    script = run(cli.app, ["export", str(plan), "--to", "diffusers"])
    assert script.exit_code == 0
    compile(script.stdout, "script.py", "exec")
    assert (
        run(
            cli.app, ["export", str(plan), "--to", "accelerate", "-o", str(tmp_path / "map.json")]
        ).exit_code
        == 0
    )
    assert json.loads((tmp_path / "map.json").read_text()).keys() == {
        "text_encoder",
        "text_encoder_2",
        "transformer",
        "vae",
    }
    (tmp_path / "passing.json").write_text('{"transformer": {"": "cpu"}}')
    process = run(
        cli.app,
        [
            "map",
            str(plan),
            str(tmp_path / "passing.json"),
            "-o",
            str(tmp_path / "back.json"),
            "--json",
        ],
    )
    assert process.exit_code == 0
    expected = plan_for(planfile.read(plan)[0], {"transformer": {"": "cpu"}}).plan
    assert planfile.read(tmp_path / "back.json")[1] == expected
    exported = json.loads((tmp_path / "back.json").read_text())
    printed = json.loads(process.stdout)
    assert printed.pop("version") == 1
    assert {**exported, **printed} == exported
    assert run(cli.app, ["check", str(tmp_path / "back.json")]).exit_code == 0
    assert run(cli.app, ["map", str(plan), str(tmp_path / "map.json")]).exit_code == 0
    # those of the plan itself do not fit: the blocks on the device are there in all slots
    graph, solution = graphrun.load(saved_graph("flux-tiny")), planfile.read_solution(plan)[0]
    (tmp_path / "map.json").write_text(json.dumps(device_maps(graph, solution)))
    keeps = r"map\.json: .* broken; the plan is refused\n  slot .*\n  \^ vram: "
    with pytest.raises(PlanError, match=keeps):
        run(cli.app, ["map", str(plan), str(tmp_path / "map.json")], catch_exceptions=False)
    (tmp_path / "none.json").write_text('{"transformer": [0]}')
    with pytest.raises(InputError, match="none.json: has no device maps by component"):
        run(cli.app, ["map", str(plan), str(tmp_path / "none.json")], catch_exceptions=False)
    with pytest.raises(InputError, match="engine 'comfy' is not known; did you mean 'comfyui'"):
        run(cli.app, ["export", str(plan), "--to", "comfy"], catch_exceptions=False)
