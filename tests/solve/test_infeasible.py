"""Explanations of infeasible problems: memory terms that add up, exact smallest budgets, and
suggestions that work."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner_problems import GIB, MIB, component, flux, hardware, problem

from graphrun.model.least_memory import least_memory
from graphrun.model.plan import Stream
from graphrun.model.problem import Directive, PhaseNumbers, Problem, Use
from graphrun.solve.infeasible import Infeasible, smallest_budget, smallest_pinned, smallest_ram
from graphrun.solve.solve import solve
from graphrun.units import parse_size, typed_size
from graphrun.verify.check import check


def refused(problem: Problem) -> Infeasible:
    with pytest.raises(Infeasible) as error_info:
        solve(problem)
    return error_info.value


def test_each_phase_that_does_not_fit_is_named_with_its_terms() -> None:
    error = refused(flux(2 * GIB))
    assert error.exit_code == 3
    assert [(need.phase, need.part) for need in error.needs] == [("decode/0:vae", "first")]
    (need,) = error.needs
    assert (
        need.weights_bytes,
        need.ring_buffer_bytes,
        need.activation_bytes,
        need.values_bytes,
    ) == (
        160 * MIB,
        0,
        1536 * MIB,
        2 * MIB,
    )
    assert need.total_bytes == 1698 * MIB
    assert need.available_bytes == 2 * GIB - 650 * MIB
    assert "decode/0:vae first needs at least 1.66G, and the budget leaves " in str(error)
    assert error.smallest_budget_bytes == 650 * MIB + 1698 * MIB


def test_streamed_components_need_their_fixed_weights_and_a_ring_buffer() -> None:
    needs = {need.phase: need for need in least_memory(flux(8 * GIB))}
    need = needs["denoise/0:transformer"]
    assert need.weights_bytes == 180 * MIB
    assert need.ring_buffer_bytes == -(-340 * 10**6 // 512) * 512, "one block of the larger group"


@pytest.mark.parametrize("device", ["sim", "cpu"])
def test_the_smallest_budget_is_exact(device: str) -> None:
    def instance(nbytes: int) -> Problem:
        return replace(flux(nbytes), hardware=replace(flux(nbytes).hardware, device=device))

    smallest = smallest_budget(instance(8 * GIB))
    solution = solve(instance(smallest))
    assert check(solution.problem, solution.plan) == ()
    # on a CPU page tables count, which are fewer for a smaller budget
    for nbytes in (smallest - 1, smallest // 2):
        assert refused(instance(nbytes)).smallest_budget_bytes == smallest


def test_the_largest_block_alone_in_the_ring_buffer_fits_to_the_byte() -> None:
    block_component = component(
        "one", ("large", 3, 10 * 1024), ("small", 9, 4 * 1024), ("unblocked", 1, 1024)
    )
    instance = problem(
        11 * 1024 + 512,
        (block_component,),
        (PhaseNumbers("s", 0, (Use("one", 2, (2, 2, 2), (1.0, 1.0, 0.0)),), 0, 512, 0),),
    )
    assert smallest_budget(instance) == 11 * 1024 + 512
    solution = solve(instance)
    assert check(instance, solution.plan) == ()
    ring_buffers = {
        action.ring_buffer_bytes
        for slot in solution.plan.slots
        for action in slot.actions
        if isinstance(action, Stream)
    }
    assert ring_buffers == {10 * 1024}
    refused(replace(instance, budget_bytes=11 * 1024 + 511))


def test_first_and_steady_slots_are_sized_separately() -> None:
    # first streams wide blocks through a ring buffer of 30 KiB; steady streams none of them and has
    # 51 KiB of activation and 10 of ring buffer
    block_component = component(
        "one", ("tall", 1, 10 * 1024, True), ("small", 10, 4 * 1024), ("wide", 10, 30 * 1024)
    )
    phase = PhaseNumbers("s", 0, (Use("one", 3, (3, 3, 1), (1.0, 1.0, 1.0)),), 0, 0, 51 * 1024)
    instance = problem(61 * 1024, (block_component,), (phase,))
    assert smallest_budget(instance) == 61 * 1024
    assert check(instance, solve(instance).plan) == ()
    refused(replace(instance, budget_bytes=61 * 1024 - 1))


def test_a_component_without_weights_has_minimum_budgets() -> None:
    only_component = component("one", ("blocks", 4, MIB))
    variant = only_component.variants[0]
    variants = (variant, replace(variant, precision="other"))
    phase = PhaseNumbers("s", 0, (Use("one", 1, (1,), (1.0,)), Use("none", 1, (), ())), 0, 0, 0)
    instance = problem(
        GIB, (replace(only_component, variants=variants), component("none")), (phase,)
    )
    assert smallest_budget(instance) == MIB
    assert smallest_pinned(instance) == smallest_ram(instance) == 4 * MIB


def test_ram_holds_every_backing_store() -> None:
    problem = flux(8 * GIB)
    total = sum(component.variants[0].host_bytes for component in problem.components)
    assert smallest_ram(problem) == total
    solve(replace(problem, ram_bytes=total))
    error = refused(replace(problem, ram_bytes=total - 1))
    assert (error.binding, error.needs, error.smallest_ram_bytes) == ("RAM", (), total)
    assert f"and the budget is {typed_size(total - 1, round_down=True)}. " in str(error)
    assert typed_size(total - 1, round_down=True) != typed_size(total - 1)
    separate = [suggestion for suggestion in error.suggestions if "separately" in suggestion.text]
    (ram,) = [suggestion for suggestion in error.suggestions if suggestion not in separate]
    assert (
        ram.text == f"raise the RAM budget from {typed_size(total - 1, round_down=True)}"
        f" to {typed_size(total)}"
    )
    assert (
        parse_size(typed_size(total - 1, round_down=True)) < total <= parse_size(typed_size(total))
    )
    assert f'ram="{typed_size(total)}": {ram.text}' in str(error)
    assert ram.seconds == pytest.approx(solve(problem).objective_seconds), (
        "each is verified by a solve"
    )
    assert [suggestion.change for suggestion in separate] == [
        (("--until", "encode"),),
        (("--until", "denoise"),),
    ]
    assert not any(suggestion.changes_output for suggestion in error.suggestions)


def test_a_budget_above_the_capacity_asks_for_another_device() -> None:
    error = refused(replace(flux(8 * GIB), hardware=hardware(2 * GIB, 650 * MIB)))
    assert error.suggestions[0].text.startswith("use a device with ")
    assert error.effective_bytes == 2 * GIB - 650 * MIB


def test_suggestions_work() -> None:
    problem = flux(2 * GIB)
    error = refused(problem)
    vram, smaller = error.suggestions
    assert "raise the VRAM budget" in vram.text
    assert "or tiling, until the activation of decode/0:vae is " in smaller.text
    assert (vram.changes_output, smaller.changes_output) == (False, True), "so it comes last"
    short = error.needs[0].short_bytes
    decode = replace(problem.phases[3], first_bytes=problem.phases[3].first_bytes - short)
    solve(replace(problem, phases=(*problem.phases[:3], decode)))
    solve(replace(problem, budget_bytes=error.smallest_budget_bytes))
    weights_alone = refused(flux(800 * MIB))
    assert not any("shrink" in suggestion.text for suggestion in weights_alone.suggestions)


def test_a_budget_below_the_context_names_every_phase() -> None:
    error = refused(flux(100 * MIB))
    assert len(error.needs) == 4
    assert all(need.available_bytes < 0 for need in error.needs)


def test_the_least_memory_counts_inputs_of_a_phase_and_components_that_stay() -> None:
    instance = flux(8 * GIB)
    encode, encode_2, denoise, decode = instance.phases
    larger_denoise = replace(denoise, input_bytes=denoise.input_bytes + MIB)
    phases = (encode, encode_2, larger_denoise, decode)
    directives = (Directive("keep", "text_encoder"),)
    totals, with_inputs, with_kept = (
        [need.total_bytes for need in least_memory(variation)]
        for variation in (
            instance,
            replace(instance, phases=phases),
            replace(instance, directives=directives),
        )
    )
    assert [b - a for a, b in zip(totals, with_inputs, strict=True)] == [0, 0, MIB, 0]
    assert [b - a for a, b in zip(totals, with_kept, strict=True)] == [0, *(246 * MIB,) * 3]
