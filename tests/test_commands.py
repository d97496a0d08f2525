"""Commands that compare plans, as their users meet them."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image

from graphrun.cli.options import merge_options
from graphrun.model.problem import Problem
from graphrun.solve import alternatives, frontier, pages, solve
from graphrun.solve.suggestions import Suggestion
from graphrun.units import GIB, MIB

TINY = str(Path(__file__).parent.parent / "graphs" / "flux-tiny.yaml")
Cli = Callable[..., tuple[int, str, str]]


def next_command(screen: str) -> list[str]:
    """The arguments of the command after ``next:``, as a shell reads them."""
    lines = re.search(r"^next[^:]*: graphrun ((?:.*\\\n)*.*)$", screen, re.MULTILINE)
    assert lines is not None, screen
    assert max(map(len, lines[0].splitlines())) <= 80 or "\\" not in lines[0]
    return shlex.split(lines[1].replace("\\\n", ""))


@pytest.mark.sweep("more")
def test_a_frontier_has_a_row_per_budget_json_and_a_picture(graphrun: Cli, tmp_path: Path) -> None:
    options = ("frontier", TINY, "--device", "sim", "--set", "steps=1", "--vram", "2M:6M")
    code, output, _ = graphrun(*options, "--plot", "o/curve.svg")
    assert code == 0
    assert [
        line.split()[0]
        for line in output.splitlines()
        if line[:1] == " " and line.split()[0][0].isdigit()
    ] == [
        "2.00",
        "3.00",
        "4.00",
        "6.00",
    ]
    assert output.startswith("fastest: ")
    assert "\nminimum VRAM: --vram " in output
    assert max(map(len, output.splitlines())) <= 80
    picture = ElementTree.parse(tmp_path / "o/curve.svg").getroot()
    assert len(picture.findall("{*}circle")) == 3, "one for each budget that something fits"
    code, output, _ = graphrun(*options, "--json", "--no-cache")
    data = json.loads(output)
    assert [point["feasible"] for point in data["points"]] == [False, True, True, True]
    assert f"({data['points'][0]['smallest_budget_bytes']} bytes)" in graphrun(*options)[1]
    code, output, _ = graphrun(
        "plan", TINY, "--device", "sim", "--set", "steps=1", "--vram", "6M", "--json", "--no-cache"
    )
    single = json.loads(output)
    last = data["points"][-1]
    assert last["bound_seconds"] == pytest.approx(single["bound_seconds"])
    assert last["predicted_seconds"] <= single["predicted_seconds"]
    seconds = [point["predicted_seconds"] for point in data["points"][1:]]
    assert seconds == sorted(seconds, reverse=True), "a plan for less is one for more"


def test_a_frontier_is_drawn_as_png_too(graphrun: Cli) -> None:
    options = ("frontier", TINY, "--device", "sim", "--set", "steps=1", "--vram", "3M")
    assert graphrun(*options, "--plot", "curve.png")[0] == 0
    image = Image.open("curve.png")
    assert (image.format, image.size, len(image.getcolors(1 << 20) or ()) > 3) == (
        "PNG",
        (1440, 840),
        True,
    )
    code, _, err = graphrun(*options, "--plot", "curve.pdf")
    assert (code, "--plot curve.pdf: the name must end in .svg or .png" in err) == (2, True)
    code, _, err = graphrun("plan", TINY, "--device", "sim", "--vram", "6M", "--explain", "x")
    assert (code, "--explain 'x' is not known; its only value is more" in err) == (2, True)


@pytest.mark.sweep("more")
def test_an_infeasible_budget_says_what_to_type(graphrun: Cli) -> None:
    options = ("--device", "sim", "--set", "steps=1", "--set", "height=256", "--vram")
    code, _, err = graphrun("plan", TINY, *options, "1M")
    lines = err[err.index("fits: no.") :].splitlines()
    assert code == 3
    assert graphrun(*next_command(err))[0] == 0
    for line in lines[
        next(n for n, line in enumerate(lines) if line.startswith("what helps")) + 1 :
    ]:
        assert line.startswith(" --"), "options to type"


def test_options_are_replaced_or_added() -> None:
    words = ["plan", "g", "--vram=2G", "--set", "height=9", "--set", "a=b c", "--allow", "nf4"]
    assert (
        merge_options(words, ["--vram", "3.4G"])
        == "plan g --set height=9 --set 'a=b c' --allow nf4 --vram 3.4G"
    )
    assert (
        merge_options(words, ["--set", "height=8"])
        == "plan g --vram=2G --set 'a=b c' --allow nf4 --set height=8"
    )
    assert merge_options(words, ["--allow", "tiling"]).endswith("--allow nf4 --allow tiling")


@pytest.mark.sweep("more")
def test_a_sweep_finds_the_largest_value_that_fits_and_the_next_one_does_not(graphrun: Cli) -> None:
    options = ("--device", "sim", "--set", "steps=1", "--vram", "4M")
    code, output, _ = graphrun("frontier", TINY, *options, "--sweep", "height=128:320:64")
    assert code == 0
    assert "within 4.00 MiB: height up to 192, predicted" in output
    assert graphrun("plan", TINY, *options, "--set", "height=192")[0] == 0
    assert graphrun("plan", TINY, *options, "--set", "height=256")[0] == 3
    data = json.loads(
        graphrun("frontier", TINY, *options, "--sweep", "height=192:256:64", "--json")[1]
    )
    assert data["largest"] == [{"budget_bytes": 4 * MIB, "height": "192"}]


def test_a_frontier_on_which_nothing_fits_says_what_would(graphrun: Cli) -> None:
    code, output, _ = graphrun(
        "frontier", TINY, "--device", "sim", "--set", "steps=1", "--vram", "1M:2M"
    )
    assert code == 3
    assert "minimum VRAM: --vram" in output


@pytest.mark.sweep("more")
def test_the_budget_of_one_of_two_devices_is_varied(graphrun: Cli) -> None:
    options = ("--device", "sim:0,sim:1", "--set", "steps=1", "--json", "--vram")
    code, output, _ = graphrun("frontier", TINY, *options, "4M,1M:4M:3M")
    data = json.loads(output)
    assert (code, data["device"]) == (0, 1)
    seconds = [point["predicted_seconds"] for point in data["points"]]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < seconds[0]
    assert all(point["peak_bytes"] <= point["budget_bytes"] for point in data["points"])
    lower, upper = (
        json.loads(graphrun("plan", TINY, *options, f"4M,{last}M")[1]) for last in (1, 4)
    )
    assert [lower["predicted_seconds"], upper["predicted_seconds"]] == pytest.approx(
        [seconds[0], seconds[-1]]
    )
    code, output, _ = graphrun("frontier", TINY, *options[:-2], "--vram", "2M:3M:1M,1M")
    assert "budgets: device0 sim is varied, device1 sim 1.00 MiB" in output
    assert "next: graphrun plan" in output
    assert " --vram 3M,1M " in output


@pytest.mark.sweep("more")
def test_of_two_devices_what_helps_names_both_budgets(graphrun: Cli) -> None:
    options = ("--device", "sim:0,sim:1", "--set", "steps=1")
    code, _, err = graphrun("plan", TINY, *options, "--vram", "2M,1M")
    assert (code, next_command(err)[-1].endswith(",1M")) == (3, True)
    assert graphrun(*next_command(err))[0] == 0


@pytest.mark.sweep("more")
@pytest.mark.parametrize(
    ("budgets", "text"),
    [
        (
            "3M,3M",
            r"device1 \(sim\) saves \d+%: the first device alone takes \d+ ms a run on average, "
            r"this plan \d+ ms",
        ),
        (
            "20M,20M",
            r"device1 \(sim\) saves nothing here: .* graphrun plan --cluster .* With the sequence "
            r"divided over the devices, a run takes \d+ ms, of which transfers take under 1 ms "
            r"\(385.00 KiB each way\): docs/howto/two-cards.md",
        ),
        ("1.5M,20M", r"without device1 \(sim\) nothing fits"),
    ],
)
def test_the_second_line_says_what_another_device_saves(
    graphrun: Cli, budgets: str, text: str
) -> None:
    options = ("--device", "sim:0,sim:1", "--ram", "8G", "--set", "steps=1", "--runs", "50")
    code, output, _ = graphrun("plan", TINY, *options, "--vram", budgets)
    head = " ".join(output.split())
    assert code == 0
    assert re.search(rf"(waiting for copies|MiB) {text}", head), head


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--device", "sim:0,sim:1", "--vram", "2M:3M,3M:4M"), "one device is varied at a time"),
        (("--vram", "8G:4G"), "is not a range"),
        (("--vram", "4M", "--sweep", "height=128:256"), "is not a range of an input"),
        (("--vram", "4M", "--sweep", "hight=128:256:64"), "did you mean 'height'"),
        (("--vram", "4M", "--sweep", "height=128:256:8"), "is not a multiple of 16"),
    ],
)
def test_a_bad_range_is_refused_before_any_dry_run(
    graphrun: Cli, arguments: tuple[str, ...], words: str
) -> None:
    code, output, err = graphrun("frontier", TINY, "--device", "sim", *arguments)
    assert (code, output) == (2, "")
    assert words in err
    assert "Traceback" not in err


@pytest.mark.sweep("more")
def test_explain_says_what_other_placements_of_a_component_would_cost(graphrun: Cli) -> None:
    graphrun("plan", TINY, "--device", "sim", "--vram", "6M", "--set", "steps=1", "-o", "plan.json")
    code, output, _ = graphrun("explain", "plan.json", "transformer")
    assert code == 0
    assert "all blocks streamed" in output
    data = json.loads(graphrun("explain", "plan.json", "transformer", "--json")[1])
    assert [row["placement"] for row in data["alternatives"]] == [
        "planned",
        "whole",
        "exclude",
        "drop",
        "keep",
    ]
    code, _, err = graphrun("explain", "plan.json", "transfromer")
    assert code == 2
    assert "no component 'transfromer'" in err


@pytest.fixture
def solves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Problem]:
    """The problems that are solved, in order, with an empty cache at first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    problems, original = list[Problem](), pages.solved

    def counted(problem: Problem) -> Any:
        problems.append(problem)
        return original(problem)

    for module in (pages, solve, alternatives, frontier):
        monkeypatch.setattr(module, "solved", counted)
    return problems


@pytest.mark.sweep("more")
@pytest.mark.long
def test_a_report_solves_no_budget_beyond_the_card_and_no_plan_twice(
    graphrun: Cli, solves: list[Problem]
) -> None:
    """A plan for 24 GiB on a card with 8: no part of the curve is beyond these."""
    graphrun(
        "plan",
        TINY,
        "--hardware",
        "rtx4060",
        "--vram",
        "24G",
        "--set",
        "steps=1",
        "-o",
        "plan.json",
    )
    assert [problem.budget_bytes for problem in solves] == [24 * GIB]
    assert graphrun("report", "plan.json")[0] == 0
    budgets = [problem.budget_bytes for problem in solves[1:]]
    assert 0 < len(budgets) == len(set(budgets)) <= 9
    assert max(budgets) < 8 * GIB, "of 8 GiB the plan is known"
    page = Path("report.html").read_text()
    ticks = re.findall(r">([0-9.]+) GiB</text>", page[page.index("Time against budget") :])
    assert ticks
    assert max(map(float, ticks)) <= 8


@pytest.mark.sweep("more")
def test_a_frontier_ends_at_the_card(graphrun: Cli, solves: list[Problem]) -> None:
    options = (
        "frontier",
        TINY,
        "--hardware",
        "rtx4060",
        "--set",
        "steps=1",
        "--vram",
        "4G:48G",
        "--json",
    )
    code, output, err = graphrun(*options)
    assert (code, err) == (0, "the rtx4060 has 8.00 GiB: larger budgets are left out\n")
    budgets = [problem.budget_bytes // GIB for problem in solves]
    assert (
        budgets
        == [point["budget_bytes"] // GIB for point in json.loads(output)["points"]]
        == [4, 6, 8]
    )


@pytest.mark.sweep("more")
@pytest.mark.long
def test_explain_solves_each_row_once_and_what_fits_only_the_first_time(
    graphrun: Cli, solves: list[Problem]
) -> None:
    graphrun("plan", TINY, "--device", "sim", "--vram", "6M", "--set", "steps=1", "-o", "plan.json")
    assert len(solves) == 1
    rows = json.loads(graphrun("explain", "plan.json", "transformer", "--json")[1])["alternatives"][
        1:
    ]
    solved_rows = [row for row in rows if "refusal" not in row]
    assert len(solves) == 1 + len(solved_rows)
    assert (
        json.loads(graphrun("explain", "plan.json", "transformer", "--json")[1])["alternatives"][1:]
        == rows
    )
    assert len(solves) == 1 + len(solved_rows) + sum(not row["feasible"] for row in solved_rows)


DEMANDS = ("--keep", "text_encoder", "--exclude", "transformer", "--reserve", "1M")


@pytest.mark.sweep("more")
def test_directives_are_shown_saved_and_followed_by_a_run(graphrun: Cli, tmp_path: Path) -> None:
    options = ("--device", "sim", "--vram", "7M", "--set", "steps=1")
    code, output, _ = graphrun("plan", TINY, *options, *DEMANDS, "-o", "plan.json", "-v")
    assert code == 0
    assert "directives keep text_encoder, exclude transformer" in output
    assert "budget 7.00 MiB = 1.00 MiB reserve + 6.00 MiB" in output
    assert "why transformer is streamed: exclude demands it" in output
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["directives"] == ["keep text_encoder", "exclude transformer"]
    assert (data["reserve_bytes"], data["overhead_bytes"]) == (MIB, MIB)
    code, output, _ = graphrun(
        "run", "plan.json", "--output", "a.png", "--trace", "trace.json", "--json"
    )
    measurements = json.loads(output)["measured"]
    assert (code, measurements["kept_plan"], measurements["left_bytes"]) == (0, True, 0)
    assert measurements["peak_bytes"] <= 6 * MIB
    trace = json.loads((tmp_path / "trace.json").read_text())
    evicted = [
        event["slot"]
        for event in trace["events"]
        if event["kind"] == "evict" and event["component"] == "text_encoder"
    ]
    assert set(evicted) == {len(trace["slots"]) - 1}, "kept to the end"
    assert graphrun("run", TINY, *options, "--output", "b.png")[0] == 0
    assert Image.open(tmp_path / "a.png").tobytes() == Image.open(tmp_path / "b.png").tobytes()


def test_a_plan_file_has_its_own_directives_and_unknown_ones_are_refused(graphrun: Cli) -> None:
    graphrun("plan", TINY, "--device", "sim", "--vram", "6M", "--set", "steps=1", "-o", "plan.json")
    code, _, err = graphrun("run", "plan.json", "--keep", "vae")
    assert (code, "is a plan" in err) == (2, True)
    code, _, err = graphrun("plan", TINY, "--device", "sim", "--vram", "6M", "--keep", "vea")
    assert (code, "did you mean 'vae'" in err) == (2, True)
    code, _, err = graphrun(
        "plan",
        TINY,
        "--device",
        "sim",
        "--vram",
        "3M",
        "--set",
        "steps=1",
        "--keep",
        "vae",
        "--reserve",
        "1M",
    )
    assert (code, "\ndirectives keep vae, reserve 1.00 MiB\n" in err, "\n --reserve " in err) == (
        3,
        True,
        True,
    )
    code, _, err = graphrun(
        "frontier", TINY, "--device", "sim", "--vram", "6M", "--reserve", "lots"
    )
    assert (code, "reserve: 'lots' is not a size" in err) == (2, True)


@pytest.mark.sweep("more")
def test_until_a_stage_saves_its_tensors(graphrun: Cli, tmp_path: Path) -> None:
    options = ("--device", "sim", "--vram", "6M", "--until", "encode")
    code, output, _ = graphrun("plan", TINY, *options, "-o", "plan.json")
    assert code == 0
    assert output.startswith("fits: yes. 1 ms a run on sim (simulated), 0.4 of 6 MiB; ")
    assert "\nplan flux-tiny until encode  max_sequence_length=64\n" in output
    assert "transformer" not in output
    assert json.loads((tmp_path / "plan.json").read_text())["until"] == "encode"
    code, output, _ = graphrun("run", "plan.json", "--set", "prompt=a boat", "--output", "a.png")
    assert code == 0
    assert "\nwrote a.safetensors\n" in output
    assert "left on the device: 0 B" in output
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "a.safetensors")
    assert set(tensors) == {"embeds.prompt_embeds", "embeds.pooled_prompt_embeds"}
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    code, _, err = graphrun("plan", TINY, "--device", "sim", "--vram", "6M", "--until", "encod")
    assert (code, "did you mean 'encode'" in err) == (2, True)
    assert graphrun("explain", "plan.json", "text_encoder_2")[0] == 0


@pytest.mark.sweep("more")
def test_a_plan_begins_with_its_verdict_and_the_command_that_runs_it(graphrun: Cli) -> None:
    options = ("--device", "sim", "--vram", "6M", "--set", "steps=1")
    code, output, _ = graphrun("plan", TINY, *options)
    verdict = " ".join(output.partition("\nnext")[0].split())
    assert code == 0
    assert re.fullmatch(
        r"fits: yes\. \d+ ms a picture on sim \(simulated\), \d\.\d of 6 MiB; \d ms waiting for "
        r"copies",
        verdict,
    )
    assert next_command(output)[:2] == ["run", TINY]
    assert graphrun(*next_command(output), "-o", "a.png")[0] == 0
    _, output, _ = graphrun("plan", TINY, *options, "-o", "plan.json")
    assert "next: graphrun run plan.json" in output.splitlines()[1:3]


@pytest.mark.sweep("more")
def test_the_next_command_has_the_options_that_were_given(graphrun: Cli) -> None:
    options = ("--device", "sim", "--vram", "6M", "--set", "steps=1", "--set", "prompt=a b")
    _, output, _ = graphrun(
        "plan", TINY, *options, "--reuse", "all", "-o", "plan.json", "--no-cache"
    )
    assert next_command(output) == [
        *("run", "plan.json", "--set", "prompt=a b", "--no-cache", "--reuse", "all"),
    ]


@pytest.mark.sweep("more")
@pytest.mark.long
def test_the_next_command_of_an_estimate_has_what_was_asked_for(graphrun: Cli) -> None:
    arguments = ("--precision", "transformer=nf4", "--option", "decode=tiling", "--ram", "4G")
    options = ("--hardware", "rtx4060", "--set", "height=192", "--batch", "2")
    _, output, _ = graphrun("estimate", "flux-dev", *arguments, *options)
    words = next_command(output)
    assert words[:2] == ["plan", "flux-dev"]
    pairs = list(zip(words[2::2], words[3::2], strict=True))
    assert [value for name, value in pairs if name == "--allow"] == ["nf4", "tiling"]
    assert {("--ram", "4G"), ("--set", "height=192"), ("--set", "batch=2")} <= set(pairs)


@pytest.mark.sweep("more")
def test_without_a_budget_a_plan_is_for_the_card_here_or_says_which_one_it_assumes(
    graphrun: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from graphrun.profile import hardware

    code, output, err = graphrun("plan", TINY)
    assert (code, "\nnext, on that card: graphrun run " in output) == (0, True)
    assert "no CUDA device here: this is for an rtx4090" in err
    assert "--vram auto: 24.00 GiB, what the rtx4090 has\n" in err
    monkeypatch.setattr(hardware, "detect_card", lambda: hardware.data_sheet_estimates()["rtx4090"])
    monkeypatch.setattr(hardware, "free_bytes", lambda *_: 7 * 2**30)
    has = "what the rtx4090 has free (7.00 GiB) less 5 % for other programs"
    for auto in ((), ("--vram", "auto")):
        code, output, err = graphrun("plan", TINY, *auto)
        assert (code, " of 6.6 GiB" in output, f"--vram auto: 6.65 GiB, {has}\n" in err) == (
            0,
            True,
            True,
        )
        assert "\nnext: graphrun run " in output


@pytest.mark.sweep("more")
def test_a_budget_above_what_the_card_has_free_less_its_margin_is_warned_of(
    graphrun: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from graphrun.profile import hardware

    monkeypatch.setattr(hardware, "detect_card", lambda: hardware.data_sheet_estimates()["rtx4090"])
    monkeypatch.setattr(hardware, "free_bytes", lambda *_: 7 * 2**30)
    for vram, warned in (("6.7G", True), ("50%", True), ("6.6G", False)):
        code, _, err = graphrun("plan", TINY, "--vram", vram)
        assert (code, f"--vram {vram} is more than 6.65 GiB, what the rtx4090 has free" in err) == (
            0,
            warned,
        )
    err = graphrun("plan", TINY, "--vram", "24G", "--hardware", "rtx3090")[2]
    assert "is more than" not in err, "that is not the card here"
    err = graphrun("plan", TINY, "--vram", "auto", "--device", "sim")[2]
    assert "has no memory of its own" in err


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize(
    ("hardware", "vram", "free"),
    [
        ("rtx4060", "8G", "7 to 7.5"),
        ("rtx4060", "7.3G", "7 to 7.5"),
        ("rtx5090", "32G", "31 to 31.5"),
        ("rtx4060", "auto", "7 to 7.5"),
        ("rtx4060", "7.1G", ""),
        ("rtx4090", "8G", ""),
        ("l4", "24G", ""),
        ("h100", "80G", ""),
    ],
)
def test_a_budget_of_nearly_all_of_a_consumer_card_says_what_a_desktop_leaves(
    graphrun: Cli, hardware: str, vram: str, free: str
) -> None:
    code, output, _ = graphrun("plan", TINY, "--hardware", hardware, "--vram", vram, "--ram", "8G")
    lines = [line for line in output.splitlines() if "a desktop leaves" in line]
    expected = f"a desktop leaves {free} GiB free; a run that takes more is slow on Windows"
    assert (code, lines) == (0, [expected] if free else [])
    assert max(map(len, lines), default=0) <= 80


def test_a_measured_card_is_not_guessed_at(
    graphrun: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from dataclasses import replace

    from graphrun.profile import hardware

    card = hardware.data_sheet_estimates()["rtx4060"]
    assert hardware.free_range_with_desktop(card, card.capacity_bytes) is not None
    assert (
        hardware.free_range_with_desktop(replace(card, basis="measured"), card.capacity_bytes)
        is None
    )
    monkeypatch.setattr(hardware, "detect_card", lambda: replace(card, name="geforcertx4060"))
    monkeypatch.setattr(hardware, "free_bytes", lambda *_: 7 * 2**30)
    for windows, message in (
        (True, "a run that takes more becomes slow on Windows"),
        (False, "a run that finds less memory is planned again"),
    ):
        monkeypatch.setattr("graphrun.cli.common.spills_vram", lambda windows=windows: windows)
        code, output, err = graphrun("plan", TINY, "--vram", "8G")
        assert (code, "a desktop leaves" in output, message in err) == (0, False, True)


@pytest.mark.sweep("more")
@pytest.mark.long
def test_a_thorough_search_does_not_suggest_itself(
    graphrun: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLOW_SECONDS", "SLOW_SHARE"):
        monkeypatch.setattr(f"graphrun.model.solution.{name}", 0.0)
    suggestion = Suggestion("raise the VRAM budget", (("--vram", str(8 * MIB)),), 1e-3)
    monkeypatch.setattr("graphrun.solve.suggestions.speedups", lambda *_: [suggestion])
    command = ("plan", TINY, "--device", "sim", "--vram", "3M", "--set", "steps=1", "--no-cache")
    screens = [graphrun(*command, *options)[1] for options in ((), ("--explain", "more"))]
    assert ["what helps" in screen for screen in screens] == [True, True]
    hint = "\n --explain more searches for further suggestions\n"
    assert [hint in screen for screen in screens] == [True, False]


LOST = """
import signal, sys, time
from graphrun.cli import common, main
# a shell makes its background jobs ignore SIGINT
signal.signal(signal.SIGINT, signal.default_int_handler)
class Held:
    def __del__(self):
        raise KeyboardInterrupt
@common.app.command()
def hang() -> None:
    Held()
    while True:
        time.sleep(0.01)
sys.argv = ["graphrun", "hang"]
main.main()
"""


def test_an_interrupt_inside_a_finalizer_is_not_lost() -> None:
    process = subprocess.run(
        [sys.executable, "-c", LOST], capture_output=True, text=True, timeout=300, check=False
    )
    assert (process.returncode, process.stdout, process.stderr) == (
        130,
        "",
        "graphrun: interrupted; the same command starts again\n",
    )
