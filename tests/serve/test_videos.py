"""OpenAI's videos API, with its own client."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import av
import openai
import pytest

pytestmark = [
    pytest.mark.long,
    # the client is of a service that has ended; other servers have the same interface
    pytest.mark.filterwarnings("ignore:The Sora API"),
]


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory, module_serving: Any) -> Iterator[Any]:
    """A server of a small Wan, whose videos have 8 frames a second, and of the small FLUX."""
    folder = tmp_path_factory.mktemp("videos")
    budgets = ("--vram", "8M", "--ram", "8G", "--device", "sim")
    with module_serving(folder, names=("wan-tiny", "flux-tiny"), budgets=budgets) as server:
        yield server


@pytest.fixture
def client(videos: Any) -> openai.OpenAI:
    key = videos.client.headers["Authorization"].removeprefix("Bearer ")
    return openai.OpenAI(base_url=f"{videos.url}/v1", api_key=key, max_retries=0, timeout=300)


@pytest.mark.sweep("more")
def test_a_video_is_made_listed_downloaded_and_deleted(client: openai.OpenAI) -> None:
    extra = {"steps": 2, "seed": 3}
    video = client.videos.create_and_poll(
        prompt="a boat", seconds="1", size="32x48", poll_interval_ms=200, extra_body=extra
    )
    assert (video.status, video.progress, video.error) == ("completed", 100, None)
    assert (video.model, video.prompt, video.size) == ("wan-tiny", "a boat", "32x48")
    assert video.seconds == "1.125", "8 frames would be wanted, and Wan takes 4 k + 1"
    content = client.videos.download_content(video.id).read()
    with av.open(io.BytesIO(content)) as container:
        (stream,) = container.streams.video
        frames = [frame.to_image().size for frame in container.decode(stream)]
        assert (frames, float(stream.average_rate or 0)) == ([(32, 48)] * 9, 8.0)
    second_video = client.videos.create_and_poll(
        prompt="a boat",
        size="32x48",
        poll_interval_ms=200,
        extra_body={**extra, "frames": 9},
    )
    assert client.videos.download_content(second_video.id).read() == content, (
        "the same frames and bytes"
    )
    assert [entry.id for entry in client.videos.list(limit=1)] == [second_video.id, video.id]
    assert client.videos.delete(video.id).deleted
    assert [entry.id for entry in client.videos.list(order="asc")] == [second_video.id]
    with pytest.raises(openai.NotFoundError):
        client.videos.retrieve(video.id)


@pytest.mark.sweep("more")
def test_what_is_no_video_is_refused_with_where_to_send_it(
    videos: Any, client: openai.OpenAI
) -> None:
    picture = client.images.generate(prompt="a", extra_body={"steps": 2}).data or []
    assert len(picture) == 1, "without a model it is the first that makes pictures"
    with pytest.raises(openai.NotFoundError, match="send it to /v1/videos"):
        client.images.generate(prompt="a", model="wan-tiny")
    fields: Any = {"prompt": "a", "model": "flux-tiny"}
    with pytest.raises(openai.NotFoundError, match="send it to /v1/images/generations"):
        client.videos.create(**fields)
    for seconds, text in (("soon", "is not a number"), ("0", "above 0"), ("1e99", "is not below")):
        fields = {"prompt": "a", "seconds": seconds}
        with pytest.raises(openai.UnprocessableEntityError, match=text):
            client.videos.create(**fields)
    with pytest.raises(openai.UnprocessableEntityError, match="has the length too"):
        client.videos.create(prompt="a", seconds="4", extra_body={"frames": 5})
    job = videos.client.post("/v1/jobs", json={"prompt": "a", "steps": 2}).json()["id"]
    with pytest.raises(openai.NotFoundError, match="there is no video"):
        client.videos.retrieve(job)
