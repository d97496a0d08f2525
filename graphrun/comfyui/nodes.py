"""The nodes as data, and what they do. `graphrun.comfyui.pack` gives them to ComfyUI."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from graphrun.comfyui.progress import follow
from graphrun.comfyui.server import (
    DEFAULT_URL,
    ModelNames,
    ServerClient,
    ServerJob,
    figures_text,
    pictures_of,
    png_of,
)
from graphrun.comfyui.values import further_inputs, images_of, joined, mask_of, picture_of
from graphrun.device_kinds import names as device_names

if TYPE_CHECKING:
    from graphrun.comfyui.engine import LocalEngine

CATEGORY = "graphrun"
FIRST_MODEL = "(the first)"  # in the menu of models
URL_VARIABLE, KEY_VARIABLE = "GRAPHRUN_URL", "GRAPHRUN_KEY"
MOST_PIXELS, MOST_STEPS, MOST_PICTURES = 16384, 10_000, 64
SEEDS = 2**53 - 1  # the largest integer that a page of ComfyUI keeps


@dataclass(frozen=True, slots=True)
class NodeInput:
    """An input of a node.

    ``kind``: the type that ComfyUI connects, or ``COMBO``. ``choices``: returns the entries of a
    menu. ``is_free``: values outside the menu are taken too. ``options``: of the widget.
    """

    name: str
    kind: str
    tooltip: str
    default: Any = None
    choices: Callable[[], Sequence[str]] | None = None
    is_free: bool = False
    is_optional: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodeKind:
    """A node. ``outputs``: (type, name). ``run`` gets the inputs by name, and returns outputs."""

    id: str
    title: str
    description: str
    inputs: tuple[NodeInput, ...]
    outputs: tuple[tuple[str, str], ...]
    run: Callable[..., tuple[Any, ...]]


MODELS = ModelNames()


def server_client(url: str, key: str) -> ServerClient:
    """Return the server at ``url``; "": the one that the environment names, with its key.

    The environment's key goes to no other server, so a workflow cannot ask for it.
    """
    if url.strip():
        return ServerClient(url, key)
    return ServerClient(
        os.environ.get(URL_VARIABLE) or DEFAULT_URL, key or os.environ.get(KEY_VARIABLE, "")
    )


def model_names() -> list[str]:
    """Return the entries of the menu of models, and ask the server for newer ones."""
    return [FIRST_MODEL, *MODELS.refresh()]


def draw_on_server(
    url: str,
    key: str,
    model: str,
    prompt: str,
    negative_prompt: str,
    width: int,
    height: int,
    steps: int,
    seed: int,
    pictures: int,
    inputs: str = "",
    image: Any = None,
    mask: Any = None,
) -> tuple[Any, str]:
    """Have a server draw, and return its pictures and figures.

    A value that is empty or 0 is the model's own. Raises ServerRefusal and InputError.
    """
    client = server_client(url, key)
    fields: dict[str, Any] = {"prompt": prompt, "seed": seed, "n": pictures}
    optional_fields = {
        "model": model.strip() if model != FIRST_MODEL else "",
        "negative_prompt": negative_prompt.strip(),
        "width": width,
        "height": height,
        "num_inference_steps": steps,
    }
    fields |= {name: value for name, value in optional_fields.items() if value}
    fields = joined(fields, further_inputs(inputs))
    files = {}
    if image is not None:
        files["image"] = png_of(picture_of(image, "image"))
    if mask is not None:
        files["mask"] = png_of(mask_of(mask, "mask"))
    job = ServerJob(client, fields, files)
    answer = follow(job.run, job.stop)
    MODELS.refresh(client)
    return images_of(pictures_of(answer)), figures_text(answer)


class LocalNode:
    """The node that runs graphs in ComfyUI's process, with ``engine``; None: a new one."""

    def __init__(self, engine: LocalEngine | None = None) -> None:
        self._engine = engine

    @property
    def engine(self) -> LocalEngine:
        if self._engine is None:
            from graphrun.comfyui.engine import LocalEngine

            self._engine = LocalEngine()
        return self._engine

    def draw(
        self,
        graph: str,
        device: str,
        budget: str,
        prompt: str,
        negative_prompt: str,
        width: int,
        height: int,
        steps: int,
        seed: int,
        inputs: str = "",
        ram: str = "",
        allow: str = "",
        image: Any = None,
        mask: Any = None,
    ) -> tuple[Any, str]:
        """Plan and run ``graph``, and return its pictures and the plan as text.

        A value that is empty or 0 is the graph's own. Raises DoesNotFit, and the errors of graphs,
        inputs and runs.
        """
        from comfy.model_management import get_torch_device

        from graphrun.comfyui.engine import LocalRequest

        values = {
            "prompt": prompt,
            "negative_prompt": negative_prompt.strip(),
            "width": width,
            "height": height,
            "steps": steps,
            "seed": seed,
            "image": None if image is None else picture_of(image, "image"),
            "mask": None if mask is None else mask_of(mask, "mask"),
        }
        permissions = tuple(filter(None, re.split(r"[,\s]+", allow)))
        request = LocalRequest(
            graph, device, budget, ram, permissions, values, further_inputs(inputs)
        )
        engine, comfy_device = self.engine, get_torch_device()
        run = follow(lambda _: engine.prepare(request, comfy_device), engine.stop)
        engine.reserve(run, comfy_device)
        drawn_pictures, text = follow(lambda report: engine.run(run, report), engine.stop)
        return images_of(drawn_pictures), text


LOCAL_NODE = LocalNode()
PROMPTS = (
    NodeInput(
        "prompt", "STRING", "What to draw.", "", options={"multiline": True, "dynamicPrompts": True}
    ),
    NodeInput(
        "negative_prompt",
        "STRING",
        "What to avoid. Empty: nothing; many models take none.",
        "",
        options={"multiline": True, "dynamicPrompts": True},
    ),
    NodeInput(
        "width",
        "INT",
        "In pixels. 0: as the model has it.",
        0,
        options={"min": 0, "max": MOST_PIXELS, "step": 8},
    ),
    NodeInput(
        "height",
        "INT",
        "In pixels. 0: as the model has it.",
        0,
        options={"min": 0, "max": MOST_PIXELS, "step": 8},
    ),
    NodeInput(
        "steps", "INT", "0: as the model has them.", 0, options={"min": 0, "max": MOST_STEPS}
    ),
    NodeInput(
        "seed",
        "INT",
        "Equal seeds give equal pictures.",
        0,
        options={"min": 0, "max": SEEDS, "control_after_generate": True},
    ),
)
FURTHER = NodeInput(
    "inputs",
    "STRING",
    "Other inputs of the model, NAME=VALUE on each line, such as guidance_scale=3.5.",
    "",
    is_optional=True,
    options={"multiline": True, "advanced": True},
)
MEDIA = (
    NodeInput("image", "IMAGE", "For models that take a picture.", is_optional=True),
    NodeInput("mask", "MASK", "For models that take one: what to draw.", is_optional=True),
)
SERVER = NodeKind(
    "GraphrunServer",
    "graphrun (server)",
    "A running graphrun serve draws the picture, on this machine or another one.",
    (
        NodeInput(
            "url",
            "STRING",
            f"Address of the server. Empty: ${URL_VARIABLE}, or {DEFAULT_URL}.",
            "",
        ),
        NodeInput(
            "key",
            "STRING",
            "Key of the server. Pictures that ComfyUI saves contain it: better leave url and key "
            f"empty, and set {URL_VARIABLE} and {KEY_VARIABLE} where ComfyUI starts.",
            "",
        ),
        NodeInput(
            "model",
            "COMBO",
            "Model of the server. R on the page reads the list again.",
            FIRST_MODEL,
            choices=model_names,
            is_free=True,
        ),
        *PROMPTS,
        NodeInput(
            "pictures",
            "INT",
            "Number of pictures, with consecutive seeds.",
            1,
            options={"min": 1, "max": MOST_PICTURES},
        ),
        FURTHER,
        *MEDIA,
    ),
    (("IMAGE", "image"), ("STRING", "figures")),
    draw_on_server,
)
LOCAL = NodeKind(
    "GraphrunLocal",
    "graphrun (in process)",
    "graphrun plans the picture for a memory budget and draws it in ComfyUI's process.",
    (
        NodeInput(
            "graph",
            "STRING",
            "Name of a graph (graphrun list), a graph file, or a folder of a diffusers pipeline.",
            "shapes",
        ),
        NodeInput(
            "device",
            "COMBO",
            "auto: as ComfyUI.",
            "auto",
            choices=lambda: ["auto", *device_names()],
        ),
        NodeInput(
            "budget",
            "STRING",
            "Memory of the GPU, or on a CPU of the whole process, such as 8G. Empty: what is free.",
            "",
        ),
        *PROMPTS,
        FURTHER,
        NodeInput(
            "ram",
            "STRING",
            "RAM for weights, such as 16G. Empty: what is free.",
            "",
            is_optional=True,
            options={"advanced": True},
        ),
        NodeInput(
            "allow",
            "STRING",
            "What may change the picture, such as int8 or tiling.",
            "",
            is_optional=True,
            options={"advanced": True},
        ),
        *MEDIA,
    ),
    (("IMAGE", "image"), ("STRING", "plan")),
    LOCAL_NODE.draw,
)
NODES = (SERVER, LOCAL)
