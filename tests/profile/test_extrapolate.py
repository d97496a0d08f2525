"""Recordings extrapolated from two dry runs equal direct ones within one percent."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

import graphrun
from graphrun.errors import InputError
from graphrun.model.allocator import Caching, Counting
from graphrun.profile.dry_run import probe
from graphrun.profile.extrapolate import Range, Size
from graphrun.profile.hardware import hardware
from graphrun.profile.phase_memory import phase_memories_of
from graphrun.profile.problems import phase_spans
from graphrun.profile.recording import Recording

GRAPHS = Path(__file__).parent.parent.parent / "graphs"


@cache
def direct(height: int, width: int) -> Recording:
    graph = graphrun.load(GRAPHS / "flux-tiny.yaml")
    return probe(graph, graph.for_planning({"height": height, "width": width, "steps": 2})).recording


def peaks(recording: Recording, allocator: type[Counting] | type[Caching]) -> list[int]:
    phase_memories = phase_memories_of(recording, phase_spans(recording.entries()), hardware("rtx4090"), allocator)
    return [max(phase_memory.entry_bytes, phase_memory.first_bytes, phase_memory.steady_bytes) for phase_memory in phase_memories]


def spanned() -> Range:
    return Range(Size(128 * 128), Size(256 * 256), direct(128, 128), direct(256, 256))


@pytest.mark.parametrize(("height", "width"), [(128, 192), (256, 384), (512, 512)])
def test_two_dry_runs_serve_other_sizes_within_a_percent(height: int, width: int) -> None:
    made = spanned().recording(Size(height * width))
    for allocator in (Counting, Caching):
        assert peaks(made, allocator) == pytest.approx(peaks(direct(height, width), allocator), rel=0.01)


def test_the_two_sizes_themselves_are_reproduced_except_for_rounding() -> None:
    assert peaks(spanned().recording(Size(128 * 128)), Counting) == peaks(direct(128, 128), Counting)
    assert peaks(spanned().recording(Size(256 * 256)), Counting) == pytest.approx(peaks(direct(256, 256), Counting), rel=0.002)


def test_sizes_that_two_dry_runs_do_not_determine_are_refused() -> None:
    with pytest.raises(InputError, match="3 images cannot be told"):
        spanned().recording(Size(128 * 128, 3))
    with pytest.raises(InputError, match="more pixels"):
        Range(Size(128 * 128), Size(128 * 128), direct(128, 128), direct(128, 128))
    truncated = Recording(direct(256, 256).items[:-1], {})
    with pytest.raises(InputError, match="different paths"):
        Range(Size(128 * 128), Size(256 * 256), direct(128, 128), truncated)
