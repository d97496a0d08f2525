"""Attaches graphrun to a diffusers pipeline, in place of ``pipe.to("cuda")``, and shows planned
beside measured numbers.

    python examples/attach.py           on the simulated accelerator, with a small FLUX of random
    weights

On a machine with a card, load a pipeline of your own and leave ``device`` out.
"""

from __future__ import annotations

import torch
from tiny_flux import tiny_flux

import graphrun

pipe = tiny_flux()
with graphrun.attach(pipe, vram="8M", device="sim", tell=print):
    for seed in (0, 1):
        arguments = {"num_inference_steps": 4, "max_sequence_length": 64}
        image = pipe(
            "a lighthouse at dusk", generator=torch.Generator().manual_seed(seed), **arguments
        ).images[0]
        image.save(f"attach-{seed}.png")
    print(pipe.graphrun.report())
