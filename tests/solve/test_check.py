"""`check`: for each rule, a plan in text form that breaks this rule and no other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner_problems import component, problem

from graphrun.model.plan import marked_text, parse
from graphrun.model.problem import (
    ComponentPlacement,
    Directive,
    PhaseNumbers,
    Problem,
    Use,
    ValueNumbers,
)
from graphrun.verify.check import check

K = 1024
GOOD = """plan {digest}
slot encode/0:te load
  load te all from pinned
slot encode/0:te first
  load dit unblocked[0] from pinned
  run
slot denoise/0:dit load
  evict te all
  load dit big[1] from pinned
slot denoise/0:dit first
  stream dit keep big[0,1] unblocked[0] ring buffer 4 KiB
  load dit big[0] from pinned
  run
slot denoise/0:dit steady x3
  evict dit big[0]
  stream dit keep big[1] unblocked[0] ring buffer 4 KiB
  load vae mid[0] from pinned
  run
slot decode/0:vae load
  evict dit big[1] unblocked[0]
  load vae mid[1] from pinned
slot decode/0:vae first
  run
slot end
  evict vae mid[0,1]
"""


def example_problem(budget_bytes: int = 12 * K, **changes: object) -> Problem:
    te = component("te", ("unblocked", 1, 2 * K))
    dit = component("dit", ("big", 4, 2 * K), ("unblocked", 1, K))
    vae = component("vae", ("mid", 2, K, False), ("unused", 1, K))
    phases = (
        PhaseNumbers("encode", 0, (Use("te", 1, (1,), (0.1,)),), 100, 500, 0),
        PhaseNumbers("denoise", 0, (Use("dit", 4, (4, 4), (0.1, 0.1)),), 100, 900, 1000),
        PhaseNumbers("decode", 0, (Use("vae", 1, (1, 0), (0.1, 0.1)),), 100, 3000, 0),
    )
    values = (ValueNumbers("embeds", 412, "encode", ("denoise",), 1, 1),)
    return replace(problem(budget_bytes, (te, dit, vae), phases, values), **changes)


def broken_rules(text: str, problem: Problem | None = None) -> list[tuple[str, int, int]]:
    problem = problem or example_problem()
    return [
        (v.rule, v.slot, v.action)
        for v in check(problem, parse(text.format(digest=problem.digest)))
    ]


def test_a_broken_rule_is_shown_below_its_line() -> None:
    problem = example_problem()
    text = GOOD.format(digest="0123456789abcdef")
    text = text.replace("big[1] unblocked[0] ring buffer 4 KiB", "big[1] ring buffer 1 KiB")
    plan = parse(text.replace("  load vae mid[1] from pinned\n", ""))
    assert marked_text(plan, check(problem, plan)).splitlines() == [
        f"digest: the plan was made for problem 0123456789abcdef, this is problem {problem.digest}",
        "slot denoise/0:dit steady x3",
        "  evict dit big[0]",
        "  stream dit keep big[1] ring buffer 1 KiB",
        "  ^ stream: keep and the blocks on the device differ in dit unblocked[0] (1024 bytes)",
        "  ^ ring_buffer: 3 blocks are streamed through a ring buffer of 1024 bytes; it needs 2048",
        "  load vae mid[0] from pinned",
        "  run",
        "slot decode/0:vae first",
        "^ not-streamable: must be on the device when the slot starts: vae mid[1] (1024 bytes)",
        "  run",
        "slot end",
        "  evict vae mid[0,1]",
        "  ^ evict-absent: not on the device: vae mid[1] (1024 bytes)",
    ]


def test_the_unchanged_plan_is_valid() -> None:
    assert broken_rules(GOOD) == []


@pytest.mark.parametrize(
    ("old", "new", "rules"),
    [
        ("plan {digest}", "plan 0123456789abcdef", [("digest", -1, -1)]),
        ("dit steady x3", "dit steady x4", [("structure", 4, -1)]),
        ("slot end\n  evict vae mid[0,1]\n", "", [("structure", 7, -1)]),
        ("  run\nslot denoise/0:dit steady", "slot denoise/0:dit steady", [("order", 3, -1)]),
        ("  evict te all\n", "  evict te all\n  run\n", [("order", 2, -1)]),
        (
            "  load dit unblocked[0] from pinned\n  run",
            "  run\n  load dit unblocked[0] from pinned",
            [("order", 1, 0)],
        ),
        (
            "  evict te all\n  load dit big[1] from pinned",
            "  load dit big[1] from pinned\n  evict te all",
            [("order", 2, 1)],
        ),
        (
            "  evict dit big[1] unblocked[0]\n  load vae mid[1] from pinned\n",
            "  load vae mid[1] from pinned\n  evict dit big[1]\n  evict dit unblocked[0]\n",
            [("order", 5, 1), ("order", 5, 2)],
        ),
        ("load te all", "load te all from pinned\n  load tee all", [("unknown", 0, 1)]),
        (
            "load vae mid[0]",
            "load vae mid[0,2]",
            [("unknown", 4, 2), ("evict-absent", 7, 0), ("not-streamable", 6, -1)],
        ),
        (
            "  load vae mid[0] from pinned\n",
            "  load vae mid[0] from pinned\n  drop vie\n",
            [("unknown", 4, 3), ("order", 4, 3)],
        ),
        ("load dit big[1] from", "load dit big[1] unblocked[0] from", [("load-present", 2, 1)]),
        (
            "  load te all from pinned\n",
            "  load te all from pinned\n" * 2,
            [("load-present", 0, 1)],
        ),
        ("load te all from pinned", "load te all from disk", [("backing-store", 0, 0)]),
        ("  evict te all\n", "  evict te all\n  evict vae unused[0]\n", [("evict-absent", 2, 1)]),
        ("  stream dit keep big[0,1] unblocked[0] ring buffer 4 KiB\n", "", [("missing", 3, -1)]),
        (
            "  load dit unblocked[0] from pinned\n",
            "",
            [
                ("not-streamable", 3, -1),
                ("not-streamable", 4, -1),
                ("stream", 3, 0),
                ("evict-absent", 5, 0),
            ],
        ),
        (
            "  load vae mid[0]",
            "  load dit big[0] from pinned\n  load vae mid[0]",
            [("steady-load", 4, -1), ("stream", 4, 1)],
        ),
        ("keep big[0,1]", "keep big[1]", [("stream", 3, 0)]),
        (
            "  evict te all\n",
            "  evict te all\n  stream dit keep unblocked[0] ring buffer 4 KiB\n",
            [("stream", 2, 1)],
        ),
        (
            "big[0,1] unblocked[0] ring buffer 4 KiB",
            "big[0,1] unblocked[0] ring buffer 2047 B",
            [("ring_buffer", 3, 0)],
        ),
        (
            "  stream dit keep big[0,1] unblocked[0] ring buffer 4 KiB\n",
            "  stream dit keep big[0,1] unblocked[0] ring buffer 2 KiB\n" * 2,
            [("stream", 3, 1)],
        ),
        ("  evict vae mid[0,1]", "  evict vae mid[0]", [("baseline", 7, -1)]),
    ],
)
def test_a_violation_names_rule_slot_and_action(
    old: str, new: str, rules: list[tuple[str, int, int]]
) -> None:
    assert old in GOOD
    assert set(rules) <= set(broken_rules(GOOD.replace(old, new)))
    assert {rule for rule, _, _ in broken_rules(GOOD.replace(old, new))} <= {
        rule for rule, _, _ in rules
    } | {"baseline"}


ORDER = "the order must be drop, evict, spill, restore, read, stream, load, run"


@pytest.mark.parametrize(
    ("old", "new", "detail"),
    [
        ("steady x3", "steady x4", "expected {0} with 3 calls, found {0} with 4 calls"),
        (
            "slot end\n  evict vae mid[0,1]\n",
            "",
            "expected the run end with 0 calls, found nothing",
        ),
        ("  run\nslot end", "slot end", "a first slot must have 1 run actions; found 0"),
        ("  evict te all\n", "  run\n", "a load slot must have 0 run actions; found 1"),
        ("  load vae mid[0]", "  read te\n  load vae mid[0]", f"read after stream; {ORDER}"),
        ("load te all", "load tee all", "no component 'tee'"),
        (
            "load vae mid[1] from pinned",
            "load vae mid[1] from disk",
            "the backing store of vae is pinned, not disk",
        ),
        ("load vae mid[0]", "load vae mid[0,2]", "vae has no blocks mid[2]"),
        ("  evict vae", "  load te all from pinned\n  evict vae", "the end slot must not load"),
        (
            "keep big[0,1] unblocked[0] ring",
            "keep big[0,1] unblocked[0] ring buffer 4 KiB\n  stream te keep none ring",
            "the slot does not use te",
        ),
        (
            "  stream dit keep big[0,1] unblocked[0] ring buffer 4 KiB\n",
            "",
            "needed, but neither resident, loaded nor streamed: dit big[2,3] (4096 bytes)",
        ),
    ],
)
def test_a_violation_says_what_is_wrong(old: str, new: str, detail: str) -> None:
    instance = example_problem()
    text = GOOD.replace(old, new).format(digest=instance.digest)
    assert old in GOOD
    assert detail.format("denoise/0:dit steady") in [v.detail for v in check(instance, parse(text))]


FORBIDDEN = "dit is streamed, which the directive {} forbids"
KEPT = "kept from its first use on, but not on the device: "
EXCLUDED = "on the device, though excluded: "
MISPLACED = "on the device outside its own phases: "


@pytest.mark.parametrize(
    ("placement", "name", "expected"),
    [
        ("keep", "te", [(k, -1, KEPT + "te unblocked[0] (2048 bytes)") for k in range(2, 7)]),
        (
            "keep",
            "dit",
            [
                (3, 0, FORBIDDEN.format("keep")),
                (4, -1, KEPT + "dit big[0,2,3] (6144 bytes)"),
                (4, 1, FORBIDDEN.format("keep")),
                (5, -1, KEPT + "dit big[0-3] unblocked[0] (9216 bytes)"),
                (6, -1, KEPT + "dit big[0-3] unblocked[0] (9216 bytes)"),
            ],
        ),
        ("keep", "vae", []),
        (
            "exclude",
            "dit",
            [
                (2, -1, EXCLUDED + "dit big[1] (2048 bytes)"),
                (3, -1, EXCLUDED + "dit big[0,1] (4096 bytes)"),
                (4, -1, EXCLUDED + "dit big[1] (2048 bytes)"),
            ],
        ),
        ("exclude", "vae", []),
        ("whole", "dit", [(k, k - 3, FORBIDDEN.format("whole")) for k in (3, 4)]),
        ("whole", "te", []),
        ("drop", "vae", [(k, -1, MISPLACED + "vae mid[0] (1024 bytes)") for k in (4, 5)]),
        ("drop", "dit", [(k, -1, MISPLACED + "dit unblocked[0] (1024 bytes)") for k in (1, 2)]),
        ("drop", "te", []),
    ],
)
def test_a_violation_of_a_directive_names_slot_action_and_blocks(
    placement: ComponentPlacement, name: str, expected: list[tuple[int, int, str]]
) -> None:
    instance = example_problem(directives=(Directive(placement, name),))
    violations = check(instance, parse(GOOD.format(digest=instance.digest)))
    assert {v.rule for v in violations} <= {placement}
    assert [(v.slot, v.action, v.detail) for v in violations] == expected


def test_a_ring_buffer_needs_room_for_the_largest_streamed_block() -> None:
    assert broken_rules(GOOD.replace("ring buffer 4 KiB", "ring buffer 2 KiB")) == []
    assert broken_rules(GOOD.replace("ring buffer 4 KiB", "ring buffer 2047 B")) == [
        ("ring_buffer", 3, 0),
        ("ring_buffer", 4, 1),
    ]


def test_the_largest_streamed_block_may_be_of_any_group() -> None:
    up_component = component("up", ("wide", 2, 2 * K), ("thin", 2, K))
    phases = (PhaseNumbers("s", 0, (Use("up", 1, (1, 1), (0.1, 0.1)),), 0, 0, 0),)
    instance = problem(4 * K, (up_component,), phases)
    text = (
        "plan {{digest}}\nslot s/0:up load\nslot s/0:up first\n"
        "stream up keep none ring buffer {ring_buffer_bytes} B\nrun\nslot end"
    )
    assert broken_rules(text.format(ring_buffer_bytes=2 * K), instance) == []
    assert broken_rules(text.format(ring_buffer_bytes=2 * K - 1), instance) == [
        ("ring_buffer", 1, 0)
    ]


def test_budgets_are_exact_to_the_byte() -> None:
    # denoise first: 5 KiB weights + 4 KiB ring buffer + 900 + 412 + 100; steady: 3 KiB + 1 KiB
    # prefetch + 4 KiB ring buffer + 1000 + 412 + 100
    first = 5 * K + 4 * K + 900 + 512
    assert broken_rules(GOOD, example_problem(first)) == []
    (violation,) = check(
        example_problem(first - 1), parse(GOOD.format(digest=example_problem(first - 1).digest))
    )
    assert (violation.rule, violation.slot) == ("vram", 3)
    assert (
        violation.detail
        == "5120 weights + 4096 ring buffers + 900 activation + 512 values and inputs"
        f" = {first} > {first - 1} bytes"
    )
    host = 2 * K + 9 * K + 3 * K
    assert broken_rules(GOOD, example_problem(ram_bytes=host)) == []
    assert broken_rules(GOOD, example_problem(ram_bytes=host - 1)) == [("ram", 0, -1)]


def test_device_allocations_are_rounded_up() -> None:
    odd = component("te", ("unblocked", 1, 1025))
    phases = (PhaseNumbers("encode", 0, (Use("te", 1, (1,), (0.1,)),), 0, 0, 0),)
    text = (
        "plan {digest}\nslot encode/0:te load\nload te all from pinned\nslot encode/0:te first\nrun"
        "\nslot end\nevict te all"
    )
    assert broken_rules(text, problem(1536, (odd,), phases)) == []
    assert broken_rules(text, problem(1535, (odd,), phases)) == [("vram", 0, -1), ("vram", 1, -1)]


def test_an_immovable_component_is_neither_evicted_nor_streamed() -> None:
    whole = example_problem()
    dit = replace(
        whole.components[1], variants=(replace(whole.components[1].variants[0], movable=False),)
    )
    fixed = replace(whole, components=(whole.components[0], dit, whole.components[2]))
    assert {rule for rule, _, _ in broken_rules(GOOD, fixed)} == {"immovable", "not-streamable"}
    violations = check(fixed, parse(GOOD.format(digest=fixed.digest)))
    assert "dit must stay on the device until the end" in [v.detail for v in violations]
    vae = replace(
        whole.components[2], variants=(replace(whole.components[2].variants[0], movable=False),)
    )
    evicted_at_the_end = replace(whole, components=(*whole.components[:2], vae))
    assert broken_rules(GOOD, evicted_at_the_end) == []


def test_a_variant_that_cannot_be_streamed_is_loaded_before_its_slots() -> None:
    whole = example_problem()
    te, dit, vae = whole.components
    unstreamable = replace(dit, variants=(replace(dit.variants[0], streamable=False),))
    assert broken_rules(GOOD, replace(whole, components=(te, unstreamable, vae))) == [
        ("not-streamable", 3, -1),
        ("not-streamable", 4, -1),
    ]


STREAM, LOAD = "  stream up keep none ring buffer 2 KiB\n", "  load up all from pinned\n"


@pytest.mark.parametrize(("first", "steady"), [(STREAM, LOAD), (LOAD, "")], ids=["steady", "first"])
def test_a_slot_may_load_all_blocks_before_it_runs_them_or_while_it_runs_none(
    first: str, steady: str
) -> None:
    phases = (PhaseNumbers("s", 0, (Use("up", 2, (1,), (0.1,)),), 0, 0, 0),)
    text = (
        f"plan {{digest}}\nslot s/0:up load\nslot s/0:up first\n{first}  run\n"
        f"slot s/0:up steady x1\n{steady}  run\nslot end\n  evict up all\n"
    )
    assert broken_rules(text, problem(2 * K, (component("up", ("mid", 2, K)),), phases)) == []


def test_a_phase_without_components_has_only_a_first_slot() -> None:
    phases = (PhaseNumbers("pipeline_code", 0, (), 0, 10, 0),)
    pipeline_code = problem(K, (), phases, ram_bytes=0)  # the activation is on the device
    assert (
        broken_rules("plan {digest}\nslot pipeline_code/0: first\nrun\nslot end", pipeline_code)
        == []
    )
