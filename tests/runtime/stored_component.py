"""The small component with its weights in a file: parameters on meta, read when its backing store
is read."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small_component import Small, numbers, small_hardware

from graphrun.kernel_memory import process_bytes
from graphrun.model.hardware import Hardware
from graphrun.model.problem import ComponentNumbers, Problem
from graphrun.modules.source_files import stored_tensors
from graphrun.modules.sources import FileSource, Writer
from graphrun.profile.variants import FILE_SLACK_BYTES
from graphrun.runtime import direct_reads
from graphrun.runtime.devices.device import Device
from graphrun.runtime.direct_reads import DirectReads, SpanRead
from graphrun.runtime.host import Host
from graphrun.units import MIB, PAGE_BYTES, round_up


@contextmanager
def nothing_left() -> Iterator[None]:
    """Assert that the context ends with the threads and open files with which it began."""
    threads, files = set(threading.enumerate()), open_files()
    yield
    assert set(threading.enumerate()) == threads
    assert open_files() == files


def open_files() -> list[str]:
    folder = Path("/proc/self/fd")
    links = [link for link in folder.iterdir() if link.is_symlink()] if folder.exists() else []
    return sorted(os.readlink(link) for link in links if "/proc/" not in os.readlink(link))


def saved(folder: Path, seed: int = 0) -> Path:
    """A folder with the weights of ``Small(seed)`` in one file; tied tensors once."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.clone()
        for name, tensor in Small(seed).state_dict().items()
        if name != "head.weight"
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def meta_module_and_writer(folder: Path) -> tuple[Small, Writer]:
    """A module whose parameters are on meta, and the writer of its blocks."""
    module = Small()
    parameters: dict[int, torch.nn.Parameter] = {}
    for child in module.modules():
        for key, parameter in child._parameters.items():
            if parameter is not None:
                meta = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
                child._parameters[key] = parameters.setdefault(id(parameter), meta)
    tensors = {tensor.name: tensor for tensor in stored_tensors(folder, "")}
    tensors["head.weight"] = tensors["embed.weight"]
    buffers = {name: buffer for name, buffer in module.named_buffers() if name not in tensors}
    return module, Writer(FileSource(tensors), buffers=buffers)


def in_backing_store(
    backing_store: str, name: str, hardware: Hardware, **changes: Any
) -> ComponentNumbers:
    """The small component in ``backing_store``; if that is in RAM, the plan reads it."""
    plain = numbers(name, Small(), hardware)
    variant = plain.variants[0]
    read_seconds = tuple(nbytes / hardware.disk_bytes_per_second for nbytes in variant.block_bytes)
    if backing_store == "disk":
        variant = replace(
            variant,
            backing_store="disk",
            host_bytes=2 * max(variant.block_bytes),
            disk_seconds=read_seconds,
        )
    elif backing_store == "file":
        block_bytes = tuple(
            round_up(nbytes, PAGE_BYTES) + FILE_SLACK_BYTES for nbytes in variant.block_bytes
        )
        variant = replace(
            variant,
            backing_store="file",
            host_bytes=0,
            block_bytes=block_bytes,
            load_seconds=read_seconds,
        )
    else:
        rate = (
            hardware.pageable_bytes_per_second
            if backing_store == "pageable"
            else hardware.h2d_bytes_per_second
        )
        loads = tuple(nbytes / rate for nbytes in variant.block_bytes)
        variant = replace(
            variant, backing_store=backing_store, read_seconds=read_seconds, load_seconds=loads
        )
    return replace(plain, variants=(replace(variant, **changes),))


def host_of(problem: Problem, folders: Mapping[str, Path], device: Device) -> Host:
    """Host memory of meta_module_and_writer components."""
    drafts = {name: meta_module_and_writer(folder) for name, folder in folders.items()}
    modules = {name: module for name, (module, _) in drafts.items()}
    return Host(modules, problem, device, {name: writer for name, (_, writer) in drafts.items()})


def cpu_hardware() -> Hardware:
    """The CPU; some bytes more than the test process has now are the process's own."""
    context_bytes = process_bytes().nbytes + 32 * MIB
    return replace(
        small_hardware(), name="cpu", device="cpu", context_bytes=context_bytes, basis="measured"
    )


def in_files(problem: Problem) -> Problem:
    """``problem`` with all components in files."""
    components = tuple(
        in_backing_store("file", c.name, problem.hardware) for c in problem.components
    )
    return replace(problem, components=components)


def slow_reads(patch: pytest.MonkeyPatch, seconds: float = 0.002) -> None:
    """Makes each direct read, and each write in its place, begin late."""
    read_at, submit_write = direct_reads.read_at, DirectReads.submit_write

    def late(file: Any, view: memoryview, offset: int) -> int:
        time.sleep(seconds)
        return read_at(file, view, offset)

    def late_write(reads: DirectReads, write: Callable[[], None], view: torch.Tensor) -> SpanRead:
        def act() -> None:
            time.sleep(seconds)
            write()

        return submit_write(reads, act, view)

    patch.setattr(direct_reads, "read_at", late)
    patch.setattr(DirectReads, "submit_write", late_write)
