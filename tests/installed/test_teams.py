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


def test_diff_shows_what_moved(graphrun: Cli) -> None:
    assert graphrun("plan", *SIM, "--vram", "4M", "-o", "a.json")[0] == 0
    assert graphrun("plan", *SIM, "--vram", "64M", "-o", "b.json")[0] == 0
    a, b = (json.loads(Path(name).read_text()) for name in ("a.json", "b.json"))
    found = json.loads(graphrun("diff", "a.json", "b.json", "--json")[1])
    assert found["same_plan"] is False
    assert found["conditions"] == [{"name": "budget_bytes", "a": 4 << 20, "b": 64 << 20}]
    assert found["figures"] == [
        {"name": each["name"], "a": a[each["name"]], "b": b[each["name"]]}
        for each in found["figures"]
    ]
    times = {
        each["stage"]: (each["a"], each["b"])
        for each in found["stages"]
        if each["name"] == "seconds"
    }
    assert times == {
        of["name"]: (of["seconds"], to["seconds"])
        for of, to in zip(a["stages"], b["stages"], strict=True)
    }
    streamed, later = (
        {line.split()[1] for line in plan["actions"] if line.startswith("  stream ")}
        for plan in (a, b)
    )
    freed = {each["component"]: each["a"] for each in found["moved"] if each["b"] == "resident"}
    assert freed.keys() == streamed - later != set()
    assert all(
        re.fullmatch(r"streamed, \d+ of \d+ (blocks|layers) stay", where)
        for where in freed.values()
    )

    code, screen, _ = graphrun("diff", "a.json", "b.json")
    assert code == 0
    assert " budget: 4.00 MiB -> 64.00 MiB" in screen
    assert max(map(len, screen.splitlines())) <= 120
    same = graphrun("diff", "a.json", "a.json")[1]
    assert same.startswith("a.json -> a.json: the same plan")
    assert "->" not in same.partition("\n")[2]


def test_check_as_data(graphrun: Cli) -> None:
    assert graphrun("plan", *SIM, "--vram", "4M", "-o", "plan.json")[0] == 0
    plan = json.loads(Path("plan.json").read_text())
    found = json.loads(graphrun("check", "plan.json", "--json")[1])
    assert (found["ok"], found["violations"], found["peak_bytes"]) == (True, [], plan["peak_bytes"])
    assert found["actions"] == sum(line.startswith("  ") for line in plan["actions"])
    plan["actions"] = [
        re.sub(r"ring buffer [\d.]+ [KM]iB", "ring buffer 1 KiB", line) for line in plan["actions"]
    ]
    Path("plan.json").write_text(json.dumps(plan))
    code, out, err = graphrun("check", "plan.json", "--json")
    assert (
        code,
        json.loads(out)["ok"],
        {each["rule"] for each in json.loads(out)["violations"]},
    ) == (2, False, {"ring_buffer"})
    assert "the plan is refused" in err


def test_a_plan_over_a_limit_ends_with_1_after_it_is_saved(graphrun: Cli) -> None:
    command = ("plan", *SIM, "--vram", "4M", "-o", "plan.json")
    code, out, err = graphrun(*command, "--fail-over", "1ms", "--fail-peak", "1M", "--json")
    plan = json.loads(Path("plan.json").read_text())
    assert (code, json.loads(out)["peak_bytes"]) == (1, plan["peak_bytes"])
    assert re.fullmatch(
        r"graphrun: --fail-over: predicted .* > 1 ms\ngraphrun: --fail-peak: takes .* > 1.00 MiB\n",
        err,
    )
    # sim has no context and no workspace
    over, peak = (
        f"{1e3 * plan['predicted_seconds'] + 1:.0f}ms",
        str(plan["peak_bytes"]),
    )
    assert graphrun(*command, "--fail-over", over, "--fail-peak", peak)[0] == 0


@pytest.mark.parametrize(
    ("option", "text"), [("--fail-over", "soon"), ("--fail-over", "-1s"), ("--fail-peak", "much")]
)
def test_a_limit_that_is_none_is_refused_before_planning(
    graphrun: Cli, option: str, text: str
) -> None:
    code, out, err = graphrun("plan", "no-such-graph", "--vram", "4M", f"{option}={text}")
    assert (code, out) == (2, "")
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
