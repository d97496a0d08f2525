"""The tools of `cpu.py`: each opens the pipeline in a folder as its users do.

A tool's ``open`` returns a function that makes the picture. Nothing here is measured except in
`Blockwise`, the reference: one block in memory at a time, computing timed separately.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from cpu_models import Model, call, empty_pipeline, load_graph, load_pipeline, write_gguf
from cpu_report import GRAPHRUN, MMAP
from safetensors import safe_open
from torch import nn

from graphrun.errors import InputError

CACHE_LINE_BYTES = 64
ACCELERATE, GROUPS, GGUF = "accelerate", "groups", "gguf"  # folders of copies


@dataclass(frozen=True, slots=True)
class Job:
    """One cell, as a tool sees it.

    ``cap_bytes``: the memory limit. ``floor_bytes``: the peak of the reference, its largest block
    included. ``copies``: the folder of the tool's own copies of the weights. ``note``: records an
    event with values.
    """

    model: Model
    folder: Path
    cap_bytes: int
    floor_bytes: int
    copies: Path
    note: Callable[..., None]


Picture = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool. ``packages``: whose versions are recorded; the first must be installed.

    ``copies``: the name of the copies of all weights that the tool needs on disk, "": none.
    ``models``: beginnings of the names of models that the tool runs. ``resident``: the tool reads
    all weights into memory at its start, so one more cell without a cap shows its speed.
    """

    name: str
    open: Callable[[Job], Picture]
    packages: tuple[str, ...]
    copies: str = ""
    models: tuple[str, ...] = ("",)
    resident: bool = False

    @property
    def versions(self) -> dict[str, str]:
        """The versions of the packages. Raises InputError if one is not installed."""
        try:
            return {name: version(name) for name in self.packages}
        except PackageNotFoundError as error:
            raise InputError(f"{error.name} is not installed: pip install {error.name}") from error


def modules_of(pipeline: Any) -> dict[str, nn.Module]:
    """Return the pipeline's components with weights."""
    return {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}


class Blockwise:
    """A pipeline with one block in memory at a time.

    A block is an item of a module list, or a module with parameters of its own. ``load_seconds``:
    of reading blocks. ``largest_bytes``: of a block. ``calls``: of the denoiser.
    """

    def __init__(self, folder: Path, model: Model) -> None:
        self.pipeline = empty_pipeline(model)
        self.load_seconds, self.largest_bytes, self.calls = 0.0, 0, 0
        self.weight_bytes, self._files = dict[str, int](), dict[Path, Any]()
        for name, module in modules_of(self.pipeline).items():
            files = _tensor_files(folder / name)
            self.weight_bytes[name] = sum(tensor.nbytes for tensor in module.parameters())
            for block, whole in list(_blocks(module)):
                names = _stored_names(module, block, whole, files)
                nbytes = sum(getattr_path(block, name).nbytes for name in names)
                self.largest_bytes = max(self.largest_bytes, nbytes)
                if whole or not list(block.children()):
                    block.register_forward_pre_hook(self._loader(block, names, files))
                    block.register_forward_hook(_release(block, names))
                else:
                    self._loader(block, names, files)(block, ())
            if name in ("transformer", "unet"):
                module.register_forward_pre_hook(self._count)

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = safe_open(path, framework="pt")
        return self._files[path]

    def _count(self, _module: nn.Module, _arguments: Any) -> None:
        self.calls += 1

    def _loader(
        self, block: nn.Module, names: dict[str, str], files: dict[str, Path]
    ) -> Callable[[nn.Module, Any], None]:
        def load(_module: nn.Module, _arguments: Any) -> None:
            start = time.perf_counter()
            for name, stored_name in names.items():
                _set(block, name, _copied(self._open(files[stored_name]).get_tensor(stored_name)))
            self.load_seconds += time.perf_counter() - start

        return load


def _copied(mapped_tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy at the same distance from a cache line as in the file, where diffusers uses the
    tensor in place: MKL's products of single rows in fp32 depend on it in their last bits."""
    size, skipped = mapped_tensor.element_size(), mapped_tensor.data_ptr() % CACHE_LINE_BYTES
    flat = torch.empty(mapped_tensor.numel() + CACHE_LINE_BYTES // size, dtype=mapped_tensor.dtype)
    start = (skipped - flat.data_ptr()) % CACHE_LINE_BYTES // size
    return (
        flat[start : start + mapped_tensor.numel()].view(mapped_tensor.shape).copy_(mapped_tensor)
    )


def getattr_path(module: nn.Module, path: str) -> torch.Tensor:
    owner, _, key = path.rpartition(".")
    tensor: torch.Tensor = getattr(module.get_submodule(owner), key)
    return tensor


def _set(module: nn.Module, path: str, value: torch.Tensor) -> None:
    owner, _, key = path.rpartition(".")
    parameters: Any = module.get_submodule(owner)._parameters
    parameters[key] = nn.Parameter(value, parameters[key].requires_grad)


def _release(block: nn.Module, names: dict[str, str]) -> Callable[[nn.Module, Any, Any], None]:
    empty = {name: getattr_path(block, name) for name in names}

    def release(_module: nn.Module, _arguments: Any, _output: Any) -> None:
        for name, tensor in empty.items():
            _set(block, name, tensor)

    return release


def _blocks(module: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Yield each block and whether its descendants are included."""
    if list(module.parameters(recurse=False)):
        yield module, False
    for child in module.children():
        if isinstance(module, nn.ModuleList):
            yield child, True
        else:
            yield from _blocks(child)


def _stored_names(
    module: nn.Module, block: nn.Module, whole: bool, files: dict[str, Path]
) -> dict[str, str]:
    """Return the name in the files for each parameter of ``block``; tied ones share a name."""
    aliases = dict[int, str]()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in files:
            aliases.setdefault(id(parameter), name)
    return {
        name: aliases[id(parameter)]
        for name, parameter in block.named_parameters(recurse=whole, remove_duplicate=False)
    }


def _tensor_files(folder: Path) -> dict[str, Path]:
    files = dict[str, Path]()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            files |= dict.fromkeys(file.keys(), path)
    return files


def _mmap(job: Job) -> Picture:
    pipeline = load_pipeline(job.folder, job.model)
    return lambda: call(pipeline, job.model)


def _in_memory(job: Job) -> Picture:
    pipeline = load_pipeline(job.folder, job.model)
    for module in modules_of(pipeline).values():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = tensor.data.clone()
    return lambda: call(pipeline, job.model)


def _disk_offload(job: Job) -> Picture:
    from accelerate import disk_offload

    pipeline = load_pipeline(job.folder, job.model)
    for name, module in modules_of(pipeline).items():
        disk_offload(module, job.copies / name, torch.device("cpu"))
    return lambda: call(pipeline, job.model)


def _device_map(job: Job) -> Picture:
    """Give the denoiser the cap minus the reference's peak; the other components get the rest."""
    from accelerate import dispatch_model, infer_auto_device_map

    pipeline = load_pipeline(job.folder, job.model)
    modules = modules_of(pipeline)
    room = max(0, job.cap_bytes - job.floor_bytes)
    for name in sorted(modules, key=lambda name: name not in ("transformer", "unet")):
        module = modules[name]
        whole = list(getattr(module, "_no_split_modules", None) or [])
        places = infer_auto_device_map(
            module, max_memory={"cpu": room}, no_split_module_classes=whole
        )
        sizes = {path: sum(tensor.nbytes for tensor in _tensors(module, path)) for path in places}
        room -= sum(sizes[path] for path, place in places.items() if place == "cpu")
        dispatch_model(
            module,
            places,
            offload_dir=job.copies / name,
            skip_keys=getattr(module, "_skip_keys", None),  # without them video VAEs copy caches
            force_hooks=True,
        )
    return lambda: call(pipeline, job.model)


def _tensors(module: nn.Module, path: str) -> list[torch.Tensor]:
    owner, _, key = path.rpartition(".")
    part: Any = getattr(module.get_submodule(owner), key) if path else module
    return [part] if isinstance(part, torch.Tensor) else [*part.parameters(), *part.buffers()]


def _group_offload(job: Job) -> Picture:
    from diffusers.hooks import apply_group_offloading

    pipeline = load_pipeline(job.folder, job.model)
    for name, module in modules_of(pipeline).items():
        apply_group_offloading(
            module,
            onload_device=torch.device("cpu"),
            offload_device=torch.device("cpu"),
            offload_type="block_level",
            num_blocks_per_group=1,
            use_stream=False,
            offload_to_disk_path=str(job.copies / name),
        )
    return lambda: call(pipeline, job.model)


def _graphrun(job: Job) -> Picture:
    """Make a dry run without the cache; a profile of ``graphrun calibrate`` is used."""
    import graphrun
    from graphrun.cli.common import cache_folder
    from graphrun.profile.hardware_profiles import detect_cpu

    graph, inputs = load_graph(job.folder), job.model.call_inputs
    hardware = detect_cpu(cache_folder(False))
    problem = graphrun.estimate(graph, memory=job.cap_bytes, hardware=hardware, inputs=inputs)
    solution = graphrun.plan(problem)
    job.note(
        "plan",
        hardware=hardware.label,
        basis=hardware.basis,
        planned_seconds=solution.simulation.seconds,
        planned_peak_bytes=problem.budget_for(solution.simulation.peak_bytes),
        planned_read_bytes=solution.simulation.moved_bytes,
        first_touch_seconds=hardware.first_touch_seconds,
    )

    def picture() -> Any:
        trace = graphrun.run(solution, graph, inputs)
        slots = [
            {
                "slot": slot.name,
                "planned_seconds": plan_slot.seconds,
                "seconds": slot.end_seconds - slot.start_seconds,
                "planned_peak_bytes": plan_slot.peak_bytes,
                "peak_bytes": slot.peak_bytes,
                "activation_bytes": plan_slot.activation_bytes,
                "pages_bytes": plan_slot.pages_bytes,
            }
            for plan_slot, slot in trace.pairs_with(solution.simulation.slots)
        ]
        job.note("slots", slots=slots)
        return next(iter(trace.outputs.values()))

    return picture


def _stable_diffusion_cpp(job: Job) -> Picture:
    """Use the same weights in one GGUF file. The sampler and its noise are the tool's own."""
    import numpy
    from stable_diffusion_cpp import StableDiffusion

    file, inputs = job.copies / "weights.gguf", job.model.call_inputs
    if not file.exists():
        write_gguf(job.folder, file)

    def progress(step: int, _steps: int, _seconds: float) -> None:
        job.note("step" if step else "denoise")

    def picture() -> Any:
        pipeline = StableDiffusion(
            str(file), enable_mmap=True, vae_decode_only=True, n_threads=cores(), verbose=False
        )
        images = pipeline.generate_image(
            inputs["prompt"],
            width=inputs["width"],
            height=inputs["height"],
            sample_steps=inputs["steps"],
            sample_method="euler",
            cfg_scale=5.0,  # diffusers' default for SDXL
            seed=inputs["seed"],
            progress_callback=progress,
        )
        return numpy.stack([numpy.asarray(image.convert("RGB")) / 255 for image in images])

    return picture


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


DIFFUSERS = ("diffusers", "torch", "transformers", "safetensors")
TOOLS = {
    tool.name: tool
    for tool in (
        Tool(GRAPHRUN, _graphrun, ("graphrun", "torch", "diffusers", "transformers")),
        Tool(MMAP, _mmap, DIFFUSERS),
        Tool("resident", _in_memory, DIFFUSERS, resident=True),
        Tool("disk-offload", _disk_offload, ("accelerate", "diffusers", "torch"), ACCELERATE),
        Tool("device-map", _device_map, ("accelerate", "diffusers", "torch"), ACCELERATE),
        Tool("group-offload", _group_offload, ("diffusers", "torch"), GROUPS),
        Tool(
            "sd.cpp",
            _stable_diffusion_cpp,
            ("stable-diffusion-cpp-python", "gguf"),
            GGUF,
            models=("sdxl",),
            resident=True,
        ),
    )
}
