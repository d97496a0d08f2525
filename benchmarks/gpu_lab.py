"""Tools of the GPU benchmark: results that survive failures, memory counters, and weights made at
memory speed."""

from __future__ import annotations

import functools
import hashlib
import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphrun.graph.graph import Graph
from graphrun.graph.parts import Component

TILE = 2**22


class Log:
    """Results by section and part, written after every part. A failed part records its error
    text."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results: dict[str, Any] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[dict[str, Any]]:
        """Provide the dictionary of part ``name``, to be filled."""
        record: dict[str, Any] = self.results.setdefault(name, {})
        start = time.perf_counter()
        try:
            yield record
        except Exception as error:  # noqa: BLE001 - one failure must not lose the rest
            record["failed"] = f"{type(error).__name__}: {error}"[:2000]
            record["failed_at"] = traceback.format_exc().strip().splitlines()[-8:]
            print(f"  {name} FAILED: {record['failed'][:300]}", flush=True)
        record["took_seconds"] = round(time.perf_counter() - start, 3)
        self.save()
        print(f"  {name}: {record['took_seconds']} s", flush=True)

    def save(self) -> None:
        self.path.write_text(json.dumps(self.results, indent=1) + "\n")


class Lab:
    """The device under test: CUDA, or the simulated accelerator in a rehearsal. ``made``: the
    executor's devices for it."""

    def __init__(self, rehearse: bool) -> None:
        self.rehearse = rehearse
        self.slots: list[dict[str, int]] = []

    @functools.cached_property
    def hardware(self) -> Any:
        """Return the hardware for `graphrun.estimate`: the card as calibrated, if it was."""
        from graphrun.cli.common import cache_folder
        from graphrun.devices import hardware_for

        return "sim" if self.rehearse else hardware_for(None, cache=cache_folder(is_off=False))

    def open(self, problem: Any) -> Any:
        """Return the executor's device for ``problem``; memory counters per slot go to
        ``slots``."""
        from graphrun.runtime.devices.open import open_device

        device = open_device(problem)
        lab = self

        class Watched(type(device)):  # type: ignore[misc]
            @property
            def peak_bytes(self) -> int:
                peak_bytes = super().peak_bytes
                lab.slots.append({"peak_bytes": int(peak_bytes), **lab.books(self)})
                return int(peak_bytes)

        device.__class__ = Watched
        return device

    def books(self, device: Any) -> dict[str, int]:
        """Return the bytes now, and the peak since it was reset; ``used`` is nvidia-smi's value for
        the whole card."""
        if self.rehearse:
            return {
                "allocated_bytes": device.allocated_bytes,
                "peak_allocated_bytes": device.machine.peak_bytes,
            }
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        return {
            "allocated_bytes": torch.cuda.memory_allocated(),
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.memory_reserved(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
            "used_bytes": total_bytes - free_bytes,
        }

    def lower_cap(self, device: Any) -> None:
        """Let the device refuse all further memory, as if another program took it."""
        if self.rehearse:
            device.machine.capacity_bytes = 1
        else:
            torch.cuda.set_per_process_memory_fraction(1e-6)

    def lift_cap(self, device: Any) -> None:
        """Undo `lower_cap`. On a card the end of the session did that."""
        if self.rehearse:
            device.machine.capacity_bytes = None

    def settle(self, device: Any) -> None:
        """Drain streams, drop caches and reset peaks before the next measurement."""
        device.barrier()
        if not self.rehearse:
            torch.cuda.empty_cache()
        device.reset_peak()


def woven(component: Component, graph: Graph) -> nn.Module:
    """Return ``component`` on the CPU with random weights by `weave`."""
    from graphrun.modules.build import draft

    module, _ = draft(component, graph, component.dtype)
    weave(module, f"{component.seed}/{component.name}")
    return module


def weave(module: nn.Module, seed: str) -> None:
    """Fill ``module`` with random weights of any size in almost no time and memory.

    Every matrix is a set of windows into one random tile (row i starts i steps into it), scaled as
    `graphrun.modules.sources` does. Rows differ, and a copy of it is a plain tensor of the real
    size. Use `graphrun.modules.build.build` for independent weights.
    """
    from graphrun.modules.sources import standard_deviation

    tile = torch.randn(
        TILE,
        generator=torch.Generator().manual_seed(
            int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7])
        ),
    )
    parameters: dict[int, nn.Parameter] = {}
    number = 0
    for child in module.modules():
        for key, parameter in child._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in parameters:
                number += 1
                values = _windows(child, key, parameter, tile, number * 7919, standard_deviation)
                parameters[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
            child._parameters[key] = parameters[id(parameter)]


def _windows(
    owner: nn.Module,
    key: str,
    template: torch.Tensor,
    tile: torch.Tensor,
    start: int,
    scale: Callable[..., float],
) -> Any:
    if template.dim() <= 1:
        if "Norm" in type(owner).__name__:
            return torch.full(template.shape, 0.0 if key == "bias" else 1.0, dtype=template.dtype)
        return (
            (tile[: template.numel()] * scale(owner, key, template))
            .to(template.dtype)
            .reshape(template.shape)
            .clone()
        )
    rows, columns = template.shape[0], template.numel() // template.shape[0]
    if rows + columns > TILE // 2:
        values = tile.repeat(template.numel() // TILE + 1)[: template.numel()]
        scaled_values = values * scale(owner, key, template)
        return scaled_values.to(template.dtype).reshape(template.shape)
    step = max(1, min(17, (TILE // 2 - columns) // rows))
    need = (rows - 1) * step + columns
    start %= TILE - need
    values = (tile[start : start + need] * scale(owner, key, template)).to(template.dtype)
    inner = torch.empty(template.shape[1:], device="meta").stride()
    return values.as_strided(template.shape, (step, *inner))


@contextmanager
def placed(modules: Mapping[str, nn.Module], place: torch.device) -> Iterator[None]:
    """Replace all parameters and buffers of ``modules`` by copies on ``place`` meanwhile."""
    originals: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    copies: dict[int, torch.Tensor] = {}
    try:
        for module in modules.values():
            for child in module.modules():
                for entries in (child._parameters, child._buffers):
                    for key, tensor in entries.items():
                        if tensor is None or tensor.is_meta:
                            continue
                        if id(tensor) not in copies:
                            copy = torch.empty(
                                tensor.shape, dtype=tensor.dtype, device=place
                            ).copy_(tensor.detach())
                            new_tensor = (
                                nn.Parameter(copy, tensor.requires_grad)
                                if isinstance(tensor, nn.Parameter)
                                else copy
                            )
                            copies[id(tensor)] = new_tensor
                        originals.append((entries, key, tensor))
                        entries[key] = copies[id(tensor)]
        yield
    finally:
        for entries, key, tensor in originals:
            entries[key] = tensor


def fingerprint(value: Any) -> Any:
    """Return a digest of every tensor or picture, with figures that show it is no noise."""
    import numpy as np

    if isinstance(value, Mapping):
        return {name: fingerprint(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [fingerprint(item) for item in value]
    if isinstance(value, torch.Tensor):
        host = value.detach().to("cpu").contiguous()
        numbers = host.float()
        raw = host.view(-1).view(torch.uint8).numpy().tobytes()
        std = float(numbers.std()) if numbers.numel() > 1 else 0.0
        return {
            "sha256": _digest(raw),
            "std": std,
            "finite": bool(numbers.isfinite().all()),
            "shape": list(host.shape),
        }
    if hasattr(value, "size") and hasattr(value, "mode"):
        array = np.asarray(value)
        return {
            "sha256": _digest(array.tobytes()),
            "std": float(array.std()),
            "shape": list(array.shape),
        }
    return repr(value)


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:16]
