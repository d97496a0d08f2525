"""Open the device of a problem on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from graphrun.errors import InputError
from graphrun.model.allocator import Caching
from graphrun.model.problem import Hardware, Problem
from graphrun.runtime.devices.device import Device


def open_device(problem: Problem, *, check_ordering: bool = False) -> Device:
    """Return the device of ``problem``, with its secondary devices.

    For ``sim`` hardware, this is a simulated device with the hardware's rates; for ``cuda``, the
    first CUDA device; for ``cpu``, this machine's CPU. Raises InputError if there is none.
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

    ``first_device``: the main device, if this is one of its secondary devices. Raises InputError if
    there is no such device.
    """
    if hardware.device == "sim":
        from graphrun.runtime.devices.simulated import SimulatedDevice
        from graphrun.sim import Machine

        assert first_device is None or isinstance(first_device, SimulatedDevice)
        return SimulatedDevice(
            Machine(
                capacity_bytes=hardware.capacity_bytes,
                h2d_bytes_per_second=hardware.h2d_bytes_per_second,
                d2h_bytes_per_second=hardware.d2h_bytes_per_second,
                flops_per_second=hardware.flops_per_second,
                pageable_bytes_per_second=hardware.pageable_bytes_per_second,
                disk_bytes_per_second=hardware.disk_bytes_per_second,
                launch_seconds=hardware.launch_seconds,
                copy_start_seconds=hardware.copy_start_seconds,
                page_lock_seconds=hardware.page_lock_seconds,
                check_ordering=check_ordering or None,
                pages=Caching(hardware.page_scale) if hardware.caching_allocator else None,
                sibling=None if first_device is None else first_device.machine,
            )
        )
    if check_ordering:
        raise InputError(
            "--check-ordering looks for races on the simulated accelerator: add --device sim"
        )
    if hardware.device == "cpu":
        from graphrun.runtime.devices.cpu import CpuDevice

        return CpuDevice(hardware)
    if hardware.device == "cuda":
        from graphrun.runtime.devices.cuda import CudaDevice

        return CudaDevice(number, workspace_bytes=hardware.workspace_bytes)
    raise InputError(
        f"hardware {hardware.name} computes on {hardware.device!r}, which this version cannot run "
        "on; use cuda, cpu or sim"
    )
