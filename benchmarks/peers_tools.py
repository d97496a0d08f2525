"""Tools that run a pipeline on a card too small for it, each applied as its users do.

A tool gets a pipeline whose weights are in host memory, a device, and the known facts of the cell.
A figure that must be tuned comes from the reference run (the bytes of activations); users would
have to find it by trial. No tool may quantize.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

UNLIMITED = 1 << 50


class Unavailable(Exception):
    """A tool cannot run in this cell; the message says why."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The facts that a tool may use: the device, its cap, the allowed RAM, and the activation bytes
    of the reference run."""

    device: torch.device
    cap_bytes: int | None
    ram_bytes: int | None
    activation_bytes: int

    @property
    def cap(self) -> int:
        """The cap, or a number larger than any memory."""
        return UNLIMITED if self.cap_bytes is None else self.cap_bytes


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool. ``put`` prepares a pipeline. ``packages``: whose versions are recorded.

    ``adapts``: devices on which it behaves differently under another cap. ``for_ram``: it saves
    RAM, and is run if RAM is tight.
    """

    name: str
    packages: tuple[str, ...]
    put: Callable[[Any, Cell], None]
    adapts: tuple[str, ...] = ()
    for_ram: bool = False

    def versions(self) -> dict[str, str]:
        """Return the versions of its packages. Raises Unavailable if one is not installed."""
        try:
            return {name: version(name) for name in self.packages}
        except PackageNotFoundError as error:
            raise Unavailable(
                f"{error.name} is not installed here: pip install {error.name}"
            ) from None


def modules_of(pipeline: Any) -> dict[str, nn.Module]:
    """Return the pipeline's components with weights."""
    return {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}


def denoiser_of(pipeline: Any) -> tuple[str, nn.Module] | None:
    """Return its transformer or UNet."""
    return next(
        (
            (name, module)
            for name, module in modules_of(pipeline).items()
            if name in ("transformer", "unet")
        ),
        None,
    )


def _resident(pipeline: Any, cell: Cell) -> None:
    pipeline.to(cell.device)


def _model_offload(pipeline: Any, cell: Cell) -> None:
    pipeline.enable_model_cpu_offload(device=cell.device)


def _sequential_offload(pipeline: Any, cell: Cell) -> None:
    pipeline.enable_sequential_cpu_offload(device=cell.device)


def _group_offload(
    level: str, *, stream: bool = False, disk: bool = False
) -> Callable[[Any, Cell], None]:
    def put(pipeline: Any, cell: Cell) -> None:
        folder = Path(tempfile.mkdtemp(prefix="peers-groups-")) if disk else None
        for name, module in modules_of(
            pipeline
        ).items():  # one call each, so that no two components share a folder's file names
            from diffusers.hooks import apply_group_offloading

            disk_options: dict[str, Any] = (
                {"offload_to_disk_path": str(folder / name)} if folder else {}
            )
            options = {
                "onload_device": cell.device,
                "offload_type": level,
                "use_stream": stream,
                **disk_options,
            }
            if level == "block_level":
                options["num_blocks_per_group"] = 1
            child: Any = module
            if hasattr(module, "enable_group_offload"):
                child.enable_group_offload(**options)
            else:
                apply_group_offloading(module, **options)

    return put


def _auto_offload(pipeline: Any, cell: Cell) -> None:
    from diffusers import ComponentsManager

    manager = ComponentsManager()
    for name, module in modules_of(pipeline).items():
        manager.add(name, module)
    margin: Any = (
        cell.activation_bytes
        if cell.device.type == "sim"
        else f"{cell.activation_bytes / 1e9:.3f}GB"
    )
    manager.enable_auto_cpu_offload(cell.device, memory_reserve_margin=margin)
    pipeline.peers_manager = manager


def _dispatch(*, disk: bool = False) -> Callable[[Any, Cell], None]:
    """Use one map per component, each within the rest of the cap without activations."""

    def put(pipeline: Any, cell: Cell) -> None:
        from accelerate import cpu_offload, dispatch_model, infer_auto_device_map

        device_bytes, host = (
            cell.cap - cell.activation_bytes,
            UNLIMITED if cell.ram_bytes is None or not disk else cell.ram_bytes,
        )
        folder = tempfile.mkdtemp(prefix="peers-dispatch-") if disk else None
        for name, module in modules_of(pipeline).items():
            whole = list(getattr(module, "_no_split_modules", None) or [])
            memory: dict[Any, int] = {0: max(0, device_bytes), "cpu": max(0, host)}
            places = infer_auto_device_map(module, max_memory=memory, no_split_module_classes=whole)
            sizes = {path: _bytes_under(module, path) for path in places}
            device_bytes -= sum(sizes[path] for path, place in places.items() if place == 0)
            host -= sum(sizes[path] for path, place in places.items() if place == "cpu")
            offload_folder = f"{folder}/{name}" if folder else None
            if set(places.values()) == {
                "cpu"
            }:  # a map of {"": "cpu"} fails in dispatch_model; this is the same
                cpu_offload(module, cell.device, offload_buffers=True)
            else:
                # without them a video VAE's cache is copied, and its output wrong
                keys = getattr(module, "_skip_keys", None)
                dispatch_model(
                    module,
                    places,
                    main_device=cell.device,
                    offload_dir=offload_folder,
                    skip_keys=keys,
                    force_hooks=True,
                )

    return put


def _bytes_under(module: nn.Module, path: str) -> int:
    part: Any = functools.reduce(getattr, (key for key in path.split(".") if key), module)
    tensors: list[torch.Tensor] = (
        [part] if isinstance(part, torch.Tensor) else [*part.parameters(), *part.buffers()]
    )
    return sum(t.nbytes for t in {id(t): t for t in tensors}.values())


def _managed(strategy: str) -> Callable[[Any, Cell], None]:
    """Use diffusers-mm. ``block_pin`` gets the number of blocks that fit, since its assumption for
    activations is for large cards."""

    def put(pipeline: Any, cell: Cell) -> None:
        from diffusers_mm import ModelManager, managed

        manager = ModelManager(strategy=strategy)
        if strategy == "block_pin" and (denoiser := denoiser_of(pipeline)) is not None:
            from diffusers_mm.block_pin import find_largest_block_list, per_block_size_bytes

            blocks = find_largest_block_list(denoiser[1])
            if blocks is not None:
                block_bytes = per_block_size_bytes(blocks[1])
                room = cell.cap - cell.activation_bytes - 2 * block_bytes
                manager.set_block_pin_count(
                    denoiser[0], max(0, min(len(blocks[1]), room // block_bytes))
                )
        managed(pipeline, mm=manager, device=cell.device)

    return put


def _mmgp(pipeline: Any, cell: Cell) -> None:
    if cell.device.type != "cuda":
        raise Unavailable("mmgp computes on CUDA alone: it names the device 'cuda' in its own code")
    from mmgp import offload

    budget = max(0, cell.cap - cell.activation_bytes) // 2**20
    offload.profile(
        pipeline,
        offload.profile_type.HighRAM_LowVRAM,
        quantizeTransformer=False,
        budgets=int(budget),
    )


DIFFUSERS, ACCELERATE = ("diffusers", "accelerate"), ("accelerate",)
BOTH = ("sim", "cuda")
TOOLS: Mapping[str, Tool] = {
    tool.name: tool
    for tool in (
        Tool("diffusers resident", ("diffusers",), _resident),
        Tool("diffusers model offload", DIFFUSERS, _model_offload),
        Tool("diffusers sequential offload", DIFFUSERS, _sequential_offload),
        Tool("diffusers group offload, block", DIFFUSERS, _group_offload("block_level")),
        Tool("diffusers group offload, leaf", DIFFUSERS, _group_offload("leaf_level")),
        Tool(
            "diffusers group offload, block, stream",
            DIFFUSERS,
            _group_offload("block_level", stream=True),
        ),
        Tool(
            "diffusers group offload, leaf, stream",
            DIFFUSERS,
            _group_offload("leaf_level", stream=True),
        ),
        Tool(
            "diffusers group offload, leaf, stream, disk",
            DIFFUSERS,
            _group_offload("leaf_level", stream=True, disk=True),
            for_ram=True,
        ),
        Tool("diffusers ComponentsManager", DIFFUSERS, _auto_offload, BOTH),
        Tool("accelerate dispatch", ACCELERATE, _dispatch(), BOTH),
        Tool("accelerate dispatch, disk", ACCELERATE, _dispatch(disk=True), BOTH, for_ram=True),
        Tool("diffusers-mm auto", ("diffusers-mm", "diffusers"), _managed("auto"), ("cuda",)),
        Tool(
            "diffusers-mm model_offload", ("diffusers-mm", "diffusers"), _managed("model_offload")
        ),
        Tool("diffusers-mm block_pin", ("diffusers-mm", "diffusers"), _managed("block_pin"), BOTH),
        Tool("mmgp", ("mmgp",), _mmgp, BOTH),
    )
}
GRAPHRUN, SESSION, ATTACH = "graphrun", "graphrun, session of 2", "graphrun.attach"
OWN = (GRAPHRUN, SESSION)
"""graphrun's two regimes: cold, where every run begins and ends with an empty device, and a
session, where the second run finds what the first left there."""
