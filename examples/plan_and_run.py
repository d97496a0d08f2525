"""Plans a graph, looks at the plan, saves it, and runs it on the simulated accelerator.

python examples/plan_and_run.py
"""

from __future__ import annotations

from pathlib import Path

import graphrun

graph = graphrun.load("flux-tiny")
problem = graphrun.estimate(graph, vram="6M", ram="8G", hardware="sim")
solution = graphrun.plan(problem)

simulation = solution.simulation
print(f"planned: {simulation.seconds:.4f} s, peak {simulation.peak_bytes:,} bytes")
Path("plan.txt").write_text(str(solution.plan))

trace = graphrun.run(solution, graph, inputs={"prompt": "a lighthouse", "seed": 7})
print(f"measured: peak {max(slot.peak_bytes for slot in trace.slots):,} bytes")
trace.outputs["image"].save("plan-and-run.png")
