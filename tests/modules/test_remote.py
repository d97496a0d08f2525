"""Weights behind a URL, on file systems of fsspec: what is copied, when, and what a user reads when
a copy fails."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from huggingface_hub import constants

import graphrun as package
from graphrun.cli.downloads import download_all, required_downloads
from graphrun.errors import GraphError
from graphrun.graph.graph import Graph
from graphrun.modules.build import build
from graphrun.modules.remote import place_of
from graphrun.modules.source_files import find_folder

SHAPES = Path(__file__).parents[2] / "graphs" / "shapes"
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
Cli = Callable[..., tuple[int, str, str]]


class CountedFiles(LocalFileSystem):
    """The files of this machine as ``counted://``. Notes which are copied. The copy of one in
    ``broken_names`` fails in the middle, of one in ``short_names`` it ends there."""

    protocol = "counted"
    cachable = False
    copied_names: ClassVar[list[str]] = []
    broken_names: ClassVar[set[str]] = set()
    short_names: ClassVar[set[str]] = set()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("counted://"))

    def get_file(self, rpath: str, lpath: str, callback: Any = None, **_: Any) -> None:
        name, content = "/".join(rpath.split("/")[-2:]), Path(rpath).read_bytes()
        pieces = [content[: len(content) // 2], content[len(content) // 2 :]]
        with open(lpath, "wb") as file:
            for piece in pieces[:1] if name in self.short_names else pieces:
                file.write(piece)
                callback.relative_update(len(piece))
                if name in self.broken_names:
                    raise ConnectionError("the peer left")
        self.copied_names.append(name)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the pipeline that comes with the graph ``shapes``."""
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / "assets"))
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "counted", CountedFiles)
    for notes in (CountedFiles.copied_names, CountedFiles.broken_names, CountedFiles.short_names):
        notes.clear()
    shutil.copytree(SHAPES, tmp_path / "bucket" / "shapes")
    return tmp_path / "bucket" / "shapes"


def from_url(bucket: Path) -> Graph:
    return package.load("shapes", source=f"counted://{bucket}")


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }


def test_what_a_run_needs_is_copied_once(bucket: Path) -> None:
    graph, lines = from_url(bucket), list[str]()
    download_all(required_downloads(graph, lines.append), lines.append)
    assert lines[0] == f"counted://{bucket}/text_encoder: 245.06 KiB in 2 files to download"
    copy = place_of(f"counted://{bucket}")
    needed_names = {name for name in contents(SHAPES) if name != "model_index.json"}
    assert contents(copy) == {name: contents(SHAPES)[name] for name in needed_names}
    assert sorted(CountedFiles.copied_names) == sorted(needed_names)
    assert required_downloads(graph, None) == []
    for name, component in graph.components.items():
        plain = package.load("shapes", source=str(SHAPES))
        tensors = build(plain.components[name], plain).state_dict()
        for key, value in build(component, graph).state_dict().items():
            assert torch.equal(value, tensors[key])
    assert sorted(CountedFiles.copied_names) == sorted(needed_names)


def test_a_file_that_changed_is_copied_again(bucket: Path) -> None:
    component = from_url(bucket).components["transformer"]
    build(component, from_url(bucket))
    (bucket / WEIGHTS).write_bytes((bucket / WEIGHTS).read_bytes())
    build(component, from_url(bucket))
    assert CountedFiles.copied_names.count(WEIGHTS) == 2
    assert len(CountedFiles.copied_names) == 3


def test_a_copy_that_failed_goes_on_with_the_files_that_are_missing(bucket: Path) -> None:
    CountedFiles.broken_names.add(WEIGHTS)
    graph = from_url(bucket)
    with pytest.raises(GraphError, match=r"shapes.yaml:\d+: cannot read .*: the peer left"):
        build(graph.components["transformer"], graph)
    copy = place_of(f"counted://{bucket}")
    assert [*contents(copy)] == ["transformer/config.json"]
    CountedFiles.broken_names.clear()
    build(graph.components["transformer"], graph)
    assert CountedFiles.copied_names == ["transformer/config.json", WEIGHTS]


def test_a_copy_that_ends_early_is_not_used(bucket: Path) -> None:
    CountedFiles.short_names.add(WEIGHTS)
    graph = from_url(bucket)
    with pytest.raises(GraphError, match=r"ended after [\d,]+ of [\d,]+ bytes; run the command"):
        build(graph.components["transformer"], graph)
    assert WEIGHTS not in contents(place_of(f"counted://{bucket}"))


def test_a_url_of_one_file(bucket: Path, tmp_path: Path) -> None:
    place = find_folder(f"counted://{bucket}/{WEIGHTS}", ("*.json",), "")
    assert place == place_of(f"counted://{bucket}/{WEIGHTS}")
    assert [*contents(tmp_path / "assets").values()] == [(SHAPES / WEIGHTS).read_bytes()]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("counted:///none", "there is no counted:///none/text_encoder"),
        ("nope://bucket", "cannot read nope://bucket/text_encoder: Protocol not known: nope"),
        ("adl://bucket", "cannot read adl://bucket/text_encoder: .*[Ii]nstall"),
        ("counted:///a/../b", "is not a URL of a folder or file: it has . or .."),
    ],
)
def test_what_cannot_be_copied_is_said_before_planning(
    bucket: Path, graphrun: Cli, url: str, message: str
) -> None:
    code, screen, err = graphrun(
        "run", "shapes", "--source", url, "--device", "sim", "--vram", "8M"
    )
    assert code == 2
    assert re.search(message, " ".join(err.split())), err
    assert "fits" not in screen


def test_only_the_caller_names_a_url(tmp_path: Path) -> None:
    text = (SHAPES.parent / "shapes.yaml").read_text()
    file = tmp_path / "shapes.yaml"
    file.write_text(re.sub("(?m)^source: .*", "source: s3://bucket/shapes", text))
    with pytest.raises(GraphError, match=r"shapes.yaml:\d+: source: is a URL, which only you can"):
        package.load(file)
