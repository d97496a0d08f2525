"""A server whose pipelines run on the devices of a cluster."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import signal
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from PIL import Image
from typer.testing import CliRunner

import graphrun
from graphrun.cli.main import app
from graphrun.errors import DeviceLost, OutOfMemory, StageError
from graphrun.serve.catalog import GraphVariant
from graphrun.serve.clustered import ClusterWorker
from graphrun.serve.settings import Settings
from graphrun.serve.worker import SessionBudget

CLUSTER = """
graphrun: 1
hosts:
  a: {ram: 8G, devices: [{id: 0, hardware: sim, vram: 4M}, {id: 1, hardware: sim, vram: 2M}]}
  b: {ram: 8G, devices: [{id: 0, hardware: sim, vram: 4M}]}
links: [{between: [a, b], bytes_per_second: 1.2e9, seconds: 1e-4}]
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    (file := tmp_path / "cluster.yaml").write_text(CLUSTER)
    return file


@pytest.mark.parametrize("option", ["--vram=8G", "--device=sim", "--ram=8G", "--hardware=sim"])
def test_what_the_cluster_file_has_is_refused_beside_it(cluster: Path, option: str) -> None:
    result = CliRunner().invoke(app, ["serve", "flux-tiny", "--cluster", str(cluster), option])
    assert isinstance(result.exception, graphrun.InputError)
    assert option.partition("=")[0] in str(result.exception)


def test_errors_of_devices_are_those_of_the_api(tmp_path: Path) -> None:
    """What a run on actors ends with is told as one on a device of the worker's own is."""
    messages = list[tuple[str, dict[str, Any]]]()

    class Failing(ClusterWorker):
        clock_seconds = 0.0

        def _open(self) -> None:
            pass

        def _stream(self, *_: Any, **__: Any) -> None:
            if errors:
                raise errors.pop(0)

    settings = Settings((Path("flux-tiny"),), (), {}, (), tmp_path, "none", tmp_path, {}, "1")
    worker = Failing(settings, lambda kind, **content: messages.append((kind, content)))
    run = {
        "id": "1",
        "number": 0,
        "inputs": {},
        "folder": tmp_path,
        "suffix": ".png",
        "preview": False,
    }
    variant = GraphVariant(graphrun.load("flux-tiny"))
    errors = [DeviceLost("its process died"), OutOfMemory("full"), StageError("no such guidance")]
    for _ in range(4):
        worker.run(run, SessionBudget(("flux-tiny", 1.0), variant, {}, ()))
    assert [(kind, content.get("status")) for kind, content in messages] == [
        ("failed", 503),
        ("failed", 503),
        ("failed", 422),
        ("cancelled", None),
    ]


@pytest.mark.sweep("serve")
def test_pictures_come_from_the_actors_of_a_cluster_whichever_of_them_dies(
    serving: Any, tmp_path: Path, cluster: Path, record_property: Any
) -> None:
    with serving(tmp_path, "--cluster", str(cluster), "--reuse", "none", budgets=()) as server:
        client_options: dict[str, Any] = {
            "base_url": f"{server.url}/v1",
            "api_key": "a key for tests",
            "max_retries": 0,
            "timeout": 600,
        }

        async def ask(seeds: range) -> list[Any]:
            async with openai.AsyncOpenAI(**client_options) as client:
                tasks = (
                    client.images.generate(prompt=f"prompt {seed}", extra_body={"seed": seed})
                    for seed in seeds
                )
                return await asyncio.gather(*tasks)

        def actors() -> list[psutil.Process]:
            processes = psutil.Process(server.process.pid).children(recursive=True)
            return [child for child in processes if child.name().startswith("ray::_Actor")]

        first = asyncio.run(ask(range(6)))
        first_actors = actors()
        job = server.client.post("/v1/jobs", json={"prompt": "a", "n": 4}).json()
        for process in first_actors:
            os.kill(process.pid, signal.SIGKILL)
        second = asyncio.run(ask(range(6, 12)))
        server.until(lambda: server.client.get(f"/v1/jobs/{job['id']}").json()["state"] == "done")
        assert {actor.pid for actor in actors()}.isdisjoint({actor.pid for actor in first_actors})
        assert server.metric("worker_restarts_total") == 0
        graph = graphrun.load(tmp_path / "graphs" / "flux-tiny.yaml")
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert server.stop() == 0
        # Ray's agents look from time to time whether their parent lives
        assert psutil.wait_procs(children, 120)[1] == []
    requests = [{"prompt": f"prompt {seed}", "seed": seed} for seed in range(12)]
    single = graphrun.run_many(graph, requests, vram="4M", ram="8G", hardware="sim", reuse="none")
    for number, response in enumerate([*first, *second], 1):
        picture = Image.open(io.BytesIO(base64.b64decode(response.data[0].b64_json)))
        assert picture.tobytes() == single.outputs[number]["image"].tobytes()
        peaks = response.graphrun["peak_bytes"]
        assert peaks["measured"] <= peaks["planned"] <= 4 * 2**20
    batch_sizes = [response.graphrun["together"] for response in (*first, *second)]
    record_property(
        "figures",
        {"requests": 12, "actors killed": len(first_actors), "most together": max(batch_sizes)},
    )
    assert max(batch_sizes) > 1
