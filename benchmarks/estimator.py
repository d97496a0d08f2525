"""Compare dry runs with published peaks: data/published_peaks.csv, and the VAE report it quotes.

    python benchmarks/estimator.py    writes results/estimator.json

Rules were fitted on the rows named in FITTED; every other row tests them. Nothing is fitted here:
`graphrun.profile.corrections` for the row's card and dtype is added to a trace.
"""

from __future__ import annotations

import csv
import datetime
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.update(TRANSFORMERS_VERBOSITY="error", DIFFUSERS_VERBOSITY="error", HF_HUB_OFFLINE="1")

import torch
from torch import nn
from vae_report import reserved_bytes, vae, vae_bytes
from videos import rows as video_rows

import graphrun
from graphrun.graph.graph import Graph
from graphrun.graph.parts import Component, Reference
from graphrun.graph.values import Input
from graphrun.model.allocator import Allocator, Counting
from graphrun.modules.build import meta_module
from graphrun.profile.dry_run import probe
from graphrun.profile.hardware import hardware
from graphrun.profile.phase_memory import phase_memories_of
from graphrun.profile.problems import phase_spans
from graphrun.profile.recording import Recording
from graphrun.units import GIB, MIB, round_up

ROOT = Path(__file__).parent.parent
CARDS = {"H100": "h100", "A100-40": "a100", "RTX4090": "rtx4090", "": "a100"}
FITTED = {
    "convolution scratch, 16 bit": "VAE decode, FLUX AE and SDXL, 16 bit, allocated (the "
    "ten points of the design)",
    "convolution scratch, 32 bit": "VAE decode, SDXL, fp32, 1024, allocated",
    "convolution scratch, 32 bit, strided": "VAE encode, SDXL, fp32, 512, reserved",
    "convolution scratch, 32 bit, 512 channels": "VAE encode, FLUX AE, fp32, 512, allocated; "
    "decode, 1536 and 2048, reserved",
    "convolution of a picture": "VAE encode, SDXL, fp16, 512, reserved",
    "convolution scratch, compute capability 9.0": "Flux, batch 16, H100",
    "outliers that old versions of bitsandbytes "
    "keep (not a rule of plans)": "HunyuanVideo, int8, nothing offloaded, not tiled",
}


def weight_bytes(module: nn.Module) -> int:
    """Return the bytes of all distinct tensors, each rounded up to its allocation."""
    return sum(
        round_up(t.numel() * t.element_size(), 512)
        for t in (*module.parameters(), *module.buffers())
    )


def with_images(graph: Graph, count: int) -> Graph:
    """Return the graph with ``num_images`` pictures for a prompt."""
    stages = tuple(
        replace(
            stage, arguments={**stage.arguments, "num_images": Reference("input", "num_images")}
        )
        if stage.op == "encode_prompt"
        else stage
        for stage in graph.stages
    )
    return replace(
        graph,
        inputs={**graph.inputs, "num_images": Input("num_images", "int", default=count)},
        stages=stages,
    )


def dry_run(name: str, images: int, **settings: int) -> Any:
    """Return the dry run of a reference graph."""
    graph = with_images(graphrun.load(ROOT / f"graphs/{name}.yaml"), images)
    return probe(graph, graph.for_planning({"steps": 2, **settings}))


def peaks(recording: Recording, card: str, allocator: Callable[[], Allocator]) -> dict[str, int]:
    """Return the peak without weights of each phase."""
    entries = recording.entries()
    spans = phase_spans(entries)
    phase_memories = phase_memories_of(recording, spans, hardware(card), allocator)
    return {
        f"{entries[begin][0]}/{begin}": max(
            phase_memory.entry_bytes, phase_memory.first_bytes, phase_memory.steady_bytes
        )
        for (begin, _), phase_memory in zip(spans, phase_memories, strict=True)
    }


def pipeline_bytes(name: str, card: str, images: int) -> dict[str, dict[str, int]]:
    """Return each component's weight bytes, and its phases' peak without weights, by stage."""
    recording, graph = dry_run(name, images), graphrun.load(ROOT / f"graphs/{name}.yaml")
    modules = {
        key: meta_module(component, graph.trust) for key, component in graph.components.items()
    }
    entries = recording.recording.entries()
    spans = phase_spans(entries)
    phases: dict[str, dict[str, int]] = {}
    for (begin, end), phase_memory in zip(
        spans, phase_memories_of(recording.recording, spans, hardware(card), Counting), strict=True
    ):
        for component in {call.component for _, call in entries[begin:end]}:
            row = phases.setdefault(
                component, {"weights": weight_bytes(modules[component]), "activation": 0}
            )
            row["activation"] = max(
                row["activation"],
                phase_memory.entry_bytes,
                phase_memory.first_bytes,
                phase_memory.steady_bytes,
            )
    return phases


def scaled(module: nn.Module, scale_bytes: int, kinds: tuple[type[nn.Module], ...]) -> int:
    """Return the bytes of weights with one byte an element in layers of ``kinds``. ``scale_bytes``:
    per output channel, in addition."""
    saved_bytes = 0
    for layer in module.modules():
        if isinstance(layer, kinds):
            weight: torch.Tensor = layer.weight
            saved_bytes += (
                weight.numel() * (weight.element_size() - 1) - scale_bytes * weight.shape[0]
            )
    return weight_bytes(module) - saved_bytes


def torchao_bytes(quant: str) -> int:
    """Return the bytes of FLUX's transformer in torchao's weight-only formats: per output channel a
    scale (fp8: fp32), in int8 also a zero point."""
    graph = graphrun.load(ROOT / "graphs/flux-dev.yaml")
    module = meta_module(graph.components["transformer"], graph.trust)
    return scaled(module, 2 + 8 if "int8" in quant else 4, (nn.Linear,))


def pixart(quant: str) -> int:
    """Return the bytes of PixArt-Sigma in fp16: T5-XXL (``wo`` in fp32), the transformer and SDXL's
    VAE."""
    t5 = graphrun.load(ROOT / "graphs/flux-dev.yaml").components["text_encoder_2"]
    config = {
        "sample_size": 128,
        "num_layers": 28,
        "num_attention_heads": 16,
        "attention_head_dim": 72,
        "in_channels": 4,
        "out_channels": 8,
        "patch_size": 2,
        "caption_channels": 4096,
        "cross_attention_dim": 1152,
        "use_additional_conditions": False,
    }
    path = "diffusers.PixArtTransformer2DModel"
    transformer = Component("transformer", path, None, config, True, "float16", ("float16",))
    allow = ("diffusers", "transformers")
    modules = {
        "transformer": meta_module(transformer, allow),
        "text_encoder": meta_module(replace(t5, dtype="float16"), allow),
    }
    sizes = {
        name: scaled(module, 2, (nn.Linear, nn.Conv2d))
        if name in quant and "fp8" in quant
        else weight_bytes(module)
        for name, module in modules.items()
    }
    return sum(sizes.values()) + weight_bytes(vae("sdxl", "float16"))


def predicted(row: dict[str, str]) -> tuple[float | None, float | None, str]:
    """Return (GiB at load, GiB at the peak, a note) of a published row; None if there is nothing to
    compare."""
    card, batch, pixels = CARDS[row["gpu"]], int(row["batch"]), int(row["height"])
    workspace = hardware(card).workspace_bytes
    if row["pipeline"].startswith("VAE"):
        mode, dtype = (
            row["pipeline"].split()[1],
            {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[row["dtype"]],
        )
        tile = int(row["offload"].split()[1]) if row["offload"].startswith("tile") else 0
        note = "load is the weights; the peak is what is taken beside them"
        weights = weight_bytes(vae("flux-dev" if "FLUX" in row["checkpoint"] else "sdxl", dtype))
        return weights / GIB, vae_bytes(row["checkpoint"], mode, pixels, dtype, tile) / GIB, note
    if row["pipeline"].startswith("PixArt"):
        note = (
            "cuBLAS workspace counted: the figure was read after a run. quanto: one byte and "
            "fp16 scales"
        )
        return (pixart(row["quant"]) + workspace) / GIB, None, note
    parts = pipeline_bytes("flux-dev" if row["pipeline"] == "Flux" else "sdxl", card, batch)
    return flux_or_sdxl(row, parts, workspace)


def flux_or_sdxl(
    row: dict[str, str], parts: dict[str, dict[str, int]], workspace: int
) -> tuple[float | None, float, str]:
    """Return `predicted` for these two pipelines."""
    if row["quant"].startswith("torchao"):
        parts["transformer"]["weights"] = torchao_bytes(row["quant"])
    load = sum(part["weights"] for part in parts.values())
    activation = {name: part["activation"] for name, part in parts.items()}
    if row["offload"] == "model":
        peak = max(part["weights"] + part["activation"] for part in parts.values()) + workspace
        note = "the largest of weights and activation of one component"
        if row["pipeline"] == "SDXL":
            peak = (
                parts["unet"]["weights"] + parts["vae"]["weights"] + activation["vae"] + workspace
            )
            note = (
                "the UNet stays beside the VAE: diffusers of that time called vae.decode past "
                "the hook that evicts it"
            )
        return None, peak / GIB, note
    if row["offload"] == "sequential":
        return (
            None,
            (max(activation.values()) + workspace) / GIB,
            "activation alone; the leaf on the device is small at the peak",
        )
    note = (
        "all weights resident; the peak is the VAE's"
        if activation["vae"] == max(activation.values())
        else "all weights resident"
    )
    return load / GIB, (load + max(activation.values()) + workspace) / GIB, note


def compared(published: float, estimate: float | None) -> dict[str, Any]:
    """Return the published and the predicted value, and the error in percent."""
    if estimate is None:
        return {"published": published}
    return {
        "published": published,
        "predicted": round(estimate, 3),
        "error_percent": round(100 * (estimate / published - 1), 2),
    }


def published_rows() -> Iterator[dict[str, Any]]:
    with (ROOT / "benchmarks/data/published_peaks.csv").open() as file:
        for row in csv.DictReader(file):
            load, peak, note = predicted(row)
            names = (
                "pipeline",
                "checkpoint",
                "dtype",
                "quant",
                "offload",
                "height",
                "batch",
                "gpu",
                "metric",
            )
            result: dict[str, Any] = {name: row[name] for name in names}
            if row["load_gib"]:
                result["load_gib"] = compared(float(row["load_gib"]), load)
            if row["peak_gib"]:
                result["peak_gib"] = compared(float(row["peak_gib"]), peak)
            yield {**result, "note": note}


def report_rows() -> Iterator[dict[str, Any]]:
    """Yield every size of the VAE report that was not tiled: allocated, and reserved with native
    segments (the default then)."""
    with (ROOT / "benchmarks/data/vae_report.csv").open() as file:
        for row in csv.DictReader(file):
            arguments = (row["model"], row["mode"], int(row["pixels"]), row["dtype"])
            allocated, reserved_mib = vae_bytes(*arguments) / MIB, reserved_bytes(*arguments) / MIB
            yield {
                **{name: row[name] for name in ("model", "mode", "pixels", "dtype")},
                "allocated_mib": compared(float(row["allocated_mib"]), allocated),
                "reserved_mib": compared(float(row["reserved_mib"]), reserved_mib),
            }


def main() -> None:
    result = {
        "date": datetime.date.today().isoformat(),
        "versions": {name: version(name) for name in ("torch", "diffusers", "transformers")},
        "fitted_on": FITTED,
        "published_peaks": list(published_rows()),
        "vae_report": list(report_rows()),
        "videos": list(video_rows()),
    }
    path = ROOT / "benchmarks/results/estimator.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["published_peaks"]:
        texts = [f"{kind} {row[kind]}" for kind in ("load_gib", "peak_gib") if kind in row]
        print(
            row["pipeline"],
            row["checkpoint"],
            row["quant"],
            row["offload"],
            row["height"],
            row["batch"],
            row["metric"],
            *texts,
        )
    for row in result["vae_report"]:
        print(
            *(
                row[name]
                for name in ("model", "mode", "pixels", "dtype", "allocated_mib", "reserved_mib")
            )
        )
    for row in result["videos"]:
        print(
            *(row[name] for name in ("pipeline", "precision", "offload", "tiling", "peak_gib")),
            row.get("with_outliers", ""),
        )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
