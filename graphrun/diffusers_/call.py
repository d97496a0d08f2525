"""A call of a pipeline: what of its arguments a plan depends on, and a copy of them for a rehearsal.

Texts and seeds are left out of the first (what pipelines do with most texts is pad them), and the second leaves the caller's
generators, tensors and callbacks as they were.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import nn

from graphrun.modules.trees import walk


def signature_of(value: Any, texts: bool = False) -> Any:
    """What two values have in common that lead to one plan: sizes, shapes, types, counts. ``texts``: and what they say."""
    if isinstance(value, torch.Tensor):
        return "tensor", tuple(value.shape), str(value.dtype), value.device.type
    if isinstance(value, str):
        return ("text", value) if texts else "text"
    if isinstance(value, Mapping):
        return tuple((str(key), signature_of(item, texts)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value).__name__, tuple(signature_of(item, texts) for item in value)
    if isinstance(value, (bool, int, float, type(None))):
        return value
    kind = type(value).__name__
    if isinstance(value, torch.Generator):
        return kind, value.device.type
    if hasattr(value, "shape"):
        return kind, tuple(value.shape), str(getattr(value, "dtype", ""))
    if hasattr(value, "size") and hasattr(value, "mode"):  # a PIL image
        return kind, value.size, value.mode
    if is_dataclass(value) and not isinstance(value, type):
        return kind, signature_of(vars(value), texts)
    return kind


def rehearsed(value: Any, device: torch.device, twins: Mapping[int, Any]) -> Any:
    """``value`` for a rehearsal on ``device``: tensors copied (those of an accelerator to ``device``), generators with their state,
    a module by its meta module in ``twins``, and callbacks by one that does nothing."""
    if isinstance(value, torch.Tensor):
        return walk(value, lambda t: t.clone() if t.device.type == "cpu" else t.cpu().to(device))
    if isinstance(value, torch.Generator):
        twin = torch.Generator("cpu")
        if value.device.type == "cpu":
            twin.set_state(value.get_state())
        return twin
    if isinstance(value, nn.Module):
        return twins.get(id(value), value)
    if isinstance(value, (types.FunctionType, types.MethodType)):
        return silent
    if isinstance(value, tuple):
        items = [rehearsed(item, device, twins) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [rehearsed(item, device, twins) for item in value]
    if type(value) is dict:
        return {key: rehearsed(item, device, twins) for key, item in value.items()}
    return walk(value, lambda t: t.clone() if t.device.type == "cpu" else t.cpu().to(device))


def silent(*args: Any, **kwargs: Any) -> Any:
    """A callback at the end of a step that leaves everything as it is: it returns the tensors it was handed."""
    return next((value for value in reversed(args) if isinstance(value, dict)), {})


def described(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """The arguments of a call as an error shows them."""
    shown = [_shown(value) for value in args] + [f"{name}={_shown(value)}" for name, value in kwargs.items()]
    return ", ".join(shown)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)
    return type(value).__name__


Method = Callable[..., Any]
