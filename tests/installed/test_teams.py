"""Plans in a repository: compared, checked as data, and held to limits."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

Cli = Callable[..., tuple[int, str, str]]
SIM = ("flux-tiny", "--device", "sim", "--ram", "8G")

pytestmark = pytest.mark.long


@pytest.mark.sweep("more")
def test_diff_shows_what_moved(graphrun: Cli) -> None:
    assert graphrun("plan", *SIM, "--vram", "4M", "-o", "a.json")[0] == 0
    assert graphrun("plan", *SIM, "--vram", "64M", "-o", "b.json")[0] == 0
    a, b = (json.loads(Path(name).read_text()) for name in ("a.json", "b.json"))
    difference = json.loads(graphrun("diff", "a.json", "b.json", "--json")[1])
    assert difference["same_plan"] is False
    assert difference["conditions"] == [{"name": "budget_bytes", "a": 4 << 20, "b": 64 << 20}]
    assert difference["figures"] == [
        {"name": figure["name"], "a": a[figure["name"]], "b": b[figure["name"]]}
        for figure in difference["figures"]
    ]
    times = {
        stage["stage"]: (stage["a"], stage["b"])
        for stage in difference["stages"]
        if stage["name"] == "seconds"
    }
    assert times == {
        stage_a["name"]: (stage_a["seconds"], stage_b["seconds"])
        for stage_a, stage_b in zip(a["stages"], b["stages"], strict=True)
    }
    streamed, streamed_later = (
        {line.split()[1] for line in plan["actions"] if line.startswith("  stream ")}
        for plan in (a, b)
    )
    freed = {
        change["component"]: change["a"]
        for change in difference["moved"]
        if change["b"] == "resident"
    }
    assert freed.keys() == streamed - streamed_later != set()
    assert all(
        re.fullmatch(r"streamed, \d+ of \d+ (blocks|layers) stay", location)
        for location in freed.values()
    )

    code, screen, _ = graphrun("diff", "a.json", "b.json")
    assert code == 0
    assert " budget: 4.00 MiB -> 64.00 MiB" in screen
    assert max(map(len, screen.splitlines())) <= 120
    output = graphrun("diff", "a.json", "a.json")[1]
    assert output.startswith("a.json -> a.json: the same plan")
    assert "->" not in output.partition("\n")[2]


def test_check_as_data(graphrun: Cli) -> None:
    assert graphrun("plan", *SIM, "--vram", "4M", "-o", "plan.json")[0] == 0
    plan = json.loads(Path("plan.json").read_text())
    result = json.loads(graphrun("check", "plan.json", "--json")[1])
    assert (result["ok"], result["violations"], result["peak_bytes"]) == (
        True,
        [],
        plan["peak_bytes"],
    )
    assert result["actions"] == sum(line.startswith("  ") for line in plan["actions"])
    plan["actions"] = [
        re.sub(r"ring buffer [\d.]+ [KM]iB", "ring buffer 1 KiB", line) for line in plan["actions"]
    ]
    Path("plan.json").write_text(json.dumps(plan))
    code, output, err = graphrun("check", "plan.json", "--json")
    assert (
        code,
        json.loads(output)["ok"],
        {violation["rule"] for violation in json.loads(output)["violations"]},
    ) == (2, False, {"ring_buffer"})
    assert "the plan is refused" in err


def test_a_plan_over_a_limit_ends_with_1_after_it_is_saved(graphrun: Cli) -> None:
    command = ("plan", *SIM, "--vram", "4M", "-o", "plan.json")
    code, output, err = graphrun(*command, "--fail-over", "1ms", "--fail-peak", "1M", "--json")
    plan = json.loads(Path("plan.json").read_text())
    assert (code, json.loads(output)["peak_bytes"]) == (1, plan["peak_bytes"])
    assert re.fullmatch(
        r"graphrun: --fail-over: predicted .* > 1 ms; graphrun explain shows where the time goes\n"
        r"graphrun: --fail-peak: takes .* > 1.00 MiB\n",
        err,
    )
    # sim has no context and no workspace
    time_limit, peak = (
        f"{1e3 * plan['predicted_seconds'] + 1:.0f}ms",
        str(plan["peak_bytes"]),
    )
    assert graphrun(*command, "--fail-over", time_limit, "--fail-peak", peak)[0] == 0


@pytest.mark.parametrize(
    ("option", "text"), [("--fail-over", "soon"), ("--fail-over", "-1s"), ("--fail-peak", "much")]
)
def test_a_limit_that_is_none_is_refused_before_planning(
    graphrun: Cli, option: str, text: str
) -> None:
    code, output, err = graphrun("plan", "no-such-graph", "--vram", "4M", f"{option}={text}")
    assert (code, output) == (2, "")
    assert f"{option}: {text!r} is not a" in err


def test_the_workflow_in_the_documents_is_one(graphrun: Cli) -> None:
    """Every graphrun command of the workflow exists, with the options that it is given."""
    text = (Path(__file__).parents[2] / "docs" / "ci.md").read_text(encoding="utf-8")
    workflow = yaml.safe_load(text.partition("```yaml\n")[2].partition("\n```\n\n")[0])
    job = workflow["jobs"]["plan"]
    runs = "\n".join(step.get("run", "") for step in job["steps"]).replace(
        "$OPTIONS", job["env"]["OPTIONS"]
    )
    commands = re.findall(r"^(?:\{ echo '```'; )?graphrun ([^;\n]+)", runs, re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        name, *arguments = shlex.split(command)
        options = [argument for argument in arguments if argument.startswith("-")]
        assert all(option in graphrun(name, "--help")[1] for option in options), command
