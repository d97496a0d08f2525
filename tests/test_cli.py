"""The command as its users meet it: answers, exit codes, and one clear message for everything that
can be wrong."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import graphrun as package
from graphrun.units import MIB, typed_size

GRAPHS = Path(__file__).parent.parent / "graphs"
TINY = str(GRAPHS / "flux-tiny.yaml")
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def edit_graph(tmp_path: Path) -> Callable[[str, str], str]:
    """A copy of flux-tiny.yaml with one piece of text replaced."""

    def edit(old: str, new: str) -> str:
        folder = tmp_path / "graphs"
        shutil.copytree(GRAPHS, folder)
        text = (folder / "flux-tiny.yaml").read_text()
        assert old in text
        (folder / "flux-tiny.yaml").write_text(text.replace(old, new, 1))
        return str(folder / "flux-tiny.yaml")

    return edit


def refused(answer: tuple[int, str, str], *words: str) -> None:
    code, output, err = answer
    assert code == 2
    assert "Traceback" not in err
    assert not output
    for word in words:
        assert word in err


def test_the_version_is_shown_without_a_command(graphrun: Cli) -> None:
    assert graphrun("--version") == (0, f"graphrun {package.__version__}\n", "")


@pytest.mark.sweep("more")
def test_plan_shows_the_plan_and_its_json_has_every_promised_figure(graphrun: Cli) -> None:
    code, output, _ = graphrun("plan", TINY, "--device", "sim", "--vram", "6M")
    assert code == 0
    assert "denoise/0:transformer" in output
    code, output, _ = graphrun("plan", TINY, "--device", "sim", "--vram", "6M", "--json")
    data = json.loads(output)
    assert code == 0
    assert data["feasible"] is True
    keys = (
        "proven_optimal predicted_seconds bound_seconds solve_seconds budget_bytes peak_bytes "
        "moved_bytes digest"
    )
    assert {*keys.split(), "stages", "actions"} <= data.keys()
    assert data["peak_bytes"] <= data["budget_bytes"] == 6 * MIB
    for stage in data["stages"]:
        assert {
            "name",
            "peak_bytes",
            "resident_bytes",
            "streamed_bytes",
            "activation_bytes",
            "seconds",
        } <= stage.keys()
    assert [stage["name"] for stage in data["stages"]] == ["encode", "denoise", "decode"]


@pytest.mark.sweep("more")
def test_a_plan_from_the_cache_took_no_time_to_solve(graphrun: Cli) -> None:
    command = ("plan", TINY, "--device", "sim", "--vram", "6543K", "--ram", "8G", "-v")
    solution, cached, second_solution = (
        graphrun(*command)[1],
        graphrun(*command)[1],
        graphrun(*command, "--no-cache")[1],
    )
    assert " to solve)" in solution
    assert " to solve)" in second_solution
    assert "to solve" not in cached
    texts = [
        [line for line in result.splitlines() if not line.startswith("predicted ")]
        for result in (solution, cached)
    ]
    assert texts[0] == texts[1]
    assert json.loads(graphrun(*command, "--json")[1])["solve_seconds"] is None


@pytest.mark.sweep("more")
def test_no_cache_neither_reads_nor_writes_there(
    graphrun: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    command = (
        "run",
        TINY,
        "--device",
        "sim",
        "--vram",
        "6M",
        "--prompt",
        "a",
        "--set",
        "steps=1",
        "-o",
        "a.png",
    )
    assert graphrun(*command, "--no-cache")[0] == 0
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    refused(graphrun(*command), "a.png already exists; add --overwrite")
    assert graphrun(*command, "--overwrite")[0] == 0
    files = {
        path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*") if path.is_file()
    }
    assert files
    _, output, _ = graphrun(*command, "--no-cache", "--overwrite")
    assert "precomputed" not in output
    assert {path: path.stat().st_mtime_ns for path in files} == files


def test_run_leaves_picture_plan_and_trace_and_shows_measured_beside_planned(
    graphrun: Cli, tmp_path: Path
) -> None:
    files = ("--output", "o/a.png", "--plan", "o/plan.json", "--trace", "o/trace.json")
    code, output, _ = graphrun(
        "run", TINY, "--device", "sim", "--vram", "6M", "--set", "steps=2", *files
    )
    assert code == 0
    assert "the run stayed within the planned memory; left on the device: 0 B" in output
    assert Image.open(tmp_path / "o/a.png").size == (128, 128)
    trace = json.loads((tmp_path / "o/trace.json").read_text())
    plan = json.loads((tmp_path / "o/plan.json").read_text())
    assert [slot["peak_bytes"] for slot in trace["slots"]] == [
        slot["peak_bytes"] for slot in plan["measured"]["slots"]
    ]
    assert sorted(p.name for p in (tmp_path / "o").iterdir()) == [
        "a.png",
        "plan.json",
        "trace.json",
    ]


@pytest.mark.sweep("more")
def test_a_saved_plan_runs_to_the_same_picture(graphrun: Cli, tmp_path: Path) -> None:
    options = ("--device", "sim", "--vram", "6M", "--set", "steps=1")
    assert graphrun("plan", TINY, *options, "-o", "plan.json")[0] == 0
    assert graphrun("check", "plan.json")[1].startswith("ok: ")
    assert graphrun("explain", "plan.json")[0] == 0
    assert graphrun("explain", "plan.json", "--json")[0] == 0
    code, output, _ = graphrun("run", "plan.json", "--output", "a.png", "--json")
    measurements = json.loads(output)["measured"]
    assert (code, measurements["left_bytes"], measurements["kept_plan"]) == (0, 0, True)
    assert graphrun("run", TINY, *options, "--output", "b.png")[0] == 0
    assert Image.open(tmp_path / "a.png").tobytes() == Image.open(tmp_path / "b.png").tobytes()
    refused(
        graphrun("run", "plan.json", "--set", "steps=3"), "the plan is for steps=1", "plan again"
    )
    refused(graphrun("run", "plan.json", "--vram", "9M"), "it has its own budget")


@pytest.mark.sweep("more")
def test_one_mib_below_the_smallest_budget_is_infeasible_and_the_smallest_is_accepted(
    graphrun: Cli,
) -> None:
    code, output, err = graphrun("plan", TINY, "--device", "sim", "--vram", "1M", "--json")
    assert code == 3
    smallest = json.loads(output)["smallest_budget_bytes"]
    code, output, err = graphrun("run", TINY, "--device", "sim", "--vram", str(smallest - MIB))
    assert code == 3
    assert f"minimum VRAM: --vram {typed_size(smallest)} ({smallest} bytes)" in err
    assert graphrun("plan", TINY, "--device", "sim", "--vram", typed_size(smallest))[0] == 0
    assert not output
    assert graphrun("plan", TINY, "--device", "sim", "--vram", str(smallest))[0] == 0
    assert graphrun("plan", TINY, "--device", "sim", "--vram", str(smallest - 1))[0] == 3


def tampered(path: Path, change: Callable[[list[str]], list[str]]) -> str:
    data = json.loads(path.read_text())
    data["actions"] = change(data["actions"])
    path.write_text(json.dumps(data))
    return str(path)


@pytest.mark.sweep("more")
def test_a_plan_without_one_of_its_evictions_is_refused_with_rule_place_and_bytes(
    graphrun: Cli, tmp_path: Path
) -> None:
    def drop_an_evict(actions: list[str]) -> list[str]:
        number = next(
            n for n, line in enumerate(actions) if line.strip().startswith("evict text_encoder")
        )
        return actions[:number] + actions[number + 1 :]

    graphrun("plan", TINY, "--device", "sim", "--vram", "6M", "-o", "plan.json")
    refused(
        graphrun("check", tampered(tmp_path / "plan.json", drop_an_evict)),
        "slot",
        "text_encoder",
        "bytes",
        "refused",
    )
    refused(graphrun("run", "plan.json"), "refused")


def test_a_plan_with_two_loads_swapped_is_refused(graphrun: Cli, tmp_path: Path) -> None:
    def swap_loads(actions: list[str]) -> list[str]:
        first, second = [n for n, line in enumerate(actions) if line.strip().startswith("load")][:2]
        lines = list(actions)
        lines[first], lines[second] = lines[second], lines[first]
        return lines

    graphrun("plan", TINY, "--device", "sim", "--vram", "6M", "-o", "plan.json")
    refused(graphrun("check", tampered(tmp_path / "plan.json", swap_loads)), "slot", "refused")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("graphrun: 1", "graphrun: [1", ("flux-tiny.yaml:", "not YAML")),
        (
            "    uses: [transformer]",
            "    usess: [transformer]",
            ("flux-tiny.yaml:40", "'usess'", "did you mean 'uses'"),
        ),
        (
            "default: 4, minimum",
            "default: four, minimum",
            ("flux-tiny.yaml:11", "inputs.steps.default", "'four'"),
        ),
        (
            "{prompt: $prompt,",
            "{prompt: $decode.image,",
            ("cycle", "encode -> denoise -> decode -> encode"),
        ),
        (
            "embeds: $encode.embeds",
            "embeds: $encod.embeds",
            ("flux-tiny.yaml:42", "'encod'", "did you mean 'encode'"),
        ),
        ("op: denoise", "op: denoize", ("flux-tiny.yaml:39", "unknown op 'denoize'")),
        (
            "FluxTransformer2DModel",
            "FluxTransformer2Model",
            ("flux-tiny.yaml:19", "did you mean 'FluxTransformer2DModel'"),
        ),
        (
            "diffusers.FluxTransformer2DModel",
            "os.system",
            ("flux-tiny.yaml:19", "outside the trusted packages"),
        ),
        ("default: a lighthouse at dusk", "required: true", ("flux-tiny.yaml", "required")),
    ],
    ids=["yaml", "key", "type", "cycle", "dangling", "op", "class", "package", "extra"],
)
def test_a_bad_graph_file_is_refused_with_its_line(
    graphrun: Cli, edit_graph: Callable[[str, str], str], old: str, new: str, words: tuple[str, ...]
) -> None:
    refused(graphrun("plan", edit_graph(old, new), "--device", "sim", "--vram", "6M"), *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--vram", "8 bananas"), ("'8 bananas' is not a size",)),
        (("--vram", "8"), ("vram: '8' has no unit: did you mean 8G?",)),
        (("--ram", "64"), ("no memory of its own: add --vram, such as --vram 8G",)),
        (("--vram", "50%"), ("no device is known here",)),
        (("--vram", "-3G"), ("not a positive size",)),
        (("--vram", "0"), ("not a positive size",)),
        (("--vram", "6M", "--ram", "much"), ("ram: 'much'",)),
        (
            ("--vram", "6M", "--set", "heigth=128"),
            ("unknown input 'heigth'", "did you mean 'height'"),
        ),
        (("--vram", "6M", "--set", "height=100"), ("not a multiple of 16",)),
        (("--vram", "6M", "--set", "height"), ("'height' is not NAME=VALUE, such as height=512",)),
        (("--vram", "6M", "--hardware", "rtx409"), ("did you mean 'rtx4090'",)),
        (("--vram", "6M", "--hardware", "rtx4090"), ("leave one of them out",)),
    ],
)
def test_a_bad_option_is_refused(
    graphrun: Cli, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    refused(graphrun("plan", TINY, "--device", "sim", *arguments), *words)


def test_a_missing_prompt_is_refused_before_anything_is_planned(
    graphrun: Cli, edit_graph: Callable[[str, str], str]
) -> None:
    path = edit_graph("prompt: {type: str, default: a lighthouse at dusk}", "prompt: {type: str}")
    refused(graphrun("run", path, "--device", "sim", "--vram", "6M"), "input 'prompt' is missing")


def test_missing_files_and_corrupt_weights_are_refused(
    graphrun: Cli, edit_graph: Callable[[str, str], str], tmp_path: Path
) -> None:
    refused(graphrun("plan", "nowhere.yaml", "--vram", "8G"), "nowhere.yaml: no such file")
    (tmp_path / "broken.json").write_text("{")
    refused(graphrun("check", "broken.json"), "broken.json", "is not JSON")
    refused(graphrun("run", TINY, "--vram", "6M"), "no CUDA device", "--device sim")
    path = edit_graph(
        "{class: transformers.CLIPTextModel,",
        "{class: transformers.CLIPTextModel, source: ./weights,",
    )
    answer = graphrun("run", path, "--device", "sim", "--vram", "6M")
    assert answer[0] == 2
    assert "no such folder" in answer[2]
    (tmp_path / "graphs/weights").mkdir()
    (tmp_path / "graphs/weights/model.safetensors").write_bytes(b"\x10" + b"\0" * 20)
    answer = graphrun("run", path, "--device", "sim", "--vram", "6M")
    assert answer[0] == 2
    assert "model.safetensors" in answer[2]
    assert not list(tmp_path.rglob("*.png"))


def test_a_place_that_cannot_be_written_is_refused_before_the_run(
    graphrun: Cli, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    refused(
        graphrun("run", TINY, "--device", "sim", "--vram", "6M", "--output", "file/a.png"),
        "file/a.png",
        "cannot be written",
    )


@pytest.mark.sweep("more")
def test_estimate_needs_no_budget_and_its_json_has_a_basis_for_every_number(graphrun: Cli) -> None:
    code, output, _ = graphrun("estimate", TINY, "--device", "sim")
    assert code == 0
    assert output.startswith("needs 13.0 MiB with everything on the device; takes ")
    assert "\nestimate flux-tiny" in output
    assert max(map(len, output.splitlines())) <= 80
    code, output, _ = graphrun(
        "estimate", TINY, "--device", "sim", "--set", "height=192", "--no-cache", "--json"
    )
    estimate = json.loads(output)
    assert estimate["settings"]["height"] == "192"
    assert {phase["basis"] for phase in estimate["phases"]} == {"traced"}
    assert {w["basis"] for row in estimate["components"] for w in row["weights"].values()} == {
        "graph file",
        "formula",
    }


@pytest.mark.sweep("more")
def test_estimate_says_what_diffusers_modes_take(graphrun: Cli) -> None:
    code, output, _ = graphrun("estimate", TINY, "--hardware", "rtx4060", "--mode", "model")
    assert code == 0
    assert "model offloading: peak" in output
    assert re.search(r"predicted [\d.]+ ms \([\d.]+ ms to [\d.]+ ms, host copies vary\)", output), (
        "a data-sheet estimate gives a range, and why it is as wide"
    )
    options = (
        "--mode",
        "group",
        "--pinned",
        "0",
        "--keep",
        "vae",
        "--precision",
        "transformer=nf4",
    )
    code, output, _ = graphrun("estimate", TINY, "--hardware", "rtx4060", *options, "--json")
    mode, components = json.loads(output)["mode"], json.loads(output)["components"]
    precisions = {"transformer": "nf4"}
    expected = sum(
        row["weights"][precisions.get(row["name"], row["dtype"])]["bytes"] for row in components
    )
    assert (mode["name"], mode["weights_bytes"], mode["copied_out_bytes"]) == ("group", expected, 0)
    refused(graphrun("estimate", TINY, "--mode", "modal"), "mode 'modal' is not known", "model")


def test_doctor_says_what_is_here(graphrun: Cli) -> None:
    code, output, _ = graphrun("doctor")
    assert code == 0
    assert output.startswith("ready: ")
    assert "bitsandbytes" in output
    code, output, _ = graphrun("doctor", "--json")
    assert (code, json.loads(output)["device"]["sim"]) == (0, True)


@pytest.mark.sweep("more")
def test_the_list_says_for_how_much_ram_its_least_vram_is(graphrun: Cli) -> None:
    code, output, _ = graphrun("list")
    assert code == 0
    assert (
        "\n least VRAM: the smallest of 8, 12, 16 and 24 GiB that fits with 64 GiB of RAM\n"
        in output
    )
    rows = json.loads(graphrun("list", "--json")[1])["graphs"]
    assert all(row["ram_gib"] == 64 for row in rows if "card_gib" in row)


@pytest.mark.sweep("more")
def test_a_profile_is_measured_kept_and_planned_for(
    graphrun: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code, output, _ = graphrun(
        "calibrate", "--device", "sim", "--name", "mine", "--seconds", "0.5", "--json"
    )
    assert (code, json.loads(output)["hardware"]["basis"]) == (0, "measured")
    assert (tmp_path / "cache/graphrun/profiles/mine.json").is_file()
    code, output, _ = graphrun("plan", TINY, "--hardware", "mine", "--vram", "6M")
    assert code == 0
    assert " on mine (measured), " in output
    refused(graphrun("calibrate", "--device", "tpu"), "cannot be calibrated; use cuda, ")
    refused(
        graphrun("calibrate", "--device", "sim", "--name", "rtx4090"), "name of a built-in card"
    )


def test_schema_is_json(graphrun: Cli) -> None:
    code, output, _ = graphrun("schema")
    assert code == 0
    assert json.loads(output)["properties"]["stages"]


def test_importing_graphrun_imports_no_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys, graphrun, graphrun.cli.main; sys.exit('torch' in sys.modules or 'highspy' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_command_ends_without_a_search_for_reference_cycles() -> None:
    import subprocess
    import sys

    code = (
        "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 0)); "
        "from graphrun.cli.main import main; main()"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=True
    )
    assert process.stdout.splitlines()[1:] == ["True"]


def test_the_style_of_a_json_answer_for_an_infeasible_budget(graphrun: Cli) -> None:
    code, output, err = graphrun("plan", TINY, "--device", "sim", "--vram", "1M", "--json")
    data: dict[str, Any] = json.loads(output)
    assert (code, data["feasible"], data["binding"]) == (3, False, "VRAM")
    assert "fits: no. No plan runs flux-tiny on sim" in err
    assert data["needs"][0]["short_bytes"] > 0


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data.pop("problem"), ("is damaged", "problem", "plan again")),
        (lambda data: data.pop("graph_file"), ("names no graph",)),
        (
            lambda data: data["problem"].update(budget_bytes="big"),
            ("is damaged", "problem.budget_bytes", "integer"),
        ),
        (
            lambda data: data["problem"]["hardware"].pop("name"),
            ("is damaged", "problem.hardware.name"),
        ),
        (
            lambda data: data["problem"]["hardware"].update(flops_per_second=5.0),
            ("digest", "refused"),
        ),
        (lambda data: data.update(actions=["plan x", "slot"]), ("actions:", "expected 'slot")),
        (lambda data: data.update(actions=5), ("is damaged",)),
        (lambda data: data.pop("graphrun"), ("is not a plan", "plan again")),
    ],
)
def test_a_damaged_plan_file_is_refused(
    graphrun: Cli, tmp_path: Path, change: Callable[[dict[str, Any]], Any], words: tuple[str, ...]
) -> None:
    graphrun("plan", TINY, "--device", "sim", "--vram", "6M", "--set", "steps=1", "-o", "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    change(data)
    (tmp_path / "plan.json").write_text(json.dumps(data))
    refused(graphrun("run", "plan.json"), "plan.json", *words)


@pytest.mark.parametrize("trace", [False, True])
def test_a_plan_of_the_older_form_is_refused_with_what_to_do(
    graphrun: Cli, tmp_path: Path, trace: bool
) -> None:
    """Version 1 had other keys (``home``, ``classes``), slot parts (``rest``) and actions
    (``fill``)."""
    component = {
        "name": "vae",
        "classes": [["blocks", ["0"], True]],
        "variants": [{"precision": "bfloat16", "home": "pinned"}],
    }
    actions = [
        "plan 0123",
        "slot decode/0:vae load x0",
        "  fill vae",
        "slot decode/0:vae rest x1",
        "  run",
    ]
    plan: dict[str, Any] = {
        "graphrun": 1,
        "graph_file": TINY,
        "actions": actions,
        "problem": {"components": [component]},
    }
    event = {
        "kind": "fill",
        "component": "vae",
        "slot": 0,
        "detail": "0",
        "nbytes": 1,
        "start_seconds": 0.0,
        "end_seconds": 1.0,
    }
    (tmp_path / "old.json").write_text(
        json.dumps({"events": [event], "plan": plan} if trace else plan)
    )
    commands = (
        [("report", "old.json")]
        if trace
        else [(name, "old.json") for name in ("run", "check", "explain", "report")]
    )
    for command in commands:
        refused(
            graphrun(*command),
            "old.json: is a plan of version 1, and this graphrun reads version 3; plan again: "
            "graphrun plan",
        )
