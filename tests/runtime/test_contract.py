"""What the executor needs of a device: tested alike on the simulated accelerator, on the same under
the ordering checker, on the CPU, on a backend from outside, and on CUDA.

On the simulator bytes move at once: there the checker detects a missing wait. On the others the
results do, as kernels or copies are slow. Run on a card by `benchmarks/card.sh check`, and on the
backend from outside (tests/outside/brook.cpp) by `test_outside`.
"""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from read_ordering import ReadOrdering
from small_component import (
    ACTIVATION_BYTES,
    PREFETCH,
    Small,
    calls_to,
    plain,
    plan_of,
    small_hardware,
    small_problem,
    use,
)
from stored_component import (
    cpu_hardware,
    host_of,
    in_backing_store,
    in_files,
    saved,
    slow_reads,
)
from torch import nn

from graphrun import sim
from graphrun.errors import OutOfMemory
from graphrun.model.allocator import LARGE_PAGE_BYTES
from graphrun.model.hardware import Hardware
from graphrun.model.phase_trace import PhaseTrace
from graphrun.model.problem import Problem
from graphrun.profile.hardware import detect_card
from graphrun.runtime.devices.open import open_device
from graphrun.runtime.executor import follow
from graphrun.runtime.host import Host
from graphrun.runtime.spilled import RunValues
from graphrun.sim import Machine
from graphrun.trace import Trace
from graphrun.units import MIB
from graphrun.verify.simulate import simulate
from graphrun.verify.solution import solution_of

CALLS = ["a"] * 4 + ["b"]
SLEEP_CYCLES = 4_000_000  # about two milliseconds: longer than any kernel or copy here
RATES = {"kernels": small_hardware(flops=1e9), "copies": small_hardware(flops=1e13)}

# a streams from its backing store, keeping one block of each group; b is loaded whole at the same
# time.
STORED = """
    slot s0/0:a load
      {read_a}
      load a unblocked[0] from {backing_store}
    slot s0/0:a first
      {read_b}
      stream a keep unblocked[0] wide[1] thin[2] ring buffer {ring_buffer} B
      load a wide[1] thin[2] from {backing_store}
      run
    slot s0/0:a steady x3
      stream a keep unblocked[0] wide[1] thin[2] ring buffer {ring_buffer} B
      load b all from {backing_store}
      run
    slot s1/0:b load
      drop a
      evict a unblocked[0] wide[1] thin[2]
    slot s1/0:b first
      run
    slot end
      drop b
      evict b all
"""


class Contract:
    """Devices of one kind. ``slow``: what takes long on them, ``kernels`` or ``copies``. Into
    unified memory, weights are read from files in ``folder``. ``backend``: the module of the one
    from outside."""

    def __init__(
        self, kind: str, patch: pytest.MonkeyPatch, folder: Path, backend: Any = None
    ) -> None:
        self.kind, self._patch, self._folder, self._backend = kind, patch, folder, backend

    def two(self, hardware: Hardware) -> tuple[dict[str, Small], Problem]:
        """Modules ``a``, called four times, and ``b``, called once."""
        modules = {"a": Small(), "b": Small(1)}
        hardware = cpu_hardware() if self.kind == "cpu" else hardware
        if self.kind.startswith("outside"):
            hardware = replace(
                hardware, device="brook", caching_allocator=False, unified=self.unified
            )
        problem = small_problem(
            modules,
            [[use("a", 4, hardware)], [use("b", 1, hardware)]],
            hardware,
            hardware.context_bytes + (1 << 30),
        )
        return modules, in_files(problem) if self.unified else problem

    @property
    def unified(self) -> bool:
        return self.kind in ("cpu", "outside, unified")

    def host(self, modules: dict[str, Small], problem: Problem, device: Any) -> Host:
        """Host memory for ``problem`` with the weights of ``modules``."""
        if not self.unified:
            return Host(modules, problem, device)
        folders = {name: saved(self._folder / name, int(name == "b")) for name in modules}
        host = host_of(problem, folders, device)
        for name, module in modules.items():
            host.modules[name].skip = module.skip  # type: ignore[assignment]
        return host

    def ring(self, problem: Problem, blocks: int) -> int:
        """Bytes of a ring buffer for so many of the larger blocks."""
        return blocks * problem.component("a").variants[0].block_bytes[1]

    def device(self, problem: Problem, slow: str = "") -> Any:
        """A device for ``of``, whose rates should be those of ``slow``."""
        if self.unified and slow == "copies":
            slow_reads(self._patch)
        if self.kind.startswith("outside"):
            self._backend.set_copy_microseconds(2000 if slow == "copies" else 0)
        if self.kind != "cuda":
            return open_device(problem)
        from graphrun.runtime.devices.cuda import CudaDevice

        device: Any = CudaDevice(workspace_bytes=problem.hardware.workspace_bytes)
        if slow == "copies":
            queue = device.copy

            def late(target: torch.Tensor, source: torch.Tensor) -> None:
                with torch.cuda.stream(device._copy):
                    torch.cuda._sleep(SLEEP_CYCLES)
                queue(target, source)

            self._patch.setattr(device, "copy", late)
        return device

    def slow_kernels(self, modules: Mapping[str, nn.Module]) -> None:
        """Not on the simulator: every block of ``modules`` computes late from now on."""
        if not self.kind.startswith("sim"):
            for block in (
                block for module in modules.values() for block in (*module.wide, *module.thin)
            ):  # type: ignore[misc, operator]
                block.register_forward_pre_hook(
                    (lambda *_: torch.cuda._sleep(SLEEP_CYCLES))
                    if self.kind == "cuda"
                    else lambda *_: time.sleep(0.001)
                )

    def resident(self, modules: Mapping[str, Small], calls: list[str]) -> torch.Tensor:
        """What ``modules`` compute with all weights on the device."""
        if self.kind != "cuda":
            return plain(modules, calls)
        with torch.no_grad():
            return calls_to(
                {name: copy.deepcopy(m).cuda() for name, m in modules.items()},
                calls,
                torch.device("cuda"),
            )["x"]

    def run(self, problem: Problem, text: str, device: Any, host: Host, calls: list[str]) -> Trace:
        """A run of the plan ``text``, which leaves nothing behind."""
        text = text.replace("from pinned", "from file") if self.unified else text
        solution = solution_of(problem, plan_of(problem, text))
        trace = follow(
            solution, host, device, lambda: calls_to(host.modules, calls, device.torch_device)
        )
        assert trace.left_bytes == 0
        return trace


@pytest.fixture(params=["sim", "sim, order checked", "cpu", "outside", "outside, unified", "cuda"])
def contract(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    outside_backend: Any,
) -> Iterator[Contract]:
    if request.param.startswith("outside") and outside_backend is None:
        pytest.skip("the backend from outside has a process of its own: test_outside")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if request.param.startswith("sim") and not sim.available():
        pytest.skip("this PyTorch cannot host the simulated accelerator")
    monkeypatch.setattr(Machine, "check_ordering", request.param == "sim, order checked")
    ordering = ReadOrdering(monkeypatch) if request.param == "cpu" else None
    yield Contract(request.param, monkeypatch, tmp_path, outside_backend)
    assert ordering is None or not ordering.reports


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize("ring_buffer", [1, 2, 3])
@pytest.mark.parametrize("slow", ["kernels", "copies"])
def test_streamed_is_resident(contract: Contract, slow: str, ring_buffer: int) -> None:
    modules, problem = contract.two(RATES[slow])
    expected = contract.resident(modules, CALLS)
    device = contract.device(problem, slow)
    if slow == "kernels":
        contract.slow_kernels(modules)
    host = contract.host(modules, problem, device)
    for _ in range(2):
        assert torch.equal(
            contract.run(
                problem,
                PREFETCH.format(ring_buffer=contract.ring(problem, ring_buffer)),
                device,
                host,
                CALLS,
            ).outputs["x"],
            expected,
        )


@pytest.mark.parametrize("slow", ["kernels", "copies"])
def test_blocks_that_a_call_skips(contract: Contract, slow: str) -> None:
    """The copies of the blocks that it skips are under way, and others are laid over them."""
    modules, problem = contract.two(RATES[slow])
    modules["a"].skip = frozenset({"wide.1", "wide.2", "thin.0", "thin.4"})
    expected = contract.resident(modules, CALLS)
    device = contract.device(problem, slow)
    if slow == "kernels":
        contract.slow_kernels(modules)
    host = contract.host(modules, problem, device)
    assert torch.equal(
        contract.run(
            problem, PREFETCH.format(ring_buffer=contract.ring(problem, 2)), device, host, CALLS
        ).outputs["x"],
        expected,
    )


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize("slow", ["kernels", "copies"])
@pytest.mark.parametrize("backing_store", ["pinned", "pageable", "disk", "file"])
def test_homes_that_are_read_in_the_run(
    contract: Contract, backing_store: str, slow: str, tmp_path: Path
) -> None:
    if (backing_store == "file") != contract.unified:
        pytest.skip("only unified memory is filled from files, and it has no other copy")
    hardware = replace(RATES[slow], disk_bytes_per_second=4e8, pageable_bytes_per_second=5e8)
    _, problem = contract.two(hardware)
    problem = replace(
        problem,
        components=tuple(
            in_backing_store(backing_store, name, problem.hardware) for name in ("a", "b")
        ),
    )
    expected = contract.resident({"a": Small(), "b": Small(1)}, CALLS)
    device = contract.device(problem, slow)
    host = host_of(problem, {"a": saved(tmp_path / "a"), "b": saved(tmp_path / "b", 1)}, device)
    if slow == "kernels":
        contract.slow_kernels(host.modules)
    reads = (
        {"read_a": "", "read_b": ""}
        if backing_store in ("disk", "file")
        else {"read_a": "read a", "read_b": "read b"}
    )
    text = STORED.format(
        backing_store=backing_store, ring_buffer=contract.ring(problem, 2), **reads
    )
    for _ in range(2):
        assert torch.equal(contract.run(problem, text, device, host, CALLS).outputs["x"], expected)
    assert device.arenas.nbytes("arenas") == 0


class Holder:
    """Of one value."""

    def __init__(self, value: torch.Tensor) -> None:
        self.values: dict[str, Any] = {"value": value}
        self.excluded_stages = frozenset[str]()


def test_spill_and_restore(contract: Contract) -> None:
    modules, problem = contract.two(RATES["copies"])
    device = contract.device(problem, "copies")
    with device.capped(256 * MIB):
        holder = Holder(
            torch.arange(MIB, dtype=torch.float32, device="cpu").to(device.torch_device)
        )
        values = RunValues(device, holder)
        device.barrier()
        values.spill("value")
        device.barrier()
        values.release_originals()
        assert holder.values["value"].device.type == "cpu"
        overwrite = torch.full((MIB,), -1.0, device=device.torch_device)  # where the value was
        values.restore("value")
        result = (holder.values["value"] + 1).cpu()  # computed with at once
        device.barrier()
        values.release_originals()
        del overwrite
    assert torch.equal(result, torch.arange(MIB, dtype=torch.float32) + 1)


def test_a_slot_reserves_what_is_planned(contract: Contract) -> None:
    """In pages: of PyTorch's sizes on CUDA, of a thousandth on the simulator, as the weights are
    small."""
    if contract.kind == "cpu":
        pytest.skip("peaks of the process are measured, and the weights are small")
    hardware = replace(small_hardware(), caching_allocator=True, page_scale=2**-10)
    if contract.kind == "cuda":
        card = detect_card()
        assert card is not None
        hardware = replace(hardware, workspace_bytes=card.workspace_bytes, page_scale=1.0)
    modules, problem = contract.two(hardware)
    computing = (1, ACTIVATION_BYTES), (1, 0)
    problem = replace(
        problem,
        phases=tuple(
            replace(p, trace=PhaseTrace((), computing, computing)) for p in problem.phases
        ),
    )
    device = contract.device(problem)
    host = contract.host(modules, problem, device)
    text = PREFETCH.format(ring_buffer=contract.ring(problem, 2))
    reports = solution_of(problem, plan_of(problem, text)).simulation.slots
    for _ in range(2):
        trace = contract.run(problem, text, device, host, CALLS)
        for slot, expected in zip(trace.slots, reports, strict=True):
            assert slot.peak_bytes <= expected.peak_bytes, f"slot {slot.phase} {slot.part}"
        assert (
            trace.peak_bytes
            > max(slot.peak_bytes for slot in reports)
            - ACTIVATION_BYTES
            - LARGE_PAGE_BYTES * hardware.page_scale
        )


def test_the_cap_holds_and_freed_memory_can_be_had_again_in_other_sizes(contract: Contract) -> None:
    """Expandable segments: otherwise what is cached in pieces cannot become one."""
    hardware = replace(small_hardware(), caching_allocator=True, page_scale=1.0)
    _, problem = contract.two(hardware)
    device = contract.device(problem)
    with device.capped(200 * MIB):
        device.reset_peak()
        for _ in range(3):
            pieces = [device.allocate(30 * MIB) for _ in range(6)]
            with pytest.raises(torch.OutOfMemoryError) as error_info:
                device.allocate(60 * MIB)
            assert isinstance(device.explain(error_info.value), OutOfMemory)
            fragments = pieces[::2]  # 90 MiB with holes between
            del pieces
            del fragments[0]
            whole = device.allocate(120 * MIB)
            assert whole.numel() == 120 * MIB
            if contract.kind == "cuda":
                segments: Any = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
                assert max(segments, key=lambda segment: segment["total_size"])["is_expandable"]
            del fragments, error_info, whole
        assert device.peak_bytes <= 200 * MIB
        device.barrier()


@contextlib.contextmanager
def other_stream(device: Any) -> Iterator[None]:
    module = torch.get_device_module(device.torch_device.type)
    with device.machine if hasattr(device, "machine") else contextlib.nullcontext():
        stream: Any = (
            module.stream(module.Stream())
            if hasattr(module, "Stream")
            else torch.Stream(device=device.torch_device)
        )
        stream.__enter__()
    try:
        yield
    finally:
        stream.__exit__(None, None, None)


@contextlib.contextmanager
def other_default_device(device: Any) -> Iterator[None]:
    torch.set_default_device(device.torch_device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("context", [other_stream, other_default_device])
def test_whatever_the_caller_has_set(contract: Contract, context: Callable[[Any], Any]) -> None:
    """A current stream that is not the default one; a default device that is not the CPU."""
    modules, problem = contract.two(RATES["kernels"])
    expected = contract.resident(modules, CALLS)
    device, text = (
        contract.device(problem, "copies"),
        PREFETCH.format(ring_buffer=contract.ring(problem, 2)),
    )
    with context(device):
        trace = contract.run(problem, text, device, contract.host(modules, problem, device), CALLS)
    assert torch.equal(trace.outputs["x"], expected)
    if contract.kind.startswith("sim"):
        planned_seconds = simulate(problem, plan_of(problem, text)).seconds
        assert trace.seconds == pytest.approx(planned_seconds, rel=0.03), "copies overlap compute"


def test_the_sanitizer_of_torch_finds_nothing(contract: Contract) -> None:
    """The other tests of this file again, with ``torch.cuda._sanitizer`` on.

    Not that of reserved bytes: with it on, an H100 reserved more than planned.
    """
    if contract.kind != "cuda":
        pytest.skip("other devices have graphrun's own checkers")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        "cuda and not sanitizer and not cap and not reserves",
    ]
    process = subprocess.run(
        command,
        env={**os.environ, "TORCH_CUDA_SANITIZER": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-4000:]
