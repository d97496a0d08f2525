"""Chips whose processor and GPU share one memory, from their data sheets.

A name of ``--hardware`` is the chip and its GB of memory: ``m4max-64``; or the chip alone where it
comes with one size: ``gb10``.

Sources. Apple: cores, sizes and bandwidths of M1 to M5 from Apple's press releases and technical
specifications. Apple states 2.6, 5.2, 10.4, 20.8 (M1) and 3.6, 6.8, 13.6, 27.2 TFLOP/s (M2); later
rates are 256 FLOPs per core and clock (M2: 1.398 GHz) at the published clocks of 1.38 (M3), 1.47
(M4), 1.578 (M4 Pro and Max) and 1.62 GHz (M5). These GPUs multiply fp16 as fast as fp32. M5 has
matrix units, four times as fast (Apple: over four times the peak of M4); whether PyTorch uses them
is not known, so they do not count. NVIDIA: DGX Spark (1 PFLOP/s in sparse fp4, 31 TFLOP/s in fp32,
273 GB/s; 16 bits with fp32 accumulation are a sixteenth of sparse fp4, as on other GeForce
Blackwell cards), Jetson Thor T5000 and T4000 (2070 and 1200 TFLOP/s in sparse fp4, of which 16 bits
are an eighth; 20 and 12 multiprocessors at 1.57 GHz; 273 GB/s). AMD: Ryzen AI Max+ 395 (40 compute
units at 2.9 GHz, 59.4 TFLOP/s in fp16, 256 GB/s).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chip:
    """A chip.

    ``gibs``: GiB of memory that it comes with. ``tensor``, ``fp32``: TFLOP/s in 16 bits and in
    fp32. ``cores``: multiprocessors, compute units or GPU cores. ``memory``: GB/s. ``device``: the
    kind. ``other_names``: parts of names that a driver gives its GPU, in lower case without spaces.
    """

    gibs: tuple[int, ...]
    tensor: float
    fp32: float
    cores: int
    memory: float
    architecture: str = "apple"
    device: str = "mps"
    other_names: tuple[str, ...] = ()


CHIPS = {
    "m1": Chip((8, 16), 2.6, 2.6, 8, 68),
    "m1pro": Chip((16, 32), 5.2, 5.2, 16, 200),
    "m1max": Chip((32, 64), 10.4, 10.4, 32, 400),
    "m1ultra": Chip((64, 128), 20.8, 20.8, 64, 800),
    "m2": Chip((8, 16, 24), 3.6, 3.6, 10, 100),
    "m2pro": Chip((16, 32), 6.8, 6.8, 19, 200),
    "m2max": Chip((32, 64, 96), 13.6, 13.6, 38, 400),
    "m2ultra": Chip((64, 128, 192), 27.2, 27.2, 76, 800),
    "m3": Chip((8, 16, 24), 3.5, 3.5, 10, 100),
    "m3pro": Chip((18, 36), 6.4, 6.4, 18, 150),
    "m3max": Chip((48, 64, 128), 14.1, 14.1, 40, 400),
    "m3ultra": Chip((96, 256, 512), 28.3, 28.3, 80, 819),
    "m4": Chip((16, 24, 32), 3.8, 3.8, 10, 120),
    "m4pro": Chip((24, 48, 64), 8.1, 8.1, 20, 273),
    "m4max": Chip((48, 64, 128), 16.2, 16.2, 40, 546),
    "m5": Chip((16, 24, 32), 4.1, 4.1, 10, 153),
    "m5pro": Chip((24, 48, 64), 8.3, 8.3, 20, 307),
    "m5max": Chip((48, 64, 128), 16.6, 16.6, 40, 614),
    "gb10": Chip((128,), 62.5, 31, 48, 273, "blackwell", "cuda"),
    "thor": Chip((64, 128), 258, 8, 20, 273, "blackwell", "cuda"),
    "strixhalo": Chip(
        (32, 64, 96, 128), 59.4, 29.7, 40, 256, "rdna3", "cuda", ("radeon8060s", "gfx1151")
    ),
}


def names() -> Iterator[tuple[str, Chip, int]]:
    """Yield the name of each chip with each size, the chip, and its GiB."""
    for name, chip in CHIPS.items():
        for gib in chip.gibs:
            yield (f"{name}-{gib}" if len(chip.gibs) > 1 else name), chip, gib
