"""Inputs that are well typed and make no sense, outputs that cannot be written, forked sessions,
text for terminals."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import graphrun as package
from graphrun.errors import GraphError, InputError, PlanError, StageError
from graphrun.model.problem import StageOption
from graphrun.report.outputs import save_outputs
from graphrun.runtime.executor import refuse_unfit
from graphrun.verify.check import check
from graphrun.verify.coherence import incoherent

GRAPHS = Path(__file__).parents[2] / "graphs"
Cli = Callable[..., tuple[int, str, str]]
FLUX = str(GRAPHS / "flux-tiny.yaml")

EXTREME = {
    "height=16000000": (
        "stages.denoise: 128 x 16000000 are 2,048,000,000 pixels, "
        "and at most 33,554,432 are accepted"
    ),
    "height=9223372036854775792": "pixels, and at most 33,554,432 are accepted",
    "steps=1000000000000": "stages.denoise: steps is 1,000,000,000,000, and "
    "at most 1,000 are accepted",
    "guidance_scale=1e308": "input 'guidance_scale': 1e+308 is more than a float32 can be",
}


@pytest.mark.parametrize(("change", "message"), EXTREME.items())
def test_extreme_inputs(change: str, message: str, graphrun: Cli, tmp_path: Path) -> None:
    code, output, err = graphrun(
        "plan", FLUX, "--hardware", "sim", "--vram", "6M", "--set", change, "-o", "plan.json"
    )
    assert (code, output) == (2, "")
    assert message in err
    assert not list(tmp_path.iterdir())


def test_a_placeholder_is_no_larger_than_a_picture(graphrun: Cli) -> None:
    path = str(GRAPHS / "sdxl-inpaint-tiny.yaml")
    code, _, err = graphrun(
        "plan", path, "--hardware", "sim", "--vram", "6M", "--set", "height=16000000"
    )
    assert (code, "pixels, and at most 33,554,432 are accepted" in err) == (2, True)


def test_a_part_of_the_wrong_class(edit_graph: Callable[..., Any]) -> None:
    graph = edit_graph(
        "flux-tiny",
        (
            "FlowMatchEulerDiscreteScheduler, config: configs/flux-scheduler.json",
            "DDIMScheduler, config: {}",
        ),
    )
    with pytest.raises(
        StageError,
        match="stages.denoise: FluxPipeline fails: ValueError: .*does not support custom sigmas",
    ):
        package.estimate(graph, vram="6M", ram="8G", hardware="sim")


def test_a_width_that_is_no_width(edit_graph: Callable[..., Any]) -> None:
    graph = edit_graph(
        "auraflow-tiny",
        ("width: {type: int, default: 64, multiple_of: 16}", "width: {type: int, default: 1}"),
    )
    with pytest.raises(
        StageError,
        match="stages.denoise: AuraFlowPipeline fails: .*its inputs are height=64, width=1, ",
    ):
        package.estimate(graph, vram="6M", ram="8G", hardware="sim")


@pytest.mark.sweep("more")
def test_ten_million_layers(edit_graph: Callable[..., Any], tmp_path: Path) -> None:
    config = json.loads((GRAPHS / "configs/tiny-flux-transformer.json").read_text())
    (tmp_path / "many.json").write_text(json.dumps({**config, "num_layers": 10_000_000}))
    graph = edit_graph("flux-tiny", ("configs/tiny-flux-transformer.json", f"{tmp_path}/many.json"))
    with pytest.raises(
        GraphError,
        match=r"components.transformer: diffusers.FluxTransformer2DModel has 20,001 modules or "
        r"more",
    ):
        package.estimate(graph, vram="6M", ram="8G", hardware="sim")


def test_an_order_that_lacks_a_block(make_problem: Callable[..., Any]) -> None:
    """A plan file may hold any problem with a digest of its own: one block of the order is another
    one's copy."""
    solution = package.plan(make_problem("flux-tiny", 6 * 2**20))
    problem, plan = solution.problem, solution.plan
    assert not check(problem, plan)
    number, phase = next(
        (n, phase) for n, phase in enumerate(problem.phases) if phase.stage == "denoise"
    )
    use = phase.uses[0]
    groups = problem.component(use.component).groups
    position = next(n for n, (k, i, _) in enumerate(use.order) if i == 1 and groups[k].streamable)
    for wrong in (0, 10_000, -1):
        order = list(use.order)
        order[position] = (order[position][0], wrong, order[position][2])
        phases = list(problem.phases)
        phases[number] = replace(phase, uses=(replace(use, order=tuple(order)), *phase.uses[1:]))
        new_problem = replace(problem, phases=tuple(phases))
        assert {
            violation.rule
            for violation in check(new_problem, replace(plan, problem=new_problem.digest))
        } == {"problem"}


@pytest.mark.sweep("more")
@pytest.mark.long
def test_a_plan_file_allows_nothing(graphrun: Cli, tmp_path: Path) -> None:
    encode = ("--device", "sim", "--vram", "6M", "--until", "encode")
    code, output, _ = graphrun("plan", FLUX, *encode, "--allow", "cpu", "-o", "plan.json")
    assert (code, "next: graphrun run plan.json --allow cpu" in output) == (0, True)
    code, output, err = graphrun("run", "plan.json", "-o", "embeds.safetensors")
    assert (code, output) == (2, "")
    assert (
        "plan.json: was made with --allow cpu, which may change the output, and a plan "
        "file allows nothing by itself; add --allow cpu" in err
    )
    assert graphrun("explain", "plan.json")[0] == 0
    assert "leave --allow out" in graphrun("explain", "plan.json", "--allow", "cpu")[2]
    assert "leave --ram out" in graphrun("run", "plan.json", "--allow", "cpu", "--ram", "1M")[2]
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert graphrun("run", "plan.json", "-o", "embeds.safetensors", "--allow", "cpu")[0] == 0
    assert (tmp_path / "embeds.safetensors").exists()


def _changed(problem: Any, **fields: Any) -> Any:
    """``problem`` with ``fields`` of every variant replaced."""
    components = [
        replace(c, variants=tuple(replace(v, **fields) for v in c.variants))
        for c in problem.components
    ]
    return replace(problem, components=tuple(components))


FORGED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "the CPU": (
        lambda p: _changed(p, device="cpu"),
        "text_encoder bfloat16 pinned cpu needs nothing; by the graph, it needs cpu",
    ),
    "a precision": (
        lambda p: _changed(p, precision="nf4"),
        "text_encoder nf4 pinned device needs nothing; the graph does not list it",
    ),
    "an option": (
        lambda p: replace(p, options=(StageOption("decode", "tiling", p.phases[-1:]),)),
        "decode with tiling needs nothing; the graph does not list it",
    ),
}


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize(("change", "message"), FORGED.values(), ids=FORGED)
def test_a_plan_file_does_not_say_what_needs_no_permission(
    change: Callable[[Any], Any], message: str, make_problem: Callable[..., Any]
) -> None:
    solution = package.plan(make_problem("flux-tiny", 6 * 2**20))
    problem = change(solution.problem)
    forged = replace(solution, problem=problem, plan=replace(solution.plan, problem=problem.digest))
    with pytest.raises(PlanError, match=f"by the plan, {message}: plan again"):
        refuse_unfit(forged, package.load(FLUX))


def test_names_of_a_plan_are_no_code(make_problem: Callable[..., Any]) -> None:
    """Names of block groups stand in the docstring of an exported script, and names of options in a
    comment."""
    problem = make_problem("flux-tiny", 6 * 2**20)
    (first, *rest), phases = problem.components, problem.phases[-1:]
    groups = (replace(first.groups[0], name='x"""+print(1)+"""'), *first.groups[1:])
    renamed = replace(problem, components=(replace(first, groups=groups, layers=None), *rest))
    option = replace(problem, options=(StageOption(phases[0].stage, "x\nprint(1)", phases),))
    assert not list(incoherent(problem))
    for forged in (renamed, option):
        assert [text for text in incoherent(forged) if "is not a valid name" in text]


def test_a_trace_returns_what_its_call_allocates_once(make_problem: Callable[..., Any]) -> None:
    problem = make_problem("flux-tiny", 6 * 2**20)
    first, *rest = problem.phases
    call, *next_calls = first.trace.calls
    for results in ((*call.results, 1 << 40), (*call.results, *call.results)):
        trace = replace(first.trace, calls=(replace(call, results=results), *next_calls))
        forged = replace(problem, phases=(replace(first, trace=trace), *rest))
        assert [
            text
            for text in incoherent(forged)
            if "has results that it does not allocate once" in text
        ]


NOISE = [Image.effect_noise((16, 16), 20.0 + n).convert("RGB") for n in range(3)]


@pytest.mark.parametrize(
    ("name", "fps"), [("a.mp4", float("inf")), ("a.gif", 1e-320), ("a.gif", 1e-5)]
)
def test_a_rate_is_refused_before_the_run(name: str, fps: float, tmp_path: Path) -> None:
    from graphrun.report.outputs import require_rate

    with pytest.raises(InputError, match="frames per second; a video file has 0.01 to 1000"):
        require_rate({"": tmp_path / name}, fps)
    with pytest.raises(InputError, match="the outputs are kept as tensors in .*a-kept.safetensors"):
        save_outputs({"video": NOISE}, tmp_path / name, fps)
    video = load_file(tmp_path / "a-kept.safetensors")["video"]
    assert torch.equal(video, torch.from_numpy(np.stack([np.asarray(frame) for frame in NOISE])))
    assert [path.name for path in tmp_path.iterdir()] == ["a-kept.safetensors"]


def test_a_picture_that_its_format_cannot_hold_is_kept(tmp_path: Path) -> None:
    image = Image.new("RGB", (70_000, 2), (1, 2, 3))
    with pytest.raises(
        InputError, match=r"b.jpg: cannot be written: .*kept as tensors in .*b-kept.safetensors"
    ):
        save_outputs({"image": image, "latents": torch.ones(2)}, tmp_path / "b.jpg")
    tensors = load_file(tmp_path / "b-kept.safetensors")
    assert tensors["image"].shape == (2, 70_000, 3)
    assert tensors["latents"].tolist() == [1.0, 1.0]


@pytest.mark.sweep("more")
def test_a_forked_session() -> None:
    graph = package.load(FLUX)
    fork = multiprocessing.get_context("fork")
    with package.Session(
        graph, vram="6M", ram="8G", hardware="sim", inputs={"steps": 1}
    ) as session:
        image = session.run({"seed": 1}).outputs["image"]
        answers = fork.SimpleQueue()
        child = fork.Process(target=_refused, args=(session, answers))
        child.start()
        child.join(20)
        hung = child.is_alive()
        child.kill()
        assert not hung
        refusal = f"the session belongs to process {multiprocessing.current_process().pid}"
        assert all(refusal in answers.get() for _ in range(3))
        assert answers.get() == ()
        assert np.array_equal(session.run({"seed": 1}).outputs["image"], image)


def _refused(session: Any, answers: Any) -> None:
    for use in (session.run, lambda _: session.release(), lambda _: session.lend({}).__enter__()):
        try:
            use({"seed": 2})
        except InputError as error:
            answers.put(str(error))
    answers.put(session.close())


ODD = "e\x9b31mvil\u202e\x1b]0;x\x07\u2066\r"


@pytest.mark.sweep("more")
def test_names_of_a_plan_reach_a_terminal_as_escapes(
    graphrun: Cli, tmp_path: Path, make_problem: Callable[..., Any]
) -> None:
    from graphrun.report import plan_files
    from graphrun.report.summary import summarize
    from graphrun.verify.solution import solution_of

    plain_solution = package.plan(make_problem("flux-tiny", 6 * 2**20))
    problem = replace(plain_solution.problem, graph=ODD)
    solution = solution_of(problem, replace(plain_solution.plan, problem=problem.digest))
    plan_files.save(
        tmp_path / "odd.json", GRAPHS / "flux-tiny.yaml", solution, summarize(solution, None)
    )
    for command in (["check"], ["plan"], ["explain"], ["run"]):
        code, output, err = graphrun(*command, "odd.json")
        assert not set(ODD) & set(output + err) - set("evil31m]0;x")
        assert command != ["plan"] or (
            code,
            "e\\x9b31mvil\\u202e\\x1b]0;x\\x07\\u2066" in output,
        ) == (
            0,
            True,
        )
