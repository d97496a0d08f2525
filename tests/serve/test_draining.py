"""Requests that are in the server when it is told to stop."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from graphrun.serve.line import Cost
from graphrun.serve.planner import PlannedShape

ASK = {"prompt": "a"}
HEADERS = {"Authorization": "Bearer a key"}
URL = "/v1/images/generations"


def client_of(port: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port.number}", headers=HEADERS, timeout=300
    )


async def until(holds: Any) -> None:
    while not holds():
        await asyncio.sleep(0.01)


def waiting(port: Any) -> float:
    """Requests that wait for a plan."""
    (value,) = re.findall(
        r"^graphrun_planning_requests (\S+)$", port.service.metrics.text().decode(), re.MULTILINE
    )
    return float(value)


def planned(port: Any) -> None:
    """The planner has answered what it was asked."""
    shape = PlannedShape(Cost(1.0, 1.0), 1, "fits", {})
    for key in list(port.service.plans.shapes):
        port.service.plans.hear("planned", key, shape=shape)


def refused(answer: httpx.Response) -> bool:
    return (answer.status_code, answer.json()["error"]["code"], answer.headers["retry-after"]) == (
        503,
        "stopping",
        "10",
    )


def test_requests_that_wait_for_a_plan_are_refused_when_the_drain_ends(
    port_of: Any, tmp_path: Path, capfd: Any
) -> None:
    async def ask() -> list[httpx.Response]:
        async with port_of(tmp_path, drain_seconds=0.2) as port, client_of(port) as client:
            tasks = [asyncio.ensure_future(client.post(URL, json=ASK)) for _ in range(3)]
            await until(lambda: waiting(port) == 3)
            await port.service.drain()
            await port.service.idle()
            port.server.should_exit = True
            return await asyncio.gather(*tasks)

    assert all(refused(answer) for answer in asyncio.run(ask()))
    assert "Traceback" not in capfd.readouterr().err


def test_a_request_whose_plan_comes_during_the_drain_is_admitted(
    port_of: Any, tmp_path: Path, capfd: Any
) -> None:
    async def ask() -> None:
        async with port_of(tmp_path, drain_seconds=60) as port, client_of(port) as client:
            task = asyncio.ensure_future(client.post(URL, json=ASK))
            await until(lambda: waiting(port) == 1)
            draining = asyncio.ensure_future(port.service.drain())
            await until(lambda: port.service.draining)
            assert refused(await client.post(URL, json=ASK)), "a new one"
            planned(port)
            await until(lambda: port.service.line.entries)
            assert not task.done()
            assert not draining.done()
            port.service.cancel_all()  # as a second signal does
            assert refused(await task)
            await draining

    asyncio.run(ask())
    assert "Traceback" not in capfd.readouterr().err


def test_a_client_that_leaves_while_its_request_is_planned_holds_no_drain_up(
    port_of: Any, tmp_path: Path
) -> None:
    async def ask() -> None:
        async with port_of(tmp_path, drain_seconds=60) as port, client_of(port) as client:
            tasks = [asyncio.ensure_future(client.post(URL, json=ASK)) for _ in range(2)]
            draining = None
            for count in (2, 1):
                await until(lambda expected=count: waiting(port) == expected)
                draining = draining or asyncio.ensure_future(port.service.drain())
                await asyncio.sleep(0.05)
                assert not draining.done()
                tasks.pop().cancel()
            await draining

    asyncio.run(ask())


def test_a_client_that_leaves_before_the_first_event_of_a_stream_cancels_its_request(
    port_of: Any, tmp_path: Path
) -> None:
    """Its connection accepts no bytes when the answer begins, and then ends."""

    async def ask() -> None:
        async with port_of(tmp_path) as port:
            body = json.dumps({**ASK, "stream": True}).encode()
            headers = {"host": "127.0.0.1", "content-type": "application/json", **HEADERS}
            scope = {
                "type": "http",
                "method": "POST",
                "path": URL,
                "query_string": b"",
                "headers": [(name.lower().encode(), headers[name].encode()) for name in headers],
            }
            messages, started = [{"type": "http.request", "body": body}], asyncio.Event()

            async def receive() -> Any:
                if messages:
                    return messages.pop()
                await started.wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                assert message["status"] == 200, message
                started.set()
                await asyncio.Event().wait()

            application = port.server.config.loaded_app
            task = asyncio.ensure_future(application(scope, receive, send))
            await until(lambda: waiting(port) == 1)
            planned(port)
            await task
            assert started.is_set()
            assert not port.service.line.entries

    asyncio.run(ask())


def test_a_request_whose_body_comes_while_the_server_ends_is_refused(
    port_of: Any, tmp_path: Path, capfd: Any
) -> None:
    """uvicorn cancels what is left 5 s after the server was told to end."""

    async def ask() -> bytes:
        async with port_of(tmp_path) as port:
            port.server.config.timeout_graceful_shutdown = 1
            reader, writer = await asyncio.open_connection("127.0.0.1", port.number)
            head = (
                "Host: 127.0.0.1\r\nAuthorization: Bearer a key\r\n"
                "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n"
            )
            writer.write(f"POST {URL} HTTP/1.1\r\n{head}".encode())
            await until(lambda: port.server.server_state.tasks)
            port.server.should_exit = True
            return await reader.read()

    answer = asyncio.run(ask())
    assert answer.startswith(b"HTTP/1.1 503")
    assert b'"code":"stopping"' in answer
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.sweep("serve")
@pytest.mark.parametrize(("drain", "resumes"), [("300s", True), ("1s", False)])
def test_sigterm_while_a_request_is_planned(
    serving: Any, tmp_path: Path, drain: str, resumes: bool
) -> None:
    """Three requests wait for a planner that is stopped by SIGSTOP. Where it goes on in time, they
    get their pictures."""
    with serving(tmp_path, "--drain", drain) as server, ThreadPoolExecutor(3) as pool:
        children = (
            child
            for child in psutil.Process(server.process.pid).children()
            if child.pid != server.worker.pid
        )
        (planner,) = (
            child for child in children if "resource_tracker" not in " ".join(child.cmdline())
        )
        os.kill(planner.pid, signal.SIGSTOP)
        ask = {"prompt": "a", "size": "48x32", "steps": 1}
        futures = [pool.submit(server.client.post, URL, json=ask) for _ in range(3)]
        server.until(lambda: server.metric("planning_requests") == 3)
        server.process.terminate()
        server.until(lambda: "stopping" in server.log.read_text())
        if resumes:
            os.kill(planner.pid, signal.SIGCONT)
        answers = [future.result() for future in futures]
        assert server.process.wait(120) == 0
        assert "Traceback" not in server.log.read_text()
    if resumes:
        assert [answer.status_code for answer in answers] == [200] * 3
    else:
        assert all(refused(answer) for answer in answers)
