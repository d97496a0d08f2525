"""Suggestions: changes of a problem, each verified by a solve.

    suggestions_of        after which a plan exists: budgets, permissions, directives, stages apart
    setting_suggestions   the same, with a dry run each: options of stages, a smaller image
    speedups              after which a plan that mostly waits for copies or the disk is faster:
                          all of the card, RAM for all weights, a session, weights stored in the
                          precision they are used in, permissions

Changes that leave the output unchanged come first, then those with the least predicted time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graphrun.errors import GraphrunError
from graphrun.graph.graph import Graph
from graphrun.model.choices import stages_of, with_each_variant
from graphrun.model.least_memory import PhaseMinimum, used_components
from graphrun.model.problem import PhaseNumbers, Problem, ValueNumbers, Variant
from graphrun.model.solution import Solution
from graphrun.solve.least import ever_finer, has_usable_variants
from graphrun.solve.milp import Formulation
from graphrun.solve.orders import stage_choices
from graphrun.solve.search import SECONDS, choose
from graphrun.units import GIB, typed_size

INPUT_SIZES = ("height", "width", "num_frames", "frames")
# sizes to try, in eighths of the original size; each is a dry run of some seconds
EIGHTHS = (7, 6, 5, 4, 3, 2)

EstimateFunction = Callable[[Mapping[str, Any], tuple[str, ...]], Problem]
LEAST_GAIN = 0.1  # minimum share of a run's time that a suggestion saves
SESSION = 8  # runs


def predicted_seconds(problem: Problem) -> float | None:
    """Return the seconds of the fastest plan for ``problem`` by the program, without simulation;
    None if nothing fits."""
    for split in ever_finer(problem) if has_usable_variants(problem) else ():
        answer = choose(
            [Formulation(stage_choice.program) for stage_choice in stage_choices(split)[0]], SECONDS
        )
        if answer is not None:
            return answer.rows.seconds()
    return None


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change after which a plan exists.

    ``change``: pairs of a command-line option and its value, "" for an option without a value.
    ``seconds``: predicted total of all runs. ``changes_output``: whether generated images differ.
    """

    text: str
    change: tuple[tuple[str, str], ...]
    seconds: float
    changes_output: bool = False

    def __str__(self) -> str:
        return self.text


def best_first(suggestions: Iterable[Suggestion]) -> tuple[Suggestion, ...]:
    """Return ``suggestions``, first those without changes of the output, then by time."""
    return tuple(sorted(suggestions, key=lambda item: (item.changes_output, item.seconds)))


# options with a size that may be larger than suggested
SIZES = (
    "--vram",
    "--memory",
    "--ram",
    "--pinned",
    "--disk",
)


def typed_value(option: str, value: str) -> str:
    """Return ``value`` of ``option`` as a user types it. Sizes are rounded so that they still
    suffice."""
    if option not in (*SIZES, "--reserve"):
        return value
    return ",".join(
        typed_size(nbytes, round_down=option == "--reserve") for nbytes in sizes_in(value)
    )


def sizes_in(value: str) -> list[int]:
    """Return the bytes in the value of an option, one number for each device."""
    return [int(size.removesuffix("B")) for size in value.split(",")]


def exceeds_device(option: str, value: str, capacity_bytes: int) -> bool:
    """Return whether ``option`` is a budget of more than the device's ``capacity_bytes``."""
    return option in ("--vram", "--memory") and sizes_in(value)[0] > capacity_bytes


def python_arguments(suggestion: Suggestion, problem: Problem) -> str:
    """Return the arguments of `graphrun.estimate` or `graphrun.attach` for ``suggestion``, such as
    ``vram="3.4G"``.

    Empty if arguments alone do not suffice: a directive left out, a second run, a larger device.
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
    """A suggestion to verify: each of ``problems`` must have a plan. Otherwise ``fallback`` is
    verified."""

    text: str
    change: tuple[tuple[str, str], ...]
    problems: tuple[Problem, ...]
    changes_output: bool = False
    fallback: Proposal | None = None

    def verified(self) -> Suggestion | None:
        """Return the suggestion with its predicted seconds; None if it does not help."""
        seconds = [predicted_seconds(problem) for problem in self.problems]
        if None in seconds:
            return self.fallback.verified() if self.fallback is not None else None
        total_seconds = sum(s for s in seconds if s is not None)
        return Suggestion(self.text, self.change, total_seconds, self.changes_output)


def suggestions_of(
    problem: Problem, needs: Sequence[PhaseMinimum], minimum_bytes: Mapping[str, int]
) -> tuple[Suggestion, ...]:
    """Return the changes that each suffice alone, best first.

    ``needs``: the phases that do not fit in VRAM. ``minimum_bytes``: name of a tier -> its minimum
    budget.
    """
    proposals = _proposals(problem, needs, minimum_bytes)
    suggestions = (proposal.verified() for proposal in proposals)
    return best_first(suggestion for suggestion in suggestions if suggestion is not None)


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


def _device_text(problem: Problem, device: int) -> str:
    capacity = problem.hardware.capacity_bytes
    if device > capacity:
        return (
            f"use a {'machine' if problem.hardware.unified else 'device'} with "
            f"{typed_size(device)} or more: this one has {typed_size(capacity)}"
        )
    return _raise_text(problem.hardware.budget_name, problem.budget_bytes, device)


def _raise_text(tier: str, have: int, want: int) -> str:
    """Return the suggestion to raise the budget ``tier``, in words."""
    return f"raise the {tier} budget from {typed_size(have, round_down=True)} to {typed_size(want)}"


def permissions(problem: Problem) -> Iterator[Proposal]:
    """Grant the missing permissions of variants and options: each alone, then all together."""
    variants = {
        variant.needs: (component.name, variant)
        for component in problem.components
        for variant in component.variants
    }
    options = {option.needs: option for option in problem.options}
    missing_names = [
        name for name in sorted({*variants, *options}) if name and name not in problem.allow
    ]
    for name in missing_names:
        users = [c.name for c in problem.components if any(v.needs == name for v in c.variants)]
        users += [
            f"{option.name} of {option.stage}" for option in problem.options if option.needs == name
        ]
        yield Proposal(
            f"allow {name} (for {', '.join(users)})",
            (("--allow", name),),
            (replace(problem, allow=(*problem.allow, name)),),
            True,
        )
    if len(missing_names) > 1:
        allowed_problem = replace(problem, allow=(*problem.allow, *missing_names))
        yield Proposal(
            f"allow {', '.join(missing_names)}",
            tuple(("--allow", name) for name in missing_names),
            (allowed_problem,),
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
            f"do without the directive {name}",
            ((f"--{directive.placement}", ""),),
            (replace(problem, directives=directives),),
        )


def _separate_runs(problem: Problem) -> Iterator[Proposal]:
    """Run the leading stages separately, and the other stages with their saved outputs.

    If the leading stages do not fit even so, they may run on another machine or with a larger
    budget, because embeddings can be saved.
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
    """Return ``problem`` with only ``stages``. Values from earlier stages are on the device from
    its first phase on."""
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
        f"{need.phase} from {typed_size(need.activation_bytes)}"
        f" to {typed_size(limits[need.phase], round_down=True)}"
        for need in needs
    ]
    phases = tuple(_limit_activation(phase, limits.get(phase.name)) for phase in problem.phases)
    text = (
        f"shrink the activation of {', '.join(parts)}:"
        " a smaller image, fewer images at once, tiling"
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
    """Return the changes that each suffice alone: options of the graph without permission, and the
    largest size of `EIGHTHS` that fits.

    ``estimate(inputs, allow)`` returns the problem for these. A change whose dry run fails is left
    out.
    """
    return (
        *options_of(graph, inputs, allow, estimate),
        *_input_sizes(graph, inputs, allow, estimate),
    )


def options_of(
    graph: Graph, inputs: Mapping[str, Any], allow: tuple[str, ...], estimate: EstimateFunction
) -> Iterator[Suggestion]:
    """Yield the options of the graph without permission, each with its predicted seconds."""
    stages_by_permission: dict[str, list[str]] = {}
    for stage in graph.stages:
        for name in stage.options:
            if (needs := stage.operation.options[name]) and needs not in allow:
                stages_by_permission.setdefault(needs, []).append(stage.name)
    for needs, stages in stages_by_permission.items():
        seconds = _seconds_or_none(lambda needs=needs: estimate(inputs, (*allow, needs)))  # type: ignore[misc]
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
        seconds = _seconds_or_none(lambda smaller=smaller: estimate({**inputs, **smaller}, allow))  # type: ignore[misc]
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


def _seconds_or_none(problem: Callable[[], Problem]) -> float | None:
    try:
        return predicted_seconds(problem())
    except GraphrunError:
        return None


# ---- Faster plans


def speedups(problem: Problem, options: Iterable[Suggestion]) -> Iterator[Suggestion]:
    """Yield changes of ``problem``, then ``options``: suggestions of other stage options.

    All have the predicted seconds of one run.
    """
    for proposal in _speedup_proposals(problem):
        if (suggestion := proposal.verified()) is not None:
            runs = proposal.problems[0].runs
            yield replace(suggestion, seconds=suggestion.seconds / runs)
    yield from (
        replace(suggestion, seconds=suggestion.seconds / problem.runs) for suggestion in options
    )


def worthwhile(suggestions: Iterable[Suggestion], solution: Solution) -> tuple[Suggestion, ...]:
    """Return the ``suggestions`` that save at least LEAST_GAIN: first those without changes of the
    output, then by time."""
    limit_seconds = (1 - LEAST_GAIN) * solution.simulation.total_seconds / solution.problem.runs
    return best_first(item for item in suggestions if item.seconds <= limit_seconds)


def _speedup_proposals(problem: Problem) -> Iterator[Proposal]:
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
    files_text, files_option = "a checkpoint in the precision of use", ("--source", "FOLDER")
    if (stored_problem := _as_used(problem)) != problem:
        yield Proposal(files_text, (files_option,), (stored_problem,))
    for proposal in permissions(problem):
        yield proposal
        if (stored_problem := _as_used(proposal.problems[0])) != proposal.problems[0]:
            text, change_both = (
                f"{proposal.text}, with {files_text}",
                (*proposal.change, files_option),
            )
            yield Proposal(text, change_both, (stored_problem,), changes_output=True)


def _ample_ram(problem: Problem) -> int:
    """Return the RAM for the backing stores of all components, in bytes, rounded up to GiB.

    Each component in the first usable variant whose backing store is in RAM.
    """
    in_ram = [
        [v for v in (c.variants[n] for n in problem.usable(c)) if v.backing_store != "disk"]
        for c in used_components(problem)
    ]
    store_bytes = [
        variants[0].host_bytes + variants[0].transient_bytes for variants in in_ram if variants
    ]
    return -(-sum(store_bytes) // GIB) * GIB


def _as_used(problem: Problem) -> Problem:
    """Return ``problem`` with checkpoints already in the precision of use: only the bytes of the
    device weights are read, and no conversion is needed."""

    def stored(variant: Variant) -> Variant:
        if not variant.read_bytes or (variant.needs and variant.needs not in problem.allow):
            return variant
        read_seconds = tuple(
            nbytes / problem.hardware.disk_bytes_per_second for nbytes in variant.block_bytes
        )
        seconds = (
            {"disk_seconds": read_seconds}
            if variant.backing_store == "disk"
            else {"read_seconds": read_seconds}
        )
        return replace(variant, read_bytes=(), transient_bytes=0, **seconds)  # type: ignore[arg-type]

    return with_each_variant(problem, stored)
