"""For what sizes a plan is made where an image, a video or audio is not given: numbers, or inputs that hold them.

Decides where each size comes from. Knows no file.
"""

from __future__ import annotations

from graphrun.graph.document import Problems
from graphrun.graph.media import AN
from graphrun.graph.spec import GraphSpec, InputSpec
from graphrun.graph.values import did_you_mean

# Which sizes each kind has, and which inputs hold them where the graph says nothing.
SIZES: dict[str, dict[str, tuple[str, ...]]] = {
    "image": {"height": ("height",), "width": ("width",)},
    "mask": {"height": ("height",), "width": ("width",)},
    "video": {"height": ("height",), "width": ("width",), "frames": ("frames", "num_frames")},
    "audio": {"rate": (), "seconds": ("seconds",)},
}
NAMES = ("height", "width", "frames", "rate", "seconds")


def read_sizes(name: str, item: InputSpec, spec: GraphSpec, problems: Problems) -> dict[str, float | str]:
    """The sizes of the input ``name`` by what they are of; empty for a number or a text. What is wrong is added to ``problems``."""
    wanted, found = SIZES.get(item.type, {}), dict[str, float | str]()
    for key in NAMES:
        at, value = ("inputs", name, key), getattr(item, key)
        if key not in wanted:
            if value is not None:
                problems.add(at, f"{name!r} is {AN.get(item.type, f'of type {item.type}')}, which has no {key}")
            continue
        if isinstance(value, str):
            of = value.removeprefix("$")
            if of not in spec.inputs or spec.inputs[of].type not in ("int", "float") or not value.startswith("$"):
                known = [each for each, other in spec.inputs.items() if other.type in ("int", "float")]
                problems.add(at, f"{value!r} is neither a number nor an input that holds one{did_you_mean(of, known)}")
                continue
            value = of
        elif value is None:
            held = [each for each in wanted[key] if each in spec.inputs and spec.inputs[each].type in ("int", "float")]
            if not held:
                problems.add(("inputs", name), f"has no {key}, for plans without the file: add {key}: to it")
                continue
            value = held[0]
        found[key] = value
    return found
