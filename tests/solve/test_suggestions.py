"""Suggestions of infeasible problems: each leads to a problem with a plan, and they are ranked."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from planner_problems import GIB, MIB, component, hardware, problem

from graphrun.model.problem import (
    ComponentNumbers,
    PhaseNumbers,
    Problem,
    StageOption,
    Use,
    ValueNumbers,
)
from graphrun.solve.infeasible import Infeasible, smallest_budget, smallest_ram
from graphrun.solve.solve import solve
from graphrun.units import parse_size
from graphrun.verify.check import check

DISK = 1.2e9  # bytes per second


def gib(size: float) -> int:
    return int(size * GIB)


def backing_stores(
    original: ComponentNumbers, nf4_share: float, *, nf4_alone: bool = False, needs: str = "nf4"
) -> ComponentNumbers:
    """``of`` with backing stores in pinned and pageable RAM that are read from disk, as bf16 and
    nf4. ``nf4_alone``: without bf16."""
    variants = []
    for precision, share in (("bfloat16", 1.0), ("nf4", nf4_share)):
        plain = original.variants[0]
        sizes = tuple(int(share * nbytes) for nbytes in plain.block_bytes)
        # nf4 is quantized from bf16 files
        reads = tuple(nbytes / DISK for nbytes in plain.block_bytes)
        for backing_store, slower in (("pinned", 1.0), ("pageable", 2.5)):
            nf4_variant = replace(
                plain,
                precision=precision,
                backing_store=backing_store,
                block_bytes=sizes,
                load_seconds=tuple(slower * share * seconds for seconds in plain.load_seconds),
                host_bytes=int(share * plain.host_bytes),
                read_seconds=reads,
                needs=needs if precision == "nf4" and not nf4_alone else "",
            )
            if precision == "nf4" or not nf4_alone:
                variants.append(nf4_variant)
    return replace(original, variants=tuple(variants))


def flux_with_bf16_t5(vram_bytes: int = 8 * GIB, ram_bytes: int = 8 * GIB) -> Problem:
    """FLUX at 1072x1920, its transformer in nf4 and its T5 in bf16 (8.87 GiB): users saw 30 minutes
    of swapping in 8 + 8 GiB."""
    components = (
        backing_stores(component("text_encoder", ("unblocked", 1, gib(0.23))), 0.6),
        backing_stores(
            component(
                "text_encoder_2",
                ("blocks", 24, gib(8.87 - 0.25) // 24),
                ("unblocked", 1, gib(0.25)),
            ),
            0.28,
            needs="t5-nf4",
        ),
        backing_stores(
            component("transformer", ("double", 19, 340 * 10**6), ("single", 38, 142 * 10**6)),
            0.28,
            nf4_alone=True,
        ),
        backing_stores(component("vae", ("unblocked", 1, 160 * MIB)), 1.0, nf4_alone=True),
    )
    phases = (
        PhaseNumbers("encode", 0, (Use("text_encoder", 1, (1,), (0.003,)),), 0, 10 * MIB, 0),
        PhaseNumbers(
            "encode", 1, (Use("text_encoder_2", 1, (1, 1), (0.005, 0.001)),), MIB, 98 * MIB, 0
        ),
        PhaseNumbers(
            "denoise",
            0,
            (Use("transformer", 28, (28, 28), (0.025, 0.021)),),
            2 * MIB,
            940 * MIB,
            940 * MIB,
        ),
        PhaseNumbers("decode", 0, (Use("vae", 1, (1,), (0.6,)),), MIB, 3100 * MIB, 0),
    )
    values = (
        ValueNumbers("embeds", 4 * MIB, "encode", ("denoise",), 2, 2),
        ValueNumbers("latents", MIB, "denoise", ("decode",), 3, 3),
    )
    return problem(vram_bytes, components, phases, values, ram_bytes, hardware(24 * GIB, 650 * MIB))


def refused(problem: Problem) -> Infeasible:
    with pytest.raises(Infeasible) as error_info:
        solve(problem)
    return error_info.value


def test_s3_1_a_bf16_t5_in_8_gib_of_ram_is_refused_with_suggestions() -> None:
    problem = flux_with_bf16_t5()
    error = refused(problem)
    assert (error.binding, error.needs) == ("RAM", ()), "VRAM suffices, because T5 is streamed"
    t5 = problem.component("text_encoder_2").variants[0].host_bytes
    # T5 alone exceeds RAM; backing stores are read and dropped one after another, so no other
    # component adds to it
    assert error.smallest_ram_bytes == t5
    suggestion_by_change = {suggestion.change: suggestion for suggestion in error.suggestions}
    assert [change for change in suggestion_by_change if change[0][0] == "--ram"] == [
        (("--ram", str(t5)),)
    ]
    nf4 = suggestion_by_change[(("--allow", "t5-nf4"),)]
    assert nf4.changes_output
    assert "text_encoder_2" in nf4.text
    assert suggestion_by_change[(("--until", "encode"),)].text.startswith(
        "run encode on a larger machine"
    )
    assert not suggestion_by_change[(("--until", "encode"),)].changes_output
    assert [suggestion.changes_output for suggestion in error.suggestions] == sorted(
        suggestion.changes_output for suggestion in error.suggestions
    )
    permitted = replace(problem, allow=("t5-nf4",))
    solution = solve(permitted)
    assert check(permitted, solution.plan) == ()
    assert nf4.seconds == pytest.approx(solution.objective_seconds)
    assert dict(solution.plan.variants)["text_encoder_2"].startswith("nf4")


def test_with_the_least_ram_a_plan_exists_and_with_a_byte_less_none() -> None:
    minimum = smallest_ram(flux_with_bf16_t5())
    sufficient = flux_with_bf16_t5(ram_bytes=minimum)
    assert check(sufficient, solve(sufficient).plan) == ()
    assert refused(flux_with_bf16_t5(ram_bytes=minimum - 1)).smallest_ram_bytes == minimum


def test_the_least_vram_of_variants_is_exact_too() -> None:
    problem = flux_with_bf16_t5(ram_bytes=64 * GIB)
    minimum = smallest_budget(problem)
    # decoding needs the whole VAE, its activation, input_bytes and the latents
    assert minimum == 650 * MIB + 160 * MIB + 3100 * MIB + MIB + MIB
    sufficient = replace(problem, budget_bytes=minimum)
    assert check(sufficient, solve(sufficient).plan) == ()
    error = refused(replace(problem, budget_bytes=minimum - 1))
    assert (error.binding, error.smallest_budget_bytes) == ("VRAM", minimum)
    assert [(need.phase, need.short_bytes) for need in error.needs] == [("decode/0:vae", 1)]


def test_pinned_and_disk_budgets_bind_to_the_byte() -> None:
    only_component = component("one", ("blocks", 4, MIB))
    only_pinned = problem(
        GIB, (only_component,), (PhaseNumbers("s", 0, (Use("one", 1, (1,), (1.0,)),), 0, 0, 0),)
    )
    short = refused(replace(only_pinned, pinned_bytes=4 * MIB - 1))
    assert (short.binding, [str(suggestion) for suggestion in short.suggestions]) == (
        "pinned RAM",
        ["raise the page-locked RAM budget from 3.99M to 4M"],
    )
    disk_component = replace(
        only_component, variants=(replace(only_component.variants[0], stored_bytes=MIB),)
    )
    instance = replace(only_pinned, components=(disk_component,), disk_bytes=MIB)
    assert check(instance, solve(instance).plan) == ()
    assert refused(replace(instance, disk_bytes=MIB - 1)).binding == "disk"


def test_an_option_that_changes_the_output_is_offered_but_not_chosen() -> None:
    vae = component("vae", ("unblocked", 1, MIB))
    plain = PhaseNumbers("decode", 0, (Use("vae", 1, (1,), (1.0,)),), 0, 10 * MIB, 0)
    tiled = StageOption("decode", "tiling", (replace(plain, first_bytes=2 * MIB),), "tiling")
    instance = replace(problem(4 * MIB, (vae,), (plain,)), options=(tiled,))
    error = refused(instance)
    assert [(suggestion.change, suggestion.changes_output) for suggestion in error.suggestions] == [
        ((("--vram", str(11 * MIB)),), False),
        ((("--allow", "tiling"),), True),
        ((), True),
    ]
    assert solve(replace(instance, allow=("tiling",))).plan.options == (("decode", "tiling"),)


def test_a_component_without_usable_variants_is_named_as_the_cause() -> None:
    only_component = component("one", ("unblocked", 1, MIB))
    nf4 = replace(only_component, variants=(replace(only_component.variants[0], needs="nf4"),))
    error = refused(
        problem(GIB, (nf4,), (PhaseNumbers("s", 0, (Use("one", 1, (1,), (1.0,)),), 0, 0, 0),))
    )
    assert error.binding == "what is allowed"
    assert [suggestion.change for suggestion in error.suggestions] == [(("--allow", "nf4"),)]


def test_the_message_names_arguments_that_can_be_typed_in_python() -> None:
    for instance in (
        flux_with_bf16_t5(),
        flux_with_bf16_t5(vram_bytes=3 * GIB, ram_bytes=64 * GIB),
    ):
        error = refused(instance)
        suggestions = str(error).partition(". Do one of: ")[2].split("; ")
        typed_texts = [
            eval(f"dict({match[1]})")
            for text in suggestions
            if (match := re.match(r"(\w+=.+?): ", text))
        ]
        assert len(typed_texts) == sum(
            suggestion.change[:1] != () and suggestion.change[0][0] != "--until"
            for suggestion in error.suggestions
        )
        for arguments in typed_texts:
            vram, ram = (
                parse_size(arguments.get(name, f"{nbytes}B"))
                for name, nbytes in budgets_of(instance)
            )
            solve(
                replace(
                    instance,
                    budget_bytes=vram,
                    ram_bytes=ram,
                    allow=tuple(arguments.get("allow", ())),
                )
            )
        assert not re.search(r"\d [GMK]iB|\d bytes", str(error))


def budgets_of(problem: Problem) -> tuple[tuple[str, int], tuple[str, int]]:
    return ("vram", problem.budget_bytes), ("ram", problem.ram_bytes)
