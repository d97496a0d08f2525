"""Clients that send too little, too much or nothing, or read nothing, at the port of a server
without its processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

CONNECTIONS = 20
pytestmark = pytest.mark.long
POST = b"POST /v1/images/generations HTTP/1.1\r\nHost: 127.0.0.1\r\n"
GET = b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
KEY = b"Authorization: Bearer a key\r\n"
JSON = b"Content-Type: application/json\r\n"
EARLY = {
    "no key": (401, POST + JSON + b"Content-Length: 100\r\n\r\n"),
    "no JSON": (415, POST + KEY + b"Content-Length: 100\r\n\r\n"),
    "no JSON, chunked": (415, POST + KEY + b"Transfer-Encoding: chunked\r\n\r\n"),
    "too large": (413, POST + KEY + JSON + b"Content-Length: 99999999\r\n\r\n"),
    "no form": (415, POST.replace(b"generations", b"edits") + KEY + b"Content-Length: 100\r\n\r\n"),
    "no address": (404, POST.replace(b"generations", b"none") + b"Content-Length: 100\r\n\r\n"),
    "no method": (
        405,
        POST.replace(b"/v1/images/generations", b"/healthz") + b"Content-Length: 100\r\n\r\n",
    ),
    "a body nobody reads": (
        200,
        b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n",
    ),
}


async def opened(port: int, text: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text)
    return reader, writer


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes, bytes]:
    """Status, headers and body."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    (length,) = (
        int(line.split(b":")[1]) for line in head.splitlines() if line.startswith(b"content-length")
    )
    return int(head.split()[1]), head, await reader.readexactly(length)


async def deaf(port: int, text: bytes) -> socket.socket:
    """A connection over which ``text`` is sent, and nothing read yet."""
    (client := socket.socket()).setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", port))
    await loop.sock_sendall(client, text)
    await asyncio.sleep(0.01)
    return client


async def health(port: int) -> int:
    """The status that a new client gets."""
    reader, writer = await opened(
        port, b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    )
    status, _, _ = await answer(reader)
    writer.close()
    return status


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize(("status", "text"), EARLY.values(), ids=EARLY)
def test_after_an_answer_before_the_body_the_connection_is_closed(
    port_of: Any, tmp_path: Path, status: int, text: bytes
) -> None:
    async def silent() -> None:
        async with port_of(tmp_path, connections=CONNECTIONS, bounds={"idle_seconds": 0.2}) as port:
            reader, writer = await opened(port.number, text)
            code, head, _ = await answer(reader)
            assert (code, b"connection: close" in head) == (status, True)
            writer.write(b"1")  # and then nothing
            assert await reader.read() == b""
            await until(lambda: not port.connections)

    asyncio.run(silent())


async def until(holds: Any) -> None:
    while not holds():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("chunked", [True, False])
def test_after_an_answer_before_the_body_a_bounded_part_of_it_is_read(
    port_of: Any, tmp_path: Path, chunked: bool
) -> None:
    """As much as a body may have, so that a client that sends no more gets its answer on every
    system."""
    limit, piece = 2**16, 2**12
    length = (
        b"Transfer-Encoding: chunked\r\n\r\n" if chunked else b"Content-Length: 99999999999\r\n\r\n"
    )
    head, part = (b"1000\r\n", b"\r\n") if chunked else (b"", b"")

    async def flood() -> tuple[int, int]:
        sent_bytes = 0
        async with port_of(tmp_path, connections=CONNECTIONS, bounds={"body_bytes": limit}) as port:
            reader, writer = await opened(port.number, POST + KEY + length)
            status, _, _ = await answer(reader)
            with contextlib.suppress(ConnectionError):
                while sent_bytes < 64 * 2**20:
                    writer.write(head + b"x" * piece + part)
                    await writer.drain()
                    sent_bytes += piece
            writer.close()
            return status, sent_bytes

    status, total_bytes = asyncio.run(flood())
    assert status == 415
    assert limit <= total_bytes < 32 * 2**20, "the rest is in buffers of the system"


def test_a_small_body_is_read_after_the_answer_so_that_the_client_gets_it_whole(
    port_of: Any, tmp_path: Path
) -> None:
    async def ask() -> None:
        async with port_of(tmp_path, connections=CONNECTIONS) as port:
            reader, writer = await opened(port.number, EARLY["no JSON"][1])
            assert (await answer(reader))[0] == 415
            writer.write(b"x" * 100)
            assert await reader.read() == b"", "not a reset"

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("limit", "words"),
    [("body_seconds", b"did not come within"), ("idle_seconds", b"nothing came for")],
)
@pytest.mark.parametrize("path", [b"generations", b"edits"])
def test_slow_bodies_are_refused_and_cut_off(
    port_of: Any, tmp_path: Path, limit: str, words: bytes, path: bytes
) -> None:
    kind = JSON if path == b"generations" else b"Content-Type: multipart/form-data; boundary=b\r\n"

    async def send() -> None:
        async with port_of(tmp_path, connections=CONNECTIONS, bounds={limit: 0.3}) as port:
            reader, writer = await opened(
                port.number,
                POST.replace(b"generations", path) + KEY + kind + b"Content-Length: 10000\r\n\r\n",
            )
            writer.write(b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\n')

            async def trickle() -> None:
                while limit == "body_seconds":  # never idle
                    writer.write(b"x")
                    await asyncio.sleep(0.02)

            trickling = asyncio.ensure_future(trickle())
            status, head, body = await answer(reader)
            assert (status, b"connection: close" in head) == (408, True)
            assert words in body
            assert b"0.3 s" in body
            trickling.cancel()
            await until(lambda: not port.connections)

    asyncio.run(send())


@pytest.mark.parametrize("text", [b"", POST])
def test_slow_headers_are_cut_off(port_of: Any, tmp_path: Path, text: bytes) -> None:
    async def send() -> None:
        async with port_of(tmp_path, connections=CONNECTIONS, bounds={"body_seconds": 0.3}) as port:
            reader, _ = await opened(port.number, text)
            assert await reader.read() == b""

    asyncio.run(send())


SILENT = {
    "nothing": b"",
    "half of the headers": POST,
    "half of a body": POST + KEY + JSON + b"Content-Length: 100\r\n\r\n{",
    "no body": POST + KEY + JSON + b"Content-Length: 100\r\n\r\n",
    "a body that nobody reads": EARLY["no JSON"][1] + b"1",
    "no further request": b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "answers are not read": GET * 100,
    "the last answer is not read": GET * 4 + GET.replace(b"Host", b"Connection: close\r\nHost"),
}


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize("text", SILENT.values(), ids=SILENT)
def test_connections_that_wait_for_their_clients_lock_nobody_out(
    port_of: Any, tmp_path: Path, text: bytes
) -> None:
    """No deadline ends them here: the one that waits longest makes room."""

    async def attack() -> None:
        async with port_of(tmp_path, connections=CONNECTIONS, buffer_bytes=4096) as port:
            silent = []
            for _ in range(2 * CONNECTIONS):
                silent.append(await deaf(port.number, text))
                if GET in text:
                    await until(
                        lambda: all(
                            connection.flow.write_paused or connection.transport.is_closing()
                            for connection in port.connections
                        )
                    )
            assert await asyncio.gather(*(health(port.number) for _ in range(5))) == [200] * 5
            assert len(port.connections) <= CONNECTIONS
            for client in silent:
                client.close()

    asyncio.run(attack())


def test_the_connection_that_waits_longest_makes_room(port_of: Any, tmp_path: Path) -> None:
    async def attack() -> None:
        async with port_of(tmp_path, connections=CONNECTIONS) as port:
            silent = [await deaf(port.number, b"") for _ in range(CONNECTIONS)]
            reader, writer = await opened(
                port.number, POST + KEY + JSON + b"Content-Length: 14\r\n\r\n"
            )
            silent += [await deaf(port.number, b"") for _ in range(CONNECTIONS // 2)]
            writer.write(b'{"model": "x"}')
            assert (await answer(reader))[0] == 404
            for client in silent:
                client.close()

    asyncio.run(attack())


def test_where_the_server_works_for_all_connections_the_next_one_is_refused(
    port_of: Any, tmp_path: Path
) -> None:
    async def ask() -> None:
        async with port_of(tmp_path, connections=CONNECTIONS) as port:
            text = POST + KEY + JSON + b'Content-Length: 15\r\n\r\n{"prompt": "a"}'
            busy = [await opened(port.number, text) for _ in range(CONNECTIONS)]
            await until(
                lambda: (
                    [connection.waits_for_client for connection in port.connections]
                    == [False] * CONNECTIONS
                )
            )
            reader, _ = await opened(
                port.number, b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
            )
            status, head, body = await answer(reader)
            assert (status, json.loads(body)["error"]["code"]) == (503, "busy")
            assert b"retry-after: 5" in head
            assert await reader.read() == b""
            busy.pop()[1].close()
            await until(lambda: len(port.connections) < CONNECTIONS)
            assert await health(port.number) == 200

    asyncio.run(ask())


def test_a_client_that_reads_nothing_is_cut_off_and_a_slow_one_gets_everything(
    port_of: Any, tmp_path: Path
) -> None:
    async def read() -> None:
        async with port_of(
            tmp_path, connections=CONNECTIONS, buffer_bytes=4096, bounds={"idle_seconds": 0.2}
        ) as port:
            with await deaf(port.number, GET * 100):
                await until(
                    lambda: any(connection.flow.write_paused for connection in port.connections)
                )
                await until(lambda: not port.connections)
            with await deaf(port.number, GET * 20) as slow:
                received_bytes, loop = b"", asyncio.get_running_loop()
                while received_bytes.count(b"HTTP/1.1 200") < 20 or not received_bytes.endswith(
                    b"}"
                ):
                    received_bytes += await loop.sock_recv(slow, 4096)
                    await asyncio.sleep(0.02)

    asyncio.run(read())


def test_a_server_may_open_as_many_files_as_it_has_connections() -> None:
    limits = "resource.getrlimit(resource.RLIMIT_NOFILE)"
    script = f"""import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, {limits}[1]))
from graphrun.systems import allow_open_files
for count in (500, 100, 10**9):
    allow_open_files(count)
    print({limits}[0] == min(max(count, 500), {limits}[1]))
"""
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert process.stdout.split() == ["True"] * 3


@pytest.mark.sweep("serve")
def test_600_connections_that_fall_silent_leave_the_server_reachable(
    serving: Any, tmp_path: Path
) -> None:
    """More than a server has at once by default, each with one byte after an early answer; then a
    body without an end."""
    early = [text for status, text in EARLY.values() if status != 200]
    with serving(tmp_path, "--idle", "1h") as server, contextlib.ExitStack() as stack:
        host = httpx.URL(server.url)
        for number in range(600):
            connection = stack.enter_context(
                socket.create_connection((host.host, host.port), timeout=300)
            )
            connection.sendall(early[number % len(early)].replace(b"a key", b"a key for tests"))
            assert connection.recv(65536).startswith(b"HTTP/1.1 4")
            connection.sendall(b"1")
        assert [httpx.get(f"{server.url}/healthz").status_code for _ in range(20)] == [200] * 20
        flood, sent_bytes = socket.create_connection((host.host, host.port), timeout=300), 0
        with flood, contextlib.suppress(ConnectionError):
            flood.sendall(EARLY["no JSON, chunked"][1].replace(b"a key", b"a key for tests"))
            while sent_bytes < 256 * 2**20:
                flood.sendall(b"10000\r\n" + b"x" * 2**16 + b"\r\n")
                sent_bytes += 2**16
        assert 2**20 <= sent_bytes < 32 * 2**20
