"""What becomes of an exception that ended a run: a typed error that holds no device memory.

An exception keeps its traceback, a traceback its frames, and a frame its locals and its function's closure: activations of the
block that failed would stay on the device for as long as somebody holds the error (clearing frames does not empty closures).
Tracebacks are therefore let go of. What they said is kept as text where it matters, in errors that nobody foresaw.

Who holds memory on a device that nothing should hold any more: names for an error. Looks at what lives; changes nothing.
"""

from __future__ import annotations

import gc
import traceback
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from graphrun.errors import GraphrunError
from graphrun.runtime.devices.device import Device
from graphrun.units import show_size

SHOWN = 5


def leftovers(device: Device, modules: Mapping[str, nn.Module]) -> str:
    """The largest things on ``device``, and who holds them with how many bytes, as far as that can be told."""
    shown, named = device.holders(), _named(device, modules)
    more = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    held = ", ".join(f"{holder} ({show_size(nbytes)})" for holder, nbytes in named[:SHOWN])
    return ", ".join(shown[:SHOWN]) + more + (f"; held by {held}" if held else "")


def _named(device: Device, modules: Mapping[str, nn.Module]) -> list[tuple[str, int]]:
    """(holder, bytes) for each storage on the device, largest first: a component's attribute, a global name, a local of a frame."""
    places, kind = _places(modules), device.torch_device.type
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor) and thing.device.type == kind]
    found: dict[int, tuple[str, int]] = {}
    for number in range(len(tensors)):
        key, nbytes = device.storage_of(tensors[number])
        holders = [name for referrer in gc.get_referrers(tensors[number]) if (name := _name(referrer, tensors, number, places))]
        known = [name for name in holders if not name.startswith("a ")]
        if holders and (key not in found or known):
            found[key] = ((known or holders)[0], nbytes)
    return sorted(found.values(), key=lambda item: (-item[1], item[0]))


def _places(modules: Mapping[str, nn.Module]) -> dict[int, str]:
    """Dictionaries in which a component keeps things, by identity: ``unet.down_blocks.0.conv``, ``unet.to_q.state``."""
    places: dict[int, str] = {}
    for name, module in modules.items():
        for path, child in module.named_modules():
            place = f"{name}.{path}" if path else name
            for inner in (child.__dict__, child._parameters, child._buffers):
                places[id(inner)] = place
            for key, value in child.__dict__.items():
                if hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)):
                    places[id(value.__dict__)] = f"{place}.{key}"
    return places


def _name(referrer: Any, tensors: list[torch.Tensor], number: int, places: Mapping[int, str]) -> str:
    """What ``referrer``, which holds tensor ``number``, is called; beginning with "a " where only its kind is known."""
    if referrer is tensors or isinstance(referrer, torch.Tensor):
        return ""
    names = referrer.f_locals if isinstance(referrer, types.FrameType) else referrer
    key = next((k for k in names if names[k] is tensors[number]), "") if isinstance(names, dict) else ""
    if isinstance(referrer, types.FrameType):
        return f"{key} in {referrer.f_code.co_name}()"
    if not isinstance(referrer, dict):
        return f"a {type(referrer).__qualname__}"
    if id(referrer) in places:
        return f"{places[id(referrer)]}.{key}"
    if "__builtins__" in referrer:
        return f"{referrer.get('__name__')}.{key}"
    return f"a dict's {key!r}"


def settled(error: BaseException, device: Device, where: str) -> BaseException:
    """The error to raise in place of ``error``, which happened ``where``: typed if it says something of the device, else itself.

    Neither it nor any exception it came from has a traceback any more; an error of other code has it as a note.
    """
    chain = list(_chain(error))
    told = _told(chain, device, where) if isinstance(error, Exception) else None
    if told is None:
        lines = "".join(traceback.format_tb(error.__traceback__))
        error.add_note(f"in {where}; raised at\n{lines.rstrip()}")
    for link in chain:
        link.__traceback__ = None
    return told or error


def _told(chain: list[BaseException], device: Device, where: str) -> GraphrunError | None:
    for link in chain:
        if isinstance(link, GraphrunError):
            return link
        if (told := device.explain(link)) is not None:
            return type(told)(f"{where}: {told}")
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error`` and every exception it came from, each once."""
    waiting, seen = [error], set[int]()
    while waiting:
        link = waiting.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        inside = link.exceptions if isinstance(link, BaseExceptionGroup) else ()
        waiting += [other for other in (link.__cause__, link.__context__, *inside) if other is not None]
