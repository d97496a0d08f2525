"""Convolutions, attentions and group norms of dry runs on the card, one by one: scratch and
seconds.

python benchmarks/card_kernels.py KERNELS OUT [--limit SECONDS]

KERNELS: a list that `card_pack.py` wrote; each entry has the graph, the operator, its operands and
how often it is called.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

REPEATS, LONG_SECONDS = 3, 0.2


def operand(dtype: str, shape: list[int], stride: list[int], device: str) -> torch.Tensor:
    """A random tensor with these strides."""
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    kind = getattr(torch, dtype)
    if kind is torch.bool:
        base = torch.rand(extent, device=device) < 0.9
    else:
        base = torch.empty(extent, dtype=kind, device=device).normal_()
    return base.as_strided(shape, stride)


def call_of(entry: list[Any], device: str) -> Callable[[], torch.Tensor]:
    """The call that ``entry`` describes, with operands on ``device``."""
    functional = torch.nn.functional
    if entry[1] == "conv":
        dtype, shape, strides, weight_shape, result_shape, step = entry[2:8]
        source = operand(dtype, shape, strides, device)
        weight = torch.empty(weight_shape, dtype=source.dtype, device=device).normal_()
        padding = [
            ((result - 1) * s + taps - size + 1) // 2
            for size, taps, result, s in zip(
                shape[2:], weight_shape[2:], result_shape[2:], step, strict=True
            )
        ]
        groups = shape[1] // weight_shape[1]
        names = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
        convolve: Any = names[len(step)]
        return lambda: convolve(source, weight, None, step, padding, 1, groups)
    if entry[1] == "attention":
        query, key, value = (operand(*entry[i], device) for i in (2, 3, 4))
        mask = None if entry[5] is None else operand(*entry[5], device)
        return lambda: functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=entry[6], enable_gqa=entry[7]
        )
    source, groups = operand(*entry[2:5], device), entry[5]
    return lambda: functional.group_norm(source, groups)


def measure(entry: list[Any], device: str) -> dict[str, Any]:
    """Scratch in bytes, seconds of each call, and strides of the result."""
    call = call_of(entry, device)
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before_bytes = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    kept_bytes = torch.cuda.memory_allocated() - before_bytes
    scratch = torch.cuda.max_memory_allocated() - before_bytes - kept_bytes
    facts: dict[str, Any] = {
        "scratch_bytes": scratch,
        "kept_bytes": kept_bytes,
        "result_bytes": result.nbytes,
        "strides": list(result.stride()),
    }
    del result
    seconds: list[float] = []
    while len(seconds) < REPEATS and sum(seconds) < LONG_SECONDS:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1000)
    return facts | {"seconds": seconds}


def main() -> None:
    """Measures every kernel for which there is time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernels", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--limit", type=float, default=100)
    arguments = parser.parse_args()
    entries = json.loads(arguments.kernels.read_text())
    start = time.perf_counter()
    results: list[dict[str, Any]] = []
    known: dict[str, dict[str, Any]] = {}
    with torch.no_grad():
        for entry in entries:
            key = json.dumps(entry[1:-1])
            if key not in known:
                if time.perf_counter() - start > arguments.limit:
                    continue
                try:
                    known[key] = measure(entry, "cuda")
                except Exception as error:  # noqa: BLE001 - one failure must not lose the rest
                    known[key] = {"failed": f"{type(error).__name__}: {error}"[:300]}
                torch.cuda.empty_cache()
            results.append({"kernel": entry, **known[key]})
    arguments.out.write_text("[\n" + ",\n".join(map(json.dumps, results)) + "\n]\n")
    print(f"{len(results)} of {len(entries)} kernels in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
