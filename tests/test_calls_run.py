"""The graphs that call a pipeline whole, from the command line: files in, files out, other files
refused, lists gone on with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner
from whole_pipelines import by_hand

import graphrun
from graphrun.cli.main import app, main
from graphrun.modules.build import build

GRAPH = str(Path(__file__).parent.parent / "graphs" / "sdxl-img2img-tiny.yaml")
SMALL = {"height": 64, "width": 64, "steps": 2, "seed": 3}


def picture(size: tuple[int, int] = (64, 64), seed: int = 0) -> Image.Image:
    return Image.fromarray(
        np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    )


def plain(inputs: dict[str, Any]) -> Any:
    """What diffusers' pipeline makes of sdxl-img2img-tiny on the CPU, called as its users call
    it."""
    graph = graphrun.load(GRAPH)
    modules = {key: build(component, graph) for key, component in graph.components.items()}
    return by_hand(graph, modules, graph.resolve(inputs))["image"]


@pytest.fixture
def run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The command line in an empty folder that holds a.png and b.png (64x64), and wide.png."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    picture().save("a.png")
    picture(seed=1).save("b.png")
    picture((96, 64)).save("wide.png")

    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(
            app,
            ["run", *arguments, "--device", "sim"] if arguments[0] != "plan" else list(arguments),
        )
        return result.exit_code, result.output + (str(result.exception) if result.exception else "")

    return run


FLAGS = (
    "--vram",
    "64M",
    "--ram",
    "1G",
    "--set",
    "height=64",
    "--set",
    "width=64",
    "--set",
    "steps=2",
)


def test_a_plan_made_without_the_file_runs_with_one_of_its_size_only(
    run_here: Callable[..., Any],
) -> None:
    code, output = run_here("plan", GRAPH, *FLAGS, "--device", "sim", "-o", "plan.json")
    assert code == 0, output
    assert "image=64x64" in output
    run = CliRunner().invoke(
        app, ["run", "plan.json", "--set", "image=a.png", "-o", "image=out/made.jpg"]
    )
    assert run.exit_code == 0, run.output
    assert Image.open("out/made.jpg").size == (64, 64)
    result = CliRunner().invoke(app, ["run", "plan.json", "--set", "image=wide.png"])
    assert "the plan is for image=64x64, this run has image=96x64" in str(result.exception)


@pytest.mark.sweep("more")
def test_a_file_that_is_given_is_planned_for(run_here: Callable[..., Any]) -> None:
    code, output = run_here(GRAPH, *FLAGS, "--set", "image=wide.png", "-o", "made.png", "-v")
    assert code == 0, output
    assert "image=96x64" in output
    assert Image.open("made.png").size == (96, 64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set", "image=none.png"), "none.png: no such file"),
        (("--set", "image=a.png", "-o", "image=a.xyz"), ".xyz is not known"),
        (
            ("--set", "image=a.png", "-o", "picture=a.png"),
            "no such output 'picture'; outputs are image",
        ),
        ((), "'image' is missing; it is an image"),
        (
            ("--set", "image=a.png", "--set", "strength=0.1"),
            "stages.make: StableDiffusionXLImg2ImgPipeline fails: ",
        ),
    ],
)
def test_bad_input_is_one_message(
    run_here: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr(
        "sys.argv", ["graphrun", "run", GRAPH, *FLAGS, "--device", "sim", *arguments]
    )
    with pytest.raises(SystemExit) as exit_info:
        main()
    error_text = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert message in error_text
    assert "Traceback" not in error_text


@pytest.mark.sweep("more")
def test_a_list_of_files_goes_on_from_what_was_done_and_knows_a_changed_file(
    run_here: Callable[..., Any],
) -> None:
    lines = [
        {"image": "a.png", "prompt": "one"},
        {"image": "gone.png", "prompt": "two"},
        {"image": "b.png", "prompt": "one"},
    ]
    Path("list.jsonl").write_text("\n".join(map(json.dumps, lines)))
    command = (GRAPH, *FLAGS, "--inputs", "list.jsonl", "--resume", "-o", "out/x.webp")
    code, output = run_here(*command)
    assert code == 2, output
    assert "2 of 3 requests run" in output
    assert "gone.png: no such file" in output
    first, third = (Path(f"out/x-000{number}.webp").read_bytes() for number in (1, 3))
    assert first != third, "the same prompt of another picture"
    picture(seed=2).save("gone.png")
    code, output = run_here(*command)
    assert (code, "2 done before" in output) == (0, True), output
    picture(seed=7).save("b.png")
    code, output = run_here(*command)
    assert "inputs of request 3" in output, "a changed file is another batch"


@pytest.mark.sweep("more")
def test_a_session_plans_pictures_of_another_size_when_they_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, planned_settings = graphrun.load(GRAPH), list[dict[str, str]]()
    plan = graphrun.plan

    def counted(problem: Any, **options: Any) -> Any:
        planned_settings.append(dict(problem.settings))
        return plan(problem, **options)

    monkeypatch.setattr(graphrun.api, "plan", counted)
    with graphrun.Session(graph, vram="64M", hardware="sim", inputs=SMALL, runs=3) as session:
        results = [
            session.run({"image": picture(seed=seed), "seed": 3}).outputs["image"].tobytes()
            for seed in (0, 1, 0)
        ]
        wide = session.run({"image": picture((96, 64)), "seed": 3}).outputs["image"]
    assert wide.size == (96, 64)
    assert [settings["image"] for settings in planned_settings] == ["64x64", "96x64"], (
        "other pictures of one size share a plan"
    )
    assert results[0] == results[2] != results[1]
    assert results[0] == plain({**SMALL, "image": picture()}).tobytes()
    assert wide.tobytes() == plain({**SMALL, "image": picture((96, 64))}).tobytes()
