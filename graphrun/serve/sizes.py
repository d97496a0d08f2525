"""The sizes of a graph that were planned: which fit, and which do not.

What a graph needs grows with its outputs. So a size that is nowhere smaller than one that does not
fit does not fit either, and is refused without a dry run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphrun.solve.infeasible import Infeasible
    from graphrun.solve.suggestions import Suggestion

Inputs = Mapping[str, Any]
# inputs that make an output larger
SIZES = ("height", "width", "num_frames", "frames", "batch")


@dataclass(slots=True)
class Sizes:
    """Inputs of one graph within the whole budgets.

    ``feasible``: with the seconds of a cold run. ``infeasible``: with the reason. ``searched``:
    whether smaller inputs were tried, because none were feasible.
    """

    feasible: list[tuple[Inputs, float]] = field(default_factory=list)
    infeasible: list[tuple[Inputs, Infeasible]] = field(default_factory=list)
    searched: bool = False

    def refusal(self, inputs: Inputs) -> tuple[Inputs, Infeasible] | None:
        """Return inputs that do not fit and are nowhere larger than ``inputs``, and the reason."""
        return next((pair for pair in self.infeasible if _is_within(pair[0], inputs)), None)

    @property
    def largest(self) -> tuple[Inputs, float] | None:
        """The largest inputs that fit, with the seconds of a cold run."""
        return max(self.feasible, key=lambda pair: _output_size(pair[0]), default=None)

    def suggestion(self, inputs: Inputs) -> Suggestion | None:
        """Return the largest inputs that fit in place of ``inputs``."""
        from graphrun.solve.suggestions import Suggestion

        if (largest := self.largest) is None:
            return None
        best, seconds = largest
        texts = [f"{name}={best[name]}" for name in changed(best, inputs)]
        change = tuple(("--set", text) for text in texts)
        return Suggestion(f"make it smaller: {' '.join(texts)}", change, seconds, True)


def changed(inputs: Inputs, limits: Inputs) -> list[str]:
    """Return the names of ``inputs`` that differ in ``limits``."""
    return [name for name in limits if str(inputs[name]) != str(limits[name])]


def _is_within(inputs: Inputs, limits: Inputs) -> bool:
    """Whether no size of ``inputs`` is larger than in ``limits``, and other inputs are equal."""
    return inputs.keys() == limits.keys() and all(
        value == limits[name] or (name in SIZES and float(value) <= float(limits[name]))
        for name, value in inputs.items()
    )


def _output_size(inputs: Inputs) -> float:
    """Return the product of the numbers in ``inputs`` that make an output larger."""
    return math.prod(float(inputs[name]) for name in SIZES if name in inputs)


def shown(inputs: Inputs, names: list[str]) -> str:
    """Return the inputs ``names`` as requests name them, such as ``size=512x512``."""
    has_size = {"height", "width"} & {*names} and {"height", "width"} <= {*inputs}
    parts = [f"size={inputs['width']}x{inputs['height']}"] if has_size else []
    parts += [
        f"{name}={inputs[name]}" for name in names if not (has_size and name in ("height", "width"))
    ]
    return ", ".join(parts)
