"""Checkpoints with the names and shapes of the original authors, for SDXL and FLUX, made from
diffusers' modules; and GGUF files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch

GGUF_TYPES = gguf.GGMLQuantizationType
# Types as in published files: most tensors in one type, small or sensitive ones in others.
ROLES = {
    "norm": GGUF_TYPES.F32,
    "attn": GGUF_TYPES.Q4_0,
    "ff": GGUF_TYPES.Q8_0,
    "proj": GGUF_TYPES.Q5_1,
}
ROLES |= {"embed": GGUF_TYPES.F16, "time": GGUF_TYPES.BF16}
Tensors = dict[str, torch.Tensor]
SIZES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1}
RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
}
RESNET |= {"conv2": "out_layers.3", "conv_shortcut": "skip_connection"}
UNET = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "conv_in": "input_blocks.0.0",
}
UNET |= {"add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2"}
UNET |= {"conv_norm_out": "out.0", "conv_out": "out.2"}
VAE = {
    "conv_shortcut": "nin_shortcut",
    "downsamplers.0": "downsample",
    "upsamplers.0": "upsample",
    "conv_norm_out": "norm_out",
}
VAE |= {
    "mid_block.resnets.0": "mid.block_1",
    "mid_block.resnets.1": "mid.block_2",
    "mid_block.attentions.0": "mid.attn_1",
}
VAE |= {
    "attn_1.group_norm": "attn_1.norm",
    ".to_q.": ".q.",
    ".to_k.": ".k.",
    ".to_v.": ".v.",
    ".to_out.0.": ".proj_out.",
}
OPEN_CLIP = {
    "embeddings.token_embedding": "token_embedding",
    "embeddings.position_embedding.weight": "positional_embedding",
}
OPEN_CLIP |= {
    "final_layer_norm": "ln_final",
    "encoder.layers": "transformer.resblocks",
    "layer_norm1": "ln_1",
}
OPEN_CLIP |= {"layer_norm2": "ln_2", "fc1": "c_fc", "fc2": "c_proj", "self_attn": "attn"}


def renamed(name: str, names: Mapping[str, str]) -> str:
    for diffusers_name, original in names.items():
        name = name.replace(diffusers_name, original)
    return name


def unet(state: Tensors, layers: int) -> Tensors:
    """SDXL's UNet with ``layers`` resnets per block."""
    attended = {
        match[1] for name in state if (match := re.match(r"up_blocks\.(\d+)\.attentions", name))
    }

    def original(name: str) -> str:
        match = re.match(
            r"(down|mid|up)_blocks?\.(?:(\d+)\.)?(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.*)",
            name,
        )
        if match is None:
            return renamed(name, UNET)
        side, number, kind, index, rest = match[1], match[2], match[3], int(match[4]), match[5]
        rest = renamed(rest, RESNET) if kind == "resnets" else rest
        if side == "mid":
            return f"middle_block.{2 * index if kind == 'resnets' else 1}.{rest}"
        first = int(number) * (layers + 1) + (side == "down")
        blocks = f"{'input' if side == 'down' else 'output'}_blocks"
        if kind == "downsamplers":
            return f"{blocks}.{first + layers}.0.{rest.replace('conv', 'op')}"
        if kind == "upsamplers":
            return f"{blocks}.{first + layers}.{2 if number in attended else 1}.{rest}"
        return f"{blocks}.{first + index}.{0 if kind == 'resnets' else 1}.{rest}"

    return {f"model.diffusion_model.{original(name)}": tensor for name, tensor in state.items()}


def vae(state: Tensors) -> Tensors:
    blocks = 1 + max(
        int(match[1]) for name in state if (match := re.match(r"decoder\.up_blocks\.(\d+)", name))
    )
    tensors = {}
    for name, tensor in state.items():
        name = re.sub(r"up_blocks\.(\d+)", lambda match: f"up.{blocks - 1 - int(match[1])}", name)
        name = re.sub(r"(down|up)(_blocks)?\.(\d+)\.resnets", r"\1.\3.block", name).replace(
            "down_blocks", "down"
        )
        square = "mid_block.attentions" in name and tensor.dim() == 2
        tensors[f"first_stage_model.{renamed(name, VAE)}"] = (
            tensor[:, :, None, None].contiguous() if square else tensor
        )
    return tensors


def clip(state: Tensors) -> Tensors:
    return {
        f"conditioner.embedders.0.transformer.text_model.{name.removeprefix('text_model.')}": t
        for name, t in state.items()
    }


def open_clip(state: Tensors) -> Tensors:
    tensors: Tensors = {}
    for name, tensor in state.items():
        name = (
            f"conditioner.embedders.1.model.{renamed(name.removeprefix('text_model.'), OPEN_CLIP)}"
        )
        if ".q_proj." in name:
            three = [state[n] for n in _three(name, state)]
            tensors[name.replace(".q_proj.", ".in_proj_")] = torch.cat(three)
        elif name.endswith("text_projection.weight"):
            tensors[name.removesuffix(".weight")] = tensor.T.contiguous()
        elif "k_proj" not in name and "v_proj" not in name:
            tensors[name] = tensor
    return tensors


def _three(name: str, state: Tensors) -> list[str]:
    layer, end = re.search(r"resblocks\.(\d+)\.", name)[1], name.rpartition(".")[2]  # type: ignore[index]
    prefix = "text_model." if any(n.startswith("text_model.") for n in state) else ""
    return [f"{prefix}encoder.layers.{layer}.self_attn.{part}_proj.{end}" for part in "qkv"]


def flux_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The names and shapes of FLUX's original checkpoint."""
    n, wide = config["num_attention_heads"] * config["attention_head_dim"], 4
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, outputs: int, inputs: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (outputs, inputs), (outputs,)

    for name, inputs in (
        ("time_in", 256),
        ("guidance_in", 256),
        ("vector_in", config["pooled_projection_dim"]),
    ):
        if name != "guidance_in" or config["guidance_embeds"]:
            linear(f"{name}.in_layer", n, inputs)
            linear(f"{name}.out_layer", n, n)
    linear("txt_in", n, config["joint_attention_dim"])
    linear("img_in", n, config["in_channels"])
    linear("final_layer.linear", config["in_channels"], n)
    linear("final_layer.adaLN_modulation.1", 2 * n, n)
    for i in range(config["num_layers"]):
        for side in ("img", "txt"):
            block = f"double_blocks.{i}.{side}"
            linear(f"{block}_mod.lin", 6 * n, n)
            linear(f"{block}_attn.qkv", 3 * n, n)
            linear(f"{block}_attn.proj", n, n)
            linear(f"{block}_mlp.0", wide * n, n)
            linear(f"{block}_mlp.2", n, wide * n)
            for norm in ("query_norm", "key_norm"):
                shapes[f"{block}_attn.norm.{norm}.scale"] = (config["attention_head_dim"],)
    for i in range(config["num_single_layers"]):
        block = f"single_blocks.{i}"
        linear(f"{block}.modulation.lin", 3 * n, n)
        linear(f"{block}.linear1", 3 * n + wide * n, n)
        linear(f"{block}.linear2", n, n + wide * n)
        for norm in ("query_norm", "key_norm"):
            shapes[f"{block}.norm.{norm}.scale"] = (config["attention_head_dim"],)
    return shapes


def write_hollow(
    file: Path,
    shapes: Mapping[str, tuple[int, ...]],
    kinds: Mapping[str, str] | None = None,
    kind: str = "BF16",
) -> int:
    """Writes a sparse safetensors file of full size that takes no disk space. ``kinds``: the dtype
    of tensors that are not ``kind``. Returns the bytes of its tensors.
    """
    header, end = {}, 0
    for name, shape in shapes.items():
        dtype = (kinds or {}).get(name, kind)
        size = SIZES[dtype] * torch.Size(shape).numel()
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
    return end


def write_gguf(file: Path, tensors: Tensors, kind: Callable[[str, torch.Tensor], Any]) -> Path:
    """Writes a GGUF file of ``tensors``, each in the type that ``kind`` returns."""
    writer = gguf.GGUFWriter(file, "flux")
    writer.add_uint32("some.number", 7)
    writer.add_array("some.texts", ["one", "two"])
    for name, tensor in tensors.items():
        data, type_name = tensor.float().numpy(), kind(name, tensor)
        writer.add_tensor(name, gguf.quants.quantize(data, type_name), raw_dtype=type_name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def by_role(name: str, tensor: torch.Tensor) -> Any:
    """The GGUF type of a tensor, chosen by its name."""
    if tensor.dim() < 2:
        return GGUF_TYPES.F32
    return next((kind for role, kind in ROLES.items() if role in name), GGUF_TYPES.Q8_0)
