"""The choices that a problem offers: backing stores, computing on the CPU, stage options, orders of
stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import graphrun
from graphrun.errors import GraphError, InputError
from graphrun.model.hardware import ProcessorRates
from graphrun.profile.hardware import simulated
from graphrun.profile.variants import streaming_code_seconds

GRAPHS = Path(__file__).parents[2] / "graphs"


def estimate(graph: Any, **settings: Any) -> Any:
    return graphrun.estimate(graph, vram="8M", ram="1G", **{"hardware": "sim", **settings})


def backing_stores(problem: Any, component: str) -> list[str]:
    return [variant.name for variant in problem.component(component).variants]


def test_random_weights_have_one_backing_store_that_is_written_before_the_run(
    edit_graph: Callable[..., Any],
) -> None:
    problem = estimate(edit_graph("flux-tiny"))
    assert all(len(component.variants) == 1 for component in problem.components)
    assert backing_stores(problem, "vae") == ["bfloat16 pinned device"]
    assert problem.component("transformer").variants[0].read_seconds == ()


def test_a_source_can_be_read_into_a_backing_store_or_again_for_each_copy(
    make_problem: Any,
) -> None:
    transformer = make_problem("flux-dev", 8 * 2**30, hardware="rtx4090").component("transformer")
    pinned, disk = (variant for variant in transformer.variants if variant.precision == "bfloat16")
    assert (pinned.name, disk.name) == ("bfloat16 pinned device", "bfloat16 disk device")
    rate = 1.2e9  # the prior of every card
    assert (
        pinned.read_seconds
        == disk.disk_seconds
        == tuple(nbytes / rate for nbytes in pinned.block_bytes)
    )
    assert pinned.disk_seconds == disk.read_seconds == ()
    assert disk.host_bytes == 2 * max(disk.block_bytes)
    assert pinned.host_bytes == transformer.weight_bytes()


def test_pageable_backing_stores_are_offered_where_page_locked_memory_is_limited_and_are_slower(
    edit_graph: Callable[..., Any],
) -> None:
    problem = estimate(edit_graph("flux-tiny"), pinned="1M")
    pinned, pageable = problem.component("transformer").variants
    assert (problem.pinned_bytes, pageable.backing_store) == (2**20, "pageable")
    start = problem.hardware.copy_start_seconds
    pairs = zip(pageable.load_seconds, pinned.load_seconds, strict=True)
    assert [(slow - start) / (fast - start) for slow, fast in pairs] == pytest.approx([2.5] * 3)


def test_a_graph_can_restrict_backing_stores(edit_graph: Callable[..., Any]) -> None:
    graph = edit_graph(
        "flux-tiny", ("dtype: bfloat16}", "dtype: bfloat16, backing_store: [pageable]}")
    )
    assert backing_stores(estimate(graph), "text_encoder") == ["bfloat16 pageable device"]
    with pytest.raises(GraphError, match="components.text_encoder.backing_store"):
        edit_graph("flux-tiny", ("dtype: bfloat16}", "dtype: bfloat16, backing_store: [cloud]}"))


def test_computing_on_the_cpu_is_offered_where_it_is_allowed_and_copies_nothing(
    edit_graph: Callable[..., Any],
) -> None:
    problem = estimate(edit_graph("flux-tiny"), allow=["cpu"])
    plain, cpu = problem.component("text_encoder").variants
    assert (cpu.device, cpu.backing_store, cpu.needs, plain.needs) == ("cpu", "pageable", "cpu", "")
    assert cpu.slowdown == pytest.approx(10.0)  # sim's rates
    assert not any(cpu.load_seconds)


@pytest.mark.sweep("more")
def test_a_stage_option_is_offered_where_it_changes_the_numbers_and_is_allowed(
    edit_graph: Callable[..., Any],
) -> None:
    graph = edit_graph(
        "sdxl-tiny",
        ("    op: denoise\n", "    op: denoise\n    options: [split]\n"),
        ("    op: decode\n", "    op: decode\n    options: [slicing]\n"),
    )
    assert estimate(graph).options == ()  # not allowed; and one picture cannot be sliced
    (split,) = estimate(graph, allow=["split"]).options
    assert (split.stage, split.name, split.needs) == ("denoise", "split", "split")
    (plain,) = [phase for phase in estimate(graph).phases if phase.stage == "denoise"]
    (halved,) = split.phases
    assert halved.uses[0].calls == 2 * plain.uses[0].calls
    assert halved.steady_bytes < plain.steady_bytes


def test_an_option_that_an_op_does_not_have_is_refused(edit_graph: Callable[..., Any]) -> None:
    with pytest.raises(GraphError, match="encode_prompt has no option 'tiling'; it has none"):
        edit_graph(
            "flux-tiny",
            ("    op: encode_prompt\n", "    op: encode_prompt\n    options: [tiling]\n"),
        )


def test_only_changes_that_the_graph_lists_can_be_allowed(edit_graph: Callable[..., Any]) -> None:
    graph = edit_graph(
        "flux-tiny", ("dtype: bfloat16}", "dtype: bfloat16, precision: [bfloat16, nf4]}")
    )
    assert graph.allowed(["precision", "cpu"]) == ("cpu", "nf4")
    assert graph.allowed(["nf4,cpu"]) == ("cpu", "nf4")
    with pytest.raises(InputError, match="allow int8: this graph knows cpu, nf4, 4bit, precision"):
        graph.allowed(["int8"])


def test_independent_stages_may_run_in_any_order(edit_graph: Callable[..., Any]) -> None:
    assert estimate(edit_graph("flux-tiny")).precedence is None
    decode = (
        "op: decode, uses: [vae], with: "
        "{latents: $denoise.latents, embeds: $encode.embeds, height: $height, width: $width}"
    )
    second = f"  second: {{{decode}}}\n\noutputs: {{again: $second.image, "
    problem = estimate(edit_graph("flux-tiny", ("\noutputs: {", second)))
    assert ("denoise", "second") in problem.precedence
    assert ("decode", "second") not in problem.precedence


@pytest.mark.parametrize("runs", [0, -1])
def test_a_session_has_one_run_at_least(edit_graph: Callable[..., Any], runs: int) -> None:
    with pytest.raises(InputError, match=f"runs {runs}: a session has at least one run"):
        estimate(edit_graph("flux-tiny"), runs=runs)


def test_pin_directives_are_in_the_problem(edit_graph: Callable[..., Any]) -> None:
    problem = estimate(edit_graph("flux-tiny"), pin=["vae"])
    assert problem.demanded("vae") == {"pin"}
    with pytest.raises(InputError, match="pin vea: no such component; did you mean 'vae'"):
        estimate(edit_graph("flux-tiny"), pin=["vea"])


def test_compiled_blocks_take_their_seconds_over_what_compiling_was_measured_to_gain(
    edit_graph: Callable[..., Any],
) -> None:
    graph = edit_graph(
        "flux-tiny",
        (
            "tiny-flux-transformer.json, dtype: bfloat16",
            "tiny-flux-transformer.json, dtype: bfloat16, compile: blocks",
        ),
    )
    fast_hardware = replace(simulated(), compiled_gain=2.0)
    (plain, *_), (faster, *_), (forbidden, *_), (unmeasured, *_) = (
        [
            use
            for phase in estimate(graph, hardware=hardware, allow=allow).phases
            for use in phase.uses
            if use.component == "transformer"
        ]
        for hardware, allow in (
            (simulated(), ()),
            (fast_hardware, ["compile"]),
            (fast_hardware, ()),
            (simulated(), ["compile"]),
        )
    )
    blocks = [(k, i, seconds / 2 if k else seconds) for k, i, seconds in plain.order]
    assert len(blocks) > 4
    assert list(faster.order) == blocks
    assert sum(faster.seconds) < sum(plain.seconds)
    assert forbidden.order == unmeasured.order == plain.order
    assert forbidden.seconds == unmeasured.seconds == plain.seconds


def test_a_problem_does_not_mention_a_gain_that_was_not_measured(
    edit_graph: Callable[..., Any],
) -> None:
    problem = estimate(edit_graph("flux-tiny"))
    assert "compiled_gain" not in problem.to_json()["hardware"]
    faster_problem = replace(problem, hardware=replace(problem.hardware, compiled_gain=1.5))
    assert faster_problem.to_json()["hardware"]["compiled_gain"] == 1.5
    assert faster_problem.digest != problem.digest


def test_streaming_takes_compute_where_the_same_cores_read() -> None:
    graph = graphrun.load("flux-tiny")
    problem = graphrun.estimate(graph, memory="8G", hardware="cpu")
    (variant,) = problem.component("transformer").variants
    rates = problem.hardware.kernels
    assert isinstance(rates, ProcessorRates)
    code_seconds = streaming_code_seconds(problem.hardware)
    read_seconds = [seconds - code_seconds for seconds in variant.lost_seconds]
    byte_seconds = rates.read_cpu_seconds / rates.threads
    expected_seconds = [nbytes * byte_seconds for nbytes in variant.block_bytes]
    assert read_seconds == pytest.approx(expected_seconds, rel=0.2)  # a block has slack in memory
    assert min(variant.lost_seconds) > 0
    for hardware, budget in (("m1max-32", "memory"), ("rtx4090", "vram")):
        other: Any = graphrun.estimate(graph, hardware=hardware, **{budget: "8G"})
        card = other.component("transformer")
        assert not any(v.lost_seconds for v in card.variants)
