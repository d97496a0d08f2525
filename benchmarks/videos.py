"""Compare dry runs with the diffusers team's published peaks of video pipelines.

Videos of 512 x 768, 121 frames, quantized transformers included. Weights come from classes and
configurations; each component's call is traced by itself. Only one share is fitted: after an int8
layer's first call, old versions of bitsandbytes kept the columns of its weight that met outliers of
its input (`state.subB`, 16 bit), which depend on data. Their share comes from one row
(`OUTLIERS_FITTED`); the others test it.
"""

from __future__ import annotations

import copy
import csv
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vae_report import replay

from graphrun.graph.parts import Component
from graphrun.model.allocator import ROUND_BYTES, Counting
from graphrun.modules.build import meta_module
from graphrun.profile.fused_kernels import FusedKernels
from graphrun.profile.precision import quantization_scratch_bytes
from graphrun.profile.quantized import quantized_shapes, weights_by_precision
from graphrun.profile.recorder import Recorder
from graphrun.profile.recording import Call, MemoryEvent
from graphrun.sim import register
from graphrun.units import GIB, KIB, MIB, round_up

register()  # the recorder asks for the simulated accelerator's autocast

ROOT = Path(__file__).parent.parent
WORKSPACE_BYTES = 8 * MIB + 128 * KIB
OUTLIERS_FITTED = ("HunyuanVideo", "int8", "none", "no")
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "transformers.LlamaModel",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128320,
        },
    ),
    "clip": (
        "transformers.CLIPTextModel",
        {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
    ),
    "t5": (
        "transformers.T5EncoderModel",
        {
            "d_ff": 10240,
            "d_kv": 64,
            "d_model": 4096,
            "feed_forward_proj": "gated-gelu",
            "num_heads": 64,
            "num_layers": 24,
        },
    ),
    "hunyuan": ("diffusers.HunyuanVideoTransformer3DModel", {}),
    "hunyuan vae": ("diffusers.AutoencoderKLHunyuanVideo", {}),
    "ltx": ("diffusers.LTXVideoTransformer3DModel", {}),
    "ltx vae": ("diffusers.AutoencoderKLLTXVideo", {}),
    "cogvideox": (
        "diffusers.CogVideoXTransformer3DModel",
        {
            "num_attention_heads": 48,
            "num_layers": 42,
            "patch_size_t": 2,
            "patch_bias": False,
            "ofs_embed_dim": None,
            "use_rotary_positional_embeddings": True,
        },
    ),
    "cogvideox vae": ("diffusers.AutoencoderKLCogVideoX", {}),
}


@cache
def module(name: str) -> Any:
    """Return a component on meta, in bf16."""
    path, config = CONFIGS[name]
    return meta_module(
        Component(name, path, None, dict(config), True, "bfloat16", ("bfloat16",)),
        ("diffusers", "transformers"),
    )


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return an input on meta."""
    return torch.empty(*shape, dtype=dtype, device="meta")


@cache
def call_of(name: str, tiled: bool = False) -> Call:
    """Return one call of a component for 512 x 768, 121 frames and 128 tokens of text."""
    component, inputs = module(name), _inputs(name)
    if name == "hunyuan vae":
        (component.enable_tiling if tiled else component.disable_tiling)()
    entry = component.decode if name.endswith("vae") else component
    recorder = Recorder(component, ())
    recorder.ignore(
        tensor for tensor in (*inputs[0], *inputs[1].values()) if isinstance(tensor, torch.Tensor)
    )
    with torch.no_grad(), FusedKernels(recorder), recorder:
        result = entry(*inputs[0], **inputs[1])
    del result
    recorder.close()
    return recorder.record


def _inputs(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    text = {"encoder_hidden_states": empty(1, 128, 4096), "timestep": empty(1)}
    mask = {"encoder_attention_mask": empty(1, 128)}
    # with and without the prompt
    text_inputs = {
        "encoder_hidden_states": empty(2, 128, 4096),
        "timestep": empty(2),
    }
    inputs_by_name: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "llama": (
            (),
            {"input_ids": empty(1, 128 + 95, dtype=torch.long), "output_hidden_states": True},
        ),
        "hunyuan": (
            (empty(1, 16, 31, 64, 96),),
            {**text, **mask, "pooled_projections": empty(1, 768), "guidance": empty(1)},
        ),
        "hunyuan vae": ((empty(1, 16, 31, 64, 96),), {"return_dict": False}),
        "ltx": (
            (empty(2, 6144, 128),),
            {
                **text_inputs,
                "encoder_attention_mask": empty(2, 128),
                "num_frames": 16,
                "height": 16,
                "width": 24,
            },
        ),
        "ltx vae": ((empty(1, 128, 16, 16, 24),), {"return_dict": False}),
        "cogvideox vae": ((empty(1, 16, 31, 64, 96),), {"return_dict": False}),
    }
    return inputs_by_name[name]


def peak(events: Sequence[MemoryEvent]) -> int:
    """Return the most bytes of a call besides weights and inputs."""
    return replay(events, Counting())


def activation(name: str, precision: str = "bfloat16", tiled: bool = False) -> int:
    """Return the most bytes of a call of a component with its weights in ``precision``."""
    call = call_of(name, tiled)
    shapes = quantized_shapes(module(name), "bfloat16")
    return peak(call.events) + quantization_scratch_bytes(call, shapes, precision)


@cache
def weights(name: str) -> dict[str, int]:
    """Return bytes by precision, as allocated."""
    return weights_by_precision(module(name), "bfloat16", allocated=True) | {
        "fp8": layerwise_bytes(name)
    }


def layerwise_bytes(name: str) -> int:
    """Return the bytes with diffusers' own layer-wise casting, as in the published fp8 rows:
    modulation and norms stay in 16 bits."""
    cast = copy.deepcopy(module(name))
    if hasattr(cast, "enable_layerwise_casting"):
        cast.enable_layerwise_casting(
            storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16
        )
    tensors = {id(tensor): tensor for tensor in (*cast.parameters(), *cast.buffers())}.values()
    return sum(round_up(tensor.numel() * tensor.element_size(), ROUND_BYTES) for tensor in tensors)


def outliers_bytes(share: float) -> int:
    """Return the growth of HunyuanVideo's int8 transformer with old versions of bitsandbytes."""
    shapes = quantized_shapes(module("hunyuan"), "bfloat16")
    return int(2 * share * sum(outputs * inputs for outputs, inputs in shapes.values()))


def hunyuan_bytes(row: dict[str, str], share: float) -> int:
    """Return the most bytes of HunyuanVideo; before bitsandbytes 0.48, int8 modules stay on their
    device."""
    precision, tiled = row["precision"], row["tiling"] == "yes"
    encoders = weights("llama")["bfloat16"] + weights("clip")["bfloat16"]
    transformer, vae = weights("hunyuan")[precision], weights("hunyuan vae")["bfloat16"]
    outlier_bytes = outliers_bytes(share) if precision == "int8" else 0
    encode, denoise = activation("llama"), activation("hunyuan", precision)
    decode = activation("hunyuan vae", tiled=tiled)
    if row["offload"] == "none":
        return (
            encoders
            + transformer
            + vae
            + max(encode, outlier_bytes + max(denoise, decode))
            + WORKSPACE_BYTES
        )
    pinned = transformer if precision == "int8" else 0
    phases = (
        pinned + weights("llama")["bfloat16"] + encode,
        transformer + outlier_bytes + denoise,
        pinned + outlier_bytes + vae + decode,
    )
    return max(phases) + WORKSPACE_BYTES


def bytes_of(row: dict[str, str], share: float) -> int:
    if row["pipeline"] == "HunyuanVideo":
        return hunyuan_bytes(row, share)
    name = "ltx" if row["pipeline"].startswith("LTX") else "cogvideox"
    static = sum(weights(part)["bfloat16"] for part in ("t5", name, f"{name} vae"))
    return static + activation(f"{name} vae") + WORKSPACE_BYTES


def rows() -> Iterator[dict[str, Any]]:
    """Yield every row, replayed; int8 rows with and without the outliers of old versions."""
    with (ROOT / "benchmarks/data/video_peaks.csv").open() as file:
        published = list(csv.DictReader(file))
    fitted = next(
        row
        for row in published
        if tuple(row[name] for name in ("pipeline", "precision", "offload", "tiling"))
        == OUTLIERS_FITTED
    )
    share = (float(fitted["peak_gib"]) * GIB - bytes_of(fitted, 0.0)) / outliers_bytes(1.0)
    for row in published:
        result: dict[str, Any] = {
            name: row[name]
            for name in ("pipeline", "precision", "offload", "tiling", "gpu", "source")
        }
        plain, peak_gib = bytes_of(row, 0.0) / GIB, float(row["peak_gib"])
        result["peak_gib"] = {
            "published": peak_gib,
            "predicted": round(plain, 3),
            "error_percent": round(100 * (plain / peak_gib - 1), 2),
        }
        if row["precision"] == "int8":
            predicted_gib = bytes_of(row, share) / GIB
            result["with_outliers"] = {
                "share_percent": round(100 * share, 2),
                "fitted": row is fitted,
                "predicted": round(predicted_gib, 3),
                "error_percent": round(100 * (predicted_gib / peak_gib - 1), 2),
            }
        yield result


if __name__ == "__main__":
    for row in rows():
        print(*row.values(), flush=True)
