"""The modules of ComfyUI that nodes import, as far as their interfaces ask for them.

Written from what graphrun uses: `comfy.model_management` keeps a card's memory by the patchers'
own figures, `comfy.utils` records progress, `comfy_api` takes the arguments that its first
version has.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

CARD = torch.device("cuda", 0)
MIB = 2**20
# of the inputs that both nodes have
VALUES: dict[str, Any] = {
    "prompt": "a boat",
    "negative_prompt": "",
    "width": 0,
    "height": 0,
    "steps": 0,
    "seed": 7,
}


class Interrupted(BaseException):
    """As `comfy.model_management.InterruptProcessingException`."""


class ModelPatcher:
    """The base class: a model of ComfyUI's own, which loads all of its bytes at once."""

    def __init__(self, model: Any, load_device: Any, offload_device: Any, size: int = 0) -> None:
        self.model, self.size, self.parent = model, size, None
        self.load_device, self.offload_device = load_device, offload_device
        self._bytes = 0

    def is_dynamic(self) -> bool:
        raise NotImplementedError("a subclass says so itself")

    def model_size(self) -> int:
        return self.size

    def loaded_size(self) -> int:
        return self._bytes

    def current_loaded_device(self) -> Any:
        return self.load_device if self._bytes else self.offload_device

    def partially_load(
        self, device: Any, extra: float = 0, force_patch_weights: bool = False
    ) -> int:
        absent, self._bytes = self.size - self._bytes, self.size
        return absent

    def partially_unload(
        self, device: Any, nbytes: float = 0, force_patch_weights: bool = False
    ) -> int:
        freed = int(min(self._bytes, nbytes))
        self._bytes -= freed
        return freed

    def detach(self, unpatch_all: bool = True) -> Any:
        if unpatch_all:
            self._bytes = 0
        return self.model


@dataclass
class ComfyUI:
    """The state of the stand-in. ``card_bytes``: of its card. ``patchers``: the list of loaded
    models, the newest first; ``known_patchers``: all that were ever in it. ``updates``: of progress
    bars. ``requests``: bytes that `load_models_gpu` was to make free, without those of weights."""

    card_bytes: int = 64 * MIB
    patchers: list[Any] = field(default_factory=list)
    known_patchers: list[Any] = field(default_factory=list)
    updates: list[tuple[int, int, Any]] = field(default_factory=list)
    requests: list[float] = field(default_factory=list)
    interrupt: bool = False
    interrupt_after: int | None = None  # number of updates

    def model(self, nbytes: int) -> ModelPatcher:
        """A model of ComfyUI's own, on the card."""
        patcher = ModelPatcher(types.SimpleNamespace(), CARD, torch.device("cpu"), nbytes)
        patcher.is_dynamic = lambda: False  # type: ignore[method-assign]
        self.load([patcher])
        return patcher

    def free(self, device: Any = CARD) -> int:
        return self.card_bytes - sum(
            patcher.loaded_size()
            for patcher in self.known_patchers
            if patcher.load_device == device
        )

    def make_free(self, nbytes: float, device: Any) -> None:
        """Unload patchers, the oldest first, until ``nbytes`` are free."""
        for patcher in list(reversed(self.patchers)):
            excess = nbytes - self.free(device)
            if excess <= 0 or patcher.load_device != device:
                continue
            if excess < patcher.loaded_size() and (
                patcher.partially_unload(patcher.offload_device, excess) >= excess
            ):
                continue
            patcher.detach(True)
            self.patchers.remove(patcher)

    def load(self, patchers: list[Any], memory_required: float = 0) -> None:
        self.requests.append(memory_required)
        for patcher in patchers:
            if patcher not in self.known_patchers:
                self.known_patchers.append(patcher)
            if patcher in self.patchers:  # its entry is renewed
                self.patchers.remove(patcher)
                patcher.detach(unpatch_all=False)
            assert not patcher.is_dynamic()
            device = patcher.load_device
            absent = patcher.model_size() - (
                patcher.loaded_size() if patcher.current_loaded_device() == device else 0
            )
            self.make_free(absent + memory_required, device)
            patcher.partially_load(device, 1e32, force_patch_weights=False)
            self.patchers.insert(0, patcher)

    def unload_all(self) -> None:
        self.make_free(1e30, CARD)

    def raise_if_interrupted(self) -> None:
        if self.interrupt:
            self.interrupt = False
            raise Interrupted

    def update(self, value: int, total: int, preview: Any) -> None:
        self.raise_if_interrupted()
        self.updates.append((value, total, preview))
        if self.interrupt_after is not None and len(self.updates) >= self.interrupt_after:
            self.interrupt, self.interrupt_after = True, None


class _Input:
    """An input of `comfy_api`. ``parameters_taken``: its parameters; another one is a TypeError."""

    parameters_taken: tuple[str, ...] = ()

    def __init__(
        self,
        id: str,
        optional: bool = False,
        tooltip: str | None = None,
        **parameters: Any,
    ) -> None:
        if unknown := parameters.keys() - set(self.parameters_taken):
            raise TypeError(f"unexpected {unknown}")
        self.id, self.optional, self.tooltip = id, optional, tooltip
        self.extra_dict: dict[str, Any] = {}
        self._parameters = parameters

    @property
    def options(self) -> dict[str, Any]:
        """What the page gets."""
        return {**self._parameters, **self.extra_dict}


@dataclass
class _Output:
    display_name: str


def _io_type(name: str, *parameters_taken: str) -> Any:
    input_class = type("Input", (_Input,), {"parameters_taken": parameters_taken, "kind": name})
    output_class = type("Output", (_Output,), {"kind": name})
    return types.SimpleNamespace(Input=input_class, Output=output_class)


@dataclass
class Schema:
    node_id: str
    display_name: str
    category: str
    description: str
    inputs: list[Any]
    outputs: list[Any]


class ComfyNode:
    """As `io.ComfyNode`: classes are called, not objects."""


class NodeOutput:
    def __init__(self, *args: Any) -> None:
        self.args = args


def _module(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(members)
    return module


def install(patch: pytest.MonkeyPatch, *, with_api: bool = True) -> ComfyUI:
    """Put the modules into `sys.modules`. ``with_api``: also `comfy_api`."""
    comfy_ui = ComfyUI()

    class ProgressBar:
        def __init__(self, total: int, node_id: str | None = None) -> None:
            self.total = total

        def update_absolute(self, value: int, total: Any = None, preview: Any = None) -> None:
            comfy_ui.update(value, total or self.total, preview)

    management = _module(
        "comfy.model_management",
        InterruptProcessingException=Interrupted,
        throw_exception_if_processing_interrupted=comfy_ui.raise_if_interrupted,
        get_torch_device=lambda: CARD,
        get_free_memory=comfy_ui.free,
        extra_reserved_memory=lambda: 0,
        loaded_models=lambda: list(comfy_ui.patchers),
        load_models_gpu=comfy_ui.load,
        unload_all_models=comfy_ui.unload_all,
    )
    utils = _module("comfy.utils", ProgressBar=ProgressBar)
    patchers = _module("comfy.model_patcher", ModelPatcher=ModelPatcher)
    comfy = _module("comfy", model_management=management, utils=utils, model_patcher=patchers)
    modules = {
        "comfy": comfy,
        "comfy.model_management": management,
        "comfy.utils": utils,
        "comfy.model_patcher": patchers,
    }
    numbers = ("default", "min", "max", "step", "control_after_generate")
    io = types.SimpleNamespace(
        String=_io_type("STRING", "default", "multiline", "dynamic_prompts"),
        Int=_io_type("INT", *numbers),
        Combo=_io_type("COMBO", "default", "options"),
        Image=_io_type("IMAGE"),
        Mask=_io_type("MASK"),
        Schema=Schema,
        ComfyNode=ComfyNode,
        NodeOutput=NodeOutput,
    )
    latest = _module("comfy_api.latest", io=io, ComfyExtension=type("ComfyExtension", (), {}))
    api = {"comfy_api": _module("comfy_api", latest=latest), "comfy_api.latest": latest}
    for name, module in (modules | (api if with_api else {})).items():
        patch.setitem(sys.modules, name, module)
    return comfy_ui
