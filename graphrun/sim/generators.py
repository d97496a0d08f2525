"""Random generators of a simulated device."""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch

# by the address of PyTorch's own object: operators get it in another Python object
_generators: WeakValueDictionary[int, DeviceGenerator] = WeakValueDictionary()


class DeviceGenerator(torch.Generator):
    """A generator of the CPU that reports ``reported`` as its device.

    On that simulated device it stands for the device's own generator, which needs a backend.
    """

    reported: torch.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.reported


def generator_on(device: torch.device) -> DeviceGenerator:
    """Return a generator of the simulated ``device``."""
    generator = DeviceGenerator("cpu")
    generator.reported = device
    _generators[_address(generator)] = generator
    return generator


def device_of(generator: torch.Generator) -> torch.device:
    """Return the device of ``generator``, an argument of an operator."""
    return _generators.get(_address(generator), generator).device


def _address(generator: torch.Generator) -> int:
    return int(generator._cdata)  # type: ignore[attr-defined]
