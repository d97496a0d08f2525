"""Measure scratch and seconds of single convolutions, attentions and group norms on the card.

    python benchmarks/card_kernels.py list KERNELS       here: kernels of the dry runs of `GRAPHS`
    python benchmarks/card_kernels.py run KERNELS OUT    there: 883 kernels in half a minute

An entry of KERNELS has the graph, the operator, its operands (dtype, shape, strides) and how often
it is called. OUT is compressed JSON.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

GRAPHS = (
    "sdxl",
    "sd35-large",
    "hunyuan-video15",
    "wan-14b",
    "kandinsky5",
    "ltx",
    "qwen-image",
    "sana",
    "flux-dev",
    "cogvideox-5b",
    "hidream",
    "cogview4",
    "stable-cascade",
    "ltx2",
)
PROMPT = "a lighthouse at dusk, oil on canvas"
REPEATS, LONG_SECONDS = 3, 0.2


def listed(path: Path) -> None:
    """Write the kernels of dry runs of `GRAPHS` to ``path``."""
    import graphrun
    from graphrun.profile import dry_run, fused_kernels, recorder

    calls: Counter[tuple[Any, ...]] = Counter()
    graph_name = ""
    functional = torch.nn.functional
    record_convolution = recorder.convolution_of
    record_function = fused_kernels.FusedKernels.__torch_function__

    def operand_of(tensor: torch.Tensor) -> tuple[Any, ...]:
        return str(tensor.dtype)[6:], tuple(tensor.shape), tuple(tensor.stride())

    def convolution_of(args: Any, result: torch.Tensor) -> Any:
        if not args[6]:  # not transposed
            shapes = tuple(args[1].shape), tuple(result.shape), tuple(args[3])
            calls[graph_name, "conv", *operand_of(args[0]), *shapes] += 1
        return record_convolution(args, result)

    def torch_function(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            operands = *args, *(options[key] for key in ("query", "key", "value")[len(args) :])
            mask = args[3] if len(args) > 3 else options.get("attn_mask")
            flags = bool(options.get("is_causal")), bool(options.get("enable_gqa"))
            tensors = map(operand_of, operands[:3])
            mask_operand = None if mask is None else operand_of(mask)
            calls[graph_name, "attention", *tensors, mask_operand, *flags] += 1
        if func is functional.group_norm:
            calls[graph_name, "group_norm", *operand_of(args[0]), args[1]] += 1
        return record_function(mode, func, types, args, options)

    recorder.convolution_of = convolution_of
    fused_kernels.FusedKernels.__torch_function__ = torch_function  # type: ignore[method-assign]
    for graph_name in GRAPHS:
        graph = graphrun.load(f"{Path(__file__).parent.parent}/graphs/{graph_name}.yaml")
        graph = graph.without_sources()
        dry_run.probe(graph, graph.resolve({"prompt": PROMPT, "steps": 2, "seed": 3}))
    path.write_text(json.dumps([[*call, count] for call, count in calls.items()]))


def operand(dtype: str, shape: list[int], stride: list[int], device: str) -> torch.Tensor:
    """Return a random tensor with these strides."""
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    kind = getattr(torch, dtype)
    if kind is torch.bool:
        base = torch.rand(extent, device=device) < 0.9
    else:
        base = torch.empty(extent, dtype=kind, device=device).normal_()
    return base.as_strided(shape, stride)


def call_of(entry: list[Any], device: str) -> Callable[[], torch.Tensor]:
    """Return the call that ``entry`` describes, with operands on ``device``."""
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
    """Return scratch in bytes, seconds of each call, and strides of the result."""
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


def run(entries: list[Any]) -> list[dict[str, Any]]:
    """Return ``entries`` with measurements; equal calls of several graphs are measured once."""
    results: list[dict[str, Any]] = []
    measurements: dict[str, dict[str, Any]] = {}
    with torch.no_grad():
        for entry in entries:
            key = json.dumps(entry[1:-1])
            if key not in measurements:
                try:
                    measurements[key] = measure(entry, "cuda")
                except Exception as error:  # noqa: BLE001 - one failure must not lose the rest
                    measurements[key] = {"failed": f"{type(error).__name__}: {error}"[:300]}
                torch.cuda.empty_cache()
            results.append({"kernel": entry, **measurements[key]})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=("list", "run"))
    parser.add_argument("kernels", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    arguments = parser.parse_args()
    if arguments.step == "list":
        return listed(arguments.kernels)
    entries = json.loads(arguments.kernels.read_text())
    with gzip.open(arguments.out, "wt") as file:
        json.dump(run(entries), file)
    print(f"{len(entries)} kernels")


if __name__ == "__main__":
    main()
