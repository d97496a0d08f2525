"""The slots that a call into a component opens. Plans are in text form; a call is the name of a
component."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_component import Small, plan_of, small_hardware, small_problem, use

from graphrun.errors import BrokenPlan
from graphrun.runtime.cursor import SlotCursor

ON = small_hardware()
TWO = """
    slot s0/0:a load
    slot s0/0:a first
    slot s0/0:a steady x2
    slot s1/0:b load
    slot s1/0:b first
    slot end
"""
PAIR = """
    slot s0/0:a+b load
    slot s0/0:a+b first
    slot s0/0:a+b steady x2
    slot end
"""
RESTORED = """
    slot s0/0:a load
      load a all from pinned
    slot s0/0:a first
    slot s0/0:a steady x2
      spill latents
    slot s1/0:b load
      restore latents
    slot s1/0:b first
    slot end
"""
# in the text of errors
LOADED, SPILLED, READ = "    load a all from pinned", "    spill latents", "    restore latents"
SAME = """
    slot s0/0:a load
    slot s0/0:a first
    slot s0/0:a steady x1
    slot s1/0:a load
    slot s1/0:a first
    slot end
"""
COPIES = """
    slot s0/0:a@1+a load
    slot s0/0:a@1+a first
    slot s0/0:a@1+a steady x1
    slot s1/0:a load
    slot s1/0:a first
    slot s2/0:a@1+a load
    slot s2/0:a@1+a first
    slot end
"""


def cursor_of(text: str, *phases: tuple[tuple[str, int], ...]) -> SlotCursor:
    problem = small_problem(
        {"a": Small(), "b": Small()},
        [[use(name, calls, ON) for name, calls in phase] for phase in phases],
    )
    return SlotCursor(problem, plan_of(problem, text))


def two() -> SlotCursor:
    return cursor_of(TWO, (("a", 3),), (("b", 1),))


def test_load_and_first_open_with_the_first_call_and_steady_with_the_second() -> None:
    cursor = two()
    assert [
        cursor.enter("a"),
        cursor.enter("a"),
        cursor.enter("a"),
        cursor.enter("b"),
        cursor.finish(),
    ] == [
        [0, 1],
        [2],
        [],
        [3, 4],
        [5],
    ]


def test_slots_of_stages_that_a_run_leaves_out_open_on_the_way() -> None:
    cursor = two()
    cursor.leave_out({"s0"})
    assert [cursor.open_ahead(), cursor.enter("b"), cursor.finish()] == [[0], [1, 2, 3, 4], [5]]
    cursor = two()
    cursor.leave_out({"s1"})
    assert [cursor.enter("a"), cursor.enter("a"), cursor.enter("a"), cursor.finish()] == [
        [0, 1],
        [2],
        [],
        [3, 4, 5],
    ]
    with pytest.raises(BrokenPlan, match="b was called out of order"):
        cursor.enter("b")


def test_a_stage_that_reads_a_restored_value_opens_its_load_slot_before_its_first_call() -> None:
    phases = (("a", 3),), (("b", 1),)
    cursor = cursor_of(RESTORED, *phases)
    assert [cursor.begin("s0"), cursor.enter("a"), cursor.enter("a"), cursor.enter("a")] == [
        [],
        [0, 1],
        [2],
        [],
    ]
    assert [cursor.begin(stage) for stage in ("r", "t")] == [[], []], "stages without components"
    assert [cursor.begin("s1"), cursor.enter("b")] == [[3], [4]]
    assert cursor.begin("t") == []
    assert cursor.finish() == [5]
    assert cursor.begin("s1") == []
    cursor = cursor_of(RESTORED, *phases)
    assert cursor.begin("s1") == [], "the load slot of s0 is next"
    cursor.leave_out({"s0"})
    assert [cursor.begin("s1"), cursor.enter("b")] == [[0, 1, 2, 3], [4]]


def test_a_stage_without_a_restored_value_opens_its_slots_with_its_first_call() -> None:
    cursor = two()
    assert [cursor.begin("s0"), cursor.open_ahead(), cursor.begin("s0")] == [[], [0], []]
    restored_first = TWO.replace("slot s0/0:a load", "slot s0/0:a load\n      restore latents")
    assert cursor_of(restored_first, (("a", 3),), (("b", 1),)).open_ahead() == []


@pytest.mark.parametrize("first_slot", ["slot end", "slot s0/0:none first\n slot end"])
def test_a_slot_without_loads_is_not_opened_ahead(first_slot: str) -> None:
    assert cursor_of(first_slot, ()).open_ahead() == []


@pytest.mark.parametrize("next_component", ["b", "ab"])
def test_a_call_beyond_the_plan_stays_in_steady(next_component: str) -> None:
    cursor = cursor_of(TWO.replace("b", next_component), (("a", 3),), ((next_component, 1),))
    assert [cursor.enter("a") for _ in range(4)] == [[0, 1], [2], [], []]


def test_phases_follow_one_another_in_the_order_of_the_plan_whatever_their_names_are() -> None:
    text = """
        slot s1/0:b load
        slot s1/0:b first
        slot s0/0:a load
        slot s0/0:a first
        slot end
    """
    cursor = cursor_of(text, (("a", 1),), (("b", 1),))
    assert [cursor.enter("b"), cursor.enter("a"), cursor.finish()] == [[0, 1], [2, 3], [4]]


def test_a_copy_makes_the_first_call_of_each_pair_in_phases_that_have_it() -> None:
    pair = ("a@1", "a")
    phases = [[use(name, 2, ON) for name in pair], [use("a", 1, ON)], [use(n, 1, ON) for n in pair]]
    problem = small_problem({"a": Small()}, phases)
    (original,) = problem.components
    copy = replace(original, name="a@1", copy_of="a")
    problem = replace(problem, components=(original, copy))
    cursor = SlotCursor(problem, plan_of(problem, COPIES))
    callers, indices = list[str](), list[list[int]]()
    for _ in range(7):
        callers.append(cursor.caller("a"))
        indices.append(cursor.enter(callers[-1]))
    assert callers == [*pair, *pair, "a", *pair]
    assert indices == [[0, 1], [], [2], [], [3, 4], [5, 6], []]


def test_first_lasts_until_every_component_of_the_phase_was_called() -> None:
    cursor = cursor_of(PAIR, (("a", 3), ("b", 2)))
    assert [cursor.enter(c) for c in "aabab"] == [[0, 1], [], [], [2], []]


def test_a_phase_with_the_same_component_begins_when_the_planned_calls_are_done() -> None:
    cursor = cursor_of(SAME, (("a", 2),), (("a", 1),))
    assert [cursor.enter("a"), cursor.enter("a"), cursor.enter("a"), cursor.finish()] == [
        [0, 1],
        [2],
        [3, 4],
        [5],
    ]


def test_a_call_out_of_order_names_the_component_the_slot_and_what_was_expected() -> None:
    with pytest.raises(
        BrokenPlan, match="b was called out of order at the start: the plan expects a next"
    ):
        two().enter("b")
    cursor = two()
    for component in "aaab":
        cursor.enter(component)
    with pytest.raises(
        BrokenPlan,
        match="a was called out of order in slot s1/0:b first: the plan expects nothing more",
    ):
        cursor.enter("a")


@pytest.mark.parametrize(
    ("calls", "next_call", "lines"),
    [
        ("", "b", ["  ^ here", "  slot s0/0:a load", LOADED]),
        ("a", "b", ["  slot s0/0:a first", "  ^ here", "  slot s0/0:a steady x2", SPILLED]),
        ("aa", "c", ["  slot s0/0:a steady x2", SPILLED, "  ^ here", "  slot s1/0:b load", READ]),
        ("aaab", "a", ["  slot s1/0:b first", "  ^ here", "  slot end"]),
    ],
)
def test_the_error_of_a_call_shows_the_open_slot_and_the_next_one(
    calls: str, next_call: str, lines: list[str]
) -> None:
    cursor = cursor_of(RESTORED, (("a", 3),), (("b", 1),))
    for component in calls:
        cursor.enter(component)
    with pytest.raises(BrokenPlan, match=f"^{next_call} was called .*plan again") as error_info:
        cursor.enter(next_call)
    assert str(error_info.value).splitlines()[1:] == lines


def test_a_call_that_a_slot_opened_ahead_is_not_for_names_that_slot() -> None:
    cursor = two()
    cursor.open_ahead()
    with pytest.raises(BrokenPlan, match="in slot s0/0:a load: .* a next") as error_info:
        cursor.enter("b")
    lines = ["  slot s0/0:a load", "  ^ here", "  slot s0/0:a first"]
    assert str(error_info.value).splitlines()[1:] == lines


def test_leaving_a_phase_before_its_steady_slot_is_an_error() -> None:
    cursor = two()
    cursor.enter("a")
    with pytest.raises(
        BrokenPlan, match="b was called in slot .* before that phase had its planned calls"
    ):
        cursor.enter("b")


def test_a_second_call_where_the_plan_has_one_is_an_error() -> None:
    cursor = two()
    for component in "aaab":
        cursor.enter(component)
    with pytest.raises(
        BrokenPlan, match="b was called again in s1/0:b, for which the plan has one call"
    ):
        cursor.enter("b")


@pytest.mark.parametrize("entries", ["", "a", "aa", "aaa"])
def test_a_run_that_ends_before_its_plan_is_an_error(entries: str) -> None:
    cursor = two()
    for component in entries:
        cursor.enter(component)
    with pytest.raises(BrokenPlan, match="before the plan did"):
        cursor.finish()
