"""The progress of a run or a batch, with the remaining time: a bar on a terminal, lines elsewhere.

Remaining time = predicted seconds of the remaining work * (measured / predicted seconds of the work done).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from graphrun.model.plan import Plan
from graphrun.model.simulation import Simulation
from graphrun.units import show_seconds

Say = Callable[[str], None]
Clock = Callable[[], float]


class Pace:
    """Predicted work compared with a clock. ``total_seconds`` and ``done_seconds`` are predicted seconds of work."""

    def __init__(self, total_seconds: float, clock: Clock = time.perf_counter) -> None:
        self.total_seconds, self.done_seconds = total_seconds, 0.0
        self._clock, self._start = clock, clock()

    def begin(self) -> None:
        """Starts the clock: what happened before (building modules) is not part of the prediction."""
        self._start = self._clock()

    @property
    def left_seconds(self) -> float:
        """Remaining seconds at the pace so far; the predicted ones where nothing is done yet."""
        remaining = max(0.0, self.total_seconds - self.done_seconds)
        return remaining * (self._clock() - self._start) / self.done_seconds if self.done_seconds > 0 else remaining

    def text(self) -> str:
        """``about 40 s left``."""
        return f"about {show_seconds(self.left_seconds)} left"


class Bar:
    """A progress bar on a terminal; shows nothing elsewhere. A context manager."""

    def __init__(self, on: bool) -> None:
        self.console = Console(stderr=True)
        self.shown = on and self.console.is_terminal
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Bar:
        if self.shown:
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Drawn

            self._bar = Drawn(TextColumn("{task.description}"), BarColumn(), console=self.console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task("loading", total=1.0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def to(self, share: float, text: str) -> None:
        """Sets the bar to ``share`` (0 to 1) with the description ``text``."""
        if self._bar is not None:
            self._bar.update(self._task, completed=share, description=text)


class Progress:
    """The progress of one run by ``plan``: a context manager, called with (slot, call, calls) at the start of each call.

    ``simulation`` predicts the seconds. ``say`` gets one line per slot; None shows nothing.
    """

    def __init__(self, plan: Plan, simulation: Simulation, say: Say | None, clock: Clock = time.perf_counter) -> None:
        self.slots = [f"{slot.phase} {slot.part}".strip() for slot in plan.slots]
        self.seconds = [slot.seconds for slot in simulation.slots]
        self.pace = Pace(sum(self.seconds), clock)
        self.say, self.bar, self.slot = say, Bar(say is not None), -1

    def __enter__(self) -> Progress:
        self.bar.__enter__()
        return self

    def __call__(self, slot: int, call: int, calls: int) -> None:
        slot = min(slot, len(self.slots) - 1)  # a replan of the remainder may have more slots
        if self.slot < 0:
            self.pace.begin()
        self.pace.done_seconds = seconds_before(self.seconds, slot, call, calls)
        name = f"{self.slots[slot]} {call}/{calls}" if calls > 1 else self.slots[slot]
        self.bar.to(self.pace.done_seconds / max(self.pace.total_seconds, 1e-12), f"{name}, {self.pace.text()}")
        if self.say is not None and not self.bar.shown and slot != self.slot:
            self.say(f"  slot {slot + 1}/{len(self.slots)} {self.slots[slot]}, {self.pace.text()}")
        self.slot = slot

    def __exit__(self, *_: object) -> None:
        self.bar.__exit__()


class BatchProgress:
    """The progress of a batch, with the methods of `graphrun.batch.watch.Watcher`.

    Shows a line per run with its stages, the mean seconds of a run and the remaining time; on a terminal a bar.
    """

    def __init__(self, requests: int, say: Say | None, clock: Clock = time.perf_counter) -> None:
        self.requests, self.finished, self.say = requests, 0, say
        self.bar, self.pace, self._clock = Bar(say is not None), Pace(0.0, clock), clock
        self._runs = self._begun = 0
        self._start = 0.0

    def __enter__(self) -> Self:
        self.bar.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.__exit__()

    def schedule(self, schedule: Any, counts: Mapping[str, int]) -> None:
        """A schedule begins."""
        self.pace = Pace(schedule.seconds, self._clock)
        self._line(
            f"  {schedule.requests} of {self.requests} requests, {schedule.name}: predicted {show_seconds(schedule.seconds)}"
        )

    def segment(self, segment: Any, runs: int) -> None:
        """A session of ``runs`` runs begins."""
        self._runs, self._begun, self._start = runs, 0, self._clock()
        if not self.pace.done_seconds:
            self.pace.begin()

    def run(self, segment: Any, request: Any) -> Callable[[int, int, int], None]:
        """A run begins. Returns its progress callback."""
        self._begun += 1
        simulation = segment.solution.simulation
        slots = simulation.again if self._begun > 1 and simulation.again else simulation.slots
        seconds, names, before = [slot.seconds for slot in slots], [slot.phase for slot in slots], self.pace.done_seconds
        stages, number = " ".join(segment.stages), self._begun
        rate = f", {show_seconds((self._clock() - self._start) / (number - 1))} each" if number > 1 else ""
        self._line(f"  {stages} {number}/{self._runs}{rate}, {self.pace.text()}")

        def called(slot: int, call: int, calls: int) -> None:
            slot = min(slot, len(names) - 1)  # a replan of the remainder may have more slots
            self.pace.done_seconds = before + seconds_before(seconds, slot, call, calls)
            step = f" {names[slot]} {call}/{calls}" if calls > 1 else ""
            share = self.pace.done_seconds / max(self.pace.total_seconds, 1e-12)
            self.bar.to(share, f"{stages} {number}/{self._runs}{step}{rate}, {self.pace.text()}")

        return called

    def done(self, request: Any, files: Sequence[Path]) -> None:
        """All outputs of a request are written."""
        self.finished += 1
        if files:
            self._line(f"  done {self.finished}/{self.requests}: {', '.join(map(str, files))}")

    def left_out(self, request: Any) -> None:
        """A request cannot be run, or its run failed."""
        if self.say is not None:
            self.say(f"graphrun: {request.where}: {request.error}")

    def restarts(self, stage: str, why: str) -> None:
        """A loop restarts at its first step after an interruption."""
        if self.say is not None:
            self.say(f"  {stage} restarts at its first step after an interruption: {why}")

    def _line(self, text: str) -> None:
        if self.say is not None and not self.bar.shown:
            self.say(text)


def seconds_before(seconds: Sequence[float], slot: int, call: int, calls: int) -> float:
    """Predicted seconds before call ``call`` (from 1) of ``calls`` in slot number ``slot``; ``seconds`` are those of the slots."""
    return sum(seconds[:slot]) + (seconds[slot] * max(0, call - 1) / calls if calls else 0.0)
