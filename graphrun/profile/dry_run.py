"""Run a graph's ops without weights and without a GPU, and record memory and compute.

The ops' own code runs on an unlimited simulated accelerator that reports every allocation.
Schedulers, tokenizers and image processors work as usual. Components are meta modules. A call into
a component is traced on the meta device once per signature of argument shapes, and returns zeros of
the right shape. So the 28 denoising steps of an image cost one traced call.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from graphrun.errors import GraphrunError
from graphrun.graph.graph import Graph
from graphrun.host_ram import host_ram_bytes
from graphrun.limits import require
from graphrun.model.allocator import ROUND_BYTES
from graphrun.modules.blocks import with_weights_of
from graphrun.modules.build import (
    build,
    build_part,
    leave_behind,
    meta_module,
    on_host,
)
from graphrun.modules.dtype_variants import DtypeVariants
from graphrun.modules.interceptor import CallInterceptor
from graphrun.modules.memos import DIFFUSERS_HOOKS, forget, lasting_tensors
from graphrun.modules.stored import holding
from graphrun.modules.trees import (
    PLAIN,
    content_of,
    found_in,
    holders_in,
    may_hold,
    modules_below,
    tensors_in,
    walk,
    weights_below,
    with_device_arguments,
)
from graphrun.ops import Stages
from graphrun.profile.block_groups import block_paths, group_blocks, group_layers, routed_lists
from graphrun.profile.fused_kernels import FusedKernels
from graphrun.profile.meta_ops import META
from graphrun.profile.moves import Moves
from graphrun.profile.quantized import block_layouts, in_every_precision, laid_out_bytes
from graphrun.profile.recorder import Recorder
from graphrun.profile.recording import (
    Call,
    ComponentProfile,
    DryRun,
    MemoryEvent,
    Recording,
    StageEnd,
)
from graphrun.profile.repeats import Repeats
from graphrun.profile.returned import Returned, capture_result
from graphrun.profile.sequence import communicates, first_of
from graphrun.profile.tables import tables_of
from graphrun.sim.active import active
from graphrun.sim.casts import dtype_on, follow_autocast
from graphrun.sim.dry import PLANNED, DryMachine, without_planned_device
from graphrun.sim.tensor import SimTensor
from graphrun.units import MIB, round_up, show_size

# Larger tensors are output images or videos. No code depends on their values, so they are not
# computed.
HOLLOW_BYTES = 64 * MIB


@on_host()
def probe(
    graph: Graph,
    inputs: Mapping[str, Any],
    options: Mapping[str, str] | None = None,
    *,
    on_built: Callable[[], object] = lambda: None,
) -> DryRun:
    """Return the dry run of ``graph`` for resolved ``inputs``.

    ``options``: stage -> name of its stage option. ``on_built``: called when all components and
    parts exist, before the graph's ops run. Raises the errors of the pipeline's own code, and
    GraphError if a component's local files are damaged or belong to another model.
    """
    meta_modules = {
        name: meta_module(component, graph.trust) for name, component in graph.components.items()
    }
    for name, component in graph.components.items():
        holding(component, meta_modules[name])
    parts = {part.name: build_part(part, graph, planning=True) for part in graph.parts.values()}
    prober = Prober(meta_modules, weights=random_weights(graph))
    on_built()
    with (
        first_of(graph.processes, meta_modules.values()),
        DryMachine() as machine,
        prober.interceptor,
    ):
        machine.listener = prober.recording
        machine.hollow_bytes = HOLLOW_BYTES

        def after_stage(stage: str, outputs: Mapping[str, Any]) -> None:
            for name, value in outputs.items():
                keys = (
                    tensor.allocation.key
                    for tensor in tensors_in(value)
                    if isinstance(tensor, SimTensor)
                )
                prober.recording.values[f"{stage}.{name}"] = frozenset(keys)
            prober.recording.items.append(StageEnd(stage))

        stages = Stages(
            graph,
            meta_modules,
            PLANNED,
            inputs,
            parts,
            meta_modules,
            options=options or {},
            planning=True,
        )
        stages.after_stage = after_stage
        stages.run()
    dry_run = DryRun(prober.recording, prober.profiles(graph))
    if graph.processes == 1:
        leave_behind(graph, meta_modules)
    return dry_run


def random_weights(graph: Graph) -> Callable[[str], nn.Module]:
    """Return a function: name -> component with random weights, without files."""

    def build_random(name: str) -> nn.Module:
        component = graph.components[name].without_checkpoints()
        return build(replace(component, source=None, gguf=""), graph)

    return build_random


class Prober:
    """Intercept calls into ``meta_modules``, trace each kind of call once, and record every call.

    Every call appends an item to ``recording``. Later dry runs with the same prober reuse the
    traces. A call whose code reads numbers cannot be traced on meta. It is computed once on the
    CPU, with the module from ``weights(component)``. Without ``weights``, without enough RAM, or
    for a module that would send its results to other processes, the error on meta is raised.

    ``host_type``: the type of torch's device for the host; "" if the planned device is the host.
    """

    host_type = "cpu"

    def __init__(
        self,
        meta_modules: Mapping[str, nn.Module],
        casts: DtypeVariants | None = None,
        weights: Callable[[str], nn.Module] | None = None,
    ) -> None:
        self.meta_modules = dict(meta_modules)
        self._weights = weights
        self.recording = Recording()
        self.interceptor = CallInterceptor(
            meta_modules, PLANNED, handle_call=self.answer, reads=_device_zeros, casts=casts
        )
        self.routed: dict[str, set[str]] = defaultdict(set)  # component -> `routed_lists`
        self._has_guessed = False  # whether the last trace got a value that depends on data
        self._traces: dict[Any, tuple[Call, Returned]] = {}
        # component -> tensors that its hooks keep between calls
        self._hook_state: dict[str, list[torch.Tensor]] = {}

    def signature(
        self,
        component: str,
        entry: str,
        args: Any,
        kwargs: Any,
        device_type: str = PLANNED.type,
        *,
        texts: bool = True,
    ) -> Any:
        """Return a key that is equal for calls that share one trace.

        They have the same component, entry point, argument shapes and autocast for ``device_type``.
        Without ``texts``, calls that differ only in texts have equal keys.
        """
        host = self.host_type if device_type != "cpu" else ""  # in tests the device may be the CPU
        return (
            component,
            entry,
            _signature(args, host, texts),
            _signature(kwargs, host, texts),
            dtype_on(device_type),
        )

    def trace(
        self,
        component: str,
        entry: str,
        proceed: Callable[..., Any],
        args: Any,
        kwargs: Any,
        hooks: Collection[Any] | None = None,
    ) -> tuple[Call, Returned]:
        """Return the traced call for this signature, and its result.

        Where hooks with a state decide what is computed (diffusers' caches), calls may differ, so
        each is traced. ``hooks``: the component's `stateful_hooks` if the caller has them.
        """
        signature = self.signature(component, entry, args, kwargs)
        if stateful_hooks(self.meta_modules[component]) if hooks is None else hooks:
            signature = *signature, len(self._traces)
        if signature not in self._traces:
            self._traces[signature] = self._trace(component, entry, proceed, args, kwargs)
        return self._traces[signature]

    def answer(
        self,
        component: str,
        entry: str,
        proceed: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Replace a call into a component: append it to the recording and return zeros on `sim`."""
        call_count = len(self.recording.items) + 1
        require("calls", call_count, f"it makes {call_count:,} calls of components or more")
        self._hook_state.pop(component, None)  # the call's own events include it
        hooks = stateful_hooks(self.meta_modules[component])
        call, result = self.trace(component, entry, proceed, args, kwargs, hooks)
        self.recording.items.append(call)
        if storages := _storages_of(hooks):
            self._hook_state[component] = [
                torch.empty(storage.nbytes(), dtype=torch.uint8, device=PLANNED)
                for storage in storages
            ]
        return result.materialize((args, kwargs), PLANNED, generates=entry == "generate")

    def begin(self, recording: Recording) -> Recording:
        """Begin another dry run, which is appended to ``recording``."""
        self.recording = recording
        self._hook_state.clear()
        return recording

    def profiles(self, graph: Graph | None = None) -> dict[str, ComponentProfile]:
        """Return the profile of every component, in each precision; groups in order of entry."""
        profiles = {}
        for name in self.meta_modules:
            with self.as_traced(name):
                profiles[name] = self._profile_of(name, graph)
        return profiles

    def as_traced(self, name: str) -> AbstractContextManager[None]:
        """Context with ``name`` as when its calls were traced; dtype variants override this."""
        return nullcontext()

    def _profile_of(self, name: str, graph: Graph | None) -> ComponentProfile:
        module = self.meta_modules[name]
        calls = [call for call, _ in self._traces.values() if call.component == name]
        groups, layers = (
            group_blocks(module, calls, self.routed[name]),
            group_layers(module, calls, self.routed[name]),
        )
        layouts = [block_layouts(module, groups)]
        profile = ComponentProfile(
            sum(p.numel() for p in module.parameters()),
            groups,
            laid_out_bytes(groups, layouts[0]),
            tables=tables_of(module, calls),
        )
        if layers:
            layouts.append(block_layouts(module, layers, by_layer=True))
            split = replace(profile, groups=layers, block_bytes=laid_out_bytes(layers, layouts[1]))
            profile = replace(profile, layer_split=split)
        return (
            in_every_precision(profile, layouts, graph, graph.components[name], module)
            if graph
            else profile
        )

    def _trace(
        self, component: str, entry: str, proceed: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Call, Returned]:
        """Trace the call on meta, or on the CPU if that fails.

        The first attempt on meta is valid for all values of the arguments, the second one for the
        integers and masks among them. If all attempts fail, raises the exception from
        `_untraceable`.
        """
        errors: list[Exception] = []
        try:
            for with_values in (False, True):
                try:
                    return self._trace_on(
                        META, component, entry, proceed, args, kwargs, with_values=with_values
                    )
                except GraphrunError:
                    raise
                except Exception as error:  # noqa: BLE001  (a component's code may raise anything where tensors have no values)
                    errors.append(error)
            return self._trace_with_weights(component, entry, proceed, args, kwargs, errors[0])
        finally:
            errors.clear()  # their frames refer to the arguments, which would outlive the call

    def _trace_with_weights(
        self,
        component: str,
        entry: str,
        proceed: Callable[..., Any],
        args: Any,
        kwargs: Any,
        meta_error: Exception,
    ) -> tuple[Call, Returned]:
        """Trace the call on the CPU, after meta failed with ``meta_error``."""
        module = self.meta_modules[component]
        nbytes = sum(tensor.nbytes for tensor in weights_below(module))
        if self._weights is None or nbytes > host_ram_bytes() or communicates(module):
            raise meta_error
        try:
            with with_weights_of(self._weights(component), module):
                trace = self._trace_on(torch.device("cpu"), component, entry, proceed, args, kwargs)
        except Exception as error:
            raise self._untraceable(component, entry, args, kwargs, meta_error, error) from error
        text = (str(meta_error).splitlines() or [""])[0]
        warnings.warn(
            f"{component}.{entry} needs tensor values ({type(meta_error).__name__}: {text}): "
            "it is computed once on the CPU, with all "
            f"{show_size(nbytes)} of its weights, to plan the call",
            RuntimeWarning,
            stacklevel=3,
        )
        return trace

    def _untraceable(
        self,
        component: str,
        entry: str,
        args: Any,
        kwargs: Any,
        on_meta: Exception,
        on_cpu: Exception,
    ) -> Exception:
        """Return the error for a call that neither meta nor the CPU can trace."""
        return on_meta

    def _trace_on(
        self,
        device: torch.device,
        component: str,
        entry: str,
        proceed: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *,
        with_values: bool = False,
    ) -> tuple[Call, Returned]:
        """Trace the call on ``device``: meta, or the CPU if ``component`` has its weights there.

        ``with_values``: on meta, code may read the integers and masks among the arguments.
        """
        module = self.meta_modules[component]
        units = block_paths(module, self.routed[component])
        record = partial(self._record, with_values=with_values)
        try:
            call, result, leftover_storages = record(module, units, proceed, args, kwargs, device)
            by_data = with_values or device != META or self._has_guessed
            if routed_paths := routed_lists(units, call.entered_blocks, by_data=by_data):
                self.routed[component] |= routed_paths
                forget({"": module})
                units = block_paths(module, self.routed[component])
                call, result, leftover_storages = record(
                    module, units, proceed, args, kwargs, device
                )
            # a second call shows whether the next call reuses the tensors or replaces them
            if call.persistent_keys and _holds_tensors(module) and not stateful_hooks(module):
                repeated_call, *_ = record(
                    module, units, proceed, args, kwargs, device, leftover_storages
                )
                call = _with_state_before(call, repeated_call)
        finally:
            forget({"": module})
        input_bytes = sum(
            round_up(t.untyped_storage().nbytes(), ROUND_BYTES)
            for t in {id(t): t for t in tensors_in((args, kwargs))}.values()
            if t.device.type != "cpu"
        )
        results = {
            id(t): round_up(t.nbytes, ROUND_BYTES) for t in tensors_in(result.template) if t.is_meta
        }
        complete_call = replace(
            call,
            component=component,
            entry=entry,
            input_bytes=input_bytes,
            output_bytes=sum(results.values()),
        )
        return complete_call, result

    def _record(
        self,
        module: nn.Module,
        blocks: list[str],
        proceed: Callable[..., Any],
        args: Any,
        kwargs: Any,
        device: torch.device,
        earlier_storages: Collection[torch.UntypedStorage] = (),
        *,
        with_values: bool = False,
    ) -> tuple[Call, Returned, list[torch.UntypedStorage]]:
        """Return the call, its result, and the storages that it leaves in the component.

        ``earlier_storages``: left there by an earlier call. ``with_values``: as for `_trace_on`.
        """
        on_meta = device == META
        self.interceptor.device = device
        recorder = Recorder(module, blocks, device)

        def to_meta(tensor: torch.Tensor) -> torch.Tensor:
            shell = self._to_meta(tensor)
            if with_values:
                recorder.constants.note(
                    shell, tensor.raw if isinstance(tensor, SimTensor) else tensor
                )
            return shell

        try:
            with without_planned_device():
                arguments = with_device_arguments(
                    device, *walk((args, kwargs), to_meta if on_meta else torch.Tensor.cpu)
                )
                argument_tensors, holders = tensors_in(arguments), holders_in(arguments)
                initial_ids = [list(map(id, found_in(holder, torch.Tensor))) for holder in holders]
                recorder.ignore(argument_tensors, earlier_storages)
                recorder.record_existing(_storages_of(stateful_hooks(module)))
                repeats = Repeats(module, recorder) if on_meta else nullcontext()
                calls = FusedKernels(recorder) if on_meta else Moves(recorder)
                with (
                    torch.no_grad(),
                    repeats,
                    calls,
                    recorder,
                    follow_autocast(dtype_on(PLANNED.type)),
                    _record_hook_tensors(recorder),
                ):
                    result = proceed(*arguments[0], **arguments[1])
                recorder.returns(result)
                argument_contents = {
                    number: content_of(holder)
                    for number, holder in enumerate(holders)
                    if list(map(id, tensors_in(holder))) != initial_ids[number]
                }
                returned_value = capture_result(
                    result, argument_tensors, argument_contents, recorder.weights, device
                )
                recorder.note_results(tensors_in((result, argument_contents)))
                del result, argument_contents, holders, arguments
                hook_storages = _storages_of(stateful_hooks(module))
                recorder.end(hook_storages, lasting_tensors(module))
                leftover_storages = recorder.live
        finally:
            self.interceptor.device = PLANNED
            self._has_guessed = recorder.has_guessed
            recorder.close()
        return recorder.record, returned_value, leftover_storages

    def _to_meta(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` of the device on meta.

        A host tensor is cloned and stays on the host: copying it to the device takes memory of its
        own. If the host is the planned device, only numbers stay, whose values code may read.
        """
        if tensor.device.type == "cpu" and (self.host_type or tensor.dim() == 0):
            return tensor.clone()
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


class _HookListener:
    """A listener of `sim` that records tensors made by hooks' callbacks as part of the call.

    ``outer``: the listener for storages that exist before or after the call.
    """

    def __init__(self, recorder: Recorder, outer: Any) -> None:
        self.recorder, self.outer, self.live = recorder, outer, dict[int, int]()

    def allocated(self, key: int, nbytes: int) -> None:
        self.live[key] = nbytes
        self.recorder.allocated(key, nbytes)

    def freed(self, key: int) -> None:
        if self.live.pop(key, None) is None:
            self.outer.freed(key)
        else:
            self.recorder.freed(key)


@contextmanager
def _record_hook_tensors(recorder: Recorder) -> Iterator[None]:
    """Context in which ``recorder`` records tensors on `sim` (see `_HookListener`)."""
    machine = active.get()
    outer = machine.listener if machine is not None else None
    if outer is None:
        yield
        return
    machine.listener = hook_listener = _HookListener(recorder, outer)
    try:
        yield
    finally:
        machine.listener = outer
        for key, nbytes in hook_listener.live.items():
            recorder.freed(key)
            outer.allocated(key, nbytes)


def stateful_hooks(module: nn.Module) -> list[Any]:
    """Return diffusers' hooks in ``module`` that keep a state between calls (caches)."""
    hooks, pending = list[Any](), [module]
    while pending:  # `modules()` would build the name of every module, at every call of a dry run
        table = vars(pending.pop())
        if (registry := table.get(DIFFUSERS_HOOKS)) is not None:
            hooks += getattr(registry, "hooks", {}).values()
        if parts := table["_modules"]:
            pending += [part for part in reversed(parts.values()) if part is not None]
    return [hook for hook in hooks if getattr(hook, "_is_stateful", False)]


def _storages_of(hooks: Collection[Any]) -> list[torch.UntypedStorage]:
    """Return the meta storages of the tensors in ``hooks``, a result of `stateful_hooks`."""
    tensors = (tensor for tensor in found_in(hooks, torch.Tensor) if tensor.is_meta)
    return [
        *{
            storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)
        }.values()
    ]


def _holds_tensors(module: nn.Module) -> bool:
    """Return whether ``module`` or a submodule has a tensor attribute that is not a weight."""
    tables = vars(nn.Module()).keys()
    values = (
        value
        for child in modules_below(module)
        for key, value in vars(child).items()
        if key not in tables
    )
    return any(
        next(found_in(value, torch.Tensor), None) is not None
        for value in values
        if type(value) not in PLAIN
    )


def _with_state_before(call: Call, repeated_call: Call) -> Call:
    """Return ``call`` with the state that it replaces: tensors that the call before it left.

    State that ``repeated_call``, the same call once more, keeps too is replaced: frames that causal
    convolutions see in the next piece. Position tables are reused, so ``repeated_call`` keeps none.
    """
    sizes = {event.key: event.nbytes for event in repeated_call.events if event.nbytes}
    first = 1 + max((event.key for event in call.events), default=0)
    state_events = [
        MemoryEvent(first + number, sizes[key])
        for number, key in enumerate(repeated_call.persistent_keys)
    ]
    shift = len(state_events)
    return replace(
        call,
        events=[
            *state_events,
            *call.events,
            *(MemoryEvent(event.key, 0) for event in state_events),
        ],
        products=[product._replace(event=product.event + shift) for product in call.products],
        spans=[
            span._replace(begin=span.begin + shift, end=span.end + shift) for span in call.spans
        ],
        persistent_keys=[*call.persistent_keys, *(event.key for event in state_events)],
    )


def _device_zeros(component: str, path: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return zeros on the device for a weight that the pipeline's code copies there."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=PLANNED)


def _signature(value: Any, host: str, texts: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.device.type == host
    if isinstance(value, dict):
        return tuple((key, _signature(item, host, texts)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_signature(item, host, texts) for item in value)
    if isinstance(value, (bool, int, type(None))) or (texts and isinstance(value, str)):
        return value
    return (
        (type(value), *(_signature(tensor, host, texts) for tensor in tensors_in(value)))
        if may_hold(value)
        else type(value)
    )
