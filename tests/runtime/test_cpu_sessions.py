"""Sessions and batches on the CPU: further runs read what was not kept, many runs take no more
memory, and a killed batch goes on with the same bits."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from campaign import sampled
from PIL import Image
from read_ordering import ReadOrdering
from stored_component import open_files
from test_cpu_forks import ALL, CALLS, SOME, KeptRuns
from test_cpu_graphs import resident
from whole_pipelines import pixels

import graphrun
from graphrun.kernel_memory import process_bytes
from graphrun.modules.build import build
from graphrun.profile.processor import cpu_estimate
from graphrun.runtime.devices.cpu import CpuDevice
from graphrun.runtime.direct_reads import DirectReads
from graphrun.runtime.files import FileStore
from graphrun.units import GIB, MIB

GRAPHS = Path(__file__).parent.parent.parent / "graphs"
PROMPTS = ("a red circle left of a blue square on white", "a green star on black")


def thread_counts(samples: int) -> Iterator[int]:
    """Threads of this process, every 5 ms: one that was joined may not have left the kernel yet."""
    for _ in range(samples):
        yield sum(1 for _ in Path("/proc/self/task").iterdir())
        time.sleep(0.005)


class Use:
    """What this process has: threads, open files, mappings, and bytes of memory."""

    def __init__(self) -> None:
        gc.collect()
        CpuDevice(cpu_estimate()).release_cached()
        self.counts = (min(thread_counts(20)), len(open_files()))
        self.mappings = Path("/proc/self/maps").read_bytes().count(b"\n")
        self.memory_bytes = process_bytes().nbytes

    def assert_stays(self, baseline: Use, *, slack_bytes: int) -> None:
        """Assert that this is no more than at ``baseline``, up to the heap's own changes."""
        assert self.counts == baseline.counts
        assert self.mappings <= baseline.mappings + 4
        assert self.memory_bytes <= baseline.memory_bytes + slack_bytes


@pytest.mark.parametrize("resident_blocks", [SOME, ALL], ids=["some are kept", "all are kept"])
@pytest.mark.parametrize("count", [2, 5])
def test_further_runs_read_what_was_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resident_blocks: str, count: int
) -> None:
    ordering, readers = ReadOrdering(monkeypatch), list[DirectReads]()
    enter = DirectReads.__enter__

    def noted(reads: DirectReads) -> DirectReads:
        readers.append(reads)
        return enter(reads)

    monkeypatch.setattr(DirectReads, "__enter__", noted)
    runs = KeptRuns(tmp_path, resident_blocks)
    store = runs.host.residencies["a"].backing_store
    assert isinstance(store, FileStore)
    file_bytes = {
        path: sum(
            min(span.stop, Path(span.file).stat().st_size) - span.start for span, _ in block.spans
        )
        for path, block in store._file_blocks.items()
    }
    streamed_paths = (
        file_bytes.keys() - {"", "wide.0", "wide.2"} if resident_blocks == SOME else set[str]()
    )
    further_bytes = len(CALLS) * sum(file_bytes[path] for path in streamed_paths)
    kept_bytes = sum(nbytes for path, nbytes in file_bytes.items() if path not in streamed_paths)
    for _ in range(count):
        runs.run()
    assert kept_bytes > 0
    assert [reads.bytes_read for reads in readers] == [
        kept_bytes + further_bytes,
        *[further_bytes] * (count - 1),
    ]
    assert not ordering.reports
    runs.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists them")
@pytest.mark.parametrize("resident_blocks", [SOME, ALL], ids=["some are kept", "all are kept"])
@pytest.mark.parametrize("count", sampled([20, 500], [20], "cpu"))
def test_many_runs_of_one_session_take_no_more_than_the_first_ones(
    tmp_path: Path, resident_blocks: str, count: int
) -> None:
    runs = KeptRuns(tmp_path, resident_blocks)
    for _ in range(10):
        runs.run()
    use = Use()
    for _ in range(count):
        runs.run()
    Use().assert_stays(use, slack_bytes=MIB)
    runs.close()


class Shapes:
    """Sessions of the trained graph, whose weights are in files, with room for all of them."""

    def __init__(self, runs: int) -> None:
        self.graph = graphrun.load(GRAPHS / "shapes.yaml")
        self.inputs = {"steps": 3, "seed": 5}
        self.expected = [self._picture(prompt) for prompt in PROMPTS]
        gc.collect()
        context_bytes = CpuDevice(cpu_estimate()).measured_context(to_plan=True)
        hardware = replace(cpu_estimate(), context_bytes=context_bytes)
        self.session = graphrun.Session(
            self.graph, runs=runs, inputs=self.inputs, hardware=hardware, memory=4 * GIB
        )

    def _picture(self, prompt: str) -> Any:
        """The picture of the library's own pipeline."""
        modules = {name: build(c, self.graph) for name, c in self.graph.components.items()}
        values = self.graph.resolve({**self.inputs, "prompt": prompt})
        return pixels(resident(self.graph, modules, values)["image"])


@pytest.mark.sweep("cpu")
@pytest.mark.parametrize("runs", [2, 5, 50])
def test_pictures_of_a_session_are_the_pipelines_own_and_take_no_more_memory(runs: int) -> None:
    shapes, use = Shapes(runs), None
    with shapes.session as session:
        for number in range(runs):
            trace = session.run({"prompt": PROMPTS[number % 2]})
            assert np.array_equal(pixels(trace.outputs["image"]), shapes.expected[number % 2])
            assert not trace.overruns
            assert (
                number == 0 or trace.moved_bytes == session.solution.simulation.further_moved_bytes
            )
            if number == 9:
                use = Use()
        if use is not None:
            Use().assert_stays(use, slack_bytes=4 * MIB)
    assert session.device.allocated_bytes == 0


@pytest.mark.sweep("cpu")
def test_a_killed_batch_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    lines = [f'{{"prompt": "{PROMPTS[number % 2]}", "seed": {number}}}' for number in range(6)]
    (tmp_path / "requests.jsonl").write_text("\n".join(lines))

    def start(folder: str, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "graphrun", "run", "shapes", "--device", "cpu"]
        command += ["--memory", "600M", "--inputs", "requests.jsonl", "--set", "steps=4"]
        command += ["-o", f"{folder}/{{line}}.png", *options]
        return subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def pictures(folder: str) -> dict[str, Any]:
        return {path.name: pixels(Image.open(path)) for path in (tmp_path / folder).glob("*.png")}

    whole = start("whole")
    output, errors = whole.communicate()
    assert whole.returncode == 0, output + errors
    expected = pictures("whole")
    assert len(expected) == 6
    kills = 0
    while True:
        count = len(pictures("part")) if (tmp_path / "part").exists() else 0
        process = start("part", "--resume")
        while process.poll() is None and len(list((tmp_path / "part").glob("*.png"))) < count + 2:
            time.sleep(0.01)
        if process.poll() is not None or kills == 2:
            break
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += 1
    output, errors = process.communicate()
    assert kills > 0
    assert process.returncode == 0, output + errors
    assert "done before" in output
    results = pictures("part")
    assert results.keys() == expected.keys()
    assert all(np.array_equal(results[name], expected[name]) for name in expected)
