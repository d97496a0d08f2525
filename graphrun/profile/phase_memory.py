"""Replays the recording of a dry run through a device's allocator and reads the memory of each
phase.

    recording   enter te   enter te2       stage   enter dit x28            stage   enter vae
    stage phases      |encode/0  |encode/1               |denoise/0                       |decode/0
                |<-memory->|<------ memory ------->|<--- first | steady ----------->|<--------->

A phase's memory covers everything from its first entry into a component to the next phase's first
entry, including the pipeline's own code between two stages. The executor loads and evicts at these
entries, so all of it must fit beside the phase's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from graphrun.model.allocator import Allocator, Counting
from graphrun.model.problem import Hardware
from graphrun.profile.recording import Call, Event, Recording


@dataclass(slots=True)
class PhaseMemory:
    """Bytes of one phase: at its entry, and the peaks of its first and steady parts."""

    entry_bytes: int = 0
    first_bytes: int = 0
    steady_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The peak of the whole phase."""
        return max(self.entry_bytes, self.first_bytes, self.steady_bytes)


def phase_memories_of(
    recording: Recording,
    spans: Sequence[tuple[int, int]],
    hardware: Hardware,
    allocator: Callable[[], Allocator] = Counting,
) -> list[PhaseMemory]:
    """The memory of each phase, replayed through ``allocator``; by default in bytes of tensors.

    ``spans``: half-open ranges of ``recording.entries()``, one for each phase
    (`problems.phase_spans`).
    """
    replay = _Replay(hardware, allocator(), recording.keeps)
    entries = recording.entries()
    starts = {begin: {call.component for _, call in entries[begin:end]} for begin, end in spans}
    position, not_entered = 0, set[str]()
    for item in recording.items:
        if isinstance(item, Event):
            replay.apply(item)
        elif isinstance(item, Call):
            if position in starts:
                replay.begin_phase()
                not_entered = starts[position]
            elif not not_entered and not replay.steady:
                replay.begin_steady()
            not_entered.discard(item.component)
            replay.enter(item)
            position += 1
    return replay.phases[1:]


def pipeline_code_of(
    recording: Recording, spans: Sequence[tuple[int, int]], hardware: Hardware
) -> list[int]:
    """For each phase, the peak of the device bytes allocated after its entry if every component
    computes elsewhere."""
    items = [
        replace(item, events=[], spans=[]) if isinstance(item, Call) else item
        for item in recording.items
    ]
    phase_memories = phase_memories_of(Recording(items), spans, hardware)
    return [of.peak_bytes - of.entry_bytes for of in phase_memories]


class _Replay:
    """Feeds a recording to an allocator. Keys inside of calls get a running offset, which keeps
    them distinct from the recording's own."""

    def __init__(self, hardware: Hardware, allocator: Allocator, keeps: bool) -> None:
        self.allocator = allocator
        self.scratch = hardware.convolution_scratch
        self.spares = hardware.spares_large_copies
        self.keeps = keeps
        self.phases = [PhaseMemory()]  # the first is what lies before all phases
        self.steady = False
        self._live: set[int] = set()
        self._kept: dict[
            tuple[int, int], int
        ] = {}  # (id of a call of this phase, its key) -> the allocator's key
        self._offset = -1

    def begin_phase(self) -> None:
        """Releases what components kept in the last phase, and empty pages. What is still live is
        the entry memory."""
        while self._kept and not self.keeps:
            self.allocator.release(self._kept.popitem()[1])
        self.allocator.trim()
        used = self.allocator.used_bytes
        prelude = self.phases[0].first_bytes if len(self.phases) == 1 else 0
        self.phases.append(PhaseMemory(max(used, prelude), used))
        self.steady = False

    def begin_steady(self) -> None:
        """Ends the first part of the phase."""
        self.phases[-1].steady_bytes = self.allocator.used_bytes
        self.steady = True

    def apply(self, event: Event) -> None:
        if event.nbytes:
            self._live.add(event.key)
            self._allocate(event.key, event.nbytes)
        elif event.key in self._live:
            self._live.remove(event.key)
            self.allocator.release(event.key)

    def _allocate(self, key: int, nbytes: int) -> None:
        self.allocator.allocate(key, nbytes)
        phase, used = self.phases[-1], self.allocator.used_bytes
        if self.steady:
            phase.steady_bytes = max(phase.steady_bytes, used)
        else:
            phase.first_bytes = max(phase.first_bytes, used)

    def enter(self, call: Call) -> None:
        """Replays ``call``. Tensors that a component keeps are allocated once in a phase."""
        base, already_kept = self._offset, {key for of, key in self._kept if of == id(call)}
        for key, nbytes, scratch, spared_bytes in call.events:
            if scratch:
                if self.scratch:
                    self._allocate(0, nbytes - spared_bytes * self.spares)
                    self.allocator.release(0)
                continue
            if key not in already_kept and nbytes:
                self._allocate(base - key, nbytes)
                self._offset = min(self._offset, base - key)
                if key in call.kept:
                    self._kept[id(call), key] = base - key
            elif key not in call.kept:
                self.allocator.release(base - key)
