"""S4.3: bitsandbytes' 4-bit layers are never streamed one by one. A plan that requires it is
refused before the run."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import accelerate
import pytest
import torch
from scenario_graphs import AMPLE, GRAPHS
from test_s1_quantized import build_again, quantized_by_bitsandbytes

from graphrun.graph.loading import load
from graphrun.model.problem import Problem
from graphrun.profile.dry_run import probe
from graphrun.profile.hardware import simulated
from graphrun.profile.problems import ProblemLimits, problem_of
from graphrun.solve.granularity import splittable
from graphrun.solve.infeasible import Infeasible, smallest_budget
from graphrun.solve.solve import solve
from graphrun.verify.check import check

T5 = "text_encoder_2"


@cache
def encoding(*precisions: str) -> Problem:
    """FLUX's encoders tiny, T5 in one of ``precisions``: their blocks decide what is needed."""
    whole = load(GRAPHS / "flux-tiny.yaml").until("encode")
    graph = replace(
        whole,
        components={**whole.components, T5: replace(whole.components[T5], precision=precisions)},
    )
    inputs = graph.resolve({})
    return problem_of(graph, probe(graph, inputs), simulated(), ProblemLimits(AMPLE, AMPLE), inputs)


def by_blocks(problem: Problem) -> Problem:
    return replace(problem, components=tuple(replace(c, layers=None) for c in problem.components))


def test_s4_3_a_budget_that_takes_4_bit_layers_one_by_one_is_infeasible() -> None:
    problem = encoding("nf4")
    assert splittable(problem) == ("text_encoder",)
    minimum_bytes = smallest_budget(by_blocks(problem))
    with pytest.raises(Infeasible) as error_info:
        solve(replace(problem, budget_bytes=minimum_bytes - 1))
    assert error_info.value.smallest_budget_bytes == minimum_bytes
    assert [need.phase for need in error_info.value.needs if need.short_bytes > 0] == [
        f"encode/1:{T5}"
    ]


def test_s4_3_8_bit_layers_pass_one_by_one() -> None:
    """With the bits of resident ones: tests/runtime/test_layer_granularity.py."""
    assert smallest_budget(encoding("int8")) < smallest_budget(by_blocks(encoding("int8")))


def test_s4_3_a_plan_that_says_so_is_refused() -> None:
    problem = encoding("bfloat16", "nf4")
    names = [variant.name for variant in problem.component(T5).variants]
    assert [problem.component(T5).stored_as(name).layers is None for name in names] == [
        "nf4" in name for name in names
    ]
    smallest_solution = solve(replace(problem, budget_bytes=smallest_budget(problem)))
    assert smallest_solution.problem.component(T5).granularity == "layers"
    nf4 = next(name for name in names if "nf4" in name)
    wrong_plan = replace(
        smallest_solution.plan,
        variants=tuple(
            (name, nf4 if name == T5 else precision)
            for name, precision in smallest_solution.plan.variants
        ),
    )
    broken_rules = [
        violation.rule
        for violation in check(replace(smallest_solution.problem, allow=("nf4",)), wrong_plan)
    ]
    assert "not-streamable" in broken_rules
    assert check(smallest_solution.problem, smallest_solution.plan) == ()


def test_s4_3_under_accelerates_offloading_4_bit_fails_while_it_runs() -> None:
    """diffusers' sequential offloading is this for every component; no bitsandbytes layer gets to
    `sim` by itself."""
    module = quantized_by_bitsandbytes(build_again(), "nf4")
    for layer in module.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False  # else it packs its weight again on such CPUs
    tokens = torch.arange(32).reshape(1, 32)
    with torch.no_grad():
        assert torch.isfinite(module(tokens)[0]).all()
        accelerate.cpu_offload(module, "cpu")
        with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
            module(tokens)
