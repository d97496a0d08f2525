"""The page in a browser: a prompt becomes a picture with its figures."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import websocket

BROWSER = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)
pytestmark = [pytest.mark.long, pytest.mark.skipif(BROWSER is None, reason="no browser")]
Evaluate = Callable[[str], Any]


@pytest.fixture
def evaluate(tmp_path: Path) -> Iterator[Evaluate]:
    """Evaluates JavaScript in a page of a headless browser, by the Chrome DevTools protocol. Raises
    ValueError while there is no page."""
    log = tmp_path / "log"
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-port=0",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    with log.open("wb") as err:
        browser = subprocess.Popen(
            [str(BROWSER), *options, "--remote-allow-origins=*", "about:blank"], stderr=err
        )
    try:
        deadline = time.monotonic() + 120
        while not (match := re.search(r"ws://([^/]+)/", log.read_text(errors="replace"))):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        (page,) = (
            target
            for target in httpx.get(f"http://{match[1]}/json").json()
            if target["type"] == "page"
        )
        connection, numbers = (
            websocket.create_connection(page["webSocketDebuggerUrl"], timeout=300),
            itertools.count(),
        )

        def run(script: str) -> Any:
            number = next(numbers)
            parameters = {"expression": script, "awaitPromise": True, "returnByValue": True}
            connection.send(
                json.dumps({"id": number, "method": "Runtime.evaluate", "params": parameters})
            )
            while (answer := json.loads(connection.recv())).get("id") != number:
                pass
            if "error" in answer:  # another page is being loaded
                raise ValueError(answer["error"])
            assert "exceptionDetails" not in answer["result"], answer
            return answer["result"]["result"].get("value")

        yield run
        connection.close()
    finally:
        browser.kill()
        browser.wait()


def test_a_prompt_becomes_a_picture_beside_its_figures(server: Any, evaluate: Evaluate) -> None:
    evaluate(f"location.href = {server.url + '/'!r}")

    def until(script: str) -> Any:
        return server.until(lambda: evaluate(script))

    until("document.readyState === 'complete' && !!document.getElementById('ask')")
    evaluate(
        "for (const [name, value] of Object.entries({prompt: '<b>a</b> lighthouse', "
        "key: 'a key for tests', seed: 5, steps: 8}))"
        " document.getElementById('ask').elements[name].value = value;"
        "window.seen = []; new MutationObserver("
        "() => seen.push(document.getElementById('state').textContent))"
        ".observe(document.getElementById('state'), {childList: true}); "
        "document.getElementById('ask').requestSubmit()"
    )
    until("document.getElementById('state').textContent.startsWith('done')")
    assert (
        evaluate("document.getElementById('state').textContent")
        == "done, seed 5; the run matched the plan"
    )
    assert [text for text in evaluate("seen") if re.fullmatch(r"denoise: step \d of 8", text)]
    assert evaluate(
        "(i => [i.naturalWidth, i.naturalHeight, i.alt])(document.getElementById('picture'))"
    ) == [
        32,
        32,
        "<b>a</b> lighthouse",
    ]
    rows = evaluate(
        "[...document.querySelectorAll('#figures tbody tr')]"
        ".map(row => [...row.cells].map(cell => cell.textContent))"
    )
    assert [row[0] for row in rows] == ["queue", "encode", "denoise", "decode", "peak memory"]
    assert all(re.match(r"[\d.]", cell) for row in rows for cell in row[1:])
    assert evaluate("document.querySelectorAll('b').length") == 0
    evaluate(
        "document.getElementById('ask').elements.key.value = 'another'; "
        "document.getElementById('ask').requestSubmit()"
    )
    until("document.getElementById('state').textContent === 'the API key is wrong'")
