"""Options of several devices, as a user types them; the first device is the main device.

Example: ``--vram 24G,12G --hardware rtx4090,rtx3060 --device cuda:0,cuda:1``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from graphrun.errors import InputError


class DeviceOptions(NamedTuple):
    """Options of one device. None: not given."""

    vram: Any = None
    hardware: Any = None
    device: str | None = None


def per_device(vram: Any, hardware: Any = None, device: Any = None) -> list[DeviceOptions]:
    """Return the options of each device, from texts with commas or from sequences.

    A single ``hardware`` or ``device`` applies to all. Raises InputError if the numbers of items
    differ, if budgets have no units, or if devices are not numbered in order.
    """
    budgets, profiles, names = _items(vram), _items(hardware), _items(device)
    count = max(map(len, (budgets, profiles, names)))
    if count > 1 and any(isinstance(budget, str) and budget.isdigit() for budget in budgets):
        raise InputError(
            f"vram: {vram!r} would be budgets of {count} devices, and each of them has its "
            "unit, as in 24G,12G; "
            f"did you mean {str(vram).replace(',', '.')}?"
        )
    for option, items in (("vram", budgets), ("hardware", profiles), ("device", names)):
        if len(items) != count and (option == "vram" or len(items) != 1):
            raise InputError(
                f"{option} names {len(items)} of {count} devices: give one for each, as in "
                f"{_EXAMPLES[option]}"
            )
    profiles, names = (
        items * count if len(items) != count else items for items in (profiles, names)
    )
    rows = enumerate(zip(budgets, profiles, names, strict=True))
    return [
        DeviceOptions(nbytes, profile, _kind(name, number))
        for number, (nbytes, profile, name) in rows
    ]


_EXAMPLES = {"vram": "24G,12G", "hardware": "rtx4090,rtx3060", "device": "cuda:0,cuda:1"}


def _items(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [item.strip() for item in value.split(",")]
    return list(value) if isinstance(value, Sequence) else [value]


def _kind(name: Any, number: int) -> Any:
    """Return the kind of device ``number``: ``cuda`` for ``cuda:1``."""
    kind, colon, index = name.partition(":") if isinstance(name, str) else (name, "", "")
    if colon and index != str(number):
        raise InputError(
            f"device {name} is number {number} of those given: the first is {kind}:0, and the "
            "others follow in order; "
            "CUDA_VISIBLE_DEVICES changes which card has which number"
        )
    return kind
