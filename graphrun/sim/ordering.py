"""Find data races among the host, the disk reader, and a device's compute and copy streams.

On the simulator bytes move immediately, so a missing wait changes no result. The checker instead
checks the order of events, as a card would see it, by vector clocks. Two accesses of the same
bytes, at least one of them a write, are a race unless one *happens before* the other. These rules
order events:

    issue           what the host does before it issues work happens before that work
    stream order    work on one stream runs in the order of its issue
    mark and wait   what precedes a mark happens before what follows a wait for it. A mark of the
                    disk reader orders nothing, since on CUDA it is a time of the host
                    (runtime/devices/cuda.py).
    barrier         what both streams did happens before what the host does next
    blocking copy   the same, for the stream that copied
    join            what a background job did happens before what follows the call that waits for it

Accesses are exact byte ranges of storages. An allocation is a write by its stream. A free is a
write by the same stream: PyTorch's caching allocator may give the memory to the next allocation on
that stream. Freed host memory is written by the host.

Cost: a run of a small graph takes 1.6 to 1.8 times as long. On a card, ``torch.cuda._sanitizer``
does the same job.
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
"""``host``, ``disk``, ``lock`` (threads of the host), ``compute`` and ``copy``; for further
devices ``compute 1`` and so on."""
VectorClock = dict[str, int]
Spans = tuple[tuple[int, int], ...]  # byte ranges of a storage, ascending, apart from each other


class RaceError(GraphrunError):
    """Two accesses to the same bytes have no fixed order (``--check-ordering``)."""

    exit_code = 4


class TimeMark(float):
    """A mark: its time, and the events that certainly happened before it."""

    history: VectorClock


@dataclass(frozen=True, slots=True)
class Access:
    """A read or write of ``spans`` by ``agent``, as its event number ``time``. ``action``: the
    operator or copy. ``code``: the line that issued it. ``slot``: of the plan."""

    agent: Agent
    time: int
    writes: bool
    spans: Spans
    action: str
    code: str
    slot: str

    def __str__(self) -> str:
        verb = "write" if self.writes else "read"
        place = f" in {self.slot}" if self.slot else ""
        return (
            f"{verb} of bytes {_shown(self.spans)} by {self.agent} ({self.action}{place}, "
            f"{self.code})"
        )


class Race(NamedTuple):
    """``second_access`` is not ordered after ``first_access``; both are of ``storage``."""

    storage: str
    first_access: Access
    second_access: Access

    def __str__(self) -> str:
        return (
            f"race in {self.storage}: {self.second_access} is not ordered behind "
            f"{self.first_access}"
        )


class Ordering:
    """Vector clocks of the agents of simulated devices, and accesses that may still race."""

    def __init__(self) -> None:
        # since the last report: the first race of each pair of code lines
        self._races: dict[tuple[str, str], Race] = {}
        self._slot = self._block = ""
        self._clocks: dict[Agent, VectorClock] = {"host": Counter(), "disk": Counter()}
        self._accesses: dict[Any, list[Access]] = {}  # storage -> accesses
        self._owners: dict[int, Agent] = {}  # device storage -> its stream
        self._host_storages: dict[int, weakref.finalize] = {}  # type: ignore[type-arg]
        # the agent that runs Python code; in a background job, the disk reader
        self._current_agent: Agent = "host"

    def agents(self, number: int) -> dict[str, Agent]:
        names = {
            stream: f"{stream} {number}" if number else stream for stream in ("compute", "copy")
        }
        self._clocks |= {agent: Counter() for agent in names.values()}
        return {**names, "disk": "disk", "lock": "lock"}

    def annotate(self, slot: str | None, block: str | None) -> None:
        """Set the slot of the executor, and the block of the next copies, for messages."""
        self._slot = self._slot if slot is None else slot
        self._block = self._block if block is None else block

    # -- order

    def issue(self, stream: str) -> VectorClock:
        """Return the clock of a new event on ``stream``, after all that the issuer has seen."""
        clock = self._clocks[stream]
        _join(clock, self._clocks[self._current_agent])
        clock[stream] += 1
        return clock

    def mark(self, stream: str, seconds: float) -> TimeMark:
        """Return a mark on ``stream``. A mark of a thread of the host orders nothing."""
        point = TimeMark(seconds)
        point.history = dict(self.issue(stream)) if stream not in ("disk", "lock") else {}
        return point

    def wait(self, stream: str, mark: float) -> None:
        """Order work issued to ``stream`` from now on after ``mark``. The disk reader itself waits
        as the host does."""
        _join(self._clocks[stream], getattr(mark, "history", {}))

    def join(self, stream: str) -> None:
        """Record that the host waited for the work issued to ``stream``."""
        _join(self._clocks[self._current_agent], self._clocks[stream])

    def barrier(self, *streams: Agent) -> None:
        """Record that the host waited for ``streams``, whose past accesses can no longer race.
        Raises RaceError for races so far."""
        for stream in streams:
            self.join(stream)
        for storage, accesses in list(self._accesses.items()):
            open_accesses = [access for access in accesses if not self._known_to_all(access)]
            if open_accesses:
                self._accesses[storage] = open_accesses
            else:
                del self._accesses[storage]
        self.raise_races()

    def background(self, job: Callable[[], None]) -> Callable[[], None]:
        """Run ``job`` as the disk reader. Return a function that waits for it, which orders its
        accesses."""
        previous_agent, self._current_agent = self._current_agent, "disk"
        _join(self._clocks["disk"], self._clocks[previous_agent])
        try:
            job()
        finally:
            self._current_agent = previous_agent
        job_clock = dict(self._clocks["disk"])
        return lambda: _join(self._clocks[self._current_agent], job_clock)

    def raise_races(self) -> None:
        """Raise RaceError for races since the last report. A race that repeats is reported
        again."""
        if self._races:
            races, self._races = self._races, {}
            raise RaceError("\n".join(map(str, races.values())))

    # -- accesses of the device

    def operator(
        self,
        name: str,
        stream: str,
        read_tensors: Iterable[torch.Tensor],
        written_tensors: Iterable[torch.Tensor],
    ) -> None:
        """Record an operator on ``stream`` with its raw tensors, of the device or the host."""
        self.issue(stream)
        for tensor in read_tensors:
            self._touch(tensor, stream, False, name)
        for tensor in written_tensors:
            self._touch(tensor, stream, True, name)

    def copied(
        self, stream: str, target: torch.Tensor, source: torch.Tensor, blocking: bool
    ) -> None:
        """Record a copy on ``stream`` between raw tensors of the host and the device. The host
        waits for a ``blocking`` copy."""
        self.issue(stream)
        for tensor in (target, source):
            if _device_key(tensor) is None:
                self._track(tensor)
        action = f"copy of {self._block}" if stream == "copy" and self._block else "copy"
        self._touch(source, stream, False, action)
        self._touch(target, stream, True, action)
        if blocking:
            self.join(stream)

    def transferred(
        self, stream: Agent, other: Agent, target: torch.Tensor, source: torch.Tensor
    ) -> None:
        """Record a copy between raw tensors of two devices.

        PyTorch issues it to the current stream of the source, and orders that with the current
        stream of the target before and after the copy (``copy_kernel_cuda`` in
        aten/native/cuda/Copy.cu).
        """
        _join(self._clocks[stream], self.issue(other))
        self.issue(stream)
        self._touch(source, stream, False, "copy between devices")
        self._touch(target, stream, True, "copy between devices")
        _join(self._clocks[other], self._clocks[stream])

    def allocated(self, key: int, nbytes: int, stream: str) -> None:
        self.issue(stream)
        self._owners[key] = stream
        self._note(key, f"device storage {key}", stream, True, ((0, nbytes),), "allocation")

    def freed(self, key: int, nbytes: int) -> None:
        """Record that storage ``key`` was freed. Its stream may reuse the memory immediately."""
        owner = self._owners.pop(key, "compute")
        self.issue(owner)
        self._note(key, f"device storage {key}", owner, True, ((0, nbytes),), "free")
        self._accesses.pop(key, None)

    # -- accesses of the host

    def host_wrote(self, tensor: torch.Tensor, action: str) -> None:
        """Record a write of ``tensor`` in host memory that bypasses PyTorch's operators. The writer
        is the host, or the disk reader in its job."""
        self._track(tensor)
        self._host(tensor, True, action)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count CPU operators inside the context as host accesses to memory that copies use too."""
        with _HostOperators(self):
            yield

    def host_operator(
        self,
        name: str,
        read_tensors: Sequence[torch.Tensor],
        written_tensors: Sequence[torch.Tensor],
    ) -> None:
        for tensor in read_tensors:
            if _host_key(tensor) in self._host_storages:
                self._host(tensor, False, name)
        for tensor in written_tensors:
            if _host_key(tensor) in self._host_storages:
                self._host(tensor, True, name)

    def _host(self, tensor: torch.Tensor, writes: bool, action: str) -> None:
        self._clocks[self._current_agent][self._current_agent] += 1
        key = _host_key(tensor)
        self._note(
            ("host", key), "host memory", self._current_agent, writes, spans_of(tensor), action
        )

    def _track(self, tensor: torch.Tensor) -> None:
        """Watch the storage of ``tensor`` until it is freed, which is a write by the host."""
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

    def _touch(self, tensor: torch.Tensor, stream: str, writes: bool, action: str) -> None:
        key = _device_key(tensor)
        if key is not None:
            self._note(key, f"device storage {key}", stream, writes, spans_of(tensor), action)
        elif (host_key := _host_key(tensor)) in self._host_storages:
            self._note(("host", host_key), "host memory", stream, writes, spans_of(tensor), action)

    def _note(
        self, storage: Any, name: str, agent: str, writes: bool, spans: Spans, action: str
    ) -> None:
        if not spans:
            return
        clock = self._clocks[agent]
        access = Access(agent, clock[agent], writes, spans, action, _code(), self._slot)
        open_accesses = []
        for previous in self._accesses.get(storage, ()):
            ordered = clock[previous.agent] >= previous.time
            if not ordered and (writes or previous.writes) and _overlap(previous.spans, spans):
                self._races.setdefault((previous.code, access.code), Race(name, previous, access))
            if not (ordered and (writes or not previous.writes) and _covers(spans, previous.spans)):
                # otherwise, accesses ordered after this one are ordered after the previous one too
                open_accesses.append(previous)
        self._accesses[storage] = [*open_accesses, access]

    def _known_to_all(self, access: Access) -> bool:
        """Return whether every agent is ordered after ``access``. That includes the disk reader,
        whose next job begins after everything that the host has seen."""
        return self._clocks["host"][access.agent] >= access.time


class _HostOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports operators on CPU tensors. Operators that a simulated tensor runs on its raw tensors
    belong to the device."""

    def __init__(self, ordering: Ordering) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ordering = ordering

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        read_tensors: list[torch.Tensor] = []
        written_tensors: list[torch.Tensor] = []
        for argument, value in zip(func._schema.arguments, args, strict=False):
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if not isinstance(tensor, torch.Tensor):
                    continue
                if tensor.device.type != "cpu" or _device_key(tensor) is not None:
                    return output  # an operator of the device, or its computation on the CPU
                (
                    written_tensors
                    if argument.alias_info is not None and argument.alias_info.is_write
                    else read_tensors
                ).append(tensor)
        views = any(
            result.alias_info is not None and not result.alias_info.is_write
            for result in func._schema.returns
        )
        if not views:
            self._ordering.host_operator(func._schema.name, read_tensors, written_tensors)
        return output


def spans_of(tensor: torch.Tensor) -> Spans:
    """Return the exact byte ranges of its storage that ``tensor`` covers, ascending and merged."""
    if not (count := tensor.numel()):
        return ()
    size, offset = tensor.element_size(), int(tensor.storage_offset())
    if tensor.is_contiguous():
        return ((offset * size, (offset + count) * size),)
    return _strided_spans(tuple(tensor.stride()), tuple(tensor.shape), offset, size)


@functools.lru_cache(maxsize=256)  # every call has the same views
def _strided_spans(
    strides: tuple[int, ...], shape: tuple[int, ...], offset: int, size: int
) -> Spans:
    dims = sorted(
        (stride, length)
        for stride, length in zip(strides, shape, strict=True)
        if length > 1 and stride
    )
    run = 1  # contiguous elements
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


def _overlap(first: Spans, second: Spans) -> bool:
    i = j = 0
    while i < len(first) and j < len(second):
        if first[i][0] < second[j][1] and second[j][0] < first[i][1]:
            return True
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return False


def _covers(outer: Spans, inner: Spans) -> bool:
    """Return whether every byte of ``inner`` is in ``outer``; False if that is expensive."""
    if outer is inner or outer == inner:
        return True
    return len(outer) == 1 and outer[0][0] <= inner[0][0] and inner[-1][1] <= outer[0][1]


def _join(clock: VectorClock, other: VectorClock) -> None:
    for agent, time in other.items():
        if time > clock[agent]:
            clock[agent] = time


def _device_key(tensor: torch.Tensor) -> int | None:
    """Return the number of the device storage of raw ``tensor``; None if it is in host memory."""
    allocation = getattr(tensor.untyped_storage(), "graphrun_allocation", None)
    return allocation.key if allocation is not None else None


def _host_key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _shown(spans: Spans) -> str:
    first = f"{spans[0][0]}..{spans[0][1]}"
    return first if len(spans) == 1 else f"{first} and {len(spans) - 1} more ranges"


_NOT_THE_ISSUER = ("/graphrun/sim/", "/torch/", "devices/simulated", "contextlib", "weakref")


def _code() -> str:
    """Return the innermost line outside PyTorch and this package that issued the access."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if name := _issuer(frame.f_code.co_filename):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


@functools.cache
def _issuer(file: str) -> str:
    """Return the name of ``file`` in a report; "" for PyTorch, this package, and code between
    them."""
    return (
        ""
        if any(part in file for part in _NOT_THE_ISSUER)
        else file.rpartition("/graphrun/")[2] or file
    )
