"""Imported pipelines run by their plans under the least budget: the pipeline's own output, bit for
bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from campaign import sampled
from diffusers import AutoencoderKL
from import_whole import equal, of_graph, planned, run, saved
from safetensors.torch import save_file
from tiny_pipelines import cases

import graphrun
from graphrun.errors import PlanError
from graphrun.modules.build import build

THREE = (
    "FluxPipeline",
    "StableDiffusionPipeline",
    "StableDiffusionXLPipeline",
    "StableDiffusion3Pipeline",
    "CogView4Pipeline",
    "PixArtSigmaPipeline",
    "WanPipeline-two-experts",
)
WHOLE = (
    "StableAudioPipeline",
    "StableDiffusionXLImg2ImgPipeline",
    "StableDiffusionControlNetPipeline-two",
    "KandinskyV22CombinedPipeline",
    "MarigoldDepthPipeline",
    "KandinskyV22Pipeline",  # takes tensors
    "ZImagePipeline",  # caches a table of positions
)


ALWAYS = (
    "FluxPipeline",
    "WanPipeline-two-experts",
    "StableDiffusionControlNetPipeline-two",
    "KandinskyV22Pipeline",
)


@pytest.mark.parametrize("name", sampled([*THREE, *WHOLE], ALWAYS, "imports"))
def test_an_imported_graph_makes_the_pipelines_own_output(name: str, tmp_path: Path) -> None:
    source = saved(name, tmp_path)
    graph = source.imported().write(tmp_path / "graph.yaml")
    assert [stage.op for stage in graph.stages] == (
        ["encode_prompt", "denoise", "decode"] if name in THREE else ["call"]
    )
    trace = run(graph, planned(graph, source.inputs, at_minimum=True), source.inputs)
    assert equal(next(iter(trace.outputs.values())), source.expected())


@pytest.mark.sweep("more")
def test_four_encoders_are_in_the_encode_stage(tmp_path: Path) -> None:
    source = of_graph("hidream-tiny", tmp_path)
    graph = source.imported().write(tmp_path / "graph.yaml")
    assert graph.stage("encode").uses == (
        "text_encoder",
        "text_encoder_2",
        "text_encoder_3",
        "text_encoder_4",
    )
    trace = run(graph, planned(graph), source.inputs)
    assert equal(trace.outputs["image"], source.expected())


@pytest.mark.sweep("more")
def test_no_negative_prompt_differs_from_an_empty_one(tmp_path: Path) -> None:
    """SDXL uses zeros as the negative embeddings only where there is no negative prompt; the graph
    supports both."""
    source = saved("StableDiffusionXLPipeline", tmp_path)
    graph = source.imported().write(tmp_path / "graph.yaml")
    assert not graph.inputs["negative_prompt"].required
    for extra_inputs in ({}, {"negative_prompt": ""}):
        inputs = {**source.inputs, **extra_inputs}
        solution = planned(graph, inputs, cache=tmp_path / "cache")
        assert equal(
            run(graph, solution, inputs).outputs["image"], source.expected(**extra_inputs)
        ), extra_inputs


@pytest.mark.parametrize(
    ("name", "text"), [("StableDiffusionXLPipeline", "blurry"), ("StableAudioPipeline", "")]
)
def test_a_negative_prompt_that_is_set_is_the_inputs_default(
    name: str, text: str, tmp_path: Path
) -> None:
    source = saved(name, tmp_path)
    graph = source.imported(input_defaults={**source.sets, "negative_prompt": text}).write(
        tmp_path / "graph.yaml"
    )
    assert graph.inputs["negative_prompt"].default == text


def test_inputs_other_than_the_defaults_give_the_pipelines_own_output(tmp_path: Path) -> None:
    source = saved("StableDiffusionPipeline", tmp_path)
    graph = source.imported().write(tmp_path / "graph.yaml")
    inputs = {**source.inputs, "batch": 2, "guidance_scale": 1.0, "steps": 3, "height": 32}
    image = run(graph, planned(graph, inputs), inputs).outputs["image"]
    extra_inputs = {
        "num_images_per_prompt": 2,
        "guidance_scale": 1.0,
        "num_inference_steps": 3,
        "height": 32,
    }
    assert equal(image, source.expected(**extra_inputs))


def test_whole_is_one_stage_with_the_same_output(tmp_path: Path) -> None:
    source = saved("StableDiffusionPipeline", tmp_path)
    graph = source.imported(whole=True).write(tmp_path / "graph.yaml")
    assert [stage.op for stage in graph.stages] == ["call"]
    assert equal(run(graph, planned(graph), source.inputs).outputs["image"], source.expected())


@pytest.mark.sweep("more")
def test_a_vae_that_decodes_in_tiles_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = AutoencoderKL._decode

    def tiles_alone(vae: AutoencoderKL, *arguments: Any, **options: Any) -> Any:
        if not vae.use_tiling:
            raise NotImplementedError("in tiles alone")
        return decode(vae, *arguments, **options)

    monkeypatch.setattr(AutoencoderKL, "_decode", tiles_alone)
    source = saved("StableDiffusionPipeline", tmp_path)
    graph = source.imported().write(tmp_path / "graph.yaml")
    assert (graph.stage("decode").arguments["tiling"], graph.stage("decode").options) == (True, ())
    source.pipe.vae.enable_tiling()
    assert equal(run(graph, planned(graph), source.inputs).outputs["image"], source.expected())


@pytest.mark.sweep("more")
def test_an_argument_that_is_a_mapping_is_in_the_file(tmp_path: Path) -> None:
    source = saved("HunyuanVideoPipeline", tmp_path)
    mapping = {"template": "a film of {}", "crop_start": 3}
    graph = source.imported(input_defaults={**source.sets, "prompt_template": mapping}).write(
        tmp_path / "graph.yaml"
    )
    assert graph.stage("make").arguments["prompt_template"] == mapping
    trace = run(graph, planned(graph), source.inputs)
    assert equal(trace.outputs["video"], source.expected(prompt_template=mapping))
    assert not equal(trace.outputs["video"], source.expected())


def test_tensors_are_files_of_the_planned_shape(tmp_path: Path) -> None:
    source = saved("KandinskyV22Pipeline", tmp_path)
    graph = source.imported().write(tmp_path / "graph.yaml")
    assert graph.inputs["image_embeds"].sizes == {"shape": (1, 32)}
    solution, files = planned(graph), dict[str, Any](source.inputs)
    for name in ("image_embeds", "negative_image_embeds"):
        save_file({"of any name": source.inputs[name]}, tmp_path / f"{name}.safetensors")
        files[name] = str(tmp_path / f"{name}.safetensors")
    assert equal(run(graph, solution, files).outputs["image"], source.expected())
    with pytest.raises(PlanError, match="the plan is for image_embeds=float32"):
        run(graph, solution, files | {"image_embeds": torch.zeros(2, 32)})


@pytest.mark.sweep("more")
def test_a_live_pipeline_is_the_same_graph(tmp_path: Path) -> None:
    source = saved("StableDiffusionPipeline", tmp_path)
    live = graphrun.from_pipeline(source.pipe)
    live_graph = live.to_yaml(tmp_path / "live.yaml", inputs=source.sets)
    file_graph = source.imported().write(tmp_path / "read.yaml")
    assert live_graph.stages == file_graph.stages
    assert live_graph.inputs == file_graph.inputs
    assert {n: (c.class_path, c.dtype) for n, c in live_graph.components.items()} == {
        n: (c.class_path, c.dtype) for n, c in file_graph.components.items()
    }
    inputs = {**source.inputs, **{k: v for k, v in source.sets.items() if k in live.graph.inputs}}
    trace = run(live.graph, planned(live.graph, inputs, pinned=True), inputs, live.graph_modules)
    assert equal(trace.outputs["image"], source.expected())


@pytest.mark.parametrize(
    ("name", "component"), [("WanPipeline", "transformer"), ("ZImagePipeline", "text_encoder")]
)
def test_a_pipeline_cast_as_a_whole_keeps_its_dtypes(
    name: str, component: str, tmp_path: Path
) -> None:
    """``pipe.to(dtype)`` also casts modules that `from_pretrained` keeps in float32, and tables of
    positions that it computes in float32."""
    source = saved(name, tmp_path)
    source.pipe.to(torch.bfloat16)
    live = graphrun.from_pipeline(source.pipe)
    graph, modules = live.to_yaml(tmp_path / "a.yaml", inputs=source.sets), live.graph_modules
    assert [c.name for c in graph.components.values() if not c.keep_fp32] == [component]
    built = build(graph.components[component], graph)
    assert {tensor.dtype for tensor in (*built.parameters(), *built.buffers())} == {torch.bfloat16}
    trace = run(graph, planned(graph, source.inputs, at_minimum=True), source.inputs, modules)
    assert equal(next(iter(trace.outputs.values())), source.expected())


def test_a_module_under_two_names_has_its_tensors_once() -> None:
    pipe = cases()["WanPipeline-two-experts"].build()
    pipe.register_modules(transformer_2=pipe.transformer)
    modules = graphrun.from_pipeline(pipe).graph_modules
    first, second = modules["transformer"], modules["transformer_2"]
    assert (first is pipe.transformer, second is first) == (True, False)
    for tensor, twin in zip(first.parameters(), second.parameters(), strict=True):
        assert (tensor is twin, tensor.data_ptr()) == (False, twin.data_ptr())


@pytest.mark.sweep("more")
def test_a_module_under_two_names_runs_under_both(tmp_path: Path) -> None:
    source = saved("WanPipeline-two-experts", tmp_path)
    source.pipe.register_modules(transformer_2=source.pipe.transformer)
    live = graphrun.from_pipeline(source.pipe)
    graph, modules = live.to_yaml(tmp_path / "a.yaml", inputs=source.sets), live.graph_modules
    trace = run(graph, planned(graph, source.inputs, at_minimum=True), source.inputs, modules)
    assert equal(next(iter(trace.outputs.values())), source.expected())
