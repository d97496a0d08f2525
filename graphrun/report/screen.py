"""The screens of ``plan``, ``explain``, ``check`` and ``run`` as text: tables, a timeline, slots,
planned and measured numbers."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from graphrun.model.plan import Blocks, Evict, Load, Slot, Stream, action_text, blocks_text
from graphrun.model.problem import ComponentNumbers, PhaseNumbers, Problem
from graphrun.model.simulation import Simulation, SlotReport
from graphrun.model.solution import Solution
from graphrun.model.splits import computing_on
from graphrun.report.command_lines import folded_command
from graphrun.report.summary import directives, figures
from graphrun.report.table import Units, table
from graphrun.report.verdicts import done, fits
from graphrun.trace import SlotTrace, Trace
from graphrun.units import gib, show_range, show_seconds, show_size

Held = Sequence[tuple[str, Blocks]]  # components with their blocks on the device, as `Plan.finds`


@dataclass(frozen=True, slots=True)
class Look:
    """How a screen is shown: its columns, whether it has all figures, what a run makes, the line
    with the next command, a note on the budget."""

    width: int = 80
    verbose: bool = False
    made: str = "a run"
    then: str = ""
    note: str = ""

    def first(self, verdict: str) -> str:
        """The first lines: ``verdict``, the next command, and the note."""
        return "\n".join(
            (
                self.folded(verdict),
                *self.next_lines,
                *([self.folded(self.note)] if self.note else []),
            )
        )

    @property
    def next_lines(self) -> list[str]:
        """The next command, folded so that it can be copied; nothing without one."""
        return [folded_command(self.then, self.width)] if self.then else []

    def folded(self, *lines: str) -> str:
        """``lines`` folded at the width."""
        folded = (
            textwrap.fill(
                line,
                self.width,
                subsequent_indent="  ",
                break_long_words=False,
                break_on_hyphens=False,
            )
            for line in lines
        )
        return "\n".join(folded)


def plan_screen(
    solution: Solution, solve_seconds: float | None = None, look: Look | None = None
) -> str:
    """What ``graphrun plan`` shows: whether it fits, a row per phase, and where each component is
    when.

    With all figures also the totals, all columns, and why components are streamed.
    """
    look = look or Look()
    problem, plan, simulation = solution.chosen, solution.plan, solution.simulation
    phases, timeline = (_phases, _timeline) if look.verbose else (_phases_in_short, _places)
    head = _head(solution, simulation, solve_seconds) if look.verbose else _subject(solution, look)
    parts = [
        look.first(fits(solution, look.made)),
        head,
        phases(problem, simulation.slots, look.width),
        timeline(problem, plan.slots, plan.finds, look.width),
    ]
    if plan.again:
        parts += [
            f"every further run: {show_seconds(simulation.again_seconds)}",
            phases(problem, simulation.again, look.width),
        ]
        parts.append(timeline(problem, plan.again, plan.leaves, look.width))
    parts.append(
        _why(solution) if look.verbose else " -v shows all figures, and why components are streamed"
    )
    return "\n\n".join(part for part in parts if part)


def _head(solution: Solution, simulation: Simulation, solve_seconds: float | None) -> str:
    problem, hardware = solution.problem, solution.problem.hardware
    overhead = problem.budget_bytes - problem.effective_bytes - problem.reserve_bytes
    peak = max(simulation.slots, key=lambda slot: slot.peak_bytes)
    exposed = max(0.0, simulation.seconds - simulation.compute_seconds)
    solved = f", {show_seconds(solve_seconds)} to solve" if solve_seconds is not None else ""
    terms = (
        (overhead, " context and workspace"),
        (problem.reserve_bytes, " reserve"),
        (problem.effective_bytes, ""),
    )
    parts = [
        f"{gib(nbytes) if overhead else show_size(nbytes)}{name}"
        for nbytes, name in terms
        if nbytes
    ]
    budget = " = ".join(
        [show_size(problem.budget_bytes), *([" + ".join(parts)] if len(parts) > 1 else [])]
    )
    session = (
        f"; {problem.runs} runs take {show_seconds(simulation.total_seconds)}"
        if problem.runs > 1
        else ""
    )
    return "\n".join(
        (
            f"plan {subject(problem)}",
            f"hardware {hardware.name} ({hardware.basis})  budget {budget}  RAM {show_size(problem.ram_bytes)}  {regime(problem)}",
            *_choices(solution),
            f"peak {show_size(simulation.peak_bytes)} at {peak.phase}  headroom"
            f" {show_size(problem.effective_bytes - simulation.peak_bytes)}  moves {show_size(simulation.moved_bytes)} in",
            *_secondaries(problem, simulation),
            _host(problem, simulation),
            f"predicted {show_range(simulation.seconds, hardware.seconds_range(simulation.seconds))}"
            f" = {show_seconds(simulation.compute_seconds)} compute"
            f" + {show_seconds(exposed)} exposed transfer{session}  {proof(solution)}"
            f" (bound {show_seconds(solution.bound_seconds)}{solved})",
        )
    )


def _subject(solution: Solution, look: Look) -> str:
    """The graph, its budgets, what was demanded and chosen, and the proof."""
    problem = solution.problem
    budgets = f"budget {show_size(problem.budget_bytes)}, {show_size(problem.effective_bytes)} of it for tensors"
    reserve = f", {show_size(problem.reserve_bytes)} reserve" if problem.reserve_bytes else ""
    proven = proof(solution)
    plan = f"{budgets}{reserve}; RAM {show_size(problem.ram_bytes)}; {regime(problem)}; {proven}"
    return look.folded(
        f"plan {subject(problem)}",
        plan,
        *_secondaries(problem, solution.simulation),
        *_choices(solution),
    )


def _choices(solution: Solution) -> list[str]:
    """Lines with the directives, the precomputed values, what the plan chose (options, order,
    layers), finds and leaves."""
    problem = solution.problem
    chosen = [f"{stage} with {name}" for stage, name in solution.plan.options]
    chosen += (
        [f"stages in the order {' '.join(solution.plan.order)}"] if solution.plan.order else []
    )
    layered = [
        component.name for component in problem.components if component.granularity == "layers"
    ]
    return [
        *listed("directives", directives(problem)),
        *listed(
            "precomputed",
            problem.precomputed,
            ": outputs of earlier runs, neither planned nor loaded",
        ),
        *listed("chosen", chosen),
        *listed("split into layers", layered, ": blocks do not fit, or are slower"),
        *found_and_left(solution),
    ]


def subject(problem: Problem, without: str = "") -> str:
    """The graph with its last stage and its settings, but the one called ``without``."""
    settings = " ".join(f"{name}={value}" for name, value in problem.settings if name != without)
    return f"{problem.graph}{f' until {problem.until}' if problem.until else ''}  {settings}"


def found_and_left(solution: Solution) -> list[str]:
    """What a run finds on the device, and what each run of a session leaves there."""
    pairs = (("finds", solution.plan.finds), ("leaves", solution.plan.leaves))
    return [
        line
        for title, of in pairs
        for line in listed(title, [f"{name} {blocks_text(blocks)}" for name, blocks in of])
    ]


def listed(title: str, names: Sequence[str], note: str = "") -> list[str]:
    """A line with ``title``, ``names`` and ``note``; none without names."""
    return [f"{title} {', '.join(names)}{note}"] if names else []


def regime(problem: Problem) -> str:
    """``cold run``, or ``session of N runs``."""
    return "cold run" if problem.runs == 1 else f"session of {problem.runs} runs"


def proof(solution: Solution) -> str:
    """``optimal``, or within how many percent of the optimum the plan is proven to be."""
    if solution.proven_optimal:
        return "optimal"
    if not solution.bound_seconds:
        return "not proven to be optimal"
    return f"within {100 * solution.gap:.2g} % of optimal"


def _host(problem: Problem, simulation: Simulation) -> str:
    """The line with the peak in RAM, and the bytes read from disk."""
    locked = (
        f", {show_size(simulation.pinned_peak_bytes)} page-locked"
        if simulation.pinned_peak_bytes
        else ""
    )
    limit = (
        f" (at most {show_size(problem.pinned_bytes)})" if problem.pinned_bytes is not None else ""
    )
    read = sum(slot.disk_bytes_read for slot in simulation.slots)
    reads = f"reads {show_size(read)} from disk" if read else "reads nothing from disk"
    spare = show_size(problem.ram_bytes - simulation.host_peak_bytes)
    return f"host peak {show_size(simulation.host_peak_bytes)}{locked}{limit}  headroom {spare}  {reads}"


def _secondaries(problem: Problem, simulation: Simulation) -> list[str]:
    """A line for each secondary device: its budget, its peak, and what computes on it. ``problem``
    has one variant per component, or several: then those of the simulation count."""
    found = []
    for number, secondary in enumerate(problem.secondaries, 1):
        peak = max(
            slot.secondary_peaks[number - 1] for slot in (*simulation.slots, *simulation.again)
        )
        names = computing_on(simulation.problem, number)
        found.append(
            f"device{number} {secondary.hardware.name} ({secondary.hardware.basis})  budget {show_size(secondary.budget_bytes)}  peak"
            f" {show_size(peak)}  computes {', '.join(names) or 'nothing'}"
        )
    return found


def _phases_in_short(problem: Problem, reports: Sequence[SlotReport], width: int) -> str:
    units = Units(
        max(report.peak_bytes for report in reports), sum(report.seconds for report in reports)
    )
    rows = [
        [
            "#",
            "phase",
            "calls",
            "resident",
            "peak",
            "streamed",
            f"takes {units.time}",
            f"waits {units.time}",
        ]
    ]
    for number, phase in enumerate(problem.phases):
        slots, cells = phase_cells(problem, phase, reports)
        sizes = (
            cells[PHASE_HEAD.index(name)] for name in ("calls", "resident", "peak", "streamed")
        )
        seconds, waits = (
            sum((getattr(slot, name) for slot in slots), 0.0)
            for name in ("seconds", "stall_seconds")
        )
        rows.append(units.row(str(number), phase.name, *sizes, seconds, waits))
    return (
        table(rows, left=(1,), width=width)
        + f"\n sizes in {units.size}; streamed: passes through a ring buffer; waits: nothing computes"
    )


def _phases(problem: Problem, reports: Sequence[SlotReport], width: int) -> str:
    units = Units(
        max(report.peak_bytes for report in reports), sum(report.seconds for report in reports)
    )
    rows = [["#", *PHASE_HEAD, f"load {units.time}", f"run {units.time}"]]
    for number, phase in enumerate(problem.phases):
        slots, cells = phase_cells(problem, phase, reports)
        load = sum((slot.seconds for slot in slots if slot.part == "load"), 0.0)
        run = sum((slot.seconds for slot in slots if slot.part != "load"), 0.0)
        rows.append(units.row(str(number), *cells, load, run))
    return (
        table(rows, left=(1,))
        + f"\n sizes in {units.size}, each row at its highest slot; streamed: bytes that pass through the ring buffer"
    )


# of a SlotReport: they sum to its peak
TERMS = (
    "resident_bytes",
    "ring_buffer_bytes",
    "working_bytes",
    "values_bytes",
)
PHASE_HEAD = (
    "phase",
    "calls",
    "resident",
    "ring_buffer",
    "activation",
    "values",
    "peak",
    "headroom",
    "streamed",
)


def phase_cells(
    problem: Problem, phase: PhaseNumbers, reports: Sequence[SlotReport]
) -> tuple[list[SlotReport], list[str | float]]:
    """The slots of ``phase`` among ``reports``, and cells as in `PHASE_HEAD`: bytes of its highest
    slot, streamed bytes of all.

    ``problem``: with the plan's choices applied.
    """
    slots = [slot for slot in reports if slot.phase == phase.name]
    top = max(slots, key=lambda slot: slot.peak_bytes)
    sizes, streamed = (
        figures(top, *TERMS, "peak_bytes").values(),
        sum(slot.streamed_bytes for slot in slots),
    )
    return slots, [
        phase.name,
        calls_of(phase),
        *sizes,
        problem.effective_bytes - top.peak_bytes,
        streamed,
    ]


def calls_of(phase: PhaseNumbers) -> str:
    """The calls of the component of ``phase`` with the most."""
    return str(max((use.calls for use in phase.uses), default=0))


def streams_of(slots: Iterable[Slot], component: str) -> dict[str, Stream]:
    """The phases of ``slots`` in which ``component`` is streamed, each with its last stream
    action."""
    return {
        slot.phase: action
        for slot in slots
        for action in slot.actions
        if isinstance(action, Stream) and action.component == component
    }


def _timeline(problem: Problem, slots: Sequence[Slot], finds: Held, width: int) -> str:
    """The placement of each component in each phase of ``slots``, and its variant. ``finds``: the
    blocks on the device before."""
    placed = _placed(problem, slots, finds)
    rows = [["", *(f"{phase.stage}/{phase.index}" for phase in problem.phases), "stored as"]]
    rows += [[name, *_bars(marks, 4), held] for name, marks, held, _ in placed]
    notes = [
        f" ▒ {name} streamed in {phase}: {stay} stay resident"
        for name, _, _, stays in placed
        for phase, stay in stays.items()
    ]
    legend = " █ resident  ▒ streamed  ░ on the device during another component's phase  · not on the device"
    return "\n".join((table(rows, left=range(len(rows[0]))), legend, *notes))


def _places(problem: Problem, slots: Sequence[Slot], finds: Held, width: int) -> str:
    """`_timeline` in narrow columns, numbered as the phases in the table above it."""
    placed = _placed(problem, slots, finds)
    wide = max(
        1, min(4, (width - max(len(name) for name, *_ in placed) - 42) // len(problem.phases) - 2)
    )
    rows = [["", *map(str, range(len(problem.phases))), "stored as", "resident"]]
    rows += [
        [name, *_bars(marks, wide), held, ", ".join(dict.fromkeys(stays.values()))]
        for name, marks, held, stays in placed
    ]
    legend = " █ resident  ▒ streamed  ░ loaded early or kept for later  · not on the device"
    return "\n".join((table(rows, left=range(len(rows[0])), width=width), legend))


def _bars(marks: Sequence[str], wide: int) -> list[str]:
    return [mark * wide if mark in "█▒░" else mark[:wide] for mark in marks]


def _placed(
    problem: Problem, slots: Sequence[Slot], finds: Held
) -> list[tuple[str, list[str], str, dict[str, str]]]:
    """Each component with its mark in each phase, its variant, and the blocks that stay in the
    phases in which it is streamed."""
    placed = []
    for component in problem.components:
        variant, streams = component.variants[0], streams_of(slots, component.name)
        marks, stays = list[str](), dict[str, str]()
        held = list(zip(slots, held_blocks(component, finds, slots), strict=True))
        for phase in problem.phases:
            uses = any(use.component == component.name for use in phase.uses)
            blocks = max(count for slot, count in held if slot.phase == phase.name)
            if uses and variant.device == "cpu":
                marks.append("cpu")
            elif phase.name in streams:
                marks.append("▒")
                stays[phase.name] = (
                    f"{blocks} of {sum(len(k.blocks) for k in component.groups)} {component.granularity}"
                )
            else:
                marks.append(("█" if uses else "░") if blocks else "·")
        there = f", on {variant.device}" if variant.secondary else ""
        where = (
            f"{variant.backing_store}{there}" if variant.device != "cpu" else "computed on the CPU"
        )
        placed.append((component.name, marks, f"{variant.precision}, {where}", stays))
    return placed


def held_blocks(component: ComponentNumbers, finds: Held, slots: Iterable[Slot]) -> list[int]:
    """The number of resident blocks of ``component`` in each slot, without those in the ring
    buffer."""

    def named(blocks: Blocks) -> set[tuple[str, int]]:
        every = ((k.name, range(len(k.blocks))) for k in component.groups)
        return {
            (name, index)
            for name, indices in (every if blocks is None else blocks)
            for index in indices
        }

    held, counts = (
        {block for name, blocks in finds if name == component.name for block in named(blocks)},
        [],
    )
    for slot in slots:
        for action in slot.actions:
            if isinstance(action, Load | Evict) and action.component == component.name:
                held = (
                    held | named(action.blocks)
                    if isinstance(action, Load)
                    else held - named(action.blocks)
                )
        counts.append(len(held))
    return counts


def _why(solution: Solution) -> str:
    problem = solution.chosen
    lines = dict[str, None]()
    for component in problem.components:
        weights, streams = component.weight_bytes(), streams_of(solution.plan.slots, component.name)
        for number, phase in enumerate(problem.phases):
            if phase.name not in streams:
                continue
            others = (
                max(phase.first_bytes, phase.steady_bytes)
                + phase.input_bytes
                + problem.value_bytes(number)
            )
            if "exclude" in problem.demanded(component.name):
                why = "the directive exclude demands it"
            elif weights + others > problem.effective_bytes:
                why = f"resident it needs {show_size(weights)} + {show_size(others)} > {show_size(problem.effective_bytes)}"
            else:
                why = "it would fit, but streamed it takes no longer and holds less"
            lines[f" why {component.name} is streamed: {why}"] = None
    return "\n".join(lines)


def explain_screen(solution: Solution) -> str:
    """What ``graphrun explain`` shows: every slot with its bytes, its time and its actions, then
    each number's basis."""
    problem, plan, simulation = solution.chosen, solution.plan, solution.simulation
    lines = [_head(solution, simulation, None), ""]
    clock, reports = 0.0, (*simulation.slots, *simulation.again)
    for number, (slot, report) in enumerate(zip((*plan.slots, *plan.again), reports, strict=True)):
        lines += ["", "every further run", ""] if number == len(plan.slots) else []
        title = f"{slot.phase} {slot.part}".strip() + (
            f" x{slot.calls}" if slot.part == "steady" else ""
        )
        lines.append(
            f"slot {title}   at {clock:.3f} s  takes {show_seconds(report.seconds)}"
            f" (compute {show_seconds(report.compute_seconds)}, waits {show_seconds(report.stall_seconds)})"
        )
        holds = (
            f"{show_size(report.peak_bytes)} = {terms(*figures(report, *TERMS).values())}"
            if report.peak_bytes
            else "0 B"
        )
        lines.append(f"  holds {holds} of {show_size(problem.effective_bytes)}")
        lines += [f"  {action_text(action)}" for action in slot.actions]
        clock += report.seconds
    bases = [f"{c.name} weights {c.basis}" for c in problem.components]
    bases += [f"{p.name} activation {p.basis}" for p in problem.phases] + [
        f"{v.name} {v.basis}" for v in problem.values
    ]
    basis = f"basis: hardware {problem.hardware.basis}, seconds from it; " + "; ".join(bases)
    lines += ["", *textwrap.wrap(basis, 110, subsequent_indent="  "), "", _why(solution)]
    return "\n".join(lines).rstrip()


def terms(*sizes: int) -> str:
    """``sizes`` of weights, ring buffer, activation and values as a sum, without those that are
    0."""
    names = ("weights", "ring_buffer", "activation", "values and inputs")
    return " + ".join(
        f"{show_size(nbytes)} {name}" for nbytes, name in zip(sizes, names, strict=True) if nbytes
    )


def check_screen(solution: Solution) -> str:
    """The line for a plan that breaks no rule."""
    slots, simulation = solution.plan.slots, solution.simulation
    actions = sum(len(slot.actions) for slot in slots)
    return (
        f"ok: {len(slots)} slots, {actions} actions, peak {show_size(simulation.peak_bytes)}"
        f" of {show_size(solution.problem.effective_bytes)}, predicted {show_seconds(simulation.seconds)}"
    )


def measured_screen(
    solution: Solution, trace: Trace, written: Sequence[str], look: Look | None = None
) -> str:
    """The last screen of ``graphrun run``: planned and measured numbers of every phase, or with all
    figures of every slot; bytes left on the device, files written."""
    look, simulation = look or Look(), solution.simulation
    units, pairs = Units(simulation.peak_bytes, simulation.seconds), trace.beside(simulation.slots)
    pairs = pairs if look.verbose else [pair for pair in pairs if pair[1].phase]
    names = [pair[1].name if look.verbose else pair[1].phase for pair in pairs]
    head = [
        "slot" if look.verbose else "phase",
        "peak planned",
        "measured",
        "moved planned",
        "measured",
        f"{units.time} planned",
        "measured",
    ]
    rows = [
        head
        if look.verbose
        else [cell.replace("measured", "run").replace("planned", "plan") for cell in head]
    ]
    for name in dict.fromkeys(names):
        rows.append(
            units.row(
                name,
                *beside_cells([pair for pair, of in zip(pairs, names, strict=True) if of == name]),
            )
        )
    sizes = (simulation.peak_bytes, trace.peak_bytes, simulation.moved_bytes, trace.moved_bytes)
    rows.append(units.row("whole run", *sizes, simulation.seconds, trace.seconds))
    return "\n".join(
        (
            "",
            look.first(done(solution, trace)),
            *(f"wrote {path}" for path in written),
            "",
            table(rows, left=(0,), width=None if look.verbose else look.width),
            f" sizes in {units.size}; {units.time} {'on the virtual clock' if trace.device == 'sim' else 'on the card'}",
            verdict_line(trace),
        )
    )


def beside_cells(pairs: Sequence[tuple[SlotReport, SlotTrace]]) -> list[float]:
    """Peak, moved bytes and seconds of these slots, each planned and measured."""
    return [
        max((planned.peak_bytes for planned, _ in pairs), default=0),
        max((measured.peak_bytes for _, measured in pairs), default=0),
        sum(planned.streamed_bytes + planned.loaded_bytes for planned, _ in pairs),
        sum(measured.moved_bytes for _, measured in pairs),
        sum((planned.seconds for planned, _ in pairs), 0.0),
        sum((measured.end_seconds - measured.start_seconds for _, measured in pairs), 0.0),
    ]


def verdict_line(trace: Trace) -> str:
    """The verdict on a run, and what it left on the device."""
    return f"{trace.verdict}; left on the device: {show_size(trace.left_bytes)}"
