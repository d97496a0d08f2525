"""Rates and memory of a device and of its links to host and disk."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, harmonic_mean
from typing import Literal

from graphrun.device_kinds import DeviceKind, kind_called
from graphrun.units import MIB

Basis = Literal["measured", "traced", "graph file", "data sheet", "simulated"]

# cuBLASLt's part of `Hardware.workspace_bytes`, which PyTorch allocates separately
# (ATen/cuda/CublasHandlePool.cpp, torch 2.11). Seen on an H100.
LT_WORKSPACE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class KernelRates:
    """Achieved FLOPs per second of a card's kernels, by class (`graphrun.profile.costs`).

    They complement the rates of `Hardware`. As in PyTorch, convolutions in fp32 use TF32, matrix
    products do not.
    """

    fp32_flops_per_second: float
    convolution_flops_per_second: float
    fp32_convolution_flops_per_second: float
    attention_flops_per_second: float  # its matrix products alone
    exponentials_per_second: float  # of attention's softmax
    fp8_flops_per_second: float  # 0: no tensor cores for fp8
    int8_flops_per_second: float
    multiprocessors: int
    wave_seconds: float  # of a wave of tiles, in addition to its multiplications
    bfloat16: bool = True  # False: products in bfloat16 take as long as in fp32


# Classes of new memory, without and with huge pages.
NEW_PAGES = ("small pages", "huge pages")


@dataclass(frozen=True, slots=True)
class ProcessorRates:
    """Achieved rates of kernels on a CPU with ``threads`` threads (`graphrun.profile.costs`).

    ``rates``: (class, rate) pairs. Classes have a dtype, as "matmul bfloat16":

        matmul, short matmul             FLOPs per second
        convolution, huge convolution    FLOPs per second, with small and large, or huge channels
        attention                        FLOPs per second
        queries                          of attention, in elements per second
        reads                            of operands of products, in bytes per second
        results                          of products, in bytes per second
        weight, small ... huge copies    of convolutions, in bytes per second
        elementwise                      bytes read and written per second, possibly of an
                                         operator: "elementwise gelu bfloat16"
        dequantize                       bytes per second of weights as computed with, by precision:
                                         "dequantize nf4 bfloat16"
        small pages, huge pages          without dtype: bytes of new memory per second that the
                                         system supplies, in pages of 4 KiB and of 2 MiB

    ``read_cpu_seconds``: CPU seconds per byte read from a file. ``amx``: products in bfloat16 use
    Intel's matrix unit. ``huge_pages``: large tensors are in pages of 2 MiB. ``unfolds_bfloat16``:
    convolutions in bfloat16 are PyTorch's own, which unfold their input; oneDNN has none for AVX2.
    """

    threads: int
    rates: tuple[tuple[str, float], ...]
    read_cpu_seconds: float = 0.0
    amx: bool = False
    huge_pages: bool = False
    unfolds_bfloat16: bool = False

    def rate(self, kind: str, dtype: str) -> float:
        """Return the rate of ``kind`` in ``dtype``; of "new memory" in the pages of tensors.

        Operators without rates use the elementwise rates, and precisions without rates those of a
        copy. Dtypes without rates, such as integers, use the rates of fp32.
        """
        rates = dict(self.rates)
        if kind == "new memory":
            kind = NEW_PAGES[self.huge_pages]
        kinds = [kind]
        if kind.startswith("elementwise "):
            kinds.append("elementwise")
        elif kind.startswith("dequantize "):
            kinds += "elementwise _to_copy", "elementwise"
        names = [f"{name} {type_name}" for type_name in (dtype, "float32") for name in kinds]
        return next(rates[name] for name in (*names, kind) if name in rates)

    def is_slow(self, dtype: str) -> bool:
        """Return whether products or convolutions in ``dtype`` take longer than in fp32."""
        return any(
            self.rate(kind, dtype) < self.rate(kind, "float32")
            for kind in ("matmul", "convolution")
        )


@dataclass(frozen=True, slots=True)
class ReadRates:
    """Direct reads of files, in bytes per second: nothing else runs, or all cores compute.

    ``cpu_seconds``: of reading one byte. ``start_seconds``: of reading one page while all cores
    compute.
    """

    alone_rate: float
    computing_rate: float
    cpu_seconds: float
    start_seconds: float

    def mean(self, other: ReadRates) -> ReadRates:
        """Return the rates of half of all bytes at these and half at ``other`` rates."""
        return ReadRates(
            harmonic_mean((self.alone_rate, other.alone_rate)),
            harmonic_mean((self.computing_rate, other.computing_rate)),
            fmean((self.cpu_seconds, other.cpu_seconds)),
            fmean((self.start_seconds, other.start_seconds)),
        )


# on the host, through which files are read into unified memory that is not a CPU's
READ_BUFFERS, READ_BUFFER_BYTES = 2, 8 * MIB


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device and its links to host and disk, in bytes, bytes per second and FLOPs per second."""

    name: str
    device: str  # name of its kind (`graphrun.device_kinds`)
    capacity_bytes: int
    # of the driver context, before the first tensor (0 on sim); on a CPU, of Python and its
    # libraries
    context_bytes: int
    workspace_bytes: int  # of cuBLAS and cuBLASLt; 0 on sim
    h2d_bytes_per_second: float  # from page-locked memory
    pageable_bytes_per_second: float
    d2h_bytes_per_second: float
    bidirectional: float  # fraction of h2d bandwidth left while a d2h copy runs
    disk_bytes_per_second: float
    # of large matrix products in 16 bits, as achieved, not from the data sheet
    flops_per_second: float
    # convolutions use workspace that the dispatcher does not see, as cuDNN's do
    convolution_scratch: bool = True
    caching_allocator: bool = True  # reserves more than is allocated
    cpu_flops_per_second: float = 3e11  # of all host cores together, 16-bit
    memory_bytes_per_second: float = 1e12  # device memory, read or write
    # latency of one copy between host and device, whatever its size; on a CPU, of one read
    copy_start_seconds: float = 0.0
    launch_seconds: float = 0.0  # of the host, to launch a kernel or a copy
    page_lock_seconds: float = 0.0  # to page-lock one byte of host memory
    is_hopper: bool = False  # compute capability 9.0: other scratch (`MemoryEvent.hopper_bytes`)
    # of a caching allocator: page size relative to PyTorch's
    page_scale: float = 1.0
    # None: all FLOPs take the same time, and nothing else takes any (sim)
    kernels: KernelRates | ProcessorRates | None = None
    # to newly allocated pageable memory, as ``.to("cpu")`` does
    d2h_pageable_bytes_per_second: float = 1e9
    # seconds of a transformer block divided by seconds of its compiled code; 0: not measured
    compiled_gain: float = 0.0
    basis: Basis = "data sheet"
    # Device and host share one memory: files are read into it, nothing is copied to a second one.
    # Always on a CPU.
    unified: bool = False
    serial_copies: bool = False  # copies and compute take turns
    # To write one byte of memory that nothing used for seconds: a virtual machine may have to get
    # its pages back from its host. 0: not measured.
    first_touch_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.kind.is_host:
            object.__setattr__(self, "unified", True)

    @property
    def kind(self) -> DeviceKind:
        return kind_called(self.device)

    @property
    def budget_name(self) -> str:
        """Name of its memory on screens: ``VRAM``, or ``memory`` where the host shares it."""
        return "memory" if self.unified else "VRAM"

    @property
    def budget_option(self) -> str:
        return "--memory" if self.unified else "--vram"

    @property
    def label(self) -> str:
        """Device and name, as in the keys of cached outputs."""
        return f"{self.device} {self.name}"
