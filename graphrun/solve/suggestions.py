"""Suggestions: changes of a problem, each verified by a solve.

    suggestions_of        after which a plan exists: other budgets, permissions, fewer directives,
                          stages run separately
    setting_suggestions   the same, with a dry run each: options of stages, a smaller image
    speedups              after which a plan that mostly waits for copies or the disk is faster:
                          permissions, all of the card, RAM for all weights, a session

Changes that leave the output unchanged come first, then the fastest. All suggestions of a problem
share a budget of the solver's work (`SearchBudget`), so that they take no longer than a plan;
`thorough` lifts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from graphrun.errors import GraphrunError
from graphrun.graph.graph import Graph
from graphrun.graph.precisions import CLASSES, QUANTIZED
from graphrun.model.choices import stages_of
from graphrun.model.least_memory import PhaseMinimum, used_components
from graphrun.model.problem import PhaseNumbers, Problem, ValueNumbers
from graphrun.model.solution import Solution
from graphrun.solve.bounds import surely_short
from graphrun.solve.least import ever_finer, has_usable_variants
from graphrun.solve.linear import ROUGH_GAP, SearchBudget, SearchEnded
from graphrun.solve.milp import Formulation
from graphrun.solve.orders import stage_choices
from graphrun.solve.search import SECONDS, Goal, choose
from graphrun.units import GIB, typed_size

INPUT_SIZES = ("height", "width", "num_frames", "frames")
# in eighths of the original size; each is a dry run of some seconds
EIGHTHS = (7, 6, 5, 4, 3, 2)

EstimateFunction = Callable[[Mapping[str, Any], tuple[str, ...]], Problem]
LEAST_GAIN = 0.1  # minimum share of a run's time that a suggestion saves
SESSION = 8  # runs
# Solver calls, and nodes times columns, for all suggestions of a problem. The seven suggestions for
# FLUX.1-dev within 8 GiB of VRAM and 16 GiB of RAM take 21 calls and 34,000.
ATTEMPTS, NODES = 60, 100_000
ROUGH_SECONDS = (replace(SECONDS[0], gap=ROUGH_GAP),)
# A change of the output must be this much faster to lead the suggestions; each further option to
# type counts as slower by the second factor.
OUTPUT_FACTOR, OPTION_FACTOR = 1.25, 1.05

_is_thorough: ContextVar[bool] = ContextVar("thorough", default=False)


@contextmanager
def thorough() -> Iterator[None]:
    """Context in which the search for suggestions has no limit of work."""
    token = _is_thorough.set(True)
    try:
        yield
    finally:
        _is_thorough.reset(token)


def is_thorough() -> bool:
    """Return whether the code runs in the context `thorough`."""
    return _is_thorough.get()


def predicted_seconds(problem: Problem, goals: Sequence[Goal] = SECONDS) -> float | None:
    """Return the seconds of the fastest plan by the program; None if nothing fits.

    ``goals``: with ROUGH_SECONDS, at most ROUGH_GAP above the least.
    """
    if not has_usable_variants(problem) or surely_short(problem):
        return None
    for split in ever_finer(problem):
        answer = choose(
            [Formulation(stage_choice.program) for stage_choice in stage_choices(split)[0]], goals
        )
        if answer is not None:
            return answer.rows.seconds()
    return None


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change after which a plan exists.

    ``change``: command-line options with values; "" for an option without a value. ``seconds``:
    predicted total of all runs. ``changes_output``: whether generated images differ.
    """

    text: str
    change: tuple[tuple[str, str], ...]
    seconds: float
    changes_output: bool = False

    def __str__(self) -> str:
        return self.text

    @property
    def typed(self) -> bool:
        """Whether adding options to the same command makes the change."""
        return bool(self.change) and all(
            value and option != "--until" for option, value in self.change
        )

    def needs_hardware(self, capacity_bytes: int) -> bool:
        """Return whether the change needs more RAM, or a device larger than ``capacity_bytes``."""
        return any(
            option == "--ram" or (value and exceeds_device(option, value, capacity_bytes))
            for option, value in self.change
        )


def best_first(suggestions: Iterable[Suggestion]) -> tuple[Suggestion, ...]:
    """Return ``suggestions`` sorted: unchanged outputs first, then by time."""
    return tuple(sorted(suggestions, key=lambda item: (item.changes_output, item.seconds)))


def leading(suggestions: Iterable[Suggestion], capacity_bytes: int) -> Suggestion | None:
    """Return the fastest typed suggestion that needs no new hardware; None without one.

    A changed output counts as slower by OUTPUT_FACTOR, and each option by OPTION_FACTOR.
    ``capacity_bytes``: the device's memory.
    """
    candidates = [
        suggestion
        for suggestion in suggestions
        if suggestion.typed and not suggestion.needs_hardware(capacity_bytes)
    ]

    def rank(suggestion: Suggestion) -> float:
        output_factor = OUTPUT_FACTOR if suggestion.changes_output else 1.0
        return suggestion.seconds * output_factor * OPTION_FACTOR ** len(suggestion.change)

    return min(candidates, key=rank, default=None)


# options whose suggested size `typed_value` rounds up
SIZES = (
    "--vram",
    "--memory",
    "--ram",
    "--pinned",
    "--disk",
)


def typed_value(option: str, value: str) -> str:
    """Return ``value`` of ``option`` as a user types it. Rounded sizes still suffice."""
    if option not in (*SIZES, "--reserve"):
        return value
    return ",".join(
        typed_size(nbytes, round_down=option == "--reserve") for nbytes in sizes_in(value)
    )


def sizes_in(value: str) -> list[int]:
    """Return the bytes in the value of an option, one number per device."""
    return [int(size.removesuffix("B")) for size in value.split(",")]


def exceeds_device(option: str, value: str, capacity_bytes: int) -> bool:
    """Return whether ``option`` is a budget of more than the device's ``capacity_bytes``."""
    return option in ("--vram", "--memory") and sizes_in(value)[0] > capacity_bytes


def python_arguments(suggestion: Suggestion, problem: Problem) -> str:
    """Return ``suggestion`` as Python arguments, such as ``vram="3.4G"``.

    Empty if arguments do not suffice: a directive left out, a second run, a larger device.
    """
    values: dict[str, list[str]] = {}
    for option, value in suggestion.change:
        if option not in (*SIZES, "--reserve", "--allow") or exceeds_device(
            option, value, problem.hardware.capacity_bytes
        ):
            return ""
        values.setdefault(option.removeprefix("--"), []).append(typed_value(option, value))
    if "allow" in values:
        values["allow"] = [*problem.allow, *values["allow"]]
    lists = {name: ", ".join(f'"{text}"' for text in texts) for name, texts in values.items()}
    return ", ".join(
        f"{name}=[{text}]" if name == "allow" else f"{name}={text}" for name, text in lists.items()
    )


@dataclass(frozen=True, slots=True)
class Proposal:
    """A suggestion to verify: ``problems`` must all have plans; else try ``fallback``."""

    text: str
    change: tuple[tuple[str, str], ...]
    problems: tuple[Problem, ...]
    changes_output: bool = False
    fallback: Proposal | None = None

    def verified(self, goals: Sequence[Goal] = SECONDS) -> Suggestion | None:
        """Return the suggestion with its predicted seconds; None if it does not help."""
        seconds = [predicted_seconds(problem, goals) for problem in self.problems]
        if None in seconds:
            return self.fallback.verified(goals) if self.fallback is not None else None
        total_seconds = sum(s for s in seconds if s is not None)
        return Suggestion(self.text, self.change, total_seconds, self.changes_output)


def suggestions_of(
    problem: Problem, needs: Sequence[PhaseMinimum], minimum_bytes: Mapping[str, int]
) -> tuple[Suggestion, ...]:
    """Return the changes that each suffice alone, best first.

    ``needs``: the phases that do not fit in VRAM. ``minimum_bytes``: tier -> its minimum budget.
    """
    proposals = _proposals(problem, needs, minimum_bytes)
    return best_first(suggestion for _, suggestion in _verified(proposals))


def _verified(
    proposals: Iterable[Proposal], goals: Sequence[Goal] = SECONDS
) -> Iterator[tuple[Proposal, Suggestion]]:
    """Yield the ``proposals`` that help, with their suggestions, while the work budget lasts."""
    budget = SearchBudget(ATTEMPTS, NODES)
    for proposal in proposals:
        try:
            if is_thorough():
                suggestion = proposal.verified()
            else:
                with budget.limiting():
                    suggestion = proposal.verified(goals)
        except SearchEnded:
            return
        if suggestion is not None:
            yield proposal, suggestion


def _proposals(
    problem: Problem, needs: Sequence[PhaseMinimum], minimum_bytes: Mapping[str, int]
) -> Iterator[Proposal]:
    yield from _budgets(problem, minimum_bytes)
    yield from permissions(problem)
    yield from _directives(problem, needs)
    yield from _separate_runs(problem)
    yield from _smaller_activation(problem, needs)


def _budgets(problem: Problem, minimum_bytes: Mapping[str, int]) -> Iterator[Proposal]:
    """Raise each budget that is too small alone, and VRAM and RAM together if both are."""
    capacity, ram = problem.hardware.capacity_bytes, problem.ram_bytes
    minimum_vram_bytes = minimum_bytes[problem.hardware.budget_name]
    minimum_ram_bytes = minimum_bytes.get("RAM", ram)
    raised = problem.with_budget(minimum_vram_bytes)
    if minimum_vram_bytes > capacity:
        raised = replace(
            raised, hardware=replace(problem.hardware, capacity_bytes=minimum_vram_bytes)
        )
    vram = Proposal(
        _device_text(problem, minimum_vram_bytes),
        (problem.budget_change(minimum_vram_bytes),),
        (raised,),
    )
    if minimum_vram_bytes > min(problem.budget_bytes, capacity):
        yield vram
    if minimum_ram_bytes > ram:
        text = _raise_text("RAM", ram, minimum_ram_bytes)
        yield Proposal(
            text,
            (("--ram", str(minimum_ram_bytes)),),
            (replace(problem, ram_bytes=minimum_ram_bytes),),
        )
        if minimum_vram_bytes > min(problem.budget_bytes, capacity):
            raised_problems = (replace(raised, ram_bytes=minimum_ram_bytes),)
            yield Proposal(
                f"{vram.text} and {text}",
                (*vram.change, ("--ram", str(minimum_ram_bytes))),
                raised_problems,
            )
    if (
        problem.pinned_bytes is not None
        and (pinned := minimum_bytes["pinned RAM"]) > problem.pinned_bytes
    ):
        text = _raise_text("page-locked RAM", problem.pinned_bytes, pinned)
        yield Proposal(text, (("--pinned", str(pinned)),), (replace(problem, pinned_bytes=pinned),))
    if problem.disk_bytes is not None and (disk := minimum_bytes["disk"]) > problem.disk_bytes:
        yield Proposal(
            _raise_text("disk", problem.disk_bytes, disk),
            (("--disk", str(disk)),),
            (replace(problem, disk_bytes=disk),),
        )


def _device_text(problem: Problem, minimum_bytes: int) -> str:
    capacity = problem.hardware.capacity_bytes
    if minimum_bytes > capacity:
        return (
            f"use a {'machine' if problem.hardware.unified else 'device'} with "
            f"{typed_size(minimum_bytes)} or more: this one has {typed_size(capacity)}"
        )
    return _raise_text(problem.hardware.budget_name, problem.budget_bytes, minimum_bytes)


def _raise_text(tier: str, have: int, want: int) -> str:
    return f"raise the {tier} budget from {typed_size(have, round_down=True)} to {typed_size(want)}"


def permissions(problem: Problem) -> Iterator[Proposal]:
    """Grant the missing permissions of variants and options: each alone, then all together.

    Several precisions of one class (4bit, 8bit) are granted together, by the name of the class.
    """
    variants = {
        variant.needs: (component.name, variant)
        for component in problem.components
        for variant in component.variants
    }
    options = {option.needs: option for option in problem.options}
    missing_names = [
        name for name in sorted({*variants, *options}) if name and name not in problem.allow
    ]
    granted = {
        name: members
        for name, formats in CLASSES.items()
        if len(members := [member for member in missing_names if member in formats]) > 1
    }
    grouped_names = {member for members in granted.values() for member in members}
    granted |= {name: [name] for name in missing_names if name not in grouped_names}
    for name, members in granted.items():
        users = [c.name for c in problem.components if any(v.needs in members for v in c.variants)]
        users += [
            f"{option.name} of {option.stage}"
            for option in problem.options
            if option.needs in members
        ]
        yield Proposal(
            f"allow {name} (for {', '.join(users)})",
            (("--allow", name),),
            (replace(problem, allow=(*problem.allow, *members)),),
            True,
        )
    if len(granted) > 1:
        names = list(granted)
        if len(names) > 2 and set(missing_names) <= set(QUANTIZED):
            names = ["precision"]
        yield Proposal(
            f"allow {', '.join(names)}",
            tuple(("--allow", name) for name in names),
            (replace(problem, allow=(*problem.allow, *missing_names)),),
            True,
        )


def _directives(problem: Problem, needs: Sequence[PhaseMinimum]) -> Iterator[Proposal]:
    short = max((need.short_bytes for need in needs), default=0)
    if problem.reserve_bytes and 0 < short <= problem.reserve_bytes:
        lowered = problem.reserve_bytes - short
        text = (
            f"lower the reserve from {typed_size(problem.reserve_bytes)}"
            f" to {typed_size(lowered, round_down=True)}"
        )
        yield Proposal(
            text, (("--reserve", str(lowered)),), (replace(problem, reserve_bytes=lowered),)
        )
    for directive in problem.directives:
        directives = tuple(other for other in problem.directives if other != directive)
        name = f"{directive.placement} {directive.component}"
        yield Proposal(
            f"leave out '{name}'",
            ((f"--{directive.placement}", ""),),
            (replace(problem, directives=directives),),
        )


def _separate_runs(problem: Problem) -> Iterator[Proposal]:
    """Run the leading stages separately, and the other stages with their saved outputs.

    If the leading stages do not fit even so, they may run on a larger machine.
    """
    stages = stages_of(problem)
    for count in range(1, len(stages)):
        leading, last = stages[:count], stages[count - 1]
        if problem.runs > 1 or any(
            first not in leading for first, second in problem.precedence or () if second in leading
        ):
            continue
        trailing, change = _subproblem(problem, stages[count:]), (("--until", last),)
        text = (
            f"run {', '.join(leading)} separately: first with --until {last}, then the other stages"
            " with its outputs"
        )
        fallback_text = (
            f"run {', '.join(leading)} on a larger machine with --until {last}, then the other"
            " stages here with its outputs"
        )
        yield Proposal(
            text,
            change,
            (_subproblem(problem, leading), trailing),
            fallback=Proposal(fallback_text, change, (trailing,)),
        )


def _subproblem(problem: Problem, stages: tuple[str, ...]) -> Problem:
    """Return ``problem`` with only ``stages``; earlier values exist from the start."""
    numbers = [number for number, phase in enumerate(problem.phases) if phase.stage in stages]
    phases = tuple(problem.phases[number] for number in numbers)
    values = tuple(
        _shifted(value, numbers[0], numbers[-1])
        for value in problem.values
        if numbers and _overlaps(value, numbers)
    )
    names = {use.component for phase in phases for use in phase.uses}
    names |= {
        use.component
        for option in problem.options
        if option.stage in stages
        for phase in option.phases
        for use in phase.uses
    }
    pairs = problem.precedence
    return replace(
        problem,
        phases=phases,
        values=values,
        components=tuple(component for component in problem.components if component.name in names),
        directives=tuple(
            directive for directive in problem.directives if directive.component in names
        ),
        precedence=None
        if pairs is None
        else tuple(pair for pair in pairs if set(pair) <= set(stages)),
        options=tuple(option for option in problem.options if option.stage in stages),
    )


def _overlaps(value: ValueNumbers, numbers: Sequence[int]) -> bool:
    return value.first_phase <= numbers[-1] and value.last_phase >= numbers[0]


def _shifted(value: ValueNumbers, begin: int, end: int) -> ValueNumbers:
    return replace(
        value,
        first_phase=max(value.first_phase, begin) - begin,
        last_phase=min(value.last_phase, end) - begin,
    )


def _smaller_activation(problem: Problem, needs: Sequence[PhaseMinimum]) -> Iterator[Proposal]:
    """Shrink the activation of the phases that do not fit in VRAM until they fit."""
    limits = {
        need.phase: need.available_bytes - need.total_bytes + need.activation_bytes
        for need in needs
    }
    if not limits or any(limit <= 0 for limit in limits.values()):
        return
    parts = [
        f"of {need.phase} is {typed_size(limits[need.phase], round_down=True)}"
        f" instead of {typed_size(need.activation_bytes)}"
        for need in needs
    ]
    phases = tuple(_limit_activation(phase, limits.get(phase.name)) for phase in problem.phases)
    text = (
        "use a smaller image, fewer images at once, or tiling, until the activation "
        f"{' and '.join(parts)}"
    )
    yield Proposal(text, (), (replace(problem, phases=phases),), True)


def _limit_activation(phase: PhaseNumbers, activation: int | None) -> PhaseNumbers:
    if activation is None:
        return phase
    return replace(
        phase,
        first_bytes=min(phase.first_bytes, activation),
        steady_bytes=min(phase.steady_bytes, activation),
    )


# ---- With another dry run


def setting_suggestions(
    graph: Graph, inputs: Mapping[str, Any], allow: tuple[str, ...], estimate: EstimateFunction
) -> tuple[Suggestion, ...]:
    """Return changes that each suffice alone: further permissions, the largest size that fits.

    ``estimate(inputs, allow)`` returns a problem. A change whose dry run fails is left out.
    """
    return (
        *options_of(graph, inputs, allow, estimate),
        *_input_sizes(graph, inputs, allow, estimate),
    )


def options_of(
    graph: Graph, inputs: Mapping[str, Any], allow: tuple[str, ...], estimate: EstimateFunction
) -> Iterator[Suggestion]:
    """Yield the options of the graph without permission, with predicted seconds."""
    stages_by_permission: dict[str, list[str]] = {}
    for stage in graph.stages:
        for name in stage.options:
            if (needs := stage.operation.options[name]) and needs not in allow:
                stages_by_permission.setdefault(needs, []).append(stage.name)
    for needs, stages in stages_by_permission.items():
        seconds = seconds_or_none(lambda needs=needs: estimate(inputs, (*allow, needs)))  # type: ignore[misc]
        if seconds is not None:
            yield Suggestion(
                f"allow {needs} (of {', '.join(stages)})", (("--allow", needs),), seconds, True
            )


def _input_sizes(
    graph: Graph, inputs: Mapping[str, Any], allow: tuple[str, ...], estimate: EstimateFunction
) -> Iterator[Suggestion]:
    values = graph.for_planning(inputs)
    sizes = {
        name: values[name]
        for name in INPUT_SIZES
        if name in graph.inputs and isinstance(values[name], int)
    }
    for eighths in EIGHTHS if sizes else ():
        smaller = {
            name: _scaled(value, eighths, graph.inputs[name].multiple_of or 1)
            for name, value in sizes.items()
        }
        seconds = seconds_or_none(lambda smaller=smaller: estimate({**inputs, **smaller}, allow))  # type: ignore[misc]
        if seconds is not None:
            text = " ".join(f"{name}={value}" for name, value in smaller.items())
            yield Suggestion(
                f"make it smaller: {text}",
                tuple(("--set", f"{k}={v}") for k, v in smaller.items()),
                seconds,
                True,
            )
            return


def _scaled(value: int, eighths: int, step: int) -> int:
    return max(step, value * eighths // 8 // step * step)


def seconds_or_none(problem: Callable[[], Problem]) -> float | None:
    """Return the predicted seconds of what ``problem`` returns; None if it is refused."""
    try:
        return predicted_seconds(problem())
    except GraphrunError:
        return None


# ---- Faster plans


def speedups(problem: Problem, options: Iterable[Suggestion]) -> Iterator[Suggestion]:
    """Yield changes of ``problem``, then ``options``, with the predicted seconds of one run."""
    for proposal, suggestion in _verified(_speedup_proposals(problem), ROUGH_SECONDS):
        runs = proposal.problems[0].runs
        yield replace(suggestion, seconds=suggestion.seconds / runs)
    yield from (
        replace(suggestion, seconds=suggestion.seconds / problem.runs) for suggestion in options
    )


def worthwhile(suggestions: Iterable[Suggestion], solution: Solution) -> tuple[Suggestion, ...]:
    """Return the ``suggestions`` that save at least LEAST_GAIN, best first."""
    limit_seconds = (1 - LEAST_GAIN) * solution.seconds / solution.problem.runs
    return best_first(item for item in suggestions if item.seconds <= limit_seconds)


def _speedup_proposals(problem: Problem) -> Iterator[Proposal]:
    yield from permissions(problem)
    capacity = problem.hardware.capacity_bytes
    if (
        problem.budget_bytes < capacity
        and problem.hardware.kind.free_memory != "none"
        and not problem.secondaries
    ):
        text = "all of the machine's memory" if problem.hardware.unified else "all of the card"
        change = problem.budget_change(capacity)
        yield Proposal(text, (change,), (problem.with_budget(capacity),))
    if not problem.hardware.unified and (ram := _ample_ram(problem)) > problem.ram_bytes:
        ample = replace(problem, ram_bytes=ram)
        yield Proposal("RAM for all weights", (("--ram", str(ram)),), (ample,))
    if problem.runs == 1:
        text, session = f"per run, in a session of {SESSION} runs", replace(problem, runs=SESSION)
        yield Proposal(text, (("--runs", str(SESSION)),), (session,))


def _ample_ram(problem: Problem) -> int:
    """Return the RAM for all backing stores, in bytes, rounded up to GiB.

    Each component in its first usable variant with a backing store in RAM.
    """
    in_ram = [
        [v for v in (c.variants[n] for n in problem.usable(c)) if v.backing_store != "disk"]
        for c in used_components(problem)
    ]
    store_bytes = [
        variants[0].host_bytes + variants[0].transient_bytes for variants in in_ram if variants
    ]
    return -(-sum(store_bytes) // GIB) * GIB
