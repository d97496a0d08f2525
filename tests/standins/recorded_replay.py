"""The events of a whole plan: what its replay (`graphrun.verify.pages`) allocates, releases and
trims."""

from __future__ import annotations

from typing import NamedTuple
from unittest.mock import patch

from graphrun.model.allocator import Caching
from graphrun.model.plan import Plan
from graphrun.model.problem import Problem
from graphrun.verify.pages import reserved_bytes


class Event(NamedTuple):
    """``action``: ``allocate``, ``release`` or ``trim``, a method of an allocator model, with its
    ``arguments``. ``reserved_bytes``: after it."""

    action: str
    arguments: tuple[int, ...]
    reserved_bytes: int


class Recorded(Caching):
    """Notes every event. No two states are equal, so every call is replayed. What is allocated
    where it was just released is renamed."""

    def __init__(self, page_scale: float, card_bytes: int) -> None:
        super().__init__(page_scale, card_bytes)
        self.events: list[Event] = []
        self._free_places: dict[tuple[bool, tuple[int, ...]], int] = {}  # not noted yet
        self._first_keys: dict[int, int] = {}
        self._sizes: dict[int, int] = {}

    def state(self, small: bool) -> int:
        return len(self.events)

    def allocate(self, key: int, nbytes: int) -> None:
        self._note_released()
        super().allocate(key, nbytes)
        self._sizes[key] = nbytes
        self.events.append(Event("allocate", (key, nbytes), self.used_bytes))

    def release(self, key: int) -> None:
        small, place = self.is_small(self._sizes[key]), self.place(key)
        super().release(key)
        self._free_places[small, place] = key

    def allocate_at(self, key: int, small: bool, place: tuple[int, ...]) -> None:
        super().allocate_at(key, small, place)
        previous = self._free_places.pop((small, place))
        self._first_keys[key], self._sizes[key] = (
            self._first_keys.get(previous, previous),
            self._sizes[previous],
        )

    def trim(self) -> None:
        self._note_released()
        super().trim()
        self.events.append(Event("trim", (), self.used_bytes))

    def _note_released(self) -> None:
        keys = [self._first_keys.get(key, key) for key in self._free_places.values()]
        self.events += [Event("release", (key,), self.used_bytes) for key in keys]
        self._free_places.clear()


def replay_events(problem: Problem, plan: Plan) -> list[Event]:
    """Return the events of ``plan`` on the main device. ``problem``: with its choices applied."""
    allocators: list[Recorded] = []

    def allocator(page_scale: float, card_bytes: int) -> Recorded:
        allocators.append(Recorded(page_scale, card_bytes))
        return allocators[0]

    with patch("graphrun.verify.pages.Caching", allocator):
        reserved_bytes(problem, plan)
    return allocators[0].events
