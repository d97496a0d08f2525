"""Remove finished work from a problem: precomputed stages, and finished steps of a loop.

encode/0 encode/1 denoise/0 decode/0     encode precomputed ->    denoise/0 decode/0
    embeds ----------------->                                  embeds ------>
                                                               live from the start
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from graphrun.errors import InputError
from graphrun.model.choices import stages_of, with_live_range
from graphrun.model.problem import PhaseNumbers, Problem, Use


def without(
    problem: Problem, stages: Collection[str], precomputed: Collection[str], graph_digest: str
) -> Problem:
    """Return ``problem`` with only ``stages``, given the outputs of ``precomputed`` ones.

    Drops everything that these stages do not need. ``graph_digest``: of the graph reduced to them.
    """
    order = tuple(stage for stage in stages_of(problem) if stage in stages)
    phases = tuple(phase for phase in problem.phases if phase.stage in stages)
    components = {use.component for phase in phases for use in phase.uses}
    options = tuple(option for option in problem.options if option.stage in stages)
    components |= {
        use.component for option in options for phase in option.phases for use in phase.uses
    }
    values = (
        with_live_range(
            replace(value, consumers=tuple(name for name in value.consumers if name in stages)),
            order,
            phases,
        )
        for value in problem.values
    )
    pairs = tuple(pair for pair in problem.precedence or () if set(pair) <= set(stages))
    return replace(
        problem,
        graph_digest=graph_digest,
        components=tuple(
            component for component in problem.components if component.name in components
        ),
        phases=phases,
        values=tuple(value for value in values if value.consumers),
        options=options,
        directives=tuple(
            directive for directive in problem.directives if directive.component in components
        ),
        precedence=pairs if problem.precedence is not None and len(order) > 1 else None,
        precomputed=tuple(sorted(precomputed)),
    )


def with_fewer_steps(problem: Problem, progress: Mapping[str, tuple[int, int]]) -> Problem:
    """Return ``problem`` without the calls of finished steps.

    ``progress``: stage -> (finished steps, all steps). Raises InputError if such a stage does not
    make the same number of calls in each step, or if no step is left.
    """
    return replace(
        problem,
        phases=tuple(
            _shortened(phase, *progress[phase.stage]) if phase.stage in progress else phase
            for phase in problem.phases
        ),
        options=tuple(
            replace(
                option,
                phases=tuple(_shortened(phase, *progress[option.stage]) for phase in option.phases),
            )
            if option.stage in progress
            else option
            for option in problem.options
        ),
    )


def _shortened(phase: PhaseNumbers, finished: int, steps: int) -> PhaseNumbers:
    def remaining(use: Use) -> Use:
        if not 0 <= finished < steps or any(
            calls % steps for calls in (use.calls, *use.group_calls)
        ):
            raise InputError(
                f"{phase.name}: {use.calls} calls of {use.component} cannot be divided into"
                f" {steps} steps"
            )
        share = steps - finished
        return replace(
            use,
            calls=use.calls // steps * share,
            group_calls=tuple(calls // steps * share for calls in use.group_calls),
            layers=remaining(use.layers) if use.layers is not None else None,
        )

    return replace(phase, uses=tuple(remaining(use) for use in phase.uses))
