"""Find references to device memory after a run, and remove those of exceptions.

An exception keeps its traceback, a traceback its frames, and a frame its locals and the closure of
its function. Activations of the block that failed would thus stay on the device as long as the
caller keeps the error (clearing frames does not empty closures). Tracebacks are therefore removed;
those of unforeseen errors are kept as text in a note.
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
    """Return text for an error: the largest allocations on ``device`` and their holders."""
    allocations, holders = device.holders(), _holders(device, modules)
    rest = f" and {len(allocations) - SHOWN} more" if len(allocations) > SHOWN else ""
    holder_text = ", ".join(f"{holder} ({show_size(nbytes)})" for holder, nbytes in holders[:SHOWN])
    return (
        ", ".join(allocations[:SHOWN]) + rest + (f"; held by {holder_text}" if holder_text else "")
    )


def _holders(device: Device, modules: Mapping[str, nn.Module]) -> list[tuple[str, int]]:
    """Return (holder, bytes) for each storage on the device, largest first.

    A holder is a component's attribute, a global name, or a local of a frame.
    """
    paths, kind = _attribute_paths(modules), device.torch_device.type
    tensors = [
        candidate
        for candidate in gc.get_objects()
        if issubclass(type(candidate), torch.Tensor) and candidate.device.type == kind
    ]
    storages: dict[int, tuple[str, int]] = {}
    for number in range(len(tensors)):
        key, nbytes = device.storage_of(tensors[number])
        holders = [
            name
            for referrer in gc.get_referrers(tensors[number])
            if (name := _name(referrer, tensors, number, paths))
        ]
        specific_names = [name for name in holders if not name.startswith("a ")]
        if holders and (key not in storages or specific_names):
            storages[key] = ((specific_names or holders)[0], nbytes)
    return sorted(storages.values(), key=lambda item: (-item[1], item[0]))


def _attribute_paths(modules: Mapping[str, nn.Module]) -> dict[int, str]:
    """Return id() of each component's attribute dictionary -> path (``unet.to_q.state``)."""
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


def _name(
    referrer: Any, tensor_list: list[torch.Tensor], number: int, paths: Mapping[int, str]
) -> str:
    """Return the name of ``referrer``, which refers to tensor ``number``; "" if it is no holder.

    The name starts with "a " if only the type of ``referrer`` is known. The tensor is passed as
    list and index, because a local variable that refers to it would count as a holder.
    """
    if referrer is tensor_list or isinstance(referrer, torch.Tensor):
        return ""
    names = referrer.f_locals if isinstance(referrer, types.FrameType) else referrer
    key = (
        next((k for k in names if names[k] is tensor_list[number]), "")
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


def error_to_raise(error: BaseException, device: Device, place: str) -> BaseException:
    """Return the error to raise in place of ``error``, which happened in ``place``.

    A GraphrunError if ``error`` or one of its causes is one, or a device error. Otherwise ``error``
    itself, with its traceback as a note. Removes the tracebacks of ``error`` and its causes.
    """
    chain = list(_chain(error))
    graphrun_error = _graphrun_error(chain, device, place) if isinstance(error, Exception) else None
    if graphrun_error is None:
        lines = "".join(traceback.format_tb(error.__traceback__))
        error.add_note(f"in {place}; raised at\n{lines.rstrip()}")
    for link in chain:
        link.__traceback__ = None
    return graphrun_error or error


def _graphrun_error(chain: list[BaseException], device: Device, place: str) -> GraphrunError | None:
    for link in chain:
        if (explanation := device.explain(link)) is not None:
            return type(explanation)(f"{place}: {explanation}")
        if isinstance(link, GraphrunError) and not isinstance(link, StageError):
            return link
    return next((link for link in chain if isinstance(link, StageError)), None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error`` with its causes, contexts and group members, each once."""
    queue, visited = [error], set[int]()
    while queue:
        link = queue.pop(0)
        if id(link) in visited:
            continue
        visited.add(id(link))
        yield link
        members = link.exceptions if isinstance(link, BaseExceptionGroup) else ()
        queue += [
            other for other in (link.__cause__, link.__context__, *members) if other is not None
        ]
