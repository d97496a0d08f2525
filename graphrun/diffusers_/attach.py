"""Attaches graphrun to a live pipeline, which is one whose components have weights. Every call of
it is executed by a plan.

This module decides when a plan is made, and which plan a call uses. The executor
(`graphrun.runtime`) carries the plan out.

    pipe(...)            is there a plan for this call (see `CallKey`)?
                            | yes     | no: dry run of the call on the meta pipeline -> problem ->
                            solve -> keep the plan v         v
    executor.follow      the pipeline's own code runs. Each call into a component (an entry) opens
    the next slots of the plan.
                         If the plan does not have the entry, a new plan replaces it
                            v
                         the device holds what it held before the call, the weights that the plan
                         keeps, and the results, which the pipeline's method returns

A call is planned as the steady one of a session: weights that the plan keeps are on the device when
it begins, and stay. Where another call left other blocks there, `graphrun.solve.transitions` makes
the plan's run from what is found.

Terms: a *dry run* executes a whole call of the pipeline without weights, and gives a `Recording`.
In it, each kind of entry is
*traced* once, which gives the numbers of that entry. A `Trace` of the executor is something else:
the measurements of a run."""

from __future__ import annotations

import functools
import html
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from graphrun.diffusers_.call_arguments import signature_of
from graphrun.diffusers_.dry_call import Call, MetaPipeline
from graphrun.diffusers_.live import (
    State,
    components_of,
    graph_of,
    is_pipeline,
    kept_by,
    merge_shared,
    own_class,
    packages_of,
    pipelines_in,
    settings_of,
    state_of,
)
from graphrun.diffusers_.proxy import PipelineProxy, dtype_of_to, remove_interceptors
from graphrun.diffusers_.residence import Leftovers, LiveHost, device_bytes
from graphrun.errors import InputError
from graphrun.graph.graph import Directives
from graphrun.model.allocator import LARGE_PAGE_BYTES
from graphrun.model.plan import Plan, Slot
from graphrun.model.problem import Hardware, Problem
from graphrun.model.solution import Solution
from graphrun.modules.dtype_variants import AtRest, DtypeVariant
from graphrun.modules.interceptor import CallInterceptor, changes_weights, entry_of, refuse_change
from graphrun.modules.memos import Owned, owned
from graphrun.profile import hardware as known_hardware
from graphrun.profile.problems import Limits
from graphrun.profile.recording import ComponentProfile, DryRun, Event, Recording, StageEnd
from graphrun.report.call_screen import call_screen
from graphrun.report.screen import measured_screen, plan_screen, verdict_line
from graphrun.report.summary import summarize
from graphrun.runtime.devices.device import Device, device_lock
from graphrun.runtime.executor import follow, refuse_broken
from graphrun.sim.casts import dtype_on
from graphrun.solve.solve import solve
from graphrun.solve.transitions import continued
from graphrun.systems import refuse_forked
from graphrun.trace import Trace, warn_of
from graphrun.units import show_size
from graphrun.verify.solution import solution_of

_LOG = logging.getLogger(__name__)


class CallStore(Protocol):
    """Dry runs and plans on disk (`graphrun.store.CallStore`)."""

    def solve(self, problem: Problem) -> Solution:
        """The plan for ``problem``, stored or solved."""

    def find(self, packages: Iterable[str], content: Any) -> Any:
        """What was kept for equal ``content``; None where nothing was."""

    def keep(self, packages: Iterable[str], content: Any, data: Any) -> None:
        """Stores ``data`` for a call described by ``content`` of a pipeline whose classes are from
        ``packages``."""


class CallKey(NamedTuple):
    """Calls of the pipeline with equal keys share a plan.

    ``name``: what is called. ``arguments``: its autocast, the signature of its arguments
    (`signature_of`), without the content of texts, and the tensors that earlier calls keep for it
    (`kept_by`). ``texts``: the arguments' signature with texts, for calls whose entries were found
    to depend on them; else empty. ``reserve_bytes``: bytes that the caller has on the device."""

    name: str
    arguments: Any
    texts: Any
    reserve_bytes: int

    @property
    def without_texts(self) -> tuple[Any, ...]:
        """Equal for calls that differ in their texts or in the caller's bytes only."""
        return self.name, self.arguments

    @property
    def without_reserve(self) -> tuple[Any, ...]:
        """Equal for calls that differ in the caller's bytes only: they share a dry run."""
        return self.name, self.arguments, self.texts


@dataclass(slots=True)
class PlannedCall:
    """The plan for calls with one `CallKey`.

    ``entry_signatures``: signatures of the entries in the call's dry run. ``traced_entries``: how
    many entries had been traced, for this call and others, when the plan was made. A further trace
    may change the numbers of a component, so the plan is then made again."""

    entry_signatures: frozenset[str]
    solution: Solution
    traced_entries: int


class Attachment:
    """What `graphrun.attach` returns; also available as ``pipe.graphrun``. A context manager that
    detaches on exit.

    ``hardware``, ``limits``, ``demands``: what calls are planned for; ``limits.runs`` above 1:
    weights stay on the device between calls. ``budget``: an object that attachments share whose
    weights are within one budget, which is that of ``limits``. ``tell`` is called with one line
    where a call is planned; the line is logged too. ``store``: dry runs and plans on disk.
    ``components``, ``entries``: of an object that is no pipeline of diffusers, its components and
    the methods to plan.

    Attributes of the last call: ``solution`` is its plan. ``trace`` is what was measured; its peaks
    do not count the bytes that the caller held on the device. ``replans`` lists the entries
    (``component.entry``) that the plan did not have, and that were planned when they came.
    """

    def __init__(
        self,
        pipe: Any,
        device: Device,
        hardware: Hardware,
        limits: Limits,
        demands: Directives,
        budget: object = None,
        tell: Callable[[str], None] | None = None,
        store: CallStore | None = None,
        components: Mapping[str, torch.nn.Module] | None = None,
        entries: Collection[str] = (),
    ) -> None:
        self.pipe = pipe
        self._named, self._entries = components, tuple(entries)
        self.solution: Solution | None = None
        self.trace: Trace | None = None
        self.replans: tuple[str, ...] = ()
        self._device, self._hardware, self._demands, self._tell = device, hardware, demands, tell
        self._store = store
        # _thread: the thread that is inside a call; 0: none
        self._lock, self._thread = (
            device_lock(device.name),
            0,
        )
        self._process = os.getpid()
        # whether a method runs that changes the pipeline; all weights are on the CPU then
        self._at_rest = False
        self._detached = self._detach_pending = self._release_pending = False
        self._state: State = []  # the pipeline's `state_of` at the last call
        self._settings: State = []  # `settings_of` after the last call
        # `state_of` and `settings_of` when the pipeline changed last
        self._stored_state: tuple[State, State] = (
            [],
            [],
        )
        self._dry_runs: dict[
            Any, tuple[DryRun, frozenset[str]]
        ] = {}  # `CallKey.without_reserve` -> dry run, entry signatures
        self._plans: dict[CallKey, PlannedCall] = {}
        self._solutions: dict[str, Solution] = {}  # by digest of the problem
        self._continued: dict[
            Any, Solution
        ] = {}  # by digest of the problem, and what a run found on the device
        # `CallKey.without_texts` of calls that needed a new plan: each text is planned again
        self._text_dependent: set[Any] = set()
        self._modules = merge_shared(components_of(pipe, components))
        # raises InputError
        graph = graph_of(pipe, self._modules).directed(
            demands.keep, demands.exclude, pin=demands.pin
        )
        self._limits = replace(limits, allow=graph.allowed(limits.allow))
        # those of other attached pipelines that share components
        removed = remove_interceptors(self._modules)
        try:
            self._host = LiveHost(self._modules, device, budget or self)
        finally:
            _reinstall(removed)
        self._install()

    # -- public methods

    def detach(self) -> None:
        """Restores the pipeline: its own class, weights in ordinary CPU memory, nothing on the
        device.

        Called inside a pipeline call (in a callback), it takes effect when that call ends, whether
        it returns or raises. Another thread waits for the call to end. Raises InputError, and
        changes nothing, while a call of another attached pipeline uses components of this one. In a
        forked process it does nothing.
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
        """Frees what the pipeline's calls left on the device; the next call loads it again.

        Called inside a call, it takes effect when that ends. Call it after writing to some places
        of a weight through ``tensor.data``, which is not noticed for certain.
        """
        self._refuse_forked()
        with self._lock:
            if self._in_call():
                self._release_pending = True
            else:
                self._host.release()

    @property
    def held_bytes(self) -> int:
        """Bytes on the device now of the pipeline's weights, and of tables that its modules cached
        (Qwen-Image)."""
        return (
            sum(residency.loaded_bytes() for residency in self._host.residencies.values())
            + self._host.cached_bytes
        )

    def _uninstall(self) -> None:
        removed = remove_interceptors(self._modules)
        self._proxy.remove()
        self._host.restore()
        self._reinstall_others(removed)
        self._forget_calls()

    @functools.cached_property
    def _meta_pipeline(self) -> MetaPipeline:
        """The pipeline's copy for dry runs, in its present state."""
        return MetaPipeline(self.pipe, self._modules)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        last = f"last {self.trace!r}" if self.trace is not None else "not called yet"
        held, budget = show_size(self.held_bytes), show_size(self._limits.budget_bytes)
        return f"<Attachment of {own_class(self.pipe).__name__} within {budget} on {self._device.name}: holds {held}, {last}>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.report() if self.trace is not None else repr(self))}</pre>"

    def say(self, line: str) -> None:
        """Logs ``line`` and calls ``tell`` with it."""
        _LOG.info(line)
        if self._tell is not None:
            self._tell(line)

    def report(self, *, full: bool = False) -> str:
        """A text table of the last call, planned beside measured, with one row per phase. ``full``:
        the plan and one row per slot.

        Raises InputError before the first call.
        """
        solution, trace = self._last()
        if not solution.problem.phases:
            return f"{solution.problem.graph}: the call entered no component"
        if self.replans:
            again = f"the call left this plan, and was planned again at {', '.join(self.replans)}"
            return f"{plan_screen(solution)}\n\n{again}\n{verdict_line(trace)}"
        return (
            f"{plan_screen(solution)}\n{measured_screen(solution, trace, [])}"
            if full
            else call_screen(solution, trace)
        )

    def summary(self) -> dict[str, Any]:
        """The last call as JSON-ready data. Raises InputError as `report`.

        ``replans`` lists the entries that were planned again; ``verdict`` says whether the call
        matched its plans.
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
        """Starts to intercept calls of the pipelines (`PipelineProxy`), and calls into components
        from outside the pipelines."""
        self._interceptor = CallInterceptor(
            self._modules,
            self._device.torch_device,
            around=self._on_component_entry,
            casts=AtRest(),
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
        """Plans and runs a call of method ``name`` of ``owner``: the pipeline, or one inside it at
        the attribute ``path``."""
        if self._in_call():
            return method(owner, *args, **kwargs)

        def find(meta_pipeline: MetaPipeline) -> Callable[..., Any]:
            meta_owner = pipelines_in(meta_pipeline.pipe)[path]
            return meta_owner if name == "__call__" else getattr(meta_owner, name)  # type: ignore[no-any-return]

        label = ".".join(filter(None, (path, name.strip("_"))))
        return self._call(
            Call(label, functools.partial(method, owner), find, args, kwargs, self.autocast)
        )

    def _on_change(
        self, path: str, name: str, method: Callable[..., Any], owner: Any, args: Any, kwargs: Any
    ) -> Any:
        """Runs a method that loads, saves, casts or changes settings. All weights are on the CPU
        meanwhile, as always between calls."""
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
                # safetensors refuses tensors that share memory, as those of a component in an arena
                # do
                self._host.restore()
            return method(owner, *args, **kwargs)

    def _on_component_entry(
        self, component: str, entry: str, proceed: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Plans and runs a call into a component that does not come from a method of the
        pipeline."""

        def find(meta_pipeline: MetaPipeline) -> Callable[..., Any]:
            return entry_of(meta_pipeline.meta_modules[component], entry)

        return self._call(Call(f"{component}.{entry}", proceed, find, args, kwargs, self.autocast))

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of the autocast that is on for the device; None: none."""
        return dtype_on(self._device.torch_device.type)

    # -- one call

    def _call(self, call: Call) -> Any:
        with self._exclusive():
            return self._run(call)

    def _in_call(self) -> bool:
        """Whether this thread is inside a call of the pipeline. Raises InputError in a forked
        process."""
        self._refuse_forked()
        return self._thread == threading.get_ident()

    def _refuse_forked(self) -> None:
        refuse_forked(self._process, "the attached pipeline", "load and attach a pipeline")

    @contextmanager
    def _exclusive(self, at_rest: bool = False) -> Iterator[None]:
        """Inside this context no other thread calls the pipeline, and no attached pipeline
        intercepts calls into the components.

        ``at_rest``: inside, the pipeline reports the CPU as its device. A `detach` that was
        requested inside is done on exit.
        """
        self._refuse_forked()
        with self._lock:
            self._refresh_components()
            removed = remove_interceptors(self._modules)
            self._thread, self._at_rest = threading.get_ident(), at_rest
            try:
                yield
            finally:
                self._thread, self._at_rest = 0, False
                _reinstall(removed)
                if self._release_pending:
                    self._release_pending = False
                    self._host.release()
                if self._detach_pending:
                    self.detach()

    def _run(self, call: Call) -> Any:
        """Runs ``call`` by its plan, which is made first if there is none, and returns its result.
        An error empties the device."""
        try:
            return self._run_planned(call)
        except BaseException:
            self._host.release()
            raise

    def _run_planned(self, call: Call) -> Any:
        host, device, torch_device = self._host, self._device, self._device.torch_device
        modules = owned(self._modules)
        host.begin(changed=self._detect_changes(modules))
        # the caller's own tensors, arguments among them
        reserve_bytes = device.allocated_bytes - host.held_bytes()
        key = self._key(call, reserve_bytes)
        begins = key not in self._plans
        planned = self._plan_for(call, key, reserve_bytes)
        host.lay_out(planned.solution.chosen, self._dtype_variants())
        solution = self._continued_from_here(planned.solution)
        used = {numbers.name for numbers in solution.problem.components}
        replan = _Replan(self, planned.entry_signatures, reserve_bytes)

        leftovers = Leftovers(self.pipe, self._modules, modules, torch_device)

        def work() -> dict[str, Any]:
            caches = torch.is_autocast_cache_enabled()
            torch.set_autocast_cache_enabled(False)  # it keeps casts of weights on the device
            try:
                return {"result": call.proceed(*call.args, **call.kwargs)}
            finally:
                torch.set_autocast_cache_enabled(caches)
                leftovers.clear()

        def handed_out(outputs: Mapping[str, Any]) -> int:
            return device_bytes(outputs, torch_device, besides=(call.args, call.kwargs))

        self.make_room(solution, used)
        beside_bytes = host.held_bytes(besides=used)
        host.wake()
        try:
            trace = follow(
                solution, host, device, work, replan=replan, handed_out=handed_out, checked=True
            )
        finally:
            host.rest(used)
        # what the call itself changed is no change
        self._settings = settings_of(self.pipe, leftovers.found)
        if begins and not replan.entries:
            # for the next call of this kind, which then plans nothing
            self._continued_from_here(planned.solution)
        self.solution, self.replans = solution, tuple(replan.entries)
        self.trace = _without_caller_bytes(
            trace, reserve_bytes + beside_bytes, handed_out(trace.outputs)
        )
        if replan.entries and key.without_texts not in self._text_dependent:
            self._text_dependent.add(key.without_texts)
            del self._dry_runs[key.without_reserve]
        warn_of(self.trace.overruns)
        return trace.outputs["result"]

    def _continued_from_here(self, solution: Solution) -> Solution:
        """``solution`` with a first run that begins with what is on the device."""
        if not solution.plan.again:
            return solution
        found = self._host.loaded()
        own = {
            numbers.name: found[numbers.name]
            for numbers in solution.problem.components
            if numbers.name in found
        }
        key = solution.problem.digest, tuple(own.items())
        if key not in self._continued:
            self._continued[key] = found_there = continued(solution, own)
            if found_there is not solution:
                refuse_broken(found_there)
        return self._continued[key]

    def make_room(self, solution: Solution, used: Collection[str]) -> None:
        """Evicts weights of other plans so that the first run of ``solution``, which uses the
        components ``used``, fits."""
        slots, problem = solution.simulation.slots, solution.problem
        peak_bytes = max((report.peak_bytes for report in slots), default=0)
        page_bytes = (
            int(problem.hardware.page_scale * LARGE_PAGE_BYTES) if problem.counts_pages else 0
        )
        keeps = bool(solution.plan.again) and not problem.secondaries
        self._host.make_room(
            peak_bytes, problem.effective_bytes, used, page_bytes=page_bytes if keeps else None
        )
        for number, secondary in enumerate(problem.secondaries, 1):
            peak_bytes = max((report.secondary_peaks[number - 1] for report in slots), default=0)
            self._host.make_room(peak_bytes, secondary.effective_bytes, used, number)

    def _refresh_components(self) -> None:
        """Takes over components that were replaced in the pipeline since the last call (``pipe.vae
        = other``)."""
        modules = merge_shared(components_of(self.pipe, self._named), self._modules.values())
        if {name: id(module) for name, module in modules.items()} == {
            name: id(module) for name, module in self._modules.items()
        }:
            return
        # a name of its own for each module
        previous = {f"previous {name}": module for name, module in self._modules.items()}
        removed = remove_interceptors({**previous, **modules})
        try:
            self._host.replace_modules(modules)
        except InputError:
            _reinstall(removed)
            raise
        self._modules = modules
        self._proxy.remove()
        self._reinstall_others(removed)
        self._install()

    def _reinstall_others(self, removed: list[CallInterceptor]) -> None:
        _reinstall([interceptor for interceptor in removed if interceptor is not self._interceptor])

    def _detect_changes(self, modules: list[Owned]) -> bool:
        """Whether the pipeline, with ``modules``, changed since the last call (VAE tiling, a LoRA,
        another scheduler). If so, drops all its plans."""
        state, settings = state_of(self.pipe, modules), settings_of(self.pipe, modules)
        changed = (state, settings) != (self._state, self._settings)
        if changed:
            self._state, self._settings = self._stored_state = state, settings
            self._forget_calls()
        return changed

    def _forget_calls(self) -> None:
        vars(self).pop("_meta_pipeline", None)
        self._dry_runs.clear()
        self._plans.clear()
        self._solutions.clear()
        self._continued.clear()

    def _dtype_variants(self) -> Mapping[str, DtypeVariant]:
        """By name: the dtype variants that components have had in dry runs, the original ones
        included."""
        return self._meta_pipeline.dtype_variants.known

    def _key(self, call: Call, reserve_bytes: int) -> CallKey:
        # of another program `settings_of` has it
        kept = kept_by(self.pipe) if is_pipeline(self.pipe) else ()
        arguments = str(call.autocast), signature_of((call.args, call.kwargs)), kept
        key = CallKey(call.name, arguments, (), reserve_bytes)
        if key.without_texts not in self._text_dependent:
            return key
        return key._replace(texts=signature_of((call.args, call.kwargs), texts=True))

    def _plan_for(self, call: Call, key: CallKey, reserve_bytes: int) -> PlannedCall:
        """The plan for ``call``: a dry run and the solver give it, unless an earlier call with an
        equal key had one that still holds."""
        meta_pipeline = self._meta_pipeline
        if key.without_reserve not in self._dry_runs:
            made = self._stored_dry_run(key) or self._dry_run(call, key)
            # with its texts, where the dry run found that their lengths matter
            key = self._key(call, reserve_bytes)
            self._dry_runs[key.without_reserve] = made
            self._plans.pop(key, None)
        found = self._plans.get(key)
        if found is None or found.traced_entries != meta_pipeline.prober.traces:
            dry_run, entry_signatures = self._dry_runs[key.without_reserve]
            problem = self.problem(dry_run.recording, reserve_bytes, stored=dry_run.profiles)
            solution = self._solutions.get(problem.digest) or self.solve(problem)
            refuse_broken(solution)  # once for all calls
            self._solutions[problem.digest] = solution
            found = self._plans[key] = PlannedCall(
                entry_signatures, solution, meta_pipeline.prober.traces
            )
        return found

    def _dry_run(self, call: Call, key: CallKey) -> tuple[DryRun, frozenset[str]]:
        """The dry run of ``call``, and the signatures of its entries. Without profiles, which are
        taken from all dry runs."""
        kind = own_class(self.pipe).__name__
        self.say(
            f"{kind} {call.name}: planning, once for calls of this kind (a dry run, then the plan)"
        )
        meta_pipeline = self._meta_pipeline
        recording, entries = (
            meta_pipeline.probe(call),
            frozenset(meta_pipeline.prober.entry_signatures),
        )
        if meta_pipeline.prober.text_lengths.matter:
            self._text_dependent.add(key.without_texts)
            key = self._key(call, key.reserve_bytes)
        if self._store is not None:
            data = {
                "run": DryRun(recording, meta_pipeline.profiles).to_json(),
                "entries": sorted(entries),
                "variants": [variant.to_json() for variant in self._dtype_variants().values()],
            }
            self._store.keep(packages_of(self.pipe, self._modules), self._stored_under(key), data)
        return DryRun(recording, {}), entries

    def _stored_dry_run(self, key: CallKey) -> tuple[DryRun, frozenset[str]] | None:
        """The dry run of an equal call of an equal pipeline from the store, with the profiles that
        it had there."""
        if self._store is None or not (
            data := self._store.find(packages_of(self.pipe, self._modules), self._stored_under(key))
        ):
            return None
        dry_run = DryRun.from_json(data["run"])
        dry_run.recording.keeps = True
        for variant in data["variants"]:
            self._meta_pipeline.prober.register(DtypeVariant.from_json(variant))
        return dry_run, frozenset(data["entries"])

    def _stored_under(self, key: CallKey) -> list[str]:
        return [repr(self._stored_state), repr(key.without_reserve)]

    def problem(
        self,
        recording: Recording,
        reserve_bytes: int,
        *,
        once: bool = False,
        stored: Mapping[str, ComponentProfile] | None = None,
    ) -> Problem:
        """The problem for the call in ``recording``, with ``reserve_bytes`` of the device taken by
        the caller's tensors. ``once``: for one run, which leaves nothing on the device. ``stored``:
        profiles of the components, where it was not traced here.

        A directive for a component holds for each of its dtype variants that the call enters.
        """
        variants = self._dtype_variants()
        entered = dict.fromkeys(call.component for _, call in recording.entries())
        keep, exclude, pin = (
            tuple(name for name in entered if variants[name].component in names)
            for names in (self._demands.keep, self._demands.exclude, self._demands.pin)
        )
        demands = Directives(keep, exclude, self._demands.reserve_bytes + reserve_bytes, pin)
        limits = replace(self._limits, runs=1) if once or not entered else self._limits
        return self._meta_pipeline.problem(
            recording, demands, self._hardware, limits, stored or None
        )

    def solve(self, problem: Problem) -> Solution:
        """The plan for ``problem``. A call that enters no component has no phases; its plan is the
        end slot alone."""
        if problem.phases:
            return self._store.solve(problem) if self._store is not None else solve(problem)
        return solution_of(problem, Plan(problem.digest, (Slot("", "end", 0, ()),)))


def _reinstall(removed: list[CallInterceptor]) -> None:
    """Undoes `remove_interceptors`, which returns the last entered first."""
    for interceptor in reversed(removed):
        interceptor.__enter__()


class _Replan:
    """Implements the executor's `Replan`: makes a plan for an entry that the current plan does not
    have.

    ``entry_signatures``: signatures of the entries that the current plan has. ``entries``: those
    that were planned, as ``component.entry``.
    """

    def __init__(
        self, attachment: Attachment, entry_signatures: frozenset[str], reserve_bytes: int
    ) -> None:
        self.entries: list[str] = []
        self._attachment, self._entry_signatures, self._reserve_bytes = (
            attachment,
            entry_signatures,
            reserve_bytes,
        )

    def expects(
        self, component: str, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether the current plan has an entry with this signature, or one with another text that
        computes the same."""
        if self._signature(component, entry, args, kwargs) in self._entry_signatures:
            return True
        attachment, dtype_variants = self._attachment, self._attachment._host.dtype_variants
        assert dtype_variants is not None
        known = dtype_variants.known[component]
        return attachment._meta_pipeline.serves(
            self._entry_signatures, known, entry, args, kwargs, attachment.autocast
        )

    def plan_from(
        self,
        component: str,
        entry: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        live_bytes: int,
    ) -> Solution:
        """The plan for this entry and for later ones with the same signature. ``live_bytes``: bytes
        allocated on the device."""
        attachment, dtype_variants = self._attachment, self._attachment._host.dtype_variants
        assert dtype_variants is not None
        attachment.say(
            f"{own_class(attachment.pipe).__name__}: {component}.{entry} is not in the plan of the call: planning it"
        )
        known, autocast = dtype_variants.known[component], attachment.autocast
        call, returned = attachment._meta_pipeline.trace(known, entry, args, kwargs, autocast)
        input_bytes = max(0, live_bytes - self._reserve_bytes - attachment._host.held_bytes())
        # One stage in which the component is entered twice, so that the plan has a first and a
        # steady slot: the latter is for later entries. 1, 2 and 3 are the keys of what is live
        # before, and of what the two calls return.
        recording = Recording(
            [
                Event(1, input_bytes),
                call,
                Event(2, returned.nbytes),
                call,
                Event(3, returned.nbytes),
                StageEnd(entry),
            ],
            keeps=True,
        )
        solution = attachment.solve(attachment.problem(recording, self._reserve_bytes, once=True))
        attachment._host.lay_out(solution.chosen, dtype_variants.known)
        attachment.make_room(solution, {numbers.name for numbers in solution.problem.components})
        self._entry_signatures = frozenset({self._signature(component, entry, args, kwargs)})
        self.entries.append(f"{component}.{entry}")
        return solution

    def _signature(
        self, component: str, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str:
        attachment = self._attachment
        device_type = attachment._device.torch_device.type
        return repr(
            attachment._meta_pipeline.prober.signature(component, entry, args, kwargs, device_type)
        )


def _without_caller_bytes(trace: Trace, held_bytes: int, output_bytes: int) -> Trace:
    """``trace`` without outputs, and with the caller's bytes subtracted from its peaks, planned and
    measured.

    These are ``held_bytes``, which the caller had on the device before the call, and in the end
    slot the outputs too.
    """
    caller_bytes = {"end": held_bytes + output_bytes}
    slots = tuple(
        replace(
            slot,
            peak_bytes=max(0, slot.peak_bytes - caller_bytes.get(slot.part, held_bytes)),
            planned_peaks=(max(0, slot.planned_peaks[0] - held_bytes), *slot.planned_peaks[1:]),
        )
        for slot in trace.slots
    )
    return replace(trace, slots=slots, outputs={})


def hardware_of(device: Any, hardware: str | Hardware | None) -> Hardware:
    """The hardware to plan for: ``hardware`` if given; else that of ``device``, which is ``"sim"``,
    ``"cuda"`` or a `Device`; else that of the GPU in this machine.

    Raises InputError where there is no CUDA device, or where ``device`` and ``hardware`` are of
    different kinds.
    """
    kind = device.name if device is not None and not isinstance(device, str) else device
    if kind not in (None, "cuda", "sim"):
        raise InputError(f"device {kind!r} is not known; it is cuda or sim")
    chosen = known_hardware.hardware(hardware) if isinstance(hardware, str) else hardware
    if chosen is None:
        chosen = known_hardware.simulated() if kind == "sim" else known_hardware.found()
    if chosen is None:
        raise InputError(
            "there is no CUDA device here to attach to; device='sim' attaches to the simulated accelerator"
        )
    if kind not in (None, chosen.device):
        raise InputError(
            f"hardware {chosen.name} is a {chosen.device} device, and device is {kind}; leave one of them out"
        )
    return chosen
