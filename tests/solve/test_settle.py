"""A problem with its choices made: what a plan's variants, options and order turn it into."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner_problems import flux
from planner_session import COLD, K, given, plan_for

from graphrun.errors import PlanError
from graphrun.model.choices import activation_bytes, apply_choices, reorder, stages_of, use_with
from graphrun.model.plan import Plan
from graphrun.model.problem import Directive, Problem


def chosen(of: Problem, **choices: object) -> Problem:
    variants = (("te", "bfloat16 pinned device"), ("dit", "bfloat16 pinned device"))
    return apply_choices(of, Plan(of.digest, (), **{"variants": variants, **choices}))  # type: ignore[arg-type]


def test_a_problem_without_choices_settles_to_itself() -> None:
    of = flux(2**34)
    assert apply_choices(of, Plan(of.digest, ())) == of
    assert reorder(of) == of


def test_one_variant_is_left_with_its_seconds_and_scratch_in_the_phases() -> None:
    of = given()
    (te,) = (c.variants for c in apply_choices(of, plan_for(of, COLD)).components if c.name == "te")
    assert [variant.name for variant in te] == ["bfloat16 pageable cpu"]
    assert (te[0].slowdown, te[0].scratch_bytes, te[0].block_seconds) == (1.0, 0, ())
    encode = apply_choices(of, plan_for(of, COLD)).phases[0]
    assert encode.uses[0].seconds == (8.0,), "8 times slower on the CPU"
    assert encode.first_bytes == 0, "nothing of its activation is on the device"
    assert chosen(of).phases[0].first_bytes == 500


def test_block_seconds_count_once_a_block_and_call_and_the_traced_order_keeps_its_shares() -> None:
    use = given().phases[2].uses[0]
    variant = replace(given().components[2].variants[0], slowdown=2.0, block_seconds=(0.5, 0.25))
    assert use_with(use, given().components[2], variant).seconds == (6.5, 2.25)
    traced = replace(use, order=((1, 0, 0.4), (0, 0, 3.0), (1, 0, 0.6)))
    assert use_with(traced, given().components[2], variant).order == ((1, 0, 2 * 0.4 + 0.25), (0, 0, 6.5), (1, 0, 2 * 0.6))
    assert use_with(use, given().components[2], given().components[2].variants[0]) is use


def test_scratch_is_the_largest_of_those_used_and_the_cpu_takes_nothing_of_the_device() -> None:
    on, cpu = given().components[0].variants
    assert activation_bytes(1000, [replace(on, scratch_bytes=7), replace(on, scratch_bytes=9)]) == 1009
    assert activation_bytes(1000, [replace(on, scratch_bytes=7), cpu]) == 1007
    assert activation_bytes(1000, [cpu, cpu]) == 0
    assert activation_bytes(1000, []) == 1000


def test_an_option_takes_the_place_of_the_stage_s_phases() -> None:
    applied = chosen(given(), options=(("decode", "tiling"),))
    assert [phase.first_bytes for phase in applied.phases] == [500, 600, 900, K]
    assert applied.options == ()
    assert chosen(given(allow=("slicing",)), options=(("decode", "slicing"),)).phases[3].first_bytes == 0


def test_values_live_from_behind_their_producer_to_their_last_consumer_in_the_order_chosen() -> None:
    def lives(of: Problem) -> dict[str, tuple[int, int]]:
        return {value.name: (value.first_phase, value.last_phase) for value in of.values}

    assert lives(chosen(given())) == {"embeds": (1, 2), "latents": (3, 3)}
    swapped = chosen(given(), order=("refine", "encode", "denoise", "decode"))
    assert stages_of(swapped) == ("refine", "encode", "denoise", "decode")
    assert lives(swapped) == {"embeds": (2, 2), "latents": (3, 3)}
    split = given(phases=(*given().phases[:2], replace(given().phases[1], index=1), *given().phases[2:]))
    assert lives(chosen(split)) == {"embeds": (1, 3), "latents": (4, 4)}


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"variants": (("dit", "bfloat16 pinned device"),)}, "variant: te has none"),
        ({"variants": (("te", "int8 pinned device"),)}, "variant: te has no 'int8 pinned device'; it has bfloat16 pinned device, "),
        ({"variants": (("tee", "bfloat16 pinned device"),)}, "variant: the problem has no component tee"),
        ({"options": (("decode", "tailing"),)}, "option: the problem has no 'tailing' for stage 'decode'"),
        ({"options": (("decode", "slicing"),)}, "option: slicing of decode changes the output, and slicing is not allowed"),
        ({"order": ("encode", "denoise", "refine", "decode")}, "order: denoise needs refine before it"),
        ({"order": ("encode", "denoise")}, "order: the problem has encode refine denoise decode, the plan encode denoise"),
    ],
)
def test_what_the_problem_does_not_have_is_refused(choices: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        chosen(given(), **choices)


def test_what_is_not_allowed_or_not_pinned_is_no_choice() -> None:
    fp = {"variants": (("te", "bfloat16 pinned device"), ("dit", "nf4 pinned device"))}
    with pytest.raises(PlanError, match="variant: dit has no 'nf4 pinned device'"):
        chosen(given(), **fp)
    assert chosen(given(allow=("nf4",)), **fp).components[2].variants[0].precision == "nf4"
    pinned = given(directives=(Directive("pin", "dit"),))
    with pytest.raises(PlanError, match="dit has no 'bfloat16 disk device'; it has bfloat16 pinned device"):
        chosen(pinned, variants=(("te", "bfloat16 pinned device"), ("dit", "bfloat16 disk device")))
