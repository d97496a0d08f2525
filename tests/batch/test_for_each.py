"""A list over a stage (``for_each``): each item has the bits of its own run, in one planned batch;
errors name file and line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from campaign import sampled
from PIL import Image

import graphrun
from graphrun.errors import GraphError, InputError

GRAPHS = Path(__file__).parents[2] / "graphs"
SEEDS = [5, 3, 8]
Load = Callable[..., Any]


def written(folder: Path, name: str, *changes: tuple[str, str]) -> Any:
    """The graph ``name`` tiny, with texts of its file replaced."""
    text = (GRAPHS / f"{name}.yaml").read_text()
    for old, new in (
        *changes,
        *((f"{name}/", f"{GRAPHS}/{name}/") for name in ("configs", "tokenizers")),
    ):
        assert old in text
        text = text.replace(old, new)
    (folder / "lists.yaml").write_text(text)
    return graphrun.load(folder / "lists.yaml")


SEEDED = (
    (
        "  seed: {type: int, default: 0, minimum: 0}",
        "  seed: {type: int, default: 0, minimum: 0, many: true}",
    ),
    ("seed: $seed\n", "seed: $seed\n    for_each: seed\n"),
    ("uses: [vae]\n", "uses: [vae]\n    for_each: latents\n"),
)


@pytest.fixture
def seeded(tmp_path: Path) -> Load:
    """The small FLUX with a list of seeds, and more of its file replaced."""
    return lambda *changes: written(tmp_path, "flux-tiny", *SEEDED, *changes)


@pytest.mark.sweep("more")
@pytest.mark.long
def test_pictures_from_one_text_are_those_of_single_runs_and_the_text_is_encoded_once(
    seeded: Load, flux: Any, batch: Any
) -> None:
    results = batch(
        [{"prompt": "a", "seed": SEEDS}, {"prompt": "b", "seed": "[5]"}, {"seed": [1, -1]}],
        seeded(),
    )
    by_hand = batch(
        [{"prompt": "a", "seed": seed} for seed in SEEDS] + [{"prompt": "b", "seed": 5}]
    ).outputs
    assert [picture.tobytes() for picture in results.outputs[1]["image"]] == [
        by_hand[n]["image"].tobytes() for n in (1, 2, 3)
    ]
    assert [picture.tobytes() for picture in results.outputs[2]["image"]] == [
        by_hand[4]["image"].tobytes()
    ]
    assert results.shared == {"encode": 2, "denoise": 0, "decode": 0}
    assert results.schedules[0].requests == 4, "one schedule for the items of both"
    assert results.errors == {3: "input 'seed': -1 is less than the minimum, 0"}


@pytest.mark.long
@pytest.mark.parametrize("first", sampled([4, 11], (4,), "faults"))
def test_killed_it_resumes_item_by_item_with_the_same_bits(
    seeded: Load, batch: Any, sink: Any, kill_run: Any, first: int, tmp_path: Path
) -> None:
    graph, inputs = seeded(), [{"seed": SEEDS}, {"seed": [1]}]

    def work(name: str = "out", **options: Any) -> Any:
        return batch(inputs, graph, sink=sink(tmp_path / name), **options)

    work("whole")
    state = tmp_path / "state"
    assert not kill_run(lambda: work(resume=state), first)
    work(resume=state)
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert len(whole) == 4
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == whole
    resumed_batch = work(resume=state)
    assert resumed_batch.done_before == (1, 2)
    assert not resumed_batch.traces


VIDEO = (
    ("  image: {type: image}", "  image: {type: video, frames: 2}"),
    ("    op: call\n", "    op: call\n    for_each: image\n"),
    ("outputs: {image: $make.image}", "outputs: {video: $make.image}"),
)


@pytest.mark.sweep("more")
@pytest.mark.long
def test_frames_of_a_video_go_through_a_pipeline_one_by_one(
    tmp_path: Path, cached_dry_runs: Path
) -> None:
    graph = written(tmp_path, "sdxl-img2img-tiny", *VIDEO)
    frames = [
        Image.fromarray(np.random.default_rng(n).integers(0, 256, (64, 64, 3), dtype=np.uint8))
        for n in range(2)
    ]
    budgets = {
        "vram": "24M",
        "ram": "8G",
        "hardware": "sim",
        "cache": cached_dry_runs,
        "reuse": "none",
    }
    common = {"height": 64, "width": 64, "steps": 2, "prompt": "a"}
    common = {name: value for name, value in common.items() if name in graph.inputs}
    results = graphrun.run_many(graph, [{"image": frames}], common=common, **budgets)
    single_graph = graphrun.load(GRAPHS / "sdxl-img2img-tiny.yaml")
    del budgets["reuse"]
    solution = graphrun.plan(graphrun.estimate(single_graph, inputs=common, **budgets))
    by_hand = [graphrun.run(solution, single_graph, common | {"image": frame}) for frame in frames]
    assert graph.kinds() == {"video": "video"}
    assert [frame.tobytes() for frame in results.outputs[1]["video"]] == [
        trace.outputs["image"].tobytes() for trace in by_hand
    ]


@pytest.mark.sweep("more")
def test_a_plan_is_for_one_item_and_single_runs_refuse_a_list(seeded: Load, problem: Any) -> None:
    graph, budgets = seeded(), {"vram": "6M", "ram": "8G", "hardware": "sim"}
    estimated = graphrun.estimate(
        graph,
        inputs={"seed": SEEDS, "height": 32, "width": 32, "steps": 3, "max_sequence_length": 16},
        **budgets,
    )
    assert estimated.digest == problem.digest, "as if the file had no list"
    assert graph.digest != graph.per_item().digest
    pattern = r"flux-tiny: stages take the items of \$seed one by one \(for_each\)"
    with pytest.raises(InputError, match=pattern):
        graphrun.run(graphrun.plan(estimated), graph)
    with pytest.raises(InputError, match=pattern):
        graphrun.Session(graph, **budgets)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([("for_each: seed", "for_each: sed")], "for_each: with: has no sed; did you mean 'seed'?"),
        (
            [("for_each: seed", "for_each: guidance_scale")],
            "for_each: $guidance_scale is no list: add many: true to inputs.guid",
        ),
        (
            [("seed: $seed", "seed: 3")],
            "for_each: is no list: name an input, or an output of a stage with for_each, in seed",
        ),
        ([("    for_each: seed\n", "")], "with.seed: expected int, and $seed may be a list"),
        (
            [("    for_each: latents\n", "")],
            "stages.decode: $denoise.latents is a list, whose items are taken one by one: add",
        ),
        ([("for_each: latents", "for_each: embeds")], "for_each: $encode.embeds is made once"),
        ([("for_each: seed", "for_each: 3")], "for_each: expected a text, got 3"),
    ],
)  # fmt: skip
def test_what_is_no_list_is_refused_with_its_line(
    seeded: Load, changes: list[tuple[str, str]], message: str
) -> None:
    with pytest.raises(GraphError) as error:
        seeded(*changes)
    assert message in str(error.value)
    assert all(
        ":" in line and line.split(":")[1].isdigit() for line in str(error.value).splitlines()
    )
