"""What one command, session or batch does once: parse the graph, build its meta modules, simulate
and check each plan.

Calls are counted by the profiler of the standard library, in all threads; nothing is replaced.
"""

from __future__ import annotations

import cProfile
import gc
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import graphrun as package
from graphrun import api
from graphrun.graph.document import read_document
from graphrun.model.choices import apply_choices
from graphrun.modules.build import meta_module
from graphrun.solve.actions import plan_of
from graphrun.store import trace_key
from graphrun.verify.check import check
from graphrun.verify.simulate import simulate
from graphrun.verify.solution import broken_rules, checked_solution

TINY = str(Path(__file__).parent.parent / "graphs" / "flux-tiny.yaml")
BUDGETS = ("--device", "sim", "--vram", "64M", "--ram", "8G", "--set", "steps=2")
COMPONENTS = 4
COUNTED = (
    read_document,
    trace_key,
    meta_module,
    plan_of,
    simulate,
    check,
    apply_choices,
    broken_rules,
    checked_solution,
)
Cli = Callable[..., tuple[int, str, str]]


class Calls:
    """Calls of the functions `COUNTED`: in all by name, and as ``(caller, name)``."""

    def __init__(self) -> None:
        self.profiles: list[cProfile.Profile] = []
        self.counts: Counter[Any] = Counter()

    def begin(self, *_: Any) -> None:
        """Profiles the current thread."""
        profile = cProfile.Profile(builtins=False)  # threads begin at the same time
        self.profiles.append(profile)
        profile.enable()

    def end(self) -> None:
        """Stops profiling this thread, and adds up the calls of all.

        A profile of another thread that is not disabled would stop the active one when it is
        collected as garbage.
        """
        for profile in self.profiles:
            profile.disable()
        codes = {inspect.unwrap(function).__code__: function.__name__ for function in COUNTED}
        for entry in (entry for profile in self.profiles for entry in profile.getstats()):
            if entry.code in codes:
                self.counts[codes[entry.code]] += entry.callcount
            for callee in entry.calls or ():
                if callee.code in codes and not isinstance(entry.code, str):
                    self.counts[entry.code.co_name, codes[callee.code]] += callee.callcount

    def by_caller(self, name: str) -> dict[str, int]:
        """Calls of the function ``name`` by the function that calls it."""
        return {
            key[0]: number
            for key, number in self.counts.items()
            if isinstance(key, tuple) and key[1] == name
        }

    def of_a_cold_start(self) -> tuple[int, ...]:
        """(parsed graphs, dry runs, meta modules, checks before a run). Asserts that only the
        solver simulates, each of its candidates at most once, and that only it checks plans
        otherwise, those that it keeps."""
        simulations, checks = self.by_caller("simulate"), self.by_caller("check")
        plans, checked = self.by_caller("plan_of"), self.by_caller("checked_solution")
        assert 0 < simulations.pop("simulated_choice") <= plans.pop("simulated_choice")
        assert plans.pop("faster_baselines", 0) == checked.get("faster_baselines", 0)
        assert plans == {}
        # the former makes its plan of another one
        kept_plans = checked.get("_repeated_run", 0) + checked.get("faster_baselines", 0)
        assert simulations.pop("solution_of", 0) <= kept_plans
        assert checks.pop("checked_solution", 0) == kept_plans
        assert 0 < checks.pop("_best_plan") <= self.counts["plan_of"]
        before_runs = self.by_caller("broken_rules").get("refuse_broken", 0)
        assert checks.pop("broken_rules", 0) <= before_runs  # equal plans are checked once
        assert (simulations, checks) == ({}, {})
        return *self.of_a_stored_plan()[:3], before_runs

    def of_a_stored_plan(self) -> tuple[int, ...]:
        """(parsed graphs, dry runs or keys of them, meta modules, simulations, checks)."""
        counts = self.counts
        assert counts["apply_choices"] == counts["simulate"] + counts["check"]
        return (
            counts["read_document"],
            counts["trace_key"],
            counts["meta_module"],
            counts["simulate"],
            counts["check"],
        )


@contextmanager
def counted() -> Iterator[Calls]:
    calls = Calls()
    simulate.cache_clear()  # as in a new process
    check.cache_clear()
    threading.setprofile(calls.begin)
    calls.begin()
    try:
        yield calls
    finally:
        threading.setprofile(None)
        calls.end()


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("cold")
def test_a_cold_run(graphrun: Cli) -> None:
    files = ("--output", "x.png", "--plan", "p.json", "--trace", "t.json")
    with counted() as calls:
        assert (
            graphrun("run", TINY, "--device", "sim", "--vram", "6M", "--ram", "8G", *files)[0] == 0
        )
    assert calls.of_a_cold_start() == (1, 1, COMPONENTS, 1)
    assert calls.counts["plan_of"] > 1


@pytest.mark.usefixtures("cold")
def test_a_plan_that_is_made_then_found_then_read(graphrun: Cli) -> None:
    commands = {
        "made": ("plan", TINY, *BUDGETS, "-o", "p.json"),
        "found": ("plan", TINY, *BUDGETS),
        "shown": ("plan", "p.json"),
        "checked": ("check", "p.json"),
        "run": ("run", "p.json", "-o", "x.png"),
    }
    counts = {}
    for name, command in commands.items():
        with counted() as counts[name]:
            assert graphrun(*command)[0] == 0
    assert counts.pop("made").of_a_cold_start() == (1, 1, COMPONENTS, 0)
    assert {name: calls.of_a_stored_plan() for name, calls in counts.items()} == {
        "found": (1, 1, 0, 1, 1),
        "shown": (1, 0, 0, 1, 1),
        "checked": (0, 0, 0, 1, 1),
        "run": (1, 0, COMPONENTS, 1, 1),
    }


@pytest.mark.sweep("more")
@pytest.mark.usefixtures("cold")
def test_a_session_of_two_runs(tmp_path: Path) -> None:
    graph = package.load(TINY)
    with (
        counted() as calls,
        package.Session(
            graph, vram="64M", ram="8G", hardware="sim", cache=tmp_path, inputs={"steps": 2}
        ) as s,
    ):
        s.map([{"prompt": "a lighthouse"}, {"prompt": "a dog"}])
    assert calls.of_a_cold_start() == (0, 1, COMPONENTS, 1)


@pytest.mark.sweep("more")
@pytest.mark.usefixtures("cold")
def test_a_batch_of_two_requests(graphrun: Cli, tmp_path: Path) -> None:
    (tmp_path / "two.jsonl").write_text('{"prompt": "a lighthouse"}\n{"prompt": "a dog"}\n')
    with counted() as calls:
        assert graphrun("run", TINY, *BUDGETS, "--inputs", "two.jsonl")[0] == 0
    assert calls.of_a_cold_start() == (1, 1, COMPONENTS, 1)


def test_a_run_does_not_search_the_libraries_for_garbage(
    graphrun: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collection of their million objects takes a second, in the middle of a stage. So all
    objects are frozen after the plan and the modules are made, before the first stage."""
    events, freeze, real_run = list[str](), gc.freeze, api.run

    def noted_freeze() -> None:
        events.append("freeze")
        freeze()

    def run(*arguments: Any, progress: Callable[..., None], **options: Any) -> Any:
        def noted_progress(*call: int) -> None:
            progress(*call)
            events.append("collected" if gc.isenabled() else "not collected")

        events.append("run")
        return real_run(*arguments, progress=noted_progress, **options)

    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)  # the suite always has frozen objects
    monkeypatch.setattr(gc, "freeze", noted_freeze)
    monkeypatch.setattr(api, "run", run)
    try:
        code, *_ = graphrun("run", TINY, *BUDGETS, "-o", str(tmp_path / "a.png"))
    finally:
        freeze()
    assert code == 0
    start = events.index("run")
    assert events[start + 1] == "freeze"
    assert events[start + 2 :] == ["collected"] * len(events[start + 2 :]) != []
