"""Graphs with one `call` stage under the least budget: the pipeline's own output bit for bit,
within the planned bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from call_graphs import Called, called, pixels, written
from campaign import sampled
from tiny_pipelines import WIDTH, cases, picture, tiny

from graphrun.errors import GraphError
from graphrun.graph.loading import load
from graphrun.model.plan import Stream
from graphrun.modules.build import build
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.sim import Machine
from graphrun.solve.infeasible import smallest_budget
from graphrun.solve.solve import solve

CASES = {
    "StableDiffusionInpaintPipeline": "image",
    "StableDiffusionControlNetPipeline-two": "image",
    "StableDiffusionXLImg2ImgPipeline": "image",
    "StableDiffusionXLControlNetImg2ImgPipeline": "image",
    "FluxControlNetPipeline": "image",
    "SanaPipeline": "image",
    "WanImageToVideoPipeline": "video",
    "StableVideoDiffusionPipeline": "video",
    "CogVideoXVideoToVideoPipeline": "video",
    "StableAudioPipeline": "audio",
    "KandinskyV22CombinedPipeline": "image",
    "KandinskyV22PriorPipeline": "image_embeds",
    "MarigoldDepthPipeline": "prediction",
}


# Two pictures to one; a video to a video; a text to tensors.
ALWAYS = (
    "StableDiffusionControlNetPipeline-two",
    "CogVideoXVideoToVideoPipeline",
    "KandinskyV22PriorPipeline",
)


@pytest.mark.parametrize("name", sampled(CASES, ALWAYS, "pipelines"))
def test_a_call_stage_gives_the_pipelines_own_output_in_the_planned_bytes(
    name: str, tmp_path: Path
) -> None:
    case = called(name, tmp_path, CASES[name])
    problem = case.problem()
    output, expected = pixels(case.run(problem).outputs[CASES[name]]), pixels(case.expected)
    assert np.array_equal(output, expected.reshape(output.shape))
    assert {phase.stage for phase in problem.phases} == {"make"}
    assert {use.component for phase in problem.phases for use in phase.uses} == set(case.modules)


def test_components_entered_one_after_another_have_a_phase_each_and_are_streamed(
    tmp_path: Path,
) -> None:
    case = called("StableDiffusionXLImg2ImgPipeline", tmp_path)
    problem = case.problem()
    names = [use.component for phase in problem.phases for use in phase.uses]
    assert names == ["text_encoder", "text_encoder_2", "vae", "unet", "vae"]
    tight = case.problem(smallest_budget(problem))
    assert any(
        isinstance(action, Stream) for slot in solve(tight).plan.slots for action in slot.actions
    )


@pytest.mark.sweep("more")
def test_an_ip_adapter_adds_its_tensors_and_depends_on_its_picture(tmp_path: Path) -> None:
    """Its output is that of the same pipeline after diffusers' own `load_ip_adapter`."""
    from safetensors.torch import save_file

    case = cases()["StableDiffusionPipeline"]
    pipe = case.build()
    pipe.image_encoder, pipe.feature_extractor = (
        tiny("CLIPVisionModelWithProjection").eval(),
        tiny("CLIPImageProcessor"),
    )
    pipe.register_modules(
        image_encoder=pipe.image_encoder, feature_extractor=pipe.feature_extractor
    )
    state = adapter_of(pipe.unet, WIDTH)
    save_file(
        {f"{part}.{key}": tensor for part in state for key, tensor in state[part].items()},
        tmp_path / "adapter.safetensors",
    )
    arguments = {**case.arguments(), "ip_adapter_image": picture(32)}
    del arguments["output_type"]
    path = written(pipe, case, arguments, {"ip_adapter_image": picture(32)}, tmp_path, "image")
    data = yaml.safe_load(path.read_text())
    data["components"]["unet"]["ip_adapters"] = [{"file": "adapter.safetensors", "scale": 0.7}]
    path.write_text(yaml.safe_dump(data))
    graph = load(path)
    modules = {name: build(component, graph) for name, component in graph.components.items()}
    assert {
        name for name in modules["unet"].state_dict() if "ip_" in name or "encoder_hid_proj" in name
    }
    for name, module in modules.items():  # the same weights in diffusers' own pipeline
        getattr(pipe, name).load_state_dict(module.state_dict(), strict=False)
    pipe.unet._load_ip_adapter_weights([state], low_cpu_mem_usage=False)
    pipe.set_ip_adapter_scale(0.7)
    image = pipe(
        **arguments, num_inference_steps=case.steps, generator=torch.Generator().manual_seed(3)
    ).images[0]
    graph_case = Called(
        graph, {"ip_adapter_image": picture(32)}, modules, image, SimulatedDevice(Machine())
    )
    assert np.array_equal(
        pixels(graph_case.run(graph_case.problem()).outputs["image"]), pixels(image)
    )
    other = Called(
        graph, {"ip_adapter_image": picture(32, 1)}, modules, image, SimulatedDevice(Machine())
    )
    assert not np.array_equal(pixels(other.run(other.problem()).outputs["image"]), pixels(image))
    # block by block, from the file
    fresh = Called(graph, graph_case.inputs, {}, image, graph_case.device)
    assert np.array_equal(pixels(fresh.run(fresh.problem()).outputs["image"]), pixels(image))


def test_a_file_that_is_not_an_adapter_is_an_error_at_the_components_line(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    case = cases()["StableDiffusionPipeline"]
    path = written(case.build(), case, case.arguments(), {}, tmp_path, "image")
    wrong = {
        "a.safetensors": "does not fit",
        "b.safetensors": "cannot be read",
        "c.safetensors": "no such file",
    }
    save_file({"image_proj.proj.weight": torch.zeros(128, 32)}, tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_text("no tensors")
    for component, file in (("unet", "a"), ("unet", "b"), ("unet", "c"), ("vae", "a")):
        data = yaml.safe_load(path.read_text())
        data["components"][component]["ip_adapters"] = [{"file": f"{file}.safetensors"}]
        (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(data))
        message = (
            wrong[f"{file}.safetensors"]
            if component == "unet"
            else "AutoencoderKL does not support IP-Adapters"
        )
        with pytest.raises(GraphError, match=f"wrong.yaml:.*{component}.ip_adapters.*{message}"):
            made(tmp_path / "wrong.yaml", component)


def made(path: Path, component: str) -> torch.nn.Module:
    graph = load(path)
    return build(graph.components[component], graph)


def adapter_of(unet: Any, width: int, tokens: int = 4) -> dict[str, dict[str, torch.Tensor]]:
    """An IP-Adapter with random weights, in its authors' layout."""
    wide, random = unet.config.cross_attention_dim, torch.Generator().manual_seed(0)
    crossed = [name for name in unet.attn_processors if name.endswith("attn2.processor")]
    keys: dict[str, torch.Tensor] = {}
    for number, name in enumerate(crossed):
        rows = unet.get_submodule(name.removesuffix(".processor")).to_k.weight.shape[0]
        for key in ("k", "v"):
            keys[f"{2 * number + 1}.to_{key}_ip.weight"] = (
                torch.randn(rows, wide, generator=random) * 0.1
            )
    projection = {
        "proj.weight": torch.randn(tokens * wide, width, generator=random) * 0.1,
        "proj.bias": torch.zeros(tokens * wide),
        "norm.weight": torch.ones(wide),
        "norm.bias": torch.zeros(wide),
    }
    return {"image_proj": projection, "ip_adapter": keys}
