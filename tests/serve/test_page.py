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
        deadline = time.monotonic() + 600
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


def opened(server: Any, evaluate: Evaluate) -> Callable[[str], Any]:
    """Opens the page; returns a function that waits until a script is true, and returns it."""
    evaluate(f"location.href = {server.url + '/'!r}")

    def until(script: str) -> Any:
        return server.until(lambda: evaluate(script))

    until("document.readyState === 'complete' && !!document.getElementById('ask')")
    return until


def send(evaluate: Evaluate, **values: object) -> None:
    """Fills in the form and sends it."""
    evaluate(
        f"for (const [name, value] of Object.entries({json.dumps(values)}))"
        " document.getElementById('ask').elements[name].value = value;"
        "document.getElementById('ask').requestSubmit()"
    )


STATE = "document.getElementById('state').textContent"
GALLERY = (
    "[...document.querySelectorAll('#gallery figure')].map(figure =>"
    " [figure.firstChild.naturalWidth, figure.firstChild.alt, figure.lastChild.textContent,"
    " figure.querySelector('a').download.length > 0])"
)


@pytest.mark.sweep("more")
def test_a_prompt_becomes_pictures_beside_their_figures(server: Any, evaluate: Evaluate) -> None:
    until = opened(server, evaluate)
    evaluate(
        "window.seen = []; new MutationObserver("
        f"() => seen.push({STATE}))"
        ".observe(document.getElementById('state'), {childList: true})"
    )
    send(evaluate, prompt="<b>a</b> lighthouse", key="a key for tests", seed=5, steps=8, n=2)
    until(f"{STATE}.startsWith('done')")
    assert evaluate(STATE) == "done; the run stayed within the planned memory"
    assert [text for text in evaluate("seen") if re.fullmatch(r"denoise: step \d of 8", text)]
    assert evaluate(GALLERY) == [
        [32, "<b>a</b> lighthouse", f"<b>a</b> lighthouse (seed {seed}) Download", True]
        for seed in (5, 6)
    ]
    rows = evaluate(
        "[...document.querySelectorAll('#figures tbody tr')]"
        ".map(row => [...row.cells].map(cell => cell.textContent))"
    )
    assert [row[0] for row in rows] == ["queue", "encode", "denoise", "decode", "peak memory"]
    assert all(re.fullmatch(r"[\d.]+ (ms|s|MiB)", cell) for row in rows for cell in row[1:])
    assert evaluate("document.querySelectorAll('b').length") == 0
    send(evaluate, key="another")
    until(f"{STATE} === 'the API key in Authorization is wrong'")
    assert evaluate("document.getElementById('preview').hidden"), "nothing of the last one"
    assert evaluate("document.getElementById('figures').hidden")
    assert len(evaluate(GALLERY)) == 2, "what was made stays"


@pytest.mark.sweep("more")
def test_the_form_has_what_the_model_takes(
    serving: Any, evaluate: Evaluate, tmp_path: Path
) -> None:
    names = ("flux-tiny", "sdxl-img2img-tiny", "wan-tiny")
    budgets = ("--vram", "16M", "--ram", "8G", "--device", "sim")
    with serving(tmp_path, names=names, budgets=budgets) as server:
        until = opened(server, evaluate)
        field_names = {
            name: evaluate(
                "(form => { form.model.value = '" + name + "';"
                " form.model.dispatchEvent(new Event('change'));"
                " return [...form].filter(field => field.name && field.offsetParent)"
                ".map(field => field.name) })(document.getElementById('ask').elements)"
            )
            for name in names
        }
        common = ["prompt", "model", "size", "seed", "steps", "key"]
        assert [sorted(set(field_names[name]) - set(common)) for name in names] == [
            ["n"],
            ["image", "n", "negative_prompt"],
            ["negative_prompt", "seconds"],
        ]
        send(evaluate, prompt="a boat", key="a key for tests", seconds=1)
        until(f"{STATE}.startsWith('done')")
        until("document.querySelector('#gallery video').videoWidth === 64")
        evaluate(
            "(form => { form.model.value = 'sdxl-img2img-tiny';"
            " form.model.dispatchEvent(new Event('change')); const files = new DataTransfer();"
            " const canvas = Object.assign(document.createElement('canvas'), {width: 128,"
            " height: 128}); return new Promise(ready => canvas.toBlob(blob => {"
            " files.items.add(new File([blob], 'a.png', {type: 'image/png'}));"
            " form.image.files = files.files; ready(); })) })"
            "(document.getElementById('ask').elements)"
        )
        send(evaluate, prompt="a boat", seed=3)
        until(f"{STATE}.startsWith('done') && !!document.querySelector('#gallery img')")
        assert evaluate("document.querySelector('#gallery').firstChild.textContent") == (
            "a boat (seed 3) Download"
        )
