"""Records what one call into a component would allocate, read and compute. The call runs on the
meta device, or where that is not possible on the CPU with real weights.

`Recorder` sees every operator that PyTorch dispatches. Two operators allocate differently on meta
than on a GPU:

    attention      on meta the math backend runs, which allocates the scores, S x S for S tokens.
    Fused kernels do not allocate
                   them, so `FusedAttention` intercepts attention before dispatch. It records the
                   output, and as scratch the fp32 logsumexp that the fused kernels return.
    convolution    on a GPU takes scratch that the dispatcher does not see: copies of its tensors in
    another memory layout.

Scratch is memory that is allocated and freed within one operator. `graphrun.profile.corrections`
has the amounts.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, compress
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from graphrun.model.allocator import ROUND_BYTES
from graphrun.modules.trees import tensors_in
from graphrun.profile.constants import ConstantValues, Storages
from graphrun.profile.corrections import Convolution, attention_scratch, convolution_scratch
from graphrun.profile.costs import tiles
from graphrun.profile.meta_ops import META, on_meta
from graphrun.profile.recording import Call, Event, Hop, Kernel, KernelClass, Product, Span
from graphrun.sim.casts import KIND, dtype_on
from graphrun.sim.flops import launches_kernel
from graphrun.units import round_up

aten = torch.ops.aten
FLASH_FEATURES = 256  # most features per head in FlashAttention 2 and cuDNN
MATRIX_PRODUCTS = (aten.mm.default, aten.addmm.default)

# Operators of which `_host_value` may know the result: they copy values from the device to the
# host, or their output's size depends on values.
_HOST_READS = frozenset(
    {aten._local_scalar_dense.default, aten._to_copy.default, aten.bincount.default}
)

# Operators that read as many elements of their first argument as they return.
_GATHERS = frozenset({aten.embedding, aten.index, aten.index_select, aten.gather})


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records the allocations and releases of storages, the weights read, and
    the kernels of each block.

    ``record``: what was recorded so far.

    Meta tensors have no values, so results that depend on values are fixed: ``item()`` returns True
    for a bool and 1 for a number, ``nonzero`` returns as many rows as are possible, and a copy to
    the host returns zeros. Tensors with a constant value (see `ConstantValues`) give that value.
    ``mask.all()`` is False: encoders drop a mask that is all ones, so this is the case that takes
    more memory.

    ``blocks``: paths of the blocks in ``module``. ``device``: meta, or the device on which the call
    runs with real weights.
    """

    def __init__(
        self, module: nn.Module, blocks: Iterable[str], device: torch.device = META
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = Call()
        self._numbers: dict[Kernel, int] = {}  # of each kernel in ``record.kernels``
        self._running = ""  # path of the layer that runs
        self._device_type = device.type
        self.constants = ConstantValues()
        self._last_key = 0  # keys in events number the storages
        self._beside: dict[int, int] = {}  # see `allocated`
        # Below, ``cdata`` is the address of a storage's C++ object, by which it is recognized while
        # it is alive.
        self._live: dict[int, tuple[int, Any]] = {}  # cdata -> (key, weak reference)
        self._stack = [""]  # paths of the blocks and layers that are running, innermost last
        self._names: dict[
            int, str
        ] = {}  # cdata of a weight -> its first name; tied weights have several
        # first name of a weight -> paths of the modules that have it
        self._owners: dict[str, set[str]] = defaultdict(set)
        weights = (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
        if (
            self._device_type != "meta"
        ):  # weights may share a storage, so which are read is unknown: all are noted
            self.record.touched |= {name for name, _ in weights}
            self.record.outside |= set(layer_paths(module))
        # Storages that exist before the call. Holding them keeps new storages from reusing their
        # addresses.
        self._existing: dict[int, torch.UntypedStorage] = {}
        self.ignore(tensor for _, tensor in weights)
        for name, tensor in weights:
            first = self._names.setdefault(tensor.untyped_storage()._cdata, name)
            self._owners[first].add(name.rpartition(".")[0])
        blocks = list(blocks)
        self._blocks = frozenset(blocks)
        self._hooks = [
            hook for path in blocks for hook in self._watch(module.get_submodule(path), path)
        ]
        self._hooks += [
            hook
            for path in layer_paths(module)
            for hook in self._watch_layer(module.get_submodule(path), path)
        ]
        self._passed: dict[
            int, tuple[Any, int]
        ] = {}  # by id, tensors that have a number in `Hop`: weak reference, number
        # cdata -> numbers of the tensors in that storage
        self._passed_in: dict[int, set[int]] = defaultdict(set)
        self._last_number = 0
        self._all_true = Storages()  # results of ``mask.all()`` or ``mask.sum() == mask.numel()``
        self._mask_sums = Storages()  # results of ``mask.sum()``

    @property
    def weights(self) -> Collection[int]:
        """Addresses of the storages of the module's weights."""
        return self._names.keys()

    def hold(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Records ``storages``, which are there before the call and may be released in it, as
        allocated at its start."""
        for storage in storages:
            self._note_storage(storage)

    def allocated(self, key: int, nbytes: int) -> None:
        """Records a storage on the device that no operator of the call returns on meta; ``key``
        names it for `freed`."""
        self._last_key += 1
        self._beside[key] = self._last_key
        self.record.events.append(Event(self._last_key, nbytes))

    def freed(self, key: int) -> None:
        self.record.events.append(Event(self._beside.pop(key), 0))

    def note_results(self, tensors: Iterable[torch.Tensor]) -> None:
        """Sets ``record.results``: of ``tensors``, the call's results, those with a storage that it
        allocated."""
        found = (self._live.get(tensor.untyped_storage()._cdata) for tensor in tensors)
        self.record.results = [*dict.fromkeys(live[0] for live in found if live is not None)]

    def end(self, besides: Iterable[torch.UntypedStorage] = ()) -> None:
        """Sets ``record.kept``. To be called when the call has returned and its results are
        released: what is still live then is kept by the component, apart from ``besides``."""
        others = {storage._cdata for storage in besides}
        self.record.kept = [key for cdata, (key, _) in self._live.items() if cdata not in others]

    @property
    def live(self) -> list[torch.UntypedStorage]:
        """The storages that the call allocated and that are there now."""
        return [
            storage for _, reference in self._live.values() if (storage := reference()) is not None
        ]

    def ignore(
        self, tensors: Iterable[torch.Tensor], storages: Iterable[torch.UntypedStorage] = ()
    ) -> None:
        """Leaves out the storages of ``tensors``, the inputs or weights of the call, and
        ``storages``: they exist before it. Their release is not recorded either."""
        every = (*(tensor.untyped_storage() for tensor in tensors), *storages)
        self._existing |= {storage._cdata: storage for storage in every}

    def close(self) -> None:
        """Removes the hooks, and records the release of everything that is still live: outputs, and
        what the component keeps."""
        for hook in self._hooks:
            hook.remove()
        for cdata in list(self._live):
            self._release(cdata)
        self._existing.clear()

    @contextmanager
    def section(self) -> Iterator[Call]:
        """A context in which ``record`` is the section that it yields; at its end, ``record`` is
        extended by the section."""
        whole, self.record = self.record, Call(kernels=self.record.kernels)
        self.record.work.append((self._stack[-1], []))
        try:
            yield self.record
        finally:
            whole.extend(self.record)
            self.record = whole

    def repeatable(self, section: Call, outs: Sequence[torch.Tensor]) -> Call | None:
        """``section`` for `replay`: without releases of storages from before it, and with the keys
        of ``outs`` as ``kept``.

        None if, of the storages allocated in it, other than those of ``outs`` are still live, or
        not one for each.
        """
        allocated = {event.key for event in section.events if event.nbytes and not event.scratch}
        live = {cdata: key for cdata, (key, _) in self._live.items() if key in allocated}
        kept = [live.get(out.untyped_storage()._cdata, 0) for out in outs]
        if sorted(kept) != sorted(live.values()):
            return None
        own = [event.scratch or event.key in allocated for event in section.events]
        numbers = [0, *accumulate(own)]  # of each event, without those left out
        products = [product._replace(event=numbers[product.event]) for product in section.products]
        spans = [
            span._replace(begin=numbers[span.begin], end=numbers[span.end])
            for span in section.spans
        ]
        return replace(
            section,
            events=[*compress(section.events, own)],
            products=products,
            spans=spans,
            kept=kept,
        )

    def replay(
        self, section: Call, outs: Sequence[torch.Tensor], numbers: Mapping[int, int], since: int
    ) -> None:
        """Records a `repeatable` section once more. ``outs``: new tensors, not yet recorded, in the
        place of its results. ``numbers``: of the tensors that it gets and gives, by those in
        ``section``; ``since``: the last one before it."""
        allocated = [event.key for event in section.events if event.nbytes and not event.scratch]
        # keys are numbered in the order of allocation
        shift = self._last_key + 1 - allocated[0] if allocated else 0
        self._last_key += len(allocated)
        events = [
            event if event.scratch else event._replace(key=event.key + shift)
            for event in section.events
        ]
        new = {number for hop in section.hops for number, _ in hop.tensors if abs(number) > since}
        inside = sorted(new - numbers.keys(), key=abs)
        later = {
            number: self._new_number() * (1 if number > 0 else -1) for number in inside
        } | dict(numbers)
        hops = [hop.numbered(lambda number: later.get(number, number)) for hop in section.hops]
        self.record.extend(replace(section, events=events, hops=hops))
        for key, out in zip(section.kept, outs, strict=True):
            self._track(out.untyped_storage(), key + shift)
        for name in section.touched:
            self._note_loose(self._owners[name], section.entered)

    def scratch(self, nbytes: int, spared_bytes: int = 0) -> None:
        """Records ``nbytes`` of scratch. GPUs that avoid large copies
        (`Hardware.spares_large_copies`) need ``spared_bytes`` less."""
        if nbytes:
            self.record.events.append(Event(0, nbytes, True, spared_bytes))

    def _watch(self, block: nn.Module, path: str) -> tuple[Any, Any]:
        """Hooks that record when the block at ``path`` runs."""

        def begin(_: Any, args: Any, kwargs: Any) -> None:
            self._note_hop("gets", path, (args, kwargs))
            self._stack.append(path)
            self.record.entered.append(path)
            # An entry even for a block without kernels, since the order of blocks matters.
            self.record.work.append((path, []))

        def end(_: Any, __: Any, results: Any) -> None:
            self._stack.pop()
            self._note_hop("gives", path, results)

        return block.register_forward_pre_hook(
            begin, with_kwargs=True
        ), block.register_forward_hook(end)

    def returns(self, value: Any) -> None:
        """To be called with what the call returns, while that is alive."""
        self._note_hop("gives", "", value)

    def _note_hop(self, kind: Literal["gets", "gives"], path: str, value: Any) -> None:
        found = {id(tensor): tensor for tensor in tensors_in(value) if self.number_of(tensor)}
        if kind == "gives" and not path:  # also as views
            numbers = {
                n: tensor.nbytes for tensor in found.values() for n in self._numbers_in(tensor)
            }
            self.record.hops.append(Hop(kind, path, tuple(sorted(numbers.items()))))
        else:
            self.record.hops.append(
                Hop(kind, path, tuple((self.number_of(of), of.nbytes) for of in found.values()))
            )

    def number_of(self, tensor: torch.Tensor) -> int:
        """The number of ``tensor`` in `Hop`, a new one if it has none yet; 0 for one that is empty
        or on the host."""
        if tensor.device.type != self._device_type or not tensor.nbytes:
            return 0
        known = self._passed.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        cdata = tensor.untyped_storage()._cdata
        number = self._new_number() * (-1 if cdata in self._existing else 1)
        self._passed[id(tensor)] = weakref.ref(tensor), number
        self._passed_in[cdata].add(number)
        return number

    @property
    def last_number(self) -> int:
        """The largest number of a tensor so far, without its sign."""
        return self._last_number

    def _new_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _numbers_in(self, tensor: torch.Tensor) -> Collection[int]:
        return self._passed_in.get(tensor.untyped_storage()._cdata, ())

    def _note_access(self, func: Any, args: Any, kwargs: Any) -> None:
        """Records which of the numbered tensors ``func`` reads, and writes."""
        read = {number for tensor in _tensors(args) for number in self._numbers_in(tensor)}
        last = self.record.hops[-1] if self.record.hops else None
        if (
            last is None
            or last.kind != "reads"
            or not read <= {number for number, _ in last.tensors}
        ):
            self.record.hops.append(Hop("reads", "", tuple((number, 0) for number in sorted(read))))
        if func._schema.is_mutable:
            given = {
                of.name: value for of, value in zip(func._schema.arguments, args, strict=False)
            } | kwargs
            written_to = {
                of.name for of in func._schema.arguments if of.alias_info and of.alias_info.is_write
            }
            changed = [given[name] for name in written_to & given.keys()]
            if written := {
                number for tensor in _tensors(changed) for number in self._numbers_in(tensor)
            }:
                self.record.hops.append(
                    Hop("writes", "", tuple((number, 0) for number in sorted(written)))
                )

    def _watch_layer(self, layer: nn.Module, path: str) -> tuple[Any, Any]:
        """Hooks that record when the layer at ``path`` runs, and its `Span`."""
        first_event = 0

        def begin(*_: Any) -> None:
            nonlocal first_event
            first_event, self._running = len(self.record.events), path
            self._note_loose((path,))
            if (
                self._stack[-1] != path
            ):  # for a layer that is a block too, `_watch` has made the entry
                self.record.work.append((path, []))
            self._stack.append(path)

        def end(*_: Any) -> None:
            self._running = ""
            self._stack.pop()
            self.record.spans.append(Span(path, first_event, len(self.record.events)))

        return layer.register_forward_pre_hook(begin), layer.register_forward_hook(end)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with (
            torch._C.DisableTorchFunction()
        ):  # otherwise `FusedAttention` intercepts every attribute access of a tensor
            return self._operator(func, args, kwargs or {})

    def _operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        if (
            func in _HOST_READS
            and args[0].is_meta
            and (answer := self._host_value(func, args, kwargs)) is not None
        ):
            return answer
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return args[0] not in self._all_true if args[0].dtype == torch.bool else 1
        if func is aten.index.Tensor and args[0].is_meta:
            args = (
                args[0],
                [
                    column
                    for index in args[1]
                    for column in self.constants.index_columns(index, self._note_new)
                ],
            )
        if func is aten.nonzero.default and args[0].is_meta:
            out = torch.empty(args[0].numel(), args[0].dim(), dtype=torch.long, device="meta")
        elif (
            func is aten._to_copy.default
            and args[0].is_meta
            and (kwargs.get("device") or META).type != "meta"
        ):
            out = torch.zeros(
                args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=kwargs["device"]
            )
        else:
            out = on_meta(func, args, kwargs)
            if (
                func is not aten.eq.Scalar or args[0] not in self._mask_sums
            ):  # that comparison means "all true": see ``_all_true``
                self.constants.propagate(func, args, kwargs, out)
        self._note_access(func, args, kwargs)
        for tensor in _tensors(args):
            if (name := self._names.get(tensor.untyped_storage()._cdata)) is not None:
                self.record.touched.add(name)
                self.record.outside |= (
                    self._owners[name] - {self._running} if self._running else self._owners[name]
                )
                self._note_loose(self._owners[name])
        for tensor in _tensors((out,)):
            if self._note_new(tensor) and func in MATRIX_PRODUCTS:
                self._note_product(args, tensor)
            if func is aten.all.default or (func is aten.eq.Scalar and args[0] in self._mask_sums):
                self._all_true[tensor] = True
            elif func is aten.sum.default and args[0].dtype == torch.bool:
                self._mask_sums[tensor] = True
        if func is aten.convolution.default:
            self.scratch(*convolution_scratch(_convolution(args[0], args[1], out, args[3])))
        if launches_kernel(func) and (kernel := self._kernel(func, args, kwargs, out)) is not None:
            self.count(kernel)
        return out

    def _kernel(self, func: Any, args: Any, kwargs: Any, out: Any) -> Kernel | None:
        """The kernel of ``func``, which launches one; None on the host. A copy to the host is a
        launch without work."""
        outs = [tensor for tensor in _tensors((out,)) if tensor.device.type == self._device_type]
        if not outs:
            read_here = [
                tensor for tensor in _tensors(args) if tensor.device.type == self._device_type
            ]
            return Kernel("elementwise", _name(read_here[0].dtype), 0.0, 0) if read_here else None
        result, packet = outs[0], func._overloadpacket
        written = sum(map(_touched_bytes, outs))
        read = written
        if packet not in _GATHERS:
            read = sum(
                _touched_bytes(tensor)
                for tensor in _tensors(args)
                if tensor.device.type == self._device_type
            )
        dtype, nbytes = _name(result.dtype), read + written
        if (formula := flop_registry.get(packet)) is None:
            return Kernel("elementwise", dtype, 0.0, nbytes)
        flops = float(formula(*args, **kwargs, out_val=out))
        if func is aten.convolution.default:
            covered = tiles(result.numel() // result.shape[1], result.shape[1])
            return Kernel("convolution", dtype, flops, nbytes, covered)
        *batch, rows, columns = result.shape
        return Kernel("matmul", dtype, flops, nbytes, math.prod(batch) * tiles(rows, columns))

    def _note_loose(self, owners: Collection[str], entered: Collection[str] = ()) -> None:
        """Adds ``owners`` to ``loose`` if they are inside a block that neither runs nor is among
        the ``entered`` ones. ``owners``: paths of the modules that have one weight.

        A weight that several blocks share is skipped: it belongs to the remainder in any case.
        """
        blocks = {_block_at(owner, self._blocks) for owner in owners}
        if (
            len(blocks) == 1
            and (block := blocks.pop())
            and block not in self._stack
            and block not in entered
        ):
            self.record.loose.update(owners)

    def _host_value(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Result of one of `_HOST_READS`: for ``bincount`` the worst case, for the others the value
        on the CPU if it is constant. None if unknown."""
        if func is aten.bincount.default:
            return self.constants.worst_bincount(args[0])
        if (value := self.constants.value(args[0])) is None:
            return None
        if func is aten._local_scalar_dense.default:
            return value.item()
        return value.clone() if torch.device(kwargs.get("device") or "meta").type == "cpu" else None

    def count(self, kernel: Kernel) -> None:
        """Adds a kernel of the running block or layer: to the last entry if that is its own, else
        in a new entry."""
        number = self._numbers.setdefault(kernel, len(self._numbers))
        if number == len(self.record.kernels):
            self.record.kernels.append(kernel)
        if not self.record.work or self.record.work[-1][0] != self._stack[-1]:
            self.record.work.append((self._stack[-1], []))
        self.record.work[-1][1].append(number)

    def _note_product(self, args: Any, result: torch.Tensor) -> None:
        """Records a matrix product with a weight. To be called directly after the allocation of
        ``result``, the last event."""
        for factor in _tensors(args):
            name = self._names.get(factor.untyped_storage()._cdata)
            if name is not None and factor.dim() == 2:
                self.record.products.append(
                    Product(len(self.record.events) - 1, name, result.numel() // result.shape[-1])
                )

    def _note_new(self, tensor: torch.Tensor) -> bool:
        """Records the allocation of ``tensor`` if its storage is new. Returns whether it is; the
        allocation is then the last event."""
        return tensor.device.type == self._device_type and self._note_storage(
            tensor.untyped_storage()
        )

    def _note_storage(self, storage: torch.UntypedStorage) -> bool:
        cdata = storage._cdata
        if (
            cdata in self._live or cdata in self._existing or not storage.nbytes()
        ):  # in events, 0 bytes mean a release
            return False
        self._last_key += 1
        self._track(storage, self._last_key)
        self.record.events.append(Event(self._last_key, round_up(storage.nbytes(), ROUND_BYTES)))
        return True

    def _track(self, storage: torch.UntypedStorage, key: int) -> None:
        """Notes ``storage`` as live until it is garbage-collected, which records its release."""
        cdata = storage._cdata
        self._live[cdata] = key, weakref.ref(storage, functools.partial(self._release, cdata))

    def _release(self, cdata: int, _: object = None) -> None:
        self._passed_in.pop(cdata, None)
        if (found := self._live.pop(cdata, None)) is not None:
            self.record.events.append(Event(found[0], 0))


def own_tensors(module: nn.Module) -> list[torch.Tensor]:
    """The parameters and buffers of ``module`` itself, without those of its children."""
    return [
        tensor
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    ]


def layer_paths(module: nn.Module) -> list[str]:
    """Paths of the layers of ``module``: modules that have parameters or buffers of their own, and
    nothing inside that has."""
    found = []
    for path, child in module.named_modules():
        if (
            path
            and own_tensors(child)
            and all(
                inner is child or not (inner._parameters or inner._buffers)
                for inner in child.modules()
            )
        ):
            found.append(path)
    return found


def _block_at(path: str, blocks: Collection[str]) -> str:
    """The innermost of ``blocks`` that is at ``path`` or contains it; "" if there is none."""
    while path and path not in blocks:
        path = path.rpartition(".")[0]
    return path


class FusedAttention(TorchFunctionMode):
    """Replaces `scaled_dot_product_attention` by what it allocates on a GPU, and gives
    ``torch.tensor([...])`` a constant value.

    Recorded for b batches, h heads, s_q queries, s_k keys, and features d_k of keys and d_v of
    values: the output ``[b h s_q d_v]``, in memory as ``[b s_q h d_v]`` as fused kernels write it,
    so that heads are joined without a copy; as scratch the fp32 logsumexp ``[b h s_q]``; FLOPs of
    two matrix products, 2 b h s_q s_k (d_k + d_v). ``fused=False``: the scratch of the math
    backend, with its scores ``[b h s_q s_k]``."""

    def __init__(self, recorder: Recorder, *, fused: bool = True) -> None:
        super().__init__()
        self.recorder = recorder
        self.fused = fused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor:
            return self.recorder.constants.from_literal(func(*args, **kwargs), args, kwargs)
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key, value = (
            *args,
            *(kwargs[name] for name in ("query", "key", "value")[len(args) :]),
        )[:3]
        if (lower := dtype_on(KIND)) is not None:
            query, key, value = (tensor.to(lower) for tensor in (query, key, value))
        shape = (*query.shape[:-1], value.shape[-1])
        by_head = (
            query.new_empty(*shape[:-3], shape[-2], shape[-3], shape[-1]).transpose(-3, -2)
            if len(shape) > 3
            else None
        )
        out = query.new_empty(shape) if by_head is None else by_head
        rows = query.numel() // query.shape[-1]  # b h s_q
        width, keys = query.shape[-1], key.shape[-2]  # d_k, s_k
        self.recorder.scratch(
            attention_scratch(rows, keys, width, query.element_size(), fused=self.fused)
        )
        nbytes = sum(map(_touched_bytes, (query, key, value, out)))
        covered = rows // query.shape[-2] * tiles(query.shape[-2], 1)
        kind: KernelClass = "attention" if width <= FLASH_FEATURES else "wide attention"
        flops = 2.0 * rows * keys * (width + value.shape[-1])
        self.recorder.count(Kernel(kind, _name(out.dtype), flops, nbytes, covered, rows * keys))
        return out


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes of device memory that a kernel reads or writes for ``tensor``; an expanded one is
    smaller in memory."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _convolution(
    source: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, stride: Sequence[int]
) -> Convolution:
    sizes = source.nbytes, result.nbytes, weight.nbytes, result.itemsize
    taps = weight.numel() // (weight.shape[0] * weight.shape[1])
    return Convolution(*sizes, source.shape[1], result.shape[1], taps, max(stride) > 1)


def _tensors(items: Any) -> Iterable[torch.Tensor]:
    """The tensors in ``items``, and in lists and tuples inside it."""
    for item in items:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from _tensors(item)
