"""Text screens of ``plan``, ``explain``, ``check`` and ``run``."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphrun.model.blocks import resident_blocks
from graphrun.model.plan import BlockNames, Slot, Stream, action_text, blocks_text
from graphrun.model.problem import ComponentNumbers, PhaseNumbers, Problem
from graphrun.model.ranges import probable_range
from graphrun.model.simulation import Simulation, SlotReport
from graphrun.model.solution import Solution
from graphrun.model.splits import computing_on
from graphrun.report.command_lines import folded_command
from graphrun.report.summary import directives, figures
from graphrun.report.table import Units, table
from graphrun.report.verdicts import budget_text, clock_text, location, plan_verdict, run_verdict
from graphrun.trace import SlotTrace, Trace
from graphrun.units import gib, show_range, show_seconds, show_size

# components with their blocks on the device, as in `Plan.finds`
DeviceBlocks = Sequence[tuple[str, BlockNames]]


NO_BREAK = "\u00a0"
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:us|ms|s|min|h|B|[KMGT]iB)\b|%)")


@dataclass(frozen=True, slots=True)
class Look:
    """How a screen is shown.

    ``verbose``: show all figures. ``product``: what a run makes, such as ``a picture``.
    ``next_command``: the line with the next command. ``note``: a remark on the budget.
    ``suggestion``, ``suggestion_command``: the best suggestion in a sentence, and the command that
    follows it. ``files``: published checkpoints that the plan reads, and weights to quantize first.
    ``gain``: what the secondary
    devices save.
    """

    width: int = 80
    verbose: bool = False
    product: str = "a run"
    next_command: str = ""
    note: str = ""
    suggestion: str = ""
    suggestion_command: str = ""
    files: tuple[str, ...] = ()
    gain: str = ""

    def first(self, verdict: str) -> str:
        """Return ``verdict``, gain, suggestion, next command, note and files."""
        return "\n".join(
            (
                self.folded(verdict),
                *([self.folded(self.gain)] if self.gain else []),
                *([self.folded(self.suggestion)] if self.suggestion else []),
                *(
                    [folded_command(f"  {self.suggestion_command}", self.width)]
                    if self.suggestion_command
                    else []
                ),
                *self.next_lines,
                *([self.folded(self.note)] if self.note else []),
                *map(self.folded, self.files),
            )
        )

    @property
    def next_lines(self) -> list[str]:
        """The next command, folded so that it can be copied; empty without one."""
        return [folded_command(self.next_command, self.width)] if self.next_command else []

    def folded(self, *lines: str) -> str:
        """Fold ``lines`` at the width. A number stays on the line of its unit."""
        fold = textwrap.TextWrapper(
            self.width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        folds = (fold.fill(_BEFORE_UNIT.sub(NO_BREAK, line)) for line in lines)
        return "\n".join(folds).replace(NO_BREAK, " ")


def plan_screen(
    solution: Solution, solve_seconds: float | None = None, look: Look | None = None
) -> str:
    """Return the screen of ``graphrun plan``.

    It has the verdict, a row for each phase, and the placement of each component over time. A
    verbose screen adds totals, all columns, and the reasons for streaming.
    """
    look = look or Look()
    problem, plan, simulation = solution.chosen, solution.plan, solution.simulation
    phases, timeline = (_phases, _timeline) if look.verbose else (_phases_in_short, _places)
    head = _head(solution, simulation, solve_seconds) if look.verbose else _subject(solution, look)
    parts = [
        look.first(plan_verdict(solution, look.product)),
        head,
        phases(problem, simulation.slots, look.width),
        timeline(problem, plan.slots, plan.finds, look.width),
    ]
    if plan.further_slots:
        parts += [
            f"every further run: {show_seconds(simulation.further_seconds)}",
            phases(problem, simulation.further_slots, look.width),
        ]
        parts.append(timeline(problem, plan.further_slots, plan.leaves, look.width))
    parts.append(
        _why(solution) if look.verbose else " -v shows all figures, and why components are streamed"
    )
    return "\n\n".join(part for part in parts if part)


def _head(solution: Solution, simulation: Simulation, solve_seconds: float | None) -> str:
    problem, hardware = solution.problem, solution.problem.hardware
    overhead = problem.budget_bytes - problem.effective_bytes - problem.reserve_bytes
    title = " process" if hardware.unified else " context and workspace"
    target = "into memory" if hardware.unified else "to the device"
    peak = max(simulation.slots, key=lambda slot: slot.peak_bytes)
    waiting_seconds = max(0.0, simulation.seconds - simulation.compute_seconds)
    likely = probable_range(hardware, simulation.seconds, waiting_seconds)
    solve_text = f", {show_seconds(solve_seconds)} to solve" if solve_seconds is not None else ""
    terms = (
        (overhead, title),
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
            f"hardware {hardware.name} ({hardware.basis})  "
            f"{'memory' if hardware.unified else 'budget'} {budget}{ram_text(problem)}  "
            f"{regime(problem)}",
            *_process(problem),
            *_choices(solution),
            f"peak {show_size(simulation.peak_bytes)} at {peak.phase}  headroom"
            f" {show_size(problem.effective_bytes - simulation.peak_bytes)}  copies "
            f"{show_size(simulation.moved_bytes)} {target}",
            *_secondaries(problem, simulation),
            _host(problem, simulation),
            f"predicted {show_range(simulation.seconds, likely.bounds, likely.reason)}"
            f" = {show_seconds(simulation.compute_seconds)} compute"
            f" + {show_seconds(waiting_seconds)} waiting{session}  {proof(solution)}"
            f" (bound {show_seconds(solution.bound_seconds)}{solve_text})",
        )
    )


def _subject(solution: Solution, look: Look) -> str:
    """Return the graph, its budgets and reserve, the plan's choices, and the proof."""
    problem = solution.problem
    budgets = f"{budget_text(problem)}, {show_size(problem.effective_bytes)} of it for tensors"
    reserve = f", {show_size(problem.reserve_bytes)} reserve" if problem.reserve_bytes else ""
    proven = proof(solution)
    plan = f"{budgets}{reserve}{ram_text(problem, '; ')}; {regime(problem)}; {proven}"
    return look.folded(
        f"plan {subject(problem)}",
        plan,
        *_process(problem),
        *_secondaries(problem, solution.simulation),
        *_choices(solution),
    )


def _process(problem: Problem) -> list[str]:
    """Return the line with the process's own bytes, which on unified memory use the budget."""
    hardware = problem.hardware
    if not hardware.unified:
        return []
    parts = (
        (
            hardware.context_bytes,
            "Python and libraries" if hardware.kind.is_host else "Python, libraries and driver",
        ),
        (hardware.workspace_bytes, "workspace"),
        (problem.kernel_bytes, "operating system"),
    )
    text = " + ".join(f"{show_size(nbytes)} {name}" for nbytes, name in parts if nbytes)
    return [f"process {show_size(sum(nbytes for nbytes, _ in parts))} = {text}"]


def _choices(solution: Solution) -> list[str]:
    """Return lines with the directives, the precomputed values, and the plan's choices.

    The choices are options, the order of stages, components split into layers, and components found
    or left on the device.
    """
    problem = solution.problem
    choices = [f"{stage} with {name}" for stage, name in solution.plan.options]
    choices += (
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
        *listed("chosen", choices),
        *(
            [f"{', '.join(layered)}: split into layers, which are smaller than blocks"]
            if layered
            else []
        ),
        *residency_lines(solution),
    ]


def subject(problem: Problem, omitted_setting: str = "") -> str:
    """Return the graph, its last stage and its settings, except ``omitted_setting``."""
    settings = " ".join(
        f"{name}={value}" for name, value in problem.settings if name != omitted_setting
    )
    dtypes = "".join(f"  {new_dtype} for {dtype}" for dtype, new_dtype in problem.dtypes)
    until = f" until {problem.until}" if problem.until else ""
    absent = f" without {', '.join(problem.absent)}" if problem.absent else ""
    return f"{problem.graph}{absent}{until}  {settings}{dtypes}"


def range_note(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return why the ranges of ``rows`` are wide: ``; ranges: host copies vary``."""
    reasons = sorted({row["range_reason"] for row in rows} - {""})
    return f"; ranges: {', '.join(reasons)}" if reasons else ""


def residency_lines(solution: Solution) -> list[str]:
    """Return what a run finds on the device, and what each run of a session leaves there."""
    pairs = (("finds", solution.plan.finds), ("leaves", solution.plan.leaves))
    return [
        line
        for title, components in pairs
        for line in listed(title, [f"{name} {blocks_text(blocks)}" for name, blocks in components])
    ]


def listed(title: str, names: Sequence[str], note: str = "") -> list[str]:
    """Return a line with ``title``, ``names`` and ``note``; no line without names."""
    return [f"{title} {', '.join(names)}{note}"] if names else []


def ram_text(problem: Problem, separator: str = "  ") -> str:
    """Return the budget of host RAM after ``separator``; empty if device and host are one
    memory."""
    return "" if problem.hardware.unified else f"{separator}RAM {show_size(problem.ram_bytes)}"


def regime(problem: Problem) -> str:
    """Return ``cold run`` or ``session of N runs``."""
    return "cold run" if problem.runs == 1 else f"session of {problem.runs} runs"


def proof(solution: Solution) -> str:
    """Return ``optimal``, or how many percent slower than optimal the plan can be at most."""
    if solution.proven_optimal:
        return "optimal"
    if not solution.bound_seconds:
        return "not proven to be optimal"
    return f"at most {gap_text(solution)} slower than the best possible plan"


def gap_text(solution: Solution) -> str:
    """Return how much slower than the best possible plan ``solution`` can be, in percent."""
    excess = 100 * (solution.seconds / solution.bound_seconds - 1)
    return f"{excess:.2g} %" if excess < 10 else f"{excess:.0f} %"


def _host(problem: Problem, simulation: Simulation) -> str:
    """Return the line with the peak in RAM, and the bytes read from disk."""
    read_bytes = sum(slot.disk_bytes_read for slot in simulation.slots)
    reads = f"reads {show_size(read_bytes)} from disk" if read_bytes else "reads nothing from disk"
    if problem.hardware.unified:
        return reads
    pinned_text = (
        f", {show_size(simulation.pinned_peak_bytes)} page-locked"
        if simulation.pinned_peak_bytes
        else ""
    )
    limit = (
        f" (at most {show_size(problem.pinned_bytes)})" if problem.pinned_bytes is not None else ""
    )
    headroom = show_size(problem.ram_bytes - simulation.host_peak_bytes)
    return (
        f"host peak {show_size(simulation.host_peak_bytes)}{pinned_text}{limit}  headroom "
        f"{headroom}  {reads}"
    )


def _secondaries(problem: Problem, simulation: Simulation) -> list[str]:
    """Return a line for each secondary device: its budget, its peak, and its components.
    ``problem`` may have several variants of a component; the simulation's variants count."""
    lines = []
    for number, secondary in enumerate(problem.secondaries, 1):
        peak = max(slot.secondary_peaks[number - 1] for slot in simulation.all_slots)
        names = computing_on(simulation.problem, number)
        lines.append(
            f"device{number} {secondary.hardware.name} ({secondary.hardware.basis})  budget "
            f"{show_size(secondary.budget_bytes)}  peak"
            f" {show_size(peak)}  computes {', '.join(names) or 'nothing'}"
        )
    return lines


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
        table(rows, left_columns=(1,), width=width)
        + f"\n sizes in {units.size}; streamed: passes through a ring buffer; waits: nothing "
        "computes"
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
        table(rows, left_columns=(1,))
        + f"\n sizes in {units.size}, at the peak of each row; streamed: bytes that pass "
        "through the ring buffer"
    )


# attributes of a SlotReport that sum to its peak
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
    "ring buffer",
    "activation",
    "values",
    "peak",
    "headroom",
    "streamed",
)


def phase_cells(
    problem: Problem, phase: PhaseNumbers, reports: Sequence[SlotReport]
) -> tuple[list[SlotReport], list[str | float]]:
    """Return the slots of ``phase`` among ``reports``, and its cells in the order of `PHASE_HEAD`.

    Sizes are those of the slot with the highest peak; streamed bytes are a sum over all slots.
    ``problem`` has the plan's choices applied.
    """
    slots = [slot for slot in reports if slot.phase == phase.name]
    top = max(slots, key=lambda slot: slot.peak_bytes)
    sizes, streamed = (
        figures(top, *TERMS, "peak_bytes").values(),
        sum(slot.streamed_bytes for slot in slots),
    )
    return slots, [
        phase.name,
        call_count(phase),
        *sizes,
        problem.effective_bytes - top.peak_bytes,
        streamed,
    ]


def call_count(phase: PhaseNumbers) -> str:
    """Return the largest number of calls of a component in ``phase``."""
    return str(max((use.calls for use in phase.uses), default=0))


def phase_streams(slots: Iterable[Slot], component: str) -> dict[str, Stream]:
    """Return the last stream action of ``component`` in each phase that streams it."""
    return {
        slot.phase: action
        for slot in slots
        for action in slot.actions
        if isinstance(action, Stream) and action.component == component
    }


def _timeline(problem: Problem, slots: Sequence[Slot], finds: DeviceBlocks, width: int) -> str:
    """Return a table with the placement of each component in each phase, and its variant.
    ``finds``: the blocks on the device before the run."""
    placements = _placed(problem, slots, finds)
    rows = [["", *(f"{phase.stage}/{phase.index}" for phase in problem.phases), "stored as"]]
    rows += [[name, *_bars(marks, 4), storage] for name, marks, storage, _ in placements]
    notes = [
        f" ▒ {name} streamed in {phase}: {stay} stay resident"
        for name, _, _, stays in placements
        for phase, stay in stays.items()
    ]
    place = location(unified=problem.hardware.unified)
    legend = f" █ resident  ▒ streamed  ░ {place} during another component's phase  · not {place}"
    return "\n".join((table(rows, left_columns=range(len(rows[0]))), legend, *notes))


def _places(problem: Problem, slots: Sequence[Slot], finds: DeviceBlocks, width: int) -> str:
    """Return `_timeline` with narrow columns, numbered like the phases in the table above it."""
    placements = _placed(problem, slots, finds)
    mark_columns = max(
        1,
        min(4, (width - max(len(name) for name, *_ in placements) - 42) // len(problem.phases) - 2),
    )
    rows = [["", *map(str, range(len(problem.phases))), "stored as", "resident"]]
    rows += [
        [name, *_bars(marks, mark_columns), storage, ", ".join(dict.fromkeys(stays.values()))]
        for name, marks, storage, stays in placements
    ]
    place = location(unified=problem.hardware.unified)
    legend = f" █ resident  ▒ streamed  ░ loaded early or kept for later  · not {place}"
    return "\n".join((table(rows, left_columns=range(len(rows[0])), width=width), legend))


def _bars(marks: Sequence[str], columns: int) -> list[str]:
    return [mark * columns if mark in "█▒░" else mark[:columns] for mark in marks]


def _placed(
    problem: Problem, slots: Sequence[Slot], finds: DeviceBlocks
) -> list[tuple[str, list[str], str, dict[str, str]]]:
    """Return each component with its mark in each phase, its variant, and its resident blocks. The
    blocks are text, for each phase that streams the component."""
    placements = []
    for component in problem.components:
        variant, streams = component.variants[0], phase_streams(slots, component.name)
        marks, stays = list[str](), dict[str, str]()
        resident = resident_counts(component, finds, slots)
        for phase in problem.phases:
            is_used = any(use.component == component.name for use in phase.uses)
            blocks = resident[phase.name]
            if is_used and variant.device == "cpu":
                marks.append("cpu")
            elif phase.name in streams:
                marks.append("▒")
                stays[phase.name] = (
                    f"{blocks} of {sum(len(k.blocks) for k in component.groups)} "
                    f"{component.granularity}"
                )
            else:
                marks.append(("█" if is_used else "░") if blocks else "·")
        device_text = f", on {variant.device}" if variant.secondary else ""
        location = (
            f"{backing_store_text(variant.backing_store)}{device_text}"
            if variant.device != "cpu"
            else "computed on the CPU"
        )
        placements.append((component.name, marks, f"{variant.precision}, {location}", stays))
    return placements


def resident_counts(
    component: ComponentNumbers, finds: DeviceBlocks, slots: Sequence[Slot]
) -> dict[str, int]:
    """Return the most resident blocks of ``component`` in each phase."""
    counts = dict[str, int]()
    for slot, blocks in zip(slots, resident_blocks(component, finds, slots), strict=True):
        counts[slot.phase] = max(len(blocks), counts.get(slot.phase, 0))
    return counts


def backing_store_text(backing_store: str) -> str:
    """Return where weights are stored, for a screen: on disk, if blocks are read from files."""
    return "on disk" if backing_store == "file" else backing_store


def _why(solution: Solution) -> str:
    problem = solution.chosen
    lines = dict[str, None]()
    for component in problem.components:
        weights, streams = (
            component.weight_bytes(),
            phase_streams(solution.plan.slots, component.name),
        )
        for number, phase in enumerate(problem.phases):
            if phase.name not in streams:
                continue
            other_bytes = (
                max(phase.first_bytes, phase.steady_bytes)
                + phase.input_bytes
                + problem.value_bytes(number)
            )
            if "exclude" in problem.demanded(component.name):
                reason = "exclude demands it"
            elif weights + other_bytes > problem.effective_bytes:
                reason = (
                    f"resident it needs {show_size(weights)}, and its calls "
                    f"{show_size(other_bytes)}, more than {show_size(problem.effective_bytes)}"
                    + _new_memory_reason(solution, phase.name, component)
                )
            else:
                reason = "it would fit, but streaming takes no longer and uses less memory"
            lines[f" why {component.name} is streamed: {reason}"] = None
    return "\n".join(lines)


def _new_memory_reason(solution: Solution, phase: str, component: ComponentNumbers) -> str:
    """Return why not more blocks are resident, if more fit, each is read at every call, and the
    calls wait for it: memory that the run has not used yet is slow."""
    problem, slots = solution.chosen, solution.plan.slots
    byte_seconds = problem.hardware.first_touch_seconds
    reports = [
        (slot.calls, report)
        for slot, report in zip(slots, solution.simulation.slots, strict=True)
        if slot.phase == phase
    ]
    calls = sum(calls for calls, _ in reports)
    unused_bytes = problem.effective_bytes - max(report.peak_bytes for _, report in reports)
    largest_bytes = max(component.variants[0].block_bytes)
    waits = any(calls > 1 and report.stall_seconds > 0 for calls, report in reports)
    if not byte_seconds or not waits or unused_bytes < largest_bytes:
        return ""
    return (
        f"; {show_size(unused_bytes)} more would fit, but new memory comes at "
        f"{1 / byte_seconds / 1e9:.2g} GB/s, so reading again in {calls} calls takes less time"
    )


def explain_screen(solution: Solution) -> str:
    """Return the screen of ``graphrun explain``: the bytes, the time and the actions of every slot,
    then the basis of each number."""
    problem, plan, simulation = solution.chosen, solution.plan, solution.simulation
    lines = [_head(solution, simulation, None), ""]
    clock, reports = 0.0, simulation.all_slots
    for number, (slot, report) in enumerate(zip(plan.all_slots, reports, strict=True)):
        lines += ["", "every further run", ""] if number == len(plan.slots) else []
        title = f"{slot.phase} {slot.part}".strip() + (
            f" x{slot.calls}" if slot.part == "steady" else ""
        )
        lines.append(
            f"slot {title}   at {clock:.3f} s  takes {show_seconds(report.seconds)}"
            f" (compute {show_seconds(report.compute_seconds)}, waits "
            f"{show_seconds(report.stall_seconds)})"
        )
        sizes = f"{show_size(report.peak_bytes)} of {show_size(problem.effective_bytes)}"
        parts_text = f" = {terms(report)}" if report.peak_bytes else ""
        lines.append(f"  uses {sizes}{parts_text}")

        lines += [f"  {action_text(action)}" for action in slot.actions]
        clock += report.seconds
    bases = [f"{c.name} weights ({c.basis})" for c in problem.components]
    bases += [f"{p.name} activation ({p.basis})" for p in problem.phases] + [
        f"{v.name} ({v.basis})" for v in problem.values
    ]
    basis = f"basis: hardware {problem.hardware.basis}, seconds from it; " + "; ".join(bases)
    lines += ["", *textwrap.wrap(basis, 110, subsequent_indent="  "), ""]
    lines += [*_numbered_group(problem), _why(solution)]
    return "\n".join(lines).rstrip()


def _numbered_group(problem: Problem) -> list[str]:
    """Return a line about the names of block groups such as ``transformer_blocks_2``."""
    names = (group.name for component in problem.components for group in component.groups)
    return [
        f" {name}, and so on: blocks or layers of {name.removesuffix('_2')} that have another size"
        for name in names
        if name.endswith("_2")
    ][:1]


def terms(report: SlotReport) -> str:
    """Return the sizes that sum to the peak of a slot; where nothing computes, allocator pages in
    place of activations."""
    rest_name = "activation" if report.compute_seconds else "reserved pages"
    names = ("weights", "ring buffer", rest_name, "values and inputs")
    sizes = figures(report, *TERMS).values()
    return " + ".join(
        f"{show_size(nbytes)} {name}" for nbytes, name in zip(sizes, names, strict=True) if nbytes
    )


def check_screen(solution: Solution) -> str:
    """Return the line for a plan that breaks no rule."""
    slots, simulation = solution.plan.slots, solution.simulation
    actions = sum(len(slot.actions) for slot in slots)
    return (
        f"ok: {len(slots)} slots, {actions} actions, peak {show_size(simulation.peak_bytes)}"
        f" of {show_size(solution.problem.effective_bytes)}, predicted "
        f"{show_seconds(simulation.seconds)}"
    )


def measured_screen(
    solution: Solution, trace: Trace, output_files: Sequence[str], look: Look | None = None
) -> str:
    """Return the last screen of ``graphrun run``: planned and measured numbers. It has a row for
    each phase, or for each slot if verbose, the output files, and the bytes left on the device."""
    look, simulation = look or Look(), solution.simulation
    units, pairs = (
        Units(simulation.peak_bytes, simulation.seconds),
        trace.pairs_with(simulation.slots),
    )
    pairs = pairs if look.verbose else [pair for pair in pairs if pair[1].phase]
    names = [pair[1].name if look.verbose else pair[1].phase for pair in pairs]
    rows = [comparison_head("slot" if look.verbose else "phase", units, verbose=look.verbose)]
    for name in dict.fromkeys(names):
        rows.append(
            units.row(
                name,
                *comparison_cells(
                    [
                        pair
                        for pair, pair_name in zip(pairs, names, strict=True)
                        if pair_name == name
                    ]
                ),
            )
        )
    sizes = (simulation.peak_bytes, trace.peak_bytes, simulation.moved_bytes, trace.moved_bytes)
    rows.append(units.row("whole run", *sizes, simulation.seconds, trace.seconds))
    return "\n".join(
        (
            "",
            look.first(run_verdict(solution, trace)),
            *(f"wrote {path}" for path in output_files),
            "",
            table(rows, left_columns=(0,), width=None if look.verbose else look.width),
            f" sizes in {units.size}; {units.time} {clock_text(trace.device)}",
            verdict_line(trace),
        )
    )


def comparison_head(
    title: str, units: Units, *, verbose: bool = False, movement: str = "moved"
) -> list[str]:
    """Return the head of a table of `comparison_cells`, with the title of its first column."""
    plan, run = ("planned", "measured") if verbose else ("plan", "run")
    numbers = ("peak", movement, units.time)
    return [title, *(text for number in numbers for text in (f"{number} {plan}", run))]


def comparison_cells(pairs: Sequence[tuple[SlotReport, SlotTrace]]) -> list[float]:
    """Return the peak, the moved bytes and the seconds of ``pairs``, each planned and measured."""
    return [
        max((report.peak_bytes for report, _ in pairs), default=0),
        max((slot.peak_bytes for _, slot in pairs), default=0),
        sum(report.streamed_bytes + report.loaded_bytes for report, _ in pairs),
        sum(slot.moved_bytes for _, slot in pairs),
        sum((report.seconds for report, _ in pairs), 0.0),
        sum((slot.end_seconds - slot.start_seconds for _, slot in pairs), 0.0),
    ]


def verdict_line(trace: Trace) -> str:
    """Return the verdict on a run, and the bytes it left on the device."""
    return f"{trace.verdict}; left {location(unified=trace.unified)}: {show_size(trace.left_bytes)}"
