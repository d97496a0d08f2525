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
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
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
    here: Callable[..., Any],
) -> None:
    code, out = here("plan", GRAPH, *FLAGS, "--device", "sim", "-o", "plan.json")
    assert code == 0, out
    assert "image=64x64" in out
    run = CliRunner().invoke(
        app, ["run", "plan.json", "--set", "image=a.png", "-o", "image=out/made.jpg"]
    )
    assert run.exit_code == 0, run.output
    assert Image.open("out/made.jpg").size == (64, 64)
    refused = CliRunner().invoke(app, ["run", "plan.json", "--set", "image=wide.png"])
    assert "the plan is for image=64x64, this run has image=96x64" in str(refused.exception)


def test_a_file_that_is_given_is_planned_for(here: Callable[..., Any]) -> None:
    code, out = here(GRAPH, *FLAGS, "--set", "image=wide.png", "-o", "made.png", "-v")
    assert code == 0, out
    assert "image=96x64" in out
    assert Image.open("made.png").size == (96, 64)


@pytest.mark.parametrize(
    ("given", "said"),
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
    here: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    given: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.setattr("sys.argv", ["graphrun", "run", GRAPH, *FLAGS, "--device", "sim", *given])
    with pytest.raises(SystemExit) as left:
        main()
    shown = capsys.readouterr().err
    assert left.value.code == 2
    assert said in shown
    assert "Traceback" not in shown


def test_a_list_of_files_goes_on_from_what_was_done_and_knows_a_changed_file(
    here: Callable[..., Any],
) -> None:
    lines = [
        {"image": "a.png", "prompt": "one"},
        {"image": "gone.png", "prompt": "two"},
        {"image": "b.png", "prompt": "one"},
    ]
    Path("list.jsonl").write_text("\n".join(map(json.dumps, lines)))
    many = (GRAPH, *FLAGS, "--inputs", "list.jsonl", "--resume", "-o", "out/x.webp")
    code, out = here(*many)
    assert code == 2, out
    assert "2 of 3 requests run" in out
    assert "gone.png: no such file" in out
    first, third = (Path(f"out/x-000{number}.webp").read_bytes() for number in (1, 3))
    assert first != third, "the same prompt of another picture"
    picture(seed=2).save("gone.png")
    code, out = here(*many)
    assert (code, "2 done before" in out) == (0, True), out
    picture(seed=7).save("b.png")
    code, out = here(*many)
    assert "inputs of request 3" in out, "a changed file is another batch"


def test_a_session_plans_pictures_of_another_size_when_they_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, planned = graphrun.load(GRAPH), list[dict[str, str]]()
    plan = graphrun.plan

    def counted(problem: Any, **more: Any) -> Any:
        planned.append(dict(problem.settings))
        return plan(problem, **more)

    monkeypatch.setattr(graphrun.api, "plan", counted)
    with graphrun.Session(graph, vram="64M", hardware="sim", inputs=SMALL, runs=3) as session:
        made = [
            session.run({"image": picture(seed=seed), "seed": 3}).outputs["image"].tobytes()
            for seed in (0, 1, 0)
        ]
        wide = session.run({"image": picture((96, 64)), "seed": 3}).outputs["image"]
    assert wide.size == (96, 64)
    assert [settings["image"] for settings in planned] == ["64x64", "96x64"], (
        "other pictures of one size share a plan"
    )
    assert made[0] == made[2] != made[1]
    assert made[0] == plain({**SMALL, "image": picture()}).tobytes()
    assert wide.tobytes() == plain({**SMALL, "image": picture((96, 64))}).tobytes()
