"""Attach graphrun to a live pipeline, whose components have weights: every call follows a plan.

This module decides when to make a plan and which plan a call uses; `graphrun.runtime` runs it.

    pipe(...)         is there a plan for this call (see `CallKey`)?
                        | yes   | no: dry run on the meta pipeline -> problem -> solve -> store plan
                        v       v
    executor.follow   the pipeline's own code runs; each call into a component opens the next slots
                      of the plan. A call that the plan does not contain gets a new plan
                        v
    afterwards        the device has its earlier contents, the weights that the plan keeps, and the
                      results, which the pipeline's method returns

A call is planned as the steady state of a session: the weights that the plan keeps are on the
device when the call begins, and stay there. If another call left other blocks on the device,
`graphrun.solve.transitions` adapts the plan to them.

Terms: a *dry run* executes a whole call of the pipeline without weights and yields a `Recording`.
It *traces* each kind of call into a component once, to get its numbers. The executor's `Trace` is
different: the measurements of a run.
"""

from __future__ import annotations

import functools
import html
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from graphrun.diffusers_.call_arguments import signature_of
from graphrun.diffusers_.call_plans import CallKey, CallRecords, PlannedCall, without_caller_bytes
from graphrun.diffusers_.call_replan import CallPlanning, CallReplan
from graphrun.diffusers_.dry_call import AttachedCall, MetaPipeline
from graphrun.diffusers_.live import (
    State,
    components_of,
    graph_of,
    is_pipeline,
    kept_signatures,
    merge_shared,
    own_class,
    packages_of,
    pipelines_in,
    settings_of,
    state_of,
)
from graphrun.diffusers_.proxy import PipelineProxy, dtype_of_to, reinstall, remove_interceptors
from graphrun.diffusers_.residence import Leftovers, LiveHost, device_bytes
from graphrun.errors import InputError
from graphrun.graph.parts import Directives
from graphrun.hook import Hook
from graphrun.model.allocator import LARGE_PAGE_BYTES
from graphrun.model.hardware import Hardware
from graphrun.model.plan import Plan, Slot
from graphrun.model.problem import Problem, ProblemLimits
from graphrun.model.solution import Solution
from graphrun.modules.dtype_variants import DtypeVariant, HostCasts
from graphrun.modules.interceptor import CallInterceptor, changes_weights, entry_of, refuse_change
from graphrun.modules.memos import Owned, attributes_of
from graphrun.profile.recording import ComponentProfile, DryRun, Recording
from graphrun.report.call_screen import call_screen
from graphrun.report.screen import measured_screen, plan_screen, verdict_line
from graphrun.report.summary import summarize
from graphrun.runtime.devices.cpu import CONTEXT_STEP_BYTES, CpuDevice
from graphrun.runtime.devices.device import Device, device_lock
from graphrun.runtime.executor import follow, refuse_broken
from graphrun.sim.casts import dtype_on
from graphrun.solve.solve import solve
from graphrun.solve.transitions import continued
from graphrun.systems import refuse_forked
from graphrun.trace import Trace, warn_of
from graphrun.units import round_up, show_size
from graphrun.verify.solution import solution_of

_LOG = logging.getLogger(__name__)


class Attachment:
    """The result of `graphrun.attach`, also available as ``pipe.graphrun``.

    As a context manager it detaches on exit.

    Attributes of the last call: ``solution``, its plan; ``trace``, its measurements, with peaks
    that exclude the caller's own bytes on the device; ``replans``, the calls into components
    (``component.method``) that the plan did not contain and that were planned on arrival.
    """

    def __init__(
        self,
        pipe: Any,
        device: Device,
        hardware: Hardware,
        limits: ProblemLimits,
        demands: Directives,
        budget: object = None,
        tell: Callable[[str], None] | None = None,
        store: CallRecords | None = None,
        components: Mapping[str, torch.nn.Module] | None = None,
        entries: Collection[str] = (),
        hook: Hook | None = None,
    ) -> None:
        """``hardware``, ``limits``: what to plan for. ``demands``: placements that the caller
        demands (keep, exclude, pin, reserve). With ``limits.runs`` above 1, weights stay on the
        device between calls. ``budget``: any object; attachments with the same object share the
        budget in ``limits``. ``tell``: called with one line, which is also logged, when a call is
        planned. ``store``: dry runs and plans on disk. ``components``, ``entries``: the components
        and the methods to plan of an object that is not a diffusers pipeline.
        """
        self.pipe, self._hook = pipe, hook
        self._named_components, self._entries = components, tuple(entries)
        self.solution: Solution | None = None
        self.trace: Trace | None = None
        self.replans: tuple[str, ...] = ()
        self._device, self._hardware, self._demands, self._tell = device, hardware, demands, tell
        self._store = store
        # _thread: the thread that is inside a call; 0: none
        self._lock, self._thread = device_lock(device.name), 0
        self._process = os.getpid()
        # whether a method that changes the pipeline runs, with all weights on the CPU
        self._at_rest = False
        self._detached = self._detach_pending = self._release_pending = False
        # `state_of` the pipeline before the last call: what only the caller changes (such as LoRAs)
        self._state: State = []
        # `settings_of` the pipeline after the last call: what a call may change too (private
        # attributes). Taken after each call, so that a call's own changes do not invalidate plans.
        self._settings: State = []
        # `state_of` and `settings_of` at the last change of the pipeline
        self._stored_state: tuple[State, State] = ([], [])
        # by `CallKey.without_reserve`: the dry run, signatures of calls into components
        self._dry_runs: dict[Any, tuple[DryRun, frozenset[str]]] = {}
        self._plans: dict[CallKey, PlannedCall] = {}
        self._solutions: dict[str, Solution] = {}  # by digest of the problem
        # by digest of the problem, and the blocks on the device before the run
        self._continuations: dict[Any, Solution] = {}
        # `CallKey.without_texts` of calls that need a plan for each text: text lengths matter, or a
        # call did not follow its plan, because a prompt may change how components are called
        self._text_dependent: set[Any] = set()
        self._modules = merge_shared(components_of(pipe, components))
        # raises InputError
        graph = graph_of(pipe, self._modules).directed(
            demands.keep, demands.exclude, pin=demands.pin
        )
        self._limits = replace(limits, allow=graph.allowed(limits.allow))
        # interceptors of other attached pipelines that share components
        interceptors = remove_interceptors(self._modules)
        try:
            self._host = LiveHost(self._modules, device, budget or self)
        finally:
            reinstall(interceptors)
        self._install()
        self._say_unmapped()

    # -- public methods

    def detach(self) -> None:
        """Restore the pipeline: its own class, weights in ordinary CPU memory, an empty device.

        If the device is the CPU, weights stay where they are: mapped from files, or in memory.

        Inside a pipeline call (in a callback), this takes effect when the call returns or raises.
        Another thread waits for the call to end. Raises InputError, and changes nothing, while a
        call of another attached pipeline uses components of this one. No-op in a forked process.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._in_call():
                self._detach_pending = True
            elif not self._detached:
                self._uninstall()
                self._detached = True

    def release(self) -> None:
        """Free the weights that calls left on the device; the next call loads them again.

        Inside a pipeline call, this takes effect when the call ends. Use it after writing to parts
        of a weight through ``tensor.data``: graphrun may not detect such writes.
        """
        self._refuse_forked()
        with self._lock:
            if self._in_call():
                self._release_pending = True
            else:
                self._host.release()

    @property
    def held_bytes(self) -> int:
        """Bytes on the device of the pipeline's weights and of its modules' cached tables."""
        return self._host.loaded_bytes + self._host.cached_bytes

    def _uninstall(self) -> None:
        interceptors = remove_interceptors(self._modules)
        self._proxy.remove()
        self._host.restore()
        self._reinstall_others(interceptors)
        self._forget_calls()

    @functools.cached_property
    def _meta_pipeline(self) -> MetaPipeline:
        """A copy of the pipeline in its present state, for dry runs."""
        return MetaPipeline(self.pipe, self._modules, unified=self._device.unified)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        last = f"last {self.trace!r}" if self.trace is not None else "not called yet"
        device_size, budget_size = show_size(self.held_bytes), show_size(self._limits.budget_bytes)
        return (
            f"<Attachment of {own_class(self.pipe).__name__} within {budget_size} on "
            f"{self._device.name}: holds {device_size}, {last}>"
        )

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.report() if self.trace is not None else repr(self))}</pre>"

    def say(self, line: str) -> None:
        _LOG.info(line)
        if self._tell is not None:
            self._tell(line)

    def report(self, *, full: bool = False) -> str:
        """Return a text table of the last call: planned and measured numbers, one row per phase.
        ``full``: the plan, and one row per slot. Raises InputError before the first call."""
        solution, trace = self._last()
        if not solution.problem.phases:
            return f"{solution.problem.graph}: the call used no component"
        if self.replans:
            message = (
                f"the call did not follow this plan; planned again at {', '.join(self.replans)}"
            )
            return f"{plan_screen(solution)}\n\n{message}\n{verdict_line(trace)}"
        return (
            f"{plan_screen(solution)}\n{measured_screen(solution, trace, [])}"
            if full
            else call_screen(solution, trace)
        )

    def summary(self) -> dict[str, Any]:
        """Return the last call as JSON-ready data. Raises InputError before the first call.

        ``replans`` lists the calls into components that were planned on arrival. ``verdict`` says
        whether the run stayed within the planned memory.
        """
        solution, trace = self._last()
        fits = bool(solution.problem.phases) and not self.replans
        return {
            **summarize(solution, None, trace if fits else None),
            "replans": list(self.replans),
            "verdict": trace.verdict,
        }

    def _last(self) -> tuple[Solution, Trace]:
        if self.solution is None or self.trace is None:
            raise InputError("nothing was called yet: call the pipeline first")
        return self.solution, self.trace

    # -- interception of calls

    def _install(self) -> None:
        """Intercept calls of the pipelines, and calls into components from outside a pipeline."""
        self._interceptor = CallInterceptor(
            self._modules,
            self._device.torch_device,
            handle_call=self._on_component_call,
            casts=HostCasts(),
        )
        self._interceptor.__enter__()
        self._proxy = PipelineProxy(
            self.pipe,
            self._entries,
            self._reported_device,
            self._on_call,
            self._on_change,
            graphrun=property(lambda _: self),
        )

    def _reported_device(self) -> torch.device:
        return self._device.torch_device if not self._at_rest else torch.device("cpu")

    def _on_call(
        self, path: str, name: str, method: Callable[..., Any], owner: Any, args: Any, kwargs: Any
    ) -> Any:
        """Plan and run a call of method ``name`` of ``owner``: the pipeline, or a pipeline inside
        it at the attribute ``path``."""
        if self._in_call():
            return method(owner, *args, **kwargs)

        def find(meta_pipeline: MetaPipeline) -> Callable[..., Any]:
            meta_owner = pipelines_in(meta_pipeline.pipe)[path]
            return meta_owner if name == "__call__" else getattr(meta_owner, name)  # type: ignore[no-any-return]

        label = ".".join(filter(None, (path, name.strip("_"))))
        return self._call(
            AttachedCall(label, functools.partial(method, owner), find, args, kwargs, self.autocast)
        )

    def _on_change(
        self, path: str, name: str, method: Callable[..., Any], owner: Any, args: Any, kwargs: Any
    ) -> Any:
        """Run a method that changes or saves the pipeline, with all weights on the CPU."""
        if name == "to":
            dtype = dtype_of_to(args, kwargs, self._device.torch_device)
            if dtype is None:
                return owner
            args, kwargs = (dtype,), {}
        if self._in_call():
            if changes_weights(method):
                refuse_change(name)
            return method(owner, *args, **kwargs)
        with self._exclusive(at_rest=True):
            self._host.release()
            if name == "save_pretrained":
                # safetensors refuses tensors that share memory, as arena tensors do
                self._host.restore()
            return method(owner, *args, **kwargs)

    def _on_component_call(
        self, component: str, method: str, proceed: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Plan and run a call into a component from outside the pipeline's methods."""

        def find(meta_pipeline: MetaPipeline) -> Callable[..., Any]:
            return entry_of(meta_pipeline.meta_modules[component], method)

        return self._call(
            AttachedCall(f"{component}.{method}", proceed, find, args, kwargs, self.autocast)
        )

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of the device's active autocast, or None."""
        return dtype_on(self._device.torch_device.type)

    # -- one call

    def _call(self, call: AttachedCall) -> Any:
        with self._exclusive():
            return self._run(call)

    def _in_call(self) -> bool:
        """Return whether this thread is inside a call. Raises InputError in a forked process."""
        self._refuse_forked()
        return self._thread == threading.get_ident()

    def _refuse_forked(self) -> None:
        refuse_forked(self._process, "the attached pipeline", "load and attach a pipeline")

    @contextmanager
    def _exclusive(self, at_rest: bool = False) -> Iterator[None]:
        """Exclude other threads, and do not intercept calls into the components.

        ``at_rest``: the pipeline reports the CPU as its device. A `detach` or `release` requested
        inside the context is done on exit.
        """
        self._refuse_forked()
        with self._lock:
            self._refresh_components()
            interceptors = remove_interceptors(self._modules)
            self._thread, self._at_rest = threading.get_ident(), at_rest
            try:
                yield
            finally:
                self._thread, self._at_rest = 0, False
                reinstall(interceptors)
                if self._release_pending:
                    self._release_pending = False
                    self._host.release()
                if self._detach_pending:
                    self.detach()

    def _run(self, call: AttachedCall) -> Any:
        """Run ``call`` by its plan, made now if there is none; return its result. Errors empty the
        device."""
        try:
            return self._run_planned(call)
        except BaseException:
            self._host.release()
            raise

    def _run_planned(self, call: AttachedCall) -> Any:
        host, device = self._host, self._device
        owned_modules = attributes_of(self._modules)
        host.begin(has_changed=self._detect_changes(owned_modules))
        key, planned_call, is_new = self._lay_out_plan(call)
        solution = self._continue_from_device(planned_call.solution)
        component_names = {numbers.name for numbers in solution.chosen.components}
        planning = CallPlanning(
            own_class(self.pipe).__name__,
            device,
            host,
            lambda: self._meta_pipeline,
            lambda: self.autocast,
            functools.partial(self.problem, single_run=True),
            self.solve,
            self.make_room,
            self.say,
        )
        replan = CallReplan(planning, planned_call.call_signatures, key.reserve_bytes)
        leftovers = Leftovers(self.pipe, self._modules, owned_modules, device)

        def work() -> dict[str, Any]:
            was_enabled = torch.is_autocast_cache_enabled()
            # the cache keeps casts of weights on the device
            torch.set_autocast_cache_enabled(False)
            try:
                return {"result": call.proceed(*call.args, **call.kwargs)}
            finally:
                torch.set_autocast_cache_enabled(was_enabled)
                leftovers.clear()
                host.refresh_copies()

        def output_bytes(outputs: Mapping[str, Any]) -> int:
            return device_bytes(outputs, device, excluded=(call.args, call.kwargs))

        self.make_room(solution, component_names)
        idle_weight_bytes = host.held_bytes(excluded_names=component_names)
        host.bind_loaded_blocks()
        try:
            trace = follow(
                solution,
                host,
                device,
                work,
                self._hook,
                replan=replan,
                handed_out=output_bytes,
                checked=True,
            )
        finally:
            host.bind_host_tensors(component_names)
        # settings that the call itself changed do not invalidate plans
        self._settings = settings_of(self.pipe, leftovers.owned_modules)
        if is_new and not replan.component_calls:
            # solve the next call of this kind in advance
            self._continue_from_device(planned_call.solution)
        self.solution, self.replans = solution, tuple(replan.component_calls)
        unplanned_bytes = idle_weight_bytes + (0 if device.unified else key.reserve_bytes)
        self.trace = without_caller_bytes(trace, unplanned_bytes, output_bytes(trace.outputs))
        if replan.component_calls and key.without_texts not in self._text_dependent:
            self._text_dependent.add(key.without_texts)
            del self._dry_runs[key.without_reserve]
        warn_of(self.trace.overruns)
        return trace.outputs["result"]

    def _lay_out_plan(self, call: AttachedCall) -> tuple[CallKey, PlannedCall, bool]:
        """Return the key of ``call``, its plan, and whether it was planned now.

        Lay out the weights in backing stores as that plan says. Planning and laying out may take
        memory of the process for good: on unified memory the call is then planned again without
        this memory.
        """
        is_new = False
        while True:
            reserve_bytes = self._count_caller_bytes()
            key = self._key(call, reserve_bytes)
            is_new |= key not in self._plans
            planned_call = self._plan_for(call, key, reserve_bytes)
            self._host.lay_out(planned_call.solution.chosen, self._dtype_variants())
            if not self._device.unified or self._count_caller_bytes() <= reserve_bytes:
                return key, planned_call, is_new

    def _count_caller_bytes(self) -> int:
        """Count the caller's own bytes on the device, the arguments of a call among them.

        On unified memory these are the bytes that the process took since the pipeline was attached,
        in steps of at least a 64th of the budget: not every picture that a program keeps needs
        another plan.
        """
        device = self._device
        if not isinstance(device, CpuDevice):
            return device.allocated_bytes - self._host.held_bytes()
        device.release_cached()
        context_bytes = self._hardware.context_bytes
        step_bytes = max(CONTEXT_STEP_BYTES, self._limits.budget_bytes // 64)
        grown_bytes = round_up(max(0, device.other_bytes - context_bytes), step_bytes)
        device.context_bytes = context_bytes + grown_bytes
        return grown_bytes

    def _continue_from_device(self, solution: Solution) -> Solution:
        """Return ``solution`` with a first run that starts from the blocks now on the device."""
        if not solution.plan.further_slots:
            return solution
        loaded_blocks = self._host.loaded()
        component_blocks = {
            numbers.name: loaded_blocks[numbers.name]
            for numbers in solution.chosen.components
            if numbers.name in loaded_blocks
        }
        key = solution.problem.digest, tuple(component_blocks.items())
        if key not in self._continuations:
            self._continuations[key] = continuation = continued(solution, component_blocks)
            if continuation is not solution:
                refuse_broken(continuation)
        return self._continuations[key]

    def make_room(self, solution: Solution, component_names: Collection[str]) -> None:
        """Evict weights of other plans so that the first run of ``solution`` fits."""
        slots, problem = solution.simulation.slots, solution.problem
        peak_bytes = max((report.peak_bytes for report in slots), default=0)
        page_bytes = (
            int(problem.hardware.page_scale * LARGE_PAGE_BYTES) if problem.counts_pages else 0
        )
        keeps_weights = bool(solution.plan.further_slots) and not problem.secondaries
        # Results that methods cache may stay on the device only if weights stay there too, for
        # further calls by this plan. Otherwise the argument ``page_bytes`` is None. With secondary
        # devices nothing stays either: nobody counts what is cached on each of them.
        self._host.make_room(
            peak_bytes,
            problem.effective_bytes,
            component_names,
            page_bytes=page_bytes if keeps_weights else None,
        )
        for number, secondary in enumerate(problem.secondaries, 1):
            peak_bytes = max((report.secondary_peaks[number - 1] for report in slots), default=0)
            self._host.make_room(peak_bytes, secondary.effective_bytes, component_names, number)

    def _refresh_components(self) -> None:
        """Adopt components replaced since the last call (``pipe.vae = other``)."""
        modules = merge_shared(
            components_of(self.pipe, self._named_components), self._modules.values()
        )
        if modules == self._modules:  # modules compare by identity
            return
        # names must be unique across old and new modules
        previous = {f"previous {name}": module for name, module in self._modules.items()}
        interceptors = remove_interceptors({**previous, **modules})
        try:
            self._host.replace_modules(modules)
        except InputError:
            reinstall(interceptors)
            raise
        self._modules = modules
        self._proxy.remove()
        self._reinstall_others(interceptors)
        self._install()

    def _reinstall_others(self, interceptors: list[CallInterceptor]) -> None:
        reinstall([other for other in interceptors if other is not self._interceptor])

    def _detect_changes(self, owned_modules: list[Owned]) -> bool:
        """Return whether the pipeline changed since the last call; if so, drop all its plans.
        Examples: VAE tiling, a LoRA, another scheduler."""
        state = state_of(self.pipe, owned_modules)
        if self._limits.secondaries:
            state.append(self._host.copyable())
        settings = settings_of(self.pipe, owned_modules)
        has_changed = (state, settings) != (self._state, self._settings)
        if self._host.find_mapped():
            has_changed = True
            self._say_unmapped()
        if has_changed:
            self._state, self._settings = self._stored_state = state, settings
            self._forget_calls()
        return has_changed

    def _say_unmapped(self) -> None:
        """Say which components stay in memory instead of being read from files."""
        if text := self._host.unmapped_text():
            self.say(f"{own_class(self.pipe).__name__}: {text}")

    def _forget_calls(self) -> None:
        vars(self).pop("_meta_pipeline", None)
        for cache in (self._dry_runs, self._plans, self._solutions, self._continuations):
            cache.clear()

    def _dtype_variants(self) -> Mapping[str, DtypeVariant]:
        """Return by name the original dtype variants and those seen in dry runs."""
        return self._meta_pipeline.dtype_variants.variants

    def _key(self, call: AttachedCall, reserve_bytes: int) -> CallKey:
        # tensors that calls keep in the pipeline; for other objects, `settings_of` has them
        kept_tensors = kept_signatures(self.pipe) if is_pipeline(self.pipe) else ()
        arguments = str(call.autocast), signature_of((call.args, call.kwargs)), kept_tensors
        key = CallKey(call.name, arguments, (), reserve_bytes)
        if key.without_texts not in self._text_dependent:
            return key
        return key._replace(texts=signature_of((call.args, call.kwargs), texts=True))

    def _plan_for(self, call: AttachedCall, key: CallKey, reserve_bytes: int) -> PlannedCall:
        """Return the plan for ``call``: of an equal key, else of an equal problem, else a new one.

        A dry run that traces calls of new kinds changes the numbers of components: then a plan of
        an equal key is not used any more.
        """
        meta_pipeline = self._meta_pipeline
        if key.without_reserve not in self._dry_runs:
            dry_run_and_signatures = self._load_dry_run(key) or self._dry_run(call, key)
            # the dry run may have found that text lengths matter: then the key includes texts
            key = self._key(call, reserve_bytes)
            self._dry_runs[key.without_reserve] = dry_run_and_signatures
            self._plans.pop(key, None)
        planned_call = self._plans.get(key)
        if planned_call is None or planned_call.traced_calls != meta_pipeline.prober.traces:
            dry_run, call_signatures = self._dry_runs[key.without_reserve]
            problem = self.problem(
                dry_run.recording, reserve_bytes, stored_profiles=dry_run.profiles
            )
            solution = self._solutions.get(problem.digest) or self.solve(problem)
            refuse_broken(solution)  # once for all calls
            self._solutions[problem.digest] = solution
            planned_call = self._plans[key] = PlannedCall(
                call_signatures, solution, meta_pipeline.prober.traces
            )
        return planned_call

    def _dry_run(self, call: AttachedCall, key: CallKey) -> tuple[DryRun, frozenset[str]]:
        """Return the dry run of ``call`` and the signatures of its calls into components.

        The returned dry run has no profiles: `problem` takes them from the meta pipeline, which
        collects them over all its dry runs. The stored dry run has the profiles so far.
        """
        kind = own_class(self.pipe).__name__
        self.say(
            f"{kind} {call.name}: planning, once for calls of this kind (a dry run, then the plan)"
        )
        meta_pipeline = self._meta_pipeline
        recording, call_signatures = (
            meta_pipeline.probe(call),
            frozenset(meta_pipeline.prober.call_signatures),
        )
        if meta_pipeline.prober.text_lengths.matter:
            self._text_dependent.add(key.without_texts)
            key = self._key(call, key.reserve_bytes)
        if self._store is not None:
            data = {
                "run": DryRun(recording, meta_pipeline.profiles).to_json(),
                "entries": sorted(call_signatures),
                "variants": [variant.to_json() for variant in self._dtype_variants().values()],
            }
            self._store.keep(packages_of(self.pipe, self._modules), self._store_content(key), data)
        return DryRun(recording, {}), call_signatures

    def _load_dry_run(self, key: CallKey) -> tuple[DryRun, frozenset[str]] | None:
        """Return the stored dry run, with its profiles, of an equal call of an equal pipeline."""
        if self._store is None or not (
            data := self._store.find(
                packages_of(self.pipe, self._modules), self._store_content(key)
            )
        ):
            return None
        dry_run = DryRun.from_json(data["run"])
        dry_run.recording.keeps_tensors = True
        for variant in data["variants"]:
            self._meta_pipeline.prober.register(DtypeVariant.from_json(variant))
        return dry_run, frozenset(data["entries"])

    def _store_content(self, key: CallKey) -> list[str]:
        return [repr(self._stored_state), repr(key.without_reserve)]

    def problem(
        self,
        recording: Recording,
        reserve_bytes: int,
        *,
        single_run: bool = False,
        stored_profiles: Mapping[str, ComponentProfile] | None = None,
    ) -> Problem:
        """Return the problem for the call in ``recording``.

        ``reserve_bytes``: the caller's own bytes on the device. ``single_run``: plan one run that
        leaves nothing on the device. ``stored_profiles``: of a recording from the store. A
        directive for a component applies to all its dtype variants in the call.
        """
        variants = self._dtype_variants()
        component_names = dict.fromkeys(call.component for _, call in recording.entries())
        keep, exclude, pin = (
            tuple(name for name in component_names if variants[name].component in names)
            for names in (self._demands.keep, self._demands.exclude, self._demands.pin)
        )
        demands = Directives(keep, exclude, self._demands.reserve_bytes + reserve_bytes, pin)
        limits = (
            replace(self._limits, runs=1) if single_run or not component_names else self._limits
        )
        return self._meta_pipeline.problem(
            recording,
            demands,
            self._hardware,
            limits,
            stored_profiles or None,
            self._host.mapped_tensors,
            self._host.copyable(map(variants.__getitem__, component_names)),
        )

    def solve(self, problem: Problem) -> Solution:
        """Return the plan for ``problem``. A call that reaches no component has no phases; its plan
        is the end slot alone."""
        if problem.phases:
            return self._store.solve(problem) if self._store is not None else solve(problem)
        return solution_of(problem, Plan(problem.digest, (Slot("", "end", 0, ()),)))
