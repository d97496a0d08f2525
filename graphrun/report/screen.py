"""The screens: a plan as a table and a timeline, its slots in detail, a run beside its plan. Plain text, nothing printed here."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from graphrun.planner.plan import Load, Plan, Stream, action_text
from graphrun.planner.problem import Problem
from graphrun.planner.simulate import Simulation, SlotReport, simulate
from graphrun.planner.solution import Solution
from graphrun.report.summary import broken_caps
from graphrun.report.table import scale_of, seconds_of, size, table
from graphrun.trace import Trace
from graphrun.units import gib, show_seconds, show_size


def plan_screen(solution: Solution, solve_seconds: float | None = None) -> str:
    """What ``graphrun plan`` shows: two lines of totals, a row per phase, a timeline, and why a component is streamed."""
    problem, plan = solution.problem, solution.plan
    simulation = simulate(problem, plan)
    parts = (
        _head(solution, simulation, solve_seconds),
        _phases(problem, plan, simulation),
        _timeline(problem, plan, simulation),
        _why(solution),
    )
    return "\n\n".join(part for part in parts if part)


def _head(solution: Solution, simulation: Simulation, solve_seconds: float | None) -> str:
    problem, hardware = solution.problem, solution.problem.hardware
    overhead = problem.budget_bytes - problem.effective_bytes - problem.reserve_bytes
    peak = max(simulation.slots, key=lambda slot: slot.peak_bytes)
    settings = " ".join(f"{name}={value}" for name, value in problem.settings)
    exposed = max(0.0, simulation.seconds - simulation.compute_seconds)
    proof = "optimal" if solution.proven_optimal else f"within {100 * solution.gap:.2g} % of optimal"
    solved = f", {show_seconds(solve_seconds)} to solve" if solve_seconds is not None else ""
    budget = show_size(problem.budget_bytes)
    if overhead:
        reserve = f"{gib(problem.reserve_bytes)} reserve + " if problem.reserve_bytes else ""
        budget += f" = {gib(overhead)} context and workspace + {reserve}{gib(problem.effective_bytes)}"
    elif problem.reserve_bytes:
        budget += f" = {show_size(problem.reserve_bytes)} reserve + {show_size(problem.effective_bytes)}"
    directives = ", ".join(f"{of.placement} {of.component}" for of in problem.directives)
    return "\n".join(
        (
            f"plan {problem.graph}{f' until {problem.until}' if problem.until else ''}  {settings}",
            f"hardware {hardware.name} ({hardware.basis})  budget {budget}  RAM {show_size(problem.ram_bytes)}  cold run",
            *([f"directives {directives}"] if directives else []),
            f"peak {show_size(simulation.peak_bytes)} at {peak.phase}  headroom"
            f" {show_size(problem.effective_bytes - simulation.peak_bytes)}  moves {show_size(simulation.moved_bytes)} in",
            f"predicted {show_seconds(simulation.seconds)} = {show_seconds(simulation.compute_seconds)} compute"
            f" + {show_seconds(exposed)} exposed transfer  {proof} (bound {show_seconds(solution.bound_seconds)}{solved})",
        )
    )


def _phases(problem: Problem, plan: Plan, simulation: Simulation) -> str:
    unit, scale = scale_of(simulation.peak_bytes)
    clock, second = seconds_of(simulation.seconds)
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
        slots = [slot for slot in simulation.slots if slot.phase == phase.name]
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


def _timeline(problem: Problem, plan: Plan, simulation: Simulation) -> str:
    held = _held_by_slot(problem, plan)
    header = ["", *(f"{phase.stage}/{phase.index}" for phase in problem.phases)]
    rows, notes = [header], []
    for component in problem.components:
        row = [component.name]
        for phase in problem.phases:
            numbers = [n for n, slot in enumerate(plan.slots) if slot.phase == phase.name]
            uses = any(use.component == component.name for use in phase.uses)
            streams = [a for n in numbers for a in plan.slots[n].actions if isinstance(a, Stream) and a.component == component.name]
            blocks = max(held[n].get(component.name, 0) for n in numbers)
            if streams:
                row.append("▒▒▒▒")
                total = sum(len(k.blocks) for k in component.classes)
                notes.append(f"▒ {component.name} streamed in {phase.name}: {blocks} of {total} blocks stay resident")
            else:
                row.append(("████" if uses else "░░░░") if blocks else "·")
        rows.append(row)
    legend = "█ resident  ▒ streamed  ░ on the device beside another component's phase  · not on the device"
    return "\n".join((table(rows, left=tuple(range(len(header)))), f" {legend}", *(f" {note}" for note in notes)))


def _held_by_slot(problem: Problem, plan: Plan) -> list[dict[str, int]]:
    """Blocks of each component on the device in each slot, streamed ones apart."""
    sizes = {c.name: {k.name: range(len(k.blocks)) for k in c.classes} for c in problem.components}
    now: dict[str, set[tuple[str, int]]] = {c.name: set() for c in problem.components}
    found = []
    for slot in plan.slots:
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
    problem = solution.problem
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
            rest = max(phase.first_bytes, phase.rest_bytes) + phase.carry_bytes + problem.value_bytes(number)
            if weights + rest > problem.effective_bytes:
                lines.append(
                    f" why {component.name} is streamed: resident it needs {show_size(weights)} + {show_size(rest)}"
                    f" > {show_size(problem.effective_bytes)}"
                )
            else:
                lines.append(f" why {component.name} is streamed: it would fit, but streamed it takes no longer and holds less")
    return "\n".join(dict.fromkeys(lines))


def explain_screen(solution: Solution) -> str:
    """What ``graphrun explain`` shows: every slot with its bytes, its time and its actions, then each number's basis."""
    problem, plan = solution.problem, solution.plan
    simulation = simulate(problem, plan)
    lines = [_head(solution, simulation, None), ""]
    clock = 0.0
    for slot, report in zip(plan.slots, simulation.slots, strict=True):
        title = f"slot {slot.phase} {slot.part}".replace("  ", " ") + (f" x{slot.calls}" if slot.part == "rest" else "")
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
        ("values and carry", report.values_bytes),
    )
    return (
        f"{show_size(report.peak_bytes)} = " + " + ".join(f"{show_size(n)} {name}" for name, n in named if n)
        if report.peak_bytes
        else "0 B"
    )


def check_screen(problem: Problem, plan: Plan, simulation: Simulation) -> str:
    """One line for a plan that breaks no rule."""
    actions = sum(len(slot.actions) for slot in plan.slots)
    return (
        f"ok: {len(plan.slots)} slots, {actions} actions, peak {show_size(simulation.peak_bytes)}"
        f" of {show_size(problem.effective_bytes)}, predicted {show_seconds(simulation.seconds)}"
    )


def measured_screen(solution: Solution, trace: Trace, written: Sequence[str]) -> str:
    """What ``graphrun run`` ends with: planned beside measured for every slot, what was left, and where the picture is."""
    simulation = simulate(solution.problem, solution.plan)
    unit, scale = scale_of(simulation.peak_bytes)
    clock, second = seconds_of(simulation.seconds)
    rows = [["slot", "peak planned", "measured", "moved planned", "measured", f"{clock} planned", "measured"]]
    for planned, measured in zip(simulation.slots, trace.slots, strict=True):
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
