"""Trains a small FLUX on drawn shapes, from nothing, on a CPU or a card.

    python training/train.py FOLDER                  # everything; the pipeline is FOLDER/pipeline
    python training/train.py FOLDER --rounds 300     # goes on from the last checkpoint in FOLDER

Tokenizers come from the prompts, then the VAE is trained, then text encoders and transformer
together on the VAE's latents. A round is a fixed number of steps on pictures drawn for it. What is
drawn in a round depends on its number alone, so a run that was interrupted goes on as if it had not
been: a checkpoint is written after each round. FOLDER/log.jsonl has the learning curve.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from evaluate import score
from scenes import SIZE, Scene, draw, scenes, training
from torch.nn import functional
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

# tokens of a prompt with its end: the longest has eleven; FLUX has no padding mask, so padding is
# trained too
LENGTH = 12
WIDTH = 64  # of both text encoders
LATENT = 8  # channels; 64 pixels become 8 x 8 latents, 4 x 4 tokens of the transformer
VAE_ROUNDS, DECODER_ROUNDS, VAE_STEPS, VAE_BATCH = 60, 60, 50, 8
ROUND_STEPS, BATCH = 100, 32
REPEATS = 8  # of each picture of a round, every time with new noise
RATE = 2e-3
WATCH = 4  # rounds between two looks at pictures
EMPTY = 0.1  # share of prompts left empty, for guidance by a negative prompt


def tokenizers() -> tuple[CLIPTokenizer, T5Tokenizer]:
    """Both tokenizers, with every word of the prompts as one token, and letters for other words."""
    prompts = [scene.prompt for objects in (1, 2) for scene in scenes(objects)]
    words = sorted({word for prompt in prompts for word in prompt.split()})
    clip = CLIPTokenizer().train_new_from_iterator(words, vocab_size=1024, show_progress=False)
    clip.model_max_length = LENGTH
    pieces = (
        [("▁" + word, -3.0) for word in words]
        + [("▁", -6.0)]
        + [(letter, -9.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
    )
    specials = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    return clip, T5Tokenizer(vocab=specials + pieces, extra_ids=0, model_max_length=LENGTH)


def pipeline() -> FluxPipeline:
    """The pipeline before training, with random weights of a fixed seed."""
    torch.manual_seed(0)
    clip, t5 = tokenizers()
    text = CLIPTextConfig(
        vocab_size=len(clip),
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        projection_dim=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        bos_token_id=clip.bos_token_id,
        # must not be 2, which transformers takes for the old way of pooling
        eos_token_id=clip.eos_token_id,
        pad_token_id=clip.pad_token_id,
    )
    text_2 = T5Config(
        vocab_size=len(t5),
        d_model=WIDTH,
        d_kv=WIDTH // 8,
        d_ff=4 * WIDTH,
        num_layers=2,
        num_heads=8,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
    )
    transformer = FluxTransformer2DModel(
        in_channels=4 * LATENT,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        axes_dims_rope=(4, 14, 14),
    )
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 16, 32, 48),
        layers_per_block=1,
        # more would remove a plain background: few channels have little besides their mean
        norm_num_groups=1,
        latent_channels=LATENT,
        sample_size=SIZE,
        scaling_factor=1.0,
        shift_factor=0.0,
    )
    torch.nn.init.zeros_(transformer.proj_out.weight)
    # little noise at first, or nothing gets through
    torch.nn.init.constant_(vae.quant_conv.bias[LATENT:], -5.0)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    encoder_2 = T5EncoderModel(text_2)
    look_around(encoder_2)
    return FluxPipeline(scheduler, vae, CLIPTextModel(text), clip, encoder_2, t5, transformer)


@torch.no_grad()
def look_around(encoder: T5EncoderModel) -> None:
    """Lets each of T5's eight heads begin with one neighbour, up to four tokens before or after.

    FLUX's text tokens have no positions, so which colour is which shape's comes through this bias
    alone, and it is learned slowly: 2,000 steps after a random start, pictures of two objects still
    mixed them up.
    """
    bias = encoder.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    # buckets 1 to 7 are distances to earlier tokens, from here on to later ones
    half = bias.shape[0] // 2
    for head, bucket in enumerate((1, 2, 3, 4, half + 1, half + 2, half + 3, half + 4)):
        bias[bucket, head] = 4.0


def drawn(number: int, count: int) -> tuple[list[Scene], torch.Tensor]:
    """Scenes and their pictures, (count, 3, 64, 64) from -1 to 1; three in ten have one object."""
    rng = np.random.default_rng(number)
    scenes_by_objects = {objects: training(objects) for objects in (1, 2)}
    selection = [
        scenes_by_objects[objects][rng.integers(len(scenes_by_objects[objects]))]
        for objects in rng.choice([1, 2], size=count, p=[0.3, 0.7])
    ]
    pictures = np.stack([draw(scene, rng) for scene in selection])
    return selection, torch.from_numpy(pictures).permute(0, 3, 1, 2).float().div(127.5).sub(1)


def train_vae_round(
    vae: AutoencoderKL, optimizer: torch.optim.Optimizer, number: int, device: str
) -> float:
    """Absolute and squared error, objects counted five times, and a little of the latents'
    divergence from white noise.

    From round VAE_ROUNDS on the decoder alone is trained, on means that are a little off, as the
    transformer's will be.
    """
    torch.manual_seed(number)
    _, pictures = drawn(number, VAE_STEPS * VAE_BATCH)
    total = 0.0
    for step, batch in enumerate(pictures.split(VAE_BATCH)):
        progress = number + step / VAE_STEPS
        whole = number < VAE_ROUNDS
        rate = (
            min(2e-3, 1e-3 * (progress + 0.02), 3e-3 * (1 - progress / VAE_ROUNDS))
            if whole
            else 1e-3 * (1 - (progress - VAE_ROUNDS) / DECODER_ROUNDS)
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = batch.to(device, memory_format=torch.channels_last)
        # from the background, which the corner shows
        distance = (batch - batch[:, :, :1, :1]).abs().amax(1, keepdim=True)
        weight = 1 + 4 * (functional.max_pool2d(distance, 5, 1, 2) > 0.1)
        with torch.set_grad_enabled(whole):
            posterior = vae.encode(batch).latent_dist
        latents = (
            posterior.sample()
            if whole
            else posterior.mode() + 0.1 * torch.randn_like(posterior.mean)
        )
        error = vae.decode(latents).sample - batch
        loss = (weight * (error.abs() + error.square())).mean()
        if whole:
            loss = loss + 1e-3 * posterior.kl().mean() / latents[0].numel()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        total += error.detach().abs().mean().item()
    return total / VAE_STEPS


@torch.no_grad()
def whiten(vae: AutoencoderKL, latents: torch.Tensor) -> None:
    """Changes the 1 x 1 convolutions around the latents so that these samples' channels have mean
    0, variance 1, no correlation.

    Decoded pictures stay the same. Flow matching then weighs the small channels, which hold the
    edges, like the large ones; a channel that the VAE does not use is mostly noise in a sample, and
    stays small in the means.
    """
    points = latents.permute(0, 2, 3, 1).reshape(-1, LATENT).double()
    mean = points.mean(0)
    values, vectors = torch.linalg.eigh(torch.cov(points.T))
    whitening = (vectors / values.sqrt()).T
    unwhitening = vectors * values.sqrt()
    encode, decode = vae.quant_conv, vae.post_quant_conv
    matrix = encode.weight[:LATENT, :, 0, 0].double()
    encode.weight[:LATENT, :, 0, 0] = (whitening @ matrix).float()
    encode.bias[:LATENT] = (whitening @ (encode.bias[:LATENT].double() - mean)).float()
    matrix = decode.weight[:, :, 0, 0].double()
    decode.weight[:, :, 0, 0] = (matrix @ unwhitening).float()
    decode.bias += (matrix @ mean).float()


@torch.no_grad()
def encoded(
    vae: AutoencoderKL, pictures: torch.Tensor, device: str, sample: bool = False
) -> torch.Tensor:
    """The means of the pictures' latents, or samples of them, (n, channels, 8, 8)."""
    parts = [part.to(device, memory_format=torch.channels_last) for part in pictures.split(64)]
    distributions = [vae.encode(part).latent_dist for part in parts]
    return torch.cat(
        [distribution.sample() if sample else distribution.mode() for distribution in distributions]
    )


def train_flow_round(
    pipe: FluxPipeline,
    ema: list[torch.Tensor],
    optimizer: Any,
    number: int,
    rounds: int,
    device: str,
) -> float:
    """Flow matching as FluxPipeline samples it: from noise at time 1 to latents at time 0, velocity
    noise - latents."""
    random = torch.Generator().manual_seed(number)
    selection, pictures = drawn(10_000 + number, ROUND_STEPS * BATCH // REPEATS)
    latents = encoded(pipe.vae, pictures, device)
    latents = pipe._pack_latents(latents, *latents.shape)
    image_ids = pipe._prepare_latent_image_ids(
        len(latents), SIZE // 16, SIZE // 16, device, torch.float32
    )
    text_ids = torch.zeros(LENGTH, 3, device=device)
    prompts = [scene.prompt for scene in selection] + [""]
    options = {
        "padding": "max_length",
        "max_length": LENGTH,
        "truncation": True,
        "return_tensors": "pt",
    }
    tokens, tokens_2 = (
        tokenizer(prompts, **options).input_ids.to(device)
        for tokenizer in (pipe.tokenizer, pipe.tokenizer_2)
    )
    trained = learned(pipe)
    order = torch.cat(
        [torch.randperm(len(latents), generator=random) for _ in range(REPEATS)]
    ).view(ROUND_STEPS, BATCH)
    total = 0.0
    for step, rows in enumerate(order, start=number * ROUND_STEPS):
        rate = min(
            1.0, (step + 1) / 300, (rounds * ROUND_STEPS - step) / (0.2 * rounds * ROUND_STEPS)
        )
        for group in optimizer.param_groups:
            group["lr"] = RATE * rate
        empty = torch.rand(BATCH, generator=random) < EMPTY
        texts = torch.where(empty, len(selection), rows).to(device)
        clean = latents[rows.to(device)]
        time = torch.sigmoid(torch.randn(BATCH, generator=random) + 0.8).to(device)
        noise = torch.randn(clean.shape, generator=random).to(device)
        times = time.view(-1, 1, 1)
        velocity = pipe.transformer(
            hidden_states=(1 - times) * clean + times * noise,
            timestep=time,
            pooled_projections=pipe.text_encoder(tokens[texts]).pooler_output,
            encoder_hidden_states=pipe.text_encoder_2(tokens_2[texts])[0],
            txt_ids=text_ids,
            img_ids=image_ids,
            return_dict=False,
        )[0]
        loss = functional.mse_loss(velocity, noise - clean)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        torch._foreach_lerp_(
            ema, [value.detach() for value in trained], max(0.001, 9 / (step + 10))
        )
        total += loss.item()
    return total / ROUND_STEPS


def learned(pipe: FluxPipeline) -> list[torch.nn.Parameter]:
    """What is trained on latents."""
    return [
        value
        for module in (pipe.transformer, pipe.text_encoder, pipe.text_encoder_2)
        for value in module.parameters()
    ]


def main(arguments: list[str] | None = None) -> None:
    """Trains what is not trained yet, then writes the pipeline."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--rounds",
        type=int,
        default=90,
        help=f"of {ROUND_STEPS} steps; the learning rate falls over the last fifth",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    pipe = pipeline().to(options.device)
    pipe.set_progress_bar_config(disable=True)
    pipe.vae.to(memory_format=torch.channels_last)
    train_vae(pipe.vae, options)
    train_flow(pipe, options)
    pipe.to(torch.bfloat16).save_pretrained(options.folder / "pipeline")


def train_vae(vae: AutoencoderKL, options: argparse.Namespace) -> None:
    """Trains the VAE, or takes it from its checkpoint."""
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, weight_decay=0.0, fused=True)
    state = load(options.folder / "vae.pt", {"module": vae, "optimizer": optimizer})
    for number in range(state.get("round", 0), VAE_ROUNDS + DECODER_ROUNDS):
        began = time.perf_counter()
        error = train_vae_round(vae, optimizer, number, options.device)
        if number == VAE_ROUNDS - 1:
            whiten(
                vae,
                encoded(vae, drawn(number, VAE_STEPS * VAE_BATCH)[1], options.device, sample=True),
            )
        save(
            options.folder / "vae.pt",
            {"module": vae, "optimizer": optimizer},
            {"round": number + 1},
        )
        note(options, {"vae round": number, "error": error, "seconds": time.perf_counter() - began})
    vae.requires_grad_(False)


def train_flow(pipe: FluxPipeline, options: argparse.Namespace) -> None:
    """Trains text encoders and transformer, and leaves the averaged weights in them."""
    trained = learned(pipe)
    ema = [value.detach().clone() for value in trained]
    optimizer = torch.optim.AdamW(
        trained, lr=RATE, betas=(0.9, 0.99), weight_decay=0.01, fused=True
    )
    modules = {
        name: getattr(pipe, name) for name in ("transformer", "text_encoder", "text_encoder_2")
    }
    state = load(options.folder / "flow.pt", {**modules, "optimizer": optimizer})
    ema = state.get("ema", ema)
    watched = [
        (scene, seed)
        for objects in (1, 2)
        for seed, scene in enumerate(training(objects)[:: 5 if objects == 1 else 60][:50])
    ]
    for number in range(state.get("round", 0), options.rounds):
        began = time.perf_counter()
        loss = train_flow_round(pipe, ema, optimizer, number, options.rounds, options.device)
        row = {"round": number, "loss": loss, "seconds": time.perf_counter() - began}
        save(
            options.folder / "flow.pt",
            {**modules, "optimizer": optimizer},
            {"round": number + 1, "ema": ema},
        )
        if number % WATCH == WATCH - 1:
            swap(trained, ema)
            row |= {"one": score(pipe, watched[:50]), "two": score(pipe, watched[50:])}
            swap(trained, ema)
        note(options, row)
    swap(trained, ema)


def swap(parameters: list[torch.nn.Parameter], values: list[torch.Tensor]) -> None:
    """Exchanges the contents of two lists of tensors."""
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data, value.data = value.data, parameter.data


def load(path: Path, parts: dict[str, Any]) -> dict[str, Any]:
    """Fills the parts from a checkpoint and returns the rest of it; nothing if there is no
    checkpoint."""
    if not path.exists():
        return {}
    state = torch.load(path)
    for name, part in parts.items():
        part.load_state_dict(state.pop(name))
    return state


def save(path: Path, parts: dict[str, Any], rest: dict[str, Any]) -> None:
    """Writes a checkpoint, whole or not at all."""
    torch.save(
        {**{name: part.state_dict() for name, part in parts.items()}, **rest},
        path.with_suffix(".part"),
    )
    os.replace(path.with_suffix(".part"), path)


def note(options: argparse.Namespace, row: dict[str, Any]) -> None:
    """Adds a line to the learning curve."""
    line = json.dumps(row)
    print(line, flush=True)
    with (options.folder / "log.jsonl").open("a") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    main()
