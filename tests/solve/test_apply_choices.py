"""`apply_choices` and `reorder`: the problem with a plan's variants, options and order of stages
applied."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner_problems import flux
from planner_session import COLD, K, example_problem, plan_for

from graphrun.errors import PlanError
from graphrun.model.choices import activation_bytes, apply_choices, reorder, stages_of, use_with
from graphrun.model.plan import Plan
from graphrun.model.problem import Directive, Problem


def with_choices(problem: Problem, **choices: object) -> Problem:
    variants = (("te", "bfloat16 pinned device"), ("dit", "bfloat16 pinned device"))
    return apply_choices(problem, Plan(problem.digest, (), **{"variants": variants, **choices}))  # type: ignore[arg-type]


def test_a_problem_without_choices_is_unchanged() -> None:
    instance = flux(2**34)
    assert apply_choices(instance, Plan(instance.digest, ())) == instance
    assert reorder(instance) == instance


def test_only_the_chosen_variant_remains_and_its_seconds_and_scratch_are_in_the_phases() -> None:
    instance = example_problem()
    (te,) = (
        c.variants
        for c in apply_choices(instance, plan_for(instance, COLD)).components
        if c.name == "te"
    )
    assert [variant.name for variant in te] == ["bfloat16 pageable cpu"]
    assert (te[0].slowdown, te[0].scratch_bytes, te[0].block_seconds) == (1.0, 0, ())
    encode = apply_choices(instance, plan_for(instance, COLD)).phases[0]
    assert encode.uses[0].seconds == (8.0,), "8 times slower on the CPU"
    assert encode.first_bytes == 0, "its activation is in RAM"
    assert with_choices(instance).phases[0].first_bytes == 500


def test_block_seconds_count_once_per_block_and_call_in_traced_order_too() -> None:
    use = example_problem().phases[2].uses[0]
    variant = replace(
        example_problem().components[2].variants[0], slowdown=2.0, block_seconds=(0.5, 0.25)
    )
    assert use_with(use, example_problem().components[2], variant).seconds == (6.5, 2.25)
    traced = replace(use, order=((1, 0, 0.4), (0, 0, 3.0), (1, 0, 0.6)))
    assert use_with(traced, example_problem().components[2], variant).order == (
        (1, 0, 2 * 0.4 + 0.25),
        (0, 0, 6.5),
        (1, 0, 2 * 0.6),
    )
    assert (
        use_with(use, example_problem().components[2], example_problem().components[2].variants[0])
        is use
    )


def test_scratch_is_the_largest_of_the_variants_on_the_device() -> None:
    accelerated, cpu = example_problem().components[0].variants
    assert (
        activation_bytes(
            1000, [replace(accelerated, scratch_bytes=7), replace(accelerated, scratch_bytes=9)]
        )
        == 1009
    )
    assert activation_bytes(1000, [replace(accelerated, scratch_bytes=7), cpu]) == 1007
    assert activation_bytes(1000, [cpu, cpu]) == 0
    assert activation_bytes(1000, []) == 1000


def test_an_option_replaces_the_phases_of_its_stage() -> None:
    applied = with_choices(example_problem(), options=(("decode", "tiling"),))
    assert [phase.first_bytes for phase in applied.phases] == [500, 600, 900, K]
    assert applied.options == ()
    assert (
        with_choices(example_problem(allow=("slicing",)), options=(("decode", "slicing"),))
        .phases[3]
        .first_bytes
        == 0
    )


def test_values_are_live_from_after_their_producer_to_their_last_consumer_in_the_chosen_order() -> (
    None
):
    def live_ranges(problem: Problem) -> dict[str, tuple[int, int]]:
        return {value.name: (value.first_phase, value.last_phase) for value in problem.values}

    assert live_ranges(with_choices(example_problem())) == {"embeds": (1, 2), "latents": (3, 3)}
    swapped = with_choices(example_problem(), order=("refine", "encode", "denoise", "decode"))
    assert stages_of(swapped) == ("refine", "encode", "denoise", "decode")
    assert live_ranges(swapped) == {"embeds": (2, 2), "latents": (3, 3)}
    split = example_problem(
        phases=(
            *example_problem().phases[:2],
            replace(example_problem().phases[1], index=1),
            *example_problem().phases[2:],
        )
    )
    assert live_ranges(with_choices(split)) == {"embeds": (1, 3), "latents": (4, 4)}


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (
            {"variants": (("dit", "bfloat16 pinned device"),)},
            "variant: the plan chooses none for te; it has bfloat16 pinned device, ",
        ),
        (
            {"variants": (("te", "int8 pinned device"),)},
            "variant: te has no 'int8 pinned device'; it has bfloat16 pinned device, ",
        ),
        (
            {"variants": (("tee", "bfloat16 pinned device"),)},
            "variant: the problem has no component tee",
        ),
        (
            {"options": (("decode", "tailing"),)},
            "option: the problem has no 'tailing' for stage 'decode'",
        ),
        (
            {"options": (("decode", "slicing"),)},
            "option: slicing of decode changes the output, and slicing is not allowed",
        ),
        (
            {"order": ("encode", "denoise", "refine", "decode")},
            "order: denoise depends on refine, so it must come after it",
        ),
        (
            {"order": ("encode", "denoise")},
            "order: the problem has the stages encode refine denoise decode,"
            " the plan encode denoise",
        ),
    ],
)
def test_an_unknown_choice_is_refused(choices: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        with_choices(example_problem(), **choices)


def test_a_variant_that_is_not_permitted_or_not_pinned_is_refused() -> None:
    nf4 = {"variants": (("te", "bfloat16 pinned device"), ("dit", "nf4 pinned device"))}
    with pytest.raises(PlanError, match="variant: dit has no 'nf4 pinned device'"):
        with_choices(example_problem(), **nf4)
    assert (
        with_choices(example_problem(allow=("nf4",)), **nf4).components[2].variants[0].precision
        == "nf4"
    )
    pinned = example_problem(directives=(Directive("pin", "dit"),))
    with pytest.raises(
        PlanError, match="dit has no 'bfloat16 disk device'; it has bfloat16 pinned device"
    ):
        with_choices(
            pinned, variants=(("te", "bfloat16 pinned device"), ("dit", "bfloat16 disk device"))
        )
