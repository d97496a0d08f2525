"""Pictures and videos as files: numbered so that frames sort, or one moving picture."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from graphrun.report.planfile import save_outputs


def frames(count: int) -> list[Image.Image]:
    return [Image.new("RGB", (8, 8), (20 * n, 0, 0)) for n in range(count)]


def test_the_frames_of_a_video_sort_as_they_follow(tmp_path: Path) -> None:
    written = save_outputs({"image": frames(12)}, tmp_path / "a.png")
    assert [path.name for path in written[:3]] == ["a.png", "a-01.png", "a-02.png"]
    assert [path.name for path in written[1:]] == sorted(path.name for path in written[1:])
    assert Image.open(written[11]).getpixel((0, 0)) == (220, 0, 0)


def test_several_videos_are_all_written(tmp_path: Path) -> None:
    assert len(save_outputs({"image": [frames(2), frames(3)]}, tmp_path / "a.png")) == 5


def test_a_gif_holds_a_whole_video(tmp_path: Path) -> None:
    (written,) = save_outputs({"image": frames(5)}, tmp_path / "a.gif")
    with Image.open(written) as moving:
        assert moving.n_frames == 5
    assert [path.name for path in save_outputs({"image": [frames(2), frames(3)]}, tmp_path / "b.gif")] == ["b.gif", "b-1.gif"]
    (still,) = save_outputs({"image": frames(1)[0]}, tmp_path / "c.gif")
    assert Image.open(still).size == (8, 8)
