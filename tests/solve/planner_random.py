"""Random problems small enough for brute force, with every kind of choice. Seconds are multiples of
1/16."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

from planner_problems import component, hardware, problem

from graphrun.model.choices import with_each_variant
from graphrun.model.hardware import Hardware
from graphrun.model.problem import (
    ComponentNumbers,
    ComponentPlacement,
    Directive,
    PhaseNumbers,
    Problem,
    Secondary,
    StageOption,
    Use,
    ValueNumbers,
    Variant,
)

SIZES = (512, 1024, 1536, 2048, 1000, 700, 256, 0)


def random_problem(seed: int) -> Problem:
    """Up to three components with one or two block groups of one or two blocks, up to four stages;
    one run or a session; feasible or not."""
    rng = random.Random(seed)
    components = tuple(_component(rng, name) for name in "abc"[: rng.choice((1, 2, 2, 3))])
    stages = [f"s{i}" for i in range(rng.choice((1, 2, 2, 3, 3, 3, 4)))]
    phases = tuple(_phase(rng, stage, components) for stage in stages)
    if rng.random() < 0.15:
        split = rng.randrange(len(stages))
        extra = replace(_phase(rng, stages[split], components), index=1)
        phases = (*phases[: split + 1], extra, *phases[split + 1 :])
    links = [
        pair
        for pair in combinations(stages, 2)
        if rng.random() < (0.6 if pair == (stages[0], stages[-1]) else 0.3)
    ]
    values = tuple(
        _value(rng, number, stage, [b for a, b in links if a == stage], phases)
        for number, stage in enumerate(stages)
    )
    free_order = rng.random() < 0.45 and len(links) + 1 >= len(stages) - 1
    options = tuple(
        _option(rng, phase)
        for phase in phases
        if rng.random() < 0.15 and phase.index == 0 and len(stages) == len(phases)
    )
    host = sum(max(variant.host_bytes for variant in c.variants) for c in components)
    instance = problem(
        2**20,
        components,
        phases,
        tuple(value for value in values if value is not None),
        card=_hardware(rng),
    )
    squeezed = rng.random() < 0.3  # no memory for values that are not read in the phase
    maximum = int(
        _most(instance, squeezed)
        * (rng.choice((1.0, 1.0, 1.2)) if squeezed else rng.choice((0.6, 0.8, 0.9, 1.0, 1.2, 1.5)))
    )
    budget = instance.budget_bytes - instance.effective_bytes + maximum
    ram = rng.choice((2**40, 2**40, 2**40, host + 8000, host + 600, host * 3 // 4))
    instance = replace(instance, budget_bytes=budget, ram_bytes=ram)
    if seed % 4 == 1:
        instance = _with_lost_seconds(random.Random(f"lost {seed}"), instance)
    return replace(
        instance,
        pinned_bytes=rng.choice((None, None, host, host * 3 // 4)),
        disk_bytes=rng.choice((None, None, 3000, 1000)),
        runs=rng.choice((1, 1, 1, 2, 5)),
        precedence=tuple(links) if free_order else None,
        options=options,
        allow=rng.choice(((), ("nf4",), ("nf4", "tiling"))),
        directives=_directives(rng, components),
    )


def _with_lost_seconds(rng: random.Random, instance: Problem) -> Problem:
    """``instance`` with streamed blocks that take compute from the device."""

    def losing(variant: Variant) -> Variant:
        seconds = tuple(rng.choice((0.0, 0.5, 1.0, 3.0)) for _ in variant.block_bytes)
        return replace(variant, lost_seconds=seconds if variant.device == "device" else ())

    return with_each_variant(instance, losing)


def with_secondaries(seed: int) -> Problem:
    """A random problem with one or two secondary devices, on which some components may compute as a
    whole."""
    rng = random.Random(~seed)
    instance = random_problem(seed)
    weights = sum(component.weight_bytes() for component in instance.components)
    budgets = [
        rng.choice((weights // 2, weights, 2 * weights)) + rng.choice((0, 512, 3000, 8000))
        for _ in range(rng.choice((1, 1, 2)))
    ]
    secondaries = tuple(Secondary(_hardware(rng, False), nbytes) for nbytes in budgets)

    def on_secondaries(component: ComponentNumbers) -> ComponentNumbers:
        secondaries_variants = []
        for number in range(1, len(secondaries) + 1):
            if rng.random() < 0.6:
                plain = next(
                    (v for v in component.variants if v.device == "device"), component.variants[0]
                )
                loads = tuple(float(rng.randint(0, 4)) for _ in component.groups)
                twin = replace(
                    plain, device=f"device{number}", load_seconds=loads, streamable=False
                )
                secondaries_variants.append(replace(twin, slowdown=float(rng.choice((1, 2, 3)))))
        return replace(component, variants=(*component.variants, *secondaries_variants))

    def transfer(phase: PhaseNumbers) -> PhaseNumbers:
        uses = (
            replace(use, transfer=(256 * rng.randint(0, 3), 256 * rng.randint(0, 3)))
            for use in phase.uses
        )
        return replace(phase, uses=tuple(uses))

    return replace(
        instance,
        components=tuple(map(on_secondaries, instance.components)),
        phases=tuple(map(transfer, instance.phases)),
        options=tuple(
            replace(option, phases=tuple(map(transfer, option.phases)))
            for option in instance.options
        ),
        secondaries=secondaries,
    )


def _most(instance: Problem, consumed_only: bool) -> int:
    """Bytes of the largest phase with all of its components on the device; ``consumed_only``: count
    only values that it reads."""
    weights = {component.name: component.weight_bytes() for component in instance.components}
    return max(
        sum(weights[use.component] for use in phase.uses)
        + max(phase.first_bytes, phase.steady_bytes)
        + phase.input_bytes
        + sum(
            value.nbytes
            for value in instance.values
            if value.first_phase <= number <= value.last_phase
            and (phase.stage in value.consumers or not consumed_only)
        )
        for number, phase in enumerate(instance.phases)
    )


def _hardware(rng: random.Random, driver: bool = True) -> Hardware:
    card = hardware(
        context_bytes=rng.choice((0, 0, 512)) * driver,
        workspace_bytes=rng.choice((0, 0, 100)) * driver,
    )
    return replace(
        card,
        h2d_bytes_per_second=rng.choice((512.0, 4096.0)),
        d2h_bytes_per_second=rng.choice((512.0, 4096.0)),
    )


def _component(rng: random.Random, name: str) -> ComponentNumbers:
    groups = [
        (f"k{i}", rng.choice((1, 2, 2)), rng.choice(SIZES), rng.random() < 0.8)
        for i in range(rng.choice((1, 2)) if name != "c" else 1)
    ]
    random_component = component(
        name, *groups, movable=rng.random() < 0.88, streamable=rng.random() < 0.9
    )
    plain = replace(
        random_component.variants[0], load_seconds=tuple(float(rng.randint(0, 4)) for _ in groups)
    )
    variants = [_with_reads(rng, plain)]
    makers = {"pageable": _pageable, "disk": _disk, "cpu": _cpu, "nf4": _small}
    for kind in rng.sample(sorted(makers), rng.choice((0, 0, 1, 1, 2))):
        variants.append(makers[kind](rng, plain))
    if rng.random() < 0.2:
        rng.shuffle(variants)
    return replace(random_component, variants=tuple(variants))


def _with_reads(rng: random.Random, variant: Variant) -> Variant:
    if rng.random() < 0.5:
        return variant
    seconds = tuple(float(rng.randint(0, 5)) for _ in variant.block_bytes)
    return replace(variant, read_seconds=seconds, transient_bytes=rng.choice((0, 0, 500, 1500)))


def _pageable(rng: random.Random, variant: Variant) -> Variant:
    slower = tuple(2 * seconds + rng.randint(0, 2) for seconds in variant.load_seconds)
    return _with_reads(rng, replace(variant, backing_store="pageable", load_seconds=slower))


def _disk(rng: random.Random, variant: Variant) -> Variant:
    reads = tuple(float(rng.randint(1, 6)) for _ in variant.block_bytes)
    bounce = 2 * max(variant.block_bytes)
    return replace(
        variant,
        backing_store="disk",
        host_bytes=bounce,
        disk_seconds=reads,
        stored_bytes=rng.choice((0, 800, 2000)),
    )


def _cpu(rng: random.Random, variant: Variant) -> Variant:
    return _with_reads(
        rng,
        replace(
            variant, backing_store="pageable", device="cpu", slowdown=float(rng.choice((2, 3, 8)))
        ),
    )


def _small(rng: random.Random, variant: Variant) -> Variant:
    half = replace(
        variant,
        precision="nf4",
        block_bytes=tuple(nbytes // 2 for nbytes in variant.block_bytes),
        load_seconds=tuple(seconds / 2 for seconds in variant.load_seconds),
        host_bytes=variant.host_bytes // 2,
        block_seconds=tuple(rng.choice((0.0, 0.5)) for _ in variant.block_bytes),
        scratch_bytes=rng.choice((0, 300)),
        stored_bytes=rng.choice((0, 900)),
        needs="nf4",
        movable=variant.movable and rng.random() < 0.8,
        streamable=variant.streamable and rng.random() < 0.8,
    )
    return _with_reads(rng, half)


def _phase(
    rng: random.Random, stage: str, components: tuple[ComponentNumbers, ...]
) -> PhaseNumbers:
    uses = []
    for name in rng.sample(components, min(len(components), rng.choice((0, 1, 1, 1, 1, 2)))):
        calls = rng.choice((1, 1, 2, 5))
        group_calls = tuple(rng.choice((calls, calls, rng.randint(0, calls))) for _ in name.groups)
        uses.append(
            Use(name.name, calls, group_calls, tuple(float(rng.randint(0, 3)) for _ in name.groups))
        )
    first = rng.choice((0, 512, 1000, 2048))
    inputs_live, steady = rng.choice((0, 100)), rng.choice((first, 0, 3000))
    return PhaseNumbers(
        stage, 0, tuple(uses), inputs_live, first, steady, pipeline_code_bytes=first // 2
    )


def _value(
    rng: random.Random,
    number: int,
    producer: str,
    consumers: list[str],
    phases: tuple[PhaseNumbers, ...],
) -> ValueNumbers | None:
    if not consumers:
        return None
    stages = [phase.stage for phase in phases]
    last = max(n for n, stage in enumerate(stages) if stage in consumers)
    first = max(n for n, stage in enumerate(stages) if stage == producer) + 1
    return ValueNumbers(
        f"v{number}",
        rng.choice((0, 256, 512, 2048, 4096, 8192)),
        producer,
        tuple(consumers),
        first,
        last,
    )


def _option(rng: random.Random, phase: PhaseNumbers) -> StageOption:
    slower = tuple(
        replace(use, seconds=tuple(seconds + rng.choice((0, 0.5, 1)) for seconds in use.seconds))
        for use in phase.uses
    )
    tiled = replace(
        phase, uses=slower, first_bytes=phase.first_bytes // 2, steady_bytes=phase.steady_bytes // 4
    )
    return StageOption(phase.stage, "tiling", (tiled,), needs=rng.choice(("", "tiling")))


def _directives(
    rng: random.Random, components: tuple[ComponentNumbers, ...]
) -> tuple[Directive, ...]:
    if rng.random() > 0.2:
        return ()
    kinds: tuple[ComponentPlacement, ...] = ("keep", "exclude", "whole", "drop", "pin")
    return (Directive(rng.choice(kinds), rng.choice(components).name),)
