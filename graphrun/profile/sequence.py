"""Dry runs of one of several equal processes that divide a transformer's sequence (Ulysses).

Each process has all weights, on a device of its own. diffusers' context parallelism divides the
tokens before the blocks, and gathers them afterwards:

    tokens 1..n/2   | q, k, v -----\\ /--- attention of heads 1..h/2 ---\\ /--- MLP | next block
                    |               X    over all tokens                X
    tokens n/2..n   | q, k, v -----/ \\--- attention of heads h/2..h ---/ \\--- MLP | next block
                                all-to-all                          all-to-all

A dry run executes the first process. Its tensors are on meta, so nothing is sent.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from graphrun.errors import InputError

_LOGGERS = ("diffusers.models.modeling_utils", "diffusers.hooks.context_parallel")
_EXPECTED = ("is an experimental feature", "split will not be applied")


def divides_sequence(module: nn.Module) -> bool:
    """Return whether diffusers can divide the sequence of ``module``."""
    return getattr(module, "_cp_plan", None) is not None


def communicates(module: nn.Module) -> bool:
    """Return whether ``module`` exchanges tensors with other processes, by diffusers' means."""
    return getattr(module, "_parallel_config", None) is not None


@contextmanager
def first_of(processes: int, modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context in which ``modules`` compute the part of the first of ``processes`` processes.

    The modules keep diffusers' hooks afterwards, and cannot be called outside. Modules without a
    plan for context parallelism compute all. Raises InputError inside a process group.
    """
    divided = [module for module in modules if divides_sequence(module)]
    if processes == 1 or not divided:
        yield
        return
    if dist.is_initialized():
        raise InputError("this process has a process group: plan in a process without one")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    try:
        with _quiet():
            for module in divided:
                _divide(module, processes)
            yield
    finally:
        dist.destroy_process_group()


def _divide(module: Any, processes: int) -> None:
    """Enable context parallelism of ``module``, which needs no device."""
    from diffusers import ContextParallelConfig, ParallelConfig

    config = ContextParallelConfig(ulysses_degree=processes)
    mesh = init_device_mesh("cpu", config.mesh_shape, mesh_dim_names=config.mesh_dim_names)

    def resolved(_: Any) -> Any:
        parallel = ParallelConfig(context_parallel_config=config)
        parallel.setup(0, processes, mesh.device_type, mesh=mesh)
        module._parallel_config = parallel
        return parallel

    # diffusers' own takes the number of the process modulo the number of accelerators
    module._resolve_parallel_config = resolved
    try:
        module.enable_parallelism(config=config)
    finally:
        del module._resolve_parallel_config


@contextmanager
def _quiet() -> Iterator[None]:
    """Context without warnings about experimental and deprecated functions, and about tensors
    without tokens."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]

    def is_wanted(record: logging.LogRecord) -> bool:
        return not any(text in record.getMessage() for text in _EXPECTED)

    for logger in loggers:
        logger.addFilter(is_wanted)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r".*all_gather_tensor", FutureWarning)
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_wanted)
