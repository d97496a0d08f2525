"""A public function that gets another type than it takes says what it takes, and what to type."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from diffusers import DiffusionPipeline

import graphrun
from graphrun.errors import InputError

BUDGETS: dict[str, Any] = {"vram": "6M", "ram": "8G", "hardware": "sim"}


@pytest.fixture(scope="module")
def solution() -> Any:
    return graphrun.plan(graphrun.estimate(graphrun.load("flux-tiny"), **BUDGETS))


CALLS: dict[str, Callable[..., Any]] = {
    "estimate": lambda graph, solution: graphrun.estimate(graph, **BUDGETS),
    "precomputed": lambda graph, solution: graphrun.precomputed(graph, cache="x", hardware="sim"),
    "survey": lambda graph, solution: graphrun.survey(graph, hardware="sim"),
    "run": lambda graph, solution: graphrun.run(solution, graph),
    "run_many": lambda graph, solution: graphrun.run_many(graph, "a cat", **BUDGETS),
    "Session": lambda graph, solution: graphrun.Session(graph, **BUDGETS),
}


@pytest.mark.parametrize("function", CALLS)
@pytest.mark.parametrize("graph", ["flux-tiny", Path("flux-tiny")], ids=["name", "path"])
def test_a_name_is_not_a_graph(function: str, graph: Any, solution: Any) -> None:
    with pytest.raises(InputError) as error_info:
        CALLS[function](graph, solution)
    assert str(error_info.value) == (
        f"{function} takes a graph, not {type(graph).__name__}: use graphrun.load('flux-tiny')"
    )


@pytest.mark.parametrize("function", CALLS)
def test_a_pipeline_is_not_a_graph(function: str, solution: Any) -> None:
    wrapper = "from_pipeline" if function == "estimate" else "attach"
    expected = (
        rf"{function} takes a graph, not DiffusionPipeline: use graphrun.load; for a diffusers "
        rf"pipeline, graphrun.{wrapper}\(pipe\)"
    )
    with pytest.raises(InputError, match=expected):
        CALLS[function](DiffusionPipeline(), solution)


def test_every_public_function_that_takes_a_graph_has_a_case() -> None:
    functions = {name: getattr(graphrun, name) for name in graphrun.__all__}
    functions = {name: value for name, value in functions.items() if inspect.isfunction(value)}
    functions["Session"] = graphrun.Session.__init__
    assert CALLS.keys() == {
        name
        for name, function in functions.items()
        if "graph" in inspect.signature(function).parameters
    }


def test_arguments_in_another_order_are_named(solution: Any) -> None:
    graph: Any = graphrun.load("flux-tiny")
    with pytest.raises(InputError, match=r"^run takes a solution, not Graph: use graphrun\.plan$"):
        graphrun.run(graph, solution)
    plan = r"^plan takes a problem, not Graph: use graphrun\.estimate$"
    with pytest.raises(InputError, match=plan):
        graphrun.plan(graph)
