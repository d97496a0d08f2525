"""Device memory that a run failed to release: names its holders for an error, and keeps exceptions
from holding it.

An exception keeps its traceback, a traceback its frames, and a frame its locals and its function's
closure: activations of the block that failed would stay on the device for as long as the caller
holds the error (clearing frames does not empty closures). Tracebacks are therefore removed. Those
of unforeseen errors are kept as text, in a note.
"""

from __future__ import annotations

import gc
import traceback
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from graphrun.errors import GraphrunError, StageError
from graphrun.runtime.devices.device import Device
from graphrun.units import show_size

SHOWN = 5  # allocations and holders that a message lists


def leftovers(device: Device, modules: Mapping[str, nn.Module]) -> str:
    """Text for an error: the largest allocations on ``device``, and the objects found to hold them
    with their bytes.

    Changes nothing.
    """
    shown, named = device.holders(), _named(device, modules)
    more = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    held = ", ".join(f"{holder} ({show_size(nbytes)})" for holder, nbytes in named[:SHOWN])
    return ", ".join(shown[:SHOWN]) + more + (f"; held by {held}" if held else "")


def _named(device: Device, modules: Mapping[str, nn.Module]) -> list[tuple[str, int]]:
    """(holder, bytes) for each storage on the device, largest first: a component's attribute, a
    global name, a local of a frame."""
    paths, kind = _attribute_paths(modules), device.torch_device.type
    tensors = [
        found
        for found in gc.get_objects()
        if issubclass(type(found), torch.Tensor) and found.device.type == kind
    ]
    found: dict[int, tuple[str, int]] = {}
    for number in range(len(tensors)):
        key, nbytes = device.storage_of(tensors[number])
        holders = [
            name
            for referrer in gc.get_referrers(tensors[number])
            if (name := _name(referrer, tensors, number, paths))
        ]
        known = [name for name in holders if not name.startswith("a ")]
        if holders and (key not in found or known):
            found[key] = ((known or holders)[0], nbytes)
    return sorted(found.values(), key=lambda item: (-item[1], item[0]))


def _attribute_paths(modules: Mapping[str, nn.Module]) -> dict[int, str]:
    """id() of each attribute dictionary of a component -> its path: ``unet.down_blocks.0.conv``,
    ``unet.to_q.state``."""
    paths: dict[int, str] = {}
    for name, module in modules.items():
        for path, child in module.named_modules():
            owner = f"{name}.{path}" if path else name
            for inner in (child.__dict__, child._parameters, child._buffers):
                paths[id(inner)] = owner
            for key, value in child.__dict__.items():
                if hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)):
                    paths[id(value.__dict__)] = f"{owner}.{key}"
    return paths


def _name(referrer: Any, tensors: list[torch.Tensor], number: int, paths: Mapping[int, str]) -> str:
    """Name of ``referrer``, which holds tensor ``number``; starts with "a " where only its type is
    known, "" for no holder."""
    if referrer is tensors or isinstance(referrer, torch.Tensor):
        return ""
    names = referrer.f_locals if isinstance(referrer, types.FrameType) else referrer
    key = (
        next((k for k in names if names[k] is tensors[number]), "")
        if isinstance(names, dict)
        else ""
    )
    if isinstance(referrer, types.FrameType):
        return f"{key} in {referrer.f_code.co_name}()"
    if not isinstance(referrer, dict):
        return f"a {type(referrer).__qualname__}"
    if id(referrer) in paths:
        return f"{paths[id(referrer)]}.{key}"
    if "__builtins__" in referrer:
        return f"{referrer.get('__name__')}.{key}"
    return f"a dict's {key!r}"


def error_to_raise(error: BaseException, device: Device, where: str) -> BaseException:
    """The error to raise in place of ``error``, which happened in ``where``.

    It is a GraphrunError if ``error`` or one of its causes is one, or is a device error; else
    ``error`` itself, with its traceback as a note. Removes the tracebacks of ``error`` and its
    causes.
    """
    chain = list(_chain(error))
    typed = _typed(chain, device, where) if isinstance(error, Exception) else None
    if typed is None:
        lines = "".join(traceback.format_tb(error.__traceback__))
        error.add_note(f"in {where}; raised at\n{lines.rstrip()}")
    for link in chain:
        link.__traceback__ = None
    return typed or error


def _typed(chain: list[BaseException], device: Device, where: str) -> GraphrunError | None:
    for link in chain:
        if (found := device.explain(link)) is not None:
            return type(found)(f"{where}: {found}")
        if isinstance(link, GraphrunError) and not isinstance(link, StageError):
            return link
    return next((link for link in chain if isinstance(link, StageError)), None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error`` with its causes, contexts and group members, each once."""
    waiting, seen = [error], set[int]()
    while waiting:
        link = waiting.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        inside = link.exceptions if isinstance(link, BaseExceptionGroup) else ()
        waiting += [
            other for other in (link.__cause__, link.__context__, *inside) if other is not None
        ]
