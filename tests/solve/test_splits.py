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
    of, rng = with_secondaries(seed), random.Random(seed)
    largest = max(of.components, key=lambda each: each.weight_bytes())
    plain = next((each for each in largest.variants if each.device == "device"), None)
    if plain is not None:
        slow = float(rng.choice((1, 4, 8)))
        loads = tuple(slow * seconds + slow // 4 for seconds in plain.load_seconds)
        most = max(max(phase.first_bytes, phase.steady_bytes) for phase in of.phases)
        there, secondaries = list[Variant](), list[Secondary]()
        for number, secondary in enumerate(of.secondaries, 1):
            twin = replace(
                plain,
                device=f"device{number}",
                streamable=False,
                slowdown=float(rng.choice((1, 1, 2))),
            )
            there.append(
                replace(twin, load_seconds=tuple(float(rng.randint(0, 2)) for _ in largest.groups))
            )
            share = rng.choice((2, 3, 4) if len(of.secondaries) == 1 else (1, 1, 2))
            room = largest.weight_bytes() * share // 4 + most + rng.choice((0, 512, 1500))
            secondaries.append(replace(secondary, budget_bytes=room))
        names = {each.name for each in there}
        others = [
            replace(each, load_seconds=loads) for each in largest.variants if each.name not in names
        ]
        largest = replace(largest, variants=(*others, *there))
        components = tuple(largest if each.name == largest.name else each for each in of.components)
        of = replace(of, components=components, secondaries=tuple(secondaries))
    live = live_tensors(sum(len(group.blocks) for group in largest.groups), rng)

    def hopping(phase: PhaseNumbers) -> PhaseNumbers:
        return replace(
            phase,
            uses=tuple(every_call(u) if u.component == largest.name else u for u in phase.uses),
        )

    def every_call(u: Use) -> Use:
        return replace(u, live_tensors=live, group_calls=(u.calls,) * len(u.group_calls))

    options = tuple(
        replace(option, phases=tuple(map(hopping, option.phases))) for option in of.options
    )
    apart = {"exclude", "drop"}
    directives = tuple(
        each
        for each in of.directives
        if each.component != largest.name or each.placement not in apart
    )
    of = replace(of, phases=tuple(map(hopping, of.phases)), options=options, directives=directives)
    return of, of.component(largest.name)


def live_tensors(count: int, rng: random.Random) -> tuple[LiveTensor, ...]:
    """What blocks get and return: a chain, which other code may interrupt, what several blocks get,
    and what skips blocks."""
    gaps, size = rng.choice((0.0, 0.3, 1.0)), 256 * rng.randint(0, 3)
    found = [LiveTensor(size, 0, (1,), rng.random() < 0.2)]
    for n in range(1, count + 1):
        size = size if rng.random() < 0.7 else 256 * rng.randint(0, 3)
        if n == count or rng.random() < gaps:
            found += [LiveTensor(size, n, (0,)), LiveTensor(size, 0, (n + 1,))][
                : 1 if n == count else 2
            ]
        else:
            found.append(LiveTensor(size, n, (n + 1,)))
    for _ in range(rng.choice((0, 1, 2))):
        share = rng.choice((0.5, 1.0))
        users = tuple(n for n in range(1, count + 1) if rng.random() < share)
        found += (
            [LiveTensor(256 * rng.randint(1, 3), 0, users, rng.random() < 0.5)] if users else []
        )
    if count > 2 and rng.random() < 0.3:
        maker, last = sorted(rng.sample(range(1, count + 1), 2))
        found.append(LiveTensor(256 * rng.randint(1, 4), maker, (0, last)))
    return tuple(found)


def every_cut(of: Problem, whole: ComponentNumbers) -> Iterator[Problem]:
    """``of`` itself, and with every way to put one interval of the blocks of ``whole`` on each of
    some secondary devices."""
    yield of
    blocks = [k for k, group in enumerate(whole.groups) for _ in group.blocks]
    intervals = [range(0), *(range(a, b) for b in range(len(blocks) + 1) for a in range(b))]
    use = next(
        (use for phase in of.phases for use in phase.uses if use.component == whole.name), None
    )
    seen = set[str]()
    for chosen in product(intervals, repeat=len(of.secondaries)):
        if any(
            a.stop > b.start
            for a, b in pairwise(sorted(filter(None, chosen), key=lambda of: of.start))
        ):
            continue
        moved = tuple(
            tuple(sum(blocks[n] == k for n in own) for k in range(len(whole.groups)))
            for own in chosen
        )
        transfer = [
            transfer_of(use, {n + 1 for n in own}) if use and own else None for own in chosen
        ]
        if any(chosen) and (case := str((moved, transfer))) not in seen:
            seen.add(case)
            secondary_of = {n: at for at, own in enumerate(chosen, 1) for n in own}
            cut = _cut(
                of, whole, moved, [(k, secondary_of.get(n, 0)) for n, k in enumerate(blocks)]
            )
            if cut.component(whole.name).variants:
                yield cut


def _cut(
    of: Problem,
    whole: ComponentNumbers,
    moved: tuple[tuple[int, ...], ...],
    order: list[tuple[int, int]],
) -> Problem:
    """``moved[n][k]``: how many blocks of group k are on secondary device n + 1. ``order``: of each
    block in call order, group and secondary device."""
    stay = [
        (k, n, 0)
        for k, g in enumerate(whole.groups)
        if (n := len(g.blocks) - sum(own[k] for own in moved))
    ]
    cells = [
        *stay,
        *(
            (k, n, secondary)
            for secondary, own in enumerate(moved, 1)
            for k, n in enumerate(own)
            if n
        ),
    ]
    secondaries = sorted({secondary for _, _, secondary in cells if secondary})
    groups, variants, slowdown = [], [], {0: 1.0}
    for number, (k, n, at) in enumerate(cells):
        paths = tuple(f"{number}.{i}" for i in range(n))
        groups.append(BlockGroup(f"g{number}", paths, whole.groups[k].streamable and not at, at))
    for here in whole.variants:
        named = [
            f"{here.precision} {here.backing_store} device{secondary}" for secondary in secondaries
        ]
        there = {
            secondary: each
            for secondary, name in zip(secondaries, named, strict=True)
            for each in whole.variants
            if each.name == name
        }
        if (
            here.device == "device"
            and here.backing_store != "disk"
            and len(there) == len(secondaries)
        ):
            slowdown = {
                secondary: each.slowdown / here.slowdown for secondary, each in there.items()
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
                values = getattr(here, field)
                numbers[field] = (
                    tuple((getattr(there[at], field) if at else values)[k] for k, _, at in cells)
                    if values
                    else ()
                )
            variants.append(replace(here, **numbers))
    where = [(k, at) for k, _, at in cells]
    made = replace(whole, groups=tuple(groups), variants=tuple(variants), layers=None)

    def used(use: Use) -> Use:
        if use.component != whole.name:
            return use
        return replace(
            use,
            group_calls=tuple(use.group_calls[k] for k, _, _ in cells),
            seconds=tuple(use.seconds[k] * slowdown.get(at, 1.0) for k, _, at in cells),
            order=tuple((where.index(of), 0, 0.0) for of in order),
        )

    def phases(every: tuple[PhaseNumbers, ...]) -> tuple[PhaseNumbers, ...]:
        return tuple(replace(phase, uses=tuple(map(used, phase.uses))) for phase in every)

    return replace(
        of,
        components=tuple(made if each.name == whole.name else each for each in of.components),
        phases=phases(of.phases),
        options=tuple(replace(option, phases=phases(option.phases)) for option in of.options),
    )


@pytest.mark.long
@pytest.mark.parametrize("seeds", sampled(BLOCKS, BLOCKS[11:12], "random", of_all=17), ids=str)
def test_solver_agrees_with_brute_force(seeds: range) -> None:
    split = several = 0
    for seed in seeds:
        of, whole = splittable(seed)
        answers = [Oracle(cut).best(of.effective_bytes) for cut in every_cut(of, whole)]
        best = min((answer for answer in answers if answer is not None), default=None)
        found, _ = stage_choices(of, dominated=True)
        answer = choose([Formulation(reordered.program) for reordered in found])
        assert (answer is None) == (best is None), f"{seed}: feasible is {best is not None}"
        if answer is None or best is None:
            continue
        plan, run = checked_optimum(of, answer, found[answer.number], best, seed)
        for number, secondary in enumerate(of.secondaries):
            assert (
                max(slot.secondary_peaks[number] for slot in (*run.slots, *run.again))
                <= secondary.effective_bytes
            ), seed
        split += bool(plan.splits)
        several += len(plan.splits) > 1
    assert split or seeds != BLOCKS[11], "no problem of these splits a component"
    assert several or seeds != BLOCKS[11], (
        "no problem of these splits a component over two secondary devices"
    )


def transformer(budget_bytes: int = 7168, secondary_bytes: int = 8000) -> Problem:
    """9 calls of 4 + 4 + 3 blocks, of which neither device holds all."""
    of = component(
        "dit",
        ("rest", 1, 512, False),
        ("k", 4, 1024),
        ("l", 4, 512),
        ("m", 3, 2048),
        seconds_per_byte=1 / 64,
    )
    of = replace(of, groups=(replace(of.groups[0], blocks=("",)), *of.groups[1:]))
    there = replace(of.variants[0], device="device1", streamable=False, slowdown=1.25)
    live = (
        *(LiveTensor(512, n, (n + 1 if n < 11 else 0,)) for n in range(12)),
        LiveTensor(512, 0, (9, 10, 11)),
    )
    use = Use("dit", 9, (9,) * 4, (0.25, 1.0, 0.5, 2.0), transfer=(512, 512), live_tensors=live)
    phases = (PhaseNumbers("s", 0, (use,), 0, 512, 512),)
    of = replace(of, variants=(of.variants[0], there))
    return replace(
        problem(budget_bytes, (of,), phases, on=hardware()),
        secondaries=(Secondary(hardware(), secondary_bytes),),
        runs=10,
    )


def test_what_one_device_cannot_hold_is_split_and_nothing_is_streamed() -> None:
    of = transformer()
    solution = solve(of)
    ((name, secondary, blocks),) = solution.plan.splits
    assert (name, secondary) == ("dit", 1)
    assert blocks
    assert solution.simulation.again_moved_bytes == 0
    alone = solve(replace(of, secondaries=(replace(of.secondaries[0], budget_bytes=0),)))
    assert not alone.plan.splits
    assert solution.simulation.total_seconds < alone.simulation.total_seconds


def test_near_a_split_plan_none_is_sought() -> None:
    of = replace(transformer(secondary_bytes=6000), runs=1)
    found = find(of)
    assert found is not None
    assert found.solution.plan.splits
    assert find_near(of, found) is None


def test_over_two_secondaries_intervals_do_not_cross() -> None:
    of = transformer(budget_bytes=5120, secondary_bytes=5000)
    there = replace(of.components[0].variants[1], device="device2", slowdown=1.5)
    dit = replace(of.components[0], variants=(*of.components[0].variants, there))
    of = replace(of, components=(dit,), secondaries=(*of.secondaries, Secondary(hardware(), 4000)))
    plan = solve(of).plan
    assert [secondary for _, secondary, _ in plan.splits] == [1, 2]
    assert not check(of, plan)
    k = ("k", (2, 3))
    wrong = replace(plan, splits=(("dit", 1, (k, ("l", (0, 1)))), ("dit", 2, (("l", (1,)),))))
    with pytest.raises(PlanError, match="compute on two devices"):
        apply_choices(of, wrong)
    # the second is behind the first, and before
    within, before = (
        {1: {0: 2, 1: 4, 2: 1}, 2: {2: 2}},
        {1: {0: 1, 1: 1}, 2: {0: 2}},
    )
    segments = segments_of(of, dit)
    assert [(segment.start, segment.stop) for segment in segments] == [(0, 4), (0, 4), (0, 3)]
    assert in_a_row(dit, segments, within) == {
        1: (k, ("l", (0, 1, 2, 3)), ("m", (0,))),
        2: (("m", (1, 2)),),
    }
    assert in_a_row(dit, segments, before) == {1: (("k", (3,)), ("l", (0,))), 2: (("k", (1, 2)),)}


def test_the_interval_of_a_plan_is_checked() -> None:
    of = transformer()
    plan = solve(of).plan
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
        assert [violation.rule for violation in check(of, wrong)] == ["split"]
        with pytest.raises(PlanError, match=message):
            apply_choices(of, wrong)
    less = replace(of, secondaries=(replace(of.secondaries[0], budget_bytes=2048),))
    assert "secondary" in {
        violation.rule for violation in check(less, replace(plan, problem=less.digest))
    }


def test_live_tensors_of_other_blocks_are_refused() -> None:
    of = transformer()
    (phase,) = of.phases
    (use,) = phase.uses
    live = use.live_tensors
    assert not list(incoherent(of))
    forged = (
        (
            replace(use, live_tensors=(*live, LiveTensor(512, 12, (0,)))),
            "one that block 12 makes and blocks [0] get, of 11 blocks",
        ),
        (replace(use, live_tensors=(*live, LiveTensor(512, 0, (3, 2)))), "blocks [3, 2] get"),
        (replace(use, live_tensors=(*live, LiveTensor(512, 3, ()))), "blocks [] get"),
        (replace(use, live_tensors=live[:5]), "live_tensors are not of 11 blocks"),
        (
            replace(use, group_calls=(9, 9, 7, 9)),
            "of blocks that run in each of 9 calls, and some run in 7",
        ),
        (
            replace(use, order=((0, 0, 0.25), (1, 1, 1.0), (1, 0, 1.0))),
            "order has not the 11 blocks of live_tensors in a row",
        ),
    )
    for other, message in forged:
        told = list(incoherent(replace(of, phases=(replace(phase, uses=(other,)),))))
        assert any(message in text for text in told), (message, told)
