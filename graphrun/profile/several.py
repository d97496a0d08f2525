"""Several devices, as they are typed: ``--vram 24G,12G --hardware rtx4090,rtx3060 --device
cuda:0,cuda:1``. The first is main."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from graphrun.errors import InputError


class Asked(NamedTuple):
    """What was given for one device. None: nothing."""

    vram: Any = None
    hardware: Any = None
    device: str | None = None


def per_device(vram: Any, hardware: Any = None, device: Any = None) -> list[Asked]:
    """What was given for each device, of texts with commas or sequences. One ``hardware``, and one
    ``device``, is that of all.

    Raises InputError where the numbers of items differ, where budgets lack units, or where devices
    are not numbered in order."""
    budgets, profiles, names = _items(vram), _items(hardware), _items(device)
    count = max(map(len, (budgets, profiles, names)))
    if count > 1 and any(isinstance(of, str) and of.isdigit() for of in budgets):
        raise InputError(
            f"vram: {vram!r} would be budgets of {count} devices, and each of them has its unit, as in 24G,12G; "
            f"did you mean {str(vram).replace(',', '.')}?"
        )
    for what, found in (("vram", budgets), ("hardware", profiles), ("device", names)):
        if len(found) != count and (what == "vram" or len(found) != 1):
            raise InputError(
                f"{what} names {len(found)} of {count} devices: give one for each, as in {_EXAMPLES[what]}"
            )
    profiles, names = (
        found * count if len(found) != count else found for found in (profiles, names)
    )
    rows = enumerate(zip(budgets, profiles, names, strict=True))
    return [Asked(nbytes, profile, _kind(name, number)) for number, (nbytes, profile, name) in rows]


_EXAMPLES = {"vram": "24G,12G", "hardware": "rtx4090,rtx3060", "device": "cuda:0,cuda:1"}


def _items(given: Any) -> list[Any]:
    if isinstance(given, str):
        return [item.strip() for item in given.split(",")]
    return list(given) if isinstance(given, Sequence) else [given]


def _kind(name: Any, number: int) -> Any:
    """``cuda`` of ``cuda:1``, for device ``number`` of those given."""
    kind, colon, index = name.partition(":") if isinstance(name, str) else (name, "", "")
    if colon and index != str(number):
        raise InputError(
            f"device {name} is number {number} of those given: the first is {kind}:0, and the others follow in order; "
            "CUDA_VISIBLE_DEVICES changes which card has which number"
        )
    return kind
