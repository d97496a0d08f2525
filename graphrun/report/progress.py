"""The progress of a run or a batch, with the remaining time: a bar on a terminal, lines elsewhere.

Remaining time = predicted seconds of the remaining work * (measured / predicted seconds of the work
done); in a loop the measured seconds of a step * remaining steps, and so for the work after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as Bar

from graphrun.model.plan import Plan
from graphrun.model.simulation import Simulation
from graphrun.reading import printable
from graphrun.units import show_seconds, show_size

Say = Callable[[str], None]
Clock = Callable[[], float]
# of the files in which outputs of an item wait for those of the others (`graphrun.batch.items`)
STATE = ".value"


class Shown:
    """Predicted work beside a clock, as a bar on a terminal and as lines elsewhere. A context
    manager.

    ``total_seconds`` and ``done_seconds`` are predicted seconds of work. ``say`` gets the lines;
    None: nothing is shown. What is written to stderr while the bar is there goes above it.
    """

    def __init__(
        self, total_seconds: float, say: Say | None, clock: Clock = time.perf_counter
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
        """Starts the clock: what happened before (building modules) is not part of the
        prediction."""
        self.total_seconds, self.done_seconds, self._start = total_seconds, 0.0, self._clock()

    def seconds_for(self, predicted_seconds: float) -> float:
        """Seconds that work of so many predicted seconds takes at the pace so far, or as predicted
        where nothing is done yet."""
        pace = (self._clock() - self._start) / self.done_seconds if self.done_seconds > 0 else 1.0
        return max(0.0, predicted_seconds) * pace

    @property
    def left(self) -> str:
        """The remaining time: ``1:06 left``."""
        return f"{clocked(self.seconds_for(self.total_seconds - self.done_seconds))} left"

    def _reach(self, done_seconds: float, text: str) -> None:
        self.done_seconds = done_seconds
        share = done_seconds / max(self.total_seconds, 1e-12)
        self._bar.update(self._task, completed=share, description=printable(text))

    def _line(self, text: str, *, always: bool = False) -> None:
        if self.say is not None and (always or self._bar.disable):
            self.say(text)


STEPS = ("steps", "num_inference_steps")  # inputs that say how many steps a loop has
LINE_SECONDS = 10.0  # at most so often a step is said where there is no terminal


class Progress(Shown):
    """The progress of one run by ``plan``, called with (slot, call, calls) at the start of each
    call.

    ``simulation`` predicts the seconds. ``say`` gets a line for each phase, and for its steps at
    most every `LINE_SECONDS`. Seconds per step are measured from the second step on, since the
    first one may wait for weights. On the simulated device predictions are in virtual seconds: only
    steps have a remaining time.
    """

    def __init__(
        self, plan: Plan, simulation: Simulation, say: Say | None, clock: Clock = time.perf_counter
    ) -> None:
        self.slots, self.seconds = plan.slots, [slot.seconds for slot in simulation.slots]
        self._virtual = simulation.problem.hardware.device == "sim"
        self.last, self._at = "", ("", -1)  # the phase and the step shown last
        self._steps = {
            int(text)
            for name, text in simulation.problem.settings
            if name in STEPS and text.isdigit()
        }
        # when the last line was said, and when the phase's second step began
        self._said = self._second = 0.0
        super().__init__(sum(self.seconds), say, clock)

    def __call__(self, slot: int, call: int, calls: int) -> None:
        slot = min(slot, len(self.slots) - 1)  # a replan of the remainder may have more slots
        if self._at[1] < 0:
            self.begin(self.total_seconds)
        phase, now = self.slots[slot].phase, self._clock()
        step, steps = self._step(slot, call)
        begins = phase != self._at[0]
        if self._at == (phase, step):
            return
        self._at, self.done_seconds = (phase, step), seconds_before(self.seconds, slot, call, calls)
        self.last, left = (f"step {step}/{steps}" if steps > 1 and step else phase or "end"), ""
        if steps > 1 and step == 2:
            self._second = now
        elif steps > 1 and step > 2:
            each = (now - self._second) / (step - 2)
            after = sum(
                of
                for of, own in zip(self.seconds[slot:], self.slots[slot:], strict=True)
                if own.phase != phase
            )
            rest = 0.0 if self._virtual else self.seconds_for(after)
            left = f", {each:.1f} s/it, {clocked((steps - step + 1) * each + rest)} left"
        left = left or ("" if self._virtual else f", {self.left}")
        self._reach(self.done_seconds, self.last + left)
        if phase and (begins or step == steps > 1 or now - self._said >= LINE_SECONDS):
            self._said = now
            self._line(f"  {self.last}{left}")

    def _step(self, slot: int, call: int) -> tuple[int, int]:
        """The step that this call of the slot belongs to, 0 before the first one, and the steps of
        its phase.

        They are as many as the graph's input says where the phase's calls are a multiple of them,
        else its calls.
        """
        of_phase = [
            (number, of.calls)
            for number, of in enumerate(self.slots)
            if of.phase == self.slots[slot].phase
        ]
        done = sum(calls for number, calls in of_phase if number < slot) + call
        total = sum(calls for _, calls in of_phase)
        steps = next((steps for steps in self._steps if steps and total % steps == 0), total)
        return (-(-done * steps // total) if total else 0), steps


class DownloadProgress(Shown):
    """The progress of a download, called with what is done, the bytes done, and the bytes in all
    (`graphrun.modules.hub.Progress`).

    Bytes per second and the time left are of this call of the command: what an earlier one had
    downloaded took no time.
    """

    def __init__(self, name: str, say: Say | None, clock: Clock = time.perf_counter) -> None:
        self.name, self._said, self._doing = name, clock(), ""
        super().__init__(0.0, say, clock)

    def __call__(self, doing: str, done: int, total: int) -> None:
        if doing != self._doing:
            self._doing = doing
            self.begin(total)
        self.total_seconds, now = total, self._clock()
        text = f"{doing} {self.name}: {show_size(done)} of {show_size(total)}"
        if done and now > self._start:
            self.done_seconds = done
            text += f", {show_size(done / (now - self._start))}/s, {self.left}"
        self._reach(done, text)
        if now - self._said >= LINE_SECONDS:
            self._said = now
            self._line(f"  {text}")


class BatchProgress(Shown):
    """The progress of a batch, with the methods of `graphrun.batch.watch.Watcher`.

    Shows a line per run with its stages, the mean seconds of a run and the remaining time; on a
    terminal a bar.
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
        self._line(
            f"  {schedule.requests} of {self.requests} requests, {schedule.name}: predicted {predicted}"
        )

    def segment(self, segment: Any, runs: int) -> None:
        """A session of ``runs`` runs begins."""
        self._runs, self._begun, self._segment_start = runs, 0, self._clock()
        if not self.done_seconds:
            self.begin(self.total_seconds)

    def run(self, segment: Any, request: Any) -> Callable[[int, int, int], None]:
        """A run begins. Returns its progress callback."""
        rate = (
            f", {show_seconds((self._clock() - self._segment_start) / self._begun)} each"
            if self._begun
            else ""
        )
        simulation = segment.solution.simulation
        slots = simulation.again if self._begun and simulation.again else simulation.slots
        self._begun += 1
        before, seconds = self.done_seconds, [slot.seconds for slot in slots]
        run = f"{' '.join(segment.stages)} {self._begun}/{self._runs}"
        self._line(f"  {run}{rate}, {self.left}")

        def called(slot: int, call: int, calls: int) -> None:
            slot = min(slot, len(slots) - 1)  # a replan of the remainder may have more slots
            step = f" {slots[slot].phase} {call}/{calls}" if calls > 1 else ""
            self._reach(
                before + seconds_before(seconds, slot, call, calls),
                f"{run}{step}{rate}, {self.left}",
            )

        return called

    def ran_on(self, device: str, stages: Sequence[str], request: Any, share: float) -> None:
        """A device of a cluster ran ``stages``, and a share of the batch is done."""
        text = f"{device}: {' '.join(stages)} of request {request.number}, {share:.0%} done"
        self._reach(share * self.total_seconds, text)
        self._line(f"  {text}, {self.left}")

    def done(self, request: Any, files: Sequence[Path]) -> None:
        """All outputs of a request are written."""
        self.finished += 1
        if shown := [path for path in map(str, files) if not path.endswith(STATE)]:
            self._line(f"  done {self.finished}/{self.requests}: {', '.join(shown)}")

    def left_out(self, request: Any) -> None:
        """A request cannot be run, or its run failed."""
        self._line(f"graphrun: {request.where}: {request.error}", always=True)

    def restarts(self, stage: str, why: str) -> None:
        """A loop restarts at its first step after an interruption."""
        self._line(
            f"  {stage} restarts at its first step after an interruption: {why}", always=True
        )


def seconds_before(seconds: Sequence[float], slot: int, call: int, calls: int) -> float:
    """Predicted seconds before call ``call`` (from 1) of ``calls`` in slot number ``slot``;
    ``seconds`` are those of the slots."""
    return sum(seconds[:slot]) + (seconds[slot] * max(0, call - 1) / calls if calls else 0.0)


def clocked(seconds: float) -> str:
    """``1:06``, ``0:04``, ``2:05:00``."""
    minutes, second = divmod(round(seconds), 60)
    return (
        f"{minutes // 60}:{minutes % 60:02}:{second:02}"
        if minutes >= 60
        else f"{minutes}:{second:02}"
    )
