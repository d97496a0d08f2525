"""A problem of which some has been done already: stages whose outputs are handed in, steps of a loop that are behind it.

Chooses nothing: it leaves out what is not to be planned. Knows neither where the outputs are from nor what they hold.

    encode/0 encode/1 denoise/0 decode/0     without {encode}  ->           denoise/0 decode/0
        embeds ------------------->                                 embeds ----------->           there from the start
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from graphrun.errors import InputError
from graphrun.model.choices import living, stages_of
from graphrun.model.problem import PhaseNumbers, Problem, Use


def without(problem: Problem, kept: Collection[str], precomputed: Collection[str], graph_digest: str) -> Problem:
    """``problem`` with the stages ``kept`` alone, where outputs of ``precomputed`` are on the device from the start.

    ``graph_digest`` is that of the graph cut alike.
    """
    order = tuple(stage for stage in stages_of(problem) if stage in kept)
    phases = tuple(phase for phase in problem.phases if phase.stage in kept)
    used = {use.component for phase in phases for use in phase.uses}
    options = tuple(option for option in problem.options if option.stage in kept)
    used |= {use.component for option in options for phase in option.phases for use in phase.uses}
    values = (
        living(replace(value, consumers=tuple(name for name in value.consumers if name in kept)), order, phases)
        for value in problem.values
    )
    pairs = tuple(pair for pair in problem.precedence or () if set(pair) <= set(kept))
    return replace(
        problem,
        graph_digest=graph_digest,
        components=tuple(component for component in problem.components if component.name in used),
        phases=phases,
        values=tuple(value for value in values if value.consumers),
        options=options,
        directives=tuple(directive for directive in problem.directives if directive.component in used),
        precedence=pairs if problem.precedence is not None and len(order) > 1 else None,
        precomputed=tuple(sorted(precomputed)),
    )


def shortened(problem: Problem, done: Mapping[str, tuple[int, int]]) -> Problem:
    """``problem`` with fewer calls: ``done`` says of a stage how many steps of how many are behind it.

    Raises InputError where the calls of such a stage are not the same number in each step.
    """
    return replace(
        problem,
        phases=tuple(_shortened(phase, *done[phase.stage]) if phase.stage in done else phase for phase in problem.phases),
        options=tuple(
            replace(option, phases=tuple(_shortened(phase, *done[option.stage]) for phase in option.phases))
            if option.stage in done
            else option
            for option in problem.options
        ),
    )


def _shortened(phase: PhaseNumbers, behind: int, steps: int) -> PhaseNumbers:
    def left(use: Use) -> Use:
        if not 0 <= behind < steps or any(calls % steps for calls in (use.calls, *use.group_calls)):
            raise InputError(f"{phase.name}: {use.calls} calls of {use.component} cannot be told apart by {steps} steps")
        share = steps - behind
        return replace(
            use,
            calls=use.calls // steps * share,
            group_calls=tuple(calls // steps * share for calls in use.group_calls),
            layers=left(use.layers) if use.layers is not None else None,
        )

    return replace(phase, uses=tuple(left(use) for use in phase.uses))
