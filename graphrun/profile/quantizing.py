"""What it costs to quantize weights into a file, once, before the first run that reads it.

    files --disk--> host --copy--> device: quantize --copy back--> host --disk--> file

Steps follow one another, weight by weight. On a device, each takes its bytes over a rate of the
hardware, measured by ``graphrun calibrate`` or from the data sheet: the kernel reads a weight and
writes its quantized form at the rate of device memory, and a disk writes as fast as it reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from graphrun.graph.precisions import QUANTIZED
from graphrun.model.hardware import Hardware
from graphrun.model.problem import ComponentNumbers, Variant

# bitsandbytes 0.50 quantizes a weight on a CPU core at about these rates, in bytes of 16-bit
# weights per second (idle 2.10 GHz Xeon core). A cast to fp8 runs at memory speed.
QUANTIZING_RATES = {"int8": 0.2e9, "nf4": 0.07e9, "fp8": 5e9}
SOURCE_BYTES = 2  # of a weight before it is quantized


@dataclass(frozen=True, slots=True)
class QuantizingCost:
    """The cost of quantizing a component: seconds, bytes read from files and bytes written.

    ``place``: where weights are quantized, the name of a device or ``CPU``.
    """

    component: str
    precision: str
    place: str
    seconds: float
    read_bytes: int
    written_bytes: int


def quantizing_costs(
    components: Iterable[ComponentNumbers], hardware: Hardware, present_names: Collection[str] = ()
) -> tuple[QuantizingCost, ...]:
    """Return the costs of those of ``components`` that a run reads from files that it writes first.

    ``components``: each with its chosen variant first. ``present_names``: components whose file
    exists already.
    """
    return tuple(
        _cost(component, component.variants[0], hardware)
        for component in components
        if component.variants[0].stored_bytes
        and component.variants[0].precision in QUANTIZED
        and component.name not in present_names
    )


def _cost(component: ComponentNumbers, variant: Variant, hardware: Hardware) -> QuantizingCost:
    precision, written_bytes = variant.precision, variant.stored_bytes
    read_bytes, disk_rate = SOURCE_BYTES * component.parameters, hardware.disk_bytes_per_second
    seconds = (read_bytes + written_bytes) / disk_rate
    on_device = not hardware.unified and precision != "fp8"
    if on_device:
        seconds += (
            read_bytes / hardware.pageable_bytes_per_second
            + (read_bytes + written_bytes) / hardware.memory_bytes_per_second
            + written_bytes / hardware.d2h_pageable_bytes_per_second
        )
    elif not hardware.kind.has_virtual_clock:
        seconds += read_bytes / QUANTIZING_RATES[precision]
    place = hardware.name if on_device else "CPU"
    return QuantizingCost(component.name, precision, place, seconds, read_bytes, written_bytes)
