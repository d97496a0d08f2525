"""Lists of requests, resuming and cached outputs on the command line."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from graphrun.cli.running import Stop, stop_on_interrupt
from graphrun.disk_store import DATABASE

Cli = Callable[..., tuple[int, str, str]]
TINY = str(Path(__file__).parent.parent / "graphs/flux-tiny.yaml")
SMALL = [
    part
    for text in ("height=32", "width=32", "steps=1", "max_sequence_length=16")
    for part in ("--set", text)
]
RUN = ("run", TINY, "--device", "sim", "--vram", "6M", *SMALL)


def pixels(path: str) -> bytes:
    """Of a picture, without its metadata: the plan's digest differs."""
    return Image.open(path).tobytes()


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "graphrun" / "outputs"


@pytest.mark.sweep("more")
def test_a_prompt_seen_before_is_not_encoded_and_the_plan_says_so(
    graphrun: Cli, own_cache: Path
) -> None:
    assert graphrun(*RUN, "--prompt", "x", "--output", "first.png")[0] == 0
    code, output, _ = graphrun(
        *RUN, "--prompt", "x", "--output", "second.png", "--plan", "plan.json", "--set", "seed=0"
    )
    assert code == 0
    assert "precomputed encode: outputs of earlier runs, neither planned nor loaded" in output
    assert "text_encoder" not in output
    assert pixels("first.png") == pixels("second.png")
    assert json.loads(Path("plan.json").read_text())["precomputed"] == ["encode"]
    assert graphrun("run", "plan.json", "--set", "prompt=x", "--output", "third.png")[0] == 0
    assert pixels("first.png") == pixels("third.png")
    code, _, err = graphrun("run", "plan.json", "--set", "prompt=y")
    assert (code, "the plan needs precomputed values: pass encode.embeds" in err) == (2, True)

    code, output, _ = graphrun("cache", "ls", "--json")
    entries = json.loads(output)["entries"]
    assert [(entry["stage"], entry["graph"]) for entry in entries] == [("encode", "flux-tiny")]
    assert "prompt='x'" in entries[0]["about"]
    with sqlite3.connect(own_cache / DATABASE) as rows:
        rows.execute("UPDATE contents SET data = x'00'")
    assert "damaged, removed: " in graphrun("cache", "verify")[1]
    assert "no cached outputs" in graphrun("cache", "ls")[1]
    assert graphrun("cache", "rm")[0] == 2
    assert graphrun("cache", "rm", "abc")[0] == 2
    assert graphrun("cache", "rm", "--all")[1] == "removed 0 entries\n"


@pytest.mark.sweep("more")
def test_a_list_runs_except_for_its_broken_lines_and_resumes(
    graphrun: Cli, own_cache: Path
) -> None:
    Path("p.jsonl").write_text('{"prompt": "a"}\n{"prompt":\n"b"\n')
    code, _, err = graphrun(*RUN, "--inputs", "p.jsonl", "--strict")
    assert (code, "p.jsonl:2: is not JSON" in err, Path("out/flux-tiny-0001.png").exists()) == (
        2,
        True,
        False,
    )
    code, output, err = graphrun(*RUN, "--inputs", "p.jsonl", "--resume")
    assert code == 2
    assert "p.jsonl:2: is not JSON" in err
    assert "2 of 3 requests run, 1 left out" in output
    assert sorted(path.name for path in Path("out").glob("*.png")) == [
        "flux-tiny-0001.png",
        "flux-tiny-0003.png",
    ]
    code, output, _ = graphrun(*RUN, "--inputs", "p.jsonl", "--resume", "--json")
    assert json.loads(output)["done_before"] == [1, 3]
    code, _, err = graphrun(*RUN, "--inputs", "p.jsonl", "--resume", "--set", "seed=4")
    assert code == 2
    assert "inputs of request 1: was" in err


def test_the_files_of_a_list_go_to_a_folder_and_no_two_have_one_name(
    graphrun: Cli, own_cache: Path
) -> None:
    Path("p.jsonl").write_text('{"prompt": "a", "seed": 4}\n{"prompt": "a", "seed": 5}\n')
    code, _, err = graphrun(*RUN, "--inputs", "p.jsonl", "-o", "pictures/{prompt}.png")
    assert (
        code,
        "pictures/a.png: lines 1 and 2 would write this file: add {line:04d} to -o" in err,
    ) == (
        2,
        True,
    )
    assert graphrun(*RUN, "--inputs", "p.jsonl", "-o", "pictures")[0] == 0
    assert sorted(path.name for path in Path("pictures").iterdir()) == ["0001.png", "0002.png"]
    code, _, err = graphrun(*RUN, "--inputs", "p.jsonl", "-o", "pictures/{line:04d}.png")
    assert (code, "pictures/0001.png already exists; add --overwrite" in err) == (2, True)


@pytest.mark.sweep("more")
def test_files_with_the_default_name_are_numbered_and_a_resumed_run_keeps_its_own(
    graphrun: Cli, own_cache: Path
) -> None:
    def pictures() -> list[str]:
        return sorted(path.name for path in Path("out").glob("*.png"))

    assert "wrote out/flux-tiny.png" in graphrun(*RUN)[1]
    assert "wrote out/flux-tiny-2.png" in graphrun(*RUN)[1]
    assert graphrun(*RUN, "--overwrite")[0] == 0
    assert pictures() == ["flux-tiny-2.png", "flux-tiny.png"]
    assert (
        graphrun(*RUN, "-o", "out/flux-tiny.png")[2]
        == "graphrun: out/flux-tiny.png already exists; add --overwrite\n"
    )
    for _ in range(2):  # the second finds the state of the first
        assert graphrun(*RUN, "--resume")[0] == 0
        assert pictures() == ["flux-tiny-2.png", "flux-tiny-3.png", "flux-tiny.png"]
    Path("p.jsonl").write_text('{"seed": 4}\n{"seed": 5}\n')
    code, output, _ = graphrun(*RUN, "--inputs", "p.jsonl")
    assert (code, "wrote out/flux-tiny-4-0001.png to out/flux-tiny-4-0002.png" in output) == (
        0,
        True,
    )
    assert len(pictures()) == 5


@pytest.mark.sweep("more")
def test_a_seed_is_an_option_for_one_run_and_for_the_lines_of_a_list(
    graphrun: Cli, own_cache: Path
) -> None:
    assert graphrun(*RUN, "--set", "seed=7", "-o", "set.png")[0] == 0
    assert graphrun(*RUN, "--seed", "7", "-o", "seed.png")[0] == 0
    assert graphrun(*RUN, "--seed", "8", "-o", "other.png")[0] == 0
    assert pixels("set.png") == pixels("seed.png") != pixels("other.png")
    Path("p.jsonl").write_text(
        '{"prompt": "a lighthouse at dusk"}\n{"prompt": "a lighthouse at dusk", "seed": 8}\n'
    )
    assert graphrun(*RUN, "--seed", "7", "--inputs", "p.jsonl", "-o", "list")[0] == 0
    assert (pixels("list/0001.png"), pixels("list/0002.png")) == (
        pixels("seed.png"),
        pixels("other.png"),
    )
    code, _, err = graphrun(*RUN, "--seed", "7", "--set", "seed=8")
    assert (code, "--seed 7 and --set seed=8: leave one of them out" in err) == (2, True)
    code, _, err = graphrun("run", "hidream-encode-tiny", *RUN[2:6], "--seed", "7")
    assert (code, "unknown input 'seed'" in err) == (2, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--inputs", "none.jsonl"), "none.jsonl: no such file"),
        (("--reuse", "some"), "use encoded, all or none"),
        (("--resume", "--trace", "t.json"), "leave out --trace: for a single run"),
        (("--resume", "--output", f"{TINY}/x.png"), "cannot be written"),
    ],
)
def test_bad_input_is_said_before_anything_runs(
    graphrun: Cli, options: tuple[str, ...], message: str
) -> None:
    code, _, err = graphrun(*RUN, *options)
    assert code == 2
    assert message in err


def test_a_cache_that_cannot_be_written_is_reported_and_fails_nothing(
    graphrun: Cli, own_cache: Path
) -> None:
    own_cache.parent.parent.mkdir()
    own_cache.parent.touch()
    code, _, err = graphrun(*RUN, "--prompt", "x")
    assert code == 0
    assert err.count("nothing can be cached there") >= 1


BROKEN = """
import sys
from graphrun.cli import main
try:
    main.main()
finally:
    print("torch" in sys.modules)
"""


def test_a_list_without_a_sound_line_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "\\ud800"}\n{"prompt": "a cat", "steps": 0}\n')
    command = [sys.executable, "-c", BROKEN, *RUN, "--inputs", str(tmp_path / "p.jsonl")]
    process = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (process.returncode, process.stdout) == (2, "False\n"), process.stderr
    assert "p.jsonl:1: is not JSON: character 1 is half of a surrogate pair" in process.stderr
    assert "p.jsonl:2: input 'steps': 0 is less than the minimum, 1" in process.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"]


def test_the_first_interrupt_waits_for_the_next_call_the_second_does_not() -> None:
    messages: list[str] = []
    # ignored, where a shell put the tests in the background
    handler = signal.getsignal(signal.SIGINT)
    with stop_on_interrupt(messages.append) as stop:
        progress = stop.watch(None)
        progress(0, 1, 4)
        signal.raise_signal(signal.SIGINT)
        assert "interrupt again to stop now" in messages[0]
        with pytest.raises(KeyboardInterrupt):
            progress(0, 2, 4)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            (),
            "interrupted at loading: nothing is written; an encoded prompt is kept; with --resume "
            "from the start, the run could continue",
        ),
        (("--no-cache",), "interrupted at loading: nothing is written; with --resume from"),
        (
            ("--resume",),
            "interrupted: 0 of 1 requests are done, the state is in out/.flux-tiny.resume; the "
            "same command continues",
        ),
        (
            ("--inputs", "p.jsonl"),
            "interrupted: 0 of 2 requests are done, their files are kept; with --resume "
            "from the start, the list could continue",
        ),
    ],
)
def test_an_interrupted_run_says_what_is_kept_and_how_to_go_on(
    graphrun: Cli, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], message: str
) -> None:
    Path("p.jsonl").write_text('"a"\n"b"\n')
    # Ctrl-C before the first call
    monkeypatch.setattr(Stop, "__init__", lambda stop: setattr(stop, "requested", True))
    code, _, err = graphrun(*RUN, *options)
    assert (code, message in err, "Traceback" in err) == (130, True, False), err
