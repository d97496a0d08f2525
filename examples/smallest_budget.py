"""Time against budget: plans one graph for ever less memory, until none fits, and says what would.

python examples/smallest_budget.py
"""

from __future__ import annotations

import graphrun

graph = graphrun.load("flux-tiny")
for mib in (12, 8, 4, 3, 2, 1):
    problem = graphrun.estimate(graph, vram=f"{mib}M", ram="8G", hardware="sim")
    try:
        solution = graphrun.plan(problem)
    except graphrun.Infeasible as error:
        print(f"{mib:3} MiB: {error}")
        break
    print(f"{mib:3} MiB: {1e3 * solution.simulation.seconds:.2f} ms")
