"""What Windows and macOS lack is not needed: graphrun runs with it taken away (`without_posix`)."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from graphrun import systems

ROOT = Path(__file__).parents[2]

EVERYTHING = """
import sys
from graphrun.cli import main

def graphrun(*arguments):
    sys.argv = ["graphrun", *arguments]
    try:
        main.main()
    except SystemExit as done:
        assert not done.code, (arguments, done.code)

sim = ("--device", "sim", "--ram", "8G", "--set", "steps=2")
graphrun("plan", "flux-tiny", *sim, "--vram", "6M", "-o", "plan.json")
graphrun("check", "plan.json")
graphrun("estimate", "flux-tiny", "--device", "sim", "--set", "steps=2")
graphrun("frontier", "flux-tiny", *sim, "--vram", "6M:8M:1M", "--plot", "curve.svg")
graphrun("report", "plan.json", "-o", "report.html")

import diffusers, torch
from graphrun import attach

sides = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
unet = diffusers.UNet2DModel(8, block_out_channels=(32, 32), **sides)
pipe = diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler())
pipe.set_progress_bar_config(disable=True)
def picture():
    return torch.from_numpy(pipe(num_inference_steps=2, \
generator=torch.Generator().manual_seed(0), output_type="np").images)
before = picture()
with attach(pipe, vram="64M", device="sim"):
    assert torch.equal(picture(), before)
"""


def without_posix(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "USERNAME": "someone",
    }
    command = [sys.executable, Path(__file__).with_name("without_posix.py"), code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.sweep("more")
@pytest.mark.long
def test_nothing_of_posix_alone_is_needed(tmp_path: Path) -> None:
    process = without_posix(EVERYTHING, tmp_path)
    assert process.returncode == 0, process.stderr
    assert not list(tmp_path.rglob(".*.new-*"))


DIRECT_READS = """
from pathlib import Path
from graphrun.runtime.direct_reads import DirectReads, MappedArena, Span

path = Path("numbers")
path.write_bytes(bytes(range(256)) * 40)
view = MappedArena(12288).view(0, 12288)
with DirectReads() as reads:
    reads.submit(Span("numbers", 0, 12288, 10240), view).wait()
assert view[:10240].numpy().tobytes() == path.read_bytes()
assert reads.is_direct == {"numbers": False}
"""


@pytest.mark.sweep("more")
@pytest.mark.long
def test_blocks_are_read_without_direct_reads(tmp_path: Path) -> None:
    process = without_posix(DIRECT_READS, tmp_path)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import fcntl", "this system has no fcntl"),
        ("import os; os.fchmod(1, 0o644)", "module 'os' has no attribute 'fchmod'"),
        ("import os; file = open('a', 'w'); os.replace('a', 'b')", "the file is in use"),
        (
            "from pathlib import Path; file = open('a', 'w'); Path('a').unlink()",
            "the file is in use",
        ),
    ],
)
def test_a_module_of_graphrun_that_needs_it_would_fail(
    code: str, message: str, tmp_path: Path
) -> None:
    assert (
        message
        in without_posix(f"exec({code!r}, {{'__name__': 'graphrun.some'}})", tmp_path).stderr
    )


@pytest.mark.parametrize("has_no_pread", [False, True], ids=["preadv", "seek"])
def test_threads_read_one_file_at_their_offsets(
    has_no_pread: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_no_pread:
        monkeypatch.delattr(os, "preadv")
    path = tmp_path / "numbers"
    path.write_bytes(b"".join(number.to_bytes(4, "big") for number in range(1000)))
    wrong = []

    def read(start: int) -> None:
        for number in range(start, 1000, 4):
            buffer = bytearray(4)
            if (
                systems.read_at(file, memoryview(buffer), 4 * number) != 4
                or int.from_bytes(buffer, "big") != number
            ):
                wrong.append(number)

    with path.open("rb", buffering=0) as file:
        threads = [threading.Thread(target=read, args=(start,)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert systems.read_at(file, memoryview(bytearray(4)), 4000) == 0
    assert wrong == []
