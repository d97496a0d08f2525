"""Downloads from a hub on loopback, by huggingface_hub's own client: what a user reads when one
works, and when it does not."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hub_server import LIMITED, MEMBER, VISITOR, Hub, Repository, connect
from huggingface_hub import constants
from original_layouts import by_role, write_gguf
from PIL import Image
from safetensors.torch import load, save

import graphrun as package
from graphrun.cli.downloads import download_all, required_downloads
from graphrun.errors import GraphError
from graphrun.modules.build import build
from graphrun.modules.hub import snapshot
from graphrun.modules.needs import find_missing

SHAPES = Path(__file__).parents[2] / "graphs" / "shapes"
MAIN, OLD = "a" * 40, "b" * 40
LARGE = "diffusion_pytorch_model.safetensors"
Cli = Callable[..., tuple[int, str, str]]


def whole() -> dict[str, bytes]:
    return {
        path.relative_to(SHAPES).as_posix(): path.read_bytes()
        for path in SHAPES.rglob("*.*")
        if path.is_file()
    }


def pickled() -> dict[str, bytes]:
    return {path.replace(".safetensors", ".bin"): content for path, content in whole().items()}


def sharded() -> dict[str, bytes]:
    """The files of `whole`, the transformer's weights in two files and an index."""
    files, folder = whole(), "transformer"
    tensors = load(files.pop(f"{folder}/{LARGE}"))
    names = sorted(tensors)
    places = dict[str, str]()
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = LARGE.replace(".safetensors", f"-{number:05}-of-00002.safetensors")
        files[f"{folder}/{file}"] = save({name: tensors[name] for name in part})
        places |= dict.fromkeys(part, file)
    index = json.dumps({"metadata": {}, "weight_map": places})
    return {**files, f"{folder}/{LARGE}.index.json": index.encode()}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    old = {**whole(), "vae/config.json": whole()["vae/config.json"] + b"\n"}
    shapes = Repository({MAIN: whole(), OLD: old}, {"main": MAIN, "v1": OLD})
    gated = Repository(
        {MAIN: whole()},
        {"main": MAIN},
        "auto",
        {"license": "other", "license_name": "some-non-commercial-license"},
    )
    binary = Repository({MAIN: pickled()}, {"main": MAIN})
    shards = Repository({MAIN: sharded()}, {"main": MAIN})
    repositories = {"org/shapes": shapes, "org/gated": gated, "org/binary": binary}
    with Hub({**repositories, "org/shards": shards}) as served:
        connect(served, tmp_path / "hub", monkeypatch)
        yield served


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client goes on at once after a broken connection, and writes small pieces."""
    monkeypatch.setattr("huggingface_hub.file_download.time", SimpleNamespace(sleep=lambda _: None))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)


def from_hub(source: str) -> Any:
    return package.load("shapes", source=source)


def files(tmp_path: Path) -> list[Path]:
    return [
        path for path in (tmp_path / "hub").rglob("*") if path.is_file() and "models--" in str(path)
    ]


NONE = (
    "there is no such repository, or it is private, and no such folder here; check the name, or "
    "log in: hf auth login"
)
GATED = "it is gated; accept its licence on {hub}/org/gated, then log in: hf auth login"
CLOSED = (
    "it is gated, and the account in use has no access; ask for it on {hub}/org/gated, or take "
    "another account: hf auth login"
)
REFUSED = (
    "it refused the token in use (403); make one that may read it on {hub}/settings/tokens, then: "
    "hf auth login"
)


@pytest.mark.parametrize(
    ("source", "token", "message"),
    [
        ("org/none", "", f"cannot get org/none from the hub: {NONE}"),
        ("org/none", MEMBER, f"cannot get org/none from the hub: {NONE}"),
        ("org/gated", "", f"cannot get org/gated from the hub: {GATED}"),
        ("org/gated", VISITOR, f"cannot get org/gated from the hub: {CLOSED}"),
        ("org/gated", LIMITED, f"cannot get org/gated from the hub: {REFUSED}"),
        ("org/shapes@v9", "", "cannot get org/shapes from the hub: it has no revision v9"),
        ("org/binary", "", "the repository org/binary has no safetensors in text_encoder"),
    ],
)
def test_what_a_run_cannot_get_is_said_before_planning(
    hub: Hub,
    graphrun: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    token: str,
    message: str,
) -> None:
    """After at most two requests, with the line of the graph; nothing is downloaded."""
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr("graphrun.api.estimate", None)
    code, output, err = graphrun(
        "run", "shapes", "--device", "sim", "--vram", "4M", "--source", source
    )
    assert (code, output) == (2, "")
    assert message.format(hub=hub.endpoint, here=tmp_path) in err
    assert "shapes.yaml:" in err
    assert len(hub.requests) <= 2
    assert not files(tmp_path)


def test_a_full_disk_is_said_before_planning(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    with pytest.raises(
        GraphError,
        match=(
            r"5\.\d\d MiB are to be downloaded, and .*/hub has 1.00 MiB free: make room, or name "
            r"a folder"
        ),
    ):
        required_downloads(from_hub("org/shapes"), None)
    assert not files(tmp_path)


def test_a_licence_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", MEMBER)
    lines = list[str]()
    required_downloads(from_hub("org/gated"), lines.append)
    assert lines[0].startswith("org/gated at aaaaaaaa: 5.")
    assert lines[0].endswith(" files to download, licence some-non-commercial-license")


@pytest.mark.parametrize(
    ("offline", "message"),
    [
        (
            True,
            "HF_HUB_OFFLINE is set, and the hub's cache does not have it; unset it, or give a "
            "folder: none is here by this name",
        ),
        (False, "without a network, give a folder"),
    ],
)
def test_without_a_network(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, offline: bool, message: str
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # discard: nothing listens
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(GraphError, match=message):
        required_downloads(from_hub("org/shapes"), None)


def test_what_is_missing_is_downloaded_once(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large files come from another host, which is not told the token (the server asserts it)."""
    monkeypatch.setenv("HF_TOKEN", MEMBER)
    graph, lines = from_hub("org/shapes"), list[str]()
    download_all(required_downloads(graph, lines.append), lines.append)
    assert len(lines) == 1
    assert lines[0].startswith("org/shapes at aaaaaaaa: ")
    snapshot_folder = tmp_path / "hub/models--org--shapes/snapshots" / MAIN
    for path, content in whole().items():
        if path != "model_index.json":
            assert (snapshot_folder / path).read_bytes() == content
    request_count = len(hub.requests)
    assert find_missing(graph) == required_downloads(graph, None) == []
    assert len(hub.requests) == request_count


def test_a_connection_that_breaks_twice_goes_on_where_it_broke(
    hub: Hub, tmp_path: Path, impatient: None
) -> None:
    hub.breaks["model.safetensors"] = 2
    download_all(required_downloads(from_hub("org/shapes"), None), None)
    ranges = [
        byte_range
        for method, path, byte_range in hub.requests
        if path.endswith("model.safetensors") and byte_range
    ]
    assert len(ranges) == 2
    assert all(
        int(byte_range.removeprefix("bytes=").removesuffix("-")) >= 100_000 for byte_range in ranges
    )
    for name in ("text_encoder", "text_encoder_2"):
        file = tmp_path / "hub/models--org--shapes/snapshots" / MAIN / name / "model.safetensors"
        assert file.read_bytes() == whole()[f"{name}/model.safetensors"]


def test_a_download_that_failed_goes_on_with_the_files_that_are_missing(
    hub: Hub, tmp_path: Path, impatient: None
) -> None:
    """Which small files came before the failure is a matter of threads: those that did are not
    asked for again."""
    hub.breaks[LARGE] = 10**6
    graph = from_hub("org/shapes")
    with pytest.raises(
        GraphError,
        match="from the hub: peer closed .*; the same command continues with what is missing",
    ):
        download_all(required_downloads(graph, None), None)
    folder = tmp_path / "hub/models--org--shapes/snapshots" / MAIN
    paths = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    hub.breaks.clear()
    hub.requests.clear()
    lines = list[str]()
    download_all(required_downloads(graph, lines.append), None)
    queries = [
        path
        for method, path, _ in hub.requests
        if method == "GET" and f"/{MAIN}/" in path and "api" not in path
    ]
    gets = {path.partition(f"/{MAIN}/")[2] for path in queries}
    assert gets >= {f"transformer/{LARGE}", f"vae/{LARGE}"}
    assert not gets & paths
    assert f" in {len(gets)} files to download" in lines[0]
    assert find_missing(graph) == []


def test_files_with_a_wrong_hash_are_deleted(hub: Hub, tmp_path: Path) -> None:
    hub.wrong.add(LARGE)
    graph, text = (
        from_hub("org/shapes"),
        "2 files of org/shapes are not what the hub says, and are deleted: SHA-256 is "
        "[0-9a-f]{64} instead of [0-9a-f]{64}; run",
    )
    with pytest.raises(GraphError, match=text):
        download_all(required_downloads(graph, None), None)
    hub.wrong.clear()
    download_all(required_downloads(graph, None), None)
    for name in ("transformer", "vae"):
        file = tmp_path / "hub/models--org--shapes/snapshots" / MAIN / name / LARGE
        assert file.read_bytes() == whole()[f"{name}/{LARGE}"]


def test_a_revision_is_the_one_that_is_downloaded(hub: Hub, tmp_path: Path) -> None:
    """And stays when the tag moves."""
    lines = list[str]()
    download_all(required_downloads(from_hub("org/shapes@v1"), lines.append), None)
    assert "org/shapes at bbbbbbbb: " in lines[0]
    assert [path.name for path in (tmp_path / "hub/models--org--shapes/snapshots").iterdir()] == [
        OLD
    ]
    hub.repositories["org/shapes"].revisions["v1"] = MAIN
    assert (
        find_missing(from_hub("org/shapes@v1")) == find_missing(from_hub(f"org/shapes@{OLD}")) == []
    )


def test_the_progress_of_a_download_ends_with_all_bytes(hub: Hub) -> None:
    reports = list[tuple[str, int, int]]()
    snapshot(
        "org/shapes", None, ["*.safetensors"], [], progress=lambda *report: reports.append(report)
    )
    nbytes = sum(len(content) for path, content in whole().items() if path.endswith(".safetensors"))
    assert ("downloading", nbytes, nbytes) in reports
    assert reports[-1][0] == "checking"
    assert all(count <= total <= nbytes for _, count, total in reports)


@pytest.mark.sweep("shapes")
def test_a_run_from_the_hub(hub: Hub, tmp_path: Path) -> None:
    """The command itself, with the endpoint in the environment; the second run needs no hub."""
    hub.breaks[LARGE] = 2
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0",
    }
    command = [
        sys.executable,
        "-m",
        "graphrun",
        "run",
        "shapes",
        "--source",
        "org/shapes@v1",
        "--device",
        "sim",
        "--vram",
        "4M",
    ]
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert "org/shapes at bbbbbbbb: " in process.stderr
    assert "the run stayed within the planned memory" in process.stdout
    default_process = subprocess.run(
        [*command[:5], *command[7:], "-o", "own.png"], cwd=tmp_path, capture_output=True, text=True
    )
    second = subprocess.run(
        [*command, "-o", "again.png"],
        cwd=tmp_path,
        env={**environment, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert (default_process.returncode, second.returncode) == (0, 0), second.stderr
    from PIL import Image

    pictures = [
        Image.open(tmp_path / name).tobytes() for name in ("out/shapes.png", "own.png", "again.png")
    ]
    assert pictures[0] == pictures[1] == pictures[2]


@pytest.mark.sweep("more")
@pytest.mark.long
def test_a_published_gguf_file_is_planned_before_it_is_here_and_again_by_its_header(
    hub: Hub, graphrun: Cli, tmp_path: Path
) -> None:
    """Before: the bytes expected from its mix. The file has other types; the run is as planned."""
    shapes = package.load("shapes")
    file = write_gguf(
        tmp_path / "shapes-Q8_0.gguf",
        dict(build(shapes.component("transformer"), shapes).state_dict()),
        by_role,
    )
    files_of_hub = {"shapes-Q8_0.gguf": file.read_bytes()}
    hub.repositories["org/gguf"] = Repository({MAIN: files_of_hub}, {"main": MAIN})
    text = (SHAPES.parent / "shapes.yaml").read_text()
    checkpoints = "checkpoints: {Q8_0: {source: org/gguf/shapes-Q8_0.gguf}}"
    text = text.replace("precision: [bfloat16, int8, nf4, fp8]", checkpoints)
    graph = tmp_path / "graph.yaml"
    graph.write_text(text.replace("source: ./shapes", f"source: {SHAPES}"))
    options = (
        "--device",
        "sim",
        "--vram",
        "3500K",
        "--ram",
        "8G",
        "--allow",
        "8bit",
        "--keep",
        "transformer",
    )
    code, output, _ = graphrun("plan", str(graph), *options)
    assert code == 0, output
    assert "transformer in Q8_0 from org/gguf/shapes-Q8_0.gguf" in " ".join(output.split())
    assert not hub.requests
    code, output, err = graphrun("run", str(graph), *options, "-o", "a.png")
    assert code == 0, err
    assert "org/gguf at aaaaaaaa" in err
    assert output.count("fits: yes.") == 2, "planned again by the header"
    assert "as planned" in output
    code, output, err = graphrun("run", str(graph), *options, "-o", "b.png")
    assert (code, output.count("fits: yes.")) == (0, 1)
    (tmp_path / "list.jsonl").write_text("{}\n")
    shutil.rmtree(tmp_path / "hub")
    code, _, err = graphrun(
        "run", str(graph), *options, "--inputs", "list.jsonl", "-o", "list/{line}.png"
    )
    assert code == 0, err
    assert err.count("to download") == 1
    names = ("a.png", "b.png", "list/1.png")
    assert len({Image.open(tmp_path / name).tobytes() for name in names}) == 1


def header_bytes(hub: Hub) -> int:
    """The bytes that were sent of weight files. Asserts that only parts of them were asked for."""
    weights = [request for request in hub.requests if request[1].endswith(".safetensors")]
    assert all(byte_range for _, _, byte_range in weights)
    return sum(nbytes for path, nbytes in hub.sent_bytes.items() if path.endswith(".safetensors"))


@pytest.mark.sweep("more")
def test_a_repository_with_shards_is_imported_and_planned_without_them(
    hub: Hub, graphrun: Cli, tmp_path: Path
) -> None:
    graph = tmp_path / "graph.yaml"
    code, _, err = graphrun("import", "org/shards", "-o", str(graph))
    assert code == 0, err
    code, _, err = graphrun("plan", str(graph), "--vram", "1G", "--hardware", "rtx4060")
    assert code == 0, err
    assert 0 < header_bytes(hub) < 500_000
    assert "source: org/shards" in graph.read_text()


@pytest.mark.sweep("more")
@pytest.mark.long
def test_what_fits_of_a_repository_needs_its_configurations_and_headers(
    hub: Hub, graphrun: Cli, tmp_path: Path
) -> None:
    code, output, err = graphrun("fit", "org/shapes", "--card", "rtx4060", "--ram", "8G", "--json")
    assert code == 0, err
    (choice,) = json.loads(output)["choices"]
    assert choice["download_bytes"] > 5e6
    for command in choice["command"].split(" && "):
        code, _, err = graphrun(*shlex.split(command)[1:])
        assert code == 0, err
    assert 0 < header_bytes(hub) < 500_000
