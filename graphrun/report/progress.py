"""The progress of a run or a batch: a bar on a terminal, lines elsewhere.

Remaining time = predicted seconds of the remaining work * (measured / predicted seconds of the
finished work). In a loop, it is the measured seconds of a step * remaining steps, plus the work
after the loop at the pace so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as Bar

from graphrun.device_kinds import kind_called
from graphrun.model.plan import Plan
from graphrun.model.simulation import Simulation
from graphrun.reading import printable
from graphrun.units import show_seconds, show_size

Say = Callable[[str], None]
ClockFunction = Callable[[], float]
# suffix of files for outputs of an item, until the other items are done (`graphrun.batch.items`)
STATE = ".value"


class Shown:
    """Progress through predicted work, as a bar on a terminal and as lines elsewhere.

    A context manager. ``total_seconds`` and ``done_seconds``: predicted seconds of work. ``say``
    gets the lines; None: nothing is shown. Text written to stderr while the bar is shown goes above
    it.
    """

    def __init__(
        self, total_seconds: float, say: Say | None, clock: ClockFunction = time.perf_counter
    ) -> None:
        self.say, self._clock, console = say, clock, Console(stderr=True)
        self.begin(total_seconds)
        hidden = say is None or not console.is_terminal
        columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn()
        self._bar = Bar(*columns, console=console, transient=True, disable=hidden)
        self._task = self._bar.add_task("loading", total=1.0)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, total_seconds: float) -> None:
        """Start the clock. Earlier work, such as building modules, was not predicted."""
        self.total_seconds, self.done_seconds, self._start = total_seconds, 0.0, self._clock()

    def seconds_for(self, predicted_seconds: float) -> float:
        """Return the seconds that work takes at the pace so far; at first,
        ``predicted_seconds``."""
        pace = (self._clock() - self._start) / self.done_seconds if self.done_seconds > 0 else 1.0
        return max(0.0, predicted_seconds) * pace

    @property
    def remaining_time(self) -> str:
        """The remaining time: ``1:06 left``."""
        return f"{clocked(self.seconds_for(self.total_seconds - self.done_seconds))} left"

    def _reach(self, done_seconds: float, text: str) -> None:
        self.done_seconds = done_seconds
        share = done_seconds / max(self.total_seconds, 1e-12)
        self._bar.update(self._task, completed=share, description=printable(text))

    def _line(self, text: str, *, is_forced: bool = False) -> None:
        if self.say is not None and (is_forced or self._bar.disable):
            self.say(text)


STEPS = ("steps", "num_inference_steps")  # inputs with the number of steps of a loop
LINE_SECONDS = 10.0  # minimum time between lines about steps, without a terminal


class Progress(Shown):
    """The progress of one run by ``plan``, called with (slot, call, calls) when a call starts.

    ``simulation`` predicts the seconds. ``say`` gets a line for each phase, and for its steps at
    most every `LINE_SECONDS`. Seconds per step are measured from the second step on, since the
    first step may wait for weights. On the simulated device, predictions are in virtual seconds, so
    only steps have a remaining time.
    """

    def __init__(
        self,
        plan: Plan,
        simulation: Simulation,
        say: Say | None,
        clock: ClockFunction = time.perf_counter,
    ) -> None:
        self.slots, self.seconds = plan.slots, [slot.seconds for slot in simulation.slots]
        self._virtual = kind_called(simulation.problem.hardware.device).has_virtual_clock
        self.last, self._position = "", ("", -1)  # the phase and the step shown last
        self._steps = {
            int(text)
            for name, text in simulation.problem.settings
            if name in STEPS and text.isdigit()
        }
        # when the last line was printed, and when the phase's second step began
        self._line_time = self._second = 0.0
        super().__init__(sum(self.seconds), say, clock)

    def __call__(self, slot: int, call: int, calls: int) -> None:
        slot = min(slot, len(self.slots) - 1)  # a replan may have more slots
        if self._position[1] < 0:
            self.begin(self.total_seconds)
        phase, clock_seconds = self.slots[slot].phase, self._clock()
        step, steps = self._step(slot, call)
        is_new_phase = phase != self._position[0]
        if self._position == (phase, step):
            return
        self._position, self.done_seconds = (
            (phase, step),
            seconds_before(self.seconds, slot, call, calls),
        )
        self.last, left_text = (
            (f"step {step}/{steps}" if steps > 1 and step else phase or "end"),
            "",
        )
        if steps > 1 and step == 2:
            self._second = clock_seconds
        elif steps > 1 and step > 2:
            step_seconds = (clock_seconds - self._second) / (step - 2)
            predicted_seconds = sum(
                slot_seconds
                for slot_seconds, plan_slot in zip(
                    self.seconds[slot:], self.slots[slot:], strict=True
                )
                if plan_slot.phase != phase
            )
            rest_seconds = 0.0 if self._virtual else self.seconds_for(predicted_seconds)
            left_text = (
                f", {step_seconds:.1f} s/it, "
                f"{clocked((steps - step + 1) * step_seconds + rest_seconds)} left"
            )
        left_text = left_text or ("" if self._virtual else f", {self.remaining_time}")
        self._reach(self.done_seconds, self.last + left_text)
        if phase and (
            is_new_phase or step == steps > 1 or clock_seconds - self._line_time >= LINE_SECONDS
        ):
            self._line_time = clock_seconds
            self._line(f"  {self.last}{left_text}")

    def _step(self, slot: int, call: int) -> tuple[int, int]:
        """Return the step that this call of the slot belongs to, and the steps of its phase.

        The step is 0 before the first one. The number of steps comes from the graph's input if the
        phase's calls are a multiple of it; otherwise it is the number of calls.
        """
        of_phase = [
            (number, plan_slot.calls)
            for number, plan_slot in enumerate(self.slots)
            if plan_slot.phase == self.slots[slot].phase
        ]
        call_number = sum(calls for number, calls in of_phase if number < slot) + call
        total = sum(calls for _, calls in of_phase)
        steps = next((steps for steps in self._steps if steps and total % steps == 0), total)
        return (-(-call_number * steps // total) if total else 0), steps


class DownloadProgress(Shown):
    """The progress of a download (`graphrun.modules.hub.DownloadCallback`). The rate and the
    remaining time ignore bytes that an earlier command downloaded."""

    def __init__(
        self, name: str, say: Say | None, clock: ClockFunction = time.perf_counter
    ) -> None:
        self.name, self._line_time, self._activity = name, clock(), ""
        super().__init__(0.0, say, clock)

    def __call__(self, activity: str, done_bytes: int, total_bytes: int) -> None:
        if activity != self._activity:
            self._activity = activity
            self.begin(total_bytes)
        self.total_seconds, clock_seconds = total_bytes, self._clock()
        text = f"{activity} {self.name}: {show_size(done_bytes)} of {show_size(total_bytes)}"
        if done_bytes and clock_seconds > self._start:
            self.done_seconds = done_bytes
            text += (
                f", {show_size(done_bytes / (clock_seconds - self._start))}/s, "
                f"{self.remaining_time}"
            )
        self._reach(done_bytes, text)
        if clock_seconds - self._line_time >= LINE_SECONDS:
            self._line_time = clock_seconds
            self._line(f"  {text}")


class BatchProgress(Shown):
    """The progress of a batch, with the methods of `graphrun.batch.watch.Watcher`: a bar on a
    terminal, and a line per run with its stages, mean seconds and the remaining time."""

    def __init__(
        self, requests: int, say: Say | None, clock: ClockFunction = time.perf_counter
    ) -> None:
        super().__init__(0.0, say, clock)
        self.requests, self.finished = requests, 0
        self._runs = self._run_number = 0
        self._segment_start = 0.0

    def schedule(self, schedule: Any, counts: Mapping[str, int]) -> None:
        self.begin(schedule.seconds)
        predicted = show_seconds(schedule.seconds)
        self._line(
            f"  {schedule.requests} of {self.requests} requests, {schedule.name}: predicted "
            f"{predicted}"
        )

    def segment(self, segment: Any, runs: int) -> None:
        self._runs, self._run_number, self._segment_start = runs, 0, self._clock()
        if not self.done_seconds:
            self.begin(self.total_seconds)

    def run(self, segment: Any, request: Any) -> Callable[[int, int, int], None]:
        """Show that a run begins, and return its progress callback."""
        rate = (
            f", {show_seconds((self._clock() - self._segment_start) / self._run_number)} each"
            if self._run_number
            else ""
        )
        simulation = segment.solution.simulation
        slots = (
            simulation.further_slots
            if self._run_number and simulation.further_slots
            else simulation.slots
        )
        self._run_number += 1
        base_seconds, seconds = self.done_seconds, [slot.seconds for slot in slots]
        run = f"{' '.join(segment.stages)} {self._run_number}/{self._runs}"
        self._line(f"  {run}{rate}, {self.remaining_time}")

        def called(slot: int, call: int, calls: int) -> None:
            slot = min(slot, len(slots) - 1)  # a replan may have more slots
            step = f" {slots[slot].phase} {call}/{calls}" if calls > 1 else ""
            self._reach(
                base_seconds + seconds_before(seconds, slot, call, calls),
                f"{run}{step}{rate}, {self.remaining_time}",
            )

        return called

    def ran_on(self, device: str, stages: Sequence[str], request: Any, share: float) -> None:
        """Show that a device of a cluster ran ``stages``, and the finished share of the batch."""
        text = f"{device}: {' '.join(stages)} of request {request.number}, {share:.0%} done"
        self._reach(share * self.total_seconds, text)
        self._line(f"  {text}, {self.remaining_time}")

    def done(self, request: Any, files: Sequence[Path]) -> None:
        self.finished += 1
        if paths := [path for path in map(str, files) if not path.endswith(STATE)]:
            self._line(f"  done {self.finished}/{self.requests}: {', '.join(paths)}")

    def left_out(self, request: Any) -> None:
        self._line(f"graphrun: {request.location}: {request.error}", is_forced=True)

    def restarts(self, stage: str, reason: str) -> None:
        self._line(
            f"  {stage} restarts at its first step after an interruption: {reason}", is_forced=True
        )


def seconds_before(seconds: Sequence[float], slot: int, call: int, calls: int) -> float:
    """Return the predicted seconds before call ``call`` (from 1) of ``calls`` in slot ``slot``.
    ``seconds``: of each slot."""
    return sum(seconds[:slot]) + (seconds[slot] * max(0, call - 1) / calls if calls else 0.0)


def clocked(seconds: float) -> str:
    """Return ``seconds`` as ``1:06``, ``0:04`` or ``2:05:00``."""
    minutes, second = divmod(round(seconds), 60)
    return (
        f"{minutes // 60}:{minutes % 60:02}:{second:02}"
        if minutes >= 60
        else f"{minutes}:{second:02}"
    )
