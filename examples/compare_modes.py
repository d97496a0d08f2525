"""What diffusers' own ways of offloading would take, beside a plan: no weights and no GPU needed.

python examples/compare_modes.py
"""

from __future__ import annotations

import graphrun

graph = graphrun.load("flux-tiny")
for mode in ("resident", "model", "sequential", "group"):
    estimate = graphrun.survey(graph, hardware="sim", mode=mode)["mode"]
    print(f"{mode:10} {estimate['peak_bytes']:>12,} bytes {1e3 * estimate['seconds']:8.2f} ms")

solution = graphrun.plan(graphrun.estimate(graph, vram="4M", ram="8G", hardware="sim", runs=2))
print(
    f"{'graphrun':10} {solution.simulation.peak_bytes:>12,} bytes "
    f"{1e3 * solution.simulation.further_seconds:8.2f} ms"
)
