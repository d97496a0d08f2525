"""Finds and replaces tensors in nested containers and in the output classes of diffusers and transformers."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def walk(value: Any, change: Callable[[Any], Any], kind: type[Any] = torch.Tensor) -> Any:
    """A copy of ``value`` with ``change`` applied to every tensor in it, or to every instance of ``kind``."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (list, tuple)):
        items = [walk(item, change, kind) for item in value]
        return items if isinstance(value, list) else type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, dict) and not hasattr(value, "to_tuple"):
        return {key: walk(item, change, kind) for key, item in value.items()}
    if isinstance(value, dict) or _is_library_object(value):
        twin = copy.copy(value)
        for key, item in (value if isinstance(value, dict) else vars(value)).items():
            setattr(twin, key, walk(item, change, kind))
        return twin
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in ``value``, in the order of `walk`."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    walk(value, note)
    return found


def computing_on(place: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with every device except the CPU replaced by ``place``."""
    there = walk((args, kwargs), lambda own: own if own.type == "cpu" else place, torch.device)
    return there  # type: ignore[no-any-return]


def _is_library_object(value: Any) -> bool:
    if isinstance(value, (nn.Module, type, types.FunctionType)) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.startswith(("diffusers", "transformers"))
