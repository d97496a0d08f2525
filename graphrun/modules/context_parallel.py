"""Modules whose sequence several processes divide, by diffusers' context parallelism (Ulysses)."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

_LOGGERS = ("diffusers.models.modeling_utils", "diffusers.hooks.context_parallel")
_EXPECTED = ("is an experimental feature", "split will not be applied")


def divides_sequence(module: nn.Module) -> bool:
    """Return whether diffusers can divide the sequence of ``module``."""
    return getattr(module, "_cp_plan", None) is not None


def divide(module: Any, processes: int) -> None:
    """Make ``module`` compute the part of this process, one of ``processes`` in a process group.

    The module needs no device. It cannot be called outside of the group any more.
    """
    from diffusers import ContextParallelConfig, ParallelConfig

    config = ContextParallelConfig(ulysses_degree=processes)
    device_type = "cuda" if dist.get_backend() == "nccl" else "cpu"
    mesh = init_device_mesh(device_type, config.mesh_shape, mesh_dim_names=config.mesh_dim_names)

    def resolved(_: Any) -> Any:
        parallel = ParallelConfig(context_parallel_config=config)
        parallel.setup(dist.get_rank(), processes, mesh.device_type, mesh=mesh)
        module._parallel_config = parallel
        return parallel

    # diffusers' own takes the number of the process modulo the number of accelerators
    module._resolve_parallel_config = resolved
    try:
        module.enable_parallelism(config=config)
    finally:
        del module._resolve_parallel_config


@contextmanager
def quiet() -> Iterator[None]:
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
