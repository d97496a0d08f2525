"""The screen and JSON of an infeasible budget: the phases that do not fit, the smallest budget that works, and what helps."""

from __future__ import annotations

from typing import Any

from graphrun.model.problem import Problem
from graphrun.report.table import scale_of, size, table
from graphrun.solve.infeasible import Infeasible
from graphrun.solve.repairs import Repair
from graphrun.units import show_seconds, show_size


def infeasible_screen(error: Infeasible) -> str:
    """What ``graphrun plan`` and ``run`` show with exit code 3. The smallest budgets are exact: a byte less does not fit."""
    budgets = f"{show_size(error.budget_bytes)} of VRAM and {show_size(error.ram_bytes)} of RAM"
    lines = [
        f"infeasible: no plan runs {error.graph} on {error.hardware} within {budgets}; {error.binding} binds",
        *directives_of(error.problem),
        "",
    ]
    if error.needs:
        unit, scale = scale_of(max(need.total_bytes for need in error.needs))
        rows = [["phase", "slot", "weights", "ring", "activation", "values", "least", "available", "short"]]
        for need in error.needs:
            terms = (need.weights_bytes, need.ring_bytes, need.activation_bytes, need.values_bytes, need.total_bytes)
            shown = (*terms, need.available_bytes, need.short_bytes)
            rows.append([need.phase, need.part, *(size(nbytes, scale) for nbytes in shown)])
        lines += [
            table(rows, left=(0, 1)),
            f" sizes in {unit}; weights: what cannot be streamed; values: outputs passed between stages, and live-in bytes",
            "",
        ]
    if error.smallest_ram_bytes > error.ram_bytes:
        unit, scale = scale_of(error.smallest_ram_bytes)
        rows = [["minimum in RAM", unit], *([name, size(nbytes, scale)] for name, nbytes in error.host_bytes)]
        rows.append(["at one time", size(error.smallest_ram_bytes, scale)])
        lines += [table(rows, left=(0,)), ""]
    lines.append(f"smallest budget that works: {smallest(error)}")
    lines += ["what helps, by predicted time, changes of the output last:", *map(_repair_line, error.repairs)]
    return "\n".join(lines)


def _repair_line(repair: Repair) -> str:
    changes = ", changes the output" if repair.changes_output else ""
    return f"  - {repair.text}: {show_seconds(repair.seconds)}{changes}"


def directives_of(problem: Problem) -> list[str]:
    """A line with the problem's directives and reserve; nothing where there are none."""
    found = [f"{of.placement} {of.component}" for of in problem.directives]
    found += [f"reserve {show_size(problem.reserve_bytes)}"] if problem.reserve_bytes else []
    return [f"directives {', '.join(found)}"] if found else []


def smallest(error: Infeasible) -> str:
    """The smallest budgets as command line options, for those budgets that are too small."""
    names = {"VRAM": "--vram", "RAM": "--ram", "pinned RAM": "--pinned", "disk": "--disk"}
    found = [f"{names[tier.name]} {tier.least_bytes} ({show_size(tier.least_bytes)})" for tier in error.tiers if tier.short]
    return " and ".join(found) or "none, with what is allowed"


def infeasible_json(error: Infeasible) -> dict[str, Any]:
    """The same as data: ``feasible`` is false."""
    return {
        "feasible": False,
        "graph": error.graph,
        "hardware": error.hardware,
        "binding": error.binding,
        "budget_bytes": error.budget_bytes,
        "ram_bytes": error.ram_bytes,
        "reserve_bytes": error.problem.reserve_bytes,
        "directives": [f"{of.placement} {of.component}" for of in error.problem.directives],
        "smallest_budget_bytes": error.smallest_budget_bytes,
        "smallest_ram_bytes": error.smallest_ram_bytes,
        "needs": [
            {
                "stage": need.stage,
                "phase": need.phase,
                "slot": need.part,
                "weights_bytes": need.weights_bytes,
                "ring_bytes": need.ring_bytes,
                "activation_bytes": need.activation_bytes,
                "values_bytes": need.values_bytes,
                "available_bytes": need.available_bytes,
                "short_bytes": need.short_bytes,
            }
            for need in error.needs
        ],
        "smallest": {tier.name: tier.least_bytes for tier in error.tiers},
        "repairs": [
            {
                "text": repair.text,
                "change": [" ".join(pair).strip() for pair in repair.change],
                "predicted_seconds": repair.seconds,
                "changes_output": repair.changes_output,
            }
            for repair in error.repairs
        ],
    }
