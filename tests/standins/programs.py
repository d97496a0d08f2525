"""A program that is no pipeline of diffusers: a plain object that owns modules, as research code
does."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import transformers as t
from torch import nn
from torch.nn import functional

WIDTH = 32
# `Staged` as a graph file.
FILM = """
graphrun: 1
name: film
pipeline: programs.Staged
pipeline_config: {steps: 2}
code: the tests of graphrun
allow: [diffusers, transformers, programs]
inputs:
  text: {type: str}
  units: {type: int, default: 3}
  seed: {type: int, default: 3}
components:
  text: {class: programs.Encoder, config: {}, dtype: float32}
  dit: {class: programs.Denoiser, config: {}, dtype: float32}
  vae: {class: programs.Decoder, config: {}, dtype: float32}
stages:
  make: {op: call, method: generate, uses: [text, dit, vae], with: {text: $text, units: $units, seed: $seed}}
outputs: {frames: $make.frames}
"""  # noqa: E501


class Posterior:
    """What the encoder returns of a picture: an object of a class of its own, with tensors in
    it."""

    def __init__(self, moments: torch.Tensor) -> None:
        self.mean, self.logvar = moments.chunk(2, dim=-1)
        self.names = ("mean", "logvar")

    def sample(self, generator: torch.Generator | None) -> torch.Tensor:
        noise = torch.randn(self.mean.shape, generator=generator).to(self.mean.device)
        return self.mean + torch.exp(0.5 * self.logvar) * noise


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.narrow(functional.gelu(self.wide(self.norm(x))))
        return functional.scaled_dot_product_attention(x[None], x[None], x[None])[0]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.moments = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return x

    def encode_picture(self, pixels: torch.Tensor) -> Posterior:
        return Posterior(self.moments(pixels))


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def forward(
        self, x: torch.Tensor, history: list[torch.Tensor], text: torch.Tensor, t: float
    ) -> torch.Tensor:
        rows = torch.cat([text, *history, x])
        for block in self.blocks:
            rows = block(rows)
        return rows[-len(x) :] * t


class CausalLayer(nn.Module):
    """Sees the pieces before, which it keeps in a deque."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3 * WIDTH, WIDTH)
        self.history: deque[torch.Tensor] = deque(maxlen=2)

    def forward(self, x: torch.Tensor, first: bool) -> torch.Tensor:
        if first:
            self.history.clear()
            self.history.extend([x, x])
        output = self.mix(torch.cat([*self.history, x], dim=-1))
        self.history.append(x)
        return output


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([CausalLayer() for _ in range(3)])

    def decode_piece(self, x: torch.Tensor, first: bool) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, first)
        return x


class Film:
    """Texts to frames, unit by unit: each unit is denoised beside a history of those before, and
    decoded after them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.models = {"text": Encoder().eval()}
        self.dit, self.vae = Denoiser().eval(), Decoder().eval()
        self.device = torch.device("cpu")
        self.calls: deque[int] = deque(maxlen=3)
        self.steps = 2

    def to(self, device: Any) -> Film:
        self.device = torch.device(device)
        for module in (self.models["text"], self.dit, self.vae):
            module.to(self.device)
        return self

    @torch.no_grad()
    def generate(
        self,
        text: str,
        units: int = 3,
        generator: torch.Generator | None = None,
        cpu_offloading: bool = False,
    ) -> Any:
        ids = torch.tensor([ord(letter) % 64 for letter in text.ljust(12)[:12]])
        words = self.models["text"](ids.to(self.device))
        if cpu_offloading:
            self.models["text"].to("cpu")
            self.dit.to("cuda")
        start = (
            self.models["text"]
            .encode_picture(torch.ones(4, WIDTH, device=self.device))
            .sample(generator)
        )
        history = [start]
        for _ in range(units):
            x = torch.randn(4, WIDTH, generator=generator).to(self.device)
            for step in range(self.steps):
                x = x - self.dit(x, history, words, 1 / (1 + step))
            history.append(x)
        self.last = history
        return torch.stack(
            [self.vae.decode_piece(piece, number == 0) for number, piece in enumerate(history)]
        )

    def bytes(self) -> int:
        modules = (self.models["text"], self.dit, self.vae)
        return sum(tensor.nbytes for module in modules for tensor in module.parameters())

    def enable_sequential_cpu_offload(self) -> None:
        raise AssertionError("it would move modules")


class Staged(Film):
    """A film whose encoder is an attribute, as a graph file makes it."""

    text: Encoder
    models = property(lambda self: {"text": self.text})  # type: ignore[assignment]
    spare: Decoder

    def shift(self, frames: torch.Tensor) -> torch.Tensor:
        """Reads weights of modules that it does not call."""
        words, bias = self.text.words.weight, self.spare.layers[0].mix.bias
        return frames * words[0].to(frames.device) + bias.to(frames.device)


class Reader(Encoder):
    """Takes the text itself, and pads it to twelve letters; a longer one stays as long as it is."""

    def forward(self, text: str, device: torch.device) -> torch.Tensor:
        return super().forward(
            torch.tensor([ord(letter) % 64 for letter in text.ljust(12)]).to(device)
        )


class Told:
    """An object whose module takes texts."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.reader = Reader().eval()
        self.device = torch.device("cpu")

    @torch.no_grad()
    def read(self, text: str) -> torch.Tensor:
        return self.reader(text, self.device) + self.reader("", self.device)[:1]


def captioner() -> Any:
    """A model of transformers that writes a text for a picture, token by token, with a cache of
    keys and values."""
    torch.manual_seed(0)
    picture = t.ViTConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=128,
        image_size=16,
        patch_size=4,
    )
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    sizes = {"vocab_size": 50, "n_positions": 32, "n_embd": 32, "n_layer": 3, "n_head": 2}
    text = t.GPT2Config(**sizes, **special, add_cross_attention=True, is_decoder=True)
    config = t.VisionEncoderDecoderConfig.from_encoder_decoder_configs(picture, text)
    model = t.VisionEncoderDecoderModel(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    model.generation_config.update(**special, decoder_start_token_id=1, max_length=10)
    return model
