"""Web pages that call a server through the browser of its user, and names by which browsers call
it."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

import graphrun
from graphrun.cli.main import app
from graphrun.serve.origins import ServerNames, origin_of

KEY = {"Authorization": "Bearer a key"}
EVIL = "https://evil.example"
FORM = {"files": {"image": b"x"}, "data": {"prompt": "a"}}
HOST = socket.gethostname().lower()


def asked(
    port_of: Any, folder: Path, *requests: dict[str, Any], **settings: Any
) -> list[httpx.Response]:
    """What a server answers. ``{port}`` in the headers of a request is its port."""

    async def ask() -> list[httpx.Response]:
        async with (
            port_of(folder, **settings) as port,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port.number}") as client,
        ):
            answers = []
            for request in requests:
                headers = {
                    name: value.format(port=port.number)
                    for name, value in request.get("headers", {}).items()
                }
                answers.append(
                    await client.request(
                        **{"method": "GET", "url": "/healthz", **request, "headers": KEY | headers}
                    )
                )
            return answers

    return asyncio.run(ask())


def from_page(origin: str, **request: Any) -> dict[str, Any]:
    return {"headers": {"Origin": origin}, **request}


@pytest.mark.parametrize(
    "origin",
    [
        EVIL,
        "http://localhost:3000",
        "http://127.0.0.1",
        "https://127.0.0.1.evil.example:{port}",
        "app://127.0.0.1:{port}",
    ],
)
def test_a_foreign_page_is_refused_with_the_option_that_allows_it(
    port_of: Any, tmp_path: Path, origin: str
) -> None:
    requests: list[dict[str, Any]] = [
        from_page(origin, method="POST", url="/v1/images/edits", **FORM),
        from_page(origin, method="POST", url="/v1/images/generations", json={"prompt": "a"}),
        from_page(origin),
        from_page(origin, url="/v1/jobs/any/events"),
        {"headers": {"Origin": origin, "Connection": "Upgrade", "Upgrade": "websocket"}},
        {
            "method": "OPTIONS",
            "headers": {"Origin": origin, "Access-Control-Request-Method": "POST"},
        },
    ]
    answers = asked(port_of, tmp_path / "files", *requests)
    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_refused")
        assert (
            f"--allow-origin {answer.request.headers['Origin']}"
            in answer.json()["error"]["message"]
        )
        assert "access-control-allow-origin" not in answer.headers
    assert not (tmp_path / "files").exists(), "its files are not read"


def test_a_page_without_an_origin_is_refused(port_of: Any, tmp_path: Path) -> None:
    (answer,) = asked(port_of, tmp_path, from_page("null"))
    assert answer.status_code == 403
    assert "--allow-origin" in answer.json()["error"]["message"]


def test_clients_that_are_no_pages_and_the_page_of_the_server_pass(
    port_of: Any, tmp_path: Path
) -> None:
    server_origins = [
        f"http://{name}:{{port}}" for name in ("127.0.0.1", "localhost", "[::1]", HOST)
    ]
    own_pages = [
        {"headers": {"Origin": origin, "Host": origin.removeprefix("http://")}}
        for origin in server_origins
    ]
    # a proxy with TLS
    proxy_page = {"headers": {"Origin": "https://images.example", "Host": "images.example"}}
    answers = asked(port_of, tmp_path, {}, *own_pages, proxy_page, allow_hosts=("images.example",))
    assert [answer.status_code for answer in answers] == [200] * 6


def test_a_page_whose_name_was_pointed_to_this_machine_is_refused(
    port_of: Any, tmp_path: Path
) -> None:
    """DNS rebinding: for the browser it is the page's own server."""
    rebound = {"Host": "evil.example:{port}", "Origin": "http://evil.example:{port}"}
    answers = asked(
        port_of,
        tmp_path,
        {"headers": rebound},
        {"headers": {"Host": "evil.example:{port}"}, "url": "/"},
    )
    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_refused")
        assert "--allow-host evil.example" in answer.json()["error"]["message"]


def test_an_allowed_origin_gets_the_answers_that_browsers_ask_for(
    port_of: Any, tmp_path: Path
) -> None:
    ui = "http://localhost:3000"
    headers = {
        "Origin": ui,
        "Access-Control-Request-Method": "DELETE",
        "Access-Control-Request-Private-Network": "true",
    }
    headers["Access-Control-Request-Headers"] = "authorization,content-type,x-stainless-os"
    preflight, got, rejection, foreign = asked(
        port_of,
        tmp_path,
        {"method": "OPTIONS", "url": "/v1/jobs/any", "headers": headers},
        from_page(ui),
        from_page(ui, url="/v1/models", headers={"Origin": ui, "Authorization": "Bearer none"}),
        from_page(EVIL),
        allow_origins=(ui,),
    )
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == ui
    assert "DELETE" in preflight.headers["access-control-allow-methods"]
    assert {"authorization", "x-stainless-os"} <= set(
        preflight.headers["access-control-allow-headers"].split(",")
    )
    assert preflight.headers["access-control-allow-private-network"] == "true"
    assert [
        response.headers.get("access-control-allow-origin")
        for response in (got, rejection, foreign)
    ] == [ui, ui, None]
    assert [response.status_code for response in (got, rejection, foreign)] == [200, 401, 403]
    assert "Retry-After" in got.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in got.headers


def test_with_a_star_every_page_passes(port_of: Any, tmp_path: Path) -> None:
    answers = asked(port_of, tmp_path, from_page(EVIL), from_page("null"), allow_origins=("*",))
    assert [
        (answer.status_code, answer.headers["access-control-allow-origin"]) for answer in answers
    ] == [(200, "*")] * 2


@pytest.mark.parametrize(
    ("bound", "extra_names", "passes", "bad_names"),
    [
        (
            "127.0.0.1",
            (),
            [
                "127.0.0.1:8000",
                "127.0.0.2",
                "localhost",
                "LocalHost:1",
                "a.localhost",
                "[::1]:8000",
                HOST,
                f"{HOST}.local:1",
            ],
            [
                "10.0.0.1",
                "evil.example",
                "localhost.evil.example",
                "127.0.0.1.evil.example",
                "0x7f000001",
                "localhost.",
                "[::2]",
                "",
            ],
        ),
        ("192.168.1.5", (), ["192.168.1.5:8000", "localhost"], ["192.168.1.6", "evil.example"]),
        ("images.lan", (), ["images.lan:8000", "IMAGES.lan"], ["other.lan", "192.168.1.5"]),
        (
            "0.0.0.0",
            (),
            ["192.168.1.5:8000", "0.0.0.0:8000", "[fd00::1]:8000", HOST],
            ["evil.example", "graphrun:8000"],
        ),
        ("::", (), ["192.168.1.5:8000", "[fd00::1]"], ["evil.example"]),
        (
            "0.0.0.0",
            ("graphrun", "*.example.com"),
            ["graphrun:8000", "a.b.example.com"],
            ["example.com", "evilexample.com"],
        ),
        (
            "127.0.0.1",
            ("10.0.0.1", "fd00::1"),
            ["10.0.0.1:80", "[FD00::1]:80", "[fd00:0::1]"],
            ["10.0.0.2"],
        ),
        (
            "127.0.0.1",
            ("*",),
            ["evil.example"],
            ["no name:1", "[::1", "a/b", "a@b", "a:b", "a:1:2"],
        ),
    ],
)
def test_names_by_which_a_server_is_called(
    bound: str, extra_names: tuple[str, ...], passes: list[str], bad_names: list[str]
) -> None:
    names = ServerNames(bound, extra_names)
    assert [host for host in (*passes, *bad_names) if names.include(host)] == passes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--allow-host", "http://a.example"],
            "--allow-host http://a.example: type the name alone",
        ),
        (["--allow-host", "a.example:80"], "type the name alone"),
        (["--allow-host", "a.*.example"], "type the name alone"),
        (["--allow-host", "*"], "--allow-host '*' without --keys"),
        (["--allow-origin", "a.example"], "--allow-origin a.example: type scheme and name"),
        (["--allow-origin", "https://a.example/"], "such as https://a.example"),
        (["--allow-origin", "null"], "type scheme and name"),
        (["--allow-origin", "*"], "--allow-origin '*' without --keys"),
    ],
)
def test_what_is_wrong_with_the_options_is_said(options: list[str], words: str) -> None:
    result = CliRunner().invoke(
        app, ["serve", "flux-tiny", "--vram", "6M", "--device", "sim", *options]
    )
    assert isinstance(result.exception, graphrun.InputError)
    assert words in str(result.exception)


def test_an_origin_is_as_browsers_send_it() -> None:
    values = [
        "HTTPS://A.example:443",
        "http://a.example:80",
        "http://a.example:443",
        "https://[::1]:8443",
        "app://b",
    ]
    assert [origin_of(value) for value in values] == [
        "https://a.example",
        "http://a.example",
        "http://a.example:443",
        "https://[::1]:8443",
        "app://b",
    ]
