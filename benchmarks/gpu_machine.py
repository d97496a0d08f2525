"""Measure the card itself, each figure in a part: context and workspace bytes, copies, products,
attention, convolution."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu_lab import Log

from graphrun.units import MIB

BLOCK_BYTES = (142 * MIB, 340 * MIB, 1024 * MIB)  # a single and a double block of FLUX, and more
REPEATS = 5


def machine(log: Log) -> None:
    """Run every measurement. The first part makes the context, so use a fresh process."""
    with log.part("context") as record:
        _context(record)
    for name, measure in (
        ("copies", _copies),
        ("pageable copies", _pageable),
        ("both ways", _both_ways),
    ):
        with log.part(name) as record:
            measure(record)
    with log.part("products") as record:
        _products(record)
    with log.part("attention") as record:
        _attention(record)
    with log.part("convolution") as record:
        _convolution(record)
    with log.part("small kernels and marks") as record:
        _overheads(record)


def smi_used_bytes() -> int | None:
    """Return the used bytes of the first card by nvidia-smi; None without an answer."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    try:
        text = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=20
        ).stdout
        return int(text.split()[0]) * MIB
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return None


def _beside() -> int:
    """Return the used bytes on the card outside the allocator: contexts, libraries, other
    programs."""
    torch.cuda.synchronize()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return int(total_bytes - free_bytes - torch.cuda.memory_reserved())


def _context(record: dict[str, Any]) -> None:
    record["smi_used_before_bytes"] = smi_used_bytes()
    torch.cuda.init()
    record["after init, beside the allocator"] = _beside()
    x = torch.ones(1024, 1024, device="cuda")
    (x + 1).sum().item()
    record["after elementwise kernels"] = _beside()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        start_bytes = torch.cuda.memory_allocated()
        a = torch.ones(4096, 4096, device="cuda", dtype=dtype)
        held_bytes = torch.cuda.memory_allocated() - start_bytes
        b = a @ a
        torch.cuda.synchronize()
        growth_bytes = (
            torch.cuda.memory_allocated() - start_bytes - held_bytes - b.numel() * b.element_size()
        )
        record[f"workspace after the first {dtype} product (allocated)"] = growth_bytes
        del a, b
        record[f"beside the allocator after it, {dtype}"] = _beside()
    y = torch.ones(1, 64, 128, 128, device="cuda", dtype=torch.bfloat16)
    torch.nn.functional.conv2d(
        y, torch.ones(64, 64, 3, 3, device="cuda", dtype=torch.bfloat16), padding=1
    )
    record["after a convolution"] = _beside()
    q = torch.ones(1, 8, 512, 64, device="cuda", dtype=torch.bfloat16)
    torch.nn.functional.scaled_dot_product_attention(q, q, q)
    record["after attention"] = _beside()
    record["smi_used_bytes"] = smi_used_bytes()
    record["allocator_reserved_bytes"] = torch.cuda.memory_reserved()
    record["default_workspace_settings"] = (
        "CUBLAS_WORKSPACE_CONFIG unset: 8 MiB + 128 KiB, 32 MiB from compute capability 9.0"
    )


def _rate(copy: Callable[[], object], nbytes: int) -> float:
    """Return GB/s, the best of a few."""
    best = 0.0
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        copy()
        torch.cuda.synchronize()
        best = max(best, nbytes / (time.perf_counter() - start) / 1e9)
    return round(best, 2)


def _device() -> Any:
    from graphrun.runtime.devices.cuda import CudaDevice

    return CudaDevice()


def _copies(record: dict[str, Any]) -> None:
    device = _device()
    start = time.perf_counter()
    arena = device.arena(4096 * MIB)
    arena.fill_(1)
    filled = time.perf_counter()
    device.pin(arena)
    record["seconds to fill 4 GiB of new memory"] = round(filled - start, 3)
    record["seconds to register 4 GiB"] = round(time.perf_counter() - filled, 3)
    for nbytes in BLOCK_BYTES:
        target = device.allocate(nbytes)
        record[f"registered arena to device, {nbytes // MIB} MiB, GB/s"] = _rate(
            lambda t=target, n=nbytes: device.copy(t, arena[:n]), nbytes
        )
        record[f"device to registered arena, {nbytes // MIB} MiB, GB/s"] = _rate(
            lambda t=target, n=nbytes: arena[:n].copy_(t, non_blocking=True), nbytes
        )
        start = time.perf_counter()
        device.copy(target, arena[:nbytes])
        record[f"host seconds to queue {nbytes // MIB} MiB"] = round(time.perf_counter() - start, 6)
        torch.cuda.synchronize()
    pinned_tensor = torch.empty(BLOCK_BYTES[1], dtype=torch.uint8, pin_memory=True)
    target = device.allocate(BLOCK_BYTES[1])
    record["torch's pinned memory to device, 340 MiB, GB/s"] = _rate(
        lambda: target.copy_(pinned_tensor, non_blocking=True), BLOCK_BYTES[1]
    )


def _pageable(record: dict[str, Any]) -> None:
    for nbytes in BLOCK_BYTES:
        source = torch.ones(nbytes, dtype=torch.uint8)
        target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        record[f"pageable to device, {nbytes // MIB} MiB, GB/s"] = _rate(
            lambda t=target, s=source: t.copy_(s, non_blocking=True), nbytes
        )


def _both_ways(record: dict[str, Any]) -> None:
    device, nbytes, rounds = _device(), BLOCK_BYTES[2], 8
    upload_arena, download_arena = device.arena(nbytes), device.arena(nbytes)
    for arena in (upload_arena, download_arena):
        arena.fill_(1)
        device.pin(arena)
    target, source = device.allocate(nbytes), device.allocate(nbytes)
    upload_stream, download_stream = torch.cuda.Stream(), torch.cuda.Stream()

    def copy(is_duplex: bool) -> float:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda.synchronize()
        with torch.cuda.stream(download_stream):
            for _ in range(3 * rounds if is_duplex else 0):
                download_arena.copy_(source, non_blocking=True)
        with torch.cuda.stream(upload_stream):
            events[0].record()
            for _ in range(rounds):
                target.copy_(upload_arena, non_blocking=True)
            events[1].record()
        torch.cuda.synchronize()
        return round(rounds * nbytes / (events[0].elapsed_time(events[1]) / 1e3) / 1e9, 2)

    record["to device alone, GB/s"] = copy(False)
    record["to device beside copies out, GB/s"] = copy(True)
    a = torch.ones(8192, 8192, device="cuda", dtype=torch.bfloat16)
    stop = threading.Event()

    def multiply() -> None:
        while not stop.is_set():
            for _ in range(4):
                a @ a
            torch.cuda.current_stream().synchronize()

    worker = threading.Thread(target=multiply)
    worker.start()
    try:
        time.sleep(0.2)
        record["to device beside products, GB/s"] = _stream_rate(
            upload_stream, target, upload_arena, nbytes, rounds
        )
    finally:
        stop.set()
        worker.join()


def _stream_rate(
    stream: Any, target: torch.Tensor, source: torch.Tensor, nbytes: int, rounds: int
) -> float:
    with torch.cuda.stream(stream):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(rounds):
            target.copy_(source, non_blocking=True)
        end.record()
    stream.synchronize()
    return round(rounds * nbytes / (start.elapsed_time(end) / 1e3) / 1e9, 2)


def _teraflops(run: Callable[[], object], flops: float, repeats: int = 20) -> float:
    for _ in range(3):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return round(repeats * flops / (start.elapsed_time(end) / 1e3) / 1e12, 1)


def _products(record: dict[str, Any]) -> None:
    shapes = {
        "8192 cubed": (8192, 8192, 8192),
        "FLUX 4608x3072 by 3072x12288": (4608, 3072, 12288),
        "4608x15360 by 15360x3072": (4608, 15360, 3072),
    }
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for name, (m, k, n) in shapes.items():
            a = torch.randn(m, k, device="cuda").to(dtype)
            b = torch.randn(k, n, device="cuda").to(dtype)
            record[f"{dtype} {name}, TFLOP/s"] = _teraflops(
                lambda a=a, b=b: a @ b, 2.0 * m * k * n, 5 if dtype == torch.float32 else 20
            )


def _attention(record: dict[str, Any]) -> None:
    for name, (heads, tokens, width) in {
        "FLUX 24x4608x128": (24, 4608, 128),
        "SDXL 20x4096x64": (20, 4096, 64),
    }.items():
        q = torch.randn(1, heads, tokens, width, device="cuda", dtype=torch.bfloat16)
        run = torch.nn.functional.scaled_dot_product_attention
        record[f"{name}, TFLOP/s"] = _teraflops(
            lambda q=q, run=run: run(q, q, q), 4.0 * heads * tokens * tokens * width
        )
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        start_bytes = torch.cuda.memory_allocated()
        result = run(q, q, q)
        torch.cuda.synchronize()
        record[f"{name}, allocated beyond its output, bytes"] = (
            torch.cuda.max_memory_allocated() - start_bytes - result.numel() * result.element_size()
        )


def _convolution(record: dict[str, Any]) -> None:
    cases = {
        "VAE 512x256x256 bf16": (512, 256, torch.bfloat16),
        "VAE 128x1024x1024 bf16": (128, 1024, torch.bfloat16),
        "VAE 128x1024x1024 fp32": (128, 1024, torch.float32),
    }
    for name, (channels, side, dtype) in cases.items():
        x = torch.randn(1, channels, side, side, device="cuda").to(dtype)
        w = torch.randn(channels, channels, 3, 3, device="cuda").to(dtype)
        run = torch.nn.functional.conv2d
        record[f"{name}, TFLOP/s"] = _teraflops(
            lambda x=x, w=w, run=run: run(x, w, padding=1), 2.0 * channels**2 * 9 * side**2, 5
        )
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        start_bytes = torch.cuda.memory_allocated()
        result = run(x, w, padding=1)
        torch.cuda.synchronize()
        sizes = [t.numel() * t.element_size() for t in (x, result, w)]
        record[f"{name}, scratch bytes"] = (
            torch.cuda.max_memory_allocated() - start_bytes - sizes[1]
        )
        record[f"{name}, scratch by the rule in + out + weight"] = sum(sizes)


def _overheads(record: dict[str, Any]) -> None:
    device, x = _device(), torch.ones(16, device="cuda")
    for name, run in {
        "a small kernel": lambda: x.add_(1),
        "a mark": lambda: device.mark("compute"),
    }.items():
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(2000):
            run()
        record[f"host seconds of {name}"] = (time.perf_counter() - start) / 2000
        torch.cuda.synchronize()
