"""Building components and parts: sizes, shapes and dtypes, random weights, weights from a source,
and errors that name files."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from campaign import sampled
from diffusers import DPMSolverMultistepScheduler
from diffusers.pipelines.ace_step import AceStepAudioTokenDetokenizer, AceStepAudioTokenizer
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphrun.errors import GraphError
from graphrun.graph.graph import Graph
from graphrun.graph.loading import load
from graphrun.graph.parts import Component, Part
from graphrun.graph.values import outside
from graphrun.modules.build import build, build_part, draft, meta_module, resolve_class
from graphrun.modules.sources import TILE, RandomSource

GRAPHS = Path(__file__).parents[2] / "graphs"

T5_XXL, CLIP_L, CLIP_L_PROJECTED, CLIP_G = 4_762_310_656, 123_060_480, 123_650_304, 694_659_840
VAE_4, VAE_16, VAE_WAN = 83_653_863, 83_819_683, 126_892_531

# Parameter counts of the published checkpoints.
PARAMETERS = {
    "flux-dev": {
        "text_encoder": CLIP_L,
        "text_encoder_2": T5_XXL,
        "transformer": 11_901_408_320,
        "vae": VAE_16,
    },
    "sdxl": {"text_encoder": CLIP_L, "text_encoder_2": CLIP_G, "unet": 2_567_463_684, "vae": VAE_4},
    "hidream": {
        "text_encoder": 123_781_632,
        "text_encoder_2": 694_840_320,
        "text_encoder_3": T5_XXL,
        "text_encoder_4": 8_030_261_248,
        "transformer": 17_105_733_184,
        "vae": VAE_16,
    },
    "cogview4": {"text_encoder": 8_779_194_368, "transformer": 6_369_118_272, "vae": 406_100_643},
    "wan-14b": {"text_encoder": 5_680_910_336, "transformer": 14_288_491_584, "vae": VAE_WAN},
    # "two experts of 14B each"; the transformers have the configuration of Wan2.1's
    "wan22-t2v": {
        "text_encoder": 5_680_910_336,
        "transformer": 14_288_491_584,
        "transformer_2": 14_288_491_584,
        "vae": VAE_WAN,
    },
    "flux-kontext": {
        "text_encoder": CLIP_L,
        "text_encoder_2": T5_XXL,
        "transformer": 11_901_408_320,
        "vae": VAE_16,
    },
    "sd35-large": {
        "text_encoder": CLIP_L_PROJECTED,
        "text_encoder_2": CLIP_G,
        "text_encoder_3": T5_XXL,
        "transformer": 8_056_627_520,
        "vae": VAE_16,
    },
    "auraflow": {"text_encoder": 1_223_550_976, "transformer": 6_842_876_928, "vae": VAE_4},
    "sd3": {
        "text_encoder": CLIP_L_PROJECTED,
        "text_encoder_2": CLIP_G,
        "text_encoder_3": T5_XXL,
        "transformer": 2_028_328_000,
        "vae": VAE_16,
    },
    "flux-schnell": {
        "text_encoder": CLIP_L,
        "text_encoder_2": T5_XXL,
        "transformer": 11_891_178_560,
        "vae": VAE_16,
    },
    "qwen-image": {"text_encoder": 8_292_166_656, "transformer": 20_430_401_088, "vae": VAE_WAN},
    "qwen-image-edit": {
        "text_encoder": 8_292_166_656,
        "transformer": 20_430_401_088,
        "vae": VAE_WAN,
    },
    "hunyuan-video": {
        "text_encoder": 7_505_186_816,
        "text_encoder_2": CLIP_L,
        "transformer": 12_821_012_544,
        "vae": 246_478_803,
    },
    "cogvideox-5b": {"text_encoder": T5_XXL, "transformer": 5_570_283_072, "vae": 215_583_907},
    "ltx": {"text_encoder": T5_XXL, "transformer": 1_923_385_472, "vae": 419_193_649},
    "pixart-sigma": {"text_encoder": T5_XXL, "transformer": 610_856_096, "vae": VAE_4},
    "hunyuan-dit": {
        "text_encoder": 352_035_840,
        "text_encoder_2": 1_669_958_656,
        "transformer": 1_499_952_032,
        "vae": VAE_4,
    },
}

# In billions, as rounded where they are published: cards of the models, diffusers' documentation,
# names of checkpoints.
PUBLISHED = {
    "chroma": {"transformer": "8.9"},
    "sd21-upscaled": {"unet": "0.87"},
    "sdxl-depth": {"depth_estimator": "0.0248"},
    "z-image": {"transformer": "6", "text_encoder": "4"},
    "flux2-dev": {"transformer": "32", "text_encoder": "24"},
    "flux2-klein": {"transformer": "4", "text_encoder": "4"},
    "flux-controlnet": {"transformer": "12"},
    "krea2": {"transformer": "13"},
    "ernie-image": {"transformer": "8", "text_encoder": "3.8"},
    "ideogram4": {"transformer": "9.3", "unconditional_transformer": "9.3", "text_encoder": "8"},
    "qwen-image-21": {"transformer": "7.1"},
    "minimax-h3": {"transformer": "33"},
    "hunyuan-image": {"transformer": "17"},
    "bria-fibo": {"transformer": "8", "text_encoder": "3"},
    "bria-fibo-2": {"transformer": "8.1", "text_encoder": "4"},
    "stable-audio-3": {"vae": "0.852"},
    "sana": {"transformer": "1.6"},
    "stable-cascade": {"prior": "3.6"},
    "wan22-i2v": {"transformer": "14", "transformer_2": "14"},
    "wan-animate-2": {"transformer": "16.4"},  # as Wan 2.1's from pictures, of 32.8 GB
    "kandinsky5": {"transformer": "2"},
    "kandinsky6": {"transformer": "3.177988112"},
    "hunyuan-video15": {"transformer": "8.3"},
    "ltx2": {"transformer": "19", "text_encoder": "12"},
    "stable-audio": {"transformer": "1"},
}


@pytest.fixture(scope="module")
def flux() -> Graph:
    return load(GRAPHS / "flux-tiny.yaml")


@pytest.fixture(scope="module")
def checkpoint(flux: Graph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """flux-tiny as a folder in the layout of diffusers, with a sharded transformer."""
    folder = tmp_path_factory.mktemp("source")
    for name, component in flux.components.items():
        build(component, flux).save_pretrained(folder / name, max_shard_size="4MB")
    build_part(flux.parts["tokenizer"], flux).save_pretrained(folder / "tokenizer")
    return folder


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def described(module: nn.Module) -> dict[str, Any]:
    return {name: (tuple(t.shape), t.dtype) for name, t in tensors(module).items()}


def at(component: Component, folder: Path) -> Component:
    return replace(component, source=str(folder))


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts_are_the_checkpoints(name: str) -> None:
    graph = load(GRAPHS / f"{name}.yaml")
    meta_modules = {
        component.name: meta_module(component, graph.trust)
        for component in graph.components.values()
    }
    assert {
        key: sum(p.numel() for p in module.parameters()) for key, module in meta_modules.items()
    } == PARAMETERS[name]
    assert all(
        t.device.type == "meta"
        for module in meta_modules.values()
        for t in tensors(module).values()
    )


@pytest.mark.parametrize("name", sampled(PUBLISHED, ["chroma"], "graphs"))
def test_parameter_counts_are_those_published(name: str) -> None:
    graph = load(GRAPHS / f"{name}.yaml")
    for key, published in PUBLISHED[name].items():
        count = sum(p.numel() for p in meta_module(graph.component(key), graph.trust).parameters())
        assert f"{count / 1e9:.{len(published.partition('.')[2])}f}" == published, key


@pytest.mark.parametrize(
    ("name", "component", "bits", "gigabytes"),
    [
        ("flux3-klein", "transformer", 9, "6.24"),  # LostBeard/flux-3-image-klein-q4-ILGPU
        ("flux3-klein", "transformer", 5, "3.47"),
        (
            "qwen-image-21",
            "transformer",
            16,
            "14.2",
        ),  # github.com/raullenchai/Rapid-MLX/issues/3642
        ("qwen-image-21", "text_encoder", 16, "17.5"),
        ("minimax-h3", "text_encoder", 16, "66.7"),  # github.com/unslothai/unsloth/pull/8283
        ("stable-audio-3", "transformer", 16, "2.9"),  # notes of programs that download it
    ],
)
def test_weights_have_the_bytes_of_published_files(
    name: str, component: str, bits: int, gigabytes: str
) -> None:
    graph = load(GRAPHS / f"{name}.yaml")
    module = meta_module(graph.component(component), graph.trust)
    nbytes = sum(parameter.numel() for parameter in module.parameters()) * bits / 8
    assert f"{nbytes / 1e9:.{len(gigabytes.partition('.')[2])}f}" == gigabytes


def test_ace_step_has_the_bytes_of_the_published_file() -> None:
    """The published file, 4,787,825,604 bytes, has a header and parts for codes."""
    graph = load(GRAPHS / "ace-step.yaml")
    with torch.device("meta"):
        modules = [AceStepAudioTokenizer(), AceStepAudioTokenDetokenizer()]
    modules += [
        meta_module(graph.component(name), graph.trust)
        for name in ("condition_encoder", "transformer")
    ]
    count = sum(parameter.numel() for module in modules for parameter in module.parameters())
    assert 0 < 4_787_825_604 - 2 * count < 100_000


def test_cosmos_3_has_the_text_model_of_qwen3_vl_8b() -> None:
    """Its parameters, 8.191 billion by their published count, and others for video."""
    graph = load(GRAPHS / "cosmos3-nano.yaml")
    module = meta_module(graph.component("transformer"), graph.trust)
    of_video = re.compile(r"moe_gen|\.add_|norm_added|to_add_out|^proj_|^time_embedder")
    text_count = sum(
        parameter.numel()
        for name, parameter in module.named_parameters()
        if not of_video.search(name)
    )
    assert f"{text_count / 1e9:.3f}" == "8.191"


@pytest.mark.parametrize("name", ["flux-tiny", "sdxl-tiny"])
def test_modules_have_the_shapes_and_dtypes_of_their_meta_modules(name: str) -> None:
    graph = load(GRAPHS / f"{name}.yaml")
    for component in graph.components.values():
        module, twin = build(component, graph), meta_module(component, graph.trust)
        assert described(module) == described(twin)
        assert all(t.device.type == "cpu" for t in tensors(module).values())
        assert not module.training
        assert not twin.training
    assert max(
        graph.components.values(),
        key=lambda c: sum(p.numel() for p in meta_module(c, graph.trust).parameters()),
    ).name in (
        "transformer",
        "unet",
    )


def test_t5_keeps_wo_in_fp32_in_fp16_only(flux: Graph) -> None:
    """As transformers' from_pretrained does: +1.875 GiB for T5-XXL, which a plan has to count."""
    for dtype, expected in (("float16", torch.float32), ("bfloat16", torch.bfloat16)):
        module = meta_module(replace(flux.component("text_encoder_2"), dtype=dtype), flux.trust)
        dtypes = {p.dtype for name, p in module.named_parameters() if ".wo." in name}
        assert dtypes == {expected}
        assert module.shared.weight.dtype == getattr(torch, dtype)


def test_random_weights_depend_on_name_and_seed_alone(flux: Graph) -> None:
    clip = flux.component("text_encoder")
    first = tensors(build(clip, flux))
    torch.manual_seed(7)
    build(flux.component("vae"), flux)
    second = tensors(build(clip, flux))
    assert all(torch.equal(first[name], second[name]) for name in first)
    weight = "encoder.layers.0.mlp.fc1.weight"
    assert not torch.equal(first[weight], tensors(build(replace(clip, seed=1), flux))[weight])
    assert not torch.equal(first[weight], tensors(build(replace(clip, name="other"), flux))[weight])


def test_building_leaves_torch_as_it_was(flux: Graph) -> None:
    state, register = torch.get_rng_state(), nn.Module.register_parameter
    build(flux.component("text_encoder"), flux)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == torch.float32
    assert nn.Module.register_parameter is register


def test_tied_and_large_tensors_get_random_values() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(1100, 1000), nn.LayerNorm(1000), nn.Linear(1100, 1000))
    module[2].weight = module[0].weight
    source = RandomSource(module, "seed")
    values = {
        name: torch.empty_like(p, device="cpu")
        for name, p in module.named_parameters(remove_duplicate=False)
    }
    for name, value in values.items():
        source.read_into(name, value)
    weight = values["0.weight"]
    assert torch.equal(weight, values["2.weight"])
    assert weight.numel() > TILE
    assert 0.9 < weight[-1].std() * 1100**0.5 < 1.1
    assert values["1.weight"].eq(1).all()
    assert values["1.bias"].eq(0).all()


@pytest.mark.sweep("more")
@pytest.mark.parametrize("name", ["flux-tiny", "sdxl-tiny"])
def test_tiny_pipelines_make_images_that_depend_on_the_prompt(name: str) -> None:
    graph = load(GRAPHS / f"{name}.yaml")
    pipeline = resolve_class(graph.pipeline, graph.trust)(
        **{key: build(component, graph) for key, component in graph.components.items()},
        **{key: build_part(part, graph) for key, part in graph.parts.items()},
        **graph.pipeline_config,
    )
    pipeline.set_progress_bar_config(disable=True)
    values = graph.resolve({})
    values["num_inference_steps"] = values.pop("steps")

    def picture(prompt: str) -> numpy.ndarray:
        generator = torch.Generator().manual_seed(values["seed"])
        arguments = {key: value for key, value in values.items() if key not in ("seed", "prompt")}
        return pipeline(prompt, generator=generator, output_type="np", **arguments).images[0]

    first, other = picture(values["prompt"]), picture("a cat")
    assert first.shape == (values["height"], values["width"], 3)
    assert numpy.isfinite(first).all()
    assert first.std() > 0.1
    assert numpy.abs(first - other).mean() > 0.01


def test_weights_come_from_a_source(flux: Graph, checkpoint: Path) -> None:
    for name, component in flux.components.items():
        module, expected = build(at(component, checkpoint / name), flux), build(component, flux)
        assert described(module) == described(expected)
        assert all(
            torch.equal(tensor, tensors(expected)[key]) for key, tensor in tensors(module).items()
        ), name
        assert not module.training
        assert all(p.requires_grad for p in module.parameters()), "as from_pretrained returns it"


LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 32,
}
WAN = {
    "num_layers": 1,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "ffn_dim": 16,
    "text_dim": 16,
    "freq_dim": 16,
}
SD3 = {
    "num_layers": 1,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "caption_projection_dim": 16,
    "joint_attention_dim": 16,
}
SD3 = {**SD3, "pooled_projection_dim": 16, "pos_embed_max_size": 8, "sample_size": 16}
PIXART = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 8, "sample_size": 8}
PIXART = {**PIXART, "caption_channels": 8, "cross_attention_dim": 16}
UMT5 = {"d_model": 16, "d_ff": 16, "num_heads": 2, "d_kv": 8, "num_layers": 1, "vocab_size": 32}


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("class_path", "config", "name", "in_bfloat16"),
    [
        (
            "diffusers.WanTransformer3DModel",
            WAN,
            "scale_shift_table",
            torch.float32,
        ),  # kept in fp32
        (
            "diffusers.SD3Transformer2DModel",
            SD3,
            "pos_embed.pos_embed",
            torch.bfloat16,
        ),  # a persistent buffer
        (
            "diffusers.PixArtTransformer2DModel",
            PIXART,
            "pos_embed.pos_embed",
            torch.float32,
        ),  # a non-persistent buffer
        (
            "transformers.LlamaForCausalLM",
            LLAMA,
            "model.rotary_emb.inv_freq",
            torch.float32,
        ),  # another one
        (
            "transformers.UMT5EncoderModel",
            UMT5,
            "encoder.block.0.layer.1.DenseReluDense.wo.weight",
            torch.bfloat16,
        ),
    ],
)
def test_a_meta_module_has_the_dtypes_that_from_pretrained_gives(
    flux: Graph,
    tmp_path: Path,
    class_path: str,
    config: dict[str, Any],
    name: str,
    in_bfloat16: torch.dtype,
    dtype: str,
) -> None:
    component = Component("any", class_path, None, config, True, dtype, (dtype,))
    twin, module = meta_module(component, flux.trust), build(component, flux)
    module.save_pretrained(tmp_path)
    loaded_module = build(at(component, tmp_path), flux)
    reference = resolve_class(class_path, flux.trust).from_pretrained(
        tmp_path, torch_dtype=getattr(torch, dtype)
    )
    assert described(reference) == described(loaded_module) == described(module) == described(twin)
    assert all(
        torch.equal(tensor, tensors(module)[key]) for key, tensor in tensors(loaded_module).items()
    )
    assert all(
        torch.equal(tensor, tensors(reference)[key])
        for key, tensor in tensors(loaded_module).items()
    )
    if dtype == "bfloat16":
        assert tensors(twin)[name].dtype == in_bfloat16


def test_a_config_may_come_from_the_source(flux: Graph, checkpoint: Path) -> None:
    bare = replace(at(flux.component("vae"), checkpoint / "vae"), has_config=False, config={})
    assert described(meta_module(bare, flux.trust)) == described(
        meta_module(flux.component("vae"), flux.trust)
    )


def broken(checkpoint: Path, tmp_path: Path, name: str) -> Path:
    """A copy of a component's folder that a test may damage."""
    folder = tmp_path / name
    folder.mkdir()
    for file in (checkpoint / name).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def refusal(component: Component, graph: Graph) -> str:
    with pytest.raises(GraphError) as error_info:
        build(component, graph)
    assert str(error_info.value).startswith(f"{component.file_line}: ")
    return str(error_info.value).removeprefix(f"{component.file_line}: ")


def test_missing_folder(flux: Graph, tmp_path: Path) -> None:
    message = refusal(at(flux.component("vae"), tmp_path / "nowhere"), flux)
    assert (
        message == f"no such folder: {tmp_path}/nowhere; give the path of a folder, "
        "or remove source: for random weights"
    )


def test_folder_without_safetensors(flux: Graph, checkpoint: Path, tmp_path: Path) -> None:
    folder = broken(checkpoint, tmp_path, "vae")
    file = folder / "diffusion_pytorch_model.safetensors"
    file.rename(folder / "diffusion_pytorch_model.bin")
    text = (
        f"no safetensors in {folder}, only {file.stem}.bin: nothing is unpickled; convert it to "
        "safetensors (save_pretrained does)"
    )
    assert refusal(at(flux.component("vae"), folder), flux) == text


@pytest.mark.parametrize("cut", ["end", "header", "garbage", "empty"])
def test_corrupt_safetensors(flux: Graph, checkpoint: Path, tmp_path: Path, cut: str) -> None:
    folder = broken(checkpoint, tmp_path, "transformer")
    file = sorted(folder.glob("*.safetensors"))[1]
    content = file.read_bytes()
    pieces = {
        "end": content[:-5],
        "header": content[:100],
        "garbage": b"\x10" + bytes(7) + b"not json" + content[16:],
        "empty": b"",
    }
    file.write_bytes(pieces[cut])
    message = refusal(at(flux.component("transformer"), folder), flux)
    assert message.startswith((f"{file} is truncated or corrupt: ", f"{file} is corrupt: "))
    assert message.endswith("; download it again")


def test_missing_shard_and_broken_index(flux: Graph, checkpoint: Path, tmp_path: Path) -> None:
    folder = broken(checkpoint, tmp_path, "transformer")
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.unlink()
    assert (
        refusal(at(flux.component("transformer"), folder), flux)
        == f"{shard} is missing; download it again"
    )
    index = next(folder.glob("*.index.json"))
    index.write_text("{}")
    assert refusal(at(flux.component("transformer"), folder), flux).startswith(
        f"{index} is not a safetensors index"
    )


@pytest.mark.parametrize("name", ["vae", "text_encoder_2"])
def test_missing_tensor(flux: Graph, checkpoint: Path, tmp_path: Path, name: str) -> None:
    folder = broken(checkpoint, tmp_path, name)
    file = next(folder.glob("*.safetensors"))
    content = load_file(file)
    absent_key = sorted(key for key in content if key.endswith("weight"))[0]
    del content[absent_key]
    save_file(content, file, {"format": "pt"})
    message = refusal(at(flux.component(name), folder), flux)
    assert message == f"components.{name}: {folder}: 1 tensor is missing, such as {absent_key}"


@pytest.mark.parametrize(
    ("name", "key"), [("vae", "block_out_channels"), ("text_encoder_2", "d_ff")]
)
def test_source_with_other_shapes(flux: Graph, checkpoint: Path, name: str, key: str) -> None:
    """A plan made from the graph's config must not be run with another model."""
    component = at(flux.component(name), checkpoint / name)
    value = component.config[key]
    other = replace(
        component,
        config={**component.config, key: [8, *value[1:]] if isinstance(value, list) else 2 * value},
    )
    message = refusal(other, flux)
    assert message.startswith(f"components.{name}: {checkpoint / name} does not match its config: ")
    assert "more" in message


def test_folder_whose_config_does_not_fit_its_tensors(
    flux: Graph, checkpoint: Path, tmp_path: Path
) -> None:
    for name, key, value in (("vae", "latent_channels", 8), ("text_encoder_2", "d_ff", 384)):
        folder = broken(checkpoint, tmp_path, name)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, key: value}))
        component = replace(at(flux.component(name), folder), has_config=False, config={})
        assert f"{folder} does not match its config" in refusal(component, flux)


def test_config_errors(flux: Graph) -> None:
    clip, vae = flux.component("text_encoder"), flux.component("vae")
    message = refusal(replace(clip, config={"hidden_sise": 64}), flux)
    assert (
        message
        == "components.text_encoder.config: unknown key 'hidden_sise'; did you mean 'hidden_size'?"
    )
    message = refusal(replace(vae, config={"latent_chanels": 4}), flux)
    assert (
        message
        == "components.vae.config: unknown key 'latent_chanels'; did you mean 'latent_channels'?"
    )
    message = refusal(replace(clip, config={"hidden_size": "wide"}), flux)
    assert message.startswith(
        "components.text_encoder: transformers.CLIPTextModel cannot be constructed: "
    )
    assert "hidden_size" in message
    assert "cannot be constructed" in refusal(replace(vae, config={"block_out_channels": 3}), flux)


def test_classes(flux: Graph) -> None:
    assert resolve_class("diffusers.AutoencoderKL").__name__ == "AutoencoderKL"
    assert (
        resolve_class("diffusers.models.autoencoders.autoencoder_kl.AutoencoderKL").__name__
        == "AutoencoderKL"
    )
    for path, message in {
        "diffusers.FluxTransformr2DModel": (
            "unknown class diffusers.FluxTransformr2DModel; did you mean 'FluxTransformer2DModel'?"
        ),
        "transformers.T5EncoderModl": (
            "unknown class transformers.T5EncoderModl; did you mean 'T5EncoderModel'?"
        ),
        "os.system": f"os.system is {outside('os', ('diffusers', 'transformers'))}",
        "diffusers.utils": "diffusers.utils is not a class",
        "diffusers.utils.hub_utils.Path": "diffusers.utils.hub_utils.Path is pathlib.Path, "
        f"{outside('pathlib', ('diffusers', 'transformers'))}",
    }.items():
        with pytest.raises(GraphError) as error_info:
            resolve_class(path, (), "graph.yaml:3")
        assert str(error_info.value) == f"graph.yaml:3: {message}"
    with pytest.raises(GraphError, match="cannot be imported"):
        resolve_class("no_such_package.Thing", ("no_such_package",))
    assert "is not a module with weights" in refusal(
        replace(flux.component("vae"), class_path="transformers.T5Config"), flux
    )


PLAIN = """
import torch


class Plain(torch.nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.register_buffer("table", torch.arange(width) * 1.0, persistent=False)
"""


def test_any_module_of_a_trusted_package(
    flux: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class of neither diffusers nor transformers: its tensors are read under their own names."""
    (tmp_path / "plain_package_of_a_test.py").write_text(PLAIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    graph = replace(flux, trust=("plain_package_of_a_test",))
    path = "plain_package_of_a_test.Plain"
    plain = Component(
        "plain", path, None, {"width": 6}, True, "bfloat16", ("bfloat16",), file_line="graph.yaml:9"
    )
    assert described(build(plain, graph)) == described(meta_module(plain, graph.trust))
    weight = torch.randn(6, 6)
    save_file(
        {"linear.weight": weight, "linear.bias": torch.zeros(6)}, tmp_path / "model.safetensors"
    )
    module = build(at(plain, tmp_path), graph)
    assert torch.equal(module.linear.weight, weight.bfloat16())
    assert module.table.tolist() == [0, 1, 2, 3, 4, 5]
    save_file({"linear.weight": weight}, tmp_path / "model.safetensors")
    assert "1 tensor is missing, such as linear.bias" in refusal(at(plain, tmp_path), graph)


def test_a_hub_source_is_read_from_the_cache(
    flux: Graph, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    component = replace(flux.component("vae"), source="owner/repo/vae")
    assert refusal(component, flux).startswith(
        "cannot get owner/repo/vae from the hub: HF_HUB_OFFLINE is set"
    )
    repository = tmp_path / "models--owner--repo"
    shutil.copytree(checkpoint / "vae", repository / "snapshots" / "1234" / "vae")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1234")
    assert described(build(component, flux)) == described(meta_module(component, flux.trust))
    assert (
        refusal(replace(component, source="owner/repo/vea"), flux)
        == "the repository owner/repo has no folder vea"
    )


def test_tokenizers(flux: Graph, checkpoint: Path) -> None:
    part = flux.parts["tokenizer"]
    tokenizer = build_part(part, flux)
    encoded = tokenizer(
        ["a cat", "x" * 200],
        padding="max_length",
        truncation=True,
        max_length=77,
        return_tensors="pt",
    ).input_ids
    assert encoded.shape == (2, 77)
    # CLIP pools at the end token, so there must be exactly one
    assert (encoded == 258).sum(1).tolist() == [
        1,
        1,
    ]
    assert encoded.max() == 258
    assert tokenizer.decode(encoded[0], skip_special_tokens=True) == "a cat"
    source = replace(
        part, source=str(checkpoint / "tokenizer"), config={**part.config, "model_max_length": 12}
    )
    assert build_part(source, flux).model_max_length == 77
    assert build_part(source, flux, planning=True).model_max_length == 12
    chat = build_part(
        replace(part, config={**part.config, "chat_template": "{{ messages[0]['content'] }}!"}),
        flux,
    )
    assert (
        chat.apply_chat_template([{"role": "user", "content": "a cat"}], tokenize=False) == "a cat!"
    )
    with pytest.raises(
        GraphError, match="unknown key 'model_max_lenght'; did you mean 'model_max_length'"
    ):
        build_part(replace(part, config={"model_max_lenght": 3}), flux)


def test_a_part_takes_the_settings_of_its_parents(flux: Graph) -> None:
    """diffusers saves them too: FLUX.2's image processor has its parent's ``reducing_gap``."""
    settings = {key: value for key, value in Flux2ImageProcessor().config.items() if key[0] != "_"}
    assert "reducing_gap" in settings
    path = f"{Flux2ImageProcessor.__module__}.{Flux2ImageProcessor.__qualname__}"
    part = Part("image_processor", path, {**settings, "reducing_gap": 2.0}, has_config=True)
    assert build_part(part, flux).config.reducing_gap == 2.0
    message = (
        "parts.image_processor.config: unknown key 'reducing_gab'; did you mean 'reducing_gap'?"
    )
    with pytest.raises(GraphError, match=re.escape(message)):
        build_part(replace(part, config={"reducing_gab": 2.0}), flux)


def test_schedulers(flux: Graph) -> None:
    part = flux.parts["scheduler"]
    assert build_part(part, flux).config.use_dynamic_shifting
    with pytest.raises(
        GraphError, match=r"parts\.scheduler\.config: unknown key 'shfit'; did you mean 'shift'"
    ):
        build_part(replace(part, config={"shfit": 3}), flux)


def test_a_broken_tokenizer_file_is_named(flux: Graph, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("{")
    part = replace(flux.parts["tokenizer"], file=tmp_path / "t.json")
    with pytest.raises(
        GraphError, match=rf"{part.file_line}: parts\.tokenizer: {tmp_path}/t\.json"
    ):
        build_part(part, flux)


@pytest.mark.parametrize("sourced", [False, True])
def test_while_planning_unpadded_texts_get_their_maximum_length(
    flux: Graph, checkpoint: Path, sourced: bool
) -> None:
    part = flux.parts["tokenizer"]
    if sourced:
        part = replace(part, file=None, has_config=False, source=str(checkpoint / "tokenizer"))
    planning, real = (build_part(part, flux, planning=planning) for planning in (True, False))
    unpadded = {"padding": "longest", "max_length": 40, "truncation": True}
    assert len(planning("a", **unpadded).input_ids) == 40 > len(real("a", **unpadded).input_ids)
    assert [len(ids) for ids in planning(["a", "b c"], **unpadded).input_ids] == [40, 40]
    padded = {"padding": "max_length", "max_length": 40, "truncation": True}
    assert planning("a", **padded).input_ids == real("a", **padded).input_ids


class RandomOps(TorchDispatchMode):
    """Records the operators that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.names.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["text_encoder_2", "transformer"])
def test_random_initialization_is_skipped_on_meta(name: str) -> None:
    graph = load(GRAPHS / "flux-tiny.yaml")
    component = graph.component(name)
    with RandomOps() as random_ops:
        meta_module(component, graph.trust)
        draft(component, graph, component.dtype)
    assert not random_ops.names


@pytest.mark.parametrize("origin", ["source", "config"])
def test_a_scheduler_that_diffusers_saved_with_an_infinity_is_read(
    origin: str, tmp_path: Path
) -> None:
    """JSON has none; diffusers writes the default of its DPM schedulers so."""
    checkpoint = tmp_path / "scheduler"
    DPMSolverMultistepScheduler(solver_order=3).save_pretrained(checkpoint)
    assert "-Infinity" in (checkpoint / "scheduler_config.json").read_text()
    for folder in ("configs", "tokenizers"):
        (tmp_path / folder).symlink_to(GRAPHS / folder)
    config_path = checkpoint if origin == "source" else checkpoint / "scheduler_config.json"
    own_line = f"diffusers.DPMSolverMultistepScheduler, {origin}: {config_path}"
    text = (GRAPHS / "sdxl-tiny.yaml").read_text()
    (tmp_path / "g.yaml").write_text(
        text.replace(
            "diffusers.EulerDiscreteScheduler, config: configs/sdxl-scheduler.json", own_line
        )
    )
    graph = load(tmp_path / "g.yaml")
    scheduler = build_part(graph.parts["scheduler"], graph)
    assert isinstance(scheduler, DPMSolverMultistepScheduler)
    assert (scheduler.config.solver_order, scheduler.config.lambda_min_clipped) == (3, -math.inf)
