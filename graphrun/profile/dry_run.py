"""Runs a graph's ops without weights and without a GPU, and returns a recording of what they would
allocate and compute.

The ops' own code runs on an unlimited simulated accelerator that reports every allocation;
schedulers, tokenizers and image processors work as usual. Components are meta modules: a call into
one is traced on the meta device once for each signature of argument shapes, and returns zeros of
the right shape. The 28 denoising steps of an image therefore cost one traced call.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from graphrun.errors import GraphrunError
from graphrun.graph.graph import Component, Graph
from graphrun.limits import require
from graphrun.model.allocator import ROUND_BYTES
from graphrun.modules.blocks import with_weights_of
from graphrun.modules.build import (
    build,
    build_part,
    held_meta_module,
    leave_behind,
    meta_module,
    on_host,
)
from graphrun.modules.contents import as_stored
from graphrun.modules.dtype_variants import DtypeVariants
from graphrun.modules.interceptor import CallInterceptor
from graphrun.modules.memos import DIFFUSERS_HOOKS, forget
from graphrun.modules.precisions import QUANTIZED
from graphrun.modules.stored import holding, local_weights
from graphrun.modules.trees import (
    PLAIN,
    computing_on,
    content_of,
    found_in,
    holders_in,
    may_hold,
    tensors_in,
    walk,
)
from graphrun.ops import Stages
from graphrun.profile.block_groups import block_paths, group_blocks, group_layers, routed_lists
from graphrun.profile.host_ram import host_ram_bytes
from graphrun.profile.meta_ops import META
from graphrun.profile.quantized import (
    block_bytes_by_precision,
    laid_out_bytes,
    quantized_shapes,
    widened,
)
from graphrun.profile.recorder import FusedAttention, Recorder
from graphrun.profile.recording import Call, ComponentProfile, DryRun, Event, Recording, StageEnd
from graphrun.profile.repeats import Repeats
from graphrun.profile.returned import Returned, returned
from graphrun.sim.active import active
from graphrun.sim.casts import dtype_on, following
from graphrun.sim.dry import PLANNED, DryMachine
from graphrun.sim.tensor import SimTensor
from graphrun.units import MIB, round_up, show_size

# Larger tensors are output images or videos; no code depends on their values, so they are not
# computed.
HOLLOW_BYTES = 64 * MIB


@on_host()
def probe(
    graph: Graph, inputs: Mapping[str, Any], options: Mapping[str, str] | None = None
) -> DryRun:
    """The dry run of ``graph`` for resolved ``inputs``. ``options``: stage -> name of the stage
    option to run it with.

    Raises what the pipeline's own code raises for these inputs, and GraphError where a component's
    files are on this machine but are damaged or belong to another model.
    """
    meta_modules = {
        name: meta_module(component, graph.trust) for name, component in graph.components.items()
    }
    for name, component in graph.components.items():
        holding(component, meta_modules[name])
    parts = {part.name: build_part(part, graph, planning=True) for part in graph.parts.values()}
    prober = Prober(meta_modules, weights=random_weights(graph))
    with DryMachine() as machine, prober.interceptor:
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
    probed = DryRun(prober.recording, prober.profiles(graph))
    leave_behind(graph, meta_modules)
    return probed


def random_weights(graph: Graph) -> Callable[[str], nn.Module]:
    """A function that returns a component of ``graph`` by name with random weights, on the CPU. No
    files are read for it."""
    return lambda name: build(replace(graph.components[name], source=None, gguf=""), graph)


class Prober:
    """Intercepts calls into ``meta_modules``, traces each kind of call once, and appends a mark for
    every call to ``recording``.

    Traces are reused by later dry runs with the same prober. An entry that cannot be traced on
    meta, as its code reads numbers, is computed once on the CPU, with what ``weights(component)``
    returns, a module like that on meta. Without ``weights``, or RAM for it, the error on meta is
    raised.
    """

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
            meta_modules, PLANNED, around=self.answer, reads=_device_zeros, casts=casts
        )
        self.routed: dict[str, set[str]] = defaultdict(set)  # see `routed_lists`
        self._traces: dict[Any, tuple[Call, Returned]] = {}
        self._hook_state: dict[
            str, list[torch.Tensor]
        ] = {}  # by component, what its hooks hold between its calls

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
        """A key that is equal for calls that one trace can serve: same component, entry point and
        argument shapes, under the same autocast for ``device_type``. Without ``texts`` it is equal
        for calls that differ in texts only."""
        host = "cpu" if device_type != "cpu" else ""  # a device of tests computes on the CPU itself
        return (
            component,
            entry,
            _signature(args, host, texts),
            _signature(kwargs, host, texts),
            dtype_on(device_type),
        )

    def trace(
        self, component: str, entry: str, proceed: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Call, Returned]:
        """The call as traced for its signature, and what it returns. Where hooks with a state
        decide what is computed (diffusers' caches), no call is like another, and each is traced."""
        signature = self.signature(component, entry, args, kwargs)
        if stateful_hooks(self.meta_modules[component]):
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
        """Replaces a call into a component: appends a mark to the recording and returns zeros on
        `sim`."""
        made = len(self.recording.items) + 1
        require("calls", made, f"it makes {made:,} calls of components or more")
        self._hook_state.pop(component, None)  # the call's own events have it
        call, result = self.trace(component, entry, proceed, args, kwargs)
        self.recording.items.append(call)
        if held := _held_by_hooks(self.meta_modules[component]):
            self._hook_state[component] = [
                torch.empty(each.nbytes(), dtype=torch.uint8, device=PLANNED) for each in held
            ]
        return result.materialize((args, kwargs), PLANNED)

    def begin(self, recording: Recording) -> Recording:
        """Begins another dry run, which is appended to ``recording``."""
        self.recording = recording
        self._hook_state.clear()
        return recording

    def profiles(self, graph: Graph | None = None) -> dict[str, ComponentProfile]:
        """The profile of every component, with block groups in the order in which blocks were
        entered. With ``graph``, in every precision that it allows."""
        found = {}
        for name in self.meta_modules:
            with self.as_traced(name):
                found[name] = self._profile_of(name, graph)
        return found

    def as_traced(self, name: str) -> AbstractContextManager[None]:
        """A context in which the meta module ``name`` is in the state in which its calls were
        traced. Overridden for dtype variants."""
        return nullcontext()

    def _profile_of(self, name: str, graph: Graph | None) -> ComponentProfile:
        module = self.meta_modules[name]
        calls = [call for call, _ in self._traces.values() if call.component == name]
        groups, layers = (
            group_blocks(module, calls, self.routed[name]),
            group_layers(module, calls, self.routed[name]),
        )
        profile = ComponentProfile(
            sum(p.numel() for p in module.parameters()), groups, laid_out_bytes(module, groups)
        )
        if layers:
            split = replace(
                profile, groups=layers, block_bytes=laid_out_bytes(module, layers, by_layer=True)
            )
            profile = replace(profile, layer_split=split)
        return (
            _in_every_precision(profile, graph, graph.components[name], module)
            if graph
            else profile
        )

    def _trace(
        self, component: str, entry: str, proceed: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Call, Returned]:
        """Traces the call on meta, or where that fails on the CPU. Raises what `_untraceable`
        returns where both fail."""
        try:
            return self._trace_on(META, component, entry, proceed, args, kwargs)
        except GraphrunError:
            raise
        except Exception as error:  # noqa: BLE001  (a component's code may raise anything where tensors have no values)
            first = error
        module = self.meta_modules[component]
        nbytes = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
        if self._weights is None or nbytes > host_ram_bytes():
            raise first
        try:
            with with_weights_of(self._weights(component), module):
                made = self._trace_on(torch.device("cpu"), component, entry, proceed, args, kwargs)
        except Exception as error:
            raise self._untraceable(component, entry, args, kwargs, first, error) from error
        text = (str(first).splitlines() or [""])[0]
        warnings.warn(
            f"{component}.{entry} needs tensor values ({type(first).__name__}: {text}): it is computed once on the CPU, with all "
            f"{show_size(nbytes)} of its weights, to plan the call",
            RuntimeWarning,
            stacklevel=2,
        )
        return made

    def _untraceable(
        self,
        component: str,
        entry: str,
        args: Any,
        kwargs: Any,
        on_meta: Exception,
        on_cpu: Exception,
    ) -> Exception:
        """The error for an entry that neither meta nor the CPU can trace."""
        return on_meta

    def _trace_on(
        self,
        device: torch.device,
        component: str,
        entry: str,
        proceed: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> tuple[Call, Returned]:
        """Traces the call on ``device``: on meta, or on the CPU if ``component`` has its weights
        there."""
        module = self.meta_modules[component]
        units = block_paths(module, self.routed[component])
        try:
            call, result, kept = self._record(module, units, proceed, args, kwargs, device)
            if picked := routed_lists(units, call.entered):
                self.routed[component] |= picked
                forget({"": module})
                units = block_paths(module, self.routed[component])
                call, result, kept = self._record(module, units, proceed, args, kwargs, device)
            if (
                call.kept and _holds_tensors(module) and not stateful_hooks(module)
            ):  # are they reused by the next call, or replaced?
                again, *_ = self._record(module, units, proceed, args, kwargs, device, kept)
                call = _with_state_before(call, again)
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
        made = replace(
            call,
            component=component,
            entry=entry,
            input_bytes=input_bytes,
            output_bytes=sum(results.values()),
        )
        return made, result

    def _record(
        self,
        module: nn.Module,
        blocks: list[str],
        proceed: Callable[..., Any],
        args: Any,
        kwargs: Any,
        device: torch.device,
        before: Collection[torch.UntypedStorage] = (),
    ) -> tuple[Call, Returned, list[torch.UntypedStorage]]:
        """The call, what it returns, and what it leaves in the component, where an earlier call
        left ``before``."""
        on_meta = device == META
        self.interceptor.device = device
        recorder = Recorder(module, blocks, device)
        try:
            with _disable_current_modes():
                arguments = computing_on(
                    device, *walk((args, kwargs), _to_meta if on_meta else torch.Tensor.cpu)
                )
                given, holders = tensors_in(arguments), holders_in(arguments)
                held = [list(map(id, found_in(holder, torch.Tensor))) for holder in holders]
                recorder.ignore(given, before)
                recorder.hold(_held_by_hooks(module))
                repeats = Repeats(module, recorder) if on_meta else nullcontext()
                fused = FusedAttention(recorder) if on_meta else nullcontext()
                with (
                    torch.no_grad(),
                    repeats,
                    fused,
                    recorder,
                    following(dtype_on(PLANNED.type)),
                    _beside(recorder),
                ):
                    out = proceed(*arguments[0], **arguments[1])
                recorder.returns(out)
                put = {
                    n: content_of(holder)
                    for n, holder in enumerate(holders)
                    if list(map(id, tensors_in(holder))) != held[n]
                }
                result = returned(out, given, put, recorder.weights, device)
                recorder.note_results(tensors_in((out, put)))
                del out, put, holders, arguments
                recorder.end(besides=_held_by_hooks(module))
                kept = recorder.live
        finally:
            self.interceptor.device = PLANNED
            recorder.close()
        return recorder.record, result, kept


class _Beside:
    """A listener of `sim` that notes tensors which hooks' callbacks make during a call as ones of
    the call. ``outer``: the listener that is told of what was there before the call, or stays after
    it."""

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
def _beside(recorder: Recorder) -> Iterator[None]:
    """A context in which tensors on `sim` are noted by ``recorder`` (see `_Beside`)."""
    machine = active.get()
    outer = machine.listener if machine is not None else None
    if outer is None:
        yield
        return
    machine.listener = own = _Beside(recorder, outer)
    try:
        yield
    finally:
        machine.listener = outer
        for key, nbytes in own.live.items():
            recorder.freed(key)
            outer.allocated(key, nbytes)


def stateful_hooks(module: nn.Module) -> list[Any]:
    """The hooks of diffusers on ``module``, and on those inside it, that keep a state from call to
    call: its caches."""
    registries = (vars(child).get(DIFFUSERS_HOOKS) for child in module.modules())
    hooks = (hook for registry in registries for hook in getattr(registry, "hooks", {}).values())
    return [hook for hook in hooks if getattr(hook, "_is_stateful", False)]


def _held_by_hooks(module: nn.Module) -> list[torch.UntypedStorage]:
    """The storages on meta of the tensors in `stateful_hooks`."""
    tensors = (
        tensor for tensor in found_in(stateful_hooks(module), torch.Tensor) if tensor.is_meta
    )
    return [
        *{
            storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)
        }.values()
    ]


def _holds_tensors(module: nn.Module) -> bool:
    """Whether ``module`` or one inside it holds a tensor beside its weights."""
    tables = vars(nn.Module()).keys()
    held = (
        value
        for child in module.modules()
        for key, value in vars(child).items()
        if key not in tables
    )
    return any(
        next(found_in(value, torch.Tensor), None) is not None
        for value in held
        if type(value) not in PLAIN
    )


def _with_state_before(call: Call, again: Call) -> Call:
    """``call`` beside what the call before it left in the component and it replaces: what
    ``again``, the same call once more, keeps too (frames that causal convolutions see in the next
    piece). Tables of positions are reused instead, so ``again`` keeps none."""
    sizes = {event.key: event.nbytes for event in again.events if event.nbytes}
    first = 1 + max((event.key for event in call.events), default=0)
    before = [Event(first + number, sizes[key]) for number, key in enumerate(again.kept)]
    shift = len(before)
    return replace(
        call,
        events=[*before, *call.events, *(Event(event.key, 0) for event in before)],
        products=[product._replace(event=product.event + shift) for product in call.products],
        spans=[
            span._replace(begin=span.begin + shift, end=span.end + shift) for span in call.spans
        ],
        kept=[*call.kept, *(event.key for event in before)],
    )


def _in_every_precision(
    profile: ComponentProfile, graph: Graph, component: Component, module: nn.Module
) -> ComponentProfile:
    """``profile`` with the bytes of the blocks of ``component`` in every precision that ``graph``
    allows.

    Which tensors stay in fp32 depends on the dtype in which the module is created. Where the files
    are quantized, the bytes are those of the files.
    """
    profiles = [profile, profile.layer_split] if profile.layer_split is not None else [profile]
    sizes = [
        block_bytes_by_precision(module, of.groups, component.dtype, by_layer=of is not profile)
        for of in profiles
    ]
    layers = quantized_shapes(module, component.dtype)
    stored: list[str] = []
    kinds: dict[str, tuple[str, int, tuple[int, int]]] = {}
    for precision in dict.fromkeys(component.precision):
        if precision in ("fp8", "gguf") and local_weights(component, precision) is not None:
            held, content = held_meta_module(component, graph.trust, precision)
            if precision == "gguf":
                rows = {
                    name: held.get_parameter(name).shape[1] for name in layers if content.kind(name)
                }
                kinds = {
                    name: (content.kind(name), row_bytes, layers[name])
                    for name, row_bytes in rows.items()
                }
            if precision not in as_stored(content, layers):
                continue
            stored.append(precision)
        elif precision not in (component.dtype, *QUANTIZED):
            held = meta_module(replace(component, dtype=precision), graph.trust)
        else:
            continue
        for of, found in zip(profiles, sizes, strict=True):
            found[precision] = laid_out_bytes(held, of.groups, by_layer=of is not profile)
    dequantized = widened(kinds, component.dtype)
    blocks, *split = (
        replace(of, precisions=found, layers=layers, widened=dequantized, as_stored=tuple(stored))
        for of, found in zip(profiles, sizes, strict=True)
    )
    return replace(blocks, layer_split=split[0] if split else None)


def _device_zeros(component: str, path: str, tensor: torch.Tensor) -> torch.Tensor:
    """Zeros on the device for a weight that the pipeline's own code reads: the code copies it
    there, which takes memory."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=PLANNED)


def _to_meta(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` of the device on meta. A host tensor is cloned and stays on the host: copying it
    to the device takes memory of its own."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


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
