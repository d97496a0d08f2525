"""The ops on the CPU, without a plan: diffusers' own code, split into stages."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from stage_runs import stages_of

import graphrun
from graphrun.errors import GraphError
from graphrun.modules.build import build, build_part
from graphrun.ops.diffusion import returned_names
from graphrun.ops.pipeline import assemble, without_steps
from graphrun.ops.runner import in_order

GRAPHS = Path(__file__).parents[2] / "graphs"
CPU = torch.device("cpu")


def run(graph: Any, after_stage: Any = None, **inputs: Any) -> dict[str, Any]:
    modules = {name: build(component, graph) for name, component in graph.components.items()}
    return stages_of(
        graph, modules, graph.resolve({"steps": 1, **inputs}), after_stage=after_stage
    ).run()


@pytest.mark.sweep("more")
def test_a_vae_in_fp32_decodes_latents_of_a_half_precision_unet(
    edit_graph: Callable[..., Any],
) -> None:
    half = [
        (f"{name}.json, dtype: float32", f"{name}.json, dtype: bfloat16")
        for name in ("clip", "clip-2", "sdxl-unet")
    ]
    graph = edit_graph("sdxl-tiny", *((f"tiny-{old}", f"tiny-{new}") for old, new in half))
    dtypes: dict[str, torch.dtype] = {}

    def after_stage(stage: str, outputs: Mapping[str, Any]) -> None:
        if stage == "denoise":
            dtypes["latents"] = outputs["latents"].dtype

    image = run(graph, after_stage)["image"]
    assert dtypes == {"latents": torch.bfloat16}
    assert image.size == (128, 128)


def test_a_plans_order_leaves_out_stages_without_calls() -> None:
    """They run before the first stage that reads them, or last."""
    producers = {"a": (), "b": (), "double": ("a",), "c": ("b", "double"), "last": ("c",)}
    graph = SimpleNamespace(producers=producers.__getitem__)
    assert in_order(graph, list(producers), ["b", "a", "c"]) == ["b", "a", "double", "c", "last"]
    assert in_order(graph, ["double", "c", "last"], ["c"]) == ["double", "c", "last"]
    assert in_order(graph, list(producers), ()) == list(producers)


def test_a_chain_of_stages_longer_than_the_stack_is_ordered() -> None:
    count = 2 * sys.getrecursionlimit()
    producers = {f"s{i}": [f"s{i - 1}"] if i else [] for i in range(count)}
    graph: Any = SimpleNamespace(producers=producers.__getitem__)
    assert in_order(graph, list(producers), [f"s{count - 1}"]) == list(producers)


@pytest.mark.sweep("more")
def test_a_value_is_dropped_after_its_last_consumer(edit_graph: Callable[..., Any]) -> None:
    second_stage = """  again:
    op: denoise
    uses: [transformer]
    with: {embeds: $encode.embeds, height: $height, width: $width, steps: $steps, seed: $seed}

outputs: {latents: $again.latents, """
    graph = edit_graph("flux-tiny", ("outputs: {", second_stage))
    assert [stage.name for stage in graph.stages] == ["encode", "denoise", "decode", "again"]
    latents: list[weakref.ref[torch.Tensor]] = []
    alive: dict[str, bool] = {}

    def after_stage(stage: str, outputs: Mapping[str, Any]) -> None:
        if stage == "denoise":
            latents.append(weakref.ref(outputs["latents"]))
        alive[stage] = bool(latents) and latents[0]() is not None

    assert run(graph, after_stage)["latents"].device == CPU
    assert alive == {"encode": False, "denoise": True, "decode": True, "again": False}


def test_calling_a_component_that_the_stage_does_not_list_is_refused(
    edit_graph: Callable[..., Any],
) -> None:
    graph = edit_graph(
        "flux-tiny",
        ("uses: [text_encoder, text_encoder_2]", "uses: [text_encoder]"),
        ("uses: [vae]", "uses: [vae, text_encoder_2]"),
    )
    with pytest.raises(
        GraphError,
        match=(
            r"encode calls text_encoder_2\.forward.*list text_encoder_2: add it to "
            r"stages\.encode\.uses"
        ),
    ):
        run(graph)


def test_a_missing_component_of_the_pipeline_is_named(edit_graph: Callable[..., Any]) -> None:
    graph = edit_graph("flux-tiny", ("  scheduler: {class", "  planner: {class"))
    with pytest.raises(GraphError, match="needs scheduler: add them under components: or parts:"):
        run(graph)


def test_a_guider_passes_no_state_to_the_next_stage(edit_graph: Callable[..., Any]) -> None:
    graph = edit_graph("flux-tiny", ("diffusers.FluxPipeline", "diffusers.HunyuanImagePipeline"))
    guider = diffusers.AdaptiveProjectedMixGuidance(guidance_scale=3.0)
    guider.momentum_buffer = torch.ones(4)
    guider_copy = assemble(graph, {}, {"guider": guider}, CPU, partial=True).guider
    assert guider_copy.momentum_buffer is None
    assert guider_copy.config == guider.config


@pytest.mark.sweep("more")
def test_the_picture_depends_on_the_seed(edit_graph: Callable[..., Any]) -> None:
    graph = edit_graph("flux-tiny")
    first, second, third = (run(graph, seed=seed)["image"].tobytes() for seed in (1, 1, 2))
    assert first == second != third


def test_a_scheduler_without_steps_leaves_the_original_unchanged() -> None:
    graph = graphrun.load(GRAPHS / "sdxl-tiny.yaml")
    scheduler = build_part(graph.parts["scheduler"], graph)
    ended = without_steps(scheduler)
    ended.set_timesteps(5)
    assert (len(ended.timesteps), ended.init_noise_sigma) == (0, 1.0)
    scheduler.set_timesteps(5)
    assert len(scheduler.timesteps) == 5


def test_embeddings_have_the_names_of_the_pipelines_return_statement() -> None:
    from diffusers import FluxPipeline, StableDiffusionXLPipeline

    assert returned_names(FluxPipeline.encode_prompt, 3) == (
        "prompt_embeds",
        "pooled_prompt_embeds",
        "text_ids",
    )
    assert returned_names(StableDiffusionXLPipeline.encode_prompt, 4) == (
        "prompt_embeds",
        "negative_prompt_embeds",
        "pooled_prompt_embeds",
        "negative_pooled_prompt_embeds",
    )


def embeds(name: str, **inputs: Any) -> dict[str, torch.Tensor]:
    graph = graphrun.load(GRAPHS / f"{name}.yaml").until("encode")
    modules = {key: build(component, graph) for key, component in graph.components.items()}
    result: dict[str, torch.Tensor] = stages_of(graph, modules, graph.resolve(inputs)).run()[
        "embeds"
    ]
    return result


@pytest.mark.sweep("more")
def test_a_negative_prompt_that_needs_a_second_call_is_encoded_for_true_guidance_only() -> None:
    plain = embeds("hunyuan-video-tiny", negative_prompt="dark")
    guided = embeds("hunyuan-video-tiny", negative_prompt="dark", true_cfg_scale=2.0)
    assert list(plain) == ["prompt_embeds", "pooled_prompt_embeds", "prompt_attention_mask"]
    assert list(guided) == [*plain, *(f"negative_{name}" for name in plain)]
    assert torch.equal(guided["prompt_embeds"], plain["prompt_embeds"])
    assert not torch.equal(guided["pooled_prompt_embeds"], guided["negative_pooled_prompt_embeds"])


@pytest.mark.sweep("more")
def test_sdxl_takes_zeros_without_a_negative_prompt_as_diffusers_does() -> None:
    absent, empty = embeds("sdxl-tiny"), embeds("sdxl-tiny", negative_prompt="")
    for name in ("negative_prompt_embeds", "negative_pooled_prompt_embeds"):
        assert not absent[name].any()
        assert absent[name].shape == empty[name].shape
        assert empty[name].any()
    assert torch.equal(absent["prompt_embeds"], empty["prompt_embeds"])


def test_embeddings_of_a_second_encoder_have_the_names_of_call_arguments() -> None:
    result = embeds("hunyuan-dit-tiny")
    first = [name for name in result if not name.endswith("_2")]
    assert list(result) == [*first, *(f"{name}_2" for name in first)]
    assert result["prompt_embeds"].shape == (1, 77, 64)
    assert result["prompt_embeds_2"].shape == (1, 256, 96)


def test_arguments_default_to_those_of_the_pipelines_call(edit_graph: Callable[..., Any]) -> None:
    line = "  max_sequence_length: {type: int, default: 64, minimum: 1, maximum: 256}\n"
    graph = edit_graph(
        "wan-tiny", (", max_sequence_length: $max_sequence_length}", "}"), (line, "")
    )
    modules = {key: build(component, graph) for key, component in graph.components.items()}
    result = stages_of(graph.until("encode"), modules, graph.resolve({})).run()["embeds"]
    assert result["prompt_embeds"].shape[1] == 512, (
        "of WanPipeline.__call__; its encode_prompt alone says 226"
    )


def test_the_stage_sets_the_vaes_tiling() -> None:
    graph = graphrun.load(GRAPHS / "hunyuan-video-tiny.yaml")
    modules = {key: build(component, graph) for key, component in graph.components.items()}
    for tiling in (True, False):
        stages_of(
            graph,
            modules,
            graph.resolve({"steps": 1, "height": 32, "width": 32, "frames": 1, "tiling": tiling}),
        ).run()
        assert modules["vae"].use_tiling is tiling


def test_without_guidance_no_stage_encodes_a_negative_prompt(
    edit_graph: Callable[..., Any],
) -> None:
    """AuraFlow's call would encode an empty negative prompt for its default guidance, and the
    decode stage has no text encoder."""
    graph = edit_graph("auraflow-tiny")
    assert "text_encoder" not in graph.stage("decode").uses
    assert run(graph, guidance_scale=1.0)["image"].size == (
        graph.inputs["width"].default,
        graph.inputs["height"].default,
    )
