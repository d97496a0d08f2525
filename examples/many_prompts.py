"""A list of requests in one batch, then a session that takes them one by one. Weights that the plan
keeps stay loaded.

python examples/many_prompts.py
"""

from __future__ import annotations

import graphrun

graph = graphrun.load("flux-tiny")
budgets = {"vram": "6M", "ram": "8G", "hardware": "sim"}

requests = ["a lighthouse", {"prompt": "a harbour", "seed": 3}, {"prompt": "a harbour", "seed": 4}]
batch = graphrun.run_many(graph, requests, **budgets)
for number, outputs in batch.outputs.items():  # numbered as lines are, from 1
    outputs["image"].save(f"many-{number}.png")

with graphrun.Session(graph, **budgets) as session:
    for prompt in ("a cat", "a dog"):
        trace = session.run({"prompt": prompt})
        trace.outputs["image"].save(f"{prompt.replace(' ', '-')}.png")
