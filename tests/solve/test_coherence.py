"""`incoherent`: every number of a problem that cannot be, by one change of a consistent problem."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
from planner_problems import component, hardware, problem

from graphrun.model.phase_trace import CALL, CallTrace, PhaseTrace
from graphrun.model.problem import (
    BlockGroup,
    LiveTensor,
    PhaseNumbers,
    Problem,
    Secondary,
    StageOption,
    Use,
    ValueNumbers,
)
from graphrun.verify.coherence import incoherent

MOST = 2**53


def example_problem() -> Problem:
    """A problem with everything that is compared: layers, orders, tensors, traces, options."""
    blocks = component("te", ("unblocked", 1, 4), ("mid", 2, 4))
    groups = (BlockGroup("unblocked", ("",), False), BlockGroup("mid", ("mid.0", "mid.1"), True))
    layers = replace(blocks, groups=groups, granularity="layers")
    te, order = replace(layers, granularity="blocks", layers=layers), ((1, 0, 1.0), (1, 1, 1.0))
    use = Use("te", 2, (2, 2), (1.0, 1.0), order, (1, 1), transfer=(4, 4))
    tensors = (LiveTensor(4, 0, (1,)), LiveTensor(4, 1, (0, 2)), LiveTensor(4, 2, (0,)))
    use = replace(use, layers=use, live_tensors=tensors)
    call = CallTrace("te", ((1, 8), (2, 8), (3, 8), (2, 0), (1, 0)), (3,), (2,))
    trace = PhaseTrace((call,), ((0, CALL), (4, 8)), ((0, CALL),), ((5, 8),))
    encode = PhaseNumbers("encode", 0, (use,), 1, 2, 3, trace=trace)
    decode = PhaseNumbers("decode", 0, (Use("te", 1, (1, 0), (1.0, 1.0)),), 1, 2, 3)
    return replace(
        problem(64, (te,), (encode, decode), (ValueNumbers("embeds", 4, "encode", (), 1, 1),)),
        options=(StageOption("encode", "tiled", (replace(encode, trace=PhaseTrace()),)),),
        precedence=(("encode", "decode"),),
        secondaries=(Secondary(hardware(), 64),),
    )


def changed(record: Any, path: str, value: Any) -> Any:
    """``record`` with another value at ``path``, as in "components 0 name"."""
    key, _, rest = path.partition(" ")
    if key.isdecimal():
        index = int(key)
        item = changed(record[index], rest, value) if rest else value
        items = (*record[:index], item, *record[index + 1 :])
        return type(record)(*items) if hasattr(record, "_fields") else items
    if hasattr(record, "_fields"):
        return record._replace(**{key: value})
    return replace(record, **{key: changed(getattr(record, key), rest, value) if rest else value})


def faults(*changes: Any) -> list[str]:
    example = example_problem()
    for path, value in zip(changes[::2], changes[1::2], strict=True):
        example = changed(example, path, value)
    return list(incoherent(example))


USE, CALL_PATH = "phases 0 uses 0", "phases 0 trace calls 0"
TENSORS = f"{USE} live_tensors"
NO_RATE = "a rate of the hardware is not positive"
ORDER = "encode/0:te: te: order"


@pytest.mark.parametrize(
    "changes",
    [
        ("components 0 variants 0 host_bytes", MOST),
        ("components 0 variants 0 block_seconds", (-1.0, float(-MOST))),
        ("components 0 variants 0 read_seconds", (0.0, 0.0)),
        ("components 0 variants 0 device", "cpu"),
        ("components 0 variants 0 device", "device1"),
        ("components 0 variants 0 slowdown", 0.5),
        ("components 0 layers", None),
        ("hardware page_scale", 1e-6),
        ("hardware bidirectional", 1.0),
        ("hardware cpu_flops_per_second", 0.5),
        ("hardware flops_per_second", 0.5),
        ("hardware disk_bytes_per_second", 0.5),
        ("precedence", None),
        ("values 0 first_phase", 0),
        ("values 0 last_phase", -1),
        (f"{USE} transfer", ()),
        (f"{USE} passes", ()),
        (f"{USE} order", ()),
        (f"{USE} layers", None),
        (f"{USE} order", ((0, 0, 1.0), (1, 0, 1.0), (0, 0, 1.0), (1, 1, 1.0), (1, 0, 1.0))),
        (f"{CALL_PATH} results", ()),
        (f"{CALL_PATH} events", ((1, MOST), (2, 8), (3, 8), (2, 0), (1, 0), (1, 8), (1, 0))),
        ("phases 0 trace first", ((0, CALL), (0, MOST), (0, 0))),
        (f"{USE} layers order", ((1, 1, 1.0), (1, 0, 1.0))),
        (f"{USE} layers order", (), f"{USE} layers group_calls", (2, 1)),
        (f"{USE} layers order", ((0, 0, 1.0),), f"{USE} layers group_calls", (2, 0)),
        (f"{USE} live_tensors", (), f"{USE} order", ((1, 0, 1.0),), f"{USE} group_calls", (2, 1)),
    ],
)
def test_what_may_be(changes: tuple[Any, ...]) -> None:
    assert faults() == []
    assert faults(*changes) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("runs", 0), "problem.runs is 0"),
        (("budget_bytes", -1), "problem.budget_bytes is -1"),
        (("ram_bytes", MOST + 1), f"problem.ram_bytes is {MOST + 1}"),
        (("components 0 variants 0 host_bytes", -1), "bfloat16 pinned device.host_bytes is -1"),
        (("hardware launch_seconds", inf), "test.launch_seconds is inf"),
        (("phases 0 uses 0 seconds", (1.0, nan)), "encode/0:te.uses.seconds is nan"),
        (
            ("components 0 variants 0 block_seconds", (0.0, -2.0 * MOST)),
            f"device.block_seconds is {-2.0 * MOST}",
        ),
        (("components 0 groups 1 name", "a\tb"), "'a\\tb' is not a valid name"),
        (("components 0 layers groups 1 name", 'a"b'), "'a\"b' is not a valid name"),
        (("values 0 name", "a\\b"), "'a\\\\b' is not a valid name"),
        (("options 0 name", "a\nb"), "'a\\nb' is not a valid name"),
        (("phases 1 stage", "\x1b", "precedence", None), "'\\x1b' is not a valid name"),
        (("values", 2 * example_problem().values), "values: embeds appears twice"),
        (("options", 2 * example_problem().options), "options: encode tiled appears twice"),
        (("components", 2 * example_problem().components), "components: te appears twice"),
        (
            ("phases 1", example_problem().phases[0], "precedence", None),
            "phases: encode/0:te appears twice",
        ),
        (("options 0 stage", "other"), "the option tiled of other has phases of other stages, or"),
        (
            ("options 0 phases 0 stage", "decode"),
            "the option tiled of encode has phases of other stages, or",
        ),
        (
            ("options 0 stage", "other", "options 0 phases 0 stage", "other"),
            "the option tiled of other has phases of other stages, or",
        ),
        (
            ("options 0 phases 0 uses 0 component", "other"),
            "encode/0:other uses other, which is not a component",
        ),
        (("precedence", (("encode", "late"),)), "precedence encode before late: no such stage"),
        (("values 0 first_phase", -1), "embeds is live from phase -1 to 1"),
        (("values 0 last_phase", -2), "embeds is live from phase 1 to -2"),
        (("hardware h2d_bytes_per_second", 0.0), "hardware.h2d_bytes_per_second is not positive"),
        (
            ("secondaries 0 hardware memory_bytes_per_second", 0.0),
            "hardware.memory_bytes_per_second is not positive",
        ),
        (("hardware page_scale", 9e-7), "hardware.page_scale is 9e-07"),
        (("hardware page_scale", 1.5), "hardware.page_scale is 1.5"),
        (("hardware flops_per_second", 0.0), NO_RATE),
        (("hardware cpu_flops_per_second", 0.0), NO_RATE),
        (("hardware bidirectional", 0.0), NO_RATE),
        (("hardware bidirectional", 1.25), NO_RATE),
        (("components 0 variants", (), "components 0 layers", None), "te has no variant"),
        (("components 0 groups 1 name", "unblocked"), "te: unblocked appears twice"),
        (("components 0 layers groups 1 blocks", ("mid.0", "mid.0")), "te: mid.0 appears twice"),
        (
            ("components 0 layers groups 0 blocks", ()),
            "te: the block group unblocked has no blocks",
        ),
        (
            ("components 0 layers groups 0 secondary", 1),
            "te: the block group unblocked is on a secondary device",
        ),
        (("components 0 layers name", "other"), "te.layers is not te split into layers"),
        (
            ("components 0 variants 0 block_bytes", ()),
            "device: block_bytes has 0 numbers for 2 block groups",
        ),
        (
            ("components 0 variants 0 read_bytes", (1,)),
            "device: read_bytes has 1 numbers for 2 block groups",
        ),
        (
            ("components 0 variants 0 device", "device2"),
            "device2 computes on device2 with the slowdown 1.0",
        ),
        (
            ("components 0 variants 0 slowdown", 0.0),
            "device computes on device with the slowdown 0.0",
        ),
        ((f"{USE} transfer", (1,)), "encode/0:te: te: transfer is [1]"),
        ((f"{USE} passes", (1,)), "passes has 1 numbers for 2 block groups"),
        ((f"{USE} seconds", ()), "te: seconds has 0 numbers for 2 block groups"),
        ((f"{USE} layers seconds", ()), "te: seconds has 0 numbers for 2 block groups"),
        (
            ("phases 1 uses 0 calls", 0),
            "decode/0:te: te: 0 calls, but its block groups run in [1, 0] calls",
        ),
        (
            ("phases 1 uses 0 group_calls", (1, 2)),
            "decode/0:te: te: 1 calls, but its block groups run in [1, 2] calls",
        ),
        (
            (f"{USE} live_tensors", (), f"{USE} order", ((1, 2, 1.0),)),
            f"{ORDER} has block 2 of group 1",
        ),
        (
            (f"{USE} live_tensors", (), f"{USE} order", ((2, 0, 1.0),)),
            f"{ORDER} has block 0 of group 2",
        ),
        ((f"{USE} layers order", ((0, 0, 1.0), (1, 0, 1.0))), f"{ORDER} does not have mid.1"),
        (
            (f"{USE} order", ((1, 1, 1.0), (1, 0, 1.0))),
            f"{ORDER} does not list the 2 blocks in ascending order",
        ),
        ((f"{USE} group_calls", (2, 1)), "each of the 2 calls; some run in 1"),
    ],
)
def test_each_inconsistency_is_named(changes: tuple[Any, ...], message: str) -> None:
    (fault,) = faults(*changes)
    assert message in fault


def test_a_negative_number_has_a_message_before_that_of_its_meaning() -> None:
    assert faults("runs", -1) == ["problem.runs is -1"] * 2
    for odd, path in (((-9, 0, 1.0), "block 0 of group -9"), ((0, -1, 1.0), "block -1 of group 0")):
        number, message = faults(f"{USE} live_tensors", (), f"{USE} order", (odd,))
        assert number.startswith("encode/0:te.uses.order is -")
        assert path in message


@pytest.mark.parametrize(
    ("tensors", "maker", "users"),
    [
        ((LiveTensor(4, 1, (0, 2)), LiveTensor(4, 2, ())), 2, []),
        ((LiveTensor(4, 1, (2, 0)),), 1, [2, 0]),
        ((LiveTensor(4, 1, (2, 2)),), 1, [2, 2]),
        ((LiveTensor(4, 1, (2, 3)),), 1, [2, 3]),
        ((LiveTensor(4, 3, (1, 2)),), 3, [1, 2]),
    ],
)
def test_live_tensors_name_blocks(
    tensors: tuple[LiveTensor, ...], maker: int, users: list[int]
) -> None:
    assert faults(TENSORS, tensors)[0] == (
        f"encode/0:te: te: live_tensors has a tensor with maker {maker} and users {users}; "
        "blocks are numbered 1 to 2, and users are in ascending order"
    )


def test_live_tensors_name_every_block() -> None:
    assert faults(TENSORS, (LiveTensor(4, 0, (2,)),)) == [
        "encode/0:te: te: live_tensors does not name each of the 2 blocks"
    ]
    assert faults(TENSORS, (LiveTensor(4, 1, (2,)),)) == []


@pytest.mark.parametrize(
    "events",
    [((1, 8), (1, 8)), ((1, 0),), ((1, -1),), ((1, MOST + 1),), ((1, 8), (1, 0), (1, 0))],
)
def test_a_call_allocates_and_releases_in_turn(events: tuple[tuple[int, int], ...]) -> None:
    (fault,) = faults(f"{CALL_PATH} events", events)
    assert fault == (
        f"encode/0:te: the trace of te allocates or releases {events[-1][0]} with "
        f"{events[-1][1]} bytes"
    )


@pytest.mark.parametrize(
    "changes",
    [(f"{CALL_PATH} component", "other"), (f"{CALL_PATH} persistent_keys", ())],
)
def test_a_call_releases_what_does_not_persist(changes: tuple[Any, ...]) -> None:
    assert [text for text in faults(*changes) if "or does not release what" in text]


@pytest.mark.parametrize("results", [(2, 2), (9,), (3,)])
def test_results_are_allocated_once_and_released(results: tuple[int, ...]) -> None:
    (fault,) = faults(f"{CALL_PATH} results", results)
    assert "has results that it does not allocate once" in fault


@pytest.mark.parametrize("part", ["prelude", "first", "steady"])
@pytest.mark.parametrize("item", [(1, CALL), (-1, CALL), (7, -2), (7, MOST + 1)])
def test_an_item_of_a_phase_is_a_call_or_bytes(part: str, item: tuple[int, int]) -> None:
    assert faults(f"phases 0 trace {part}", (item,)) == [
        f"encode/0:te: the trace has an item of {item[1]} bytes with key {item[0]}"
    ]
