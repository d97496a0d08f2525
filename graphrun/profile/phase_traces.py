"""The allocations of each phase of a dry run, as a problem keeps them (`PhaseTrace`)."""

from __future__ import annotations

from collections.abc import Sequence

from graphrun.model.phase_trace import CALL, CallTrace, Item, PhaseTrace
from graphrun.model.problem import Hardware
from graphrun.profile.recording import Call, Mark, Recording


def phase_traces_of(recording: Recording, spans: Sequence[tuple[int, int]], hardware: Hardware) -> list[PhaseTrace]:
    """The trace of each phase. ``spans``: half-open ranges of ``recording.entries()``, one for each phase.

    The first part ends where every component has been called and one is called again, as in `phase_memories_of`.
    """
    entries = recording.entries()
    members = [{call.component for _, call in entries[begin:end]} for begin, end in spans]
    starts = {begin: number for number, (begin, _) in enumerate(spans)}
    found: list[PhaseTrace] = []
    kinds: dict[int, int] = {}  # id of a call -> its number in the phase
    calls: list[CallTrace] = []
    parts: dict[str, list[Item]] = {"prelude": [], "first": [], "steady": []}
    part, position, not_entered = "prelude", 0, set[str]()
    for item in recording.items:
        if not isinstance(item, Mark):
            parts[part].append(item)
        elif item.call is not None:
            if position in starts:
                if position:
                    found.append(_trace(calls, parts))
                    kinds, calls, parts = {}, [], {name: [] for name in parts}
                part, not_entered = "first", set(members[starts[position]])
            elif not not_entered:
                part = "steady"
            not_entered.discard(item.name)
            if id(item.call) not in kinds:
                kinds[id(item.call)] = len(calls)
                calls.append(_call(item.call, hardware))
            parts[part].append((kinds[id(item.call)], CALL))
            position += 1
    return [*found, _trace(calls, parts)] if position else []


def _trace(calls: list[CallTrace], parts: dict[str, list[Item]]) -> PhaseTrace:
    return PhaseTrace(tuple(calls), tuple(parts["first"]), tuple(parts["steady"]), tuple(parts["prelude"]))


def _call(call: Call, hardware: Hardware) -> CallTrace:
    """``call`` as it allocates on ``hardware``: kernel scratch is a tensor that is released at once, or absent."""
    events: list[Item] = []
    for number, (key, nbytes) in enumerate(call.events, start=1):
        if nbytes >= 0:
            events.append((key, nbytes))
        elif hardware.convolution_scratch:
            events += [(-number, -nbytes - key * hardware.spares_large_copies), (-number, 0)]
    return CallTrace(call.component, tuple(events), call.kept)
