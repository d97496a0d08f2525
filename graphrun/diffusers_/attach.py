"""Attaches graphrun to a live pipeline: each call of it is planned from a dry run of that very call, then executed by the plan.

Decides when a plan is made and which one holds. Where what lives, the plan has said; the executor follows it.

    pipe(...)            known kind of call?  --no-->  rehearse on the meta module -> problem -> solve -> keep
                                   | yes                                                     |
                                   v <-------------------------------------------------------'
    executor.follow      pipe's own code; entering a component moves the plan; another entry than planned: a detour
                                   v
    device at its baseline, results as the pipeline returns them
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphrun.diffusers_.call import signature_of
from graphrun.diffusers_.dry_call import Call, Rehearsal
from graphrun.diffusers_.live import components_of, graph_of, joined, pipelines_in, state_of
from graphrun.diffusers_.proxy import LOADERS, REWEIGHTING, PipelineProxy, cast_alone, lifted
from graphrun.diffusers_.residence import Leftovers, LiveHost, device_bytes
from graphrun.errors import InputError
from graphrun.model.plan import Plan, Slot
from graphrun.model.problem import Hardware, Problem
from graphrun.model.solution import Solution
from graphrun.modules.dtype_variants import AtRest, DtypeVariant
from graphrun.modules.interceptor import CallInterceptor, entry_of
from graphrun.profile import hardware as devices
from graphrun.profile.problems import Limits, problem_of
from graphrun.profile.recording import Mark, Recording
from graphrun.report.call import call_screen
from graphrun.report.screen import measured_screen, plan_screen
from graphrun.report.summary import summarize
from graphrun.runtime.devices.device import Device
from graphrun.runtime.executor import follow
from graphrun.solve.solve import solve
from graphrun.trace import Trace


@dataclass(slots=True)
class Planned:
    """One kind of call: the entries it is made of, and the solution for the facts of trace number ``traces``."""

    expected: frozenset[Any]
    solution: Solution
    traces: int


class Attachment:
    """What `graphrun.attach` returns. A context manager: leaving it detaches.

    The pipeline has it as ``pipe.graphrun``. Of the last call: ``solution``, its plan; ``trace``, what was measured (bytes beyond
    those that the caller had on the device); ``replans``, the entries that the plan did not have, each planned for when it came.
    """

    def __init__(self, pipe: Any, device: Device, hardware: Hardware, budget_bytes: int, ram_bytes: int, demands: Any) -> None:
        self.pipe = pipe
        self.solution: Solution | None = None
        self.trace: Trace | None = None
        self.replans: tuple[str, ...] = ()
        self._device, self._hardware = device, hardware
        self._budget_bytes, self._ram_bytes, self._demands = budget_bytes, ram_bytes, demands
        self._lock, self._thread = threading.RLock(), 0
        self._resting = self._detached = self._leaving = False
        self._state = ""
        self._rehearsal: Rehearsal | None = None
        self._tapes: dict[Any, tuple[Recording, frozenset[Any]]] = {}  # by kind of call
        self._plans: dict[Any, Planned] = {}  # by kind of call and what the caller had on the device
        self._solved: dict[str, Solution] = {}  # by digest of the problem
        self._by_text: set[Any] = set()
        self._modules = joined(components_of(pipe))
        graph_of(pipe, self._modules).directed(*demands)
        boundaries = lifted(self._modules)  # of pipelines that share components
        try:
            self._host = LiveHost(self._modules, device)
        finally:
            _stand_again(boundaries)
        self._enter()

    # -- what the user calls

    def detach(self) -> None:
        """The pipeline is as it was: its own class, weights in memory of their own, nothing on the device.

        Asked for inside a call (in a callback), it is done when the call ends, whether that returns or raises. Another thread waits
        for that. Raises InputError, and changes nothing, where a call of another pipeline runs with components of this one.
        """
        with self._lock:
            if self._inside():
                self._leaving = True
            elif not self._detached:
                self._leave()
                self._detached = True

    def _leave(self) -> None:
        others = [interceptor for interceptor in lifted(self._modules) if interceptor is not self._interceptor]
        self._stand.leave()
        self._host.restore()
        _stand_again(others)
        self._forget()
        self._rehearsal = None

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def report(self, *, full: bool = False) -> str:
        """The last call, planned beside measured: a row per phase; with ``full`` its plan, and a row per slot.

        Raises InputError before the first one.
        """
        solution, trace = self._last()
        if not solution.problem.phases:
            return f"{solution.problem.graph}: the call entered no component"
        if self.replans:
            return f"{plan_screen(solution)}\n\nthe call left this plan, and was planned again at {', '.join(self.replans)}"
        return f"{plan_screen(solution)}\n{measured_screen(solution, trace, [])}" if full else call_screen(solution, trace)

    def summary(self) -> dict[str, Any]:
        """The same as JSON-ready data; ``replans`` names the entries for which it was planned again."""
        solution, trace = self._last()
        fits = bool(solution.problem.phases) and not self.replans
        return {**summarize(solution, None, trace if fits else None), "replans": list(self.replans)}

    def _last(self) -> tuple[Solution, Trace]:
        if self.solution is None or self.trace is None:
            raise InputError("nothing was called yet: call the pipeline first")
        return self.solution, self.trace

    # -- standing between the pipeline and its caller

    def _enter(self) -> None:
        """Every way into the pipeline and its components leads here."""
        self._interceptor = CallInterceptor(self._modules, self._device.torch_device, around=self._directly, casts=AtRest())
        self._interceptor.__enter__()
        self._stand = PipelineProxy(self.pipe, self._place, self._called, self._rested, graphrun=property(lambda _: self))

    def _place(self) -> torch.device:
        return self._device.torch_device if not self._resting else torch.device("cpu")

    def _called(self, path: str, name: str, method: Callable[..., Any], owner: Any, args: Any, kwargs: Any) -> Any:
        if self._inside():
            return method(owner, *args, **kwargs)

        def find(rehearsal: Rehearsal) -> Callable[..., Any]:
            meta_module = pipelines_in(rehearsal.pipe)[path]
            return meta_module if name == "__call__" else getattr(meta_module, name)  # type: ignore[no-any-return]

        label = ".".join(filter(None, (path, name.strip("_"))))
        return self._call(Call(label, functools.partial(method, owner), find, args, kwargs))

    def _rested(self, path: str, name: str, method: Callable[..., Any], owner: Any, args: Any, kwargs: Any) -> Any:
        """What loads, saves or casts finds a pipeline that is on the CPU, wholly: that is where its weights are between calls."""
        if name == "to":
            dtype = cast_alone(args, kwargs, self._device.torch_device)
            if dtype is None:
                return owner
            args, kwargs = (dtype,), {}
        if self._inside():
            if method.__module__.startswith(LOADERS) and name.startswith(REWEIGHTING):
                raise InputError(f"a call of this pipeline runs, with the weights it was planned for: {name}() before or after it")
            return method(owner, *args, **kwargs)
        with self._alone(resting=True):
            if name == "save_pretrained":
                self._host.restore()  # safetensors refuses tensors that lie in one arena
            return method(owner, *args, **kwargs)

    def _directly(self, component: str, entry: str, proceed: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A component is entered by somebody else than a method of the pipeline."""
        return self._call(Call(f"{component}.{entry}", proceed, lambda r: entry_of(r.meta_modules[component], entry), args, kwargs))

    # -- one call

    def _call(self, call: Call) -> Any:
        with self._alone():
            return self._run(call)

    def _inside(self) -> bool:
        """Whether this thread is in a call already."""
        return self._thread == threading.get_ident()

    @contextmanager
    def _alone(self, resting: bool = False) -> Iterator[None]:
        """One thread at a time, with nothing standing around the components, whoever put it there."""
        with self._lock:
            self._take_up()
            boundaries = lifted(self._modules)
            self._thread, self._resting = threading.get_ident(), resting
            try:
                yield
            finally:
                self._thread, self._resting = 0, False
                _stand_again(boundaries)
                if self._leaving:
                    self.detach()

    def _run(self, call: Call) -> Any:
        device, place = self._device, self._device.torch_device
        self._host.begin(changed=self._notice_changes())
        reserve_bytes = device.allocated_bytes  # what the caller has there, of which arguments may be a part
        key = self._key(call, reserve_bytes)
        planned = self._planned(call, key, reserve_bytes)
        replan = _Replan(self, planned.expected, reserve_bytes)

        leftovers = Leftovers(self.pipe, self._modules, place)

        def work() -> dict[str, Any]:
            try:
                return {"result": call.proceed(*call.args, **call.kwargs)}
            finally:
                leftovers.clear()

        def handed_out(outputs: Mapping[str, Any]) -> int:
            return device_bytes(outputs, place, besides=(call.args, call.kwargs))

        solution = planned.solution
        self._host.arrange(solution.problem, self._known_dtype_variants())
        trace = follow(solution.problem, solution.plan, self._host, device, work, replan=replan, handed_out=handed_out)
        self.solution, self.replans = solution, tuple(replan.taken)
        self.trace = _beyond(trace, reserve_bytes, handed_out(trace.outputs))
        if replan.taken and key[:2] not in self._by_text:
            self._by_text.add(key[:2])
            del self._tapes[key[:3]]
        return trace.outputs["result"]

    def _take_up(self) -> None:
        """The components are those that the pipeline has now."""
        modules = joined(components_of(self.pipe), self._modules.values())
        if {name: id(module) for name, module in modules.items()} == {name: id(module) for name, module in self._modules.items()}:
            return
        boundaries = lifted({**{f"{name} before": module for name, module in self._modules.items()}, **modules})
        others = [interceptor for interceptor in boundaries if interceptor is not self._interceptor]
        try:
            self._host.adopt(modules)
        except InputError:
            _stand_again(boundaries)
            raise
        self._modules = modules
        self._stand.leave()
        _stand_again(others)
        self._enter()

    def _notice_changes(self) -> bool:
        """Plans do not outlive what they were made for: a VAE that tiles now, a LoRA, another scheduler."""
        state = state_of(self.pipe, self._modules)
        changed = state != self._state
        if changed:
            self._state, self._rehearsal = state, None
            self._forget()
        return changed

    def _forget(self) -> None:
        self._tapes.clear()
        self._plans.clear()
        self._solved.clear()

    def _known_dtype_variants(self) -> Mapping[str, DtypeVariant]:
        assert self._rehearsal is not None
        return self._rehearsal.dtype_variants.known

    def _key(self, call: Call, reserve_bytes: int) -> tuple[Any, ...]:
        kind = call.name, signature_of((call.args, call.kwargs))
        texts = signature_of((call.args, call.kwargs), texts=True) if kind in self._by_text else ()
        return *kind, texts, reserve_bytes

    def _planned(self, call: Call, key: Any, reserve_bytes: int) -> Planned:
        if self._rehearsal is None:
            self._rehearsal = Rehearsal(self.pipe, self._modules)
        rehearsal = self._rehearsal
        kind = key[:3]
        if kind not in self._tapes:
            recording = rehearsal.probe(call)
            self._tapes[kind] = recording, frozenset(rehearsal.prober.answered)
            self._plans.pop(key, None)
        found = self._plans.get(key)
        if found is None or found.traces != rehearsal.prober.traces:
            recording, expected = self._tapes[kind]
            problem = self.problem(recording, reserve_bytes)
            solution = self._solved.get(problem.digest) or self.solve(problem)
            self._solved[problem.digest] = solution
            found = self._plans[key] = Planned(expected, solution, rehearsal.prober.traces)
        return found

    def problem(self, recording: Recording, reserve_bytes: int) -> Problem:
        """The problem of what ``recording`` records, with ``reserve_bytes`` of other tensors on the device."""
        assert self._rehearsal is not None
        graph = graph_of(self.pipe, self._modules, self._known_dtype_variants().values()).directed(*self._demanded(recording))
        graph = graph.directed(reserve_bytes=graph.directives.reserve_bytes + reserve_bytes)
        limits = Limits(self._budget_bytes, self._ram_bytes)
        return problem_of(graph, self._rehearsal.probed(recording), self._hardware, limits, {})

    def _demanded(self, recording: Recording) -> tuple[Any, ...]:
        """What is demanded of the components that are entered, in the forms in which they are."""
        keep, exclude, reserve_bytes = self._demands
        dtype_variants, entered = self._known_dtype_variants(), dict.fromkeys(call.component for _, call in recording.entries())
        wanted = ([name for name in entered if dtype_variants[name].component in names] for names in (keep, exclude))
        return *wanted, reserve_bytes

    def solve(self, problem: Problem) -> Solution:
        """The plan for ``problem``; one without phases has nothing but an end."""
        if problem.phases:
            return solve(problem)
        return Solution(problem, Plan(problem.digest, (Slot("", "end", 0, ()),)), True, 0.0, 0.0, 0.0)


def _stand_again(boundaries: list[CallInterceptor]) -> None:
    for interceptor in reversed(boundaries):
        interceptor.__enter__()


class _Replan:
    """Plans for entries that the plan of a call does not have: the component is entered this way from now on."""

    def __init__(self, attachment: Attachment, expected: frozenset[Any], reserve_bytes: int) -> None:
        self.taken: list[str] = []
        self._attachment, self._expected, self._reserve_bytes = attachment, expected, reserve_bytes

    def holds(self, component: str, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the plan in force was made for such an entry."""
        return self._signature(component, entry, args, kwargs) in self._expected

    def around(
        self, component: str, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any], live_bytes: int
    ) -> tuple[Problem, Plan]:
        """A plan for this entry and all that follow like it."""
        rehearsal = self._attachment._rehearsal
        assert rehearsal is not None
        dtype_variants = self._attachment._host.dtype_variants
        assert dtype_variants is not None
        traced, made = rehearsal.trace(dtype_variants.known[component], entry, args, kwargs)
        made_bytes = made.nbytes
        again = Mark("enter", component, traced)
        carried = max(0, live_bytes - self._reserve_bytes)
        recording = Recording([(1, carried), again, (2, made_bytes), again, (3, made_bytes), Mark("stage", entry)])
        solution = self._attachment.solve(self._attachment.problem(recording, self._reserve_bytes))
        self._attachment._host.arrange(solution.problem, dtype_variants.known)
        self._expected = frozenset({self._signature(component, entry, args, kwargs)})
        self.taken.append(f"{component}.{entry}")
        return solution.problem, solution.plan

    def _signature(self, component: str, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rehearsal = self._attachment._rehearsal
        assert rehearsal is not None
        return rehearsal.prober.signature(component, entry, args, kwargs)


def _beyond(trace: Trace, held_bytes: int, glue_bytes: int) -> Trace:
    """``trace`` without its results, its peaks counted from the ``held_bytes`` that the caller had on the device.

    In the end slot the ``glue_bytes`` of results are the caller's, too.
    """
    own = {"end": held_bytes + glue_bytes}
    slots = tuple(replace(slot, peak_bytes=max(0, slot.peak_bytes - own.get(slot.part, held_bytes))) for slot in trace.slots)
    return replace(trace, slots=slots, outputs={})


def hardware_of(device: Any, hardware: str | Hardware | None) -> Hardware:
    """The hardware to plan for: the one named; else that of ``device`` (sim, cuda, or an open device), else the card found.

    Raises InputError where there is none, or the two are of different kinds.
    """
    kind = device.name if device is not None and not isinstance(device, str) else device
    if kind not in (None, "cuda", "sim"):
        raise InputError(f"device {kind!r} is not known; it is cuda or sim")
    chosen = devices.hardware(hardware) if isinstance(hardware, str) else hardware
    if chosen is None:
        chosen = devices.simulated() if kind == "sim" else devices.found()
    if chosen is None:
        raise InputError("there is no CUDA device here to attach to; device='sim' attaches to the simulated accelerator")
    if kind not in (None, chosen.device):
        raise InputError(f"hardware {chosen.name} is a {chosen.device} device, and device is {kind}; leave one of them out")
    return chosen


def demands_of(keep: Iterable[str], exclude: Iterable[str], reserve_bytes: int | None) -> tuple[Any, ...]:
    """Directives as `Graph.directed` takes them."""
    return tuple(keep), tuple(exclude), reserve_bytes
