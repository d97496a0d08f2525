"""The trained pipeline and what judges it: scenes that training never sees, a detector that was not
trained."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

import graphrun as package

ROOT = Path(__file__).parent.parent


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "training"))
    return importlib.import_module


def rights(part: Any, objects: int, count: int) -> tuple[list[Any], list[np.ndarray]]:
    """Scenes drawn at random from all, never-seen pairs too, and their pictures."""
    scenes = part("scenes")
    all_scenes, rng = list(scenes.scenes(objects)), np.random.default_rng(7)
    sample = [all_scenes[index] for index in rng.integers(len(all_scenes), size=count)]
    return sample, [scenes.draw(scene, rng) for scene in sample]


@pytest.mark.sweep("more")
@pytest.mark.parametrize("objects", [1, 2])
def test_the_detector_is_right_on_99_percent_of_drawn_pictures(part: Any, objects: int) -> None:
    judge = part("detector").judge
    judged = [
        judge(scene, picture)["all"]
        for scene, picture in zip(*rights(part, objects, 200), strict=True)
    ]
    assert sum(judged) >= 0.99 * len(judged)


@pytest.mark.sweep("more")
@pytest.mark.parametrize("objects", [1, 2])
def test_on_shuffled_prompts_the_detector_is_right_as_often_as_two_scenes_agree(
    part: Any, objects: int
) -> None:
    """So it reads the picture: a prompt does not help it. Two objects' colours and shapes agree in
    one of hundreds."""
    judge = part("detector").judge
    scenes, pictures = rights(part, objects, 200)
    rotated = scenes[1:] + scenes[:1]
    judged = [judge(other, picture) for other, picture in zip(rotated, pictures, strict=True)]
    agree = {
        "background": [a.background == b.background for a, b in zip(scenes, rotated, strict=True)],
        "colours": [
            {t.colour for t in a.things} == {t.colour for t in b.things}
            for a, b in zip(scenes, rotated, strict=True)
        ],
        "all": [a.content == b.content for a, b in zip(scenes, rotated, strict=True)],
    }
    for name, expected in agree.items():
        assert [right[name] for right in judged] == expected, name


def test_what_is_no_shape_of_a_scene_is_not_judged_right(part: Any) -> None:
    """A wrong colour, a wrong outline, a third object, a plain background, noise."""
    scenes, judge = part("scenes"), part("detector").judge
    (scene,) = [scene for scene in scenes.scenes(1) if scene.prompt == "a red circle on white"]
    good = Image.fromarray(scenes.draw(scene, np.random.default_rng(0)))
    assert judge(scene, np.asarray(good))["all"]
    drawings = {
        "shapes": ("ellipse", (20, 26, 43, 37), (225, 35, 35)),
        "colours": ("ellipse", (21, 21, 43, 43), (200, 120, 60)),
        "places": ("ellipse", (4, 21, 26, 43), (225, 35, 35)),
    }
    for wrong, (kind, box, colour) in drawings.items():
        picture = Image.new("RGB", (64, 64), "white")
        getattr(ImageDraw.Draw(picture), kind)(box, fill=colour)
        judged = judge(scene, np.asarray(picture))
        assert not judged[wrong], wrong
    ImageDraw.Draw(good).rectangle((2, 2, 12, 12), fill=(40, 70, 225))
    assert not judge(scene, np.asarray(good))["colours"]
    assert not judge(scene, np.full((64, 64, 3), 255, np.uint8))["colours"]
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    assert not judge(scene, noise)["all"]


def test_training_sees_neither_held_out_scenes_nor_their_mirrored_wording_nor_the_pairs_kept_away(
    part: Any,
) -> None:
    scenes = part("scenes")
    parts = scenes.held_out()
    assert json.loads(json.dumps(scenes.choose())) == json.loads(scenes.HELD_OUT.read_text()), (
        "drawn by its seed"
    )
    assert {name: len(rows) for name, rows in parts.items()} == {
        "one": 200,
        "two": 200,
        "one unseen": 50,
        "two unseen": 50,
    }
    training_scenes = [scene for objects in (1, 2) for scene in scenes.training(objects)]
    contents = {scene.content for rows in parts.values() for scene, _ in rows}
    assert not contents & {scene.content for scene in training_scenes}
    pairs = {(thing.colour, thing.shape) for scene in training_scenes for thing in scene.things}
    assert len(pairs) == 25
    assert not pairs & scenes.NEVER_SEEN
    assert ({colour for colour, _ in pairs}, {shape for _, shape in pairs}) == (
        set(scenes.COLOURS),
        set(scenes.SHAPES),
    )
    assert all(
        scene.unseen == name.endswith("unseen") for name, rows in parts.items() for scene, _ in rows
    )


@pytest.mark.sweep("more")
@pytest.mark.long
def test_training_that_was_interrupted_goes_on_as_if_it_had_not_been(
    part: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses are equal but for rounding: the same sums in another place of memory are added in
    another order."""
    train = part("train")
    sizes = {
        "VAE_ROUNDS": 1,
        "DECODER_ROUNDS": 1,
        "VAE_STEPS": 1,
        "VAE_BATCH": 2,
        "ROUND_STEPS": 2,
        "BATCH": 4,
        "REPEATS": 2,
        "RATE": 0.02,
    }
    for name, value in sizes.items():
        monkeypatch.setattr(train, name, value)

    note = train.note

    def noted(options: Any, row: dict[str, Any]) -> None:
        note(options, row)
        if options.folder.name == "parts" and 0 in (row.get("vae round"), row.get("round")):
            raise KeyboardInterrupt

    monkeypatch.setattr(train, "note", noted)
    losses, steps = {}, {}
    for name, interruptions in (("whole", 0), ("parts", 2)):
        command = [str(tmp_path / name), "--rounds", "2", "--threads", "1"]
        for _ in range(interruptions):
            with pytest.raises(KeyboardInterrupt):
                train.main(command)
        train.main(command)
        rows = [
            json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()
        ]
        losses[name] = [row.get("error", row.get("loss")) for row in rows]
        optimizers = [
            torch.load(tmp_path / name / file)["optimizer"]["state"]
            for file in ("vae.pt", "flow.pt")
        ]
        steps[name] = [{float(entry["step"]) for entry in state.values()} for state in optimizers]
        assert len(list((tmp_path / name / "pipeline").rglob("*.safetensors"))) == 4
    assert len(losses["whole"]) == 4
    assert losses["parts"] == pytest.approx(losses["whole"], rel=3e-4)
    assert steps["parts"] == steps["whole"], "the optimizers' state goes on, too"


def test_the_trained_pipeline_is_small_and_its_classes_are_fluxs() -> None:
    folder = ROOT / "graphs/shapes"
    assert sum(file.stat().st_size for file in folder.rglob("*.safetensors")) < 6e6
    index = json.loads((folder / "model_index.json").read_text())
    assert {
        name: entry[-1] for name, entry in index.items() if entry[-1] and not name.startswith("_")
    } == {
        "scheduler": "FlowMatchEulerDiscreteScheduler",
        "vae": "AutoencoderKL",
        "text_encoder": "CLIPTextModel",
        "tokenizer": "CLIPTokenizer",
        "text_encoder_2": "T5EncoderModel",
        "tokenizer_2": "T5Tokenizer",
        "transformer": "FluxTransformer2DModel",
    }


@pytest.mark.long
def test_a_run_under_a_hard_cap_draws_what_was_asked_and_so_does_diffusers(
    part: Any, graphrun: Any, tmp_path: Path
) -> None:
    """The prompt of `make run`, which training has not seen."""
    graph = package.load(ROOT / "graphs/shapes.yaml")
    prompt = graph.inputs["prompt"].default
    (scene,) = [
        scene
        for rows in part("scenes").held_out().values()
        for scene, _ in rows
        if scene.prompt == prompt
    ]
    picture = tmp_path / "picture.png"
    code, output, _ = graphrun(
        "run",
        str(graph.path),
        "--device",
        "sim",
        "--vram",
        "4M",
        "--prompt",
        prompt,
        "--output",
        str(picture),
    )
    assert (code, "the run stayed within the planned memory" in output) == (0, True)
    plan_pixels = np.asarray(Image.open(picture))
    assert part("detector").judge(scene, plan_pixels)["all"]
    evaluate = part("evaluate")
    (whole,) = evaluate.pictures(
        evaluate.load(ROOT / "graphs/shapes"), [(scene, graph.inputs["seed"].default)]
    )
    assert np.array_equal(plan_pixels, whole)


@pytest.mark.sweep("more")
@pytest.mark.long
def test_make_run_ends_on_the_cpu_with_the_picture_of_diffusers(part: Any, tmp_path: Path) -> None:
    """The last command of the recipe prints planned and measured seconds and memory."""
    recipe = (ROOT / "Makefile").read_text().split("\nrun: ")[1].split("\n\n")[0]
    command = shlex.split(recipe.replace("\\\n", " ").splitlines()[-1])
    assert command[:7] == shlex.split("$(BIN)/graphrun run shapes --device cpu --memory 2G")
    (tmp_path / "out").mkdir()
    process = subprocess.run(
        [sys.executable, "-m", "graphrun", *command[1:]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    verdict = r"done: .*s \(planned .*\), .* of 2 GiB of memory \(as planned\)"
    assert re.search(verdict, " ".join(process.stdout.split()))  # without line ends
    assert "the run stayed within the planned memory" in process.stdout
    graph, evaluate = package.load(ROOT / "graphs/shapes.yaml"), part("evaluate")
    prompt = graph.inputs["prompt"].default
    scenes = [scene for rows in part("scenes").held_out().values() for scene, _ in rows]
    (scene,) = [scene for scene in scenes if scene.prompt == prompt]
    pipeline = evaluate.load(ROOT / "graphs/shapes")
    if "float32 in place of bfloat16" in process.stderr:  # a CPU without instructions for it
        pipeline = pipeline.to(dtype=torch.float32)
    (whole,) = evaluate.pictures(pipeline, [(scene, graph.inputs["seed"].default)])
    assert np.array_equal(np.asarray(Image.open(tmp_path / "out/shapes-cpu.png")), whole)


@pytest.mark.sweep("shapes")
@pytest.mark.parametrize(
    ("prompts", "minimum"),
    [("one", {"all": 0.9}), ("two", {"colours": 0.9, "places": 0.8, "all": 0.9})],
)
def test_the_trained_pipeline_draws_prompts_that_training_has_not_seen(
    part: Any, prompts: str, minimum: dict[str, float]
) -> None:
    evaluate = part("evaluate")
    right = evaluate.score(
        evaluate.load(ROOT / "graphs/shapes"), part("scenes").held_out()[prompts]
    )
    assert {name: share for name, share in minimum.items() if right[name] < share} == {}, right
