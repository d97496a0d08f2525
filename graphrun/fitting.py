"""What a graph takes on somebody's machine, for ``graphrun fit`` and ``graphrun list --card``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphrun import api
from graphrun.disk_store import store_in
from graphrun.graph.precisions import planned_only_reason
from graphrun.model.ranges import probable_range
from graphrun.profile.four_bits import four_bit_format
from graphrun.profile.quantizing import quantizing_costs

if TYPE_CHECKING:
    from graphrun.graph.graph import Graph
    from graphrun.model.fit import Fit
    from graphrun.model.hardware import Hardware
    from graphrun.model.problem import Problem


def fit(
    graph: Graph,
    hardware: Hardware,
    vram: str | int,
    ram: str | int = "auto",
    *,
    inputs: Mapping[str, Any] | None = None,
    cache: Path | None = None,
    with_planned_only: bool = False,
) -> list[dict[str, Any]]:
    """Return the choices for ``graph`` on ``hardware`` within ``vram`` and ``ram``, best first.

    ``with_planned_only``: after the choices that run, one with the format that the card multiplies
    and graphrun only plans (SVDQuant).

    Each is a JSON-ready row: ``allow`` (what to allow, or nothing), ``formats`` (component ->
    precision, where it is not the graph's own), ``sources`` (component -> published checkpoint),
    ``seconds``, ``seconds_range`` and ``range_reason`` of one run, ``enough_vram_bytes`` and
    ``enough_ram_bytes`` (for these seconds; with all of the budgets, a run is at most 3 % faster),
    ``download_bytes`` (of all components: published checkpoints as their pages state them, others
    by the number of parameters), ``quantizing_seconds`` (before the first run, once; only with
    ``cache``), ``changes_output`` and ``planned_only`` (graphrun does not run it). Where nothing
    fits, an option of stages such as tiling is allowed too. Empty if nothing fits then. Needs no
    weights. Raises InputError.
    """
    from graphrun.store import fits_for

    operations = [(stage.operation, stage.options) for stage in graph.stages]
    needs = {operation.options[name] for operation, names in operations for name in names} - {""}
    estimate = partial(
        api.estimate, graph, vram=vram, ram=ram, hardware=hardware, inputs=inputs, cache=cache
    )
    for allow in ((), *((name,) for name in sorted(needs))):
        problem = estimate(allow=allow)
        if fits := fits_for(problem, store_in(cache)):
            rows = [_row(graph, problem, item) for item in fits]
            name = four_bit_format(hardware)
            if with_planned_only and name in graph.permissions:
                four_bits = ("4bit",) if any("4bit" in item.allow for item in fits) else ()
                permissions = (*allow, *four_bits, name)
                problem = estimate(allow=permissions)
                rows += [
                    _row(graph, problem, item, permissions)
                    for item in fits_for(problem, store_in(cache), classes=())
                    if name in item.precisions(problem)
                ]
            return rows
    return []


def _row(
    graph: Graph, problem: Problem, item: Fit, permissions: tuple[str, ...] | None = None
) -> dict[str, Any]:
    """Return the row of ``item``; ``permissions``: what to allow, if it is not that of ``item`` and
    of ``problem``."""
    if permissions is None:
        permissions = (*item.allow, *problem.allow)
    formats, sources, download_bytes = dict[str, str](), dict[str, str](), 0
    components = item.components(problem)
    for numbers in components:
        name, precision = numbers.name, numbers.variants[0].precision
        component = graph.components[name]
        checkpoint = component.checkpoint(precision)
        if precision != component.precision[0]:
            formats[name] = precision
        if checkpoint is not None:
            sources[name] = checkpoint.source
            download_bytes += checkpoint.nbytes or numbers.weight_bytes()
        elif component.source is not None:
            download_bytes += problem.component(name).weight_bytes()
    # a run from files: each weight is read and copied
    likely = probable_range(problem.hardware, item.seconds, item.seconds)
    return {
        "allow": list(permissions),
        "formats": formats,
        "sources": sources,
        "seconds": item.seconds,
        "seconds_range": list(likely.bounds),
        "range_reason": likely.reason,
        "enough_vram_bytes": item.device_bytes,
        "enough_ram_bytes": item.ram_bytes,
        "download_bytes": download_bytes,
        "quantizing_seconds": sum(
            cost.seconds for cost in quantizing_costs(components, problem.hardware)
        ),
        "changes_output": bool(permissions),
        "planned_only": bool(planned_only_reason(formats)),
    }
