"""Plan files that are large, or make a small text large: refused by a limit, or read in work that
grows with their size.

Work is counted: comparisons of names and numbers, and bytes that Python allocates."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import graphrun as package
from graphrun.cluster import files
from graphrun.cluster.machines import read_cluster
from graphrun.errors import InputError, PlanError
from graphrun.limits import LIMITS
from graphrun.model import phase_trace, splits
from graphrun.model.phase_trace import CALL, CallTrace, PhaseTrace, repeats_in
from graphrun.model.plan import Load, Plan, parse
from graphrun.model.problem import LiveTensor, Problem
from graphrun.report import plan_files
from graphrun.report.lanes import lanes_page
from graphrun.report.summary import summarize
from graphrun.solve.strategies import without
from graphrun.trace import Lane
from graphrun.units import MIB
from graphrun.verify.check import check
from graphrun.verify.coherence import incoherent
from graphrun.verify.pages import reserved_bytes
from graphrun.verify.simulate import simulate

GRAPHS = Path(__file__).parents[2] / "graphs"
Cli = Callable[..., tuple[int, str, str]]
COUNT = 1_000


class Compared:
    """Counts the comparisons of its names and numbers."""

    def __init__(self) -> None:
        self.count = 0
        counter = self

        class Name(str):
            __slots__ = ()
            __hash__ = str.__hash__

            def __eq__(self, other: object) -> bool:
                counter.count += 1
                return str.__eq__(self, other)

            def __ne__(self, other: object) -> bool:
                counter.count += 1
                return str.__ne__(self, other)

        class Number(int):
            __slots__ = ()
            __hash__ = int.__hash__

            def __eq__(self, other: object) -> bool:
                counter.count += 1
                return int.__eq__(self, other)  # type: ignore[arg-type]

        self.name, self.number = Name, Number


@contextmanager
def python_bytes() -> Iterator[Callable[[], int]]:
    """A function that returns the peak of the bytes that Python allocates inside."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def small_solution(make_problem: Callable[..., Any]) -> Any:
    with without("layers"):
        return package.plan(make_problem("flux-tiny", 64 * MIB))


def changed(problem: Problem, component: str, **fields: Any) -> Problem:
    """``problem`` with ``fields`` of a component replaced, which is no longer split into layers."""
    components = (
        replace(c, layers=None, **fields) if c.name == component else c for c in problem.components
    )
    return replace(problem, components=tuple(components))


def with_use(problem: Problem, component: str, **fields: Any) -> Problem:
    """``problem`` with ``fields`` of every use of a component replaced."""
    phases = (
        replace(
            phase,
            uses=tuple(
                replace(u, layers=None, **fields) if u.component == component else u
                for u in phase.uses
            ),
        )
        for phase in problem.phases
    )
    return replace(problem, phases=tuple(phases))


RANGES = " ".join(f"g{number}[0-999999]" for number in range(60))
LINES = {
    "load": f"slot end\n  load a {RANGES} from pinned",
    "evict": f"slot end\n  evict a {RANGES}",
    "stream": f"slot end\n  stream a keep {RANGES} ring buffer 1 MiB",
    "many actions": "slot end\n" + "  evict a g[0-999]\n" * 60_000,
    "finds": f"finds a {RANGES}",
    "leaves": f"leaves a {RANGES}",
    "split": f"split a device1 {RANGES}",
}


@pytest.mark.parametrize("lines", LINES.values(), ids=LINES)
def test_ranges_are_counted_before_they_are_expanded(
    lines: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIMITS, "placements", 50_000)
    with python_bytes() as peak:
        with pytest.raises(
            PlanError,
            match=r"blocks up to here, and at most 50,000 are accepted; .* --limit placements=",
        ):
            parse(f"plan 0\n{lines}")
        assert peak() < 40 * len(lines) + 4 * MIB


def test_a_range_that_runs_backwards_lowers_no_count() -> None:
    with pytest.raises(PlanError, match="in ascending order, found 'g\\[9-0\\]'"):
        parse("plan 0\nslot end\n  evict a g[9-0]")


@pytest.mark.parametrize(
    "line", ["slot a steady x{}", "slot end\n  stream a keep none ring buffer {} B"]
)
def test_numbers_of_too_many_digits(line: str) -> None:
    with pytest.raises(PlanError, match="expected '"):
        parse(f"plan 0\n{line.format('9' * 5_000)}")


def test_a_long_line_is_quoted_by_its_beginning() -> None:
    for line in (
        "x" * MIB,
        "slot " + "x" * MIB,
        "slot end\n  evict a " + "x" * MIB,
        "order",
        "slot end\n  evict " + "x" * MIB,
    ):
        with pytest.raises(PlanError) as error:
            parse(f"plan 0\n{line}")
        assert len(str(error.value)) < 1_000


def saved(folder: Path, solution: Any, problem: Problem, plan: Plan) -> Path:
    """A plan file in which ``problem`` and ``plan`` are those of ``solution``, changed."""
    path = folder / "plan.json"
    data = plan_files.content(path, GRAPHS / "flux-tiny.yaml", solution, summarize(solution, None))
    actions = str(replace(plan, problem=problem.digest)).splitlines()
    path.write_text(json.dumps({**data, "actions": actions, "problem": problem.to_json()}))
    return path


def phases(problem: Problem, count: int) -> Problem:
    return replace(
        problem,
        phases=tuple(
            replace(problem.phases[-1], index=number, trace=PhaseTrace()) for number in range(count)
        ),
    )


LARGE: dict[str, tuple[Callable[[Problem], Problem], str]] = {
    "calls": (
        lambda p: with_use(p, "transformer", calls=10**12, group_calls=(10**12,) * 3),
        "its calls compute [0-9,]+ blocks, and at most 2,000,000 are accepted.*--limit "
        "block_calls=",
    ),
    "phases": (lambda p: phases(p, 2_001), "it has 2,001 phases, and at most 2,000 are accepted"),
    "components": (
        lambda p: replace(
            p, components=tuple(replace(p.components[0], name=f"c{n}") for n in range(2_001))
        ),
        "it has 2,001 components, and at most 2,000",
    ),
    "variants": (
        lambda p: changed(p, "vae", variants=p.component("vae").variants * 2_001),
        "it has 2,001 variants of one component",
    ),
    "values": (lambda p: replace(p, values=p.values[:1] * 2_001), "it has 2,001 values"),
    "blocks": (
        lambda p: changed(
            phases(p, 100),
            "vae",
            groups=(
                replace(p.component("vae").groups[0], blocks=tuple(map(str, range(9_000)))),
                *p.component("vae").groups[1:],
            ),
        ),
        "its slots times its problem's blocks are [0-9,]+, and at most 1,000,000 .*--limit "
        "placements=",
    ),
}


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize(("change", "message"), LARGE.values(), ids=LARGE)
def test_a_problem_that_is_too_large(
    change: Callable[[Problem], Problem], message: str, small_solution: Any, tmp_path: Path
) -> None:
    path = saved(tmp_path, small_solution, change(small_solution.problem), small_solution.plan)
    with pytest.raises(PlanError, match=f"plan.json: {message}"):
        plan_files.read_solution(path)


def test_the_caller_raises_the_limit_of_a_plan(
    small_solution: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path, small_solution, small_solution.problem, small_solution.plan)
    monkeypatch.setattr(LIMITS, "entries", 3)
    with pytest.raises(
        PlanError,
        match="it has 4 components, and at most 3 are accepted; .*graphrun --limit entries=4",
    ):
        plan_files.read(path)
    monkeypatch.setattr(LIMITS, "entries", 100)
    plan_files.read(path)


@pytest.mark.parametrize("command", ["check", "explain", "plan", "report", "run"])
def test_every_command_refuses_it_in_one_line(
    command: str, graphrun: Cli, small_solution: Any, tmp_path: Path
) -> None:
    path = saved(
        tmp_path, small_solution, LARGE["calls"][0](small_solution.problem), small_solution.plan
    )
    code, output, err = graphrun(command, str(path))
    assert (code, output, len(err.splitlines())) == (2, "", 1)
    assert "and at most 2,000,000 are accepted" in err
    assert [item.name for item in tmp_path.iterdir()] == ["plan.json"]


def test_a_list_is_read_up_to_its_first_wrong_entry(small_solution: Any) -> None:
    data = small_solution.problem.to_json()
    phase = {**data["phases"][0], "uses": [{}] * COUNT}
    for name, entries, errors in (
        ("components", [0], 1),
        ("phases", [{}], 6),
        ("phases", [phase], 4),
    ):
        with pytest.raises(ValidationError) as error:
            plan_files.problem_from({**data, name: entries * COUNT})
        assert error.value.error_count() == errors


def test_a_plan_that_breaks_many_rules_is_not_listed_whole(
    small_solution: Any, tmp_path: Path
) -> None:
    problem, plan = small_solution.problem, small_solution.plan
    name, count = "x" * 100_000, LIMITS.problems + 50
    slot = replace(plan.slots[0], actions=(*plan.slots[0].actions, *[Load(name, None)] * count))
    broken_plan = replace(plan, slots=(slot, *plan.slots[1:]))
    violations = check(problem, broken_plan)
    assert len(violations) == LIMITS.problems
    assert max(len(violation.detail) for violation in violations) < 1_100
    with pytest.raises(PlanError, match="100 or more rules are broken") as error:
        plan_files.read_solution(saved(tmp_path, small_solution, problem, broken_plan))
    assert len(str(error.value)) < 150_000


def test_blocks_in_a_violation_are_ranges(small_solution: Any) -> None:
    problem, plan = small_solution.problem, small_solution.plan
    end = plan.slots[-1]
    evict = (
        parse("plan 0\nslot end\n  evict transformer transformer_blocks[0-3]").slots[0].actions[0]
    )
    broken_plan = replace(
        plan, slots=(*plan.slots[:-1], replace(end, actions=(evict, *end.actions)))
    )
    assert "transformer transformer_blocks[0-3] (" in check(problem, broken_plan)[0].detail


def test_names_are_compared_once_each(small_solution: Any) -> None:
    counter = Compared()
    paths = tuple(counter.name(f"b{number}") for number in range(COUNT))
    component = small_solution.problem.component("text_encoder")
    groups = (component.groups[0], replace(component.groups[1], blocks=paths))
    assert not list(incoherent(changed(small_solution.problem, "text_encoder", groups=groups)))
    assert counter.count < 10 * COUNT
    counter.count = 0
    variants = tuple(
        (counter.name(f"c{number}"), "bfloat16 pinned device") for number in range(COUNT)
    )
    assert (
        len(check(small_solution.problem, replace(small_solution.plan, variants=variants)))
        == LIMITS.problems
    )
    assert counter.count < 10 * COUNT


def in_a_row(problem: Problem, counter: Compared) -> Problem:
    """``problem`` with `COUNT` blocks in the transformer, each of which gets what the one before it
    makes."""
    component = problem.component("transformer")
    blocks = tuple(counter.name(f"b{number}") for number in range(COUNT))
    groups = (component.groups[0], replace(component.groups[1], blocks=blocks), component.groups[2])
    block_count = len(component.groups[2].blocks)
    order = [*((1, n) for n in range(COUNT)), *((2, n) for n in range(block_count))]
    rows = tuple(LiveTensor(512, n, (n + 1,)) for n in range(COUNT + block_count))
    problem = changed(problem, "transformer", groups=groups)
    return with_use(
        problem,
        "transformer",
        order=tuple((k, counter.number(i), 0.0) for k, i in order),
        live_tensors=rows,
    )


def test_live_tensors_are_read_once_each(small_solution: Any) -> None:
    counter = Compared()
    problem = in_a_row(small_solution.problem, counter)
    use = next(
        use for phase in problem.phases for use in phase.uses if use.component == "transformer"
    )
    assert not list(incoherent(problem))
    assert splits.arguments_bytes(use, problem.component("transformer")) == {}
    assert counter.count < 50 * COUNT


def test_tensors_that_every_block_gets_are_rounded_once_each(
    small_solution: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, rounded = [], splits.round_up
    monkeypatch.setattr(
        splits, "round_up", lambda *numbers: (calls.append(numbers), rounded(*numbers))[1]
    )
    rows = [
        LiveTensor(100 * number, 0, tuple(range(number, COUNT + 1)), is_input=True)
        for number in range(1, COUNT + 1)
    ]
    arguments = splits.block_arguments(rows)
    assert len(calls) <= COUNT
    assert arguments[:3] == [0, rounded(100, 512), rounded(100, 512) + rounded(200, 512)]


def test_actions_that_load_nothing_are_not_compared_with_every_event(small_solution: Any) -> None:
    counter = Compared()
    problem, plan = small_solution.problem, small_solution.plan
    number = next(n for n, slot in enumerate(plan.slots) if slot.part == "steady")
    loads = (Load(counter.name("vae"), ()),) * COUNT
    steady = replace(
        plan.slots[number],
        actions=(*plan.slots[number].actions[:-1], *loads, plan.slots[number].actions[-1]),
    )
    simulated = simulate(
        problem, replace(plan, slots=(*plan.slots[:number], steady, *plan.slots[number + 1 :]))
    )
    assert counter.count < 3 * COUNT
    assert simulated.seconds == small_solution.simulation.seconds


def test_repeats_are_compared_with_their_neighbours_only(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []

    class Counted(phase_trace.Repeat):
        @property
        def end(self) -> int:
            reads.append(self)
            return self.begin + self.period * self.times

    monkeypatch.setattr(phase_trace, "Repeat", Counted)
    runs = [
        size for number in range(COUNT) for size in [512, 1024, 1536, 2048] * 2 + [10**6 + number]
    ]
    events = tuple((key, nbytes) for key, nbytes in enumerate(runs))
    repeats = repeats_in(events)[1]
    assert len(repeats) == COUNT
    assert len(reads) < 20 * COUNT


def test_a_replay_of_traces_ends(small_solution: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call allocates in an ever larger pool: no state comes again, and each is compared with
    all before it."""
    problem = replace(
        small_solution.chosen,
        hardware=replace(small_solution.problem.hardware, caching_allocator=True),
    )
    events = [(number, 512 * (number % 7 + 1)) for number in range(200)]
    call = CallTrace("transformer", (*events, *((number, 0) for number, _ in events)))
    phases = tuple(
        replace(phase, trace=PhaseTrace((call,), ((0, CALL),))) for phase in problem.phases
    )
    problem = replace(problem, phases=phases)
    reserved_bytes(problem, small_solution.plan)
    monkeypatch.setattr(LIMITS, "replay_steps", 1_000)
    message = (
        "was ended after 1,[0-9]+ steps, and at most 1,000 are accepted; .*--limit "
        "replay_steps=2[0-9]+ "
    )
    with pytest.raises(PlanError, match=message):
        reserved_bytes(problem, small_solution.plan)


def test_devices_of_a_trace_are_compared_once_each() -> None:
    counter = Compared()
    lanes = [Lane(counter.name(f"d{number}"), 0, ("s",), 0.0, 1.0) for number in range(COUNT)]
    assert lanes_page(lanes).count('class="c0 run"') == COUNT
    assert counter.count < 20 * COUNT


HOST = "  h{}: {{ram: 8G, devices: [{{id: 0, hardware: sim, vram: 4M}}]}}\n"
LINK = "links: [{{between: [{}], bytes_per_second: 1.2e9, seconds: 1e-4}}]\n"
CLUSTERS = {
    "hosts": (201, "", "it has 201 hosts, and at most 200 are accepted"),
    "links": (
        2,
        LINK.format("h0, " * 2_001),
        "its links name 2,001 hosts, and at most 2,000 are accepted",
    ),
}


@pytest.mark.parametrize(("hosts", "links", "message"), CLUSTERS.values(), ids=CLUSTERS)
def test_a_cluster_that_is_too_large(hosts: int, links: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("graphrun: 1\nhosts:\n" + "".join(map(HOST.format, range(hosts))) + links)
    with pytest.raises(InputError, match=f"cluster.yaml: {message}"):
        read_cluster(path)


PLACEMENTS = {
    "items": (
        ["place throughput items 999999999"],
        "it is for 999,999,999 items, and at most 100,000 are accepted",
    ),
    "sections": (
        ["place latency items 1", *["device h/0 stages s", "plan 0"] * 201],
        "it has 201 sections of devices",
    ),
    "ranges": (
        [
            "place latency items 1",
            *["device h/0 stages s", "plan 0", "slot end", "evict a g[0-9999]"] * 150,
        ],
        "the plan names 1,010,000 blocks up to here",
    ),
    "a long line": (["x" * MIB], "found 'x"),
}


@pytest.mark.parametrize(("actions", "message"), PLACEMENTS.values(), ids=PLACEMENTS)
def test_a_placement_that_is_too_large(actions: list[str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    data = {
        "graphrun": plan_files.VERSION,
        "cluster": {"hosts": []},
        "actions": actions,
        "problems": {},
        "stages": [],
        "values": [],
    }
    path.write_text(json.dumps(data))
    with pytest.raises(PlanError, match=message) as error:
        files.read(path)
    assert len(str(error.value)) < 1_000
