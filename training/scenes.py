"""Scenes of one or two flat shapes: their prompts, their pictures, and which of them training never
sees.

python training/scenes.py      # writes held_out.json; done once, before any training
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

SIZE = 64  # pixels of a picture's side
COLOURS = {
    "red": (225, 35, 35),
    "green": (35, 165, 60),
    "blue": (40, 70, 225),
    "yellow": (245, 220, 40),
    "purple": (150, 40, 185),
    "cyan": (40, 200, 225),
}
BACKGROUNDS = {"white": (255, 255, 255), "gray": (128, 128, 128), "black": (0, 0, 0)}
ARM = 0.34  # half the width of a cross's arms
# Outlines, y downwards; a picture stretches each to its bounding box.
SHAPES = {
    "circle": [(math.cos(i * math.pi / 36), math.sin(i * math.pi / 36)) for i in range(72)],
    "square": [(-1, -1), (1, -1), (1, 1), (-1, 1)],
    "triangle": [(0, -1), (1, 1), (-1, 1)],
    "star": [
        (
            (1, 0.42)[i % 2] * math.sin(i * math.pi / 5),
            -(1, 0.42)[i % 2] * math.cos(i * math.pi / 5),
        )
        for i in range(10)
    ],
    "cross": [(-ARM, -1), (ARM, -1), (ARM, -ARM), (1, -ARM), (1, ARM), (ARM, ARM)]
    + [(ARM, 1), (-ARM, 1), (-ARM, ARM), (-1, ARM), (-1, -ARM), (-ARM, -ARM)],
}
# Where the middle of an object is, in columns and rows of a grid of three by three.
PLACES = {
    "": (1, 1),
    "at the left": (0, 1),
    "at the right": (2, 1),
    "at the top": (1, 0),
    "at the bottom": (1, 2),
    "in the top left corner": (0, 0),
    "in the top right corner": (2, 0),
    "in the bottom left corner": (0, 2),
    "in the bottom right corner": (2, 2),
}
RELATIONS = {
    "left of": ((0, 1), (2, 1)),
    "right of": ((2, 1), (0, 1)),
    "above": ((1, 0), (1, 2)),
    "below": ((1, 2), (1, 0)),
}
# Every colour and every shape is in training, these pairs are not.
NEVER_SEEN = {
    ("yellow", "circle"),
    ("purple", "square"),
    ("red", "triangle"),
    ("blue", "star"),
    ("cyan", "cross"),
}
# in README
SHOWN = (
    "a red circle left of a blue square on white",
    "a green star in the top right corner on black",
)
HELD_OUT = Path(__file__).parent / "held_out.json"


@dataclass(frozen=True)
class Thing:
    """One object: what it is, and its cell (column, row) in the grid of three by three."""

    colour: str
    shape: str
    cell: tuple[int, int]


@dataclass(frozen=True)
class Scene:
    """A prompt and what it asks for."""

    prompt: str
    things: tuple[Thing, ...]
    background: str

    @property
    def content(self) -> tuple[frozenset[Thing], str]:
        """Equal for two prompts that ask for the same picture ("left of", "right of")."""
        return frozenset(self.things), self.background

    @property
    def unseen(self) -> bool:
        """Whether it has a pair of colour and shape that is never in training."""
        return any((thing.colour, thing.shape) in NEVER_SEEN for thing in self.things)


def scenes(objects: int) -> Iterator[Scene]:
    """Every scene of one or two objects; two objects have different colours."""
    pairs = list(itertools.product(COLOURS, SHAPES))
    for background in BACKGROUNDS:
        if objects == 1:
            for (colour, shape), (place, cell) in itertools.product(pairs, PLACES.items()):
                prompt = " ".join(f"a {colour} {shape} {place} on {background}".split())
                yield Scene(prompt, (Thing(colour, shape, cell),), background)
        else:
            for first, second, (relation, cells) in itertools.product(
                pairs, pairs, RELATIONS.items()
            ):
                if first[0] != second[0]:
                    prompt = f"a {' '.join(first)} {relation} a {' '.join(second)} on {background}"
                    yield Scene(
                        prompt, (Thing(*first, cells[0]), Thing(*second, cells[1])), background
                    )


def draw(scene: Scene, rng: np.random.Generator) -> np.ndarray:
    """One picture of a scene, uint8 of shape (64, 64, 3): sides of 21 to 23 pixels, middles up to a
    pixel off the cell's."""
    fine = 4  # drawn finer, then averaged: smooth edges
    picture = Image.new("RGB", (SIZE * fine, SIZE * fine), BACKGROUNDS[scene.background])
    for thing in scene.things:
        half = rng.uniform(10.5, 11.5)
        middle = [16 + 16 * coordinate + rng.uniform(-1, 1) for coordinate in thing.cell]
        outline = boxed(thing.shape) * half + middle
        ImageDraw.Draw(picture).polygon(
            [tuple(point) for point in outline * fine], fill=COLOURS[thing.colour]
        )
    return np.asarray(picture.resize((SIZE, SIZE), Image.Resampling.BOX))


def boxed(shape: str) -> np.ndarray:
    """A shape's outline, (n, 2), stretched so that it touches all sides of the box from -1 to 1."""
    points = np.array(SHAPES[shape], dtype=float)
    low, high = points.min(0), points.max(0)
    return (points - low) / (high - low) * 2 - 1


def held_out() -> dict[str, list[tuple[Scene, int]]]:
    """The scenes of held_out.json with one seed each: of one or two objects; unseen ones have a
    pair that training never has."""
    scenes_by_prompt = {scene.prompt: scene for objects in (1, 2) for scene in scenes(objects)}
    return {
        part: [(scenes_by_prompt[prompt], seed) for prompt, seed in rows]
        for part, rows in json.loads(HELD_OUT.read_text()).items()
    }


@cache
def training(objects: int) -> list[Scene]:
    """The scenes of one or two objects that training may see."""
    held_out_contents = {scene.content for rows in held_out().values() for scene, _ in rows}
    return [
        scene
        for scene in scenes(objects)
        if not scene.unseen and scene.content not in held_out_contents
    ]


def choose() -> dict[str, list[tuple[str, int]]]:
    """What held_out.json holds: drawn by a fixed seed, README's prompts among them, no two that ask
    for the same picture."""
    rng, selection = random.Random(2024), {}
    for part, objects, unseen, count in (
        ("one", 1, False, 200),
        ("two", 2, False, 200),
        ("one unseen", 1, True, 50),
        ("two unseen", 2, True, 50),
    ):
        candidates = [scene for scene in scenes(objects) if scene.unseen == unseen]
        rng.shuffle(candidates)
        candidates.sort(key=lambda scene: scene.prompt not in SHOWN)
        distinct = {scene.content: scene for scene in reversed(candidates)}
        first = [scene for scene in candidates if distinct[scene.content] is scene][:count]
        selection[part] = [(scene.prompt, seed) for seed, scene in enumerate(first)]
    return selection


if __name__ == "__main__":
    HELD_OUT.write_text(json.dumps(choose(), indent=0) + "\n")
