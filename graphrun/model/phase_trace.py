"""What the dry run recorded of a phase's device memory: every allocation and release, in order. Pure data.

prelude    before the phase's first call, where no phase came before
first      the first call of every component, and the code after it
steady     all further calls
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

# (key, bytes): bytes > 0 allocates, 0 releases. In a `PhaseTrace` also (number of the call's kind, -1): a call.
Item = tuple[int, int]
CALL = -1
SCRATCH = -(2**40)  # keys of scratch are below; no recording has these


@dataclass(frozen=True, slots=True)
class CallTrace:
    """One kind of call into ``component``. Every key is released before the end, except ``kept`` ones, which the component reuses
    in its further calls and releases when the phase ends."""

    component: str
    events: tuple[Item, ...]
    kept: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PhaseTrace:
    """One phase; empty where nothing was recorded. Keys are those of the whole recording, so a tensor may be allocated in one phase
    and released in a later one."""

    calls: tuple[CallTrace, ...] = ()
    first: tuple[Item, ...] = ()
    steady: tuple[Item, ...] = ()
    prelude: tuple[Item, ...] = ()

    def with_scratch(self, nbytes: Mapping[str, int]) -> PhaseTrace:
        """The trace where every call of a component takes so many bytes more while it runs."""
        extra = {name: n for name, n in nbytes.items() if n}
        if not extra:
            return self
        calls = (
            replace(call, events=((key := SCRATCH - len(call.events), extra[call.component]), *call.events, (key, 0)))
            if call.component in extra
            else call
            for call in self.calls
        )
        return replace(self, calls=tuple(calls))
