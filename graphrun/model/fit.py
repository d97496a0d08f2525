"""A choice of precisions with which a problem runs within its budgets."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graphrun.model.problem import ComponentNumbers, Problem


@dataclass(frozen=True, slots=True)
class Fit:
    """A choice that runs within the budgets.

    ``allow``: the class of precisions to allow, if any. ``variants``: by component, the index of
    the chosen variant. ``seconds``: predicted, of one run. ``device_bytes``, ``ram_bytes``: enough
    for these seconds, on the device with the context, workspace and reserve.
    """

    allow: tuple[str, ...]
    variants: tuple[int, ...]
    seconds: float
    device_bytes: int
    ram_bytes: int

    def precisions(self, problem: Problem) -> tuple[str, ...]:
        """Return the precision of each component of ``problem``."""
        return tuple(item.variants[0].precision for item in self.components(problem))

    def components(self, problem: Problem) -> tuple[ComponentNumbers, ...]:
        """Return the components of ``problem``, each with only the chosen variant."""
        return tuple(
            replace(component, variants=(component.variants[index],))
            for component, index in zip(problem.components, self.variants, strict=True)
        )
