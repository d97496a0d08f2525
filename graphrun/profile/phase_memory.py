"""Replay the recording of a dry run through an allocator, and read the memory of each phase.

    recording   enter te   enter te2       stage   enter dit x28            stage   enter vae  stage
    phases      |encode/0  |encode/1               |denoise/0                       |decode/0
                |<-memory->|<------ memory ------->|<--- first | steady ----------->|<--------->

A phase's memory covers everything from its first call into a component to the first call of the
next phase, including the pipeline's own code between two stages. The executor loads and evicts at
these calls, so all of it must fit next to the phase's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from graphrun.model.allocator import Allocator, Counting, Heaps
from graphrun.model.hardware import Hardware, ProcessorRates
from graphrun.model.phase_trace import CALL, CallTrace, Item, PhaseTrace
from graphrun.profile.corrections import generated_by
from graphrun.profile.phase_traces import phase_traces_of
from graphrun.profile.recording import Call, Kernel, Recording


@dataclass(slots=True)
class PhaseMemory:
    """Bytes of one phase: at its entry, and the peaks of its first and steady parts."""

    entry_bytes: int = 0
    first_bytes: int = 0
    steady_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        return max(self.entry_bytes, self.first_bytes, self.steady_bytes)


def phase_memories_of(
    recording: Recording,
    spans: Sequence[tuple[int, int]],
    hardware: Hardware,
    allocator: Callable[[], Allocator] | None = None,
    *,
    returns: bool = True,
) -> list[PhaseMemory]:
    """Return the memory of each phase, replayed through ``allocator``.

    Default: on a CPU the C library's, else the sum of live bytes. ``spans``: half-open ranges of
    ``recording.entries()``, one for each phase (`problems.phase_spans`). ``returns``: unused memory
    is returned to the device before each phase, as the executor does and a pipeline does not.
    """
    allocator = allocator or (Heaps if hardware.kind.is_host else Counting)
    traces = phase_traces_of(recording, spans, hardware)
    replay = _TraceReplay(allocator(), recording.keeps_tensors, hardware.unified, returns=returns)
    entries, last_stage = recording.entries(), None
    seen_kernels = set[Kernel]()
    for trace, (begin, end) in zip(traces, spans, strict=bool(traces)):
        replay.apply(trace, trace.prelude)
        stage = entries[begin][0]
        replay.begin_phase(same_stage=stage == last_stage)
        calls = {id(call): call for _, call in entries[begin:end]}.values()
        for call_trace, call in zip(trace.calls, calls, strict=True):
            replay.lasting_keys |= {(id(call_trace), key) for key in call.lasting_keys}
        last_stage = stage
        replay.apply(trace, trace.first)
        new_kernels = {kernel for call in calls for kernel in call.kernels} - seen_kernels
        seen_kernels |= new_kernels
        if isinstance(hardware.kernels, ProcessorRates):
            replay.phases[-1].first_bytes += sum(
                generated_by(kernel, hardware.kernels) for kernel in new_kernels
            )
        if trace.steady:
            replay.begin_steady()
            replay.apply(trace, trace.steady)
    return replay.phases[1:]


def pipeline_code_of(
    recording: Recording, spans: Sequence[tuple[int, int]], hardware: Hardware
) -> list[int]:
    """Return per phase the peak after its entry if every component computes elsewhere."""
    items = [
        replace(item, events=[], spans=[]) if isinstance(item, Call) else item
        for item in recording.items
    ]
    phase_memories = phase_memories_of(Recording(items), spans, hardware)
    return [memory.peak_bytes - memory.entry_bytes for memory in phase_memories]


class _TraceReplay:
    """Feed the traces of phases to an allocator.

    ``keeps``: components keep tensors from phase to phase. ``trims``: the executor returns empty
    pages before each call; ``returns``: before each phase. Keys inside calls get a running offset,
    so they differ from the recording's own.
    """

    def __init__(
        self, allocator: Allocator, keeps: bool, trims: bool, *, returns: bool = True
    ) -> None:
        self.allocator, self.keeps, self.trims, self.returns = allocator, keeps, trims, returns
        self.phases = [PhaseMemory()]  # the first entry is before all phases
        self.is_steady = False
        self._live: set[int] = set()
        # (id of a call's trace, key in the call) -> key in the allocator
        self._persistent_keys: dict[tuple[int, int], int] = {}
        # id of a call's trace -> its peak above the bytes before it, where a call changes nothing
        self._peaks: dict[int, int] = {}
        # those that stay until the stage ends
        self.lasting_keys: set[tuple[int, int]] = set()
        self._offset = -1

    def begin_phase(self, *, same_stage: bool = False) -> None:
        """Release what components kept in the last phase, except what lasts in the ``same_stage``;
        the rest is the entry memory."""
        for key in () if self.keeps else [*self._persistent_keys][::-1]:
            if not (same_stage and key in self.lasting_keys):
                self.allocator.release(self._persistent_keys.pop(key))
                self._peaks.clear()
        if self.returns:
            self.allocator.trim()
        used_bytes = self.allocator.used_bytes
        prelude = self.phases[0].first_bytes if len(self.phases) == 1 else 0
        self.phases.append(PhaseMemory(max(used_bytes, prelude), used_bytes))
        self.is_steady = False

    def begin_steady(self) -> None:
        self.phases[-1].steady_bytes = self.allocator.used_bytes
        self.is_steady = True

    def apply(self, trace: PhaseTrace, items: Iterable[Item]) -> None:
        for key, nbytes in items:
            if nbytes == CALL:
                self._enter(trace.calls[key])
            elif nbytes:
                self._live.add(key)
                self._allocate(key, nbytes)
            elif key in self._live:
                self._live.remove(key)
                self.allocator.release(key)

    def _allocate(self, key: int, nbytes: int) -> None:
        self.allocator.allocate(key, nbytes)
        self._note(self.allocator.used_bytes)

    def _note(self, used_bytes: int) -> None:
        phase = self.phases[-1]
        if self.is_steady:
            phase.steady_bytes = max(phase.steady_bytes, used_bytes)
        else:
            phase.first_bytes = max(phase.first_bytes, used_bytes)

    def _enter(self, call: CallTrace) -> None:
        """Replay ``call``. Tensors that a component keeps are allocated once per phase.

        Where bytes are only counted, a call that allocates none to keep is replayed once.
        """
        if self.trims:
            self.allocator.trim()
        if isinstance(self.allocator, Heaps):
            self.allocator.begin_call(first=not self.is_steady)
        base, persistent_keys = (
            self._offset,
            {key for call_id, key in self._persistent_keys if call_id == id(call)},
        )
        before_bytes = peak_bytes = self.allocator.used_bytes
        if id(call) in self._peaks:
            self._note(before_bytes + self._peaks[id(call)])
            return
        for key, nbytes in call.events:
            call_key = base - key if key > 0 else 0  # scratch, of which one is live at a time
            if key not in persistent_keys and nbytes:
                self._allocate(call_key, nbytes)
                peak_bytes = max(peak_bytes, self.allocator.used_bytes)
                self._offset = min(self._offset, call_key)
                if key in call.persistent_keys:
                    self._persistent_keys[id(call), key] = call_key
            elif key not in call.persistent_keys:
                self.allocator.release(call_key)
        if isinstance(self.allocator, Counting) and persistent_keys >= set(call.persistent_keys):
            self._peaks[id(call)] = peak_bytes - before_bytes
