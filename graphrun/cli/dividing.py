"""``run --divide N``: start one process for each of N equal devices, which divide the sequence.

    graphrun run ... --divide 2     plans and starts
      graphrun run ... --divide 2     process 0, on the first device: shows and writes results
      graphrun run ... --divide 2     process 1, on the second device: silent

The processes know their numbers by the variables of torch.distributed (RANK, WORLD_SIZE), so
``torchrun --nproc-per-node 2 -m graphrun run ... --divide 2`` starts them too.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import IO, TYPE_CHECKING

from graphrun.errors import InputError

if TYPE_CHECKING:
    from graphrun.model.hardware import Hardware

POLL_SECONDS = 0.05
GRACE_SECONDS = 10.0  # for process 0 to find the same error as another

ChildOutput = tuple[subprocess.Popen[bytes], IO[bytes] | None]
"""A process and the file with what it says; None if it says that itself."""


def rank_of(processes: int) -> int | None:
    """Return the number of this process among ``processes``; None if they are to be started.

    Raises InputError if another number of processes was started.
    """
    if "RANK" not in os.environ:
        return None
    if (count := os.environ.get("WORLD_SIZE")) != str(processes):
        raise InputError(
            f"--divide {processes}, but {count} processes were started: make them equal"
        )
    return int(os.environ["RANK"])


def take_device(rank: int) -> None:
    """Make the device number ``rank`` of those that this process sees its only CUDA device."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    devices = names.split(",") if names else [str(number) for number in range(rank + 1)]
    if rank >= len(devices):
        raise InputError(f"CUDA_VISIBLE_DEVICES={names} has no device for process {rank}")
    os.environ["CUDA_VISIBLE_DEVICES"] = devices[rank]


def run_processes(processes: int) -> int:
    """Run this command in ``processes`` processes, and return the exit code of the first failure.

    When one fails, the others are stopped. What a silent process says is shown if it fails, unless
    process 0 fails alike and says it.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = list[ChildOutput]()
    with ExitStack() as stack:
        for rank in range(processes):
            words = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": processes,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            log = stack.enter_context(tempfile.TemporaryFile()) if rank else None
            child = subprocess.Popen(
                [sys.executable, "-m", "graphrun", *sys.argv[1:]],
                env={**os.environ, **{name: str(word) for name, word in words.items()}},
                stdout=log,
                stderr=log,
            )
            stack.callback(_stop, child)
            children.append((child, log))
        return _wait(children)


def _stop(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()


def _code_of(child: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of a process that has `GRACE_SECONDS` to end; None if it goes on."""
    try:
        return child.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        return None


def _wait(children: Sequence[ChildOutput]) -> int:
    while True:
        codes = [child.poll() for child, _ in children]
        for code, (_, log) in zip(codes, children, strict=True):
            if code:
                if log is not None and _code_of(children[0][0]) != code:
                    log.seek(0)
                    sys.stderr.write(log.read().decode(errors="replace"))
                return code if code > 0 else 128 - code
        if all(code == 0 for code in codes):
            return 0
        time.sleep(POLL_SECONDS)


@contextmanager
def process_group(hardware: Hardware) -> Iterator[None]:
    """Context in which the processes of a run exchange tensors: by NCCL, on a CPU by gloo.

    Raises InputError for devices between which PyTorch exchanges nothing.
    """
    import torch.distributed as dist

    from graphrun.modules.context_parallel import quiet

    if not (hardware.kind.is_host or hardware.kind.visibility):
        raise InputError(f"--divide runs on CUDA, ROCm and the CPU, not on {hardware.kind.name}")
    dist.init_process_group("gloo" if hardware.kind.is_host else "nccl")
    try:
        with quiet():
            yield
    finally:
        dist.destroy_process_group()
