"""Equal keys mean equal bits: everything an output depends on is in its key, and nothing else."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import graphrun
from graphrun.batch.cache.keys import Choices, StageKeys, code_digest, dependencies
from graphrun.batch.cache.reuse import Reuse
from graphrun.disk_store import DATABASE, Store
from graphrun.errors import GraphError
from graphrun.graph.parts import Adapter

GRAPHS = Path(__file__).parent.parent.parent / "graphs"


@pytest.fixture(scope="module")
def flux() -> Any:
    return graphrun.load(GRAPHS / "flux-tiny.yaml")


def key(
    graph: Any,
    stage: str = "encode",
    choices: Choices | None = None,
    device: str = "sim",
    **inputs: Any,
) -> str | None:
    return StageKeys(
        graph, graph.resolve(inputs), device, lambda path: str(path.stat().st_size)
    ).key(stage, choices)


def component(name: str, **changes: Any) -> Callable[[Any], Any]:
    return lambda graph: replace(
        graph, components={**graph.components, name: replace(graph.components[name], **changes)}
    )


def test_what_a_stage_reads_is_in_its_key_and_what_it_does_not_read_is_not(flux: Any) -> None:
    assert key(flux) == key(flux, seed=4, steps=9), "seeds and steps are the denoiser's"
    assert key(flux) != key(flux, prompt="another")
    assert key(flux) == key(flux.until("encode"))
    assert key(flux, "denoise") != key(flux, "denoise", seed=4)
    assert key(flux, "denoise") != key(flux, "denoise", prompt="another"), "through the embeddings"


@pytest.mark.parametrize(
    "change",
    [
        component("text_encoder_2", seed=7),
        component("text_encoder_2", dtype="float32"),
        component("text_encoder", config={"changed": 1}),
        lambda graph: replace(graph, pipeline="diffusers.OtherPipeline"),
        lambda graph: replace(
            graph, parts={**graph.parts, "tokenizer": replace(graph.parts["tokenizer"], config={})}
        ),
    ],
)
def test_whatever_makes_the_embeddings_makes_another_key(
    flux: Any, change: Callable[[Any], Any]
) -> None:
    assert key(change(flux)) not in (None, key(flux))


def test_precision_device_and_option_are_in_the_key(flux: Any) -> None:
    keys = {
        key(flux, "denoise"),
        key(flux, "denoise", device="cuda"),
        key(flux, "denoise", Choices({"transformer": ("nf4", "device")})),
        key(flux, "denoise", Choices({"transformer": ("bfloat16", "cpu")})),
        key(flux, "denoise", Choices({"text_encoder_2": ("int8", "device")})),
        key(flux, "denoise", Choices(options={"denoise": "split"})),
    }
    assert len(keys) == 6
    assert key(flux, "denoise", Choices({"transformer": ("bfloat16", "device")})) == key(
        flux, "denoise"
    )
    assert key(flux, "encode", Choices({"transformer": ("nf4", "device")})) == key(flux)


def test_weights_are_in_the_key_by_what_they_hold(flux: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"one")
    graph = component("text_encoder_2", source=str(tmp_path))(flux)
    old_key = StageKeys(graph, graph.resolve({}), "sim", Store(tmp_path / "index").file_digest).key(
        "encode"
    )
    (tmp_path / "model.safetensors").write_bytes(b"two")
    assert StageKeys(graph, graph.resolve({}), "sim", Store(tmp_path / "index").file_digest).key(
        "encode"
    ) not in (None, old_key)
    sourceless = component("text_encoder_2", source=str(tmp_path / "nowhere"))(flux)
    assert key(sourceless) is None, "what has no digest is not cached"


def test_a_lora_is_in_the_key_by_what_its_file_holds_of_the_stages_that_use_it(
    flux: Any, tmp_path: Path
) -> None:
    def keys(stage: str, component_name: str, scale: float = 1.0) -> str | None:
        graph = component(component_name, loras=(Adapter(str(file), scale),))(flux)
        return StageKeys(
            graph, graph.resolve({}), "sim", Store(tmp_path / "index").file_digest
        ).key(stage)

    file = tmp_path / "style.safetensors"
    file.write_bytes(b"one")
    first, of_transformer = keys("encode", "text_encoder_2"), keys("encode", "transformer")
    assert len({first, keys("encode", "text_encoder_2", 0.5), key(flux)}) == 3
    file.write_bytes(b"two, trained longer")
    assert keys("encode", "text_encoder_2") not in (None, first)
    assert keys("encode", "transformer") == of_transformer, (
        "embeddings do not depend on the transformer's weights"
    )
    file.unlink()
    assert keys("encode", "text_encoder_2") is None
    with pytest.raises(GraphError, match="text_encoder_2.loras: no such file"):
        dependencies(component("text_encoder_2", loras=(Adapter(str(file), 1.0),))(flux), "sim")


def test_stages_that_only_cached_stages_need_are_not_looked_up(flux: Any, tmp_path: Path) -> None:
    inputs = flux.resolve({})
    reuse = Reuse(Store(tmp_path), flux, inputs, "sim", scope="all")
    assert reuse.find() == {}
    reuse.keep("encode", {"embeds": {"prompt_embeds": 1}})
    reuse.keep("decode", {"image": 3})
    assert reuse.find() == {"encode.embeds": {"prompt_embeds": 1}}, "images are not cached"
    reuse.keep("denoise", {"latents": 2})
    assert reuse.find() == {"encode.embeds": {"prompt_embeds": 1}, "denoise.latents": 2}, (
        "decode reads both"
    )
    assert Reuse(Store(tmp_path), flux, inputs, "sim").find() == {
        "encode.embeds": {"prompt_embeds": 1}
    }


def test_a_damaged_value_is_computed_again_and_an_unusable_folder_fails_nothing(
    flux: Any, tmp_path: Path
) -> None:
    notes: list[str] = []
    reuse = Reuse(Store(tmp_path / "cache"), flux, flux.resolve({}), "sim", note=notes.append)
    reuse.keep("encode", {"embeds": {}})
    with sqlite3.connect(tmp_path / "cache" / DATABASE) as rows:
        rows.execute("UPDATE contents SET data = x''")
    assert reuse.find() == {}
    assert notes == []
    (tmp_path / "file").touch()
    damaged = Reuse(
        Store(tmp_path / "file" / "cache"), flux, flux.resolve({}), "sim", note=notes.append
    )
    damaged.keep("encode", {"embeds": {}})
    damaged.keep("encode", {"embeds": {}})
    assert damaged.find() == {}
    assert len(notes) == 1, "it is reported once"


def test_the_code_that_computes_outputs_is_in_every_key(
    flux: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    old_key, digest = key(flux), code_digest()
    read_bytes = Path.read_bytes
    changes = {"ops": "steps.py", "modules": "build.py"}
    for package, name in changes.items():

        def edited(path: Path, package: str = package, name: str = name) -> bytes:
            return read_bytes(path) + (
                b"# edited" if (path.parent.name, path.name) == (package, name) else b""
            )

        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", edited)
            assert code_digest() != digest
            assert key(flux) != old_key
