"""Other engines: their command lines are in their grammars, their numbers from the simulator."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engine_wishes import engine_lines, wish

import graphrun as package
from graphrun.comparing import EngineComparison, engines_called
from graphrun.errors import InputError
from graphrun.profile.engines import (
    ENGINES,
    HOOKED_WHOLE,
    RESIDENT,
    SEGMENTED,
    STREAMED,
    STREAMED_BESIDE,
    SWAPPED,
    best_setting,
)
from graphrun.profile.hardware import hardware
from graphrun.profile.placements import WeightPlacement
from graphrun.report.engines_screen import compare_screen, export_lines
from graphrun.units import GIB

Cli = Callable[..., tuple[int, str, str]]
GRAMMARS = json.loads((Path(__file__).parent / "engine_grammars.json").read_text("utf-8"))
MIB = 2**20
SETTINGS: dict[str, Any] = {"ram": "1G", "hardware": "sim", "inputs": {"steps": 2}}


class Refused(Exception):
    """An engine's parser would refuse the line."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise Refused(message)


def parsed(name: str, line: str) -> argparse.Namespace:
    """What the parser of an engine makes of ``line``, by its grammar. Raises Refused."""
    grammar, words = GRAMMARS[name], shlex.split(line)
    start = grammar["starts"]
    if words[: len(start)] != start:
        raise Refused(f"starts with {words[: len(start)]}")
    parser = Parser(allow_abbrev=False)
    for positional in grammar["positional"]:
        parser.add_argument(positional)
    for option, kind in grammar["options"].items():
        match kind:
            case "flag":
                parser.add_argument(option, action="store_true")
            case "bool":
                parser.add_argument(option, nargs="?", const="true", choices=["true", "false"])
            case list():
                parser.add_argument(option, choices=kind)
            case "texts":
                parser.add_argument(option, nargs="+")
            case _:
                parse = {"number": float, "json": json.loads, "text": str}[kind]
                parser.add_argument(option, type=parse)
    for options in grammar.get("exclusive", ()):
        if len({*options} & {*words}) > 1:
            raise Refused(f"{options} exclude each other")
    return parser.parse_args(words[len(start) :])


def vllm_omni_refuses(config: Any) -> str:
    """Why vllm-omni would refuse ``config``, by the rules of its offloader/config.py; "" if not."""
    if set(config) - {"mode", "components", "layer_options", "pin_memory"}:
        return "unknown field"
    if config["mode"] not in ("module", "layer") or not config["components"]:
        return "mode or components"
    if set(config["components"]) - {"dit", "text_encoder"}:
        return "unknown component"
    layers = config.get("layer_options", {})
    if set(layers) - set(config["components"]) or (layers and config["mode"] == "module"):
        return "layer options"
    return "" if all(type(item["resident_layers"]) is int for item in layers.values()) else "number"


@cache
def comparison_at(vram: str) -> EngineComparison:
    graph = package.load("flux-tiny")
    solution = package.plan(package.estimate(graph, vram=vram, runs=package.api.RUNS, **SETTINGS))
    return EngineComparison(graph, solution)


def test_every_setting_that_is_compared_is_in_the_engines_grammar() -> None:
    for name, lines in engine_lines().items():
        for line in lines:
            values = parsed(name, line)
            if name == "vllm-omni" and values.diffusion_offload_config is not None:
                assert vllm_omni_refuses(values.diffusion_offload_config) == ""
            with pytest.raises(Refused):
                parsed(name, f"{line} --dit-offload")


def test_engines_own_parsers_accepted_every_line() -> None:
    """Recorded by ``benchmarks/engine_parsers.py``."""
    record = json.loads((Path(__file__).parent / "engine_lines.json").read_text("utf-8"))
    lines = engine_lines()
    assert record.keys() == lines.keys()
    for name, engine_record in record.items():
        assert engine_record["parser"] == ENGINES[name].source
        assert engine_record["accepted"] == lines[name], (
            f"{name}: run python benchmarks/engine_parsers.py"
        )


def test_the_lines_say_what_the_setting_is() -> None:
    streamed = {
        "transformer": replace(STREAMED, blocks=(4, 9)),
        "text_encoder_2": SWAPPED,
        "text_encoder": SWAPPED,
        "vae": SWAPPED,
    }
    values = parsed("sglang", shlex.join(ENGINES["sglang"].command(wish(streamed))))
    assert values.model_path == "black-forest-labs/FLUX.1-dev"
    assert (values.dit_layerwise_offload, values.dit_cpu_offload) == ("true", "false")
    assert values.dit_layerwise_resident_layers == 0.25
    assert (values.text_encoder_cpu_offload, values.vae_cpu_offload) == ("true", "true")
    streamed_dit = {"transformer": replace(STREAMED_BESIDE, blocks=(19, 3))}
    values = parsed("vllm-omni", shlex.join(ENGINES["vllm-omni"].command(wish(streamed_dit))))
    assert values.diffusion_offload_config == {
        "mode": "layer",
        "components": ["dit"],
        "layer_options": {"dit": {"resident_layers": 22}},
    }
    segmented_dit = wish({"transformer": replace(SEGMENTED, blocks=(2, 0))}, on_cpu=("vae",))
    values = parsed("sd.cpp", shlex.join(ENGINES["sd.cpp"].command(segmented_dit)))
    card = hardware("rtx4090")
    assert values.max_vram == pytest.approx(
        8 - (card.context_bytes + card.workspace_bytes) / GIB, abs=0.01
    )
    assert (values.params_backend, values.stream_layers, values.backend) == (
        "*=cpu",
        True,
        "vae=cpu",
    )
    assert (values.t5xxl, values.clip_l) == (
        "text_encoder_2.safetensors",
        "text_encoder.safetensors",
    )
    values = parsed("comfyui", shlex.join(ENGINES["comfyui"].command(wish({}))))
    assert values.reserve_vram == pytest.approx(card.capacity_bytes / GIB - 8, abs=0.01)
    assert values.vram_headroom == values.reserve_vram


@pytest.mark.sweep("more")
@pytest.mark.long
def test_numbers_of_the_comparison_are_those_of_the_simulator() -> None:
    comparison = comparison_at("12M")
    rows = {
        name: comparison.row(engine, comparison.best(engine)) for name, engine in ENGINES.items()
    }
    for name, row in rows.items():
        setting = comparison.best(ENGINES[name])
        caveat = f"not counted: {row['caveat']}"
        assert (caveat in compare_screen(comparison.summary([row]))) == bool(row["caveat"])
        if setting.placements:
            estimate = comparison.scene.estimate(setting.placements)
            assert row["seconds"] == sum(estimate.seconds.values())
            assert row["peak_bytes"] == comparison.scene.peak_bytes(estimate)
        assert row["fits"] == (row["peak_bytes"] <= 12 * MIB)
    summary = comparison.summary([*rows.values()])
    assert summary["seconds"] == comparison.solution.simulation.further_seconds
    assert rows["sglang"]["ratio"] == rows["sglang"]["seconds"] / summary["seconds"]


@pytest.mark.long
def test_estimates_of_modes_are_those_of_the_survey() -> None:
    comparison = comparison_at("12M")
    diffusers = replace(ENGINES["diffusers"], modes=("group",))
    setting = best_setting(diffusers, comparison.scene, (12 * MIB, GIB))
    survey = package.survey(
        package.load("flux-tiny"), hardware="sim", inputs={"steps": 2}, mode="group"
    )
    assert setting.seconds == pytest.approx(survey["mode"]["seconds"])
    assert setting.peak_bytes == survey["mode"]["peak_bytes"]


@pytest.mark.long
def test_placements_take_the_memory_and_the_copies_that_they_are_described_with() -> None:
    scene = comparison_at("64M").scene
    names = list(scene.weights)
    whole = scene.estimate(dict.fromkeys(names, RESIDENT))
    assert (whole.copied_in_bytes, whole.copied_out_bytes) == (0, 0)
    assert set(whole.on_device) == {sum(scene.weights.values())}
    swapped = scene.estimate(dict.fromkeys(names, SWAPPED))
    assert swapped.copied_in_bytes == swapped.copied_out_bytes == sum(scene.weights.values())
    by_stage = max(
        scene.weights["text_encoder"] + scene.weights["text_encoder_2"],
        scene.weights["transformer"],
        scene.weights["vae"],
    )
    assert max(swapped.on_device) == by_stage
    no_copies = scene.estimate(dict.fromkeys(names, WeightPlacement("swapped", copies_back=False)))
    assert no_copies.copied_out_bytes == 0
    assert sum(no_copies.seconds.values()) < sum(swapped.seconds.values())
    streamed_dit = {**dict.fromkeys(names, RESIDENT), "transformer": STREAMED_BESIDE}
    streamed = scene.estimate(streamed_dit)
    assert max(streamed.on_device) < sum(scene.weights.values())
    steps = sum(call.component == "transformer" for _, call in scene.dry_run.recording.entries())
    partly = scene.estimate({**streamed_dit, "transformer": replace(STREAMED_BESIDE, blocks=(4,))})
    block_bytes = (streamed.copied_in_bytes - partly.copied_in_bytes) / steps / 4
    # the same four blocks are on the device all the time, and in no copy
    assert min(partly.on_device) == pytest.approx(min(streamed.on_device) + 4 * block_bytes)
    hooked = scene.estimate(dict.fromkeys(names, HOOKED_WHOLE))
    assert sum(hooked.seconds.values()) > sum(streamed.seconds.values()) > 0
    assert max(hooked.on_device) < max(swapped.on_device)


@pytest.mark.long
def test_a_streamed_component_waits_for_what_compute_cannot_hide() -> None:
    scene, rates = comparison_at("64M").scene, {"copy_start_seconds": 0.0}
    names = list(scene.weights)
    streamed = {**dict.fromkeys(names, RESIDENT), "transformer": STREAMED_BESIDE}
    resident_seconds = sum(scene.estimate(dict.fromkeys(names, RESIDENT)).seconds.values())

    def seconds(h2d_bytes_per_second: float, blocks: tuple[int, ...] = ()) -> float:
        card = replace(scene.hardware, h2d_bytes_per_second=h2d_bytes_per_second, **rates)
        placements = {**streamed, "transformer": replace(STREAMED_BESIDE, blocks=blocks)}
        return sum(replace(scene, hardware=card).estimate(placements).seconds.values())

    assert seconds(1e18) == pytest.approx(resident_seconds)
    copied_bytes = scene.estimate(streamed).copied_in_bytes
    # so slow that all computing of blocks is hidden behind copies, or nearly
    slow = copied_bytes / 100 / resident_seconds
    assert seconds(slow) == pytest.approx(100 * resident_seconds, rel=0.02)
    # a copy starts one block ahead: a block waits for it where its copy takes longer
    middle = copied_bytes / resident_seconds
    assert resident_seconds < seconds(middle, (4,)) < seconds(middle) < 2 * resident_seconds


@pytest.mark.sweep("more")
@pytest.mark.long
def test_a_segmented_component_computes_while_nothing_is_copied() -> None:
    scene = comparison_at("64M").scene
    placements = dict.fromkeys(scene.weights, RESIDENT)
    resident_seconds = sum(scene.estimate(placements).seconds.values())
    steps = sum(call.component == "transformer" for _, call in scene.dry_run.recording.entries())
    byte_counts = list[float]()
    for blocks in ((), (1,), (2,)):
        placements["transformer"] = replace(SEGMENTED, blocks=blocks)
        estimate = scene.estimate(placements)
        rate = scene.hardware.pageable_bytes_per_second
        waiting_seconds = sum(estimate.seconds.values()) - resident_seconds
        assert waiting_seconds == pytest.approx(estimate.copied_in_bytes / rate)
        byte_counts.append(estimate.copied_in_bytes)
    assert byte_counts[0] - byte_counts[1] == pytest.approx(byte_counts[1] - byte_counts[2])
    block_bytes = scene.estimate(placements).on_device
    assert steps == 2
    assert byte_counts[0] > byte_counts[1] > 0, "a block that stays is copied once"
    assert max(block_bytes) < max(scene.estimate(dict.fromkeys(placements, RESIDENT)).on_device)
    assert estimate.copied_out_bytes == 0


@pytest.mark.long
def test_blocks_that_stay_from_their_first_use_are_copied_like_the_others_then() -> None:
    scene = comparison_at("64M").scene
    placements = dict.fromkeys(scene.weights, RESIDENT)
    estimates = {}
    for rest in ("stage", "use"):
        for blocks in ((), (2,)):
            placements["transformer"] = WeightPlacement("streamed", blocks, rest=rest)
            estimates[rest, len(blocks)] = scene.estimate(placements)
    byte_counts = {key: estimate.copied_in_bytes for key, estimate in estimates.items()}
    assert byte_counts["use", 0] == byte_counts["stage", 0]
    assert byte_counts["use", 0] > byte_counts["use", 1] == byte_counts["stage", 1]
    seconds = {key: sum(estimate.seconds.values()) for key, estimate in estimates.items()}
    assert seconds["use", 0] == seconds["stage", 0] > seconds["use", 1]
    assert seconds["use", 1] < seconds["stage", 1], "the first call computes meanwhile"


def test_sd_cpp_keeps_blocks_beyond_what_it_leaves_free() -> None:
    scene, engine = comparison_at("64M").scene, ENGINES["sd.cpp"]
    assert engine.margin_bytes(8 * GIB) == GIB // 2 + 2 * GIB
    whole = best_setting(engine, scene, (64 * MIB, GIB))
    assert set(whole.placements.values()) == {RESIDENT}
    tight = best_setting(engine, scene, (8 * MIB, GIB)).placements["transformer"]
    assert (tight.kind, tight.blocks) == ("segmented", ())
    blocks = replace(engine, margin_bytes=lambda _: 0)
    assert any(best_setting(blocks, scene, (8 * MIB, GIB)).placements["transformer"].blocks)


@pytest.mark.long
def test_more_memory_is_never_slower_and_what_does_not_fit_says_so() -> None:
    comparisons = {vram: comparison_at(vram) for vram in ("3M", "8M", "12M", "64M")}
    for name in ENGINES:
        settings = [item.best(ENGINES[name]) for item in comparisons.values()]
        seconds = [setting.seconds for setting in settings if setting.fits]
        assert seconds == sorted(seconds, reverse=True), name
        assert settings[-1].fits
    tight = comparisons["3M"]
    row = tight.row(ENGINES["vllm-omni"], tight.best(ENGINES["vllm-omni"]))
    assert row["fits"] is False
    assert "and the budget is 3.00 MiB: plan with --vram " in row["reason"]
    lines = export_lines(tight.summary([row]))
    assert any(line.startswith("vllm-omni does not fit: needs ") for line in lines)


def test_a_faster_engine_is_named() -> None:
    row = {
        "engine": "sglang",
        "command": "sglang serve",
        "seconds": 2.0,
        "seconds_range": (1.5, 7.2),
        "range_reason": "host copies vary",
        "peak_bytes": GIB,
        "ratio": 0.5,
        "fits": True,
        "reason": "",
        "caveat": "",
        "lost": [],
    }
    summary = {
        "graph": "g",
        "hardware": "rtx4090",
        "basis": "data sheet",
        "seconds": 4.0,
        "seconds_range": (3.3, 5.0),
        "range_reason": "like published runs",
        "budget_bytes": 8 * GIB,
        "peak_bytes": 7 * GIB,
        "engines": [row],
        "fastest": "sglang",
    }
    assert compare_screen(summary).startswith("use sglang: 2.0 s a warm run of g within 8.00 GiB")
    screen = " ".join(compare_screen(summary).split())
    assert "sglang 2.000 2 to 7 0.50" in screen
    assert "ranges: host copies vary, like published runs" in screen
    assert "use sglang: it is faster than the plan" in export_lines(summary)
    assert EngineComparison.summary(comparison_at("64M"), [{**row, "caveat": "x"}])["fastest"] == (
        "graphrun"
    )
    partly_counted = {**summary, "engines": [{**row, "caveat": "x"}], "fastest": "graphrun"}
    assert "takes 0.50 times as long" not in compare_screen(partly_counted)
    slower = {**row, "ratio": 1.31, "seconds": 5.24}
    summary = {**summary, "engines": [slower], "fastest": "graphrun"}
    assert compare_screen(summary).startswith("use graphrun: 4.0 s a warm run of g")
    assert export_lines(summary)[0].startswith("sglang: within 1.31x of the plan: a warm run takes")


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(InputError, match="engine 'sglangs' is not known; did you mean 'sglang'"):
        engines_called(["sglangs"])
    assert [engine.name for engine in engines_called(["all", "sglang"])] == list(ENGINES)


@pytest.mark.sweep("more")
@pytest.mark.long
def test_every_exported_line_is_in_the_engines_grammar_and_stderr_says_what_is_lost(
    graphrun: Cli, tmp_path: Path
) -> None:
    graphs, file = Path(__file__).parents[2] / "graphs", tmp_path / "sourced.yaml"
    text = (graphs / "flux-tiny.yaml").read_text(encoding="utf-8")
    for old, new in (
        ("name: flux-tiny", "name: sourced\nsource: someone/tiny@v1"),
        ("configs/", f"{graphs}/configs/"),
        ("tokenizers/", f"{graphs}/tokenizers/"),
    ):
        text = text.replace(old, new)
    file.write_text(text, encoding="utf-8")
    budgets = ("--vram", "8M", "--ram", "8G", "--device", "sim", "--set", "steps=2")
    assert graphrun("plan", str(file), *budgets, "-o", "plan.json")[0] == 0
    for name in GRAMMARS:
        code, line, errors = graphrun("export", "plan.json", "--to", name)
        assert code == 0, errors
        assert line.count("\n") == 1
        parsed(name, line)
        assert "x of the plan: a warm run takes" in errors
        caveat = ENGINES[name].caveat
        assert (f"not counted for {name}: {caveat}" in errors) == bool(caveat)
        is_lost = "budget" not in ENGINES[name].expresses
        assert (
            f"lost in {name}: a budget: a run that needs more memory fails" in errors
        ) == is_lost
    assert graphrun("export", "plan.json", "--to", "sglang", "-o", "line.sh")[0] == 0
    values = parsed("sglang", Path("line.sh").read_text(encoding="utf-8"))
    assert (values.model_path, values.revision) == ("someone/tiny", "v1")
    assert graphrun("plan", "flux-tiny", *budgets, "-o", "random.json")[0] == 0
    code, _, errors = graphrun("export", "random.json", "--to", "sglang")
    assert (
        code,
        "random weights are graphrun's own; to export its plan, give the graph file" in errors,
    ) == (
        2,
        True,
    )
    code, _, errors = graphrun("export", "plan.json", "--to", "all")
    assert (code, "graphrun compare shows all" in errors) == (2, True)


@pytest.mark.sweep("more")
@pytest.mark.long
def test_the_command_compares_and_refuses_a_cpu(graphrun: Cli) -> None:
    budgets = ("--vram", "12M", "--ram", "8G", "--device", "sim", "--set", "steps=2")
    code, screen, _ = graphrun("compare", "flux-tiny", *budgets, "--engines", "sglang,comfyui")
    assert code == 0
    assert "not counted: what it keeps for the next run" in screen
    assert "sglang serve --model-path MODEL" in screen
    code, text, _ = graphrun("compare", "flux-tiny", *budgets, "--json")
    output = json.loads(text)
    assert [row["engine"] for row in output["engines"]] == list(ENGINES)
    assert graphrun("compare", "flux-tiny", *budgets, "--engines", "none")[0] == 2
    cpu = ("compare", "flux-tiny", "--device", "cpu", "--set", "steps=2")
    code, _, message = graphrun(*cpu)
    assert (code, "shares its memory with the host: plan with --vram 8G" in message) == (2, True)
