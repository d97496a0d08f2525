"""What is in a picture, found without training: segments against the background, their colour, and
the outline that fits best."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw
from scenes import BACKGROUNDS, COLOURS, SHAPES, Scene, boxed
from scipy import ndimage

SMALLEST = 40  # pixels of a segment; the smallest object that is drawn, a star, has about 130
# distance in RGB beyond which a colour has no name; the closest two named ones are 121 apart
FAR = 80.0
FITS = 0.7  # least overlap (intersection over union) of a segment with its best outline


@dataclass(frozen=True)
class Found:
    """One segment. ``colour`` and ``shape`` are "unknown" if nothing is close enough; the middle is
    (x, y) in pixels."""

    colour: str
    shape: str
    middle: tuple[float, float]


def detect(picture: np.ndarray) -> tuple[str, list[Found]]:
    """The background's name and the objects of a picture, uint8 of shape (64, 64, 3)."""
    pixels = picture.astype(float)
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    ground = np.median(border, axis=0)
    distance = np.linalg.norm(pixels - ground, axis=2)
    labels, count = ndimage.label(distance > FAR / 2)
    things = []
    for label in range(1, count + 1):
        segment = labels == label
        if segment.sum() < SMALLEST:
            continue
        core = segment & (distance > 0.8 * np.percentile(distance[segment], 80))
        colour = np.median(pixels[core], axis=0)
        # Smooth edges: a pixel belongs to the object from half of the way between the colours on.
        mask = segment & (distance > 0.5 * np.linalg.norm(colour - ground))
        if mask.any():
            y, x = np.nonzero(mask)
            things.append(
                Found(
                    _nearest(colour, COLOURS),
                    _shape(mask),
                    ((x.min() + x.max() + 1) / 2, (y.min() + y.max() + 1) / 2),
                )
            )
    return _nearest(ground, BACKGROUNDS), things


def judge(scene: Scene, picture: np.ndarray) -> dict[str, bool]:
    """Which of background, colours, shapes, places (of two objects: their relation) are as the
    scene asks, and all of them.

    Shapes and places count only for objects that were found by their colours.
    """
    background, things = detect(picture)
    by_colour = {thing.colour: thing for thing in things}
    pairs = [(thing, by_colour.get(thing.colour)) for thing in scene.things]
    colours = len(things) == len(scene.things) and all(other is not None for _, other in pairs)
    right = {
        "background": background == scene.background,
        "colours": colours,
        "shapes": colours
        and all(other is not None and other.shape == thing.shape for thing, other in pairs),
        "places": colours
        and _placed(scene, [by_colour[thing.colour].middle for thing in scene.things]),
    }
    return {**right, "all": all(right.values())}


def _placed(scene: Scene, middles: list[tuple[float, float]]) -> bool:
    if len(middles) == 1:
        return all(
            abs(16 + 16 * cell - middle) < 8
            for cell, middle in zip(scene.things[0].cell, middles[0], strict=True)
        )
    direction = np.subtract(scene.things[1].cell, scene.things[0].cell)
    step = np.subtract(middles[1], middles[0])
    axis = int(np.argmax(np.abs(direction)))
    return bool(step[axis] * direction[axis] > 2 * abs(step[1 - axis]))


def _nearest(colour: np.ndarray, colours_by_name: dict[str, tuple[int, int, int]]) -> str:
    distance, name = min(
        (float(np.linalg.norm(colour - value)), name) for name, value in colours_by_name.items()
    )
    return name if distance < FAR else "unknown"


def _shape(segment: np.ndarray) -> str:
    """The outline that overlaps most with a segment when it is stretched to the segment's bounding
    box."""
    (top, bottom), (first_column, last_column) = (
        (int(indices.min()), int(indices.max()) + 1) for indices in np.nonzero(segment)
    )
    if not 0.75 < (last_column - first_column) / (bottom - top) < 1.33:
        return "unknown"
    segment = segment[top:bottom, first_column:last_column]
    overlaps = []
    for shape in SHAPES:
        mask = Image.new("1", (4 * segment.shape[1], 4 * segment.shape[0]))
        outline = (boxed(shape) + 1) / 2 * mask.size
        ImageDraw.Draw(mask).polygon([tuple(point) for point in outline], fill=1)
        shape_mask = (
            np.asarray(mask, dtype=float)
            .reshape(segment.shape[0], 4, segment.shape[1], 4)
            .mean((1, 3))
            > 0.5
        )
        overlaps.append(((shape_mask & segment).sum() / (shape_mask | segment).sum(), shape))
    overlap, shape = max(overlaps)
    return shape if overlap >= FITS else "unknown"
