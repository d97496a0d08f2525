"""One component over several devices: the solver against brute force over every interval, and what
`check` refuses."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

import pytest
from agreement import checked_optimum
from campaign import sampled
from planner_oracle import Oracle, transfer_of
from planner_problems import component, hardware, problem
from planner_random import with_secondaries

from graphrun.errors import PlanError
from graphrun.model.choices import apply_choices
from graphrun.model.problem import (
    BlockGroup,
    ComponentNumbers,
    LiveTensor,
    PhaseNumbers,
    Problem,
    Secondary,
    Use,
    Variant,
)
from graphrun.model.splits import in_a_row, segments_of
from graphrun.solve.fastest import find, find_near
from graphrun.solve.milp import Formulation
from graphrun.solve.orders import stage_choices
from graphrun.solve.search import choose
from graphrun.solve.solve import solve
from graphrun.verify.check import check
from graphrun.verify.coherence import incoherent

SEEDS = 500
BLOCKS = [range(start, start + 10) for start in range(0, SEEDS, 10)]


def splittable(seed: int) -> tuple[Problem, ComponentNumbers]:
    """A random problem with secondary devices, and its largest component, which may be split over
    them: each has room for a part of it."""
    problem, rng = with_secondaries(seed), random.Random(seed)
    largest = max(problem.components, key=lambda component: component.weight_bytes())
    plain = next((variant for variant in largest.variants if variant.device == "device"), None)
    if plain is not None:
        slow = float(rng.choice((1, 4, 8)))
        loads = tuple(slow * seconds + slow // 4 for seconds in plain.load_seconds)
        activation = max(max(phase.first_bytes, phase.steady_bytes) for phase in problem.phases)
        twins_by_secondary, secondaries = list[Variant](), list[Secondary]()
        for number, secondary in enumerate(problem.secondaries, 1):
            twin = replace(
                plain,
                device=f"device{number}",
                streamable=False,
                slowdown=float(rng.choice((1, 1, 2))),
            )
            twins_by_secondary.append(
                replace(twin, load_seconds=tuple(float(rng.randint(0, 2)) for _ in largest.groups))
            )
            share = rng.choice((2, 3, 4) if len(problem.secondaries) == 1 else (1, 1, 2))
            room = largest.weight_bytes() * share // 4 + activation + rng.choice((0, 512, 1500))
            secondaries.append(replace(secondary, budget_bytes=room))
        names = {twin.name for twin in twins_by_secondary}
        other_variants = [
            replace(variant, load_seconds=loads)
            for variant in largest.variants
            if variant.name not in names
        ]
        largest = replace(largest, variants=(*other_variants, *twins_by_secondary))
        components = tuple(
            largest if component.name == largest.name else component
            for component in problem.components
        )
        problem = replace(problem, components=components, secondaries=tuple(secondaries))
    live = live_tensors(sum(len(group.blocks) for group in largest.groups), rng)

    def hopping(phase: PhaseNumbers) -> PhaseNumbers:
        return replace(
            phase,
            uses=tuple(every_call(u) if u.component == largest.name else u for u in phase.uses),
        )

    def every_call(u: Use) -> Use:
        return replace(u, live_tensors=live, group_calls=(u.calls,) * len(u.group_calls))

    options = tuple(
        replace(option, phases=tuple(map(hopping, option.phases))) for option in problem.options
    )
    unsplittable = {"exclude", "drop"}
    directives = tuple(
        directive
        for directive in problem.directives
        if directive.component != largest.name or directive.placement not in unsplittable
    )
    problem = replace(
        problem, phases=tuple(map(hopping, problem.phases)), options=options, directives=directives
    )
    return problem, problem.component(largest.name)


def live_tensors(count: int, rng: random.Random) -> tuple[LiveTensor, ...]:
    """What blocks get and return: a chain, which other code may interrupt, what several blocks get,
    and what skips blocks."""
    gaps, size = rng.choice((0.0, 0.3, 1.0)), 256 * rng.randint(0, 3)
    tensors = [LiveTensor(size, 0, (1,), rng.random() < 0.2)]
    for n in range(1, count + 1):
        size = size if rng.random() < 0.7 else 256 * rng.randint(0, 3)
        if n == count or rng.random() < gaps:
            tensors += [LiveTensor(size, n, (0,)), LiveTensor(size, 0, (n + 1,))][
                : 1 if n == count else 2
            ]
        else:
            tensors.append(LiveTensor(size, n, (n + 1,)))
    for _ in range(rng.choice((0, 1, 2))):
        share = rng.choice((0.5, 1.0))
        users = tuple(n for n in range(1, count + 1) if rng.random() < share)
        tensors += (
            [LiveTensor(256 * rng.randint(1, 3), 0, users, rng.random() < 0.5)] if users else []
        )
    if count > 2 and rng.random() < 0.3:
        maker, last = sorted(rng.sample(range(1, count + 1), 2))
        tensors.append(LiveTensor(256 * rng.randint(1, 4), maker, (0, last)))
    return tuple(tensors)


def every_cut(problem: Problem, whole: ComponentNumbers) -> Iterator[Problem]:
    """``of`` itself, and with every way to put one interval of the blocks of ``whole`` on each of
    some secondary devices."""
    yield problem
    blocks = [k for k, group in enumerate(whole.groups) for _ in group.blocks]
    intervals = [range(0), *(range(a, b) for b in range(len(blocks) + 1) for a in range(b))]
    use = next(
        (use for phase in problem.phases for use in phase.uses if use.component == whole.name), None
    )
    texts = set[str]()
    for ranges in product(intervals, repeat=len(problem.secondaries)):
        if any(
            a.stop > b.start
            for a, b in pairwise(sorted(filter(None, ranges), key=lambda interval: interval.start))
        ):
            continue
        blocks_by_secondary = tuple(
            tuple(sum(blocks[n] == k for n in interval) for k in range(len(whole.groups)))
            for interval in ranges
        )
        transfer = [
            transfer_of(use, {n + 1 for n in interval}) if use and interval else None
            for interval in ranges
        ]
        if any(ranges) and (case := str((blocks_by_secondary, transfer))) not in texts:
            texts.add(case)
            secondary_of = {
                n: secondary for secondary, interval in enumerate(ranges, 1) for n in interval
            }
            cut = _cut(
                problem,
                whole,
                blocks_by_secondary,
                [(k, secondary_of.get(n, 0)) for n, k in enumerate(blocks)],
            )
            if cut.component(whole.name).variants:
                yield cut


def _cut(
    problem: Problem,
    whole: ComponentNumbers,
    blocks_by_secondary: tuple[tuple[int, ...], ...],
    order: list[tuple[int, int]],
) -> Problem:
    """``moved[n][k]``: how many blocks of group k are on secondary device n + 1. ``order``: of each
    block in call order, group and secondary device."""
    stay = [
        (k, n, 0)
        for k, g in enumerate(whole.groups)
        if (n := len(g.blocks) - sum(block_counts[k] for block_counts in blocks_by_secondary))
    ]
    cells = [
        *stay,
        *(
            (k, n, secondary)
            for secondary, block_counts in enumerate(blocks_by_secondary, 1)
            for k, n in enumerate(block_counts)
            if n
        ),
    ]
    secondaries = sorted({secondary for _, _, secondary in cells if secondary})
    groups, variants, slowdown = [], [], {0: 1.0}
    for number, (k, n, secondary) in enumerate(cells):
        paths = tuple(f"{number}.{i}" for i in range(n))
        groups.append(
            BlockGroup(f"g{number}", paths, whole.groups[k].streamable and not secondary, secondary)
        )
    for main_variant in whole.variants:
        twin_names = [
            f"{main_variant.precision} {main_variant.backing_store} device{secondary}"
            for secondary in secondaries
        ]
        twins_by_secondary = {
            secondary: variant
            for secondary, name in zip(secondaries, twin_names, strict=True)
            for variant in whole.variants
            if variant.name == name
        }
        if (
            main_variant.device == "device"
            and main_variant.backing_store != "disk"
            and len(twins_by_secondary) == len(secondaries)
        ):
            slowdown = {
                secondary: variant.slowdown / main_variant.slowdown
                for secondary, variant in twins_by_secondary.items()
            } | slowdown
            numbers = {}
            for field in (
                "block_bytes",
                "load_seconds",
                "read_seconds",
                "disk_seconds",
                "block_seconds",
                "read_bytes",
            ):
                values = getattr(main_variant, field)
                numbers[field] = (
                    tuple(
                        (getattr(twins_by_secondary[secondary], field) if secondary else values)[k]
                        for k, _, secondary in cells
                    )
                    if values
                    else ()
                )
            variants.append(replace(main_variant, **numbers))
    cells_by_source = [(k, secondary) for k, _, secondary in cells]
    split_component = replace(whole, groups=tuple(groups), variants=tuple(variants), layers=None)

    def used(use: Use) -> Use:
        if use.component != whole.name:
            return use
        return replace(
            use,
            group_calls=tuple(use.group_calls[k] for k, _, _ in cells),
            seconds=tuple(
                use.seconds[k] * slowdown.get(secondary, 1.0) for k, _, secondary in cells
            ),
            order=tuple((cells_by_source.index(cell), 0, 0.0) for cell in order),
        )

    def phases(all_phases: tuple[PhaseNumbers, ...]) -> tuple[PhaseNumbers, ...]:
        return tuple(replace(phase, uses=tuple(map(used, phase.uses))) for phase in all_phases)

    return replace(
        problem,
        components=tuple(
            split_component if component.name == whole.name else component
            for component in problem.components
        ),
        phases=phases(problem.phases),
        options=tuple(replace(option, phases=phases(option.phases)) for option in problem.options),
    )


@pytest.mark.long
@pytest.mark.parametrize("seeds", sampled(BLOCKS, BLOCKS[11:12], "random", of_all=17), ids=str)
def test_solver_agrees_with_brute_force(seeds: range) -> None:
    split = multiple_count = 0
    for seed in seeds:
        problem, whole = splittable(seed)
        answers = [Oracle(cut).best(problem.effective_bytes) for cut in every_cut(problem, whole)]
        best = min((answer for answer in answers if answer is not None), default=None)
        choices, _ = stage_choices(problem, dominated=True)
        answer = choose([Formulation(reordered.program) for reordered in choices])
        assert (answer is None) == (best is None), f"{seed}: feasible is {best is not None}"
        if answer is None or best is None:
            continue
        plan, run = checked_optimum(problem, answer, choices[answer.number], best, seed)
        for number, secondary in enumerate(problem.secondaries):
            assert (
                max(slot.secondary_peaks[number] for slot in run.all_slots)
                <= secondary.effective_bytes
            ), seed
        split += bool(plan.splits)
        multiple_count += len(plan.splits) > 1
    assert split or seeds != BLOCKS[11], "no problem of these splits a component"
    assert multiple_count or seeds != BLOCKS[11], (
        "no problem of these splits a component over two secondary devices"
    )


def transformer(budget_bytes: int = 7168, secondary_bytes: int = 8000) -> Problem:
    """9 calls of 4 + 4 + 3 blocks, of which neither device holds all."""
    instance = component(
        "dit",
        ("rest", 1, 512, False),
        ("k", 4, 1024),
        ("l", 4, 512),
        ("m", 3, 2048),
        seconds_per_byte=1 / 64,
    )
    instance = replace(
        instance, groups=(replace(instance.groups[0], blocks=("",)), *instance.groups[1:])
    )
    twin = replace(instance.variants[0], device="device1", streamable=False, slowdown=1.25)
    live = (
        *(LiveTensor(512, n, (n + 1 if n < 11 else 0,)) for n in range(12)),
        LiveTensor(512, 0, (9, 10, 11)),
    )
    use = Use("dit", 9, (9,) * 4, (0.25, 1.0, 0.5, 2.0), transfer=(512, 512), live_tensors=live)
    phases = (PhaseNumbers("s", 0, (use,), 0, 512, 512),)
    instance = replace(instance, variants=(instance.variants[0], twin))
    return replace(
        problem(budget_bytes, (instance,), phases, card=hardware()),
        secondaries=(Secondary(hardware(), secondary_bytes),),
        runs=10,
    )


def test_what_one_device_cannot_hold_is_split_and_nothing_is_streamed() -> None:
    split_problem = transformer()
    solution = solve(split_problem)
    ((name, secondary, blocks),) = solution.plan.splits
    assert (name, secondary) == ("dit", 1)
    assert blocks
    assert solution.simulation.further_moved_bytes == 0
    unsplit = solve(
        replace(split_problem, secondaries=(replace(split_problem.secondaries[0], budget_bytes=0),))
    )
    assert not unsplit.plan.splits
    assert solution.simulation.total_seconds < unsplit.simulation.total_seconds


def test_near_a_split_plan_none_is_sought() -> None:
    single_run = replace(transformer(secondary_bytes=6000), runs=1)
    solution = find(single_run)
    assert solution is not None
    assert solution.solution.plan.splits
    assert find_near(single_run, solution) is None


def test_over_two_secondaries_intervals_do_not_cross() -> None:
    budgeted = transformer(budget_bytes=5120, secondary_bytes=5000)
    second_twin = replace(budgeted.components[0].variants[1], device="device2", slowdown=1.5)
    dit = replace(budgeted.components[0], variants=(*budgeted.components[0].variants, second_twin))
    budgeted = replace(
        budgeted,
        components=(dit,),
        secondaries=(*budgeted.secondaries, Secondary(hardware(), 4000)),
    )
    plan = solve(budgeted).plan
    assert [secondary for _, secondary, _ in plan.splits] == [1, 2]
    assert not check(budgeted, plan)
    k = ("k", (2, 3))
    wrong = replace(plan, splits=(("dit", 1, (k, ("l", (0, 1)))), ("dit", 2, (("l", (1,)),))))
    with pytest.raises(PlanError, match="compute on two devices"):
        apply_choices(budgeted, wrong)
    # the second is behind the first, and before
    inner_rows, previous_rows = (
        {1: {0: 2, 1: 4, 2: 1}, 2: {2: 2}},
        {1: {0: 1, 1: 1}, 2: {0: 2}},
    )
    segments = segments_of(budgeted, dit)
    assert [(segment.start, segment.stop) for segment in segments] == [(0, 4), (0, 4), (0, 3)]
    assert in_a_row(dit, segments, inner_rows) == {
        1: (k, ("l", (0, 1, 2, 3)), ("m", (0,))),
        2: (("m", (1, 2)),),
    }
    assert in_a_row(dit, segments, previous_rows) == {
        1: (("k", (3,)), ("l", (0,))),
        2: (("k", (1, 2)),),
    }


def test_the_interval_of_a_plan_is_checked() -> None:
    problem = transformer()
    plan = solve(problem).plan
    ((name, secondary, blocks),) = plan.splits
    odd = (
        (("dit", 2, blocks), "cannot be split over device2"),
        (("vae", 1, blocks), "cannot be split"),
        (("dit", 1, (("k", (0, 2)),)), "not in a row"),
        (("dit", 1, (("k", (3,)), ("m", (0,)))), "not in a row"),
        (("dit", 1, (("rest", (0,)),)), "not in a row"),
        (("dit", 1, ()), "not in a row"),
        (("dit", 1, blocks), ("dit", 1, blocks), "twice over device1"),
    )
    for *splits, message in odd:
        wrong = replace(plan, splits=tuple(splits))
        assert [violation.rule for violation in check(problem, wrong)] == ["split"]
        with pytest.raises(PlanError, match=message):
            apply_choices(problem, wrong)
    smaller = replace(problem, secondaries=(replace(problem.secondaries[0], budget_bytes=2048),))
    assert "secondary" in {
        violation.rule for violation in check(smaller, replace(plan, problem=smaller.digest))
    }


def test_live_tensors_of_other_blocks_are_refused() -> None:
    problem = transformer()
    (phase,) = problem.phases
    (use,) = phase.uses
    live = use.live_tensors
    assert not list(incoherent(problem))
    forged = (
        (
            replace(use, live_tensors=(*live, LiveTensor(512, 12, (0,)))),
            "a tensor with maker 12 and users [0]; blocks are numbered 1 to 11",
        ),
        (
            replace(use, live_tensors=(*live, LiveTensor(512, 0, (3, 2)))),
            "maker 0 and users [3, 2]",
        ),
        (replace(use, live_tensors=(*live, LiveTensor(512, 3, ()))), "maker 3 and users []"),
        (replace(use, live_tensors=live[:5]), "live_tensors does not name each of the 11 blocks"),
        (
            replace(use, group_calls=(9, 9, 7, 9)),
            "every block must run in each of the 9 calls; some run in 7",
        ),
        (
            replace(use, order=((0, 0, 0.25), (1, 1, 1.0), (1, 0, 1.0))),
            "order does not list the 11 blocks in ascending order",
        ),
    )
    for other, message in forged:
        messages = list(incoherent(replace(problem, phases=(replace(phase, uses=(other,)),))))
        assert any(message in text for text in messages), (message, messages)


def test_blocks_of_a_split_first_group_are_counted_in_their_own_groups() -> None:
    whole = transformer()
    (instance,), ((use,),) = whole.components, [phase.uses for phase in whole.phases]

    variants = tuple(
        replace(
            variant,
            block_bytes=variant.block_bytes[::-1],
            load_seconds=variant.load_seconds[::-1],
        )
        for variant in instance.variants
    )
    instance = replace(instance, groups=instance.groups[::-1], variants=variants)
    use = replace(use, group_calls=use.group_calls[::-1], seconds=use.seconds[::-1])
    phases = (replace(whole.phases[0], uses=(use,)),)
    single_run = replace(whole, components=(instance,), phases=phases, runs=1)
    answer = choose([Formulation(choice.program) for choice in stage_choices(single_run)[0]])
    assert answer is not None
    groups = answer.program.groups
    assert [(group.index, group.count, group.secondary) for group in groups][-1] == (3, 3, 1)
    counts = answer.choice.present + answer.choice.loads
    assert (counts <= [group.count for group in groups]).all()


def test_blocks_that_share_an_argument_are_one_segment() -> None:
    whole = transformer()
    assert segments_of(whole, whole.components[0]) == [(1, 0, 4), (2, 0, 4), (3, 0, 3)]
