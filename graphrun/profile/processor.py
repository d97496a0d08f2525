"""This machine's CPU, and the data-sheet estimate of it: from its cores and instructions."""

from __future__ import annotations

import functools
import os
import platform
import re
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from graphrun.device_kinds import DeviceKind
from graphrun.graph.precisions import GGUF_BLOCKS
from graphrun.host_ram import total_ram_bytes
from graphrun.model.hardware import Hardware, ProcessorRates
from graphrun.profile.precision import ELEMENT_BYTES
from graphrun.systems import tensors_get_huge_pages
from graphrun.units import MIB

# FLOPs per core and clock of products: (features of the CPU, in bfloat16, in fp32). Two vector
# units multiply and add 16 numbers of fp32 (AVX2: 8) each; avx512_bf16 doubles that on AMD and
# halves it on Intel (0.17 and 0.30 TFLOP/s were measured on two cores of a Xeon that its hypervisor
# gives no AMX), and amx_bf16 multiplies 16 x 16 x 32 in 16 clocks. Without instructions for
# bfloat16 PyTorch converts, which takes longer than fp32. `CPU_SHARE`: share that kernels reach,
# measured on an EPYC with two cores.
INTEL = "GenuineIntel"
INSTRUCTION_SETS = (
    ("amx_bf16", 1024, 64),
    (f"avx512_bf16 {INTEL}", 32, 64),
    ("avx512_bf16", 128, 64),
    ("bf16", 64, 16),
    ("avx512f", 16, 64),
    ("avx2", 8, 32),
    ("", 4, 8),
)
CPU_SHARE = 0.65
# FLOPs per second of convolutions in 16 bits without AVX-512, by oneDNN's reference kernel on one
# thread: 0.3e9 to 1.7e9 were measured on an EPYC with AVX2, falling with the number of pixels.
REFERENCE_CONVOLUTION = 0.5e9
# x86 and ARM instructions for products in bfloat16
BFLOAT16_INSTRUCTIONS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
CLOCK = 2.6e9
# bytes per second that one core reads or writes, and up to how many cores add to it
CORE_BYTES_PER_SECOND, MEMORY_CORES = 5e9, 8
# bytes of new memory per second and core, in pages of 4 KiB and of 2 MiB, which the kernel clears
# at their first use: 1.6e9 and 10e9 measured on an EPYC with two cores
SMALL_PAGES_RATE, HUGE_PAGES_RATE = 1.2e9, 7e9
# bytes per second of direct reads of an NVMe disk: 1.6e9 to 1.9e9 measured with two threads
DIRECT_READ_RATE = 1.6e9
# seconds of a direct read of one page while all cores compute: 1.4e-3 measured with two cores
READ_START_SECONDS = 1.4e-3
# CPU seconds of a direct read of one byte into huge pages
READ_CPU_SECONDS = 0.02e-9
# elements of attention's queries that one core packs and scales per second, beside the products:
# 0.26e9 to 0.48e9 measured on an EPYC with two cores, in bfloat16
CORE_QUERIES_PER_SECOND = 0.3e9
# Weights that one core dequantizes per second: with bitsandbytes, by a cast, and with diffusers'
# operators for GGUF, measured on a Xeon with two cores as shares of the speed of a copy.
CORE_DEQUANTIZED = {"nf4": 125e6, "int8": 125e6, "fp8": 60e6, "Q8_0": 60e6}
CORE_DEQUANTIZED_GGUF = 20e6
# seconds of PyTorch's and diffusers' code around an operator on a CPU: 9.5e-6 to 16e-6 measured in
# small blocks of FLUX and SDXL on an EPYC
CPU_LAUNCH_SECONDS = 12e-6
# Anonymous and kernel memory of a process that imported torch, diffusers and transformers; code
# that oneDNN generates for kernels, and heaps of threads. With AMX it generates more: 30 MiB were
# measured for FLUX.1-schnell, 45 MiB for SDXL.
PROCESS_BYTES, GENERATED_BYTES, AMX_GENERATED_BYTES = 432 * MIB, 10 * MIB, 40 * MIB
# what the libraries of PyTorch built for CUDA add (2.14.1+cu130)
CUDA_LIBRARIES_BYTES = 98 * MIB
# Buffers that MKL keeps for products of matrices in fp32, after some of 2,048 rows and more: 15 to
# 25 MiB, measured with two threads. Products in bfloat16 keep none.
PRODUCT_BUFFER_BYTES = 24 * MIB


@functools.cache
def _cpu_facts() -> tuple[str, int, frozenset[str]]:
    """Return the CPU's name, its cores that this process may use, and its features and vendor.

    Hardware threads of one core count once: PyTorch computes with a thread per core. A name that a
    hypervisor gives to processors of several generations has their family and model number.
    """
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    processors = [
        {key.strip(): value.strip() for key, _, value in map(_parted, section.splitlines())}
        for section in text.split("\n\n")
    ]
    facts = processors[0]
    name = facts.get("model name") or facts.get("CPU part") or platform.processor()
    if "cpu family" in facts and not re.search(r"\d", name.partition("@")[0]):
        name += f", family {facts['cpu family']}, model {facts['model']}"
    names = f"{facts.get('flags') or facts.get('Features') or ''} {facts.get('vendor_id', '')}"
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    cores = {
        (facts.get("physical id"), facts.get("core id", facts["processor"]))
        for facts in processors
        if "processor" in facts and (usable is None or int(facts["processor"]) in usable)
    }
    return name, len(cores) or os.cpu_count() or 1, frozenset(names.split())


def _parted(line: str) -> tuple[str, str, str]:
    return line.partition(":")


def cpu_threads() -> int:
    """Return the number of threads that compute: PyTorch's if it is loaded, else one per core."""
    torch = sys.modules.get("torch")
    return torch.get_num_threads() if torch is not None else _cpu_facts()[1]


def cpu_key() -> str:
    """Return what a profile of this machine's CPU is for: its `cpu_name`, threads, PyTorch."""
    from importlib.metadata import version

    return f"{cpu_name()}, {cpu_threads()} threads, torch {version('torch')}"


def cpu_name() -> str:
    """Return the CPU's model and its instructions for bfloat16: a hypervisor may hide some of them
    and leave the model's name."""
    instructions = bfloat16_instructions()
    return _cpu_facts()[0] + (f" ({', '.join(instructions)})" if instructions else "")


def bfloat16_instructions() -> tuple[str, ...]:
    """Return the CPU's instructions that multiply bfloat16; empty without any."""
    return tuple(sorted(_cpu_facts()[2] & BFLOAT16_INSTRUCTIONS))


def in_this_process(hardware: Hardware) -> Hardware:
    """Return a CPU with the pages that tensors of this process get."""
    assert isinstance(hardware.kernels, ProcessorRates)
    kernels = replace(hardware.kernels, huge_pages=tensors_get_huge_pages())
    return replace(hardware, kernels=kernels)


@functools.cache
def process_bytes() -> int:
    """Return the bytes that a process takes once it has imported PyTorch and the model libraries.

    PyTorch need not be imported for this.
    """
    torch = find_spec("torch")
    folder = Path(torch.origin).parent / "lib" if torch is not None and torch.origin else Path()
    libraries = [folder / name for name in ("libtorch_cuda.so", "torch_cuda.dll")]
    is_for_cuda = any(library.is_file() for library in libraries)
    return PROCESS_BYTES + (CUDA_LIBRARIES_BYTES if is_for_cuda else 0)


def core_count() -> int:
    """Return the number of cores that this process may use."""
    return _cpu_facts()[1]


def cpu_estimate() -> Hardware:
    """Return the data-sheet estimate of this machine's CPU, from its cores and instructions."""
    cores, features = cpu_threads(), _cpu_facts()[2]
    name, half, single = next(row for row in INSTRUCTION_SETS if {*row[0].split()} <= features)
    has_half_convolutions = name not in ("avx2", "")
    peak = CPU_SHARE * cores * CLOCK
    moving = CORE_BYTES_PER_SECOND * min(cores, MEMORY_CORES)
    rates = {
        "small pages": SMALL_PAGES_RATE * min(cores, MEMORY_CORES),
        "huge pages": HUGE_PAGES_RATE * min(cores, MEMORY_CORES),
    }
    for dtype, flops in (
        ("bfloat16", peak * half),
        ("float32", peak * single),
        ("float16", peak * 8),  # PyTorch converts one number at a time
    ):
        is_direct = dtype == "float32" or has_half_convolutions
        convolution = flops if is_direct else REFERENCE_CONVOLUTION
        rates |= {
            f"matmul {dtype}": flops,
            f"short matmul {dtype}": flops,
            f"convolution {dtype}": convolution,
            f"huge convolution {dtype}": convolution,
            f"attention {dtype}": 0.5 * flops,
            f"queries {dtype}": CORE_QUERIES_PER_SECOND * cores,
            f"reads {dtype}": 2 * moving,
            f"results {dtype}": 0.6 * moving,
            f"weight copies {dtype}": 0.5 * moving,
            f"small copies {dtype}": 0.5 * moving,
            f"large copies {dtype}": 0.3 * moving,
            f"huge copies {dtype}": 0.15 * moving,
            f"elementwise {dtype}": 0.7 * moving,
            f"elementwise transpose {dtype}": 0.2 * moving,
        }
        rates |= {
            f"dequantize {precision} {dtype}": ELEMENT_BYTES[dtype]
            * CORE_DEQUANTIZED.get(precision, CORE_DEQUANTIZED_GGUF)
            * cores
            for precision in ("nf4", "int8", "fp8", "gguf", *GGUF_BLOCKS)
        }
    estimate = Hardware(
        name="cpu",
        device="cpu",
        capacity_bytes=total_ram_bytes(),
        context_bytes=process_bytes(),
        workspace_bytes=(AMX_GENERATED_BYTES if "amx_bf16" in features else GENERATED_BYTES)
        + (PRODUCT_BUFFER_BYTES if half < single else 0),
        h2d_bytes_per_second=5e9,
        pageable_bytes_per_second=5e9,
        d2h_bytes_per_second=5e9,
        bidirectional=1.0,
        copy_start_seconds=READ_START_SECONDS,
        disk_bytes_per_second=DIRECT_READ_RATE,
        flops_per_second=rates["matmul bfloat16"],
        convolution_scratch=False,
        caching_allocator=False,
        memory_bytes_per_second=moving,
        launch_seconds=CPU_LAUNCH_SECONDS,
        kernels=ProcessorRates(
            cores,
            tuple(rates.items()),
            READ_CPU_SECONDS,
            amx="amx_bf16" in features,
            unfolds_bfloat16=not has_half_convolutions,
        ),
        basis="data sheet",
    )
    return in_this_process(estimate)


def detect_processor(kind: DeviceKind) -> Hardware:
    """Return this machine's CPU."""
    return cpu_estimate()
