"""How far a run is: a bar on a terminal, a line per slot elsewhere. Decides nothing and measures nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console

from graphrun.planner.plan import Plan


class Progress:
    """A context manager, called with (slot, call, calls). Lines go to ``say``; None says and shows nothing."""

    def __init__(self, plan: Plan, say: Callable[[str], None] | None) -> None:
        self.plan = plan
        self.say = say
        self.console = Console(stderr=True)
        self.bar: Any = None
        self.task: Any = None
        self.slot = -1

    def __enter__(self) -> Progress:
        if self.say is not None and self.console.is_terminal:
            from rich.progress import Progress as Bar

            self.bar = Bar(console=self.console, transient=True)
            self.bar.start()
            self.task = self.bar.add_task("loading", total=sum(max(slot.calls, 1) for slot in self.plan.slots))
        return self

    def __call__(self, slot: int, call: int, calls: int) -> None:
        name = f"{self.plan.slots[slot].phase} {self.plan.slots[slot].part}".strip()
        if self.bar is not None:
            done = sum(max(s.calls, 1) for s in self.plan.slots[:slot]) + call
            self.bar.update(self.task, completed=done, description=f"{name} {call}/{calls}" if calls > 1 else name)
        elif self.say is not None and slot != self.slot:
            self.say(f"  slot {slot + 1}/{len(self.plan.slots)} {name}")
        self.slot = slot

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()
