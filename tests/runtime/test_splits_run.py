"""A component whose blocks lie on several devices: same bits, planned time and bytes, caps on both,
nothing left after an error."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from campaign import sampled
from small_component import (
    ROWS,
    WIDTH,
    Small,
    plain,
    plan_of,
    run,
    small_hardware,
    small_problem,
    untouched,
    use,
)
from torch import nn

from graphrun.errors import OutOfMemory, TransferFailed
from graphrun.model.problem import LiveTensor, Problem, Secondary
from graphrun.runtime.devices.open import open_device
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.runtime.host import Host
from graphrun.runtime.transfer import call_split
from graphrun.verify.check import check
from graphrun.verify.simulate import simulate

ON, HELPER = small_hardware(), small_hardware(h2d=5e8, flops=5e10)
CALLS = ["a", "a"]
PASSED = ROWS * WIDTH * 4
SPLIT = "    split a device1 wide[3] thin[0-2]\n"
WHOLE = f"""{SPLIT}
    slot s0/0:a load
      load a all from pinned
    slot s0/0:a first
      run
    slot s0/0:a steady x1
      run
    slot end
      evict a all
"""
KEPT = "unblocked[0] wide[0] wide@1[0] thin@1[0-2]"
STREAMED = f"""{SPLIT}
    slot s0/0:a load
      load a {KEPT} from pinned
    slot s0/0:a first
      stream a keep {KEPT} ring buffer 400 KiB
      run
    slot s0/0:a steady x1
      stream a keep {KEPT} ring buffer 400 KiB
      run
    slot end
      evict a {KEPT}
"""
# directly after another
TWO = WHOLE.replace(SPLIT, "    split a device1 wide[1]\n    split a device2 wide[2-3] thin[0-1]\n")


def case(*secondary_bytes: int) -> Problem:
    """``a`` may be split over secondary devices that compute and copy half as fast as the
    device."""
    live_tensors = (LiveTensor(PASSED, n, (n + 1 if n < 10 else 0,)) for n in range(11))
    problem = small_problem(
        {"a": Small()},
        [[replace(use("a", 2, ON), transfer=(PASSED, PASSED), live_tensors=tuple(live_tensors))]],
        ON,
    )
    (a,) = problem.components
    loads = tuple(2 * seconds for seconds in a.variants[0].load_seconds)
    secondaries = tuple(Secondary(HELPER, nbytes) for nbytes in secondary_bytes or (1 << 30,))
    half = replace(a.variants[0], streamable=False, slowdown=2.0, load_seconds=loads)
    secondary_variants = (
        replace(half, device=f"device{number}") for number in range(1, len(secondaries) + 1)
    )
    return replace(
        problem,
        components=(replace(a, variants=(a.variants[0], *secondary_variants)),),
        secondaries=secondaries,
    )


def planned(problem: Problem, text: str) -> tuple[object, SimulatedDevice]:
    device = open_device(problem, check_ordering=True)
    assert isinstance(device, SimulatedDevice)
    return plan_of(problem, "    variant a float32 pinned device\n" + text), device


@pytest.mark.parametrize("text", [WHOLE, STREAMED], ids=["resident", "streamed"])
def test_blocks_on_the_secondary_give_the_same_bits_in_the_planned_time(text: str) -> None:
    problem, host_modules = case(), {"a": Small()}
    plan, device = planned(problem, text)
    assert check(problem, plan) == ()
    (secondary,) = device.secondaries
    devices: list[str] = []
    blocks = [
        host_modules["a"].get_submodule(path) for path in ("wide.2", "wide.3", "thin.2", "thin.3")
    ]
    hooks = [
        block.register_forward_pre_hook(lambda _, args: devices.append(str(args[0].device)))
        for block in blocks
    ]
    trace = run(problem, plan, Host(host_modules, problem, device), device, CALLS)
    for hook in hooks:
        hook.remove()
    assert torch.equal(trace.outputs["x"], plain({"a": Small()}, CALLS))
    # hooks of the caller run before the copy
    assert devices == ["sim:0", "sim:0", "sim:1", "sim:0"] * 2
    simulated = simulate(problem, plan)
    assert trace.seconds == pytest.approx(simulated.seconds, rel=0.01)
    assert trace.moved_bytes == simulated.moved_bytes
    assert secondary.machine.bytes_across == device.machine.bytes_across == 2 * PASSED
    for slot, actual in zip(simulated.slots, trace.slots, strict=True):
        assert actual.secondary_peaks[0] <= slot.secondary_peaks[0]
        assert actual.peak_bytes <= slot.peak_bytes
    assert simulated.slots[0].secondary_peaks[0] > 0
    assert device.allocated_bytes == secondary.allocated_bytes == 0
    assert all(map(untouched, host_modules.values()))


def test_blocks_on_two_secondaries_give_the_same_bits_in_the_planned_time() -> None:
    problem, host_modules = case(1 << 30, 1 << 30), {"a": Small()}
    plan, device = planned(problem, TWO)
    assert check(problem, plan) == ()
    trace = run(problem, plan, Host(host_modules, problem, device), device, CALLS)
    assert torch.equal(trace.outputs["x"], plain({"a": Small()}, CALLS))
    simulated = simulate(problem, plan)
    assert trace.seconds == pytest.approx(simulated.seconds, rel=0.01)
    assert trace.moved_bytes == simulated.moved_bytes
    assert [accelerator.machine.bytes_across for accelerator in device.all_devices] == [
        4 * PASSED,
        2 * PASSED,
        2 * PASSED,
    ]
    for slot, actual in zip(simulated.slots, trace.slots, strict=True):
        assert all(
            peak <= peak_limit
            for peak, peak_limit in zip(actual.secondary_peaks, slot.secondary_peaks, strict=True)
        )
    assert min(simulated.slots[0].secondary_peaks) > 0
    assert [accelerator.allocated_bytes for accelerator in device.all_devices] == [0, 0, 0]
    assert all(map(untouched, host_modules.values()))


class Passing(nn.Module):
    """Returns both inputs, a sum twice, and an empty tensor."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        total = x + y
        return {"x": x, "y": y, "total": total, "again": total, "empty": x[:0]}


def test_each_tensor_is_copied_to_the_secondary_and_back_once_and_inputs_are_not() -> None:
    device = planned(case(), WHOLE)[1]
    (secondary,) = device.secondaries
    module = nn.ModuleDict({"first": Passing(), "second": Passing()})
    residency: Any = SimpleNamespace(module=module, splits=[(secondary, tuple(module))])
    with device.capped(1 << 30):
        x = torch.ones(1000, device="cpu").to(device.torch_device)

        def proceed(x: torch.Tensor) -> list[dict[str, torch.Tensor]]:
            first = module["first"](x, x)
            return [first, module["second"](x, first["total"])]

        first, second = call_split(device, residency, {}, proceed, (x,), {})
        assert first["x"] is first["y"] is second["x"] is x
        assert second["y"] is first["again"] is first["total"]
        assert second["total"].tolist() == [3.0] * 1000
        for tensor in (*first.values(), *second.values()):
            assert tensor.device == device.torch_device
    assert device.machine.bytes_across == x.nbytes
    assert secondary.machine.bytes_across == 2 * x.nbytes
    assert not any(block._forward_pre_hooks or block._forward_hooks for block in module.values())


class Computing(nn.Module):
    """Returns a tensor of the host, a sum twice, and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.constant = torch.ones(2, device="cpu")

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        total = x + x
        return [self.constant, total, total, x * x]


@pytest.mark.parametrize("staying", [0, 1])
def test_outputs_that_stay_are_numbered_by_the_tensors_that_a_block_computes(staying: int) -> None:
    """An output that stays is not copied to the next block there; the other one is not copied there
    again. Copies of tensors that are freed are freed."""
    device = planned(case(), WHOLE)[1]
    (secondary,) = device.secondaries
    module = nn.ModuleDict({"first": Computing(), "second": Computing()})
    residency: Any = SimpleNamespace(module=module, splits=[(secondary, ("first", "second"))])
    with device.capped(1 << 30):
        x = torch.full((1024,), 3.0, device="cpu").to(device.torch_device)

        def proceed() -> Any:
            constant, total, same_total, product = module["first"](x)
            assert constant is module["first"].constant
            assert same_total is total
            outputs = [total, product]
            devices = [secondary.torch_device, device.torch_device]
            assert [output.device for output in outputs] == devices[:: 1 if staying == 0 else -1]
            del total, same_total, product
            for output in outputs:
                module["second"](output)
            crossed_bytes = device.machine.bytes_across, secondary.machine.bytes_across
            assert crossed_bytes == (x.nbytes, 5 * x.nbytes)
            del output, outputs
            module["second"](x)
            assert secondary.allocated_bytes == 3 * x.nbytes  # x, and two outputs
            return module["first"](x)[1 + 2 * staying]

        result = call_split(device, residency, {"first": frozenset({staying})}, proceed, (), {})
        assert result.device == device.torch_device
        assert result[0].item() == [6.0, 9.0][staying]


def test_the_cap_of_the_secondary_holds() -> None:
    roomy_problem = case()
    peak_bytes = (
        simulate(roomy_problem, planned(roomy_problem, WHOLE)[0]).slots[1].secondary_peaks[0]
    )
    exact_problem, tight_problem = case(peak_bytes), case(peak_bytes - 1)
    assert check(exact_problem, planned(exact_problem, WHOLE)[0]) == ()
    assert {
        violation.rule for violation in check(tight_problem, planned(tight_problem, WHOLE)[0])
    } == {"secondary"}
    host_modules = {"a": Small()}
    plan, device = planned(exact_problem, WHOLE)
    # takes more than was traced
    host_modules["a"].thin[1].register_forward_hook(lambda _, __, x: x + x.new_zeros(1 << 20).sum())
    with pytest.raises(OutOfMemory, match="sim:1 has a capacity of") as error_info:
        run(exact_problem, plan, Host(host_modules, exact_problem, device), device, CALLS)
    assert (error_info.value.secondary, error_info.value.part) == (1, "first")
    assert [accelerator.allocated_bytes for accelerator in device.all_devices] == [0, 0]


@pytest.mark.parametrize("step", sampled((1, 37), (37,), "faults"))
@pytest.mark.parametrize("fault", ["fail_allocation", "fail_copy"])
@pytest.mark.parametrize(
    ("text", "number"),
    [
        (STREAMED, 0),
        (STREAMED, 1),
        *(pytest.param(TWO, n, marks=pytest.mark.sweep("faults")) for n in range(3)),
    ],
)
def test_after_an_error_at_any_allocation_or_copy_nothing_is_left(
    fault: str, text: str, number: int, step: int
) -> None:
    problem, host_modules = case(*[1 << 30] * (2 if text == TWO else 1)), {"a": Small()}
    plan, device = planned(problem, text)
    host, machine = Host(host_modules, problem, device), device.all_devices[number].machine
    run(problem, plan, host, device, CALLS)
    count = (
        machine.allocations
        if fault == "fail_allocation"
        else machine.copies_in + machine.copies_out + 4
    )
    assert count > 4
    for number_at_fault in range(1, count + 1, step):
        setattr(machine, fault, number_at_fault)
        with pytest.raises((OutOfMemory, TransferFailed)) as error_info:
            run(problem, plan, host, device, CALLS)
        assert getattr(error_info.value, "secondary", number) == number
        assert not any(accelerator.allocated_bytes for accelerator in device.all_devices)
        assert all(map(untouched, host_modules.values()))
    assert torch.equal(
        run(problem, plan, host, device, CALLS).outputs["x"], plain({"a": Small()}, CALLS)
    )
