"""Built-in hardware descriptions (data-sheet estimates), and detection of this machine's card.

An estimate is a card's data sheet (`SHEETS`) times the share that kernels reach (`SHARES`,
`MEMORY_SHARE`), by class of kernel (`costs`). Data sheets: NVIDIA's architecture papers GA102, Ada
and RTX Blackwell (dense tensor rates with fp32 accumulation), data sheets of V100, T4, A100, H100,
H200, B200, A10, L4, L40S and RTX A6000; AMD's of MI300X, RX 7900 XT and XTX and RX 9070 XT; Intel's
of Arc A770 and B580 (fp16 by their matrix units is half of the rate in int8). Laptop rates are for
the highest power limit: cores and boost clocks of nvidia.com/geforce/gaming-laptops/compare. From
pages that are not NVIDIA's: RTX 4090 D, RTX PRO 6000 and the RTX 5090 laptop (150 W; its PCIe is
assumed) from hmc-tech.com; RTX 6000 Ada from grafikkarten.com, after NVIDIA's site; L20 from
topcpu.net; tensor rates of RTX 6000 Ada and L20 from tables of training tools. Chips whose
processor and GPU share memory are in `chips`.

Shares of A100 and H100, GeForce's of convolutions, `LAUNCH_SECONDS`, `PAGEABLE_SHARE` and
`FRESH_PAGES_RATE` are fitted by ``benchmarks/fit_costs.py`` on published seconds
(``benchmarks/data``), like the constant marked "fitted" in `costs`. Errors of rows whose source was
left out of the fit are in ``benchmarks/results/published.json``. V100 uses the shares of A100; B200
and MI300X those of H100; GeForce cards reach their sheets, which state half of the tensor cores'
rate (fp32 accumulation). Assumed: 90 % of the memory's rate, 5 us to fill and empty the pipeline of
a wave, half of the sheet for H100's convolutions. Exponentials: 16 per multiprocessor and clock
(CUDA programming guide, throughput of native arithmetic instructions); softmax costs about three of
them per score.

Launches: from PyTorch's dispatch to the driver, a kernel takes the host about 5 us (2 to 9 us are
measured for the driver's part). `sim` charges this (`DISPATCH_SECONDS`). `LAUNCH_SECONDS`, fitted
to times of whole pipelines, includes diffusers' Python code around an operator. `sim` compares
tools that each have code of their own around an operator and a copy, and does not time that code. A
flat 17 us for it would charge nothing for a tool's hooks, and as much for its copies as for an
operator of diffusers.

Copies: pinned rates (GB/s) are what PCIe reaches: 3.0 x16 12, 4.0 x8 12, x16 25, 5.0 x8 25, x16 50
to 55. Pageable copies to the device reach `PAGEABLE_SHARE` of that. Page faults limit copies to
newly allocated pageable memory (`FRESH_PAGES_RATE`). Both are fitted on diffusers' offload modes.
Host-to-device copies fall to 11 to 16 GB/s on PCIe 4 while the other direction is in use (0.5
here). Submitting a copy takes 5 to 7 us, independent of its size (arXiv:2602.21548, 5.2); 7 here.

Host: allocating host memory and locking its pages takes 0.2 to 0.4 s per GB (rapidsai/dask-cuda,
pull request 98 and issue 106); 0.2 here. Disk: safetensors through mmap 1.0 to 1.3 GB/s (1.2 here).
A host computes 0.3 TFLOP/s in 16 bits (about what eight cores with AVX2 reach in fp32).
"""

from __future__ import annotations

import difflib
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graphrun import device_kinds
from graphrun.device_kinds import DeviceKind, kind_called
from graphrun.errors import InputError
from graphrun.host_ram import host_ram_bytes, steady_bytes, total_ram_bytes
from graphrun.kernel_memory import process_bytes
from graphrun.model.hardware import (
    LT_WORKSPACE_BYTES,
    READ_BUFFER_BYTES,
    READ_BUFFERS,
    Hardware,
    KernelRates,
)
from graphrun.profile import chips
from graphrun.profile.chips import Chip
from graphrun.profile.costs import EFFICIENT_ATTENTION
from graphrun.profile.processor import DIRECT_READ_RATE, PROCESS_BYTES
from graphrun.units import GIB, KIB, MIB

# Bytes of a card that a process takes outside PyTorch's allocator: the CUDA context, and kernels,
# which are loaded at their first run and stay. Hopper: a run of FLUX.1-dev on an H100 with torch
# 2.11 and CUDA 13.0 took 882 MB (552 MB after the start of the context, 727 MB after a product, a
# convolution and attention, 802 MB after small pipelines). Other architectures: not measured.
CONTEXT_BYTES = {"hopper": 885_000_000}
OTHER_CONTEXT_BYTES = 667_000_000
# of cuBLAS (8 MiB and 128 KiB, or 32 MiB from compute capability 9.0) and of cuBLASLt
WORKSPACE_BYTES = 8 * MIB + 128 * KIB + LT_WORKSPACE_BYTES
HOPPER_WORKSPACE_BYTES = 32 * MIB + LT_WORKSPACE_BYTES
COPY_START_SECONDS = 7e-6
DISPATCH_SECONDS = 5e-6
PAGE_LOCK_SECONDS = 0.2e-9
# weights of tiny graphs (flux-tiny, wan-tiny) over the weights of the models that they represent
SMALL = 0.0005
DEFAULT = "rtx4090"

# host seconds for one operator in eager PyTorch, with the Python code of diffusers around it
LAUNCH_SECONDS = 20e-6
WAVE_SECONDS = 5e-6
MEMORY_SHARE = 0.9
SOFTMAX_EXPONENTIALS = 3.0
PAGEABLE_SHARE = 0.24
FRESH_PAGES_RATE = 2.5e9


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of a data sheet's rates that kernels reach, by class of kernel."""

    matmul: float
    attention: float
    convolution: float


# A100; H100; GeForce and workstation cards
SHARES = {
    "ampere": Shares(0.883, 0.695, 0.416),
    "hopper": Shares(0.57, 0.632, 0.5),
    "geforce": Shares(1.0, 1.0, 0.994),
}
# Cards whose power limit (72, 70 and 150 W) is far below the draw of their tensor cores: share of
# the sheet's clock. T4: 24 of 65 TFLOP/s, which is its base over its boost clock (an answer of
# NVIDIA's, forums.developer.nvidia.com/t/about-gpu-peak-performance/264462). L4, A10: assumed.
THROTTLED = {"l4": 0.55, "t4": 0.37, "a10": 0.7}


@dataclass(frozen=True, slots=True)
class Sheet:
    """A data sheet.

    ``gib``: GiB of memory. ``tensor``, ``fp32``: TFLOP/s of tensor cores in 16 bits (dense, fp32
    accumulation) and of fp32. ``memory``: GB/s. ``pcie``: GB/s that PCIe reaches. ``shares``: the
    kind of `SHARES`. ``device``: the kind of device; ROCm's is cuda.
    """

    gib: int
    tensor: float
    fp32: float
    multiprocessors: int
    memory: float
    pcie: float
    architecture: str
    shares: str = "geforce"
    device: str = "cuda"


SHEETS = {
    "rtx3060": Sheet(12, 25.5, 12.7, 28, 360, 24, "ga10x"),
    "rtx3070": Sheet(8, 40.6, 20.3, 46, 448, 24, "ga10x"),
    "rtx3080": Sheet(10, 59.5, 29.8, 68, 760, 24, "ga10x"),
    "rtx3090": Sheet(24, 71.2, 35.6, 82, 936, 24, "ga10x"),
    "rtx4060": Sheet(8, 30.2, 15.1, 24, 272, 12, "ada"),
    "rtx4060ti": Sheet(16, 44.1, 22.1, 34, 288, 12, "ada"),
    "rtx4070": Sheet(12, 58.3, 29.1, 46, 504, 25, "ada"),
    "rtx4070ti": Sheet(12, 80.2, 40.1, 60, 504, 25, "ada"),
    "rtx4080": Sheet(16, 97.5, 48.7, 76, 717, 25, "ada"),
    "rtx4090": Sheet(24, 165.2, 82.6, 128, 1008, 25, "ada"),
    "rtx4090d": Sheet(24, 147.1, 73.5, 114, 1008, 25, "ada"),
    "rtx4060laptop": Sheet(8, 29.2, 14.6, 24, 256, 12, "ada"),
    "rtx4070laptop": Sheet(8, 40.0, 20.0, 36, 256, 12, "ada"),
    "rtx4080laptop": Sheet(12, 67.7, 33.9, 58, 432, 25, "ada"),
    "rtx4090laptop": Sheet(16, 79.4, 39.7, 76, 576, 25, "ada"),
    "rtx5060ti": Sheet(16, 47.4, 23.7, 36, 448, 25, "blackwell"),
    "rtx5070": Sheet(12, 61.7, 30.9, 48, 672, 50, "blackwell"),
    "rtx5070ti": Sheet(16, 87.9, 43.9, 70, 896, 50, "blackwell"),
    "rtx5080": Sheet(16, 112.6, 56.3, 84, 960, 50, "blackwell"),
    "rtx5090": Sheet(32, 209.5, 104.8, 170, 1792, 50, "blackwell"),
    "rtx5090laptop": Sheet(24, 114.0, 45.3, 82, 896, 25, "blackwell"),
    "t4": Sheet(16, 65, 8.1, 40, 320, 12, "turing"),
    "v100": Sheet(16, 125, 15.7, 80, 900, 12, "volta", "ampere"),
    "a10": Sheet(24, 125, 31.2, 72, 600, 25, "ga10x"),
    "a6000": Sheet(48, 154.8, 38.7, 84, 768, 25, "ga10x"),
    "l4": Sheet(24, 121, 30.3, 58, 300, 25, "ada"),
    "l40s": Sheet(48, 362, 91.6, 142, 864, 25, "ada"),
    "l20": Sheet(48, 119.5, 59.4, 92, 864, 25, "ada"),
    "6000ada": Sheet(48, 364, 91.1, 142, 960, 25, "ada"),
    "pro6000": Sheet(96, 503.8, 126, 188, 1792, 50, "blackwell"),
    "a100": Sheet(80, 312, 19.5, 108, 2039, 25, "ampere", "ampere"),
    "a100-40": Sheet(40, 312, 19.5, 108, 1555, 25, "ampere", "ampere"),
    "h100": Sheet(80, 989.4, 66.9, 132, 3350, 55, "hopper", "hopper"),
    "h200": Sheet(141, 989.4, 66.9, 132, 4800, 55, "hopper", "hopper"),
    "b200": Sheet(180, 2250, 75, 148, 8000, 55, "hopper", "hopper"),
    "mi300x": Sheet(192, 1307.4, 163.4, 304, 5300, 55, "cdna3", "hopper"),
    "rx7900xt": Sheet(20, 103, 51.5, 84, 800, 25, "rdna3"),
    "rx7900xtx": Sheet(24, 122.8, 61.4, 96, 960, 25, "rdna3"),
    "rx9070xt": Sheet(16, 195, 48.7, 64, 640, 50, "rdna4"),
    "arc-a770": Sheet(16, 137.6, 17.2, 32, 560, 25, "xe", device="xpu"),
    "arc-b580": Sheet(12, 116.5, 13.7, 20, 456, 12, "xe2", device="xpu"),
}
# architectures that multiply and convolve in fp32 at the rate of fp32; the others have TF32
WITHOUT_TF32 = ("volta", "turing", "rdna3", "rdna4", "xe", "xe2", "apple")
MOST_HINTS = 6  # names of devices in a question
HOPPER = ("h100", "h200")  # compute capability 9.0


def _card(name: str, sheet: Sheet) -> Hardware:
    tera, shares, clock_share = 1e12, SHARES[sheet.shares], THROTTLED.get(name, 1.0)
    tensor, fp32 = clock_share * sheet.tensor * tera, clock_share * sheet.fp32 * tera
    old = sheet.architecture in ("volta", "turing")
    # FLOPs in fp32 per exponential: 64 lanes per multiprocessor on V100, T4 and A100, 128 on
    # others, for 16 special function units
    per_exponential = 8 if old or sheet.architecture == "ampere" else 16
    kind = kind_called(sheet.device)
    return Hardware(
        name=name,
        device=sheet.device,
        capacity_bytes=sheet.gib * GIB,
        context_bytes=CONTEXT_BYTES.get(sheet.architecture, OTHER_CONTEXT_BYTES),
        workspace_bytes=(
            0
            if not kind.visibility  # no cuBLAS
            else HOPPER_WORKSPACE_BYTES
            if sheet.architecture in ("hopper", "blackwell")
            else WORKSPACE_BYTES
        ),
        h2d_bytes_per_second=sheet.pcie * 1e9,
        pageable_bytes_per_second=PAGEABLE_SHARE * sheet.pcie * 1e9,
        d2h_bytes_per_second=sheet.pcie * 1e9,
        d2h_pageable_bytes_per_second=FRESH_PAGES_RATE,
        bidirectional=0.5,
        disk_bytes_per_second=1.2e9,
        flops_per_second=shares.matmul * tensor,
        memory_bytes_per_second=MEMORY_SHARE * sheet.memory * 1e9,
        copy_start_seconds=COPY_START_SECONDS,
        launch_seconds=LAUNCH_SECONDS,
        page_lock_seconds=PAGE_LOCK_SECONDS,
        is_hopper=name in HOPPER,
        kernels=KernelRates(
            fp32_flops_per_second=shares.matmul * fp32,
            convolution_flops_per_second=shares.convolution * tensor,
            fp32_convolution_flops_per_second=shares.convolution
            * (fp32 if sheet.architecture in WITHOUT_TF32 else tensor / 2),
            attention_flops_per_second=shares.attention
            * tensor
            * (EFFICIENT_ATTENTION if old else 1.0),
            exponentials_per_second=fp32 / per_exponential / SOFTMAX_EXPONENTIALS,
            fp8_flops_per_second=2 * shares.matmul * tensor
            if sheet.architecture in ("ada", "hopper", "blackwell", "cdna3")
            else 0.0,
            int8_flops_per_second=(4 if name.startswith("rtx") else 2) * shares.matmul * tensor,
            multiprocessors=sheet.multiprocessors,
            wave_seconds=WAVE_SECONDS,
            bfloat16=not old,
        ),
    )


def _chip(name: str, chip: Chip, gib: int) -> Hardware:
    """Return the data-sheet estimate of a chip with one memory of ``gib`` GiB.

    A copy reads and writes the memory. The process's memory without tensors, and the buffers
    through which files are read, count in the same budget.
    """
    sheet = Sheet(
        gib,
        chip.tensor,
        chip.fp32,
        chip.cores,
        chip.memory,
        chip.memory / 2,
        chip.architecture,
        device=chip.device,
    )
    card = _card(name, sheet)
    return replace(
        card,
        context_bytes=PROCESS_BYTES + card.context_bytes,
        workspace_bytes=card.workspace_bytes + READ_BUFFERS * READ_BUFFER_BYTES,
        pageable_bytes_per_second=card.h2d_bytes_per_second,
        copy_start_seconds=0.0,
        page_lock_seconds=0.0,
        disk_bytes_per_second=DIRECT_READ_RATE,
        unified=True,
        serial_copies=kind_called(chip.device).overlap == "never",
    )


def data_sheet_estimates() -> dict[str, Hardware]:
    """Return the built-in devices by name; ``sim`` has no context, scratch or caching allocator."""
    cards = {name: _card(name, sheet) for name, sheet in SHEETS.items()}
    cards |= {name: _chip(name, chip, gib) for name, chip, gib in chips.names()}
    return cards | {
        kind.name: kind.detect() for kind in device_kinds.built_in() if kind.has_host_kernels
    }


# prefix of the name of a simulated accelerator that counts in pages; their scale follows
PAGES = "sim:pages="


def simulated(page_scale: float | None = None) -> Hardware:
    """Return the simulated accelerator.

    It has unlimited capacity, and on its virtual clock 1 GB/s in each direction and 100 GFLOP/s.
    ``page_scale``: memory counts in pages of PyTorch's allocator, scaled by this factor; None: in
    bytes of tensors.

    Copies and launches start faster than on an rtx4090, so that they take a similar share of a run
    of a small graph: in the start time of a copy, `sim` copies ``page_scale`` (None: `SMALL`) times
    the bytes that the card does, as its pages are smaller.
    """
    h2d_bytes_per_second = 1e9
    scale = (page_scale or SMALL) * SHEETS["rtx4090"].pcie * 1e9 / h2d_bytes_per_second
    return Hardware(
        name="sim" if page_scale is None else f"{PAGES}{page_scale:g}",
        device="sim",
        capacity_bytes=1 << 50,
        context_bytes=0,
        workspace_bytes=0,
        h2d_bytes_per_second=h2d_bytes_per_second,
        pageable_bytes_per_second=0.4e9,
        d2h_bytes_per_second=1e9,
        bidirectional=1.0,
        disk_bytes_per_second=1e9,
        flops_per_second=1e11,
        cpu_flops_per_second=1e10,
        memory_bytes_per_second=1e10,
        convolution_scratch=False,
        copy_start_seconds=scale * COPY_START_SECONDS,
        launch_seconds=scale * DISPATCH_SECONDS,
        page_lock_seconds=PAGE_LOCK_SECONDS,
        caching_allocator=page_scale is not None,
        page_scale=page_scale or 1.0,
        basis="simulated",
    )


def hardware(name: str, profiles: Mapping[str, Hardware] | None = None) -> Hardware:
    """Return the device called ``name``, from ``profiles`` or the data-sheet estimates.

    ``sim:pages=FACTOR``: the simulated accelerator, counting in pages. Raises InputError with
    similar names for an unknown one.
    """
    if name.startswith(PAGES):
        return simulated(_page_scale(name))
    devices = {**(profiles or {}), **data_sheet_estimates()}
    if name not in devices:
        raise InputError(
            f"hardware {name!r} is not known; {_hint(name, devices)}known: "
            f"{', '.join(_in_short(devices))}"
        )
    return devices[name]


def _hint(name: str, devices: Iterable[str]) -> str:
    """Return a question with the names of ``devices`` that ``name`` may mean: those that contain
    it, else the longest that it contains, else the most similar; "" without any."""
    plain = _plain(name)
    longer = sorted((key for key in devices if plain and plain in _plain(key)), key=len)
    shorter = sorted((key for key in devices if _plain(key) in plain), key=len, reverse=True)[:1]
    candidates = longer[:MOST_HINTS] or shorter or difflib.get_close_matches(plain, devices, 1)
    if not candidates:
        return ""
    *first, last = map(repr, candidates)
    return f"did you mean {' or '.join(filter(None, (', '.join(first), last)))}? "


def _in_short(devices: Iterable[str]) -> Iterator[str]:
    """Yield the names of ``devices``, with the sizes of one chip together."""
    sizes = {
        f"{chip}-{gib}": f"{chip}-{'/'.join(map(str, facts.gibs))}"
        for chip, facts in chips.CHIPS.items()
        for gib in facts.gibs
    }
    yield from dict.fromkeys(sizes.get(name, name) for name in devices)


def _page_scale(name: str) -> float:
    try:
        scale = float(name.removeprefix(PAGES))
    except ValueError:
        scale = 0.0
    if not 1e-6 <= scale <= 1:  # pages below 512 bytes are rounded up to 512
        raise InputError(
            f"hardware {name!r}: write a factor from 0.000001 to 1 behind {PAGES}, such as "
            f"{PAGES}0.0005"
        )
    return scale


def has_signs(kind: DeviceKind) -> bool:
    """Return whether this machine may have a device of ``kind``.

    It has the right platform, and on Linux one of the ``signs`` of such devices, if any are known.
    """
    if kind.platforms and sys.platform not in kind.platforms:
        return False
    return (
        sys.platform != "linux" or not kind.signs or any(Path(sign).exists() for sign in kind.signs)
    )


def detect_card() -> Hardware | None:
    """Return this machine's first device with memory or a processor of its own, or None.

    Kinds are tried in the order of `graphrun.device_kinds`. torch is imported only where there are
    signs of a device.
    """
    cards = (
        kind.detect()
        for kind in device_kinds.built_in()
        if not kind.is_host and not kind.has_virtual_clock and has_signs(kind)
    )
    return next((card for card in cards if card is not None), None)


def default_of(kind: DeviceKind | None) -> Hardware:
    """Return the data-sheet estimate to plan for without a device: `DEFAULT`, or one of ``kind``.

    Where no data sheet is of the kind: `DEFAULT` as a device of it.
    """
    estimates = data_sheet_estimates()
    if kind is None or estimates[DEFAULT].device == kind.name:
        return estimates[DEFAULT]
    of_kind = (card for card in estimates.values() if card.device == kind.name)
    return next(of_kind, _sheet_of(kind.name, kind)[0])


def detect_simulated(kind: DeviceKind) -> Hardware:
    """Return the simulated accelerator."""
    return simulated()


def detect_cuda(kind: DeviceKind) -> Hardware | None:
    """Return this machine's CUDA device, or None.

    It has its own capacity, and the rates of the data-sheet estimate with the longest name that the
    device's name contains.
    """
    if not has_signs(kind):
        return None

    import torch

    if not torch.cuda.is_available():
        return None
    properties: Any = torch.cuda.get_device_properties(0)
    base, plain = _sheet_of(f"{properties.name} {getattr(properties, 'gcnArchName', '')}", kind)
    plain = plain.partition("gfx")[0] or plain
    # a GPU in the processor's chip: GB10, Jetson, AMD's APUs
    is_unified = bool(getattr(properties, "is_integrated", False))
    workspace_bytes = HOPPER_WORKSPACE_BYTES if properties.major >= 9 else base.workspace_bytes
    return replace(
        base,
        name=plain.removeprefix("nvidia"),
        capacity_bytes=total_ram_bytes() if is_unified else properties.total_memory,
        workspace_bytes=workspace_bytes,
        is_hopper=properties.major == 9,
        unified=is_unified,
    )


def detect_accelerator(kind: DeviceKind) -> Hardware | None:
    """Return this machine's first device of ``kind``, which is a backend of PyTorch, or None.

    It has its own name and capacity, and the rates of the data-sheet estimate with the longest name
    that its name contains. For a device that no data sheet describes, rates are those of `DEFAULT`:
    plans have the right bytes, and seconds are not known.
    """
    if not has_signs(kind):
        return None

    import torch

    try:
        backend: Any = torch.get_device_module(kind.name)
        is_available = getattr(backend, "is_available", None)
        if not backend.device_count() or (is_available is not None and not is_available()):
            return None
    except Exception:  # noqa: BLE001  (of another package's backend)
        return None
    name, total_bytes = _identity(backend, kind)
    base, plain = _sheet_of(name, kind)
    return replace(base, name=plain or kind.name, capacity_bytes=total_bytes)


def is_present(hardware: Hardware) -> bool:
    """Return whether this machine has a device of the kind of ``hardware``."""
    if hardware.kind.is_host or hardware.kind.has_virtual_clock:
        return True
    return detect(hardware.kind) is not None


def detect(kind: DeviceKind | None = None) -> Hardware | None:
    """Return this machine's first device of ``kind``, or its first card; None without one."""
    card = detect_card()
    if kind is None or (card is not None and card.device == kind.name):
        return card
    return kind.detect()  # type: ignore[no-any-return]


def detect_mps(kind: DeviceKind) -> Hardware | None:
    """Return this machine's Apple GPU, or None.

    It has this machine's RAM, and the rates of its chip's data-sheet estimate. The system names the
    chip (``machdep.cpu.brand_string``, such as Apple M4 Max).
    """
    if not has_signs(kind):
        return None

    import torch

    if not torch.backends.mps.is_available():
        return None
    command = ["sysctl", "-n", "machdep.cpu.brand_string"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    base, plain = _sheet_of(process.stdout.strip().removeprefix("Apple "), kind)
    return replace(base, name=plain or kind.name, capacity_bytes=total_ram_bytes())


def _identity(backend: Any, kind: DeviceKind) -> tuple[str, int]:
    """Return the first device's name and bytes, else the kind's name and this machine's RAM."""
    name, total_bytes = kind.name, 0
    with suppress(Exception):  # of another package's backend
        properties: Any = backend.get_device_properties(0)
        name = str(getattr(properties, "name", name))
        total_bytes = int(getattr(properties, "total_memory", 0))
    if not total_bytes:
        with suppress(Exception):
            total_bytes = int(backend.mem_get_info(0)[1])
    return name, total_bytes or total_ram_bytes()


def _plain(name: str) -> str:
    """Return ``name`` in lower case, without spaces, dashes and marks."""
    plain = name.lower()
    for text in (" ", "-", "(r)", "(tm)"):
        plain = plain.replace(text, "")
    return plain


def _sheet_of(name: str, kind: DeviceKind) -> tuple[Hardware, str]:
    """Return the data-sheet estimate for a device called ``name``, and the plain name.

    The estimate has the longest name of the kind that ``name`` contains; without one, it is
    `DEFAULT` as a device of the kind. The plain name is in lower case without spaces.
    """
    plain = _plain(name)
    estimates = data_sheet_estimates()
    parts = {key: (key.replace("-", ""),) for key in SHEETS} | {
        key: (key.partition("-")[0], *chip.other_names) for key, chip, _ in chips.names()
    }
    names = [
        key
        for key, texts in parts.items()
        if estimates[key].device == kind.name and any(text in plain for text in texts)
    ]
    base = estimates[max(names, key=len, default=DEFAULT)]
    if base.device == kind.name:
        return base, plain
    return replace(
        base,
        device=kind.name,
        workspace_bytes=0,
        convolution_scratch=kind.convolution_scratch,
        caching_allocator=kind.page_rules == "pages",
        unified=kind.unified,
        serial_copies=kind.overlap == "never",
        is_hopper=False,
    ), plain


# Memory that a desktop takes from the card that drives it: 1 GiB with a browser, 0.5 GiB when idle
# (docs/howto/fit-a-card.md has sources).
DESKTOP_BYTES = (GIB, GIB // 2)
NEARLY_ALL = 0.9  # a budget above this share of a card's memory leaves too little for a desktop


def free_range_with_desktop(hardware: Hardware, budget_bytes: int) -> tuple[int, int] | None:
    """Return the minimum and maximum bytes usually free on a consumer card that drives a desktop.

    None if the budget is not nearly all of the card's memory, if the card is not a consumer card,
    or if it was measured.
    """
    consumer = hardware.name in SHEETS and hardware.name.startswith("rtx")
    if (
        not consumer
        or hardware.basis != "data sheet"
        or budget_bytes < NEARLY_ALL * hardware.capacity_bytes
    ):
        return None
    maximum_bytes, minimum_bytes = DESKTOP_BYTES
    return hardware.capacity_bytes - maximum_bytes, hardware.capacity_bytes - minimum_bytes


def budget_of(free_bytes: int) -> int:
    """Return the default VRAM budget: free bytes less a twentieth for other programs."""
    return int(0.95 * free_bytes)


def available_memory() -> int:
    """Return the bytes that this process takes and may still take, slightly rounded down."""
    return steady_bytes(host_ram_bytes() + process_bytes().nbytes)


def free_bytes(kind: DeviceKind | None = None) -> int | None:
    """Return the free bytes of the device of ``kind``, or of the first card; None: unknown.

    Rounded down to whole 256 MiB, so that the next plan gets the same number.
    """
    card = detect(kind)
    if card is None or card.kind.free_memory != "driver":
        return None

    import torch

    memory_of = getattr(torch.get_device_module(card.device), "mem_get_info", None)
    return None if memory_of is None else int(memory_of(0)[0]) // (256 * MIB) * (256 * MIB)
