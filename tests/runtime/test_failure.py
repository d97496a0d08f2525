"""Injected failures: a typed error, an empty device while the error is held, unchanged modules, and
a correct next run."""

from __future__ import annotations

import weakref

import pytest
import torch
from campaign import sampled
from small_component import (
    ON,
    PREFETCH,
    WIDE,
    Small,
    device_of,
    plain,
    plan_of,
    run,
    small_problem,
    untouched,
    use,
)

from graphrun.errors import BrokenPlan, GraphrunError, OutOfMemory, TransferFailed
from graphrun.model.plan import Plan
from graphrun.model.problem import Problem
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.runtime.host import Host

CALLS = ["a"] * 4 + ["b"]


class Case:
    """Two components: the first streams while the second is prefetched."""

    def __init__(self) -> None:
        self.modules = {"a": Small(), "b": Small(1)}
        self.problem: Problem = small_problem(self.modules, [[use("a", 4, ON)], [use("b", 1, ON)]])
        self.plan: Plan = plan_of(self.problem, PREFETCH.format(ring_buffer=2 * WIDE))
        self.device: SimulatedDevice = device_of(self.problem)
        self.host = Host(self.modules, self.problem, self.device)
        self.expected = plain({"a": Small(), "b": Small(1)}, CALLS)

    def run(self) -> torch.Tensor:
        result: torch.Tensor = run(self.problem, self.plan, self.host, self.device, CALLS).outputs[
            "x"
        ]
        return result

    def ends_clean(self) -> None:
        assert self.device.allocated_bytes == 0, self.device.holders()
        assert all(untouched(module) for module in self.modules.values())


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


def counted(case: Case) -> tuple[int, int]:
    machine = case.device.machine
    counts = machine.allocations, machine.copies_in + machine.copies_out
    assert torch.equal(case.run(), case.expected)
    return machine.allocations - counts[0], machine.copies_in + machine.copies_out - counts[1]


def test_every_copy_may_fail(case: Case) -> None:
    _, copies = counted(case)
    assert copies > 50
    for n in range(1, copies + 1):
        case.device.machine.fail_copy = n
        with pytest.raises(TransferFailed, match="injected fault") as error_info:
            case.run()
        case.ends_clean()
        assert "stayed" not in "".join(getattr(error_info.value, "__notes__", []))
    assert torch.equal(case.run(), case.expected)


@pytest.mark.parametrize("step", sampled([7, 1], [7], "faults"))
def test_every_allocation_may_fail(case: Case, step: int) -> None:
    allocations, _ = counted(case)
    assert allocations > 50
    for n in range(1, allocations + 1, step):
        case.device.machine.fail_allocation = n
        with pytest.raises(OutOfMemory, match="injected fault"):
            case.run()
        case.ends_clean()
    assert torch.equal(case.run(), case.expected)


def test_the_error_names_the_slot(case: Case) -> None:
    case.device.machine.fail_copy = 30
    with pytest.raises(TransferFailed, match="^slot s0/0:a steady x3: "):
        case.run()


def test_a_budget_that_is_too_small_in_reality_is_out_of_memory(case: Case) -> None:
    case.device.machine.capacity_bytes = 3 * WIDE
    try:
        with pytest.raises(OutOfMemory, match="capacity"):
            case.run()
        case.ends_clean()
        assert case.device.machine.capacity_bytes == 3 * WIDE
    finally:
        case.device.machine.capacity_bytes = None


@pytest.mark.parametrize(
    "error", [ValueError("bad shape"), KeyboardInterrupt(), RuntimeError("odd")], ids=repr
)
def test_an_error_of_the_components_own_code_is_raised_as_it_is(
    case: Case, error: BaseException
) -> None:
    def inside(x: torch.Tensor) -> None:
        local_tensor = x + 1  # noqa: F841 (a local on the device, in a frame of the traceback)
        raise error

    case.modules["a"].callback = inside
    try:
        with pytest.raises(type(error)) as error_info:
            case.run()
        assert error_info.value is error
        assert "in inside" in error.__notes__[0]
        assert "slot s0/0:a first" in error.__notes__[0]
        case.ends_clean()
    finally:
        case.modules["a"].callback = None
    assert torch.equal(case.run(), case.expected)


def test_an_error_that_came_from_the_devices_is_typed(case: Case) -> None:
    def inside(x: torch.Tensor) -> None:
        case.device.machine.fail_allocation = 1
        try:
            x + 1
        except torch.OutOfMemoryError as error:
            raise RuntimeError("attention failed") from error

    case.modules["a"].callback = inside
    try:
        with pytest.raises(OutOfMemory, match="slot s0/0:a first: sim out of memory"):
            case.run()
        case.ends_clean()
    finally:
        case.modules["a"].callback = None


def test_a_component_called_out_of_order_is_an_error_before_it_computes(case: Case) -> None:
    with pytest.raises(BrokenPlan, match="b was called out of order at the start"):
        run(case.problem, case.plan, case.host, case.device, ["b"])
    case.ends_clean()
    with pytest.raises(BrokenPlan, match="before the plan did"):
        run(case.problem, case.plan, case.host, case.device, ["a"])
    case.ends_clean()


def test_what_stays_on_the_device_after_a_run_is_named(case: Case) -> None:
    clones: list[torch.Tensor] = []
    case.modules["a"].callback = lambda x: clones.append(x.clone())
    try:
        with pytest.raises(
            BrokenPlan,
            match=r"16.00 KiB stayed on the device after the run: "
            r"4.00 KiB torch.float32 \(16, 64\)",
        ):
            case.run()
    finally:
        case.modules["a"].callback = None
    assert case.device.allocated_bytes == 4 * 4096
    clones.clear()
    case.ends_clean()


def test_the_module_that_keeps_a_tensor_on_the_device_is_named(case: Case) -> None:
    module = case.modules["a"]
    module.callback = lambda x: setattr(module.wide[1], "kept", x.clone())
    try:
        with pytest.raises(BrokenPlan, match=r"held by a\.wide\.1\.kept \(4\.00 KiB\)"):
            case.run()
    finally:
        module.callback = None
    del module.wide[1].kept
    case.ends_clean()


def test_reference_cycles_of_the_ops_code_do_not_keep_the_device(case: Case) -> None:
    class Node:
        def __init__(self, x: torch.Tensor) -> None:
            self.x, self.me = x.clone(), self

    nodes: list[weakref.ref[Node]] = []
    case.modules["a"].callback = lambda x: nodes.append(weakref.ref(Node(x)))
    try:
        assert torch.equal(case.run(), case.expected)
    finally:
        case.modules["a"].callback = None
    assert not [node for node in nodes if node() is not None]
    case.ends_clean()


def test_a_baseline_that_was_there_before_stays(case: Case) -> None:
    with case.device.capped(1 << 30):
        caller_tensor = torch.ones(1000, device=case.device.torch_device)
    trace = run(case.problem, case.plan, case.host, case.device, CALLS)
    assert trace.baseline_bytes == 4096
    assert trace.left_bytes == 0
    case.device.machine.fail_copy = 20
    with pytest.raises(GraphrunError):
        case.run()
    assert case.device.allocated_bytes == 4096
    del caller_tensor
    case.ends_clean()
