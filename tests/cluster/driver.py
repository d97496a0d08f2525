"""Runs a batch on a Ray that runs already, and says each run: ``driver.py ADDRESS FOLDER CACHE
ITEMS``. To be killed."""

import sys
from pathlib import Path
from typing import Any

from placing import GRAPH, cluster_of, placed, ran_by, requests

import graphrun
from graphrun.batch.journal import Journal
from graphrun.batch.watch import Watcher
from graphrun.cluster.actors import Actors, ray_connection
from graphrun.cluster.flow import segments_of
from graphrun.report.outputs import save_outputs

address, folder, cache, items = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])


class Tells(Watcher):
    def ran_on(self, *_: Any) -> None:
        print("ran", flush=True)


def sink(request: Any, outputs: Any) -> list[Path]:
    return save_outputs(outputs, folder / f"{request.number}.png")


graph = graphrun.load(GRAPH)
placement = placed(graph, items, cache)
with (
    ray_connection(cluster_of(address=address)) as ray,
    Actors(ray, segments_of(graph, placement), placement) as crew,
):
    ran_by(
        graph,
        placement,
        crew,
        requests(items),
        journal=Journal(folder / "state"),
        watcher=Tells(),
        sink=sink,
    )
