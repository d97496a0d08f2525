"""Open the devices of a problem on this machine, by the openers of their kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphrun.errors import InputError
from graphrun.model.hardware import Hardware
from graphrun.model.problem import Problem
from graphrun.runtime.devices.device import Device


def open_device(problem: Problem, *, check_ordering: bool = False) -> Device:
    """Return the device of ``problem``, with its secondary devices.

    It is the first device of the kind of ``problem.hardware`` (`graphrun.device_kinds`). Raises
    InputError if there is none.
    """
    return open_devices(
        [problem.hardware, *(secondary.hardware for secondary in problem.secondaries)],
        check_ordering=check_ordering,
    )


def open_devices(cards: Sequence[Hardware], *, check_ordering: bool = False) -> Device:
    """Return the device of the first of ``cards``, with the others as its secondary devices.

    Raises InputError if a device is missing.
    """
    device = open_hardware(cards[0], check_ordering=check_ordering)
    return device.with_secondaries(
        [open_hardware(card, number, device) for number, card in enumerate(cards[1:], 1)]
    )


def open_hardware(
    hardware: Hardware,
    number: int = 0,
    first_device: Device | None = None,
    *,
    check_ordering: bool = False,
) -> Device:
    """Return the device that ``hardware`` describes, number ``number`` of its kind.

    ``first_device``: the main device, if this is a secondary device of it. Raises InputError if
    there is no such device, or if the kind has no ordering checker.
    """
    kind, checker = hardware.kind, dict[str, Any]()
    if kind.has_virtual_clock:
        checker = {"check_ordering": check_ordering}
    elif check_ordering:
        raise InputError(
            "--check-ordering looks for races on the simulated accelerator: add --device sim"
        )
    device: Device = kind.open(hardware, number, first_device, **checker)
    return device
