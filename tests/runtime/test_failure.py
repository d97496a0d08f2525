"""Injected failures: a typed error, an empty device while the error is held, unchanged modules, and
a correct next run."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace

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

from graphrun.errors import (
    BrokenPlan,
    GraphrunError,
    InputError,
    OutOfMemory,
    StageError,
    TransferFailed,
)
from graphrun.model.plan import Plan
from graphrun.model.problem import Problem
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.runtime.host import Host
from graphrun.runtime.leftovers import error_to_raise, leftovers
from graphrun.verify.simulate import simulate

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


def test_bytes_that_stay_on_the_device_after_a_failed_run_are_noted_with_their_holder(
    case: Case,
) -> None:
    with case.device.capped(1 << 30):
        caller_tensor = torch.ones(1000, device=case.device.torch_device)
    clones: list[torch.Tensor] = []

    def inside(x: torch.Tensor) -> None:
        clones.append(x.clone())
        raise ValueError("bad shape")

    case.modules["a"].callback = inside
    try:
        with pytest.raises(ValueError, match="bad shape") as error_info:
            case.run()
    finally:
        case.modules["a"].callback = None
    assert "\n4.00 KiB stayed on the device: " in "\n".join(["", *error_info.value.__notes__])
    clones.clear()
    del caller_tensor
    case.ends_clean()


KEPT = SimpleNamespace()  # what the code of a component keeps


def keep_in_global(x: torch.Tensor) -> None:
    KEPT.globals = {"__name__": "script", "__builtins__": {}, "latents": x.clone()}


def keep_in_dict(x: torch.Tensor) -> None:
    KEPT.tensors = {"first": x.clone()}


def keep_in_state(x: torch.Tensor) -> None:
    KEPT.module.wide[1].state = SimpleNamespace(scale=x.clone())


def keep_in_list_and_state(x: torch.Tensor) -> None:
    KEPT.tensors = [x.clone()]
    KEPT.module.wide[1].state = SimpleNamespace(scale=KEPT.tensors[0])


def keep_in_list_and_view_in_state(x: torch.Tensor) -> None:
    KEPT.tensors = [x.clone()]
    KEPT.module.wide[1].state = SimpleNamespace(scale=KEPT.tensors[0].view(-1))


def keep_in_state_and_view_in_list(x: torch.Tensor) -> None:
    keep_in_state(x)
    KEPT.tensors = [KEPT.module.wide[1].state.scale.view(-1)]


def keep_in_frame(x: torch.Tensor) -> None:
    local_tensor = x.clone()  # noqa: F841 (the frame keeps it)
    del x
    KEPT.frame = sys._getframe()


def keep_two_sizes(x: torch.Tensor) -> None:
    KEPT.tensors = {"small": x[0].clone(), "y": x.clone(), "x": x.clone()}


@pytest.mark.parametrize(
    ("keep", "holders"),
    [
        (keep_in_global, "script.latents (4.00 KiB)"),
        (keep_in_dict, "a dict's 'first' (4.00 KiB)"),
        (keep_in_state, "a.wide.1.state.scale (4.00 KiB)"),
        (keep_in_list_and_state, "a.wide.1.state.scale (4.00 KiB)"),
        (keep_in_list_and_view_in_state, "a.wide.1.state.scale (4.00 KiB)"),
        (keep_in_state_and_view_in_list, "a.wide.1.state.scale (4.00 KiB)"),
        (keep_in_frame, "local_tensor in keep_in_frame() (4.00 KiB)"),
        (
            keep_two_sizes,
            "a dict's 'x' (4.00 KiB), a dict's 'y' (4.00 KiB), a dict's 'small' (512 B)",
        ),
    ],
)
def test_the_holder_of_a_tensor_that_stays_on_the_device_is_named(
    case: Case, keep: Callable[[torch.Tensor], None], holders: str
) -> None:
    KEPT.module = module = case.modules["a"]
    with case.device.capped(1 << 30):
        keep(torch.ones(16, 64, device=case.device.torch_device))
    try:
        text = leftovers(case.device, case.modules)
        assert text.startswith("4.00 KiB torch.float32 (16, 64)")
        assert text.endswith(f"; held by {holders}")
    finally:
        vars(KEPT).clear()
        vars(module.wide[1]).pop("state", None)
    case.ends_clean()


def test_of_many_tensors_that_stay_on_the_device_the_five_largest_are_listed(case: Case) -> None:
    shapes = [*[(1, 64)] * 3, *[(16, 64)] * 4]
    with case.device.capped(1 << 30):
        tensors = [torch.ones(shape, device=case.device.torch_device) for shape in shapes]
    large, small = "4.00 KiB torch.float32 (16, 64)", "512 B torch.float32 (1, 64)"
    allocations = ", ".join([*[large] * 4, small])
    holders = ", ".join([*["a list (4.00 KiB)"] * 4, "a list (512 B)"])
    text = leftovers(case.device, case.modules)
    assert text == f"{allocations} and 2 more; held by {holders}"
    del tensors[:2]
    assert leftovers(case.device, case.modules) == f"{allocations}; held by {holders}"
    tensors.clear()
    case.ends_clean()


def test_a_tensor_of_a_running_function_has_no_holder(case: Case) -> None:
    with case.device.capped(1 << 30):
        local_tensor = torch.ones(16, 64, device=case.device.torch_device)
    assert leftovers(case.device, case.modules) == "4.00 KiB torch.float32 (16, 64)"
    del local_tensor


def caused_by(error: BaseException, cause: BaseException) -> BaseException:
    """As ``raise error from cause`` where ``cause`` is handled."""
    error.__cause__ = error.__context__ = cause
    return error


def test_the_error_that_explains_a_failure_is_raised_in_its_place(case: Case) -> None:
    stage_error, input_error = StageError("denoise failed"), InputError("no such prompt")
    memory_error = torch.OutOfMemoryError("sim out of memory")
    for error, expected in (
        (stage_error, stage_error),
        (caused_by(StageError("denoise failed"), input_error), input_error),
        (caused_by(stage_error, ValueError("bad shape")), stage_error),
        (caused_by(KeyboardInterrupt(), input_error), None),
        (ExceptionGroup("two workers", [input_error, InputError("no seed")]), input_error),
        (caused_by(input_error, caused_by(ValueError("again"), input_error)), input_error),
    ):
        assert error_to_raise(error, case.device, "slot end") is (expected or error)
    for error in (
        ExceptionGroup("two workers", [ValueError("bad shape"), memory_error]),
        caused_by(stage_error, memory_error),
        caused_by(ValueError("again"), caused_by(RuntimeError("odd"), memory_error)),
    ):
        explained = error_to_raise(error, case.device, "slot end")
        assert isinstance(explained, OutOfMemory)
        assert str(explained) == "slot end: sim out of memory"


def test_no_error_in_a_chain_keeps_its_traceback(case: Case) -> None:
    def fails() -> None:
        try:
            raise ValueError("bad shape")
        except ValueError as error:
            raise RuntimeError("attention failed") from error

    with pytest.raises(RuntimeError) as error_info:
        fails()
    error = error_info.value
    cause = error.__cause__
    assert cause is not None
    assert cause.__traceback__ is not None
    assert error_to_raise(error, case.device, "slot end") is error
    assert error.__traceback__ is cause.__traceback__ is None
    assert error.__notes__[0].startswith("in slot end; raised at\n")


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
    assert [slot.planned_peaks for slot in trace.slots] == [
        (slot.peak_bytes + 4096,) for slot in simulate(case.problem, case.plan).slots
    ]
    case.device.machine.fail_copy = 20
    with pytest.raises(GraphrunError):
        case.run()
    assert case.device.allocated_bytes == 4096
    del caller_tensor
    case.ends_clean()
