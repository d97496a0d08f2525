"""``graphrun fit`` and ``graphrun list --card``: which formats of a model fit a machine."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import graphrun as package
from graphrun import fitting
from graphrun.cli.fitting import ram_for_weights
from graphrun.cli.planning import ram_note
from graphrun.graph.graph import Graph
from graphrun.graph.parts import Checkpoint
from graphrun.graph.precisions import GGUF_MIXES, PLANNED_ONLY, QUANTIZED
from graphrun.model.fit import Fit
from graphrun.model.problem import Problem
from graphrun.profile.hardware import hardware
from graphrun.solve.fits import _gains, fits_of
from graphrun.solve.infeasible import smallest_budget
from graphrun.units import GIB

Cli = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parent.parent
LAPTOP = ("--card", "rtx4060laptop", "--ram", "16G")


@pytest.fixture(scope="module")
def problem() -> Problem:
    """FLUX.1-dev at full size on a laptop with 8 GiB of VRAM and 16 GiB of RAM."""
    graph = package.load("flux-dev")
    return package.estimate(graph, vram="8G", ram="16G", hardware="rtx4060laptop")


@pytest.mark.sweep("more")
@pytest.mark.long
def test_formats_of_published_checkpoints_fit_where_16_bits_wait_for_the_disk(
    problem: Problem,
) -> None:
    fits = {" ".join(fit.allow): fit for fit in fits_of(problem)}
    assert {"", "4bit", "5bit", "6bit", "8bit"} == fits.keys()
    compute_seconds = package.plan(problem).simulation.compute_seconds
    assert fits[""].seconds > 4 * compute_seconds
    read_seconds = 9.2 * GIB / problem.hardware.disk_bytes_per_second
    assert fits["4bit"].seconds < 1.1 * compute_seconds + read_seconds
    for fit in fits.values():
        assert 0 < fit.device_bytes <= 8 * GIB
        assert 0 < fit.ram_bytes <= 16 * GIB
    precisions = {
        name: {item.name: item.variants[0].precision for item in fit.components(problem)}
        for name, fit in fits.items()
    }
    assert precisions[""]["transformer"] == "bfloat16"
    assert precisions["4bit"]["transformer"] in ("nf4", "Q4_K_S", "Q4_0")
    # a plan with the permission takes what was said
    graph = package.load("flux-dev")
    allowed_problem = replace(problem, allow=graph.allowed(["4bit"]))
    fit = fits["4bit"]
    seconds = package.plan(allowed_problem).simulation.total_seconds
    assert seconds == pytest.approx(fit.seconds, rel=0.03)
    # and in the VRAM and RAM that are said to be enough
    enough_problem = replace(
        allowed_problem, budget_bytes=fit.device_bytes, ram_bytes=fit.ram_bytes
    )
    enough_seconds = package.plan(enough_problem).simulation.total_seconds
    assert 0.999 * seconds < enough_seconds < 1.03 * seconds
    assert fit.device_bytes < 5 * GIB, "the plan above fills its 8 GiB"


@pytest.mark.sweep("more")
@pytest.mark.long
def test_without_permission_published_checkpoints_change_no_plan(problem: Problem) -> None:
    def without(graph: Graph) -> Graph:
        components = {name: c.without_checkpoints() for name, c in graph.components.items()}
        return replace(graph, components=components)

    bare = package.estimate(
        without(package.load("flux-dev")), vram="8G", ram="16G", hardware="rtx4060laptop"
    )
    assert len(bare.component("transformer").variants) < len(
        problem.component("transformer").variants
    )
    texts = [str(package.plan(item).plan).splitlines() for item in (problem, bare)]
    assert texts[0][1:] == texts[1][1:], "the first line has the problem's digest"


@pytest.mark.sweep("more")
@pytest.mark.long
def test_a_choice_has_a_command_and_its_sources(graphrun: Cli) -> None:
    code, output, _ = graphrun("fit", "flux-dev", *LAPTOP, "--want", "2 min", "--json")
    summary = json.loads(output)
    assert code == 0
    assert (summary["want_seconds"], summary["basis"]) == (120.0, "data sheet")
    best, *rest, svdquant = summary["choices"]
    assert best["within"]
    assert not rest[-1]["within"], "16 bits wait for the disk"
    # what graphrun plans and does not run is last, however fast it is
    assert svdquant["allow"] == ["4bit", "svdq-int4"]
    assert svdquant["seconds"] < best["seconds"]
    assert [row["planned_only"] for row in summary["choices"]] == [False] * (1 + len(rest)) + [True]
    assert svdquant["sources"]["transformer"].startswith("nunchaku-tech/nunchaku-flux.1-dev/")
    for row in summary["choices"]:
        low, high = row["seconds_range"]
        assert low < row["seconds"] < high
        assert row["range_reason"] == "host copies vary"
        assert row["download_bytes"] > 6e9
        words = shlex.split(row["command"])
        assert words[:3] == ["graphrun", "plan", "flux-dev"]
        assert words[words.index("--ram") + 1] == "12G", "the system needs the rest"
        assert [words[n + 1] for n, word in enumerate(words) if word == "--allow"] == row["allow"]
        assert row["sources"].keys() <= row["formats"].keys()
    code, output, _ = graphrun("fit", "flux-dev", *LAPTOP, "--want", "2 min")
    assert code == 0
    assert output.startswith("fits: yes. flux-dev on rtx4060laptop (data sheet): ")
    assert max(map(len, output.splitlines())) <= 80
    assert "city96/t5-v1_1-xxl-encoder-gguf" in output
    assert "ranges: host copies vary" in " ".join(output.split())
    assert " 4bit, svdq-int4 * " in output
    assert "* planned only, not run: " in output
    assert "within 2 min 0 s: 8bit, 4bit format" in " ".join(output.split())
    # it does not count where nothing that runs is as fast
    code, output, _ = graphrun("fit", "flux-dev", *LAPTOP, "--want", "60 s")
    assert (code, "nothing runs within 60 s" in " ".join(output.split())) == (1, True)
    code, output, _ = graphrun("fit", "flux-dev", *LAPTOP, "--want", "1 s")
    assert (code, "nothing runs within 1.0 s" in " ".join(output.split())) == (1, True)


@pytest.mark.sweep("more")
@pytest.mark.long
def test_a_folder_is_imported_and_nothing_is_written(graphrun: Cli, tmp_path: Path) -> None:
    code, output, err = graphrun(
        "fit", str(ROOT / "graphs" / "shapes"), *LAPTOP, "--json", "--no-cache"
    )
    assert code == 0, err
    assert [row["allow"] for row in json.loads(output)["choices"]] == [[]]
    assert not list(tmp_path.rglob("*.yaml"))


def test_choices_are_kept_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, card = package.load("shapes"), hardware("rtx4060laptop")
    rows = fitting.fit(graph, card, "1G", "1G", cache=tmp_path)
    assert rows
    assert rows == fitting.fit(graph, card, "1G", "1G")
    monkeypatch.setattr("graphrun.solve.fits.fits_of", lambda *_: ())
    assert rows == fitting.fit(graph, card, "1G", "1G", cache=tmp_path)
    assert not fitting.fit(graph, card, "1G", "2G", cache=tmp_path), "another budget"
    monkeypatch.setattr("graphrun.store.own_source", lambda: "other code")
    assert not fitting.fit(graph, card, "1G", "1G", cache=tmp_path)


@pytest.mark.parametrize(
    ("ram", "budget"),
    [("16G", "12G"), ("64 GiB", "60G"), ("8G", "6G"), ("auto", "auto"), ("50%", "50%")],
)
def test_a_part_of_the_ram_is_the_systems(ram: str, budget: str) -> None:
    assert ram_for_weights(ram) == budget


def test_a_choice_that_changes_the_output_gains_something() -> None:
    plain = Fit((), (), 100.0, 8 * GIB, 16 * GIB)
    for seconds, ram_bytes, gains in ((96.0, 16 * GIB, False), (94.0, 17 * GIB, True)):
        assert _gains(Fit(("8bit",), (), seconds, 8 * GIB, ram_bytes), plain) is gains
    assert _gains(Fit(("4bit",), (), 120.0, 8 * GIB, 15 * GIB), plain)


@pytest.mark.sweep("more")
def test_what_fits_only_in_tiles_is_a_choice(
    edit_graph: Callable[..., Graph], tmp_path: Path
) -> None:
    edits = ("    uses: [vae]\n", "    uses: [vae]\n    options: [tiling]\n")
    graph, card = edit_graph("sdxl-tiny", edits), hardware("rtx4060laptop")
    options: dict[str, Any] = {"inputs": {"height": 1024, "width": 1024}, "cache": tmp_path}
    tiled_bytes, whole_bytes = (
        smallest_budget(
            package.estimate(graph, vram="8G", ram="8G", hardware=card, allow=allow, **options)
        )
        for allow in (("tiling",), ())
    )
    assert tiled_bytes < whole_bytes
    (row,) = fitting.fit(graph, card, (tiled_bytes + whole_bytes) // 2, "8G", **options)
    assert (row["allow"], row["changes_output"]) == (["tiling"], True)
    assert row["enough_vram_bytes"] < whole_bytes
    (row,) = fitting.fit(graph, card, "8G", "8G", **options)
    assert (row["allow"], row["changes_output"]) == ([], False), "all fits whole"
    assert not fitting.fit(graph, card, card.context_bytes + card.workspace_bytes, "8G", **options)


@pytest.mark.sweep("more")
def test_where_nothing_fits_the_command_that_helps_is_shown(graphrun: Cli) -> None:
    machine = ("--card", "rtx4060laptop", "--vram", "640M", "--ram", "16G")
    code, output, _ = graphrun("fit", "flux-tiny", *machine)
    assert code == 3
    assert output.startswith("fits: no. No format runs flux-tiny on rtx4060laptop")
    command = output.splitlines()[-1].strip()
    assert command == "graphrun plan flux-tiny --vram 640M --ram 12G --hardware rtx4060laptop"
    code, _, err = graphrun(*command.split()[1:])
    assert (code, "--vram" in err) == (3, True)


def test_what_fit_refuses(graphrun: Cli) -> None:
    for arguments, words in (
        (("fit", "flux-tiny", "--card", "sim"), "sim is no card"),
        (("list", "--card", "sim"), "sim is no card"),
        (("fit", "flux-tiny", "--want", "soon"), "--want: 'soon' is not a time"),
        (("fit", "flux-tiny", "--card", "rtx9999"), "rtx9999"),
        (
            ("fit", "flux-tiny", "--card", "4060"),
            "did you mean 'rtx4060', 'rtx4060ti' or 'rtx4060laptop'?",
        ),
        (
            ("fit", "flux-tiny", "--card", "NVIDIA GeForce RTX 4060 Laptop GPU"),
            "did you mean 'rtx4060laptop'?",
        ),
        (
            ("fit", "flux", *LAPTOP),
            "no graph of graphrun's own has this name; did you mean flux-dev",
        ),
        (("fit", "FLUX.1-dev", *LAPTOP), "graphrun's own graph of black-forest-labs/FLUX.1-dev is"),
        (("import", "flux-dev", "-o", "x.yaml"), "type its name: graphrun plan flux-dev"),
    ):
        code, output, err = graphrun(*arguments)
        assert (code, output) == (2, ""), arguments
        assert words in err


@pytest.mark.parametrize(
    ("ram_gib", "taken_gib", "note"),
    [
        (16, 15, "a machine with 16 GiB of RAM has some 12 free: plan with --ram 12G"),
        (16, 11, ""),
        (12, 11.5, ""),
        (32, 29, "a machine with 32 GiB of RAM has some 28 free: plan with --ram 28G"),
    ],
)
def test_a_plan_that_takes_all_of_a_machines_ram_has_a_note(
    ram_gib: int, taken_gib: float, note: str
) -> None:
    """People type the size of their machine, which a plan takes as what weights may have."""
    solution: Any = SimpleNamespace(
        problem=SimpleNamespace(ram_bytes=ram_gib * GIB, hardware=hardware("rtx4060laptop")),
        simulation=SimpleNamespace(host_peak_bytes=int(taken_gib * GIB)),
    )
    assert ram_note(solution) == note


def test_a_folder_with_one_file_of_weights_names_the_file(graphrun: Cli, tmp_path: Path) -> None:
    file = tmp_path / "flux1-dev-Q4_K_S.gguf"
    file.write_bytes(b"GGUF")
    for words in (("fit", str(tmp_path), *LAPTOP), ("import", str(tmp_path), "-o", "x.yaml")):
        code, _, err = graphrun(*words)
        assert code == 2
        assert f"for {file.name} in it, type its path: {file}" in err


def test_a_source_that_lacks_a_component_is_refused_before_a_plan(
    graphrun: Cli, tmp_path: Path
) -> None:
    """Planning reads no weights, but a plan for a folder that cannot be run is no answer."""
    words = ("plan", "flux-tiny", "--vram", "64M", "--ram", "1G", "--hardware", "rtx4060laptop")
    code, output, err = graphrun(*words, "--source", str(tmp_path / "nowhere"))
    assert (code, output) == (2, "")
    assert f"--source {tmp_path / 'nowhere'}: there is no such folder or file" in err
    (tmp_path / "flux1-dev-Q4_K_S.gguf").write_bytes(b"GGUF")
    code, output, err = graphrun(*words, "--source", str(tmp_path))
    assert (code, output) == (2, "")
    assert f"--source {tmp_path}: it has no folder text_encoder: give a folder in the layout" in err
    assert f"graphrun import {tmp_path / 'flux1-dev-Q4_K_S.gguf'} -o flux-tiny.yaml" in err


@pytest.mark.sweep("more")
def test_where_nothing_is_as_fast_as_wanted_the_screen_says_what_is_faster(graphrun: Cli) -> None:
    machine = ("--card", "rtx4060laptop", "--ram", "16G")
    code, output, _ = graphrun("fit", "flux-tiny", *machine, "--want", "1ms")
    text = " ".join(output.split())
    assert code == 1
    assert "nothing runs within 1 ms" in text
    assert "Fewer steps and smaller pictures are faster: add --set steps=" in text
    assert " or --set height=" in text


def test_list_shows_the_best_choice_of_each_graph(
    graphrun: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphrun.cli.graphs.shipped_graphs", lambda: ("flux-dev", "flux-tiny"))
    monkeypatch.setattr("graphrun.api.load", lambda name, **_: package.load("flux-tiny"))
    activities: list[str] = []
    monkeypatch.setattr(
        "graphrun.cli.fitting.alive", lambda text: activities.append(text) or nullcontext()
    )
    code, output, _ = graphrun("list", *LAPTOP, "--json")
    assert code == 0
    (row,) = json.loads(output)["graphs"]
    assert (row["name"], row["best"]["allow"]) == ("flux-dev", [])
    assert not row["best"]["planned_only"]
    # the first list makes a dry run of each graph, so it says how far it is
    assert activities == ["what fits of flux-tiny (1 of 1)"]
    _, output, _ = graphrun("list", *LAPTOP)
    assert output.splitlines()[1].split()[:5] == ["flux-dev", "as", "in", "the", "graph"]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("Q4_K_S: {source: a/b/c.safetensors}", "is no GGUF file, and the format is Q4_K_S"),
        ("nf4: {source: a/b/c.gguf}", "is a GGUF file, and the format is nf4"),
        ("Q9: {source: a/b/c.gguf}", "Q9"),
        ("nf4: {bytes: 5}", "source"),
    ],
)
def test_a_wrong_checkpoint_is_named_with_its_line(tmp_path: Path, entry: str, words: str) -> None:
    text = (ROOT / "graphs" / "shapes.yaml").read_text()
    text = text.replace("source: ./shapes", f"source: {ROOT / 'graphs' / 'shapes'}")
    text = text.replace("precision: [bfloat16, int8, nf4, fp8]", f"checkpoints: {{{entry}}}")
    (tmp_path / "graph.yaml").write_text(text)
    with pytest.raises(package.GraphError, match=r"graph\.yaml:\d+") as error:
        package.load(tmp_path / "graph.yaml")
    assert words in str(error.value)


def test_4bit_stands_for_the_formats_of_about_four_bits_that_a_graph_has() -> None:
    graph = package.load("flux-dev")
    assert graph.allowed(["4bit"]) == ("Q4_0", "Q4_K_S", "nf4")
    assert graph.allowed(["8bit", "cpu"]) == ("Q8_0", "cpu", "int8")
    assert set(graph.allowed(["precision"])) > {"Q4_0", "int8", "nf4", "Q6_K"}
    with pytest.raises(package.InputError, match="allow 4bit: this graph knows cpu, precision"):
        package.load("flux-tiny").allowed(["4bit"])


def test_precision_stands_for_the_formats_that_run() -> None:
    graph = package.load("flux-dev")
    assert "Q8_0" in graph.allowed(["precision"])
    assert not set(PLANNED_ONLY).intersection(graph.allowed(["precision"]))
    assert graph.allowed(["svdq-int4"]) == ("svdq-int4",)
    with pytest.raises(package.InputError, match="svdq-fp4, svdq-int4"):
        graph.allowed(["svdq"])


@pytest.mark.sweep("more")
def test_a_plan_with_a_planned_only_format_is_shown_and_not_run(
    graphrun: Cli, tmp_path: Path
) -> None:
    options = ("--vram", "12G", "--ram", "32G", "--set", "height=64", "--set", "width=64")
    card = ("--hardware", "rtx4070")
    allow, file = ("--allow", "4bit,svdq-int4"), tmp_path / "plan.json"
    words = ("flux-schnell", *options)
    code, output, _ = graphrun("plan", *words, *card, *allow, "-o", str(file))
    text = " ".join(output.split())
    assert code == 0
    assert output.startswith("fits: yes, but planned only. ")
    assert "svdq-int4_r32-flux.1-schnell.safetensors, 6.28 GiB; apache-2.0; planned only" in text
    assert "next, for a plan that runs: graphrun plan flux-schnell" in text
    command = text.partition("that runs: ")[2].partition(" text_encoder_2 in")[0]
    assert "svdq" not in command
    assert "--allow 4bit" in command
    refusal = (
        "graphrun: transformer in svdq-int4 is planned only, since graphrun does not load SVDQuant "
        "checkpoints: plan without --allow svdq-int4 (--allow 4bit has formats that run)\n"
    )
    permissions = ("--allow", "Q4_0,Q4_K_S,nf4,svdq-int4")
    code, _, errors = graphrun("run", str(file), *permissions, "--prompt", "a lighthouse")
    assert (code, errors.endswith(refusal)) == (2, True), errors


def test_another_source_has_no_published_checkpoints() -> None:
    shipped, other = package.load("flux-dev"), package.load("flux-dev", source="owner/fine-tuned")
    assert shipped.components["transformer"].checkpoints
    assert not other.components["transformer"].checkpoints
    assert other.components["transformer"].precision == ("bfloat16", "int8", "nf4")
    assert not shipped.without_sources().components["transformer"].checkpoints


def test_a_component_reads_each_precision_from_its_own_source() -> None:
    component: Any = package.load("flux-dev").components["transformer"]
    assert component.source_in("bfloat16") == "black-forest-labs/FLUX.1-dev/transformer"
    assert component.source_in("nf4") == "diffusers/FLUX.1-dev-bnb-4bit/transformer"
    assert component.source_in("Q8_0").endswith("flux1-dev-Q8_0.gguf")
    assert component.checkpoint("bfloat16") is None
    assert isinstance(component.checkpoint("Q8_0"), Checkpoint)
    assert hardware("rtx4060laptop").capacity_bytes == 8 * GIB


@pytest.mark.sweep("more")
@pytest.mark.parametrize(
    "precision",
    ["bfloat16", *(name for name in QUANTIZED if name != "gguf" and name not in PLANNED_ONLY)],
)
def test_with_the_memory_that_is_enough_a_run_is_at_most_3_percent_slower(
    precision: str, edit_graph: Callable[..., Graph]
) -> None:
    """In each format that ``fit`` offers, of a FLUX of 2 GiB in 16 bits, within three budgets."""
    config = json.loads((ROOT / "graphs" / "configs" / "tiny-flux-transformer.json").read_text())
    config |= {"num_attention_heads": 16, "attention_head_dim": 128, "axes_dims_rope": [16, 56, 56]}
    config |= {"num_layers": 4, "num_single_layers": 8}
    checkpoint = f"checkpoints: {{{precision}: {{source: a/b/c.gguf}}}}"
    entry = checkpoint if precision in GGUF_MIXES else f"precision: [{precision}]"
    graph = edit_graph(
        "flux-tiny",
        (
            "config: configs/tiny-flux-transformer.json, dtype: bfloat16",
            f"config: {json.dumps(config)}, dtype: bfloat16, {entry}",
        ),
    )
    transformer = replace(graph.components["transformer"], precision=(precision,))
    graph = replace(graph, components={**graph.components, "transformer": transformer})
    ample = package.estimate(graph, vram="8G", ram="16G", hardware="rtx4060laptop")
    weight_bytes = ample.component("transformer").weight_bytes()
    for share in (0.25, 0.4, 1.0):
        budget_bytes = smallest_budget(ample) + int(share * weight_bytes)
        problem = replace(ample, budget_bytes=budget_bytes)
        (fit,) = fits_of(problem)
        (numbers,) = (item for item in fit.components(problem) if item.name == "transformer")
        assert numbers.variants[0].precision == precision
        assert fit.device_bytes <= budget_bytes
        seconds = package.plan(problem).simulation.total_seconds
        enough_problem = replace(problem, budget_bytes=fit.device_bytes, ram_bytes=fit.ram_bytes)
        enough_seconds = package.plan(enough_problem).simulation.total_seconds
        assert enough_seconds < 1.03 * seconds, share
