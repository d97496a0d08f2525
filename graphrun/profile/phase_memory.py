"""Replays the recording of a dry run through a device's allocator and reads the memory of each phase.

    recording   enter te   enter te2       stage   enter dit x28            stage   enter vae   stage
    phases      |encode/0  |encode/1               |denoise/0                       |decode/0
                |<-memory->|<------ memory ------->|<--- first | steady ----------->|<--------->

A phase's memory covers everything from its first entry into a component to the next phase's first entry, including the
pipeline's own code between two stages. The executor loads and evicts at these entries, so all of it must fit beside the
phase's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from graphrun.model.allocator import Allocator, Caching, Counting
from graphrun.model.problem import Hardware
from graphrun.profile.recording import Call, Mark, Recording


@dataclass(slots=True)
class PhaseMemory:
    """Bytes of one phase: at its entry, and the peaks of its first and steady parts.

    ``beside_bytes``: (component, path of a layer) -> peak while the layer runs. Only for allocators that return released
    memory at once; a caching allocator keeps its pages.
    """

    entry_bytes: int = 0
    first_bytes: int = 0
    steady_bytes: int = 0
    beside_bytes: dict[tuple[str, str], int] = field(default_factory=dict)


def phase_memories_of(
    recording: Recording, spans: Sequence[tuple[int, int]], hardware: Hardware, allocator: Callable[[], Allocator] | None = None
) -> list[PhaseMemory]:
    """The memory of each phase, replayed through ``allocator``, by default the device's own (with expandable segments).

    ``spans``: half-open ranges of ``recording.entries()``, one for each phase (`problems.phase_spans`).
    """
    own = Caching(hardware.page_scale) if hardware.caching_allocator else Counting()
    replay = _Replay(hardware, allocator() if allocator else own)
    phase_memories: list[PhaseMemory] = []
    starts = {begin: number for number, (begin, _) in enumerate(spans)}
    position, not_entered, steady = 0, set[str](), False
    members = [{e[1].component for e in recording.entries()[begin:end]} for begin, end in spans]
    for item in recording.items:
        if not isinstance(item, Mark):
            replay.apply(*item)
        elif item.call is not None:
            if position in starts:
                _end_part(phase_memories, replay, steady)
                phase_memories.append(replay.begin_phase())
                not_entered, steady = set(members[starts[position]]), False
            elif not not_entered and not steady:
                _end_part(phase_memories, replay, steady)
                steady = True
            not_entered.discard(item.name)
            levels = replay.enter(item.call)
            for span in item.call.spans if not hardware.caching_allocator else ():
                beside = phase_memories[-1].beside_bytes
                key = item.name, span.path
                beside[key] = max(beside.get(key, 0), *levels[span.begin : span.end + 1])
            position += 1
    _end_part(phase_memories, replay, steady)
    return phase_memories


def glue_of(recording: Recording, spans: Sequence[tuple[int, int]], hardware: Hardware) -> list[int]:
    """For each phase, the peak of the device bytes allocated after its entry if every component computes elsewhere."""
    items = [
        replace(i, call=replace(i.call, events=(), spans=())) if isinstance(i, Mark) and i.call else i for i in recording.items
    ]
    phase_memories = phase_memories_of(Recording(items, dict(recording.values)), spans, hardware)
    return [max(0, max(of.first_bytes, of.steady_bytes) - of.entry_bytes) for of in phase_memories]


def _end_part(phase_memories: list[PhaseMemory], replay: _Replay, steady: bool) -> None:
    if phase_memories:
        setattr(phase_memories[-1], "steady_bytes" if steady else "first_bytes", replay.peak_bytes)
    elif replay.peak_bytes:
        replay.prelude_bytes = replay.peak_bytes
    replay.peak_bytes = replay.allocator.used_bytes


class _Replay:
    """Feeds a recording to an allocator. Keys inside of calls get a running offset, which keeps them distinct from the
    recording's own."""

    def __init__(self, hardware: Hardware, allocator: Allocator) -> None:
        self.allocator = allocator
        self.scratch = hardware.convolution_scratch
        self.spares = hardware.spares_large_copies
        self.peak_bytes = 0
        self.prelude_bytes = 0
        self._live: set[int] = set()
        self._kept: dict[tuple[int, int], int] = {}  # (id of a call of this phase, its key) -> the allocator's key
        self._offset = -1

    def begin_phase(self) -> PhaseMemory:
        """Begin a phase: releases what components kept in the last phase, and empty pages. What is still live is the entry
        memory."""
        for key in self._kept.values():
            self.allocator.release(key)
        self._kept.clear()
        self.allocator.trim()
        self.peak_bytes = self.allocator.used_bytes
        phase_memory = PhaseMemory(max(self.allocator.used_bytes, self.prelude_bytes))
        self.prelude_bytes = 0
        return phase_memory

    def apply(self, key: int, nbytes: int) -> None:
        if nbytes > 0:
            self._live.add(key)
            self.allocator.allocate(key, nbytes)
            self.peak_bytes = max(self.peak_bytes, self.allocator.used_bytes)
        elif key in self._live:
            self._live.remove(key)
            self.allocator.release(key)

    def enter(self, call: Call) -> list[int]:
        """Replays ``call``. Tensors that a component keeps are allocated once in a phase.

        Returns the bytes in use before the first event and after each, including an event's own scratch.
        """
        base, levels, already_kept = self._offset, [self.allocator.used_bytes], {key for of, key in self._kept if of == id(call)}
        for key, nbytes in call.events:
            if key in already_kept or (nbytes == 0 and key in call.kept):
                pass
            elif nbytes > 0:
                self.allocator.allocate(base - key, nbytes)
                self._offset = min(self._offset, base - key)
                if key in call.kept:
                    self._kept[id(call), key] = base - key
                self.peak_bytes = max(self.peak_bytes, self.allocator.used_bytes)
            elif nbytes == 0:
                self.allocator.release(base - key)
            elif self.scratch:
                self.allocator.allocate(base, -nbytes - key * self.spares)
                self.peak_bytes = max(self.peak_bytes, self.allocator.used_bytes)
                levels.append(self.allocator.used_bytes)
                self.allocator.release(base)
                continue
            levels.append(self.allocator.used_bytes)
        return levels
