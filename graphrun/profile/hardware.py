"""Built-in hardware descriptions (priors), and detection of this machine's CUDA device.

bf16 rates and pinned host-to-device rates are what real models reach, not data sheets (TFLOP/s, GB/s): RTX 3060 21.7 and 24,
RTX 4060 25.7 and 12 (eight lanes), RTX 4090 140 and 25, RTX 5090 200 and 50, A100 250 and 25, H100 and H200 780 and 55.
Pageable copies reach a third to a half of the pinned rate (0.4 here). Host-to-device copies fall to 11 to 16 GB/s on PCIe 4
while the other direction is in use (0.5 here). Disk: safetensors through mmap 1.0 to 1.3 GB/s (1.2 here). A CUDA context takes
287 MB (lazy loading) to 667 MB (eager); the larger is used. Device memory bandwidth, from NVIDIA's data sheets (GB/s): 360,
272, 1008, 1792, 2039 (A100 80 GB), 3350, 4800. A host computes 0.3 TFLOP/s in 16 bits (about what eight cores with AVX2 reach
in fp32). cuBLAS workspace: 8.125 MiB, 32 MiB from compute capability 9.0. Submitting a copy takes 5 to 7 us, independent of
its size (arXiv:2602.21548, 5.2); 7 here. Launching a kernel takes the host about 5 us, from PyTorch's dispatch to the driver (2 to
9 us are measured for the driver's part). Allocating host memory and locking its pages takes 0.2 to 0.4 s for a GB
(rapidsai/dask-cuda, pull request 98 and issue 106); 0.2 here.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphrun.errors import InputError
from graphrun.model.problem import Hardware
from graphrun.units import GIB, KIB, MIB

CONTEXT_BYTES = 667_000_000
COPY_START_SECONDS = 7e-6
LAUNCH_SECONDS = 5e-6
PAGE_LOCK_SECONDS = 0.2e-9
RTX4090_H2D = 25e9
SMALL = 0.0005  # weights of graphs in small (flux-tiny, wan-tiny) over those of the models that they stand for
DEFAULT = "rtx4090"
HOPPER = ("h100", "h200")  # compute capability 9.0

# Without one of these, Linux has no card that torch.cuda could open (NVIDIA, WSL, ROCm), so torch is not imported to check.
DEVICE_NODES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


def _card(
    name: str, gib: int, tflops: float, h2d_gb: float, memory_gb: float, workspace_bytes: int = 8 * MIB + 128 * KIB
) -> Hardware:
    return Hardware(
        name=name,
        device="cuda",
        capacity_bytes=gib * GIB,
        context_bytes=CONTEXT_BYTES,
        workspace_bytes=workspace_bytes,
        h2d_bytes_per_second=h2d_gb * 1e9,
        pageable_bytes_per_second=0.4 * h2d_gb * 1e9,
        d2h_bytes_per_second=h2d_gb * 1e9,
        bidirectional=0.5,
        disk_bytes_per_second=1.2e9,
        flops_per_second=tflops * 1e12,
        memory_bytes_per_second=memory_gb * 1e9,
        copy_start_seconds=COPY_START_SECONDS,
        launch_seconds=LAUNCH_SECONDS,
        page_lock_seconds=PAGE_LOCK_SECONDS,
        spares_large_copies=name in HOPPER,
    )


def priors() -> dict[str, Hardware]:
    """The built-in devices by name. ``sim``, the simulated accelerator, has no context, no scratch and no caching allocator."""
    hopper = 32 * MIB
    cards = (
        _card("rtx3060", 12, 21.7, 24, 360),
        _card("rtx4060", 8, 25.7, 12, 272),
        _card("rtx4090", 24, 140, 25, 1008),
        _card("rtx5090", 32, 200, 50, 1792),
        _card("a100", 80, 250, 25, 2039),
        _card("h100", 80, 780, 55, 3350, hopper),
        _card("h200", 141, 780, 55, 4800, hopper),
    )
    return {card.name: card for card in cards} | {"sim": simulated()}


PAGES = "sim:pages="  # begins the name of a simulated accelerator that counts in pages; the factor on their size follows


def simulated(page_scale: float | None = None) -> Hardware:
    """The simulated accelerator: unlimited capacity, 1 GB/s in each direction, 100 GFLOP/s on its virtual clock.

    ``page_scale``: memory counts in the pages of PyTorch's allocator, their size times this; None: in bytes of tensors.

    Copies and launches start faster than on an rtx4090, so that they take a similar part of a run of a small graph. In the time of
    a start, a card copies so many bytes; `sim` copies ``page_scale`` (None: `SMALL`) times as many, as its pages are smaller.
    """
    h2d_bytes_per_second = 1e9
    scale = (page_scale or SMALL) * RTX4090_H2D / h2d_bytes_per_second
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
        launch_seconds=scale * LAUNCH_SECONDS,
        page_lock_seconds=PAGE_LOCK_SECONDS,
        caching_allocator=page_scale is not None,
        page_scale=page_scale or 1.0,
        basis="declared",
    )


def hardware(name: str, profiles: Mapping[str, Hardware] | None = None) -> Hardware:
    """The device called ``name``, of ``profiles`` or a prior; ``sim:pages=FACTOR``: the simulated accelerator, counting in pages.
    Raises InputError, with the most similar name, if there is none."""
    if name.startswith(PAGES):
        return simulated(_page_scale(name))
    devices = {**(profiles or {}), **priors()}
    if name not in devices:
        near = difflib.get_close_matches(name, devices, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InputError(f"hardware {name!r} is not known; {hint}known: {', '.join(devices)}")
    return devices[name]


def _page_scale(name: str) -> float:
    try:
        scale = float(name.removeprefix(PAGES))
    except ValueError:
        scale = 0.0
    if not 1e-6 <= scale <= 1:  # smaller pages than of 512 bytes are rounded up to these
        raise InputError(f"hardware {name!r}: write a factor from 0.000001 to 1 behind {PAGES}, such as {PAGES}0.0005")
    return scale


def found() -> Hardware | None:
    """This machine's CUDA device: its own capacity, and the rates of the prior whose name its name contains. None without a
    device."""
    if sys.platform == "linux" and not any(Path(node).exists() for node in DEVICE_NODES):
        return None

    import torch

    if not torch.cuda.is_available():
        return None
    properties: Any = torch.cuda.get_device_properties(0)
    plain = properties.name.lower().replace(" ", "").replace("-", "")
    base = next((card for name, card in priors().items() if name in plain), priors()[DEFAULT])
    workspace_bytes = 32 * MIB if properties.major >= 9 else base.workspace_bytes
    return replace(
        base,
        name=plain.removeprefix("nvidia"),
        capacity_bytes=properties.total_memory,
        workspace_bytes=workspace_bytes,
        spares_large_copies=properties.major == 9,
    )


def free_bytes() -> int | None:
    """Bytes that this machine's CUDA device has free, down to whole 256 MiB, so that the next plan is for as many; None without a
    device."""
    if found() is None:
        return None

    import torch

    return int(torch.cuda.mem_get_info(0)[0]) // (256 * MIB) * (256 * MIB)
