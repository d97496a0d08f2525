"""Graphs on the card: planned and measured numbers, equal bits, caps, an injected memory
shortage."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from gpu_lab import Lab, Log, fingerprint, placed, woven

ROOT = Path(__file__).parent.parent
PROMPT = "a lighthouse at dusk, oil on canvas"
AMPLE = {"cuda": "90%", "sim": 1 << 40}


def planned_figures(simulation: Any) -> dict[str, Any]:
    """Return seconds and bytes of a plan."""
    names = ("seconds", "compute_seconds", "peak_bytes", "moved_bytes")
    return {name: getattr(simulation, name) for name in names}


class Bench:
    """One graph with its components in host memory, made once and used by every run."""

    def __init__(self, name: str, lab: Lab, steps: int, *, full_size: bool) -> None:
        import graphrun

        self.lab, self.name = lab, name
        self.graph = graphrun.load(ROOT / "graphs" / f"{name}.yaml").without_sources()
        self.inputs = {"prompt": PROMPT, "steps": steps, "seed": 3}
        self.values = self.graph.resolve(self.inputs)
        self.full_size = full_size
        self.ample: Any = None
        self.modules: dict[str, Any] = {}
        self.host: Any = None
        self.device: Any = None
        self.resident: dict[str, Any] = {}
        self.call_seconds: dict[str, list[float]] = {}

    def problem(self, budget: str | int) -> Any:
        import graphrun

        return graphrun.estimate(
            self.graph, vram=budget, hardware=self.lab.hardware, inputs=self.inputs
        )

    def build(self, record: dict[str, Any]) -> None:
        """Move the weights into host arenas, and open the device."""
        self.prepare(record)
        self.open(record)

    def prepare(self, record: dict[str, Any]) -> None:
        """Make the unlimited problem and the weights, without a device."""
        from graphrun.modules.build import build

        start = time.perf_counter()
        self.ample = self.problem(AMPLE["sim" if self.lab.rehearse else "cuda"])
        estimated = time.perf_counter()
        make = woven if self.full_size else build
        self.modules = {
            name: make(component, self.graph) for name, component in self.graph.components.items()
        }
        record["estimate_seconds"] = round(estimated - start, 3)
        record["weights_seconds"] = round(time.perf_counter() - estimated, 3)

    def open(self, record: dict[str, Any]) -> None:
        """Open the device, and host arenas with the prepared weights."""
        from graphrun.runtime.host import Host

        start, problem = time.perf_counter(), self.ample
        self.device = self.lab.open(problem)
        self.host = Host.of_graph(self.graph, problem, self.device, self.modules)
        record["arenas_and_pinning_seconds"] = round(time.perf_counter() - start, 3)
        record["weight_bytes"] = {c.name: c.weight_bytes() for c in problem.components}
        record["hardware"] = asdict(problem.hardware)
        record["baseline"] = self.lab.books(self.device)

    def stages(
        self, modules: Mapping[str, Any], place: torch.device, fingerprints: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Run the graph's stages on ``modules``; store fingerprints of all values if a dict is
        given."""
        from graphrun.ops import Stages

        def note(stage: str, outputs: Mapping[str, Any]) -> None:
            if fingerprints is not None:
                fingerprints[stage] = fingerprint(outputs)

        host = self.host
        return Stages(
            self.graph, modules, place, self.values, host.parts, host.meta_modules, after_stage=note
        ).run()

    def measure_resident(self, record: dict[str, Any]) -> None:
        """Run with everything on the device: the bits to compare with, and bytes and seconds of
        calls next to the estimator's."""
        from graphrun.modules.interceptor import CallInterceptor
        from graphrun.ops.pipeline import assemble, known_arguments

        device, place, calls = self.device, self.device.torch_device, []

        def around(component: str, entry: str, proceed: Any, args: Any, kwargs: Any) -> Any:
            if sum(call["component"] == component for call in calls) >= 3:
                return proceed(*args, **kwargs)
            self.lab.settle(device)
            start_books, start = self.lab.books(device), device.mark("compute")
            result = proceed(*args, **kwargs)
            end = device.mark("compute")
            device.barrier()
            end_books = self.lab.books(device)
            growth = {
                key: end_books[key] - start_books.get(key.replace("peak_", ""), 0)
                for key in end_books
                if key.startswith("peak_")
            }
            seconds = device.seconds_at(end) - device.seconds_at(start)
            calls.append({"component": component, "entry": entry, "seconds": seconds, **growth})
            return result

        with device.capped(1 << 60), placed(self.host.modules, place), torch.no_grad():
            with contextlib.suppress(RuntimeError):
                _warm(place)
            with CallInterceptor(self.host.modules, place, around):
                self.stages(self.host.modules, place, self.resident)
            record["values"] = self.resident
            start = time.perf_counter()
            second_run: dict[str, Any] = {}
            self.stages(self.host.modules, place, second_run)
            device.barrier()
            record["seconds"] = round(time.perf_counter() - start, 4)
            record["second resident run has the same bits"] = second_run == self.resident
            with CallInterceptor(
                self.host.modules, place, lambda c, e, proceed, a, k: proceed(*a, **k)
            ):
                pipeline = assemble(self.graph, self.host.modules, self.host.parts, place)
                start = time.perf_counter()
                image = pipeline(
                    prompt=PROMPT,
                    num_inference_steps=self.values["steps"],
                    generator=torch.Generator("cpu").manual_seed(self.values["seed"]),
                    **known_arguments(
                        pipeline.__call__,
                        {
                            k: v
                            for k, v in self.values.items()
                            if k not in ("prompt", "steps", "seed")
                        },
                    ),
                ).images[0]
                device.barrier()
                record["plain pipeline, seconds"] = round(time.perf_counter() - start, 4)
            record["plain pipeline has the same picture"] = (
                fingerprint(image) == self.resident[self.graph.stages[-1].name]["image"]
            )
            if not self.lab.rehearse:
                record["kernels"] = self._kernels()
        self.lab.settle(device)
        record["baseline_after"] = self.lab.books(device)
        for call in calls:
            self.call_seconds.setdefault(call["component"], []).append(call["seconds"])
        record["calls"] = calls
        record["estimated"] = self._estimated()

    def _kernels(self) -> list[dict[str, Any]]:
        """Return the 40 kernels with the longest total time of one resident run."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            self.stages(self.host.modules, self.device.torch_device, {})
            self.device.barrier()
        averages: Any = sorted(profiler.key_averages(), key=lambda k: -k.self_device_time_total)
        return [
            {
                "name": kernel.key[:120],
                "count": kernel.count,
                "seconds": round(kernel.self_device_time_total / 1e6, 6),
            }
            for kernel in averages[:40]
        ]

    def _estimated(self) -> Any:
        """Return the estimate of the same calls, with everything else of a phase."""
        phases = []
        for phase in self.ample.phases:
            uses = [
                {
                    "component": u.component,
                    "calls": u.calls,
                    "seconds_per_call": _call_seconds(self.ample, u),
                }
                for u in phase.uses
            ]
            phases.append(
                {
                    "phase": phase.name,
                    "first_bytes": phase.first_bytes,
                    "steady_bytes": phase.steady_bytes,
                    "uses": uses,
                }
            )
        try:
            from graphrun.profile.dry_run import probe

            kinds = {
                id(call): call for _, call in probe(self.graph, self.values).recording.entries()
            }.values()
            traced = [
                {
                    "component": c.component,
                    "entry": c.entry,
                    "traced_bytes": c.peak_bytes,
                    "input_bytes": c.input_bytes,
                }
                for c in kinds
            ]
        except Exception as error:  # noqa: BLE001
            traced = [{"failed": repr(error)}]
        return {"phases": phases, "calls": traced}

    def measure_budget(self, budget: str | int, record: dict[str, Any], runs: int) -> None:
        """Plan for ``budget``, run the plan, and compare slot by slot."""
        import graphrun

        problem = self.problem(budget)
        start = time.perf_counter()
        solution = graphrun.plan(problem)
        record["solve_seconds"] = round(time.perf_counter() - start, 3)
        problem = solution.problem
        simulation = solution.simulation
        record["planned"] = planned_figures(simulation)
        record["budget_bytes"], record["effective_bytes"] = (
            problem.budget_bytes,
            problem.effective_bytes,
        )
        record["plan"] = str(solution.plan).splitlines()
        record["runs"] = []
        for _ in range(runs):
            trace, fingerprints, seconds = self.follow(solution)
            record["runs"].append(self.compared(problem, simulation, trace, fingerprints, seconds))

    def follow(
        self, solution: Any, progress: Any = None, *, digests: bool = True
    ) -> tuple[Any, dict[str, Any], float]:
        """Run ``solution``; return the trace, fingerprints if ``digests``, and wall seconds."""
        from graphrun.runtime.executor import follow

        fingerprints: dict[str, Any] = {}
        self.lab.slots.clear()
        start = time.perf_counter()
        target = fingerprints if digests else None
        work = lambda: self.stages(self.host.modules, self.device.torch_device, target)  # noqa: E731
        trace = follow(solution, self.host, self.device, work, progress)
        return trace, fingerprints, time.perf_counter() - start

    def compared(
        self, problem: Any, simulation: Any, trace: Any, fingerprints: Any, seconds: float
    ) -> dict[str, Any]:
        books = self.lab.slots[-len(trace.slots) :]
        slots = []
        for index, (p, m, b) in enumerate(zip(simulation.slots, trace.slots, books, strict=True)):
            events = [e for e in trace.events if e.slot == index]
            copies = [e for e in events if e.kind in ("load", "stream")]
            measured_seconds = m.end_seconds - m.start_seconds
            resident = sum(
                min(self.call_seconds[e.component])
                for e in events
                if e.kind == "run" and e.component in self.call_seconds
            )
            slots.append(
                {
                    "slot": f"{m.phase} {m.part}",
                    "planned": {
                        **{k: v for k, v in asdict(p).items() if k not in ("phase", "part")},
                        "stall_seconds": p.stall_seconds,
                    },
                    "peak_bytes": m.peak_bytes,
                    "moved_bytes": m.moved_bytes,
                    "calls": m.calls,
                    "seconds": measured_seconds,
                    "run_seconds": sum(
                        e.end_seconds - e.start_seconds for e in events if e.kind == "run"
                    ),
                    "resident_call_seconds": resident,
                    "copy_busy_seconds": sum(e.end_seconds - e.start_seconds for e in copies),
                    "copied_bytes": sum(e.nbytes for e in copies),
                    "stall_seconds": measured_seconds - resident,
                    "books": b,
                    "activation_allocated_bytes": b["peak_allocated_bytes"]
                    - p.resident_bytes
                    - p.ring_buffer_bytes
                    - p.values_bytes,
                }
            )
        return {
            "wall_seconds": round(seconds, 4),
            "seconds": trace.seconds,
            "seconds_over_planned": trace.seconds / simulation.seconds
            if simulation.seconds
            else None,
            "peak_bytes": trace.peak_bytes,
            "peak_over_planned": trace.peak_bytes / simulation.peak_bytes
            if simulation.peak_bytes
            else None,
            "moved_bytes": trace.moved_bytes,
            "left_bytes": trace.left_bytes,
            "cap_kept": trace.peak_bytes <= problem.effective_bytes,
            "no_slot_over_its_plan": all(
                m.peak_bytes <= p.peak_bytes
                for p, m in zip(simulation.slots, trace.slots, strict=True)
            ),
            "used_bytes_at_most": max((b.get("used_bytes", 0) for b in books), default=0),
            "used_within_budget": max((b.get("used_bytes", 0) for b in books), default=0)
            <= problem.budget_bytes,
            "same_bits_as_resident": {
                stage: fingerprints[stage] == self.resident.get(stage) for stage in fingerprints
            },
            "baseline_restored": self.device.allocated_bytes <= trace.baseline_bytes,
            "slots": slots,
        }

    def measure_host(self, budget: str | int, record: dict[str, Any]) -> None:
        """Measure wall seconds of runs without digests, and the most expensive host functions."""
        import cProfile
        import pstats

        import graphrun

        solution = graphrun.plan(self.problem(budget))
        record["planned_seconds"] = solution.simulation.seconds
        record["runs"] = []
        for _ in range(2):
            trace, _, seconds = self.follow(solution, digests=False)
            slots = {f"{s.phase} {s.part}": s.end_seconds - s.start_seconds for s in trace.slots}
            record["runs"].append({"wall_seconds": seconds, "slots": slots})
        profiler = cProfile.Profile()
        profiler.enable()
        self.follow(solution, digests=False)
        profiler.disable()
        statistics: Any = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
        rows = [
            {
                "function": f"{Path(file).name}:{line}:{name}",
                "calls": calls,
                "own_seconds": round(own_seconds, 5),
                "seconds": round(cumulative, 5),
            }
            for (file, line, name), (_, calls, own_seconds, cumulative, _) in statistics.items()
        ]
        record["by own seconds"] = sorted(rows, key=lambda row: -row["own_seconds"])[:40]
        record["by seconds"] = sorted(rows, key=lambda row: -row["seconds"])[:80]

    def measure_shortage(
        self, budget: str | int, record: dict[str, Any], targets: list[int] | None = None
    ) -> None:
        """Take away the device's memory when a slot begins: expect a typed error, an empty device,
        and a next run that works."""
        import graphrun
        from graphrun.errors import OutOfMemory

        solution = graphrun.plan(self.problem(budget))
        baseline = self.device.allocated_bytes
        for target in range(len(solution.plan.slots)) if targets is None else targets:

            def progress(slot: int, call: int, calls: int, target: int = target) -> None:
                if slot == target and call == 0:
                    self.lab.lower_cap(self.device)

            entry: dict[str, Any] = {}
            try:
                self.follow(solution, progress)
                entry["ended"] = "no allocation was refused"
            except OutOfMemory as error:
                entry["ended"] = "OutOfMemory"
                entry["text"] = str(error)[:300]
            self.lab.lift_cap(self.device)
            entry["device_empty"] = self.device.allocated_bytes == baseline
            record[f"slot {target}"] = entry
        _, fingerprints, _ = self.follow(solution)
        record["next run has the same bits"] = fingerprints == self.resident

    def measure_cap(self, record: dict[str, Any]) -> None:
        """Test that a session of 64 MiB refuses 1 GiB, and that the next session provides it."""
        with self.device.capped(64 << 20):
            try:
                self.device.allocate(1 << 30)
                record["refused"] = False
            except torch.OutOfMemoryError as error:
                record["refused"] = True
                record["told"] = str(self.device.explain(error))[:300]
        with self.device.capped(2 << 30):
            record["given afterwards"] = self.device.allocate(1 << 30).numel() == 1 << 30

    def against_cpu(self, record: dict[str, Any]) -> None:
        """Compute the same values on the CPU, which differ by rounding only. For tiny graphs."""
        device, values_by_device = self.device, {}
        for name, place in (("cpu", torch.device("cpu")), ("device", device.torch_device)):
            values: dict[str, torch.Tensor] = {}

            def note(
                stage: str, outputs: Mapping[str, Any], values: dict[str, torch.Tensor] = values
            ) -> None:
                for key, value in outputs.items():
                    if isinstance(value, torch.Tensor):
                        values[f"{stage}.{key}"] = value.detach().to("cpu").float()

            from graphrun.ops import Stages

            host = self.host
            with device.capped(1 << 60), torch.no_grad():
                context = (
                    contextlib.nullcontext() if name == "cpu" else placed(self.host.modules, place)
                )
                with context:
                    Stages(
                        self.graph,
                        host.modules,
                        place,
                        self.values,
                        host.parts,
                        host.meta_modules,
                        after_stage=note,
                    ).run()
            values_by_device[name] = values
        for key, value in values_by_device["cpu"].items():
            difference = (value - values_by_device["device"][key]).abs().max().item()
            record[key] = {
                "largest_difference": difference,
                "largest_value": value.abs().max().item(),
            }
            record[key]["close"] = bool(difference <= 0.05 * value.abs().max().item())


def graph(
    log: Log, lab: Lab, name: str, budgets: list[str], steps: int, runs: int, *, full_size: bool
) -> Bench:
    """Make every measurement of graph ``name``, and return its bench. ``budgets``: sizes;
    ``smallest`` is the minimum VRAM."""
    from graphrun.solve.infeasible import smallest_budget

    bench = Bench(name, lab, steps, full_size=full_size)
    with log.part(f"{name} build") as record:
        bench.build(record)
    if bench.host is None:
        return bench
    with log.part(f"{name} resident") as record:
        bench.measure_resident(record)
    minimum: int | str = budgets[0]
    with log.part(f"{name} smallest budget") as record:
        minimum = record["bytes"] = int(smallest_budget(bench.ample))
    for budget in budgets:
        with log.part(f"{name} within {budget}") as record:
            bench.measure_budget(minimum if budget == "smallest" else budget, record, runs)
    if full_size:
        for budget in budgets[:2]:
            with log.part(f"{name} host within {budget}") as record:
                bench.measure_host(budget, record)
    with log.part(f"{name} cap") as record:
        bench.measure_cap(record)
    with log.part(f"{name} shortage") as record:
        bench.measure_shortage(minimum, record, [1] if full_size else None)
    if not full_size:
        with log.part(f"{name} against the CPU") as record:
            bench.against_cpu(record)
    return bench


def _call_seconds(problem: Any, use: Any) -> float:
    groups = problem.component(use.component).groups
    return sum(
        s * len(k.blocks) * n for s, k, n in zip(use.seconds, groups, use.group_calls, strict=True)
    ) / max(1, use.calls)


def _warm(place: torch.device) -> None:
    """Make cuBLAS allocate its workspace, which is counted separately from activations."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.ones(64, 64, dtype=dtype, device=place)
        x @ x
