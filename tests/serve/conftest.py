"""Servers of the small FLUX at its smallest, as their users start them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

GRAPHS = Path(__file__).parents[2] / "graphs"
KEY = "a key for tests"
BUDGETS = ("--vram", "2M", "--ram", "8G", "--device", "sim")
SMALL = {
    "flux-tiny.yaml": (
        ("default: 128", "default: 32"),
        ("default: 4,", "default: 3,"),
        ("default: 64,", "default: 16,"),
    ),
    "wan-tiny.yaml": (
        ("pipeline: diffusers.WanPipeline", "pipeline: diffusers.WanPipeline\nfps: 8"),
    ),
    "configs/tiny-flux-transformer.json": (
        ('"num_layers": 4', '"num_layers": 1'),
        ('"num_single_layers": 8', '"num_single_layers": 3'),
    ),
    "configs/tiny-t5.json": (('"num_layers": 6', '"num_layers": 2'),),
}


@dataclass
class Server:
    """A server's process and address. ``client``: an HTTP client with the key."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    client: httpx.Client

    @property
    def worker(self) -> psutil.Process:
        """The process that holds the weights."""
        return psutil.Process(int(self.metric("worker_pid")))

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = self.client.get("/metrics").text.splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if re.match(rf"graphrun_{name}[{{ ]", line)
        )

    def until(self, holds: Callable[[], Any]) -> Any:
        """Waits until ``holds()`` is true, and returns it."""
        deadline = time.monotonic() + 900
        while not (result := _quietly(holds)):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.2)
        return result

    def stop(self) -> int:
        """Sends SIGTERM and returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)


def _quietly(holds: Callable[[], Any]) -> Any:
    with contextlib.suppress(httpx.TransportError, psutil.NoSuchProcess, ValueError):
        return holds()


@contextlib.contextmanager
def serving(
    folder: Path,
    *options: str,
    names: tuple[str, ...] = ("flux-tiny",),
    budgets: tuple[str, ...] = BUDGETS,
) -> Iterator[Server]:
    """A server of small graphs in ``folder``, ready; killed at the end with its processes."""
    shutil.copytree(GRAPHS, folder / "graphs", dirs_exist_ok=True)
    for name, changes in SMALL.items():
        text = (folder / "graphs" / name).read_text()
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (folder / "graphs" / name).write_text(text)
    (folder / "keys").write_text(f"tester {hashlib.sha256(KEY.encode()).hexdigest()}\n")
    graphs = [str(folder / "graphs" / f"{name}.yaml") for name in names]
    server_options = ["--port", "0", "--keys", str(folder / "keys"), *budgets]
    command = [
        sys.executable,
        "-c",
        "from graphrun.cli.main import main; main()",
        "serve",
        *graphs,
        *server_options,
        *options,
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    server = Server(process, "", folder / "log", httpx.Client())
    try:
        match = server.until(lambda: re.search(r"on (http://\S+)", server.log.read_text()))
        server.url = match[1]
        server.client = httpx.Client(
            base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=300
        )
        server.until(lambda: server.client.get("/readyz").status_code == 200)
        yield server
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in [*psutil.Process(process.pid).children(recursive=True), process]:
                child.kill()
        process.wait()


@dataclass
class Port:
    """A port in this process. ``service`` has no worker, and a planner that never answers: what
    needs a plan waits."""

    number: int
    service: Any
    server: Any

    @property
    def connections(self) -> set[Any]:
        """Those that are open."""
        return set(self.server.server_state.connections)


@contextlib.asynccontextmanager
async def port_of(
    folder: Path,
    host: str = "127.0.0.1",
    *,
    buffer_bytes: int | None = None,
    bounds: Mapping[str, float] | None = None,
    **overrides: Any,
) -> AsyncIterator[Port]:
    """A port whose deadlines are an hour off but for ``bounds``. ``changed``: of its settings.
    Everything ends after five minutes."""
    from graphrun.serve.keys import ApiKey
    from graphrun.serve.server import http_server
    from graphrun.serve.service import Service
    from graphrun.serve.settings import Bounds, Settings

    limits: dict[str, Any] = {"body_seconds": 3600.0, "idle_seconds": 3600.0, **(bounds or {})}
    keys = {"tester": ApiKey(hashlib.sha256(b"a key").hexdigest())}
    settings = Settings(
        (Path("flux-tiny"),), (), {}, (), folder, "none", folder, {}, "1", Bounds(**limits), keys
    )
    service: Any = Service(replace(settings, **overrides))
    service.plans._planner = SimpleNamespace(send=lambda *_, **__: None)
    server, listener = http_server(service, host, 0)
    if buffer_bytes is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    task = asyncio.ensure_future(server.serve([listener]))
    try:
        async with asyncio.timeout(300):
            while not server.started:
                await asyncio.sleep(0.01)
            yield Port(listener.getsockname()[1], service, server)
    finally:
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        server.should_exit = True
        await task


@pytest.fixture(name="port_of")
def port_of_fixture() -> Any:
    """`port_of`, for tests that cannot import this file."""
    return port_of


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that the tests of a session share; none of them may harm it. It streams, and is
    planned in a tenth of the time that the smallest budget takes."""
    with serving(
        tmp_path_factory.mktemp("serve"), "--max-steps", "200", "--vram", "2.5M"
    ) as started:
        yield started


@pytest.fixture(name="module_serving", scope="module")
def module_serving_fixture() -> Any:
    """`serving`, for fixtures of a module."""
    return serving


@pytest.fixture(name="serving")
def serving_fixture() -> Any:
    """`serving`, for tests that cannot import this file."""
    return serving
