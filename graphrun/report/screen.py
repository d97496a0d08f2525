"""The screens of ``plan``, ``explain``, ``check`` and ``run`` as text: tables, a timeline, slots, planned and measured numbers."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from graphrun.model.plan import Load, Plan, Slot, Stream, action_text
from graphrun.model.problem import Problem
from graphrun.model.simulation import Simulation, SlotReport
from graphrun.model.solution import Solution
from graphrun.report.summary import broken_caps
from graphrun.report.table import scale_of, seconds_of, size, table
from graphrun.trace import Trace
from graphrun.units import gib, show_seconds, show_size


def plan_screen(solution: Solution, solve_seconds: float | None = None) -> str:
    """What ``graphrun plan`` shows: totals, a row per phase, a timeline, and why components are streamed."""
    problem, plan, simulation = solution.chosen, solution.plan, solution.simulation
    parts = [_head(solution, simulation, solve_seconds), _phases(problem, simulation.slots), _timeline(problem, plan.slots, ())]
    if plan.again:
        parts += [f"every further run: {show_seconds(simulation.again_seconds)}", _phases(problem, simulation.again)]
        parts.append(_timeline(problem, plan.again, plan.slots))
    parts.append(_why(solution))
    return "\n\n".join(part for part in parts if part)


def _head(solution: Solution, simulation: Simulation, solve_seconds: float | None) -> str:
    problem, hardware = solution.problem, solution.problem.hardware
    overhead = problem.budget_bytes - problem.effective_bytes - problem.reserve_bytes
    peak = max(simulation.slots, key=lambda slot: slot.peak_bytes)
    settings = " ".join(f"{name}={value}" for name, value in problem.settings)
    exposed = max(0.0, simulation.seconds - simulation.compute_seconds)
    best = proof(solution, simulation.total_seconds)
    solved = f", {show_seconds(solve_seconds)} to solve" if solve_seconds is not None else ""
    budget = show_size(problem.budget_bytes)
    if overhead:
        reserve = f"{gib(problem.reserve_bytes)} reserve + " if problem.reserve_bytes else ""
        budget += f" = {gib(overhead)} context and workspace + {reserve}{gib(problem.effective_bytes)}"
    elif problem.reserve_bytes:
        budget += f" = {show_size(problem.reserve_bytes)} reserve + {show_size(problem.effective_bytes)}"
    directives = ", ".join(f"{of.placement} {of.component}" for of in problem.directives)
    session = f"; {problem.runs} runs take {show_seconds(simulation.total_seconds)}" if problem.runs > 1 else ""
    return "\n".join(
        (
            f"plan {problem.graph}{f' until {problem.until}' if problem.until else ''}  {settings}",
            f"hardware {hardware.name} ({hardware.basis})  budget {budget}  RAM {show_size(problem.ram_bytes)}  {regime(problem)}",
            *([f"directives {directives}"] if directives else []),
            *(
                [f"precomputed {', '.join(problem.precomputed)}: outputs of earlier runs, neither planned nor loaded"]
                if problem.precomputed
                else []
            ),
            *choices(solution.plan),
            *granularities(problem),
            f"peak {show_size(simulation.peak_bytes)} at {peak.phase}  headroom"
            f" {show_size(problem.effective_bytes - simulation.peak_bytes)}  moves {show_size(simulation.moved_bytes)} in",
            _host(problem, simulation),
            f"predicted {show_seconds(simulation.seconds)} = {show_seconds(simulation.compute_seconds)} compute"
            f" + {show_seconds(exposed)} exposed transfer{session}  {best} (bound {show_seconds(solution.bound_seconds)}{solved})",
        )
    )


def regime(problem: Problem) -> str:
    """``cold run``, or ``session of N runs``."""
    return "cold run" if problem.runs == 1 else f"session of {problem.runs} runs"


def proof(solution: Solution, seconds: float) -> str:
    """``optimal``, or within how many percent of the optimum a plan that takes ``seconds`` is proven to be."""
    if solution.proven_optimal:
        return "optimal"
    return f"within {100 * max(solution.gap, 1 - solution.bound_seconds / seconds):.2g} % of optimal"


def choices(plan: Plan) -> list[str]:
    """A line with the plan's choices: stage options, and the order of stages; nothing where all are the defaults."""
    found = [f"{stage} with {name}" for stage, name in plan.options]
    found += [f"stages in the order {' '.join(plan.order)}"] if plan.order else []
    return [f"chosen {', '.join(found)}"] if found else []


def granularities(problem: Problem) -> list[str]:
    """A line with the components that are split into layers; nothing where there are none."""
    names = [component.name for component in problem.components if component.granularity == "layers"]
    return [f"split into layers {', '.join(names)}: blocks do not fit, or are slower"] if names else []


def _host(problem: Problem, simulation: Simulation) -> str:
    """The line with the peak in RAM, and the bytes read from disk."""
    locked = f", {show_size(simulation.pinned_peak_bytes)} page-locked" if simulation.pinned_peak_bytes else ""
    limit = f" (at most {show_size(problem.pinned_bytes)})" if problem.pinned_bytes is not None else ""
    read = sum(slot.disk_bytes_read for slot in simulation.slots)
    reads = f"reads {show_size(read)} from disk" if read else "reads nothing from disk"
    spare = show_size(problem.ram_bytes - simulation.host_peak_bytes)
    return f"host peak {show_size(simulation.host_peak_bytes)}{locked}{limit}  headroom {spare}  {reads}"


def _phases(problem: Problem, reports: Sequence[SlotReport]) -> str:
    unit, scale = scale_of(max(report.peak_bytes for report in reports))
    clock, second = seconds_of(sum(report.seconds for report in reports))
    rows = [
        [
            "#",
            "phase",
            "calls",
            "resident",
            "ring",
            "activation",
            "values",
            "peak",
            "headroom",
            "streamed",
            f"load {clock}",
            f"run {clock}",
        ]
    ]
    for number, phase in enumerate(problem.phases):
        slots = [slot for slot in reports if slot.phase == phase.name]
        top = max(slots, key=lambda slot: slot.peak_bytes)
        sizes = (top.resident_bytes, top.ring_bytes, top.activation_bytes, top.values_bytes, top.peak_bytes)
        rows.append(
            [
                str(number),
                phase.name,
                str(max((use.calls for use in phase.uses), default=0)),
                *(size(nbytes, scale) for nbytes in sizes),
                size(problem.effective_bytes - top.peak_bytes, scale),
                size(sum(slot.streamed_bytes for slot in slots), scale),
                f"{sum(slot.seconds for slot in slots if slot.part == 'load') / second:.3f}",
                f"{sum(slot.seconds for slot in slots if slot.part != 'load') / second:.3f}",
            ]
        )
    return table(rows, left=(1,)) + f"\n sizes in {unit}, each row at its highest slot; streamed: bytes that pass through the ring"


def _timeline(problem: Problem, slots: Sequence[Slot], before: Sequence[Slot]) -> str:
    """The placement of each component in each phase of ``slots``, and its variant. ``before``: the slots that ran before them."""
    held = _held_by_slot(problem, [*before, *slots])[len(before) :]
    header = ["", *(f"{phase.stage}/{phase.index}" for phase in problem.phases), "held as"]
    rows, notes = [header], []
    for component in problem.components:
        row = [component.name]
        for phase in problem.phases:
            numbers = [n for n, slot in enumerate(slots) if slot.phase == phase.name]
            uses = any(use.component == component.name for use in phase.uses)
            streams = [a for n in numbers for a in slots[n].actions if isinstance(a, Stream) and a.component == component.name]
            blocks = max(held[n].get(component.name, 0) for n in numbers)
            if uses and component.variants[0].device == "cpu":
                row.append("cpu")
            elif streams:
                row.append("▒▒▒▒")
                total = sum(len(k.blocks) for k in component.groups)
                notes.append(
                    f"▒ {component.name} streamed in {phase.name}: {blocks} of {total} {component.granularity} stay resident"
                )
            else:
                row.append(("████" if uses else "░░░░") if blocks else "·")
        variant = component.variants[0]
        rows.append(
            [*row, f"{variant.precision}, {variant.backing_store if variant.device == 'device' else 'computed on the CPU'}"]
        )
    legend = "█ resident  ▒ streamed  ░ on the device during another component's phase  · not on the device"
    return "\n".join((table(rows, left=tuple(range(len(header)))), f" {legend}", *(f" {note}" for note in notes)))


def _held_by_slot(problem: Problem, slots: Sequence[Slot]) -> list[dict[str, int]]:
    """The number of resident blocks of each component in each slot, without those in the ring."""
    sizes = {c.name: {k.name: range(len(k.blocks)) for k in c.groups} for c in problem.components}
    now: dict[str, set[tuple[str, int]]] = {c.name: set() for c in problem.components}
    found = []
    for slot in slots:
        for action in slot.actions:
            blocks = getattr(action, "blocks", ())
            if blocks == ():
                continue
            named = sizes[action.component].items() if blocks is None else blocks  # type: ignore[union-attr]
            keys = {(name, index) for name, indices in named for index in indices}
            if isinstance(action, Load):
                now[action.component] |= keys
            else:
                now[action.component] -= keys  # type: ignore[union-attr]
        found.append({name: len(keys) for name, keys in now.items()})
    return found


def _why(solution: Solution) -> str:
    problem = solution.chosen
    lines = []
    for component in problem.components:
        phases = {
            slot.phase
            for slot in solution.plan.slots
            for action in slot.actions
            if isinstance(action, Stream) and action.component == component.name
        }
        for number, phase in enumerate(problem.phases):
            if phase.name not in phases:
                continue
            weights = component.weight_bytes()
            if "exclude" in problem.demanded(component.name):
                lines.append(f" why {component.name} is streamed: the directive exclude demands it")
                continue
            others = max(phase.first_bytes, phase.steady_bytes) + phase.live_in_bytes + problem.value_bytes(number)
            if weights + others > problem.effective_bytes:
                lines.append(
                    f" why {component.name} is streamed: resident it needs {show_size(weights)} + {show_size(others)}"
                    f" > {show_size(problem.effective_bytes)}"
                )
            else:
                lines.append(f" why {component.name} is streamed: it would fit, but streamed it takes no longer and holds less")
    return "\n".join(dict.fromkeys(lines))


def explain_screen(solution: Solution) -> str:
    """What ``graphrun explain`` shows: every slot with its bytes, its time and its actions, then each number's basis."""
    problem, plan, simulation = solution.chosen, solution.plan, solution.simulation
    lines = [_head(solution, simulation, None), ""]
    clock, reports = 0.0, (*simulation.slots, *simulation.again)
    for number, (slot, report) in enumerate(zip((*plan.slots, *plan.again), reports, strict=True)):
        lines += ["", "every further run", ""] if number == len(plan.slots) else []
        title = f"slot {slot.phase} {slot.part}".replace("  ", " ") + (f" x{slot.calls}" if slot.part == "steady" else "")
        lines.append(
            f"{title}   at {clock:.3f} s  takes {show_seconds(report.seconds)} (compute {show_seconds(report.compute_seconds)},"
            f" waits {show_seconds(report.stall_seconds)})"
        )
        lines.append(f"  holds {_terms(report)} of {show_size(problem.effective_bytes)}")
        lines += [f"  {action_text(action)}" for action in slot.actions]
        clock += report.seconds
    bases = [f"{c.name} weights {c.basis}" for c in problem.components]
    bases += [f"{p.name} activation {p.basis}" for p in problem.phases] + [f"{v.name} {v.basis}" for v in problem.values]
    basis = f"basis: hardware {problem.hardware.basis}, seconds from it; " + "; ".join(bases)
    lines += ["", *textwrap.wrap(basis, 110, subsequent_indent="  "), "", _why(solution)]
    return "\n".join(lines).rstrip()


def _terms(report: SlotReport) -> str:
    named = (
        ("weights", report.resident_bytes),
        ("ring", report.ring_bytes),
        ("activation", report.activation_bytes),
        ("values and live-in", report.values_bytes),
    )
    return (
        f"{show_size(report.peak_bytes)} = " + " + ".join(f"{show_size(n)} {name}" for name, n in named if n)
        if report.peak_bytes
        else "0 B"
    )


def check_screen(solution: Solution) -> str:
    """The line for a plan that breaks no rule."""
    slots, simulation = solution.plan.slots, solution.simulation
    actions = sum(len(slot.actions) for slot in slots)
    return (
        f"ok: {len(slots)} slots, {actions} actions, peak {show_size(simulation.peak_bytes)}"
        f" of {show_size(solution.problem.effective_bytes)}, predicted {show_seconds(simulation.seconds)}"
    )


def measured_screen(solution: Solution, trace: Trace, written: Sequence[str]) -> str:
    """The last screen of ``graphrun run``: planned and measured numbers of every slot, bytes left on the device, files written."""
    simulation = solution.simulation
    unit, scale = scale_of(simulation.peak_bytes)
    clock, second = seconds_of(simulation.seconds)
    rows = [["slot", "peak planned", "measured", "moved planned", "measured", f"{clock} planned", "measured"]]
    for planned, measured in trace.beside(simulation.slots):
        rows.append(
            [
                f"{measured.phase} {measured.part}".strip(),
                size(planned.peak_bytes, scale),
                size(measured.peak_bytes, scale),
                size(planned.streamed_bytes + planned.loaded_bytes, scale),
                size(measured.moved_bytes, scale),
                f"{planned.seconds / second:.3f}",
                f"{(measured.end_seconds - measured.start_seconds) / second:.3f}",
            ]
        )
    total = [
        "whole run",
        size(simulation.peak_bytes, scale),
        size(trace.peak_bytes, scale),
        size(simulation.moved_bytes, scale),
        size(trace.moved_bytes, scale),
        f"{simulation.seconds / second:.3f}",
        f"{trace.seconds / second:.3f}",
    ]
    broken = broken_caps(solution, trace)
    verdict = "the plan was kept" if not broken else "the plan was BROKEN: " + "; ".join(broken)
    return "\n".join(
        (
            "",
            table([*rows, total], left=(0,)),
            f" sizes in {unit}; {clock} {'on the virtual clock' if trace.device == 'sim' else 'on the card'}",
            f"{verdict}; left on the device: {show_size(trace.left_bytes)}",
            *(f"wrote {path}" for path in written),
        )
    )
