"""A stand-in for Pyramid-Flow, whose own code is no package: its sizes and its pattern of calls, not its results.

A video is made in units of eight frames (the first of one), each in three stages of growing resolution, each stage in some steps.
Every step sees a history that grows with the units: the frame before at the stage's resolution, up to eight older ones at half.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DiffusionPipeline, FluxTransformer2DModel
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.attention_processor import Attention
from diffusers.models.modeling_utils import ModelMixin
from diffusers.utils.accelerate_utils import apply_forward_hook
from diffusers.utils.torch_utils import randn_tensor
from diffusers.video_processor import VideoProcessor
from torch import nn
from torch.nn import functional

STAGES = 3
OLDER = 8  # frames of history at half resolution
TILE, STRIDE = 32, 24  # latents of a tile, and between the beginnings of two: a quarter overlaps, and is blended away


class PyramidFluxTransformer(FluxTransformer2DModel):  # type: ignore[misc]
    """miniFLUX: FLUX's blocks, fewer and narrower."""


class CausalConv(nn.Conv3d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k = self.kernel_size[0]
        return super().forward(functional.pad(x, (k // 2, k // 2, k // 2, k // 2, k - 1, 0)))


class Resnet(nn.Module):
    def __init__(self, inside: int, out: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, inside), CausalConv(inside, out, 3)
        self.norm2, self.conv2 = nn.GroupNorm(groups, out), CausalConv(out, out, 3)
        self.conv_shortcut = CausalConv(inside, out, 1) if inside != out else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.conv1(functional.silu(self.norm1(x)))
        hidden = self.conv2(functional.silu(self.norm2(hidden)))
        return hidden + (x if self.conv_shortcut is None else self.conv_shortcut(x))


class Middle(nn.Module):
    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList([Resnet(width, width, groups) for _ in range(2)])
        self.attention = Attention(
            width,
            heads=1,
            dim_head=width,
            norm_num_groups=groups,
            bias=True,
            residual_connection=True,
            _from_deprecated_attn_block=True,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.resnets[0](x)
        b, c, t, h, w = x.shape
        frames = x.permute(0, 2, 1, 3, 4).reshape(b * t, c, h, w)
        x = self.attention(frames).reshape(b, t, c, h, w).permute(0, 2, 1, 3, 4)
        return self.resnets[1](x)


class Level(nn.Module):
    """Resnets of one resolution; ``up`` doubles height and width, then time, through channels. The encoder's are never run."""

    def __init__(self, inside: int, out: int, layers: int, groups: int, *, up: bool, last: bool) -> None:
        super().__init__()
        self.resnets = nn.ModuleList([Resnet(inside if n == 0 else out, out, groups) for n in range(layers)])
        self.space = None if last else CausalConv(out, 4 * out if up else out, 3)
        self.time = None if last else CausalConv(out, 2 * out if up else out, 3)

    def forward(self, x: torch.Tensor, first: bool) -> torch.Tensor:
        for resnet in self.resnets:
            x = resnet(x)
        if self.space is None or self.time is None:
            return x
        b, c, t, h, w = x.shape
        x = self.space(x).reshape(b, c, 2, 2, t, h, w).permute(0, 1, 4, 5, 2, 6, 3).reshape(b, c, t, 2 * h, 2 * w)
        x = self.time(x).reshape(b, c, 2, t, 2 * h, 2 * w).transpose(2, 3).reshape(b, c, 2 * t, 2 * h, 2 * w)
        return x[:, :, 1:] if first else x


class Half(nn.Module):
    """The encoder or the decoder."""

    def __init__(self, channels: tuple[int, int], widths: list[int], layers: int, groups: int, *, up: bool) -> None:
        super().__init__()
        order = widths[::-1] if up else widths
        self.conv_in = CausalConv(channels[0], order[0], 3)
        pairs = list(zip([order[0], *order], order, strict=False))
        self.levels = nn.ModuleList(
            [Level(a, b, layers, groups, up=up, last=n == len(pairs) - 1) for n, (a, b) in enumerate(pairs)]
        )
        self.middle = Middle(widths[-1], groups)
        self.conv_norm_out, self.conv_out = nn.GroupNorm(groups, order[-1]), CausalConv(order[-1], channels[1], 3)

    def forward(self, x: torch.Tensor, first: bool) -> torch.Tensor:
        x = self.middle(self.conv_in(x))
        for level in self.levels:
            x = level(x, first)
        return self.conv_out(functional.silu(self.conv_norm_out(x)))


class CausalVideoVAE(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Latents ``[b c t h w]`` are decoded to 8 (t - 1) + 1 frames: two, then one by one; if asked, so in tiles that overlap.

    What its convolutions keep from one piece for the next is left out.
    """

    @register_to_config
    def __init__(self, latent_channels: int = 16, widths: tuple[int, ...] = (128, 256, 512, 512), groups: int = 32) -> None:
        super().__init__()
        self.use_tiling = False
        self.encoder = Half((3, 2 * latent_channels), list(widths), 2, groups, up=False)
        self.decoder = Half((latent_channels, 3), list(widths), 3, groups, up=True)
        self.quant_conv = CausalConv(2 * latent_channels, 2 * latent_channels, 1)
        self.post_quant_conv = CausalConv(latent_channels, latent_channels, 1)

    def enable_tiling(self) -> None:
        self.use_tiling = True

    def disable_tiling(self) -> None:
        self.use_tiling = False

    def _frames(self, z: torch.Tensor) -> torch.Tensor:
        pieces = [z[:, :, :2], *(z[:, :, n : n + 1] for n in range(2, z.shape[2]))]
        return torch.cat([self.decoder(self.post_quant_conv(piece), n == 0) for n, piece in enumerate(pieces)], dim=2)

    @apply_forward_hook  # type: ignore[untyped-decorator]
    def decode(self, z: torch.Tensor) -> torch.Tensor:
        h, w = z.shape[-2:]
        if not self.use_tiling or max(h, w) <= TILE:
            return self._frames(z)
        rows = [[self._frames(z[..., y : y + TILE, x : x + TILE]) for x in range(0, w, STRIDE)] for y in range(0, h, STRIDE)]
        kept = 8 * STRIDE
        return torch.cat([torch.cat([tile[..., :kept, :kept] for tile in row], dim=4) for row in rows], dim=3)


class PyramidFlowPipeline(DiffusionPipeline):  # type: ignore[misc]
    """Prompt to video. ``num_inference_steps`` are those of each stage of the first unit; later units take half of them."""

    model_cpu_offload_seq = "text_encoder->text_encoder_2->transformer->vae"

    def __init__(
        self, scheduler: Any, vae: Any, text_encoder: Any, tokenizer: Any, text_encoder_2: Any, tokenizer_2: Any, transformer: Any
    ) -> None:
        super().__init__()
        self.register_modules(
            scheduler=scheduler,
            vae=vae,
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            text_encoder_2=text_encoder_2,
            tokenizer_2=tokenizer_2,
            transformer=transformer,
        )
        self.video_processor = VideoProcessor(vae_scale_factor=8)

    def encode_prompt(
        self,
        prompt: str,
        negative_prompt: str = "",
        device: Any = None,
        num_videos_per_prompt: int = 1,
        max_sequence_length: int = 128,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        made = []
        for text in (prompt, negative_prompt):
            ids = self._ids(self.tokenizer, text, 77)
            pooled_prompt_embeds = self.text_encoder(ids.to(device)).pooler_output.repeat(num_videos_per_prompt, 1)
            ids = self._ids(self.tokenizer_2, text, max_sequence_length)
            prompt_embeds = self.text_encoder_2(ids.to(device))[0].repeat(num_videos_per_prompt, 1, 1)
            made += [prompt_embeds, pooled_prompt_embeds]
        prompt_embeds, pooled_prompt_embeds, negative_prompt_embeds, negative_pooled_prompt_embeds = made
        return prompt_embeds, pooled_prompt_embeds, negative_prompt_embeds, negative_pooled_prompt_embeds

    @staticmethod
    def _ids(tokenizer: Any, text: str, length: int) -> torch.Tensor:
        found: torch.Tensor = tokenizer(
            text, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        ).input_ids
        return found

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | None = None,
        negative_prompt: str = "",
        height: int = 768,
        width: int = 1280,
        num_frames: int = 121,
        num_inference_steps: int = 20,
        guidance_scale: float = 7.0,
        num_videos_per_prompt: int = 1,
        generator: torch.Generator | None = None,
        latents: torch.Tensor | None = None,
        prompt_embeds: torch.Tensor | None = None,
        pooled_prompt_embeds: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        negative_pooled_prompt_embeds: torch.Tensor | None = None,
        max_sequence_length: int = 128,
        output_type: str = "pil",
        return_dict: bool = True,
    ) -> Any:
        if prompt_embeds is None:
            prompt_embeds, pooled_prompt_embeds, negative_prompt_embeds, negative_pooled_prompt_embeds = self.encode_prompt(
                prompt or "", negative_prompt or "", self._execution_device, num_videos_per_prompt, max_sequence_length
            )
        texts = {
            "encoder_hidden_states": torch.cat([negative_prompt_embeds, prompt_embeds]),
            "pooled_projections": torch.cat([negative_pooled_prompt_embeds, pooled_prompt_embeds]),
        }
        if latents is None:
            size = (len(prompt_embeds), self.vae.config.latent_channels, 1, height // 8, width // 8)
            done: list[torch.Tensor] = []
            for unit in range((num_frames - 1) // 8 + 1):
                steps = num_inference_steps if unit == 0 else max(1, num_inference_steps // 2)
                noise = randn_tensor(size, generator, self._execution_device, prompt_embeds.dtype)
                done.append(self._unit(noise, done, texts, steps, guidance_scale))
            latents = torch.cat(done, dim=2)
        if output_type == "latent":
            return (latents,)
        video = self.vae.decode(latents)
        return (self.video_processor.postprocess_video(video, output_type=output_type),)

    def _unit(self, noise: torch.Tensor, done: list[torch.Tensor], texts: Any, steps: int, scale: float) -> torch.Tensor:
        """One latent frame ``[b c 1 h w]`` from its noise and the frames that are ``done``."""
        latents = _resized(noise, STAGES - 1)
        for stage in range(STAGES):
            if stage:
                latents = functional.interpolate(latents[:, :, 0], scale_factor=2, mode="nearest").unsqueeze(2)
            smaller = STAGES - 1 - stage
            near = [_tokens(_resized(done[-1], smaller))] if done else []
            history = [_tokens(_resized(frame, smaller + 1)) for frame in done[-1 - OLDER : -1]] + near
            self.scheduler.set_timesteps(steps, device=latents.device)
            for t in self.scheduler.timesteps:
                current = _tokens(latents)
                tokens = torch.cat([torch.cat([*history, current], dim=1)] * 2)
                predicted = self.transformer(
                    hidden_states=tokens,
                    timestep=t.expand(len(tokens)).to(tokens.dtype) / 1000,
                    img_ids=torch.zeros(tokens.shape[1], 3, device=tokens.device),
                    txt_ids=torch.zeros(texts["encoder_hidden_states"].shape[1], 3, device=tokens.device),
                    return_dict=False,
                    **texts,
                )[0][:, -current.shape[1] :]
                negative, positive = predicted.chunk(2)
                flow = _latents(negative + scale * (positive - negative), latents.shape)
                latents = self.scheduler.step(flow, t, latents, return_dict=False)[0]
        return latents


def _resized(frame: torch.Tensor, halvings: int) -> torch.Tensor:
    """``[b c 1 h w]``, its height and width halved some times."""
    return functional.avg_pool2d(frame[:, :, 0], 2**halvings).unsqueeze(2) if halvings else frame


def _tokens(frame: torch.Tensor) -> torch.Tensor:
    """``[b h/2*w/2 4c]`` from ``[b c 1 h w]``."""
    b, c, _, h, w = frame.shape
    return frame.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h * w // 4, 4 * c)


def _latents(tokens: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    b, c, t, h, w = shape
    return tokens.reshape(b, h // 2, w // 2, c, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(b, c, t, h, w)
