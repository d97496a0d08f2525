"""Code of other programs and versions that allocates other bytes than the installed diffusers.

A row of data/published.csv names it in its column ``code``; `published.py` then estimates the row
with this code in place of the library's.

    diffusers 0.30    each layer of CogVideoX's VAE replaces its cache. Since 0.31 the decoder gets
                      the last call's caches and returns new ones, so there are two at once; and
                      spatial norms make both convolutions before the norm
    ..., fused        also `fuse_qkv_projections`, which keeps the unfused products
    InvokeAI          the autoencoder of FLUX's own repository (`vae_report.FluxAE`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from diffusers import AutoencoderKLCogVideoX, CogVideoXTransformer3DModel
from diffusers.models.autoencoders.autoencoder_kl_cogvideox import (
    CogVideoXCausalConv3d,
    CogVideoXSpatialNorm3D,
)
from diffusers.models.autoencoders.vae import Decoder, Encoder
from torch import nn
from vae_report import FluxAE

FUSED = ", fused"


@contextmanager
def other_code(name: str) -> Iterator[None]:
    """Use the code called ``name``; an empty one: the library's."""
    base = name.removesuffix(FUSED)
    with _PATCHES[base]():
        if base == name:
            yield
        else:
            with patch.object(CogVideoXTransformer3DModel, "__init__", _fused_init):
                yield


@contextmanager
def _diffusers_0_30() -> Iterator[None]:
    decode = AutoencoderKLCogVideoX._decode

    def cleared_decode(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = decode(self, *args, **kwargs)
        for module in self.modules():
            module.__dict__.pop("frames", None)
        return result

    with (
        patch.object(CogVideoXCausalConv3d, "forward", _keeping_forward),
        patch.object(CogVideoXSpatialNorm3D, "forward", _norm_forward),
        patch.object(AutoencoderKLCogVideoX, "_decode", cleared_decode),
    ):
        yield


def _keeping_forward(self: Any, inputs: Any, conv_cache: Any = None) -> tuple[Any, None]:
    """Convolve ``inputs`` after the cached frames, and replace the layer's own cache."""
    inputs = self.fake_context_parallel_forward(inputs, self.__dict__.pop("frames", None))
    self.frames = inputs[:, :, -self.time_kernel_size + 1 :].clone()
    return self.conv(inputs), None


def _norm_forward(self: Any, f: Any, zq: Any, conv_cache: Any = None) -> tuple[Any, None]:
    """Scale and shift the normalized ``f`` by convolutions of ``zq``, one after the other."""
    ends = [0, 1, f.shape[2]] if f.shape[2] > 1 and f.shape[2] % 2 else [0, f.shape[2]]
    parts = [
        nn.functional.interpolate(
            zq[:, :, first : last if last < f.shape[2] else None],
            size=(last - first, *f.shape[-2:]),
        )
        for first, last in pairwise(ends)
    ]
    zq = torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]
    return self.norm_layer(f) * self.conv_y(zq)[0] + self.conv_b(zq)[0], None


_init = CogVideoXTransformer3DModel.__init__


@wraps(_init)
def _fused_init(self: Any, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    self.fuse_qkv_projections()


@contextmanager
def _invoke_ai() -> Iterator[None]:
    def encoded(self: Any, sample: Any) -> Any:
        return FluxAE(SimpleNamespace(encoder=self)).encoded(sample)

    def decoded(self: Any, sample: Any, latent_embeds: Any = None) -> Any:
        return FluxAE(SimpleNamespace(decoder=self)).decoded(sample)

    with patch.object(Encoder, "forward", encoded), patch.object(Decoder, "forward", decoded):
        yield


@contextmanager
def _installed() -> Iterator[None]:
    yield


_PATCHES: dict[str, Callable[[], Any]] = {
    "": _installed,
    "diffusers 0.30": _diffusers_0_30,
    "InvokeAI": _invoke_ai,
}
