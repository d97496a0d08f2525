"""The progress of a run or a batch, with the remaining time: a bar on a terminal, lines elsewhere.

Remaining time = predicted seconds of the remaining work * (measured / predicted seconds of the work done).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from graphrun.model.plan import Plan
from graphrun.model.simulation import Simulation
from graphrun.reading import printable
from graphrun.units import show_seconds

Say = Callable[[str], None]
Clock = Callable[[], float]


class Shown:
    """Predicted work beside a clock, as a bar on a terminal and as lines elsewhere. A context manager.

    ``total_seconds`` and ``done_seconds`` are predicted seconds of work. ``say`` gets the lines; None: nothing is shown.
    """

    def __init__(self, total_seconds: float, say: Say | None, clock: Clock = time.perf_counter) -> None:
        self.say, self._clock, console = say, clock, Console(stderr=True)
        self.begin(total_seconds)
        hidden = say is None or not console.is_terminal
        columns = TextColumn("{task.description}", markup=False), BarColumn()
        self._bar = Bar(*columns, console=console, transient=True, disable=hidden)
        self._task = self._bar.add_task("loading", total=1.0)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, total_seconds: float) -> None:
        """Starts the clock: what happened before (building modules) is not part of the prediction."""
        self.total_seconds, self.done_seconds, self._start = total_seconds, 0.0, self._clock()

    @property
    def left(self) -> str:
        """Remaining seconds at the pace so far, or the predicted ones where nothing is done yet: ``about 40 s left``."""
        seconds = max(0.0, self.total_seconds - self.done_seconds)
        if self.done_seconds > 0:
            seconds = seconds * (self._clock() - self._start) / self.done_seconds
        return f"about {show_seconds(seconds)} left"

    def _reach(self, done_seconds: float, text: str) -> None:
        self.done_seconds = done_seconds
        share = done_seconds / max(self.total_seconds, 1e-12)
        self._bar.update(self._task, completed=share, description=printable(f"{text}, {self.left}"))

    def _line(self, text: str, *, always: bool = False) -> None:
        if self.say is not None and (always or self._bar.disable):
            self.say(text)


class Progress(Shown):
    """The progress of one run by ``plan``, called with (slot, call, calls) at the start of each call.

    ``simulation`` predicts the seconds. ``say`` gets one line per slot.
    """

    def __init__(self, plan: Plan, simulation: Simulation, say: Say | None, clock: Clock = time.perf_counter) -> None:
        self.slots = [f"{slot.phase} {slot.part}".strip() for slot in plan.slots]
        self.seconds = [slot.seconds for slot in simulation.slots]
        self.slot = -1
        super().__init__(sum(self.seconds), say, clock)

    def __call__(self, slot: int, call: int, calls: int) -> None:
        slot = min(slot, len(self.slots) - 1)  # a replan of the remainder may have more slots
        if self.slot < 0:
            self.begin(self.total_seconds)
        name = self.slots[slot]
        self._reach(seconds_before(self.seconds, slot, call, calls), f"{name} {call}/{calls}" if calls > 1 else name)
        if slot != self.slot:
            self._line(f"  slot {slot + 1}/{len(self.slots)} {name}, {self.left}")
        self.slot = slot


class BatchProgress(Shown):
    """The progress of a batch, with the methods of `graphrun.batch.watch.Watcher`.

    Shows a line per run with its stages, the mean seconds of a run and the remaining time; on a terminal a bar.
    """

    def __init__(self, requests: int, say: Say | None, clock: Clock = time.perf_counter) -> None:
        super().__init__(0.0, say, clock)
        self.requests, self.finished = requests, 0
        self._runs = self._begun = 0
        self._segment_start = 0.0

    def schedule(self, schedule: Any, counts: Mapping[str, int]) -> None:
        """A schedule begins."""
        self.begin(schedule.seconds)
        predicted = show_seconds(schedule.seconds)
        self._line(f"  {schedule.requests} of {self.requests} requests, {schedule.name}: predicted {predicted}")

    def segment(self, segment: Any, runs: int) -> None:
        """A session of ``runs`` runs begins."""
        self._runs, self._begun, self._segment_start = runs, 0, self._clock()
        if not self.done_seconds:
            self.begin(self.total_seconds)

    def run(self, segment: Any, request: Any) -> Callable[[int, int, int], None]:
        """A run begins. Returns its progress callback."""
        rate = f", {show_seconds((self._clock() - self._segment_start) / self._begun)} each" if self._begun else ""
        simulation = segment.solution.simulation
        slots = simulation.again if self._begun and simulation.again else simulation.slots
        self._begun += 1
        before, seconds = self.done_seconds, [slot.seconds for slot in slots]
        run = f"{' '.join(segment.stages)} {self._begun}/{self._runs}"
        self._line(f"  {run}{rate}, {self.left}")

        def called(slot: int, call: int, calls: int) -> None:
            slot = min(slot, len(slots) - 1)  # a replan of the remainder may have more slots
            step = f" {slots[slot].phase} {call}/{calls}" if calls > 1 else ""
            self._reach(before + seconds_before(seconds, slot, call, calls), f"{run}{step}{rate}")

        return called

    def done(self, request: Any, files: Sequence[Path]) -> None:
        """All outputs of a request are written."""
        self.finished += 1
        if files:
            self._line(f"  done {self.finished}/{self.requests}: {', '.join(map(str, files))}")

    def left_out(self, request: Any) -> None:
        """A request cannot be run, or its run failed."""
        self._line(f"graphrun: {request.where}: {request.error}", always=True)

    def restarts(self, stage: str, why: str) -> None:
        """A loop restarts at its first step after an interruption."""
        self._line(f"  {stage} restarts at its first step after an interruption: {why}", always=True)


def seconds_before(seconds: Sequence[float], slot: int, call: int, calls: int) -> float:
    """Predicted seconds before call ``call`` (from 1) of ``calls`` in slot number ``slot``; ``seconds`` are those of the slots."""
    return sum(seconds[:slot]) + (seconds[slot] * max(0, call - 1) / calls if calls else 0.0)
