"""Replays a dry run's tape through a device's allocator, and reads off what lives in each phase's window.

    tape        enter te   enter te2      stage   enter dit x28          stage   enter vae   stage
    phases      |encode/0  |encode/1              |denoise/0                     |decode/0
                |<-window->|<---- window -------->|<---- first | rest ---------->|<--------->

A window runs from a phase's first entry to the next phase's: that is where the executor acts, so what lives there is what has to
fit beside the phase's weights, the glue code between two stages included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from graphrun.model.allocator import Allocator, Caching, Counting
from graphrun.model.problem import Hardware
from graphrun.profile.recording import Call, Mark, Recording


@dataclass(slots=True)
class PhaseMemory:
    """Bytes seen in one phase: at its entry, and the most in each part. ``beside_bytes``: by component and path of a layer the most
    while it runs, where what is released is given back at once; a caching allocator keeps its pages."""

    entry_bytes: int = 0
    first_bytes: int = 0
    steady_bytes: int = 0
    beside_bytes: dict[tuple[str, str], int] = field(default_factory=dict)


def phase_memories_of(
    recording: Recording, spans: Sequence[tuple[int, int]], hardware: Hardware, allocator: Callable[[], Allocator] | None = None
) -> list[PhaseMemory]:
    """What lives in each phase's window, replayed through ``allocator``, or the device's own (with expandable segments)."""
    own = Caching if hardware.caching_allocator else Counting
    replay = _Replay(hardware, (allocator or own)())
    phase_memories: list[PhaseMemory] = []
    starts = {begin: number for number, (begin, _) in enumerate(spans)}
    position, waiting, rest = 0, set[str](), False
    members = [{e[1].component for e in recording.entries()[begin:end]} for begin, end in spans]
    for item in recording.items:
        if not isinstance(item, Mark):
            replay.apply(*item)
        elif item.call is not None:
            if position in starts:
                _close(phase_memories, replay, rest)
                phase_memories.append(replay.open())
                waiting, rest = set(members[starts[position]]), False
            elif not waiting and not rest:
                _close(phase_memories, replay, rest)
                rest = True
            waiting.discard(item.name)
            levels = replay.enter(item.call)
            for span in item.call.spans if not hardware.caching_allocator else ():
                place = phase_memories[-1].beside_bytes
                key = item.name, span.path
                place[key] = max(place.get(key, 0), *levels[span.begin : span.end + 1])
            position += 1
    _close(phase_memories, replay, rest)
    return phase_memories


def glue_of(recording: Recording, spans: Sequence[tuple[int, int]], hardware: Hardware) -> list[int]:
    """The most that each phase makes on the device beyond what lives at its entry if every component computes elsewhere."""
    items = [
        replace(i, call=replace(i.call, events=(), spans=())) if isinstance(i, Mark) and i.call else i for i in recording.items
    ]
    phase_memories = phase_memories_of(Recording(items, dict(recording.values)), spans, hardware)
    return [max(0, max(of.first_bytes, of.steady_bytes) - of.entry_bytes) for of in phase_memories]


def _close(phase_memories: list[PhaseMemory], replay: _Replay, rest: bool) -> None:
    if phase_memories:
        setattr(phase_memories[-1], "steady_bytes" if rest else "first_bytes", replay.peak_bytes)
    elif replay.peak_bytes:
        replay.prelude_bytes = replay.peak_bytes
    replay.peak_bytes = replay.allocator.used_bytes


class _Replay:
    """Feeds a tape to an allocator. Keys of calls are made distinct from the tape's own by a running offset."""

    def __init__(self, hardware: Hardware, allocator: Allocator) -> None:
        self.allocator = allocator
        self.scratch = hardware.convolution_scratch
        self.spares = hardware.spares_large_copies
        self.peak_bytes = 0
        self.prelude_bytes = 0
        self._live: set[int] = set()
        self._kept: dict[tuple[int, int], int] = {}  # of calls of this phase, by call and key: as the allocator knows them
        self._offset = -1

    def open(self) -> PhaseMemory:
        """A phase is entered: what components kept in the last one and empty pages go; what lives now is its entry."""
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
        """Replays ``call``: bytes used before its first event and behind each, with an event's own scratch. What it keeps is made
        once in a phase."""
        low, levels, known = self._offset, [self.allocator.used_bytes], {key for of, key in self._kept if of == id(call)}
        for key, nbytes in call.events:
            if key in known or (nbytes == 0 and key in call.kept):
                pass
            elif nbytes > 0:
                self.allocator.allocate(low - key, nbytes)
                self._offset = min(self._offset, low - key)
                if key in call.kept:
                    self._kept[id(call), key] = low - key
                self.peak_bytes = max(self.peak_bytes, self.allocator.used_bytes)
            elif nbytes == 0:
                self.allocator.release(low - key)
            elif self.scratch:
                self.allocator.allocate(low, -nbytes - key * self.spares)
                self.peak_bytes = max(self.peak_bytes, self.allocator.used_bytes)
                levels.append(self.allocator.used_bytes)
                self.allocator.release(low)
                continue
            levels.append(self.allocator.used_bytes)
        return levels
