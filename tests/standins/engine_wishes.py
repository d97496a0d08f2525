"""What engines are asked for in tests, and the lines that are written for it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import graphrun
from graphrun.profile.engines import ENGINES, RESIDENT, Engine, EngineSetting, Wish, kind_of
from graphrun.profile.hardware import hardware
from graphrun.profile.placements import PARTIAL_KINDS, WeightPlacement
from graphrun.units import GIB

GRAPHS = ("flux-dev", "sdxl", "qwen-image", "wan-14b")
"""Together they have every option of stable-diffusion.cpp that names a file."""
LINES = ("sglang", "vllm-omni", "sd.cpp", "comfyui")


def wish(placements: dict[str, WeightPlacement], graph: str = "flux-dev", **changes: Any) -> Wish:
    """A request with ``placements``, by component, and the others resident."""
    loaded_graph = graphrun.load(graph)
    all_placements = {name: placements.get(name, RESIDENT) for name in loaded_graph.components}
    setting = EngineSetting(all_placements, None, 1.0, GIB, 0, True, 0.25)
    kinds = {name: kind_of(name) for name in loaded_graph.components}
    request = Wish(loaded_graph, hardware("rtx4090"), 8 * GIB, kinds, setting)
    return replace(request, **changes)


def wishes(engine: Engine, graph: str) -> Iterator[Wish]:
    """Every placement of a kind that ``engine`` can be asked for, what computes on the CPU, and
    tiling."""
    kinds = {name: kind_of(name) for name in graphrun.load(graph).components}
    for tiling in (False, True):
        for on_cpu in ((), ("vae",), tuple(kinds)):
            yield wish({}, graph, tiling=tiling, on_cpu=on_cpu)
    for choices in engine.choices:
        for kind, placements in choices.items():
            for placement in placements:
                is_partial = placement.kind in PARTIAL_KINDS and kind == "dit"
                partial_placement = replace(placement, blocks=(19, 3) if is_partial else ())
                yield wish(
                    {name: partial_placement for name, other in kinds.items() if other == kind},
                    graph,
                )


def engine_lines() -> dict[str, list[str]]:
    """Return the lines for each engine that has a command line."""
    return {
        name: list(
            dict.fromkeys(
                shlex.join(ENGINES[name].command(request))
                for graph in GRAPHS
                for request in wishes(ENGINES[name], graph)
            )
        )
        for name in LINES
    }
