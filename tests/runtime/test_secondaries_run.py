"""Components on secondary devices: they compute there, caps hold on every device, time is as
planned, and nothing is left anywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from campaign import sampled
from small_component import (
    ACTIVATION_BYTES,
    ROWS,
    WIDTH,
    Small,
    calls_to,
    device_of,
    plain,
    plan_of,
    run,
    small_hardware,
    small_problem,
    untouched,
    use,
)

from graphrun.errors import BrokenPlan, OutOfMemory, PlanError, TransferFailed
from graphrun.model.problem import Problem, Secondary
from graphrun.runtime.devices.open import open_devices
from graphrun.runtime.executor import PlanSession
from graphrun.runtime.host import Host
from graphrun.verify.check import check
from graphrun.verify.simulate import simulate
from graphrun.verify.solution import solution_of

ON, HELPER = small_hardware(), small_hardware(h2d=5e8, flops=5e10)
CALLS = ["a", "b", "b", "a"]
PASSED = ROWS * WIDTH * 4
CROSSINGS = 4  # of two calls
TEXT = """
    slot s0/0:a load
      load a all from pinned
    slot s0/0:a first
      load b all from pinned
      run
    slot s1/0:b load
    slot s1/0:b first
      run
    slot s1/0:b steady x1
      run
    slot s2/0:a load
    slot s2/0:a first
      run
    slot end
      evict a all
      evict b all
"""
KEEPING = TEXT.replace("      evict a all\n      evict b all\n", "")
SESSION = f"""
    leaves a all
    leaves b all
    {KEEPING}
    again
    slot s0/0:a load
    slot s0/0:a first
      run
    slot s1/0:b load
    slot s1/0:b first
      run
    slot s1/0:b steady x1
      run
    slot s2/0:a load
    slot s2/0:a first
      run
    slot end
"""


def case(runs: int = 1, secondary_bytes: int = 1 << 30) -> Problem:
    """``b`` on a secondary device that computes and copies half as fast as the device."""
    uses = [use("a", 1, ON), use("b", 2, ON), use("a", 1, ON)]
    problem = small_problem(
        {"a": Small(), "b": Small()},
        [[replace(component_use, transfer=(PASSED, PASSED))] for component_use in uses],
        ON,
    )
    a, b = problem.components
    variant = replace(b.variants[0], device="device1", streamable=False, slowdown=2.0)
    variant = replace(variant, load_seconds=tuple(2 * seconds for seconds in variant.load_seconds))
    phases = tuple(
        replace(phase, pipeline_code_bytes=ACTIVATION_BYTES // 2) for phase in problem.phases
    )
    secondaries = (Secondary(HELPER, secondary_bytes),)
    return replace(
        problem,
        components=(a, replace(b, variants=(variant,))),
        phases=phases,
        secondaries=secondaries,
        runs=runs,
    )


def modules() -> dict[str, Small]:
    return {"a": Small(), "b": Small(1)}


def test_it_computes_on_the_secondary_with_the_same_bits_in_the_planned_time() -> None:
    problem = case()
    plan, device, host_modules = plan_of(problem, TEXT), device_of(problem), modules()
    (secondary,) = device.secondaries
    assert check(problem, plan) == ()
    devices: list[tuple[str, str]] = []
    host_modules["b"].callback = lambda x: devices.append(
        (str(x.device), str(host_modules["b"].device))
    )
    trace = run(problem, plan, Host(host_modules, problem, device), device, CALLS)
    simulation = simulate(problem, plan)
    assert torch.equal(trace.outputs["x"], plain(modules(), CALLS))
    assert devices == [("sim:1", "sim:1")] * 2
    assert trace.seconds == pytest.approx(simulation.seconds, rel=0.01)
    assert trace.moved_bytes == simulation.moved_bytes
    assert secondary.machine.bytes_across == device.machine.bytes_across == 2 * PASSED
    for slot, actual in zip(simulation.slots, trace.slots, strict=True):
        assert actual.secondary_peaks[0] <= slot.secondary_peaks[0]
        assert actual.peak_bytes <= slot.peak_bytes
    weights = problem.component("b").weight_bytes()
    assert simulation.slots[0].secondary_peaks == (0,)
    assert simulation.slots[1].secondary_peaks == simulation.slots[2].secondary_peaks == (weights,)
    assert simulation.slots[3].secondary_peaks == (weights + ACTIVATION_BYTES + PASSED,)
    assert device.allocated_bytes == secondary.allocated_bytes == 0
    assert all(map(untouched, host_modules.values()))


def test_a_load_for_the_secondary_overlaps_one_for_the_device() -> None:
    problem = case()
    loads = "      load a all from pinned\n      load b all from pinned\n"
    text = TEXT.replace("      load b all from pinned\n", "").replace(
        "      load a all from pinned\n", loads, 1
    )
    device = device_of(problem)
    trace = run(problem, plan_of(problem, text), Host(modules(), problem, device), device, CALLS)
    seconds = trace.slots[0].end_seconds - trace.slots[0].start_seconds
    load_seconds = problem.component("b").weight_bytes() / HELPER.h2d_bytes_per_second
    assert seconds == pytest.approx(load_seconds, rel=0.01)
    assert simulate(problem, plan_of(problem, text)).slots[0].seconds == pytest.approx(
        load_seconds, rel=0.01
    )


def test_in_a_session_it_stays_on_the_secondary() -> None:
    problem = case(runs=2)
    plan, device = plan_of(problem, SESSION), device_of(problem)
    (secondary,) = device.secondaries
    host = Host(modules(), problem, device)
    with PlanSession(solution_of(problem, plan), host, device) as session:
        for has_moved in (True, False):
            trace = session.run(lambda: calls_to(host.modules, CALLS, device.torch_device))
            assert torch.equal(trace.outputs["x"], plain(modules(), CALLS))
            assert bool(trace.moved_bytes) == has_moved
            assert secondary.allocated_bytes == problem.component("b").weight_bytes()
    assert device.allocated_bytes == secondary.allocated_bytes == 0


def test_the_cap_of_the_secondary_holds() -> None:
    problem = case(secondary_bytes=case().component("b").weight_bytes() + ACTIVATION_BYTES + PASSED)
    assert check(problem, plan_of(problem, TEXT)) == ()
    tight_problem = replace(
        problem,
        secondaries=(
            replace(problem.secondaries[0], budget_bytes=problem.secondaries[0].budget_bytes - 1),
        ),
    )
    assert [violation.rule for violation in check(tight_problem, plan_of(tight_problem, TEXT))] == [
        "secondary"
    ] * 2
    device, host_modules = device_of(problem), modules()
    host_modules["b"].callback = lambda x: x.new_empty(1 << 20)  # more than was traced
    with pytest.raises(OutOfMemory, match="s1/0:b first: .* sim:1 has a capacity of") as error_info:
        run(problem, plan_of(problem, TEXT), Host(host_modules, problem, device), device, CALLS)
    assert (error_info.value.secondary, error_info.value.phase, error_info.value.part) == (
        1,
        "s1/0:b",
        "first",
    )
    assert device.allocated_bytes == device.secondaries[0].allocated_bytes == 0
    assert all(map(untouched, host_modules.values()))


def test_a_tensor_that_stays_on_the_secondary_after_a_run_is_named() -> None:
    problem, host_modules, clones = case(), modules(), list[torch.Tensor]()
    device = device_of(problem)
    host_modules["b"].callback = lambda x: clones.append(x.clone())
    stays = r"8.00 KiB stayed on the device1 after the run: 4.00 KiB torch.float32 \(16, 64\), "
    with pytest.raises(BrokenPlan, match=stays):
        run(problem, plan_of(problem, TEXT), Host(host_modules, problem, device), device, CALLS)
    assert [accelerator.allocated_bytes for accelerator in device.all_devices] == [0, 8192]


def test_a_plan_for_two_devices_is_refused_on_one() -> None:
    problem = case()
    device = open_devices([problem.hardware])
    host = Host(modules(), replace(problem, secondaries=()), device_of(problem))
    with pytest.raises(PlanError, match="the plan is for 2 devices, and 1 were opened: plan again"):
        PlanSession(solution_of(problem, plan_of(problem, TEXT)), host, device)


@pytest.mark.parametrize("step", sampled((1, 37), (37,), "faults"))
@pytest.mark.parametrize("fault", ["fail_allocation", "fail_copy"])
@pytest.mark.parametrize("number", [0, 1])
def test_after_an_error_at_any_allocation_or_copy_nothing_is_left(
    fault: str, number: int, step: int
) -> None:
    problem, host_modules = case(), modules()
    device = device_of(problem)
    host, machine = Host(host_modules, problem, device), device.all_devices[number].machine
    expected = plain(modules(), CALLS)
    run(problem, plan_of(problem, TEXT), host, device, CALLS)
    count = (
        machine.allocations
        if fault == "fail_allocation"
        else machine.copies_in + machine.copies_out + CROSSINGS
    )
    assert count > 10
    for number_at_fault in range(1, count + 1, step):
        setattr(machine, fault, number_at_fault)
        with pytest.raises((OutOfMemory, TransferFailed)) as error_info:
            run(problem, plan_of(problem, TEXT), host, device, CALLS)
        assert getattr(error_info.value, "secondary", number) == number
        assert [accelerator.allocated_bytes for accelerator in device.all_devices] == [0, 0]
        assert all(map(untouched, host_modules.values()))
    assert torch.equal(
        run(problem, plan_of(problem, TEXT), host, device, CALLS).outputs["x"], expected
    )
