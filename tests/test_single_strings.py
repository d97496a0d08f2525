"""A string where a collection of strings is expected counts as one item, in every public
function."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import graphrun

TINY = {"vram": "6M", "ram": "8G", "hardware": "sim"}


class Program:
    """An object with a module and two methods, as `graphrun.attach` takes it."""

    def __init__(self) -> None:
        self.net = nn.Linear(8, 8)

    def call(self, x: Any) -> Any:
        return self.net(x)


def problem(cache: Path, **arguments: Any) -> Any:
    return graphrun.estimate(graphrun.load("flux-tiny"), cache=cache, **TINY, **arguments).digest


def surveyed(cache: Path, **arguments: Any) -> Any:
    return graphrun.survey(
        graphrun.load("sdxl-tiny"), hardware="sim", mode="group", cache=cache, **arguments
    )


def attached(**arguments: Any) -> Any:
    program = Program()
    options = {"entries": ["call"], "vram": "6M", "device": "sim", **arguments}
    with graphrun.attach(program, components={"net": program.net}, **options) as attachment:
        return repr((attachment._limits, attachment._demands)), "call" in vars(program)


def cached(cache: Path, allow: Any) -> Any:
    return graphrun.precomputed(
        graphrun.load("flux-tiny"), hardware="sim", cache=cache, allow=allow
    )


def declared(changes: Any) -> Any:
    @graphrun.op(changes=changes)
    def function(image: Any) -> dict[str, Any]:
        return {"image": image}

    return vars(function)


CASES: dict[tuple[str, str], tuple[Callable[..., Any], str]] = {
    ("load", "trust"): (
        lambda cache, value: graphrun.load("flux-tiny", trust=value).trust,
        "mypackage",
    ),
    ("load", "absent"): (
        lambda cache, value: graphrun.load("sd3-tiny", absent=value).absent,
        "text_encoder_3",
    ),
    ("estimate", "allow"): (lambda cache, value: problem(cache, allow=value), "cpu"),
    ("estimate", "keep"): (lambda cache, value: problem(cache, keep=value), "vae"),
    ("estimate", "exclude"): (lambda cache, value: problem(cache, exclude=value), "transformer"),
    ("estimate", "pin"): (lambda cache, value: problem(cache, pin=value), "vae"),
    ("estimate", "precomputed"): (
        lambda cache, value: problem(cache, precomputed=value),
        "encode.embeds",
    ),
    ("precomputed", "allow"): (cached, "cpu"),
    ("survey", "precision"): (lambda cache, value: surveyed(cache, precision=value), "bf16"),
    ("survey", "option"): (lambda cache, value: surveyed(cache, option=value), "decode=tiling"),
    ("survey", "keep"): (lambda cache, value: surveyed(cache, keep=value), "vae"),
    ("survey", "cpu"): (lambda cache, value: surveyed(cache, cpu=value), "vae"),
    ("survey", "library"): (
        lambda cache, value: surveyed(cache, library=value),
        "bitsandbytes=0.45",
    ),
    ("attach", "entries"): (lambda cache, value: attached(entries=value), "call"),
    ("attach", "allow"): (lambda cache, value: attached(allow=value), "cpu"),
    ("attach", "keep"): (lambda cache, value: attached(keep=value), "net"),
    ("attach", "exclude"): (lambda cache, value: attached(exclude=value), "net"),
    ("attach", "pin"): (lambda cache, value: attached(pin=value), "net"),
    ("op", "changes"): (lambda cache, value: declared(value), "image"),
}


@pytest.mark.sweep("more", sample=1)
@pytest.mark.long
@pytest.mark.parametrize(("function", "parameter"), CASES, ids=[".".join(case) for case in CASES])
def test_a_string_counts_as_one_item(function: str, parameter: str, cached_dry_runs: Path) -> None:
    call, value = CASES[function, parameter]
    assert call(cached_dry_runs, value) == call(cached_dry_runs, [value])


def test_every_parameter_that_takes_strings_has_a_case() -> None:
    functions = {
        name: value
        for name in graphrun.__all__
        if inspect.isfunction(value := getattr(graphrun, name))
    }
    strings = re.compile(r"^(Iterable|Collection|Sequence|Set)\[str\]$")
    list_parameters = {
        (name, parameter.name)
        for name, function in functions.items()
        for parameter in inspect.signature(function).parameters.values()
        if strings.match(str(parameter.annotation))
    }
    assert list_parameters == CASES.keys()


def test_a_single_prompt_or_mapping_is_one_request() -> None:
    from graphrun.batch.requests import requests_from

    assert [request.inputs for request in requests_from("a cat")] == [{"prompt": "a cat"}]
    assert [request.inputs for request in requests_from({"prompt": "a cat", "seed": 3})] == [
        {"prompt": "a cat", "seed": 3}
    ]


@pytest.mark.sweep("more")
@pytest.mark.long
def test_names_of_budgets_of_a_session_and_of_run_many_are_strings_too(tmp_path: Path) -> None:
    graph, options = (
        graphrun.load("flux-tiny"),
        {"vram": "6M", "ram": "8G", "hardware": "sim", "allow": "cpu", "keep": "vae"},
    )
    small = {"height": 32, "width": 32, "steps": 2, "max_sequence_length": 16}
    with graphrun.Session(
        graph, runs=2, inputs=small, random_weights=True, cache=tmp_path, **options
    ) as session:
        assert session.solution.problem.allow == ("cpu",)
        assert len(session.map({"prompt": "a cat"})) == 1
    batch = graphrun.run_many(
        graph, "a cat", common=small, random_weights=True, cache=tmp_path, strict=True, **options
    )
    assert list(batch.outputs) == [1]
