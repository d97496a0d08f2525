"""The allocations of each phase of a dry run, as a problem stores them (`PhaseTrace`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from graphrun.model.hardware import Hardware
from graphrun.model.phase_trace import CALL, CallTrace, Item, PhaseTrace
from graphrun.profile.corrections import scratch_on
from graphrun.profile.recording import Call, MemoryEvent, Recording


@dataclass(slots=True)
class _Phase:
    """A phase under construction. ``kinds``: id of a call -> its index in ``calls``."""

    calls: list[CallTrace] = field(default_factory=list)
    kinds: dict[int, int] = field(default_factory=dict)
    prelude: list[Item] = field(default_factory=list)
    first: list[Item] = field(default_factory=list)
    steady: list[Item] = field(default_factory=list)


def phase_traces_of(
    recording: Recording, spans: Sequence[tuple[int, int]], hardware: Hardware
) -> list[PhaseTrace]:
    """Return the trace of each phase.

    ``spans``: half-open ranges of ``recording.entries()``, one for each phase. The first part ends
    when every component has been called and one is called again.
    """
    entries = recording.entries()
    starts = {begin: {call.component for _, call in entries[begin:end]} for begin, end in spans}
    call_traces = dict[int, CallTrace]()  # by id of a call; phases share them
    phases = [_Phase()]
    part, position, not_entered = phases[0].prelude, 0, set[str]()
    for item in recording.items:
        if isinstance(item, MemoryEvent):
            part.append((item.key, item.nbytes))
        elif isinstance(item, Call):
            if position in starts:
                if position:
                    phases.append(_Phase())
                part, not_entered = phases[-1].first, starts[position]
            elif not not_entered:
                part = phases[-1].steady
            not_entered.discard(item.component)
            phase = phases[-1]
            if id(item) not in phase.kinds:
                phase.kinds[id(item)] = len(phase.calls)
                if id(item) not in call_traces:
                    call_traces[id(item)] = _call(item, hardware)
                phase.calls.append(call_traces[id(item)])
            part.append((phase.kinds[id(item)], CALL))
            position += 1
    traces = [
        PhaseTrace(
            tuple(phase.calls), tuple(phase.first), tuple(phase.steady), tuple(phase.prelude)
        )
        for phase in phases
    ]
    return traces if position else []


def _call(call: Call, hardware: Hardware) -> CallTrace:
    """Return ``call`` on ``hardware``: scratch is a tensor released at once, or absent."""
    events: list[Item] = []
    for number, event in enumerate(call.events, start=1):
        if not event.scratch:
            events.append((event.key, event.nbytes))
        elif scratch_bytes := scratch_on(hardware, call, event):
            events += [(-number, scratch_bytes), (-number, 0)]
    results = tuple(key for key in call.results if key not in call.persistent_keys)
    return CallTrace(call.component, tuple(events), tuple(call.persistent_keys), results)


def traces_of_option(traces: Sequence[PhaseTrace], names: Mapping[int, int]) -> list[PhaseTrace]:
    """Return the traces of a stage's phases with a stage option, to use in the dry run without it.

    ``names``: key of a storage of the stage's values -> its key in the dry run without the option.
    Keys are equal in both dry runs up to the stage. Everything else that the stage allocates gets
    new keys, and is released at its end.
    """
    new_keys: dict[int, int] = {}
    renamed = []
    for trace in traces:
        parts = []
        for items in (trace.prelude, trace.first, trace.steady):
            new_keys |= {key: names.get(key, -1 - key) for key, nbytes in items if nbytes > 0}
            parts.append(
                tuple(
                    (new_keys.get(key, key) if nbytes != CALL else key, nbytes)
                    for key, nbytes in items
                )
            )
        renamed.append(replace(trace, prelude=parts[0], first=parts[1], steady=parts[2]))
    last = renamed[-1]
    releases = tuple((key, 0) for key in sorted(new_keys.values()) if key < 0)
    renamed[-1] = (
        replace(last, steady=last.steady + releases)
        if last.steady
        else replace(last, first=last.first + releases)
    )
    return renamed
