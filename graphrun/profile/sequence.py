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

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn

from graphrun.errors import InputError
from graphrun.modules.context_parallel import divide, divides_sequence, quiet


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
        with quiet():
            for module in divided:
                divide(module, processes)
            yield
    finally:
        dist.destroy_process_group()
