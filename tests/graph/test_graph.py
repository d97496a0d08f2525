"""Loaded graphs: inputs, digest, order of stages, schema."""

from __future__ import annotations

import json
from dataclasses import replace
from graphlib import CycleError
from pathlib import Path
from typing import Any

import pytest

from graphrun.errors import InputError
from graphrun.graph.graph import Graph
from graphrun.graph.loading import load
from graphrun.graph.ops import OPERATIONS
from graphrun.graph.order import order_stages
from graphrun.graph.parts import Reference, Stage
from graphrun.graph.schema import schema_text

GRAPHS = Path(__file__).parents[2] / "graphs"


@pytest.fixture(scope="module")
def graph() -> Graph:
    return load(GRAPHS / "flux-dev.yaml")


def test_defaults_fill_what_is_not_given(graph: Graph) -> None:
    assert graph.resolve({"prompt": "a cat"}) == {
        "prompt": "a cat",
        "batch": 1,
        "height": 1024,
        "width": 1024,
        "steps": 28,
        "guidance_scale": 3.5,
        "seed": 0,
        "max_sequence_length": 512,
    }


def test_text_becomes_the_declared_type(graph: Graph) -> None:
    values = graph.resolve({"prompt": "7", "height": "512", "guidance_scale": "4", "steps": 3})
    assert (values["prompt"], values["height"], values["guidance_scale"], values["steps"]) == (
        "7",
        512,
        4.0,
        3,
    )


def test_planning_needs_no_prompt(graph: Graph) -> None:
    assert graph.for_planning({})["prompt"] == "a photo"
    assert graph.for_planning({"prompt": "a cat"})["prompt"] == "a cat"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "input 'prompt' is missing; it is a str and has no default"),
        ({"heigth": 512}, "unknown input 'heigth'; did you mean 'height'?"),
        ({"height": 1000}, "input 'height': 1000 is not a multiple of 16; use 992 or 1008"),
        ({"height": 0}, "input 'height': 0 is less than the minimum, 16"),
        ({"height": 8}, "input 'height': 8 is not a multiple of 16; use 16"),
        ({"height": "tall"}, "input 'height': 'tall' is not an int"),
        ({"height": 512.0}, "input 'height': 512.0 is not an int"),
        ({"height": True}, "input 'height': True is not an int"),
        ({"seed": 2**70}, f"input 'seed': {2**70} does not fit 64 bits"),
        (
            {"guidance_scale": "-1e308"},
            "input 'guidance_scale': -1e+308 is more than a float32 can be, 3.403e+38",
        ),
        ({"guidance_scale": "nan"}, "input 'guidance_scale': nan is not a finite number"),
        ({"guidance_scale": 10**400}, f"input 'guidance_scale': {10**400} is not a finite number"),
        (
            {"max_sequence_length": 513},
            "input 'max_sequence_length': 513 is more than the maximum, 512",
        ),
        ({"prompt": 3}, "input 'prompt': 3 is not a str"),
        ({"prompt": None}, "input 'prompt': None is not a str"),
    ],
)
def test_inputs_refused(graph: Graph, values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error_info:
        graph.resolve(values)
    assert message in str(error_info.value).splitlines()


def test_all_input_problems_at_once(graph: Graph) -> None:
    with pytest.raises(InputError) as error_info:
        graph.resolve({"heigth": 1, "steps": 0})
    assert len(str(error_info.value).splitlines()) == 3


def test_bools_are_words() -> None:
    definition = replace(
        load(GRAPHS / "flux-tiny.yaml").inputs["seed"], type="bool", default=False, minimum=None
    )
    graph = replace(load(GRAPHS / "flux-tiny.yaml"), inputs={"seed": definition})
    assert [graph.resolve({"seed": word})["seed"] for word in ("yes", "TRUE", "0", "off")] == [
        True,
        True,
        False,
        False,
    ]


def changed(tmp_path: Path, *changes: tuple[str, str]) -> str:
    text = (GRAPHS / "flux-tiny.yaml").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "other.yaml"
    path.write_text(
        text.replace("configs/", f"{GRAPHS}/configs/").replace(
            "tokenizers/", f"{GRAPHS}/tokenizers/"
        )
    )
    return load(path).digest


@pytest.mark.parametrize(
    "change",
    [
        ("# A tiny FLUX", "# Something else"),
        ("name: flux-tiny", "name: other"),
        ("  height: $height\n      width: $width", "  width: $width\n      height: $height"),
        ("dtype: bfloat16}", "seed: 5, dtype: bfloat16}"),
        ("name: flux-tiny", "name: flux-tiny\nsource: some/where"),
    ],
)
def test_digest_ignores(change: tuple[str, str], tmp_path: Path) -> None:
    assert changed(tmp_path, change) == load(GRAPHS / "flux-tiny.yaml").digest


@pytest.mark.parametrize(
    "change",
    [
        ("dtype: bfloat16}", "dtype: float32, precision: [bfloat16]}"),
        ("dtype: bfloat16}", "dtype: bfloat16, precision: [bfloat16, nf4]}"),
        ("tiny-t5.json", "t5-xxl.json"),
        ("diffusers.AutoencoderKL", "diffusers.AutoencoderTiny"),
        ("default: 4,", "default: 5,"),
        ("steps: {type: int, default: 4, minimum: 1}\n", "{}\n"),
        ("config: configs/flux-scheduler.json", "config: {}"),
        ("model_max_length: 77", "model_max_length: 76"),
        ("diffusers.FluxPipeline", "diffusers.FluxControlPipeline"),
        ("uses: [vae]", "uses: [vae, transformer]"),
    ],
)
def test_digest_notices(change: tuple[str, str], tmp_path: Path) -> None:
    changes = [("steps: $steps", "steps: 4")] if change[1] == "{}\n" else []
    change = (f"  {change[0]}", "") if change[1] == "{}\n" else change
    assert changed(tmp_path, change, *changes) != load(GRAPHS / "flux-tiny.yaml").digest


def test_digest_of_a_config_is_the_same_inline_or_in_a_file(tmp_path: Path) -> None:
    inline = json.dumps(json.loads((GRAPHS / "configs/tiny-t5.json").read_text()))
    assert (
        changed(tmp_path, ("configs/tiny-t5.json", inline))
        == load(GRAPHS / "flux-tiny.yaml").digest
    )


def test_digest_notices_another_tokenizer(tmp_path: Path) -> None:
    other = tmp_path / "bytes.json"
    other.write_text((GRAPHS / "tokenizers/bytes.json").read_text() + " ")
    assert (
        changed(tmp_path, ("tokenizers/bytes.json", "bytes.json"))
        != load(GRAPHS / "flux-tiny.yaml").digest
    )


def test_without_sources(graph: Graph) -> None:
    bare = graph.without_sources()
    assert bare.digest == graph.digest
    assert graph.component("vae").source == "black-forest-labs/FLUX.1-dev/vae"
    assert bare.component("vae").source is None
    assert bare.parts["tokenizer"].source is None
    unknown = replace(graph, components={"vae": replace(graph.component("vae"), has_config=False)})
    with pytest.raises(InputError, match=r"components\.vae: random weights need a config"):
        unknown.without_sources()


def test_ties_keep_the_order_given() -> None:
    def stage(name: str, *producers: str) -> Stage:
        return Stage(name, "x", (), {p: Reference("stage", p, "out") for p in producers})

    stages = {
        s.name: s for s in (stage("z"), stage("last", "b", "a"), stage("b", "z"), stage("a", "z"))
    }
    assert [s.name for s in order_stages(stages)] == ["z", "b", "a", "last"]
    with pytest.raises(CycleError):
        order_stages({**stages, "z": stage("z", "last")})


def test_schema_is_current() -> None:
    assert (GRAPHS / "graphrun.schema.json").read_text() == schema_text(), "run: make docs"
    assert json.loads(schema_text())["$defs"]["StageSpec"]["properties"]["op"]["anyOf"][0][
        "enum"
    ] == sorted(OPERATIONS)
    for path in GRAPHS.glob("*.yaml"):
        head = "# yaml-language-server: $schema=graphrun.schema.json\n"
        assert path.read_text().startswith(head), f"{path.name} begins with {head}"


def test_every_key_of_the_schema_is_described() -> None:
    whole = json.loads(schema_text())
    for name, part in {"graph": whole, **whole["$defs"]}.items():
        assert [
            key for key, value in part["properties"].items() if not value.get("description")
        ] == [], name
