"""The first line of each screen: one sentence that needs no knowledge of graphrun."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphrun.device_kinds import kind_called
from graphrun.graph.precisions import planned_only_reason
from graphrun.model.copies import copyable_to, least_copy_bytes
from graphrun.model.problem import Problem
from graphrun.model.ranges import probable_range
from graphrun.model.sequence import DividedRun
from graphrun.model.simulation import Simulation
from graphrun.model.solution import Solution
from graphrun.trace import Trace
from graphrun.units import GIB, KIB, MIB, roughly, show_size

# (kind of an output, its name on screens)
PRODUCTS = (
    ("video", "video"),
    ("image", "picture"),
    ("audio", "sound"),
)
# seconds without secondary devices relative to those with them, from which on they help
HELPS = 1.02
# inputs with the number of outputs of a run
COUNTS = (
    "batch",
    "num_images_per_prompt",
    "num_videos_per_prompt",
)


def product_name(kinds: Mapping[str, str], settings: Mapping[str, str]) -> str:
    """Return what a run makes: ``a picture``, ``4 pictures``, ``a video``; ``a run`` for tensors.
    ``kinds``: `Graph.kinds`."""
    product = next((name for kind, name in PRODUCTS if kind in kinds.values()), "run")
    count = next((settings[name] for name in COUNTS if name in settings), "1")
    return (
        f"a {product}"
        if count == "1" or not count.isdigit() or product == "run"
        else f"{count} {product}s"
    )


def clock_text(device: str) -> str:
    """Return the text that names the clock of a run on the kind ``device``."""
    return kind_called(device).clock


def location(*, unified: bool) -> str:
    """Return where a device's weights are. ``unified``: as `Hardware.unified`."""
    return "in memory" if unified else "on the device"


def budget_text(problem: Problem) -> str:
    """Return the budget of the device, as the title of a line."""
    title = "memory" if problem.hardware.unified else "budget"
    return f"{title} {show_size(problem.budget_bytes)}"


def plan_verdict(solution: Solution, product: str = "a run") -> str:
    """Return whether the plan fits, its time, its memory, and what it waits for. Memory is counted
    as nvidia-smi, or on a CPU the kernel, shows it."""
    problem, simulation = solution.problem, solution.simulation
    time = f"{roughly(simulation.seconds)} {product}"
    if problem.runs > 1:
        time = (
            f"{roughly(simulation.seconds)} for {product} at first, then "
            f"{roughly(simulation.further_seconds)} each"
        )
    precisions = {item.name: item.variants[0].precision for item in solution.components}
    mark = ", but planned only" if planned_only_reason(precisions) else ""
    return (
        f"fits: yes{mark}. {time} on {_device(problem, simulation)}, "
        f"{_used(problem, simulation.peak_bytes)}{_waits(simulation)}"
    )


def run_verdict(solution: Solution, trace: Trace) -> str:
    """Return the measured and planned time and memory of a run."""
    problem, planned_time = solution.problem, roughly(solution.simulation.seconds)
    if range_text := _range(problem, solution.simulation, reasons=True):
        planned_time += f", {range_text}"
    clock = " of virtual time" if kind_called(trace.device).has_virtual_clock else ""
    matched = "more than planned" if trace.overruns else "as planned"
    time_text = f"{roughly(trace.seconds)}{clock} (planned {planned_time})"
    memory = _used(problem, trace.peak_bytes)
    place = "" if problem.hardware.unified else f" on {problem.hardware.name}"
    return f"done: {time_text}, {memory}{place} ({matched})"


def _device(problem: Problem, simulation: Simulation) -> str:
    """Return the device with the basis of its figures; for a data-sheet estimate, with the range of
    the seconds: ``(data sheet: 37 to 58 s)``."""
    range_text = _range(problem, simulation)
    basis = ": ".join(filter(None, (problem.hardware.basis, range_text)))
    return f"{problem.hardware.name} ({basis})"


def _range(problem: Problem, simulation: Simulation, *, reasons: bool = False) -> str:
    """Return the probable range of a data-sheet estimate, with ``reasons`` why it is wide; else
    nothing."""
    seconds = simulation.seconds
    likely = probable_range(problem.hardware, seconds, seconds - simulation.compute_seconds)
    low, high = map(roughly, likely.bounds)
    if low == high or problem.hardware.basis != "data sheet":
        return ""
    (number, unit), high_words = low.rsplit(" ", 1), high.split(" ")
    low = number if high_words[1:] == [unit] and " " not in number else low
    return f"{low} to {high}{f', {likely.reason}' if reasons else ''}"


def _used(problem: Problem, peak_bytes: int) -> str:
    """Return the peak and the total, such as ``7.4 of 8 GiB``. The peak has tensors, context,
    workspace and reserve. The total is the smaller of the budget and the device's memory."""
    total = min(problem.budget_bytes, problem.hardware.capacity_bytes)
    name, unit = next(
        ((name, unit) for name, unit in (("GiB", GIB), ("MiB", MIB)) if total >= unit), ("KiB", KIB)
    )
    whole = f"{total / unit:.1f}".removesuffix(".0")
    peak = (total - problem.effective_bytes + peak_bytes) / unit
    return f"{peak:.1f} of {whole} {name}{' of memory' if problem.hardware.unified else ''}"


def _waits(simulation: Simulation) -> str:
    """Return how long nothing computes, and why; empty below a twentieth of the time.

    A slot waits for the disk while the disk is busy, at most as long as the slot waits. On unified
    memory copies are reads.
    """
    waits = sum(slot.stall_seconds for slot in simulation.slots)
    if waits < 0.05 * simulation.seconds:
        return ""
    disk = waits
    if not simulation.problem.hardware.unified:
        disk = sum(
            min(slot.stall_seconds, simulation.disk_seconds(number))
            for number, slot in enumerate(simulation.slots)
        )
    return (
        f"; {roughly(disk)} waiting for the disk"
        if disk >= waits / 2
        else f"; {roughly(waits - disk)} waiting for copies"
    )


MODES = {
    "model": "model offloading",
    "sequential": "sequential offloading",
    "group": "group offloading by block",
    "leaf": "group offloading by leaf",
}


def mode_text(estimate: Mapping[str, Any]) -> str:
    """Return the name of the estimate's mode."""
    name = estimate["mode"]["name"]
    place = location(unified=estimate["hardware"]["unified"])
    return f"everything {place}" if name == "resident" else MODES[name]


def estimate_verdict(estimate: Mapping[str, Any]) -> str:
    """Return the first line of an estimate: the memory its mode takes, and whether it fits."""
    hardware, whole = estimate["hardware"], estimate["mode"]
    fit = "fits" if whole["peak_bytes"] <= hardware["capacity_bytes"] else "does not fit"
    device = (
        ""
        if kind_called(hardware["device"]).free_memory == "none"
        else f": {fit} in {show_size(hardware['capacity_bytes'])} of memory"
        if hardware["unified"]
        else f": {fit} on {hardware['name']} ({hardware['capacity_bytes'] / GIB:.0f} GiB)"
    )
    size = (
        f"{whole['peak_bytes'] / GIB:.1f} GiB"
        if whole["peak_bytes"] >= GIB
        else f"{whole['peak_bytes'] / MIB:.1f} MiB"
    )
    seconds = roughly(whole["seconds"])
    return f"needs {size} with {mode_text(estimate)}{device}; takes {seconds}"


def gain_text(solution: Solution, seconds_alone: float | None, *, may_split: bool = False) -> str:
    """Return what the secondary devices of ``solution`` save, and where they would help more.

    ``seconds_alone``: of all runs on the main device alone; None: nothing fits it. ``may_split``: a
    caller may allow that a denoiser is called once per sample.
    """
    problem = solution.problem
    names = " and ".join(
        f"device{number} ({secondary.hardware.name})"
        for number, secondary in enumerate(problem.secondaries, 1)
    )
    seconds = solution.seconds
    copies_text = _copies_text(solution, may_split)
    if seconds_alone is None:
        return f"without {names} nothing fits{copies_text}"
    alone_text = f"the first device alone takes {roughly(seconds_alone / problem.runs)} a run"
    if problem.runs > 1:  # the first line names the first run and later ones
        alone_text += f" on average, this plan {roughly(seconds / problem.runs)}"
    saves = "saves" if len(problem.secondaries) == 1 else "save"
    if seconds_alone < HELPS * seconds:
        return (
            f"{names} {saves} nothing here: {alone_text}{copies_text}. "
            "Another card helps with many pictures, as a second copy of the model: "
            "graphrun plan --cluster (docs/howto/cluster.md)"
        )
    return f"{names} {saves} {1 - seconds / seconds_alone:.0%}: {alone_text}{copies_text}"


def divided_text(divided: DividedRun) -> str:
    """Return what a run takes with one process for each device, which divide the sequence."""
    if divided.refusal:
        return f"The sequence cannot be divided over the devices: {divided.refusal}"
    if divided.solution is None:
        return "With the sequence divided over the devices nothing fits"
    problem = divided.solution.problem
    seconds = divided.solution.seconds / problem.runs
    return (
        f"With the sequence divided over the devices, a run takes {roughly(seconds)}, of which "
        f"transfers take {roughly(divided.transfer_seconds)} ({show_size(divided.transfer_bytes)} "
        "each way): docs/howto/two-cards.md"
    )


def _copies_text(solution: Solution, may_split: bool) -> str:
    """Return how guidance runs in parallel, or why not; "" if it makes one call a step.

    ``may_split``: as for `gain_text`.
    """
    problem, texts = solution.problem, list[str]()
    if solution.plan.copies:
        copies = " and ".join(f"{name} on device{number}" for name, number in solution.plan.copies)
        return f"; both calls of guidance run at once, with a copy of {copies}"
    options = (phase for option in problem.options for phase in option.phases)
    phases = (*problem.phases, *options)
    pairs = {use.component for phase in phases for use in phase.uses if use.pairs}
    if may_split and not pairs:
        return (
            "; --allow split lets both halves of guidance run at once (rounding changes pictures "
            "slightly)"
        )
    for name in sorted(pairs):
        needs = {
            number: least_copy_bytes(problem, name, number) for number in copyable_to(problem, name)
        }
        if not needs:
            continue
        number = max(needs, key=lambda n: problem.secondaries[n - 1].effective_bytes - needs[n])
        available = problem.secondaries[number - 1].effective_bytes
        texts.append(
            f"a copy of {name} on device{number} needs {show_size(needs[number])} of "
            f"{show_size(available)}"
            if needs[number] > available
            else f"a copy of {name} on device{number} is not faster"
        )
    return f"; both calls of guidance at once: {', '.join(texts)}" if texts else ""
