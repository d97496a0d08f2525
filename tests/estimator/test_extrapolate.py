"""Dry runs at sizes that were not traced: equal to direct ones within a percent, from two."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

import graphrun
from graphrun.errors import InputError
from graphrun.estimator.allocator import Caching, Counting
from graphrun.estimator.events import Tape
from graphrun.estimator.extrapolate import Range, Size
from graphrun.estimator.hardware import hardware
from graphrun.estimator.numbers import phase_spans
from graphrun.estimator.probe import probe
from graphrun.estimator.windows import windows_of

GRAPHS = Path(__file__).parent.parent.parent / "graphs"


@cache
def direct(height: int, width: int) -> Tape:
    graph = graphrun.load(GRAPHS / "flux-tiny.yaml")
    return probe(graph, graph.for_planning({"height": height, "width": width, "steps": 2})).tape


def peaks(tape: Tape, allocator: type[Counting] | type[Caching]) -> list[int]:
    windows = windows_of(tape, phase_spans(tape.entries()), hardware("rtx4090"), allocator)
    return [max(window.entry_bytes, window.first_bytes, window.rest_bytes) for window in windows]


def spanned() -> Range:
    return Range(Size(128 * 128), Size(256 * 256), direct(128, 128), direct(256, 256))


@pytest.mark.parametrize(("height", "width"), [(128, 192), (256, 384), (512, 512)])
def test_two_dry_runs_serve_other_sizes_within_a_percent(height: int, width: int) -> None:
    made = spanned().tape(Size(height * width))
    for allocator in (Counting, Caching):
        assert peaks(made, allocator) == pytest.approx(peaks(direct(height, width), allocator), rel=0.01)


def test_the_two_sizes_themselves_come_back_but_for_rounding() -> None:
    assert peaks(spanned().tape(Size(128 * 128)), Counting) == peaks(direct(128, 128), Counting)
    assert peaks(spanned().tape(Size(256 * 256)), Counting) == pytest.approx(peaks(direct(256, 256), Counting), rel=0.002)


def test_what_two_dry_runs_do_not_tell_is_refused() -> None:
    with pytest.raises(InputError, match="3 images cannot be told"):
        spanned().tape(Size(128 * 128, 3))
    with pytest.raises(InputError, match="more pixels"):
        Range(Size(128 * 128), Size(128 * 128), direct(128, 128), direct(128, 128))
    cut = Tape(direct(256, 256).items[:-1], {})
    with pytest.raises(InputError, match="different paths"):
        Range(Size(128 * 128), Size(256 * 256), direct(128, 128), cut)
