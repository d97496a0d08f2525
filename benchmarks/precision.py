"""Measure the effect of precision, tiling, splitting and fewer steps on pictures of graphs/shapes.

    python benchmarks/precision.py              writes results/precision.json and the table of
                                                docs/precision.md
    python benchmarks/precision.py --count 5    the first 5 prompts of each kind, only printed

The held-out prompts of training/ (200 with one object, 200 with two), each with its seed. A
detector judges the pictures; they are compared with those in bfloat16 at 10 steps. The
transformer's linear layers are quantized, as graphrun does it; the text encoders and the VAE stay
in bfloat16.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import textwrap
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import graphrun
from graphrun.modules.blocks import lay_out
from graphrun.modules.build import draft
from graphrun.modules.quantize import quantizable_layers, quantized

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "training"))
RESULTS, DOCS = ROOT / "benchmarks" / "results" / "precision.json", ROOT / "docs" / "precision.md"
STEPS = 10
# pixels: the small VAE's own tile is the whole picture, as is FLUX's at 1024 pixels
TILE = 32
LINE = "| {} | {} | {} | {} | {} |"


def in_precision(precision: str) -> Any:
    """Return the transformer with weights in ``precision``, on the CPU."""
    graph = graphrun.load("shapes")
    if precision == "nf4":
        # as a GPU dequantizes it; bitsandbytes' CPU kernel is wrong for rows of 32 elements, which
        # one layer has
        module = in_precision("bfloat16")
        for layer in quantizable_layers(module, torch.bfloat16).values():
            fields = quantized(layer.weight, "nf4")
            codes = (
                torch.stack([fields["data"].flatten() >> 4, fields["data"].flatten() & 15], 1)
                .flatten()
                .long()
            )
            values = fields["code"][codes].view(-1, 64) * fields["absmax"][:, None]
            layer.weight = nn.Parameter(
                values.view(layer.weight.shape).bfloat16(), requires_grad=False
            )
        return module
    module, writer = draft(graph.component("transformer"), graph, precision)
    for layout in lay_out(module, ()).values():
        buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
        writer.write(layout, buffer)
        for entry in layout.entries:
            value = (
                buffer[entry.offset : entry.offset + entry.nbytes]
                .view(entry.tensor.dtype)
                .view(entry.tensor.shape)
            )
            if isinstance(entry.tensor, nn.Parameter):
                attributes, value = vars(entry.tensor), nn.Parameter(value, requires_grad=False)
                vars(value).update(attributes)
            for location in entry.locations:
                location.assign(value)
    return module


def variants(pipe: Any) -> dict[str, Callable[[list[Any]], list[np.ndarray]]]:
    """Return the functions that make pictures of scenes with their seeds; the first is the
    reference."""
    from evaluate import pictures

    def quantized_pictures(precision: str) -> Callable[[list[Any]], list[np.ndarray]]:
        pipe_copy = copy.copy(pipe)
        pipe_copy.register_modules(transformer=in_precision(precision))
        return lambda rows: pictures(pipe_copy, rows, STEPS)

    def tiled(rows: list[Any]) -> list[np.ndarray]:
        methods = {
            name: value
            for name, value in vars(pipe.vae).items()
            if name.startswith(("use_", "tile_"))
        }
        pipe.vae.enable_tiling()
        pipe.vae.tile_sample_min_size, pipe.vae.tile_latent_min_size = (
            TILE,
            TILE // pipe.vae_scale_factor,
        )
        images = pictures(pipe, rows, STEPS)
        vars(pipe.vae).update(methods)
        return images

    return {
        "bf16": lambda rows: pictures(pipe, rows, STEPS),
        **{name: quantized_pictures(name) for name in ("fp8", "int8", "nf4")},
        f"tiling ({TILE} pixels)": tiled,
        "split (one prompt a call)": lambda rows: [
            image for row in rows for image in pictures(pipe, [row], STEPS)
        ],
        **{
            f"{steps} step{'s' * (steps > 1)}": lambda rows, steps=steps: pictures(
                pipe, rows, steps
            )
            for steps in (8, 6, 4, 2, 1)
        },
    }


def measured(count: int | None) -> list[dict[str, Any]]:
    """Return a row for each variant: the shares of correct pictures, and PSNR to the reference in
    dB, of all pictures and of the worst. None for equal pictures."""
    from detector import judge
    from evaluate import load
    from scenes import held_out

    parts = {name: rows[:count] for name, rows in held_out().items() if name in ("one", "two")}
    rows, results, first = (
        [row for part in parts.values() for row in part],
        list[dict[str, Any]](),
        np.empty(0),
    )
    for name, make in variants(load(ROOT / "graphs" / "shapes")).items():
        images = np.stack(make(rows)).astype(float)
        first = first if results else images
        right = [
            judge(scene, picture.astype(np.uint8))["all"]
            for (scene, _), picture in zip(rows, images, strict=True)
        ]
        errors, split = ((images - first) ** 2).mean((1, 2, 3)), len(parts["one"])
        shares = {
            "one": sum(right[:split]) / split,
            "two": sum(right[split:]) / (len(right) - split),
        }
        results.append(
            {"name": name, **shares, "psnr": psnr(errors.mean()), "worst_psnr": psnr(errors.max())}
        )
        print(json.dumps(results[-1]), flush=True)
    return results


def psnr(error: float) -> float | None:
    """Return PSNR in dB, 10 log10(255^2 / MSE), for a mean squared error of 8-bit values."""
    return round(10 * math.log10(255**2 / error), 1) if error else None


def table(results: dict[str, Any]) -> str:
    lines = [
        LINE.format("", "one object", "two objects", "PSNR", "of the worst picture"),
        "|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        decibels = [
            "equal" if row[key] is None else f"{row[key]} dB" for key in ("psnr", "worst_psnr")
        ]
        lines.append(
            LINE.format(
                row["name"], *(f"{100 * row[key]:.1f} %" for key in ("one", "two")), *decibels
            )
        )
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    return "\n".join(
        [
            *lines,
            "",
            textwrap.fill(
                f"Made by `python benchmarks/precision.py` on {results['date']} with "
                f"{versions}, on a CPU.",
                120,
            ),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int)
    options = parser.parse_args()
    rows = measured(options.count)
    if options.count is not None:
        return
    import bitsandbytes
    import diffusers

    versions = {
        library.__name__: library.__version__ for library in (torch, diffusers, bitsandbytes)
    }
    results = {
        "date": date.today().isoformat(),
        "versions": versions,
        "prompts": [200, 200],
        "steps": STEPS,
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    text = DOCS.read_text(encoding="utf-8")
    intro, _, rest = text.partition("|  | one object")
    notes = rest[rest.index("\n\n- ") :]
    DOCS.write_text(intro + table(results) + notes, encoding="utf-8")


if __name__ == "__main__":
    main()
