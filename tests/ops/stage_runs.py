"""Stages with the parts and meta modules of their graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from graphrun.graph.graph import Graph
from graphrun.modules.build import build_part, meta_module
from graphrun.ops import Stages


def stages_of(
    graph: Graph, modules: Mapping[str, nn.Module], inputs: Mapping[str, Any], **options: Any
) -> Stages:
    """The stages of ``graph`` on the CPU; ``more`` as for `Stages`."""
    parts = {name: build_part(part, graph) for name, part in graph.parts.items()}
    meta_modules = {
        name: meta_module(component, graph.trust) for name, component in graph.components.items()
    }
    return Stages(
        graph,
        modules,
        torch.device("cpu"),
        inputs,
        **{"parts": parts, "meta_modules": meta_modules, **options},
    )
