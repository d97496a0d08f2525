"""ComfyUI's node for servers: the server's own pictures, progress, previews and readable errors.

Here and not in tests/comfyui, because the tests of a session share one server.
"""

from __future__ import annotations

import base64
import io
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comfy_standin
import numpy as np
import pytest
import torch
from PIL import Image

from graphrun.comfyui import nodes
from graphrun.comfyui.nodes import FIRST_MODEL, ModelNames, draw_on_server, server_client
from graphrun.comfyui.server import ServerClient, ServerRefusal
from graphrun.errors import InputError

KEY = "a key for tests"
VALUES = {**comfy_standin.VALUES, "key": KEY, "model": "flux-tiny", "pictures": 1}


@pytest.fixture
def comfy_ui(monkeypatch: pytest.MonkeyPatch) -> Iterator[comfy_standin.ComfyUI]:
    menu = ModelNames()
    monkeypatch.setattr(nodes, "MODELS", menu)
    yield comfy_standin.install(monkeypatch)
    menu.wait()


def draw(server: Any, **values: Any) -> tuple[Any, str]:
    with torch.inference_mode():
        return draw_on_server(**{"url": server.url, **VALUES, **values})


def plain(server: Any, path: str = "/v1/images/generations", **fields: Any) -> list[Any]:
    """The pictures of a plain client, as pixels."""
    answer = server.client.post(path, **fields)
    assert answer.status_code == 200, answer.text
    contents = (base64.b64decode(item["b64_json"]) for item in answer.json()["data"])
    return [np.asarray(Image.open(io.BytesIO(data)), dtype=np.float32) / 255 for data in contents]


@pytest.mark.sweep("more")
@pytest.mark.long
def test_pictures_progress_and_previews(server: Any, comfy_ui: comfy_standin.ComfyUI) -> None:
    values = {"width": 32, "height": 48, "steps": 24, "pictures": 2, "inputs": "guidance_scale=2"}
    prompt = "a boat that no other test draws"  # so that it is not in the cache
    images, figures = draw(server, prompt=prompt, **values)
    body = {"prompt": prompt, "size": "32x48", "steps": 24, "seed": 7, "n": 2}
    expected = plain(server, json={**body, "guidance_scale": 2})
    assert images.shape == (2, 48, 32, 3)
    assert np.array_equal(images.numpy(), np.stack(expected))
    lines = figures.splitlines()
    assert lines[0] == "the run stayed within the planned memory"
    assert [line.partition(":")[0] for line in lines[1:]] == [
        "encode",
        "denoise",
        "decode",
        "peak memory",
        "seeds",
    ]
    assert lines[-1] == "seeds: 7, 8"
    progress = [(value, total) for value, total, _ in comfy_ui.updates if total == 48]
    assert progress == sorted(progress)
    assert {value for value, _ in progress} >= {48}
    assert len({value for value, _ in progress}) > 3
    previews = [preview for _, _, preview in comfy_ui.updates if preview is not None]
    assert previews
    assert all(kind == "JPEG" and picture.mode == "RGB" for kind, picture, _ in previews)


@pytest.mark.long
def test_the_first_model_and_its_own_sizes_are_the_default(
    server: Any, comfy_ui: comfy_standin.ComfyUI
) -> None:
    images, _ = draw(server, model=FIRST_MODEL)
    (expected,) = plain(server, json={"prompt": "a boat", "seed": 7})
    assert np.array_equal(images[0].numpy(), expected)
    assert nodes.MODELS.wait() == ("flux-tiny",), "the menu has the models of this server"
    assert nodes.model_names() == [FIRST_MODEL, "flux-tiny"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": "sdxl"}, "there is no model 'sdxl'; models are flux-tiny"),
        (
            {"key": "another"},
            "{url}: the API key in Authorization is wrong; paste a key of the server in key",
        ),
        ({"key": ""}, "{url}: an API key is needed: Authorization: Bearer KEY; paste a key"),
        ({"width": 30}, "30 is not a multiple of 16; use 16 or 32"),
        ({"negative_prompt": "x"}, "flux-tiny has no input 'negative_prompt'"),
        ({"inputs": "guidance=2\nstep=3"}, "flux-tiny has no input 'step'; did you mean 'steps'?"),
        ({"steps": 201}, "201 steps, and this server accepts 200"),
        ({"image": torch.zeros(1, 8, 8, 3)}, "flux-tiny takes no file 'image'"),
    ],
)
def test_errors_of_the_server_are_readable(
    server: Any, comfy_ui: comfy_standin.ComfyUI, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ServerRefusal) as refusal:
        draw(server, **values)
    assert message.format(url=server.url) in str(refusal.value)


@pytest.mark.long
def test_what_does_not_fit_comes_with_what_helps(
    server: Any, comfy_ui: comfy_standin.ComfyUI
) -> None:
    with pytest.raises(ServerRefusal) as refusal:
        draw(server, width=512, height=512, steps=2)
    message = str(refusal.value)
    assert re.match(
        r"flux-tiny: size=\d+x\d+.* would fit; for size=512x512.* nothing fits", message
    )
    assert ". What helps on the server: " in message


@pytest.mark.sweep("more")
@pytest.mark.long
def test_cancelling_cancels_the_job(server: Any, comfy_ui: comfy_standin.ComfyUI) -> None:
    comfy_ui.interrupt_after = 2
    with pytest.raises(comfy_standin.Interrupted):
        draw(server, steps=200, seed=99)
    (job,) = server.client.get("/v1/jobs", params={"limit": 1}).json()["data"]
    assert job["state"] == "cancelled"
    images, _ = draw(server)
    assert images.shape == (1, 32, 32, 3)


@pytest.mark.sweep("more")
@pytest.mark.long
def test_a_picture_is_sent_as_it_is(
    serving: Any, tmp_path: Path, comfy_ui: comfy_standin.ComfyUI
) -> None:
    budgets = ("--vram", "64M", "--ram", "8G", "--device", "sim")
    image = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(0))
    file = io.BytesIO()
    Image.fromarray((image[0].numpy() * 255).round().astype(np.uint8)).save(file, format="PNG")
    with serving(tmp_path, names=("sdxl-img2img-tiny",), budgets=budgets) as server:
        images, _ = draw(server, model="", image=image, steps=2, negative_prompt="fog")
        fields = {"prompt": "a boat", "steps": 2, "seed": 7, "negative_prompt": "fog"}
        files = {"image": ("a.png", file.getvalue(), "image/png")}
        (expected,) = plain(server, "/v1/images/edits", data=fields, files=files)
        assert np.array_equal(images[0].numpy(), expected)
        with pytest.raises(ServerRefusal, match="takes a picture: send it"):
            draw(server, model="")


def test_no_server_and_no_address(comfy_ui: comfy_standin.ComfyUI) -> None:
    with pytest.raises(ServerRefusal) as refusal:
        draw_on_server(**{"url": "http://127.0.0.1:9", **VALUES})
    assert str(refusal.value).startswith("http://127.0.0.1:9: no graphrun server answers (")
    assert "start one with graphrun serve flux-dev --vram 8G" in str(refusal.value)
    for url in ("127.0.0.1:8000", "file:///etc/passwd", "http://", "http://a:b"):
        with pytest.raises(InputError, match="is not the address of a server; type http://127"):
            ServerClient(url)
    with pytest.raises(InputError, match="key: it has characters that no key has"):
        ServerClient("http://127.0.0.1", "a key\r\nHost: elsewhere")


def test_the_key_of_the_environment_goes_to_its_server_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GRAPHRUN_URL", "https://images.example.com/v1/")
    monkeypatch.setenv("GRAPHRUN_KEY", "secret")
    client = server_client("", "")
    assert (client.url, client._key) == ("https://images.example.com", "secret")
    assert server_client("http://elsewhere", "")._key == ""
    assert server_client("", "mine")._key == "mine"
    monkeypatch.delenv("GRAPHRUN_URL")
    assert server_client("", "").url == "http://127.0.0.1:8000"


def test_the_menu_never_waits_for_a_server() -> None:
    answer = threading.Event()

    class SlowClient(ServerClient):
        def models(self, timeout_seconds: float = 0) -> list[dict[str, Any]]:
            answer.wait(60)
            return [{"id": "flux-dev"}]

    menu = ModelNames()
    assert menu.refresh(SlowClient("http://127.0.0.1:9")) == ()
    assert menu.refresh() == ()
    answer.set()
    assert menu.wait() == ("flux-dev",)
    assert menu.refresh() == ("flux-dev",)
    menu.wait()
