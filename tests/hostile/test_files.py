"""Malformed and hostile files are refused: a typed error that names the file, soon, with nothing
written."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import yaml
from PIL import Image

from graphrun.batch.journal import Journal
from graphrun.cluster.machines import read_cluster
from graphrun.disk_store import DATABASE, Store
from graphrun.errors import GraphError, InputError, PlanError
from graphrun.files import write_whole
from graphrun.graph.loading import load
from graphrun.graph.media import accept
from graphrun.report import plan_files

GRAPHS = Path(__file__).parents[2] / "graphs"
Cli = Callable[..., tuple[int, str, str]]
BRACKETS, DIGITS = "[" * 100_000, "9" * 5_000


@pytest.fixture(autouse=True)
def seconds() -> Iterator[None]:
    """Ends a test that waits for a named pipe, or reads a device without end."""

    def ended(_: int, __: FrameType | None) -> None:
        raise AssertionError("still reading after five minutes")

    previous_handler = signal.signal(signal.SIGALRM, ended)
    signal.alarm(300)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous_handler)


def flux(folder: Path, *changes: tuple[str, str]) -> Path:
    """flux-tiny in ``folder``, with texts replaced."""
    text = (GRAPHS / "flux-tiny.yaml").read_text().replace("configs/", f"{GRAPHS}/configs/")
    text = text.replace("tokenizers/", f"{GRAPHS}/tokenizers/")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    path = folder / "graph.yaml"
    path.write_text(text)
    return path


def many(count: int, line: str) -> str:
    return "".join(line.format(n) for n in range(count))


VAE, TOKENIZER, NAME = (
    f"{GRAPHS}/configs/tiny-flux-vae.json",
    f"{GRAPHS}/tokenizers/bytes.json",
    "name: flux-tiny",
)
COMPONENT = "  k{}: {{class: diffusers.AutoencoderKL, config: {{}}, dtype: bfloat16}}\n"
STAGE = "  s{}: {{op: encode_prompt, uses: [text_encoder], with: {{prompt: $prompt}}}}\n"
BAD_GRAPHS = {
    "40,000 unknown keys": (
        ("graphrun: 1\n", "graphrun: 1\n" + many(40_000, "k{}: 1\n")),
        "20,000 are accepted",
    ),
    "3,000 unknown keys": (
        ("graphrun: 1\n", "graphrun: 1\n" + many(3_000, "k{}: 1\n")),
        "unknown key 'k99'",
    ),
    "1,500 unused components": (
        ("components:\n", "components:\n" + many(1_500, COMPONENT)),
        "no stage uses it",
    ),
    "2,000 stages": (("stages:\n", "stages:\n" + many(2_000, STAGE)), "entries or more"),
    "200 stages": (
        ("stages:\n", "stages:\n" + many(200, STAGE)),
        "203 stages, and at most 16 are accepted",
    ),
    "nested lists": ((NAME, f"{NAME}\nx: {BRACKETS}"), "nested more than 100 deep"),
    "nested aliases": (
        (
            NAME,
            f"{NAME}\nx0: &x0 []\n"
            + "".join(f"x{n}: &x{n} [*x{n - 1}]\n" for n in range(1, 2_000)),
        ),
        "nested",
    ),
    "digits": (("default: 128, mult", f"default: {DIGITS}, mult"), "an integer has 5,000 digits"),
    "hexadecimal digits": (
        ("default: 128, mult", f"default: 0x{DIGITS}, mult"),
        "an integer has 5,002 digits",
    ),
    "timestamp": ((NAME, "name: !!timestamp x"), "the tag"),
    "empty int": ((NAME, 'name: !!int ""'), "the tag"),
    "half a pair": (("a lighthouse at dusk", '"\\ud800"'), "half of a surrogate pair"),
    "long file": ((f"file: {TOKENIZER}", f"file: {'a' * 5_000}"), "no such file"),
    "long config": ((VAE, "a" * 5_000), "File name too long"),
    "long source": (("dtype: bfloat16}", f"dtype: bfloat16, source: ./{'a' * 5_000}}}"), ""),
    "no such user": (("dtype: bfloat16}", "dtype: bfloat16, source: ~nobody-here/x}"), ""),
    "a revision that is a path": (
        ("dtype: bfloat16}", "dtype: bfloat16, source: owner/name@../../x}"),
        "is not a repository",
    ),
    "a repository that is a path": (
        ("dtype: bfloat16}", "dtype: bfloat16, source: owner/name/../../x}"),
        "is not a repository",
    ),
    "large reserve": ((NAME, f"{NAME}\ndirectives: {{reserve: {'9' * 400}G}}"), ""),
    "endless fps": ((NAME, f"{NAME}\nfps: .inf"), "too large"),
    "tiny fps": ((NAME, f"{NAME}\nfps: 1.0e-320"), "too small"),
}


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize(("change", "message"), BAD_GRAPHS.values(), ids=BAD_GRAPHS)
def test_a_graph(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    path = flux(tmp_path, change)
    if message:
        with pytest.raises(GraphError) as error:
            load(path)
        assert message in str(error.value)
        assert str(path) in str(error.value)
        assert str(error.value).count("\n") < 100
    else:
        load(path)  # of another form, and no error of a graph


LONG = {
    "a plain scalar": f"name: {'x' * 2**20}\n",
    "words": f"name: {'x ' * 2**19}\n",
    "lines": "name: >\n" + "  x\n" * 2**18,
    "comments": "# x\n" * 2**18 + "#",
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
@pytest.mark.parametrize("reader", [load, read_cluster])
def test_a_long_file_is_refused_before_it_is_parsed(
    text: str, reader: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyYAML takes over a second per MiB."""
    parsed: list[int] = []
    scanned = yaml.reader.Reader.forward
    monkeypatch.setattr(
        yaml.reader.Reader, "forward", lambda self, n=1: (parsed.append(n), scanned(self, n))[1]
    )
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(
        GraphError,
        match=r"a.yaml: it has 1,048,\d\d\d bytes, .* 1,048,576 .* --limit yaml_bytes=1048",
    ):
        reader(tmp_path / "a.yaml")
    assert parsed == []
    (tmp_path / "a.yaml").write_text("name: x\n")
    with pytest.raises(GraphError):
        reader(tmp_path / "a.yaml")
    assert parsed, "the parser is counted"


def test_a_message_never_repeats_a_long_text(tmp_path: Path) -> None:
    long = "x" * 2**17
    for line in (
        f"name: !{long} a",
        f"? {long}\n: a",
        f"? {long}\n: a\n? {long}\n: a",
        f"name: *{long}",
        f"graphrun: {long}",
    ):
        (tmp_path / "a.yaml").write_text(f"{line}\n")
        with pytest.raises(GraphError) as error:
            load(tmp_path / "a.yaml")
        assert max(map(len, str(error.value).splitlines())) < 3_000


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "socket"])
@pytest.mark.parametrize("old", [VAE, TOKENIZER])
def test_a_file_that_is_none(old: str, kind: str, tmp_path: Path) -> None:
    name = special(tmp_path, kind)
    with pytest.raises(GraphError, match=r"not a regular file|no such file|No such device"):
        load(flux(tmp_path, (old, name)))


def special(folder: Path, kind: str) -> str:
    if kind == "pipe":
        os.mkfifo(folder / "pipe")
        return str(folder / "pipe")
    if kind == "socket":
        import socket

        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(folder / "s"))
        return str(folder / "s")
    return kind


@pytest.mark.parametrize("kind", ["image", "mask", "video", "audio"])
@pytest.mark.parametrize("special_kind", ["pipe", "/dev/zero"])
def test_media_that_are_no_files(kind: str, special_kind: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a regular file"):
        accept(kind, special(tmp_path, special_kind))


def test_large_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from graphrun.limits import LIMITS, raise_limits

    Image.new("1", (30_000, 2_000)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"30000 x 2000 pixels.*graphrun --limit pixels=60000000"):
        accept("image", str(tmp_path / "a.png"))
    monkeypatch.setattr(LIMITS, "film_pixels", 3 * 64)
    frames = [Image.effect_noise((8, 8), n + 9.0) for n in range(4)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    with pytest.raises(ValueError, match="its first 4 frames have 256 pixels"):
        accept("video", str(tmp_path / "a.gif"))
    raise_limits(film_pixels=256)
    assert "4" in accept("video", str(tmp_path / "a.gif")).size_text


BAD_JSON = {
    "nested lists": BRACKETS,
    "nested mappings": '{"a":' * 100_000,
    "nested, well formed": "[" * 500 + "]" * 500,
    "digits": f'{{"graphrun": {DIGITS}}}',
    "a few digits too many": f'{{"graphrun": [{{"a": -{10**20}}}]}}',
    "endless": '{"graphrun": 1e999}',
    "half a pair": '{"graphrun": "\\ud800"}',
    "no UTF-8": "\udcff",
}


@pytest.mark.parametrize("text", BAD_JSON.values(), ids=BAD_JSON)
@pytest.mark.parametrize("command", ["check", "plan", "report", "run"])
def test_a_plan(graphrun: Cli, tmp_path: Path, text: str, command: str) -> None:
    (tmp_path / "plan.json").write_text(text, errors="surrogateescape")
    code, output, err = graphrun(command, "plan.json")
    assert (code, output, len(err.splitlines())) == (2, "", 1)
    assert err.startswith("graphrun: plan.json")
    assert os.listdir(tmp_path) == ["plan.json"]


@pytest.mark.parametrize(
    "text",
    ['{"prompt": "\\ud800"}', BRACKETS, f'{{"seed": {DIGITS}}}', '{"seed": 1e999}', '["\\udfff"]'],
)
def test_a_line_of_requests(text: str, graphrun: Cli, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(f'{text}\n{{"prompt": "a"}}\n')
    shared = ("--device", "sim", "--vram", "6M", "--inputs", "p.jsonl", "--strict")
    code, output, err = graphrun("run", str(GRAPHS / "flux-tiny.yaml"), *shared)
    assert (code, output) == (2, "")
    assert "p.jsonl:1: is not JSON: " in err


def test_a_file_of_requests_that_is_none(graphrun: Cli, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.jsonl")
    code, _, err = graphrun(
        "run",
        str(GRAPHS / "flux-tiny.yaml"),
        "--device",
        "sim",
        "--vram",
        "6M",
        "--inputs",
        "p.jsonl",
    )
    assert (code, err.strip()) == (2, "graphrun: p.jsonl: cannot be read: it is not a regular file")


def test_a_prompt_that_is_no_text(graphrun: Cli) -> None:
    shared = ("--device", "sim", "--vram", "6M")
    code, output, err = graphrun(
        "run", str(GRAPHS / "flux-tiny.yaml"), *shared, "--prompt", os.fsdecode(b"a\xff")
    )
    assert (code, output) == (2, "")
    assert "input 'prompt': character 2 is half of a surrogate pair or not UTF-8" in err


def test_limits_are_raised_by_the_caller(
    graphrun: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from graphrun.limits import LIMITS, Limits

    for name in Limits.__slots__:
        monkeypatch.setattr(LIMITS, name, getattr(LIMITS, name))  # restored at the end
    path = str(flux(tmp_path, ("stages:\n", "stages:\n" + many(20, STAGE))))
    _, _, err = graphrun("estimate", path)
    assert (
        "it has 23 stages, and at most 16 are accepted; if this is meant: graphrun --limit "
        "stages=23 ..." in err
    )
    code, _, err = graphrun("--limit", "stages=23", "estimate", path)
    assert (code, "nothing reads its outputs" in err) == (2, True)
    for wrong in ("stages", "stages=x", "stages=0", "nonsense=1", f"stages={DIGITS}"):
        code, output, err = graphrun("--limit", wrong, "estimate", path)
        assert (code, output, err.startswith("graphrun: ")) == (2, "", True)


def test_umask(tmp_path: Path) -> None:
    previous_mask = os.umask(0o077)
    try:
        write_whole(tmp_path / "a", lambda temporary: temporary.write_text("a"))
    finally:
        os.umask(previous_mask)
    assert oct((tmp_path / "a").stat().st_mode & 0o777) == "0o600"


def test_rows_of_odd_types(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for key in ("a", "b", "c"):
        store.put(key, b"data", graph="g", stage="s", inputs_text="x")
    with sqlite3.connect(tmp_path / DATABASE) as rows:
        rows.execute("UPDATE entries SET nbytes = 'many', about = x'00ff' WHERE key = 'a'")
        rows.execute("UPDATE contents SET data = 'text' WHERE key = 'b'")
    assert store.get("b") is None
    assert [entry.key for entry in store.entries()] == ["c"]
    store.put("d", b"data")
    assert store.verify() == []


def journal_file(folder: Path, name: str, content: Any) -> None:
    import hashlib

    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(hashlib.sha256(data).hexdigest().encode() + b"\n" + data)


@pytest.mark.parametrize("content", [[], {"a": 1}, None, BRACKETS.encode(), b"\xff"])
def test_a_journal_of_odd_types(content: Any, tmp_path: Path) -> None:
    journal_file(tmp_path, "dependencies.json", content)
    journal_file(tmp_path, "3/done.json", content if content else [1])
    journal = Journal(tmp_path)
    with pytest.raises(InputError, match="remove the folder to start over"):
        journal.require({"graph": "x"})
    assert not journal.request(3).done
    journal.close()


def test_a_state_of_odd_types(tmp_path: Path) -> None:
    import torch

    from graphrun.batch.cache.pack import pack

    whole = {
        "finished_steps": 1,
        "steps": 2,
        "latents": torch.zeros(1),
        "generator": torch.zeros(1),
        "scheduler": {"a": (1, True)},
    }
    journal_file(tmp_path, "s.steps", pack(whole))
    request = Journal(tmp_path / "j").request(1)
    request.folder = tmp_path
    state = request.state("s")
    assert state is not None
    assert (state.finished_steps, state.scheduler) == (1, {"a": (1, True)})
    for odd in (
        {"finished_steps": "1"},
        {"finished_steps": 3},
        {"latents": None},
        {"scheduler": [1]},
        {"scheduler": {"a": 1}},
        {"more": 1},
    ):
        journal_file(tmp_path, "s.steps", pack({**whole, **odd}))
        assert request.state("s") is None


def test_packed_nesting(tmp_path: Path) -> None:
    from graphrun.batch.cache.pack import unpack

    header = json.dumps({"__metadata__": {"graphrun": "1", "value": BRACKETS}}).encode()
    for shape in (
        BRACKETS,
        '["list", ' * 800 + '["plain", 1]' + "]" * 800,
        '["dtype", "load"]',
        '["picture", ["RGB", [1, 1], 0]]',
    ):
        header = json.dumps({"__metadata__": {"graphrun": "1", "value": shape}}).encode()
        with pytest.raises(InputError, match="is not a saved value"):
            unpack(struct.pack("<Q", len(header)) + header)


def test_plans_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.json")
    for path in (tmp_path / "a.json", Path("/dev/zero")):
        with pytest.raises(PlanError, match="not a regular file"):
            plan_files.read(path)


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize(
    ("changes", "arguments"),
    [
        ([(VAE, "/dev/zero")], []),
        ([], ["--set", "height=16000000"]),
        ([], ["--set", "steps=1000000"]),
    ],
    ids=["file", "pixels", "steps"],
)
def test_nothing_is_imported_to_refuse(
    tmp_path: Path, changes: list[tuple[str, str]], arguments: list[str]
) -> None:
    """What is refused is refused before torch is imported, which takes seconds."""
    import subprocess

    path = flux(tmp_path, *changes)
    code = """import sys
from graphrun.cli.main import main
try:
    main()
except SystemExit as done:
    print(done.code, "torch" in sys.modules)"""
    process = subprocess.run(
        [sys.executable, "-c", code, "plan", str(path), "--vram", "6M", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.stdout.split() == ["2", "False"]
