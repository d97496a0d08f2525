"""`benchmarks/cpu.py`: the lock, kills and resuming, space on disk, and the report. No seconds."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from graphrun.errors import InputError
from graphrun.memory_group import enforceable

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
LIBRARY_BYTES = 32 * 2**20  # of pages that a run of this size is the first to touch: 10 MB seen
LIMITED = pytest.mark.skipif(bool(enforceable()), reason=enforceable())
HOLD = (
    "import sys; sys.path.insert(0, sys.argv[1]); import cpu, time\n"
    "from pathlib import Path\n"
    "with cpu.exclusive(Path(sys.argv[2])): print('held', flush=True); time.sleep(60)"
)
CELLS = (
    "import sys; sys.path.insert(0, sys.argv[1]); import cpu; from cpu_models import MINI\n"
    "from pathlib import Path\n"
    "folder = Path(sys.argv[2]); bench = cpu.Bench(folder, cpu.Results(folder / 'results.json'),\n"
    "    whole_cache=False)\n"
    "with cpu.exclusive(folder): bench.model(MINI, [cpu.TOOLS['mmap'], cpu.TOOLS['graphrun']], [1])"
)


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def bench(part: Any, tmp_path: Path) -> Any:
    cpu = part("cpu")
    return cpu.Bench(tmp_path, cpu.Results(tmp_path / "results.json"), whole_cache=False)


def cell(tool: str, cap: float | None, seconds: float = 0.0, **facts: Any) -> dict[str, Any]:
    """A cell of the model ``m``, which ended if it has seconds."""
    ended = {
        "seconds": seconds,
        "step_seconds": seconds / 4,
        "step_cpu_seconds": seconds / 4,
        "read_bytes": int(seconds * 1e9),
        "step_read_bytes": 10**9,
        "peak_bytes": 2**30,
        "usage_peak_bytes": 2**31,
        "equal": True,
    }
    return {
        "model": "m",
        "tool": tool,
        "cap_gib": cap,
        "run": 1,
        "outcome": "done" if seconds else "killed",
        "process_seconds": 1.0,
        "enforced": cap is not None,
        "date": "2026-11-25 10:00",
        "speeds": [1.9e12, 2.1e12],
        "machine": {"processor": "P", "cores": 2, "ram_bytes": 2**34, "dtype": "float32"},
        **(ended if seconds else {}),
        **facts,
    }


REFERENCE = cell(
    "reference",
    None,
    40.0,
    weight_bytes={"transformer": 20 * 2**30, "vae": 0},
    begin_bytes=2**30,
    disk_bytes_per_second=2**30,
    compute_seconds=30.0,
    step_compute_seconds=5.0,
    calls=4,
    steps=4,
)
RECORDED = [
    REFERENCE,
    cell("graphrun", 6, 90.0, run_seconds=80.0, run_read_bytes=70 * 10**9, planned_seconds=81.0)
    | {"basis": "measured", "planned_read_bytes": 71 * 10**9, "planned_peak_bytes": 2**30}
    | {"first_touch_seconds": 2.5e-9},
    cell("graphrun", 6, 110.0, run=2, disk_speeds=[0.8e9, 1e9]),
    cell("graphrun", 6, 100.0, run=3),
    cell("graphrun", 16, 50.0, speeds=[1e12, 1e12]),
    cell("mmap", 6, 200.0),
    cell("mmap", 16, 150.0, equal=False, difference=0.25),
    cell("disk-offload", None, run=0),
    cell("disk-offload", 6),
]


def test_the_second_benchmark_on_a_folder_says_what_to_type(part: Any, tmp_path: Path) -> None:
    cpu = part("cpu")
    with (
        cpu.exclusive(tmp_path),
        pytest.raises(InputError, match=rf"{tmp_path}/lock.* {os.getpid()} .*--weights"),
        cpu.exclusive(tmp_path),
    ):
        pass
    with cpu.exclusive(tmp_path):
        pass


@pytest.mark.sweep("more")
@pytest.mark.long
def test_a_killed_benchmark_holds_no_lock(part: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(BENCHMARKS), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(InputError, match=str(process.pid)), part("cpu").exclusive(tmp_path):
            pass
        process.kill()
    with part("cpu").exclusive(tmp_path):
        pass


def test_words_select_by_the_start_of_names(part: Any) -> None:
    selected, names = part("cpu").selected, ["flux-schnell", "sdxl", "wan-1.3b"]
    assert selected("wan, flux", names) == ["flux-schnell", "wan-1.3b"]
    with pytest.raises(InputError, match="'flix' is none of flux-schnell, sdxl"):
        selected("flix", names)


def test_after_its_minutes_a_benchmark_starts_nothing(
    part: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """FLUX at 0.75 GiB: one cell of graphrun, one of disk offload."""
    words = "--tiny --only flux --tools graphrun,disk --caps 0.75 --minutes 0 --weights"
    part("cpu").main([*words.split(), str(tmp_path)])
    assert "2 cells are left: type the same command again" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_wrong_options_are_refused(part: Any, tmp_path: Path) -> None:
    command = ["--tiny", "--weights", str(tmp_path)]
    with pytest.raises(SystemExit, match="error: 'flix' is none of flux-tiny"):
        part("cpu").main([*command, "--only", "flix"])
    with pytest.raises(
        SystemExit, match=r"error: no model has a cap of 5 GiB: type --caps 0\.75,2"
    ):
        part("cpu").main([*command, "--caps", "2,5"])
    assert list(tmp_path.iterdir()) == []


def test_a_small_disk_is_refused_before_anything_is_written(
    part: Any, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part("cpu"), "needed_bytes", lambda _name: 10**15)
    with pytest.raises(InputError, match=r"1000001 GB of disk.*GB are free.*--weights"):
        bench.write_weights(part("cpu_models").MINI)
    assert list(bench.weights.iterdir()) == []


def test_complete_copies_of_a_killed_benchmark_are_used(part: Any, bench: Any) -> None:
    model = part("cpu_models").MINI
    copies = bench.copies(model, "disk-offload")
    copies.mkdir()
    (copies / "complete").touch()
    assert bench.make_copies(model, "accelerate")
    assert bench.results.cells == []


def test_cells_of_another_processor_count_for_nothing_here(part: Any, tmp_path: Path) -> None:
    this_machine = cell("mmap", 6, 1.0)["machine"] | part("cpu").machine()
    results = part("cpu").Results(tmp_path / "results.json")
    results.add(cell("mmap", 6, 1.0))
    assert results.find("m", "mmap", 6, 1) is None
    results.add(cell("mmap", 6, 2.0, machine=this_machine))
    assert results.find("m", "mmap", 6, 1)["seconds"] == 2.0
    results.add(cell("mmap", 6, 1.0, model="n"))
    groups = part("cpu_report").by_machine(results.cells)
    assert [[row["seconds"] for row in group] for group in groups] == [[1.0], [2.0], [1.0]]


def test_cells_of_another_benchmark_are_kept(part: Any, tmp_path: Path) -> None:
    first, second = (part("cpu").Results(tmp_path / "results.json") for _ in range(2))
    first.add(cell("mmap", 6, 1.0))
    second.add(cell("graphrun", 6, 1.0))
    second.add(cell("graphrun", 6, 2.0))
    first.add(cell("graphrun", 8, 1.0))
    rows = json.loads((tmp_path / "results.json").read_text())["cells"]
    assert [(row["tool"], row["cap_gib"], row["seconds"]) for row in rows] == [
        ("mmap", 6, 1.0),
        ("graphrun", 6, 2.0),
        ("graphrun", 8, 1.0),
    ]


@LIMITED
def test_a_process_over_its_cap_is_killed_and_its_peak_known(part: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "x = b'1' * (64 << 20)"]
    run_limited, log = part("cpu").run_limited, tmp_path / "log"
    tight = run_limited(command, 48 << 20, 60.0, log)
    ample = run_limited(command, 128 << 20, 60.0, log)
    failed = run_limited([sys.executable, "-c", "raise SystemExit(3)"], 128 << 20, 60.0, log)
    endless = run_limited([sys.executable, "-c", "while True: pass"], 128 << 20, 0.3, log)
    outcomes = [ended.outcome for ended in (tight, ample, failed, endless)]
    assert outcomes == ["killed", "done", "failed", "timed out"]
    assert (tight.use["kills"], ample.use["kills"]) == (1, 0)
    assert tight.use["peak_bytes"] <= 48 << 20
    assert 64 << 20 < ample.use["peak_bytes"] < 96 << 20


@LIMITED
@pytest.mark.sweep("cpu")
def test_a_cell_has_bytes_read_peak_and_plan(part: Any, bench: Any) -> None:
    model, tool = part("cpu_models").MINI, part("cpu_tools").TOOLS["graphrun"]
    assert bench.model(model, [tool], [1], reference=False) == 0
    (row,) = bench.results.cells
    weight_bytes = part("cpu_models").weight_bytes(bench.weights / model.name)
    assert (row["outcome"], row["steps"], row["finite"], row["enforced"]) == ("done", 2, True, True)
    assert 0.9 * weight_bytes < row["planned_read_bytes"] < 1.2 * weight_bytes
    # the kernel counts pages of libraries too, which were dropped from its cache and are read again
    assert 0.9 * weight_bytes < row["run_read_bytes"] < 1.2 * weight_bytes + LIBRARY_BYTES
    assert row["peak_bytes"] <= 1.03 * row["planned_peak_bytes"] <= 1.03 * 2**30
    assert row["usage_peak_bytes"] >= row["peak_bytes"]
    assert not (bench.weights / "cell").exists()


@pytest.mark.sweep("faults")
def test_a_killed_benchmark_continues_with_the_missing_cells(part: Any, tmp_path: Path) -> None:
    """Its cell ends with it. The cell that had ended is not run again."""
    command = [sys.executable, "-c", CELLS, str(BENCHMARKS), str(tmp_path)]
    results, job = tmp_path / "results.json", tmp_path / "cell" / "job.json"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not (results.exists() and job.exists()):  # the cell after the reference
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
    while _processes(str(job)):
        time.sleep(0.05)
    first = json.loads(results.read_text())["cells"]
    assert [row["tool"] for row in first] == ["reference"]

    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rows = json.loads(results.read_text())["cells"]
    assert rows[:1] == first
    assert [(row["tool"], row["outcome"], row.get("equal")) for row in rows[1:]] == [
        ("mmap", "done", True),
        ("graphrun", "done", True),
    ]
    assert "flux-mini" in part("cpu_report").table(rows)


def _processes(word: str) -> list[int]:
    """The living processes whose command has ``word``."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if word.encode() in command:
            processes.append(int(folder.name))
    return processes


@pytest.mark.sweep("reference")
def test_every_tool_draws_the_picture_of_the_reference(part: Any, bench: Any) -> None:
    """Within 1 GiB, and without a cap those that read all weights first. Their copies are gone."""
    tools = part("cpu_tools").TOOLS
    assert bench.model(part("cpu_models").MINI, [*tools.values()], [1]) == 0
    rows = [row for row in bench.results.cells if row["run"] and row["tool"] != "reference"]
    assert {row["tool"] for row in rows} == {*tools} - {"sd.cpp"}
    assert {(row["outcome"], row.get("equal")) for row in rows} == {("done", True)}
    assert sorted(path.name for path in bench.weights.iterdir()) == [
        "flux-mini",
        "pictures",
        "results.json",
    ]


def test_a_gguf_file_has_the_names_and_bytes_of_the_folder(part: Any, tmp_path: Path) -> None:
    import gguf
    import torch
    from safetensors.torch import save_file

    weights = {
        "unet": {"conv_in.weight": torch.randn(4, 2, 3, 3).bfloat16()},
        "vae": {"decoder.weight": torch.randn(5, 7)},
        "text_encoder": {"embeddings.bias": torch.randn(6).bfloat16()},
        "text_encoder_2": {"text_projection.weight": torch.randn(2, 6).bfloat16()},
    }
    for component, values in weights.items():
        (tmp_path / component).mkdir()
        save_file(values, tmp_path / component / "model.safetensors")
    part("cpu_models").write_gguf(tmp_path, tmp_path / "copies" / "w.gguf")
    rows = {row.name: row for row in gguf.GGUFReader(tmp_path / "copies" / "w.gguf").tensors}
    assert [*rows] == [
        "unet.conv_in.weight",
        "vae.decoder.weight",
        "cond_stage_model.transformer.text_model.embeddings.bias",
        "cond_stage_model.1.transformer.text_projection.weight",
    ]
    tensors = [tensor for component in weights.values() for tensor in component.values()]
    for row, tensor in zip(rows.values(), tensors, strict=True):
        assert tuple(row.shape[::-1]) == tuple(tensor.shape)
        assert row.data.tobytes() == tensor.view(torch.uint8).numpy().tobytes()


def test_a_cell_without_its_benchmark_ends_at_once(tmp_path: Path) -> None:
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"benchmark": 1}))
    command = [sys.executable, str(BENCHMARKS / "cpu_cell.py"), str(job)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (1, "the benchmark has ended\n")


def test_tables_have_medians_limits_and_plans(part: Any) -> None:
    """At 6 GiB 15 of 20 GiB are read by each call: 15 s, and the run 20 + 3 * 15 = 65 s."""
    lines = part("cpu_report").table(RECORDED).splitlines()
    assert "| 6 | limit | 65.0 |  | 15.00 |  |  |  |  |  |  | 2.00 | 1.07 |  |" in lines
    assert "| 16 | limit | 35.0 |  | 5.00 |  |  |  |  |  |  | 2.00 | 1.07 |  |" in lines
    assert (
        "| 6 | graphrun (3 runs) | 100.0 | 1.54 | 25.00 | 1.67 | 100.0 | 1.00 | 1.00 | 2.00 | 50% "
        "| 2.00 | 0.90 | equal |" in lines
    )
    assert (
        "| 16 | graphrun | 50.0 | 1.43 | 12.50 | 2.50 | 50.0 | 1.00 | 1.00 | 2.00 | 50% "
        "| 1.00 |  | equal |" in lines
    )
    assert "| 6 | accelerate `disk_offload` | killed |" in "\n".join(lines)
    assert lines[-1] == "| 6 | 80.0 | 81.0 | 70.00 | 71.00 | 1.000 | 1.000 |"
    assert "next to its plans with the profile of `graphrun calibrate`:" in "\n".join(lines)
    assert "differs by 0.2" in "\n".join(lines)
    assert "caps enforced by the kernel" in lines[0]
    assert "GB/s; new memory 0.40 GB/s." in "\n".join(lines)


@pytest.mark.sweep("more")
def test_page_readme_and_chart_are_made_from_the_cells(part: Any, tmp_path: Path) -> None:
    report = part("cpu_report")
    assert "img/cpu-m-p.svg" in report.page(RECORDED)
    assert "No cell has run yet." not in report.page(RECORDED)
    readme = " ".join(report.readme(RECORDED).split())
    assert "P, 2 cores, 16 GiB, float32; 2026-11-25; caps enforced by the kernel" in readme
    assert "6 GiB: graphrun 100, mmap 200; 16 GiB: graphrun 50, mmap 150" in readme
    chart = report.chart(RECORDED, tmp_path)
    drawing = chart.read_text()
    assert (chart.name, "accelerate" in drawing) == ("cpu-m-p.svg", False)
    assert all(text in drawing for text in ("graphrun", "limit", "memory cap, GiB"))
    assert report.chart(RECORDED, tmp_path).read_text() == drawing
    dark = (tmp_path / "cpu-m-p-dark.svg").read_text()
    assert ("#0d1117" in drawing, "#0d1117" in dark) == (False, True)
    assert [f"cpu-m-p{kind}.svg" in readme for kind in ("", "-dark")] == [True, True]
    assert report.readme([]) == ""
    machine = RECORDED[0]["machine"] | {"processor": "Q"}
    larger = [row | {"machine": machine} for row in RECORDED]
    larger += [cell(tool, 8, 1.0, machine=machine) for tool in ("graphrun", "mmap")]
    assert "Q, 2 cores" in report.readme([*RECORDED, *larger]), "it has the most caps"
