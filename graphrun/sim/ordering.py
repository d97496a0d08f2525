"""Finds data races among the host, the disk reader, and a simulated device's compute and copy
streams.

On the simulator bytes move at once, so that a missing wait changes no result. This checker judges
the order of events instead, as a card would: by vector clocks. Two accesses of the same bytes, at
least one of them a write, are a race unless one *happens before* the other. These order events:

    issue           what the host does before it issues work happens before that work stream order
    work on one stream runs in the order of its issue mark and wait   what precedes a mark happens
    before what follows a wait for it; a mark of the disk reader orders nothing,
                    since on CUDA it is a time of the host's (runtime/devices/cuda.py)
    barrier         what both streams did happens before what the host does next
    blocking copy   likewise, for the stream that copied
    join            what a background job did happens before what follows the call that waits for it

Accesses are exact byte ranges of storages. An allocation is a write by the stream that it is made
on. A free is a write by the same stream: PyTorch's caching allocator hands the memory to the next
allocation on that stream at once. Host memory that is freed is written by the host.

Cost: a run of a small graph takes 1.6 to 1.8 times as long. The same job is done on a card by
``torch.cuda._sanitizer``.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphrun.errors import GraphrunError

Agent = str
"""``host``, ``disk``, ``lock`` (threads of the host), ``compute`` and ``copy``; of further devices
``compute 1`` and so on."""
Clock = dict[str, int]
Spans = tuple[tuple[int, int], ...]  # byte ranges of a storage, ascending, apart from each other


class RaceError(GraphrunError):
    """Two accesses of the same bytes in no certain order, found by `--check-ordering` on the
    simulated accelerator."""

    exit_code = 4


class Point(float):
    """A mark: its time, and what certainly happened before it."""

    before: Clock


@dataclass(frozen=True, slots=True)
class Access:
    """``agent`` read or wrote ``spans`` as its event number ``time``. ``what``: the operator or
    copy; ``code``: who issued it."""

    agent: Agent
    time: int
    writes: bool
    spans: Spans
    what: str
    code: str
    where: str

    def __str__(self) -> str:
        did = "write" if self.writes else "read"
        at = f" in {self.where}" if self.where else ""
        return f"{did} of bytes {_shown(self.spans)} by {self.agent} ({self.what}{at}, {self.code})"


class Race(NamedTuple):
    """``later`` may come before or while ``earlier`` happens; both are of ``storage``."""

    storage: str
    earlier: Access
    later: Access

    def __str__(self) -> str:
        return f"race in {self.storage}: {self.later} is not ordered behind {self.earlier}"


class Ordering:
    """Vector clocks of the agents of the simulated devices of a host, and the accesses that later
    ones may still race with."""

    def __init__(self) -> None:
        self._races: dict[
            tuple[str, str], Race
        ] = {}  # since the last report, the first of each pair of code lines
        self._slot = self._block = ""
        self._clocks: dict[Agent, Clock] = {"host": Counter(), "disk": Counter()}
        self._accesses: dict[Any, list[Access]] = {}  # storage -> accesses
        self._owners: dict[int, Agent] = {}  # device storage -> the stream it was allocated on
        self._host_storages: dict[int, weakref.finalize] = {}  # type: ignore[type-arg]
        # the agent that Python code runs as: the disk reader in a background job
        self._inside: Agent = "host"

    def agents(self, number: int) -> dict[str, Agent]:
        """Agents of the streams of device ``number``, and of the threads of the host."""
        names = {
            stream: f"{stream} {number}" if number else stream for stream in ("compute", "copy")
        }
        self._clocks |= {agent: Counter() for agent in names.values()}
        return {**names, "disk": "disk", "lock": "lock"}

    def annotate(self, slot: str | None, block: str | None) -> None:
        """The slot that the executor is in, and the block that the next copies are of, for
        messages."""
        self._slot = self._slot if slot is None else slot
        self._block = self._block if block is None else block

    # -- order

    def issue(self, stream: str) -> Clock:
        """The clock of a new event on ``stream``, behind everything that the code issuing it
        knows."""
        clock = self._clocks[stream]
        _join(clock, self._clocks[self._inside])
        clock[stream] += 1
        return clock

    def mark(self, stream: str, seconds: float) -> Point:
        """A mark on ``stream``; one of a thread of the host orders nothing."""
        point = Point(seconds)
        point.before = dict(self.issue(stream)) if stream not in ("disk", "lock") else {}
        return point

    def wait(self, stream: str, mark: float) -> None:
        """What is issued to ``stream`` from now on follows ``mark``. The disk reader waits as the
        host does, by itself."""
        _join(self._clocks[stream], getattr(mark, "before", {}))

    def join(self, stream: str) -> None:
        """The host waited for what was issued to ``stream``."""
        _join(self._clocks[self._inside], self._clocks[stream])

    def barrier(self, *streams: Agent) -> None:
        """The host waited for ``streams``: what they and the host did can race with nothing any
        more."""
        for stream in streams:
            self.join(stream)
        for storage, accesses in list(self._accesses.items()):
            left = [access for access in accesses if not self._known_to_all(access)]
            if left:
                self._accesses[storage] = left
            else:
                del self._accesses[storage]
        self.raise_races()

    def background(self, job: Callable[[], None]) -> Callable[[], None]:
        """Runs ``job`` as the disk reader; the function that waits for it orders what it did before
        what follows."""
        before, self._inside = self._inside, "disk"
        _join(self._clocks["disk"], self._clocks[before])
        try:
            job()
        finally:
            self._inside = before
        done = dict(self._clocks["disk"])
        return lambda: _join(self._clocks[self._inside], done)

    def raise_races(self) -> None:
        """Raise RaceError if there are races since the last report. A race that comes again after
        it is reported again."""
        if self._races:
            races, self._races = self._races, {}
            raise RaceError("\n".join(map(str, races.values())))

    # -- accesses of the device

    def operator(
        self, name: str, stream: str, read: Iterable[torch.Tensor], written: Iterable[torch.Tensor]
    ) -> None:
        """An operator on ``stream`` reads and writes these raw tensors, of the device or of the
        host."""
        self.issue(stream)
        for tensor in read:
            self._touch(tensor, stream, False, name)
        for tensor in written:
            self._touch(tensor, stream, True, name)

    def copied(
        self, stream: str, target: torch.Tensor, source: torch.Tensor, blocking: bool
    ) -> None:
        """A copy on ``stream`` between raw tensors of the host and the device. The host waits for
        it if ``blocking``."""
        self.issue(stream)
        for tensor in (target, source):
            if _device_key(tensor) is None:
                self._track(tensor)
        what = f"copy of {self._block}" if stream == "copy" and self._block else "copy"
        self._touch(source, stream, False, what)
        self._touch(target, stream, True, what)
        if blocking:
            self.join(stream)

    def crossed(
        self, stream: Agent, other: Agent, target: torch.Tensor, source: torch.Tensor
    ) -> None:
        """A copy between raw tensors of two devices, which PyTorch issues to the current stream of
        the source and orders with that of the target before and after it (``copy_kernel_cuda`` in
        aten/native/cuda/Copy.cu)."""
        _join(self._clocks[stream], self.issue(other))
        self.issue(stream)
        self._touch(source, stream, False, "copy between devices")
        self._touch(target, stream, True, "copy between devices")
        _join(self._clocks[other], self._clocks[stream])

    def allocated(self, key: int, nbytes: int, stream: str) -> None:
        """Storage ``key`` was allocated on ``stream``."""
        self.issue(stream)
        self._owners[key] = stream
        self._note(key, f"device storage {key}", stream, True, ((0, nbytes),), "allocation")

    def freed(self, key: int, nbytes: int) -> None:
        """Storage ``key`` is gone: its memory may be used again at once by the stream that it was
        allocated on."""
        owner = self._owners.pop(key, "compute")
        self.issue(owner)
        self._note(key, f"device storage {key}", owner, True, ((0, nbytes),), "free")
        self._accesses.pop(key, None)

    # -- accesses of the host

    def host_wrote(self, tensor: torch.Tensor, what: str) -> None:
        """The host, or the disk reader in its job, wrote ``tensor``, which lies in host memory,
        past PyTorch's operators."""
        self._track(tensor)
        self._host(tensor, True, what)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Operators on the CPU inside count as accesses of the host, where they touch memory that
        copies touch too."""
        with _HostOperators(self):
            yield

    def host_operator(
        self, name: str, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]
    ) -> None:
        """An operator on the CPU."""
        for tensor in read:
            if _host_key(tensor) in self._host_storages:
                self._host(tensor, False, name)
        for tensor in written:
            if _host_key(tensor) in self._host_storages:
                self._host(tensor, True, name)

    def _host(self, tensor: torch.Tensor, writes: bool, what: str) -> None:
        self._clocks[self._inside][self._inside] += 1
        key = _host_key(tensor)
        self._note(("host", key), "host memory", self._inside, writes, spans_of(tensor), what)

    def _track(self, tensor: torch.Tensor) -> None:
        """Its storage is watched until it is freed, which is a write by the host."""
        key = _host_key(tensor)
        if key not in self._host_storages and tensor.numel():
            storage = tensor.untyped_storage()
            self._host_storages[key] = weakref.finalize(
                storage, self._host_freed, key, storage.nbytes()
            )
            self._host_storages[key].atexit = False

    def _host_freed(self, key: int, nbytes: int) -> None:
        self._host_storages.pop(key, None)
        self._clocks["host"]["host"] += 1
        self._note(("host", key), "host memory", "host", True, ((0, nbytes),), "free")
        self._accesses.pop(("host", key), None)

    # -- races

    def _touch(self, tensor: torch.Tensor, stream: str, writes: bool, what: str) -> None:
        key = _device_key(tensor)
        if key is not None:
            self._note(key, f"device storage {key}", stream, writes, spans_of(tensor), what)
        elif (host := _host_key(tensor)) in self._host_storages:
            self._note(("host", host), "host memory", stream, writes, spans_of(tensor), what)

    def _note(
        self, storage: Any, name: str, agent: str, writes: bool, spans: Spans, what: str
    ) -> None:
        if not spans:
            return
        clock = self._clocks[agent]
        access = Access(agent, clock[agent], writes, spans, what, _code(), self._slot)
        kept = []
        for earlier in self._accesses.get(storage, ()):
            ordered = clock[earlier.agent] >= earlier.time
            if not ordered and (writes or earlier.writes) and _overlap(earlier.spans, spans):
                self._races.setdefault((earlier.code, access.code), Race(name, earlier, access))
            if not (ordered and (writes or not earlier.writes) and _covers(spans, earlier.spans)):
                # else whoever is ordered behind this access is ordered behind the earlier one too
                kept.append(earlier)
        self._accesses[storage] = [*kept, access]

    def _known_to_all(self, access: Access) -> bool:
        """Whether every agent is behind ``access``, the disk reader too: its next job begins behind
        what the host knows."""
        return self._clocks["host"][access.agent] >= access.time


class _HostOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports operators on CPU tensors. Those that a simulated tensor runs on its raw tensors are
    the device's, not the host's."""

    def __init__(self, ordering: Ordering) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ordering = ordering

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read: list[torch.Tensor] = []
        written: list[torch.Tensor] = []
        for argument, value in zip(func._schema.arguments, args, strict=False):
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if not isinstance(tensor, torch.Tensor):
                    continue
                if tensor.device.type != "cpu" or _device_key(tensor) is not None:
                    return out  # an operator of the device, or one that computes it on the CPU
                (
                    written
                    if argument.alias_info is not None and argument.alias_info.is_write
                    else read
                ).append(tensor)
        views = any(
            result.alias_info is not None and not result.alias_info.is_write
            for result in func._schema.returns
        )
        if not views:
            self._ordering.host_operator(func._schema.name, read, written)
        return out


def spans_of(tensor: torch.Tensor) -> Spans:
    """The byte ranges of its storage that ``tensor`` covers, ascending and merged; those of a
    strided view exactly."""
    if not (count := tensor.numel()):
        return ()
    size, offset = tensor.element_size(), int(tensor.storage_offset())
    if tensor.is_contiguous():
        return ((offset * size, (offset + count) * size),)
    return _strided_spans(tuple(tensor.stride()), tuple(tensor.shape), offset, size)


@functools.lru_cache(maxsize=256)  # the same views come in every call
def _strided_spans(
    strides: tuple[int, ...], shape: tuple[int, ...], offset: int, size: int
) -> Spans:
    dims = sorted(
        (stride, length)
        for stride, length in zip(strides, shape, strict=True)
        if length > 1 and stride
    )
    run = 1  # elements that lie side by side
    outer: list[tuple[int, int]] = []
    for stride, length in dims:
        if stride <= run and not outer:
            run = max(run, stride * (length - 1) + run)
        else:
            outer.append((stride, length))
    starts = [offset]
    for stride, length in outer:
        starts = [start + stride * number for start in starts for number in range(length)]
    merged: list[list[int]] = []
    for start in sorted(starts):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], start + run)
        else:
            merged.append([start, start + run])
    return tuple((start * size, stop * size) for start, stop in merged)


def _overlap(one: Spans, other: Spans) -> bool:
    """Whether a byte is in both."""
    i = j = 0
    while i < len(one) and j < len(other):
        if one[i][0] < other[j][1] and other[j][0] < one[i][1]:
            return True
        if one[i][1] <= other[j][1]:
            i += 1
        else:
            j += 1
    return False


def _covers(outer: Spans, inner: Spans) -> bool:
    """Whether every byte of ``inner`` is in ``outer``; False where that would take long to tell."""
    if outer is inner or outer == inner:
        return True
    return len(outer) == 1 and outer[0][0] <= inner[0][0] and inner[-1][1] <= outer[0][1]


def _join(clock: Clock, other: Clock) -> None:
    for agent, time in other.items():
        if time > clock[agent]:
            clock[agent] = time


def _device_key(tensor: torch.Tensor) -> int | None:
    """The number of the device storage that raw ``tensor`` lies in, or None where it lies in host
    memory."""
    allocation = getattr(tensor.untyped_storage(), "graphrun_allocation", None)
    return allocation.key if allocation is not None else None


def _host_key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _shown(spans: Spans) -> str:
    first = f"{spans[0][0]}..{spans[0][1]}"
    return first if len(spans) == 1 else f"{first} and {len(spans) - 1} more ranges"


_NOT_THE_ISSUER = ("/graphrun/sim/", "/torch/", "devices/simulated", "contextlib", "weakref")


def _code() -> str:
    """The innermost line outside PyTorch and this package that issued the access."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if name := _issuer(frame.f_code.co_filename):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


@functools.cache
def _issuer(file: str) -> str:
    """The name of ``file`` in a report, empty where it is one of PyTorch, of this package, or of
    what these call through."""
    return (
        ""
        if any(part in file for part in _NOT_THE_ISSUER)
        else file.rpartition("/graphrun/")[2] or file
    )
