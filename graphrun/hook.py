"""What code of the caller may see of a run: a hook, with a method for each moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphrun.model.plan import Slot
    from graphrun.trace import SlotTrace


class Hook:
    """Sees a run while it happens. These methods do nothing; override the ones you need.

    Pass one as ``progress`` of `graphrun.run` and `graphrun.Session`, or as ``hook`` of
    `graphrun.attach`. The thread of the run calls the methods. An error that one of them raises
    ends the run, as an error of the pipeline does. A hook may keep no tensor of a run: bytes that
    stay on the device end it with BrokenPlan.
    """

    def slot_opens(self, index: int, slot: Slot) -> None:
        """Slot ``index`` of the current plan is about to perform its actions."""

    def call_begins(
        self, component: str, entry: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """A call into ``component`` is about to compute; its weights are placed, or on their way.

        ``entry``: ``forward``, the name of another method, or the path of a module inside.
        """

    def call_ends(self, component: str, entry: str, result: Any) -> None:
        """The call has returned ``result``. A device may still be computing it."""

    def slot_closes(self, index: int, slot_trace: SlotTrace) -> None:
        """All compute and copies of slot ``index`` are done."""


class _CountingHook(Hook):
    """Passes the counts of slots and calls to ``progress``."""

    def __init__(self, progress: Callable[[int, int, int], None]) -> None:
        self._progress = progress
        self._index, self._planned_calls = 0, 0
        self._calls: Counter[str] = Counter()  # in the open slot, by component

    def slot_opens(self, index: int, slot: Slot) -> None:
        self._index, self._planned_calls, self._calls = index, slot.calls, Counter()
        self._progress(index, 0, slot.calls)

    def call_begins(
        self, component: str, entry: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._calls[component] += 1
        self._progress(self._index, max(self._calls.values()), self._planned_calls)


ProgressCallback = Callable[[int, int, int], None] | Hook
"""A hook; or a function that is called when a slot opens and at each call, with the index of the
slot, the number of the call in it (0: the slot opens), and its planned calls."""


def hook_of(progress: ProgressCallback | None) -> Hook:
    """Return ``progress`` as a hook."""
    if progress is None:
        return Hook()
    return progress if isinstance(progress, Hook) else _CountingHook(progress)
