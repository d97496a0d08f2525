"""Tiny pipelines of many classes, as `tiny_components.yaml` and `tiny_pipelines.yaml` describe
them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pydoc import locate
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
import yaml
from campaign import sampled
from PIL import Image

PROMPT = "a lighthouse at dusk"
FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
BYTES = ROOT / "graphs" / "tokenizers" / "bytes.json"
WIDTH = 32  # of every text encoder


@dataclass(frozen=True)
class Case:
    """A pipeline class to test. ``family``: its task. ``parts`` and ``arguments`` return what it is
    built from and called with, made again each time, the same each time."""

    kind: Any
    family: str
    parts: Callable[[], dict[str, Any]]
    arguments: Callable[[], dict[str, Any]]
    steps: int = 2

    def build(self) -> Any:
        """The pipeline on the CPU, in eval mode, with random weights."""
        torch.manual_seed(0)
        pipe = self.kind(**self.parts())
        pipe.set_progress_bar_config(disable=True)
        return frozen(pipe)

    def call(
        self, pipe: Any, put: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.cpu
    ) -> Any:
        """The output of ``pipe`` for the arguments, with fresh generators. ``put`` moves argument
        tensors to a device."""
        torch.manual_seed(1)
        arguments = {
            name: put(value) if isinstance(value, torch.Tensor) else value
            for name, value in self.arguments().items()
        }
        generator = {} if self.steps == 0 else {"generator": torch.Generator().manual_seed(3)}
        return pipe(
            **{
                **({"num_inference_steps": self.steps} if self.steps else {}),
                **generator,
                **arguments,
            }
        )


@cache
def cases() -> dict[str, Case]:
    """Every case by the name of its class, some with a suffix."""
    return {
        name: _case(name, **row) for name, row in _table("tiny_pipelines.yaml")["pipelines"].items()
    }


def each() -> list[Any]:
    """The names of all cases as parameters of a test: a spread of them always, the others in the
    sweep."""
    return sampled(cases(), _table("tiny_pipelines.yaml")["spread"], "pipelines")


def _case(
    name: str, family: str, parts: Any, call: Any, steps: int = 2, dtype: str = "float32"
) -> Case:
    """``dtype``: of the weights, as ``torch_dtype=`` loads them: pipelines cast their VAE to fp32
    and back in the call."""

    def built() -> dict[str, Any]:
        parts_by_name = {key: _made(value) for key, value in parts.items()}
        if dtype == "float32":
            return parts_by_name
        return {
            key: part.to(getattr(torch, dtype)) if isinstance(part, torch.nn.Module) else part
            for key, part in parts_by_name.items()
        }

    return Case(
        _class(name),
        family,
        built,
        lambda: {key: _made(value) for key, value in call.items()},
        steps,
    )


def tiny(name: str, **changes: Any) -> Any:
    """The component ``name`` of `tiny_components.yaml`, or of a class without settings there, with
    ``changes`` of its settings."""
    row = _table("tiny_components.yaml").get(name, {})
    kind, config = (
        locate(row["class"]) if "class" in row else _class(name),
        {**row.get("config", {}), **changes},
    )
    if "tokenizer_file" in config:
        config["tokenizer_file"] = str(ROOT / config["tokenizer_file"])
    if hasattr(kind, "from_config"):
        part = kind.from_config(config)
    else:
        part = (
            kind(kind.config_class(**config))
            if getattr(kind, "config_class", None)
            else kind(**config)
        )
    for key, value in row.get("fill", {}).items():
        getattr(part, key).data.fill_(value)
    for module in (module for key in row.get("noise", ()) for module in getattr(part, key)):
        module.weight.data.normal_(std=0.1)
    for key, value in row.get("set", {}).items():
        setattr(part, key, value)
    return part


@cache
def _table(file: str) -> dict[str, Any]:
    entries: dict[str, Any] = yaml.safe_load((FOLDER / file).read_text())
    return entries


def _class(name: str) -> Any:
    name = name.partition("-")[0]
    return getattr(diffusers, name, None) or getattr(transformers, name)


def _is_component(name: Any) -> bool:
    return isinstance(name, str) and (
        name in _table("tiny_components.yaml") or hasattr(diffusers, name)
    )


def _made(value: Any) -> Any:
    """What stands for ``value`` in a row: a component, a picture or a tensor; else the value
    itself."""
    if isinstance(value, list):
        return [_made(item) for item in value]
    if isinstance(value, dict):
        (name, settings), *rest = value.items()
        return (
            tiny(name, **settings) if _is_component(name) else MEDIA[name](settings, **dict(rest))
        )
    return tiny(value) if _is_component(value) else value


def picture(size: int = 16, seed: int = 0) -> Any:
    return Image.fromarray(
        np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    )


def mask(size: int = 16) -> Any:
    half = np.zeros((size, size), dtype=np.uint8)
    half[: size // 2] = 255
    return Image.fromarray(half)


def film(frames: int, size: int = 16) -> list[Any]:
    return [picture(size, seed) for seed in range(frames)]


def noise(shape: list[int], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


MEDIA: dict[str, Callable[..., Any]] = {
    "picture": picture,
    "mask": mask,
    "film": film,
    "noise": noise,
}

BLOCKS: dict[str, Any] = {
    "FluxPipeline": diffusers.FluxAutoBlocks,
    "QwenImagePipeline": diffusers.QwenImageAutoBlocks,
    "StableDiffusionXLPipeline": diffusers.StableDiffusionXLAutoBlocks,
    "WanImageToVideoPipeline": diffusers.WanImage2VideoAutoBlocks,
    "WanPipeline-two-experts": diffusers.Wan22Blocks,
}


def modular(name: str, blocks: Any = None) -> Any:
    """The modular pipeline with the components of the plain one called ``name``. ``blocks``: used
    in place of its own."""
    torch.manual_seed(0)
    pipe = (blocks or BLOCKS[name]()).init_pipeline()
    pipe.update_components(
        **{key: part for key, part in cases()[name].parts().items() if key in pipe.component_names}
    )
    return frozen(pipe)


def frozen(pipe: Any) -> Any:
    """``pipe``, its modules in eval mode and without gradients."""
    for module in pipe.components.values():
        if isinstance(module, torch.nn.Module):
            module.eval()
    return pipe


def checked_peak_bytes(attachment: Any, device: Any) -> int:
    """The peak of the last run in bytes. Asserts that it left weights alone on ``device``, was not
    replanned and broke no cap."""
    assert device.allocated_bytes == attachment.held_bytes
    assert attachment.solution is not None
    assert attachment.trace is not None
    assert attachment.trace.overruns == ()
    assert attachment.replans == ()
    return int(attachment.trace.peak_bytes)
