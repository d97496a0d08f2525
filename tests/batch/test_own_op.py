"""An op of one's own, with a component: planned, streamed, killed, resumed and cached like those of
graphrun."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import graphrun
from graphrun.batch.cache.keys import StageKeys
from graphrun.errors import GraphError
from graphrun.files import digest_of
from graphrun.model.plan import Stream
from graphrun.modules.build import build
from graphrun.profile.dry_run import probe
from graphrun.store import trace_key

GRAPHS = Path(__file__).parents[2] / "graphs"
PACKAGE = """
import torch
from diffusers import AutoencoderKL, DDIMScheduler
from diffusers.image_processor import VaeImageProcessor
from PIL.Image import Image

import graphrun


@graphrun.op()
def encode(image: Image, vae: AutoencoderKL, device: torch.device) -> dict[str, torch.Tensor]:
    pixels = VaeImageProcessor().preprocess(image).to(device, vae.dtype)
    return {"latents": vae.encode(pixels).latent_dist.mode()}


@graphrun.op()
def sharpen(latents: torch.Tensor, vae: AutoencoderKL, amount: float | None = 0.5) \
-> dict[str, Image]:
    blurred = torch.nn.functional.avg_pool2d(latents, 3, stride=1, padding=1)
    pixels = vae.decode(latents + amount * (latents - blurred), return_dict=False)[0]
    return {"image": VaeImageProcessor().postprocess(pixels)[0]}


@graphrun.op()
def spoil(latents: torch.Tensor, vae: AutoencoderKL) -> dict[str, Image]:
    return sharpen(latents.mul_(2), vae)


@graphrun.op(changes=["latents"])
def double(latents, vae: AutoencoderKL) -> dict[str, Image]:
    return sharpen(latents.mul_(2), vae)


@graphrun.op()
def fails(latents: torch.Tensor, vae: AutoencoderKL, scheduler: DDIMScheduler) -> dict[str, Image]:
    raise RuntimeError(f"out of {type(scheduler).__name__}s")


@graphrun.op()
def forgets(latents: torch.Tensor, vae: AutoencoderKL):
    return vae


def private(latents, vae):
    return {}
"""
GRAPH = f"""graphrun: 1
name: sharp
pipeline: diffusers.StableDiffusionXLPipeline
inputs:
  image: {{type: image, height: 64, width: 64}}
components:
  vae: {{class: diffusers.AutoencoderKL, config: {GRAPHS}/configs/tiny-sdxl-vae.json, \
dtype: float32}}
parts:
  scheduler: {{class: diffusers.DDIMScheduler, config: {{}}}}
stages:
  encode: {{op: "mine:encode", uses: [vae], with: {{image: $image}}}}
  sharpen: {{op: "mine:sharpen", uses: [vae], with: {{latents: $encode.latents, amount: 0.5}}}}
outputs: {{image: $sharpen.image}}
"""
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))


@pytest.fixture
def op_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a package of ops."""
    (tmp_path / "mine.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "mine.py"
    sys.modules.pop("mine", None)


@pytest.fixture
def load_graph(tmp_path: Path, op_file: Path) -> Callable[..., Any]:
    """Loads the graph with one text in it replaced."""

    def load(old: str = "", new: str = "", trust: tuple[str, ...] = ("mine",)) -> Any:
        assert old in GRAPH
        (tmp_path / "sharp.yaml").write_text(GRAPH.replace(old, new, 1) if old else GRAPH)
        return graphrun.load(tmp_path / "sharp.yaml", trust=trust)

    return load


def by_hand(graph: Any, picture: Any) -> bytes:
    """``picture`` sharpened without graphrun."""
    vae, op_module = build(graph.components["vae"], graph), importlib.import_module("mine")
    with torch.no_grad():
        latents = op_module.encode(picture, vae, torch.device("cpu"))["latents"]
        return bytes(op_module.sharpen(latents, vae)["image"].tobytes())


@pytest.mark.sweep("more")
@pytest.mark.long
def test_it_is_streamed_under_a_tight_budget_killed_and_resumed_with_equal_pictures(
    load_graph: Any, sink: Any, kill_run: Any, tmp_path: Path
) -> None:
    graph = load_graph()
    budget = {"vram": "1330K", "ram": "8G", "hardware": "sim", "cache": tmp_path / "cache"}
    plan = graphrun.plan(graphrun.estimate(graph, **budget)).plan
    assert any(isinstance(action, Stream) for slot in plan.slots for action in slot.actions), (
        "the budget is not tight"
    )
    requests = [{"image": PICTURE}, {"image": PICTURE.rotate(90)}, {"image": PICTURE}]

    def work() -> Any:
        return graphrun.run_many(
            graph,
            requests,
            sink=sink(tmp_path / "out"),
            resume=tmp_path / "state",
            reuse="none",
            **budget,
        )

    assert not kill_run(work, 9)
    work()
    assert work().done_before == (1, 2, 3)
    for number, request in enumerate(requests, 1):
        assert Image.open(tmp_path / "out" / f"{number}.png").tobytes() == by_hand(
            graph, request["image"]
        )


def test_its_code_is_in_the_keys_of_what_is_cached(load_graph: Any, op_file: Path) -> None:
    graph = load_graph()
    inputs = graph.for_planning({})

    def keys() -> list[str | None]:
        return [
            trace_key(graph, inputs),
            StageKeys(graph, inputs, "sim", lambda path: digest_of(str(path))).key("encode"),
        ]

    first = keys()
    assert None not in first
    assert keys() == first
    op_file.write_text(PACKAGE.replace("mode()", "mean"))
    assert [old_key == new_key for old_key, new_key in zip(first, keys(), strict=True)] == [
        False,
        False,
    ]


def test_a_file_alone_names_no_function(load_graph: Any) -> None:
    pattern = (
        r"sharp.yaml:11: stages.encode.op: mine:encode is outside the trusted packages "
        r".*--trust-package mine"
    )
    with pytest.raises(GraphError, match=pattern):
        load_graph(trust=())
    graph = load_graph("mine:encode", "diffusers.utils:logging")
    with pytest.raises(
        GraphError,
        match=r"sharp.yaml:11: diffusers.utils:logging is a function, .*--trust-package diffusers",
    ):
        probe(graph, graph.for_planning({}))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "mine:sharpen",
            "mine:sharpens",
            r"mine:sharpens is not in .*mine.py; did you mean 'sharpen'",
        ),
        ("mine:sharpen", "mine:private", r"mine:private is no op: put @graphrun.op\(\) above it"),
        (
            "mine:sharpen",
            "mine.none:sharpen",
            r"mine.none:sharpen cannot be imported: ModuleNotFoundError",
        ),
        (
            "amount: 0.5",
            "amuont: 0.5",
            r"with.amuont: mine:sharpen has no parameter 'amuont'; did you mean 'amount'",
        ),
        (
            "uses: [vae], with: {latents",
            "with: {latents",
            r"mine:sharpen needs vae: values belong to with:, components to uses:",
        ),
        (
            "amount: 0.5",
            "amount: high",
            r"amount: mine:sharpen takes float \| None, and it is a str",
        ),
        (
            "$sharpen.image",
            "$sharpen.picture",
            r"mine:sharpen returns no picture; known are 'image'",
        ),
        (
            "mine:sharpen",
            "mine:spoil",
            r"mine:spoil changes latents in place.*@graphrun.op\(changes=\['latents'\]\)",
        ),
        (
            "mine:sharpen",
            "mine:fails",
            r"mine:fails fails: RuntimeError: out of DDIMSchedulers \(mine.py:35\)",
        ),
        (
            "mine:sharpen",
            "mine:forgets",
            r"mine:forgets returns a AutoencoderKL: return its outputs by name",
        ),
    ],
)
def test_what_is_wrong_with_it_is_said_with_file_and_line_when_it_is_planned(
    load_graph: Any, old: str, new: str, message: str
) -> None:
    text = GRAPH.replace(old, new)
    if new.startswith("mine:"):
        text = text.replace(", amount: 0.5", "")
    line = text.partition("  sharpen:")[0].count("\n") + 1
    graph = load_graph(GRAPH, text)
    with pytest.raises(GraphError, match=f"sharp.yaml:{line}: .*{message}"):
        probe(graph, graph.for_planning({}))


@pytest.mark.long
def test_it_may_change_a_copy_of_what_it_declares(load_graph: Any) -> None:
    double = '  double: {op: "mine:double", uses: [vae], with: {latents: $encode.latents}}'
    graph = load_graph(
        GRAPH,
        GRAPH.replace("  sharpen:", f"{double}\n  sharpen:").replace(
            "$sharpen.image}", "$sharpen.image, double: $double.image}"
        ),
    )
    problem = graphrun.estimate(graph, vram="64M", ram="8G", hardware="sim")
    outputs = graphrun.run(graphrun.plan(problem), graph, {"image": PICTURE}).outputs
    assert outputs["image"].tobytes() == by_hand(graph, PICTURE) != outputs["double"].tobytes()
