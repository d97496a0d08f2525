"""Stages and graphs made at random, for properties that hold for all of them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from graphrun.graph.graph import Graph
from graphrun.graph.loading import load
from graphrun.graph.order import order_stages
from graphrun.graph.parts import Reference, Stage

TINY = load(Path(__file__).parents[2] / "graphs" / "flux-tiny.yaml")


def random_stages(seed: int) -> dict[str, Stage]:
    """Stages with two outputs each that read of others without a cycle, in an order of the file
    that need not be topological."""
    chance = random.Random(seed)
    names = [f"s{number}" for number in range(chance.randint(1, 8))]
    components = sorted(TINY.components)
    stages = {}
    for number, name in enumerate(names):
        outputs = [
            Reference("stage", stage_name, chance.choice(["image", "latents"]))
            for stage_name in names[:number]
            if chance.random() < 0.4
        ]
        inputs = [
            Reference("input", stage_name) for stage_name in TINY.inputs if chance.random() < 0.3
        ]
        uses = tuple(stage_name for stage_name in components if chance.random() < 0.4)
        stages[name] = Stage(
            name, "call", uses, {"a": inputs, "b": [outputs]}, outputs=("image", "latents")
        )
    order = chance.sample(names, len(names))
    return {name: stages[name] for name in order}


def random_graph(seed: int) -> Graph:
    """A graph of `random_stages` with one to three outputs."""
    chance, stages = random.Random(seed), random_stages(seed)
    references = [
        Reference("stage", chance.choice(list(stages)), "image")
        for _ in range(chance.randint(1, 3))
    ]
    return replace(
        TINY,
        stages=order_stages(stages),
        outputs={f"out{number}": reference for number, reference in enumerate(references)},
    )
