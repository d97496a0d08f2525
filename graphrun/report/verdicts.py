"""The first line of each screen: one sentence that needs no knowledge of graphrun."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphrun.model.problem import Problem
from graphrun.model.simulation import Simulation
from graphrun.model.solution import Solution
from graphrun.trace import Trace
from graphrun.units import GIB, KIB, MIB, roughly

# kind of an output, what it is called
MADE = (
    ("video", "video"),
    ("image", "picture"),
    ("audio", "sound"),
)
# inputs that say how many of them a run makes
COUNTS = (
    "batch",
    "num_images_per_prompt",
    "num_videos_per_prompt",
)


def made_by(kinds: Mapping[str, str], settings: Mapping[str, str]) -> str:
    """What a run makes: ``a picture``, ``4 pictures``, ``a video``, ``a run`` for tensors.
    ``kinds``: `Graph.kinds`."""
    what = next((name for kind, name in MADE if kind in kinds.values()), "run")
    count = next((settings[name] for name in COUNTS if name in settings), "1")
    return (
        f"a {what}" if count == "1" or not count.isdigit() or what == "run" else f"{count} {what}s"
    )


def fits(solution: Solution, made: str = "a run") -> str:
    """Whether the plan fits, its time, its memory as nvidia-smi would show it, and what it waits
    for."""
    problem, simulation = solution.problem, solution.simulation
    time = f"{roughly(simulation.seconds)} {made}"
    if problem.runs > 1:
        time = f"{roughly(simulation.seconds)} for {made} at first, then {roughly(simulation.again_seconds)} each"
    return f"fits: yes. {time} on {_device(problem, simulation.seconds)}, {_used(problem, simulation.peak_bytes)}{_waits(simulation)}"


def done(solution: Solution, trace: Trace) -> str:
    """The time and the memory of a run, each beside the plan's, and whether the run matched the
    plan."""
    problem, planned = solution.problem, roughly(solution.simulation.seconds)
    clock = " of virtual time" if trace.device == "sim" else ""
    matched = "more than planned" if trace.overruns else "as planned"
    took = f"{roughly(trace.seconds)}{clock} (planned {planned})"
    return f"done: {took}, {_used(problem, trace.peak_bytes)} on {problem.hardware.name}, {matched}"


def _device(problem: Problem, seconds: float) -> str:
    """The device with the basis of its seconds, and the range of ``seconds`` where they are a
    prior's: ``(prior: 37 to 58 s)``."""
    low, high = map(roughly, problem.hardware.seconds_range(seconds))
    number, _, unit = low.rpartition(" ")
    low = number if high.endswith(f" {unit}") and " " not in number else low
    within = f": {low} to {high}" if low != high and problem.hardware.basis == "prior" else ""
    return f"{problem.hardware.name} ({problem.hardware.basis}{within})"


def _used(problem: Problem, peak_bytes: int) -> str:
    """``7.4 of 8 GiB``: the peak of tensors, context, workspace and reserve, of the budget or of
    the device where it is smaller."""
    total = min(problem.budget_bytes, problem.hardware.capacity_bytes)
    name, unit = next(
        ((name, unit) for name, unit in (("GiB", GIB), ("MiB", MIB)) if total >= unit), ("KiB", KIB)
    )
    whole = f"{total / unit:.1f}".removesuffix(".0")
    return f"{(total - problem.effective_bytes + peak_bytes) / unit:.1f} of {whole} {name}"


def _waits(simulation: Simulation) -> str:
    """How long nothing computes, and why; nothing where that is under a twentieth of the time.

    A slot waits for the disk while the disk is busy, at most as long as the slot waits.
    """
    busy = dict[int, float]()
    for event in simulation.events:
        if event.kind in ("read", "fetch"):
            busy[event.slot] = busy.get(event.slot, 0.0) + event.end_seconds - event.start_seconds
    waits = sum(slot.stall_seconds for slot in simulation.slots)
    disk = sum(
        min(slot.stall_seconds, busy.get(number, 0.0))
        for number, slot in enumerate(simulation.slots)
    )
    if waits < 0.05 * simulation.seconds:
        return ""
    return (
        f"; {roughly(disk)} wait for disk"
        if disk >= waits / 2
        else f"; {roughly(waits - disk)} wait for copies"
    )


MODES = {
    "resident": "everything on the device",
    "model": "model offloading",
    "sequential": "sequential offloading",
    "group": "group offloading by block",
    "leaf": "group offloading by leaf",
}


def needs(estimate: Mapping[str, Any]) -> str:
    """The first line of an estimate: what it takes as its mode places it, and what the device
    has."""
    hardware, whole = estimate["hardware"], estimate["mode"]
    fit = "fits" if whole["peak_bytes"] <= hardware["capacity_bytes"] else "does not fit"
    device = (
        f": {fit} on {hardware['name']} ({hardware['capacity_bytes'] / GIB:.0f} GiB)"
        if hardware["name"] != "sim"
        else ""
    )
    size = (
        f"{whole['peak_bytes'] / GIB:.1f} GiB"
        if whole["peak_bytes"] >= GIB
        else f"{whole['peak_bytes'] / MIB:.1f} MiB"
    )
    return f"needs {size} with {MODES[whole['name']]}{device}; takes {roughly(whole['seconds'])}"
