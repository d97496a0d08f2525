"""Asks a trained pipeline for the held-out prompts, each with its seed, and lets the detector judge
the pictures.

python training/evaluate.py FOLDER [--steps 10] [--picture sheet.png]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from detector import judge
from diffusers import FluxPipeline
from PIL import Image
from scenes import SIZE, Scene, held_out

STEPS = 10


def load(folder: Path) -> FluxPipeline:
    """A saved pipeline in the precision in which it is saved and run."""
    pipe = FluxPipeline.from_pretrained(folder, dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def pictures(
    pipe: FluxPipeline, rows: list[tuple[Scene, int]], steps: int = STEPS, guidance: float = 1.0
) -> list[np.ndarray]:
    """The pipeline's pictures of scenes, each from its own seed, uint8 of shape (64, 64, 3)."""
    images: list[np.ndarray] = []
    for start in range(0, len(rows), 50):
        part = rows[start : start + 50]
        result = pipe(
            [scene.prompt for scene, _ in part],
            negative_prompt=[""] * len(part) if guidance > 1 else None,
            true_cfg_scale=guidance,
            height=SIZE,
            width=SIZE,
            num_inference_steps=steps,
            max_sequence_length=pipe.tokenizer.model_max_length,
            generator=[torch.Generator().manual_seed(seed) for _, seed in part],
        )
        images += [np.asarray(image) for image in result.images]
    return images


def score(
    pipe: FluxPipeline, rows: list[tuple[Scene, int]], steps: int = STEPS, guidance: float = 1.0
) -> dict[str, float]:
    """The share of pictures in which each thing that the detector judges is right."""
    judged = [
        judge(scene, picture)
        for (scene, _), picture in zip(rows, pictures(pipe, rows, steps, guidance), strict=True)
    ]
    return {
        name: round(sum(right[name] for right in judged) / len(judged), 3) for name in judged[0]
    }


def main() -> None:
    """Prints the figures of every part of the held-out prompts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument(
        "--guidance", type=float, default=1.0, help="above 1 with an empty negative prompt"
    )
    parser.add_argument("--picture", type=Path, help="a sheet of the first 8 pictures of each part")
    options = parser.parse_args()
    pipe = load(options.folder)
    parts = held_out()
    for part, rows in parts.items():
        print(
            json.dumps(
                {
                    "prompts": part,
                    "count": len(rows),
                    **score(pipe, rows, options.steps, options.guidance),
                }
            ),
            flush=True,
        )
    if options.picture:
        sheet = np.concatenate(
            [
                np.concatenate(pictures(pipe, rows[:8], options.steps, options.guidance), 1)
                for rows in parts.values()
            ]
        )
        Image.fromarray(sheet).resize(
            (sheet.shape[1] * 4, sheet.shape[0] * 4), Image.Resampling.NEAREST
        ).save(options.picture)


if __name__ == "__main__":
    main()
