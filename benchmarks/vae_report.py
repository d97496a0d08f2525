"""Measure the VAEs of InvokeAI's benchmark report as its scripts do: encode or decode, no weights.

Source: benchmark_flux_vae.py and benchmark_sd_vae.py in vae_benchmarks/ of invoke-ai/InvokeAI, and
their report (RTX 4090). For each size there are two rounds first, then the cache is emptied;
allocated is the peak minus the bytes allocated before, reserved the most reserved minus the bytes
reserved before. Weights, the input and the result of an earlier round stay on the card.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import graphrun
from graphrun.model.allocator import Allocator, Counting, Native
from graphrun.modules.build import meta_module
from graphrun.profile.fused_kernels import FusedKernels
from graphrun.profile.recorder import Recorder
from graphrun.profile.recording import MemoryEvent

ROOT = Path(__file__).parent.parent


def trace(module: nn.Module, call: Callable[..., Any], *inputs: torch.Tensor) -> list[MemoryEvent]:
    """Return every allocation of one call, released at the end."""
    recorder = Recorder(module, ())
    recorder.ignore(inputs)
    with torch.no_grad(), FusedKernels(recorder), recorder:
        result = call(*inputs)
    del result
    recorder.close()
    return recorder.record.events


def replay(events: Sequence[MemoryEvent], allocator: Allocator) -> int:
    """Return the most bytes that ``allocator`` used during ``events``, all released again."""
    peak = allocator.used_bytes
    for event in events:
        if not event.nbytes and not event.scratch:
            allocator.release(event.key)
        elif event.nbytes:
            key = -1 if event.scratch else event.key  # the key of scratch is a kernel's number
            allocator.allocate(key, event.nbytes)
            peak = max(peak, allocator.used_bytes)
            if event.scratch:
                allocator.release(key)
    return peak


class FluxAE(nn.Module):
    """The FLUX autoencoder of its own repository, with the (equal) layers of diffusers'.

    One variable runs through the decoder, so that no caller refers to an earlier tensor; the
    encoder keeps every block's result.
    """

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.vae = vae

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Encode pictures ``[b 3 h w]`` to a sample of latents ``[b c h/8 w/8]``."""
        mean, logvar = self.encoded(x).chunk(2, dim=1)
        return mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)

    def encoded(self, x: torch.Tensor) -> torch.Tensor:
        """Encode pictures to means and logarithms of variances ``[b 2c h/8 w/8]``."""
        encoder = self.vae.encoder
        skips = [encoder.conv_in(x)]
        for block in encoder.down_blocks:
            for resnet in block.resnets:
                h = self.resnet(resnet, skips[-1])
                skips.append(h)
            if block.downsamplers:
                skips.append(self.downsample(block.downsamplers[0], skips[-1]))
        h = skips[-1]
        h = self.resnet(encoder.mid_block.resnets[0], h)
        h = encoder.mid_block.attentions[0](h)
        h = self.resnet(encoder.mid_block.resnets[1], h)
        h = nn.functional.silu(encoder.conv_norm_out(h))
        return encoder.conv_out(h)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        """Decode latents ``[b c h/8 w/8]`` to pictures ``[b 3 h w]``."""
        z = z / 0.3611 + 0.1159
        return self.decoded(z)

    def decoded(self, z: torch.Tensor) -> torch.Tensor:
        """Decode scaled latents."""
        decoder = self.vae.decoder
        h = decoder.conv_in(z)
        h = self.resnet(decoder.mid_block.resnets[0], h)
        h = decoder.mid_block.attentions[0](h)
        h = self.resnet(decoder.mid_block.resnets[1], h)
        for block in decoder.up_blocks:
            for resnet in block.resnets:
                h = self.resnet(resnet, h)
            if block.upsamplers:
                h = self.upsample(block.upsamplers[0], h)
        h = nn.functional.silu(decoder.conv_norm_out(h))
        return decoder.conv_out(h)

    def resnet(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        """Return x + f(x), with a 1 x 1 convolution on x if the channels differ."""
        h = nn.functional.silu(block.norm1(x))
        h = block.conv1(h)
        h = block.norm2(h)
        h = nn.functional.silu(h)
        h = block.conv2(h)
        if block.conv_shortcut is not None:
            x = block.conv_shortcut(x)
        return x + h

    def upsample(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.interpolate(x, scale_factor=2.0, mode="nearest")
        return block.conv(x)

    def downsample(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.pad(x, (0, 1, 0, 1), mode="constant", value=0)
        return block.conv(x)


@cache
def vae(name: str, dtype: str) -> Any:
    """Return the VAE of a reference graph on meta, in ``dtype``."""
    graph = graphrun.load(ROOT / f"graphs/{name}.yaml")
    return meta_module(replace(graph.components["vae"], dtype=dtype), graph.trust)


@cache
def events_of(model: str, mode: str, pixels: int, dtype: str, tile: int = 0) -> list[MemoryEvent]:
    """Return the allocations of one encode or decode of a square picture. SD 1.5's VAE has SDXL's
    configuration."""
    flux = model.startswith("FLUX")
    module = vae("flux-dev" if flux else "sdxl", dtype)
    channels, side = (
        (3, pixels) if mode == "encode" else (module.config["latent_channels"], pixels // 8)
    )
    x = torch.empty(1, channels, side, side, dtype=getattr(torch, dtype), device="meta")
    if flux:
        walked = FluxAE(module)
        return trace(walked, walked.encode if mode == "encode" else walked.decode, x)
    (module.enable_tiling if tile else module.disable_tiling)()
    if tile:
        module.tile_sample_min_size, module.tile_latent_min_size = tile, tile // 8
    if mode == "encode":
        return trace(
            module,
            lambda x: (
                d := module.encode(x).latent_dist,
                module.config["scaling_factor"] * d.sample(),
            ),
            x,
        )
    return trace(
        module,
        lambda z: (
            z := z / module.config["scaling_factor"],
            module.decode(z, return_dict=False)[0],
        ),
        x,
    )


def vae_bytes(model: str, mode: str, pixels: int, dtype: str, tile: int = 0) -> int:
    """Return the most bytes allocated besides weights and input."""
    return replay(events_of(model, mode, pixels, dtype, tile), Counting())


def reserved_bytes(model: str, mode: str, pixels: int, dtype: str) -> int:
    """Return the additional bytes that native segments reserve in a later call. Weights, the input
    and an earlier result are already allocated."""
    module, size = (
        vae("flux-dev" if model.startswith("FLUX") else "sdxl", dtype),
        getattr(torch, dtype).itemsize,
    )
    allocator = Native()
    for number, tensor in enumerate(module.parameters()):
        allocator.allocate(-2 - number, tensor.numel() * tensor.element_size())
    picture, latents = (
        3 * pixels**2 * size,
        module.config["latent_channels"] * (pixels // 8) ** 2 * size,
    )
    for key, nbytes in zip((10**9, 10**9 + 1), (picture, latents), strict=True):
        allocator.allocate(key, nbytes)
    start_bytes = allocator.used_bytes
    return replay(events_of(model, mode, pixels, dtype), allocator) - start_bytes
