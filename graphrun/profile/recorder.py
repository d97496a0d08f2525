"""Record what one call into a component would allocate, read and compute.

The call runs on the meta device. If that is impossible, it runs on the CPU with real weights. Three
operators allocate differently on meta than on a GPU:

    attention      On meta the math backend runs and allocates the scores, S x S for S tokens.
                   Fused kernels do not allocate them. `FusedKernels` intercepts attention before
                   dispatch and records the output, and as scratch the fp32 logsumexp that the
                   fused kernels return.
    flex attention Its compiled kernel takes memory for its results alone. Uncompiled it computes
                   all scores, in fp32, which is scratch on a GPU.
    convolution    A GPU takes scratch that the dispatcher does not see: copies of the tensors in
                   another memory layout.

Scratch is memory that is allocated and freed within one operator. Amounts:
`graphrun.profile.corrections`.
"""

from __future__ import annotations

import functools
import traceback
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, compress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphrun.errors import GraphrunError
from graphrun.model.allocator import ROUND_BYTES
from graphrun.modules.compiled import is_compiled
from graphrun.modules.trees import modules_below, named_modules_below, own_tensors, tensors_in
from graphrun.profile.constants import ConstantValues, Storages
from graphrun.profile.corrections import (
    convolution_scratch,
    flex_scratch,
    hopper_convolution_scratch,
)
from graphrun.profile.kernels import flex_kernel, flex_results, operator_kernel
from graphrun.profile.meta_ops import META, on_meta
from graphrun.profile.operands import convolution_of, tensors_of
from graphrun.profile.recording import Call, Hop, Kernel, LayerSpan, MemoryEvent, Product
from graphrun.sim.flops import launches_kernel
from graphrun.units import round_up

aten = torch.ops.aten
MATRIX_PRODUCTS = (aten.mm.default, aten.addmm.default)

# Operators that `_host_value` may answer: they copy values from the device to the host, or their
# output's size depends on values.
_HOST_READS = frozenset(
    {aten._local_scalar_dense.default, aten._to_copy.default, aten.bincount.default}
)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records allocations and releases of storages, weights read, and kernels.

    It also records hops (`Hop`): which tensors pass into and out of blocks or are read by
    operators, for plans that split a component over devices.

    ``module``: the component. ``blocks``: paths of its blocks. ``device``: meta, or the device on
    which the call runs with real weights. ``record``: the recording so far.

    Meta tensors have no values, so results that depend on values are fixed: ``item()`` returns True
    for a bool and 1 for a number, ``nonzero`` returns as many rows as possible, and a copy to the
    host returns zeros. Tensors with a constant value (`ConstantValues`) return that value.
    ``mask.all()`` is False: encoders drop a mask that is all ones, so False is the case that takes
    more memory.
    """

    supports_higher_order_operators = True

    def __init__(
        self, module: nn.Module, blocks: Iterable[str], device: torch.device = META
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = Call()
        self._kernel_numbers: dict[Kernel, int] = {}  # kernel -> its index in ``record.kernels``
        self._current_layer = ""  # path of the layer that runs
        self._device_type = device.type
        self._class_name = type(module).__name__
        self._is_compiled = any(map(is_compiled, modules_below(module)))
        self.constants = ConstantValues()
        self.has_guessed = False  # whether code got a value that depends on data
        self._last_key = 0  # storages are numbered by their keys in events
        self._external_keys: dict[int, int] = {}  # key given to `allocated` -> key in events
        # ``cdata``: the address of a storage's C++ object, which identifies a live storage
        self._live: dict[int, tuple[int, Any]] = {}  # cdata -> (key, weak reference)
        self._stack = [""]  # paths of the blocks and layers that are running, innermost last
        # cdata of a weight -> its first name (tied weights have several)
        self._names: dict[int, str] = {}
        # first name of a weight -> paths of the modules that have it
        self._owners: dict[str, set[str]] = defaultdict(set)
        modules = named_modules_below(module, repeated=True)
        named_weights = [
            (f"{path}.{name}" if path else name, tensor)
            for kind in ("_parameters", "_buffers")
            for path, child in modules
            for name, tensor in getattr(child, kind).items()
            if tensor is not None
        ]
        # Real weights may be views of one storage (an arena), so which ones an operator reads is
        # unknown: all count as read.
        if self._device_type != "meta":
            self.record.read_weights |= {name for name, _ in named_weights}
            # layers with a tensor that is read outside of the layers' own calls
            self.record.externally_read_layers |= set(layer_paths(module))
        # storages that exist before the call, held so that new storages do not reuse their
        # addresses
        self._existing: dict[int, torch.UntypedStorage] = {}
        self.ignore(tensor for _, tensor in named_weights)
        for name, tensor in named_weights:
            first_name = self._names.setdefault(tensor.untyped_storage()._cdata, name)
            self._owners[first_name].add(name.rpartition(".")[0])
        blocks = list(blocks)
        self._blocks = frozenset(blocks)
        submodules = dict(modules)
        self._tables = {
            name
            for name, owners in self._owners.items()
            if self._device_type == "meta"
            and name.endswith("weight")  # Gemma's embeddings also have a factor
            and any(isinstance(submodules[path], nn.Embedding) for path in owners)
        }
        self._hooks = [hook for path in blocks for hook in self._watch(submodules[path], path)]
        self._hooks += [
            hook
            for path in layer_paths(module)
            for hook in self._watch_layer(submodules[path], path)
        ]
        # id of a tensor -> (weak reference, its number: see `number_of` and `Hop`)
        self._hop_numbers: dict[int, tuple[Any, int]] = {}
        # cdata -> numbers of the tensors in that storage
        self._storage_numbers: dict[int, set[int]] = defaultdict(set)
        self._last_number = 0
        self._all_true = Storages()  # results of ``mask.all()`` or ``mask.sum() == mask.numel()``
        self._mask_sums = Storages()  # results of ``mask.sum()``

    @property
    def weights(self) -> Collection[int]:
        """Addresses of the storages of the module's weights."""
        return self._names.keys()

    def record_existing(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Record ``storages``, which the call may release, as allocated at its start."""
        for storage in storages:
            self._note_storage(storage)

    def allocated(self, key: int, nbytes: int) -> None:
        """Record a storage that hooks around the component allocated, such as diffusers' caches.

        These hooks run outside the traced call, on tensors of the dry run's simulated device;
        operators of the call itself run on meta. ``key`` identifies the storage for `freed`.
        """
        self._last_key += 1
        self._external_keys[key] = self._last_key
        self.record.events.append(MemoryEvent(self._last_key, nbytes))

    def freed(self, key: int) -> None:
        self.record.events.append(MemoryEvent(self._external_keys.pop(key), 0))

    def note_results(self, tensors: Iterable[torch.Tensor]) -> None:
        """Set ``record.results``: keys of the new storages of ``tensors``, the results."""
        entries = (self._live.get(tensor.untyped_storage()._cdata) for tensor in tensors)
        self.record.results = [*dict.fromkeys(live[0] for live in entries if live is not None)]

    def end(
        self,
        excluded_storages: Iterable[torch.UntypedStorage] = (),
        lasting_tensors: Iterable[torch.Tensor] = (),
    ) -> None:
        """Set ``record.persistent_keys`` to the live storages, except ``excluded_storages``, and
        ``record.lasting_keys`` to those of ``lasting_tensors`` among them.

        Call this after the call has returned and its results are released: the component keeps what
        is still live.
        """
        excluded_addresses = {storage._cdata for storage in excluded_storages}
        self.record.persistent_keys = [
            key for cdata, (key, _) in self._live.items() if cdata not in excluded_addresses
        ]
        addresses = {tensor.untyped_storage()._cdata for tensor in lasting_tensors}
        keys = {self._live[cdata][0] for cdata in addresses & self._live.keys()}
        self.record.lasting_keys = [key for key in self.record.persistent_keys if key in keys]

    @property
    def live(self) -> list[torch.UntypedStorage]:
        """Live storages that the call allocated."""
        return [
            storage for _, reference in self._live.values() if (storage := reference()) is not None
        ]

    def ignore(
        self, tensors: Iterable[torch.Tensor], storages: Iterable[torch.UntypedStorage] = ()
    ) -> None:
        """Leave out the storages of ``tensors`` and ``storages``, which exist before the call."""
        existing_storages = (*(tensor.untyped_storage() for tensor in tensors), *storages)
        self._existing |= {storage._cdata: storage for storage in existing_storages}

    def close(self) -> None:
        """Remove the hooks, and record the release of everything that is still live."""
        for hook in self._hooks:
            hook.remove()
        for cdata in list(self._live):
            self._release(cdata)
        self._existing.clear()

    @contextmanager
    def section(self) -> Iterator[Call]:
        """Open a section: a part of the call, such as the call of one block, for `replay`.

        Inside the context, ``record`` is the yielded section. At the end, ``record`` is the outer
        record again, extended by the section.
        """
        outer_record, self.record = self.record, Call(kernels=self.record.kernels)
        self.record.work.append((self._stack[-1], []))
        try:
            yield self.record
        finally:
            outer_record.extend(self.record)
            self.record = outer_record

    def repeatable(self, section: Call, results: Sequence[torch.Tensor]) -> Call | None:
        """Return ``section`` in the form that `replay` needs, or None if it cannot be replayed.

        It can be replayed if the storages that it allocated and that are still live belong to
        ``results``, one for each result. The returned section has no releases of older storages,
        and ``persistent_keys`` are the keys of ``results``.
        """
        allocated = {event.key for event in section.events if event.nbytes and not event.scratch}
        live = {cdata: key for cdata, (key, _) in self._live.items() if key in allocated}
        result_keys = [live.get(result.untyped_storage()._cdata, 0) for result in results]
        if sorted(result_keys) != sorted(live.values()):
            return None
        event_mask = [event.scratch or event.key in allocated for event in section.events]
        event_numbers = [0, *accumulate(event_mask)]  # new index of each event
        products = [
            product._replace(event=event_numbers[product.event]) for product in section.products
        ]
        spans = [
            span._replace(begin=event_numbers[span.begin], end=event_numbers[span.end])
            for span in section.spans
        ]
        return replace(
            section,
            events=[*compress(section.events, event_mask)],
            products=products,
            spans=spans,
            persistent_keys=result_keys,
        )

    def replay(
        self,
        section: Call,
        results: Sequence[torch.Tensor],
        numbers: Mapping[int, int],
        base_number: int,
    ) -> None:
        """Record a `repeatable` section again.

        ``results``: new tensors, not yet recorded, in place of the section's results. ``numbers``:
        tensor number in ``section`` -> number of the tensor that replaces it, for arguments and
        results. ``base_number``: the last tensor number before the section.
        """
        allocated = [event.key for event in section.events if event.nbytes and not event.scratch]
        # keys are numbered in the order of allocation
        shift = self._last_key + 1 - allocated[0] if allocated else 0
        self._last_key += len(allocated)
        # `_replace` would take twice as long, and a section may have thousands of events
        events = [
            MemoryEvent(key if scratch else key + shift, nbytes, scratch, hopper_bytes)
            for key, nbytes, scratch, hopper_bytes in section.events
        ]
        # a number is negative if its tensor exists before the call (`Hop`)
        section_numbers = {
            number for hop in section.hops for number, _ in hop.tensors if abs(number) > base_number
        }
        internal_numbers = sorted(section_numbers - numbers.keys(), key=abs)
        new_numbers = {
            number: self._new_number() * (1 if number > 0 else -1) for number in internal_numbers
        } | dict(numbers)
        hops = [
            hop.numbered(lambda number: new_numbers.get(number, number)) for hop in section.hops
        ]
        self.record.extend(replace(section, events=events, hops=hops))
        for key, result in zip(section.persistent_keys, results, strict=True):
            self._track(result.untyped_storage(), key + shift)
        for name in section.read_weights:
            self._note_loose_modules(self._owners[name], section.entered_blocks)

    def scratch(self, kernel: Kernel, nbytes: int, hopper_bytes: int | None = None) -> None:
        """Record scratch of ``kernel`` on GPUs; ``hopper_bytes``: on capability 9.0, if other."""
        hopper_bytes = nbytes if hopper_bytes is None else hopper_bytes
        self.record.events.append(
            MemoryEvent(self._kernel_number(kernel), nbytes, True, hopper_bytes)
        )

    def _watch(self, block: nn.Module, path: str) -> tuple[Any, Any]:
        """Register hooks that record when the block at ``path`` runs."""

        def begin(_: Any, args: Any, kwargs: Any) -> None:
            self._note_hop("gets", path, (args, kwargs))
            self._stack.append(path)
            self.record.entered_blocks.append(path)
            # a block without kernels gets an entry too, since the order of blocks matters
            self.record.work.append((path, []))

        def end(_: Any, __: Any, results: Any) -> None:
            self._stack.pop()
            self._note_hop("gives", path, results)

        return block.register_forward_pre_hook(
            begin, with_kwargs=True
        ), block.register_forward_hook(end)

    def returns(self, value: Any) -> None:
        """Record the tensors that the call returns. Call this while they are alive."""
        self._note_hop("gives", "", value)

    def _note_hop(self, kind: Literal["gets", "gives"], path: str, value: Any) -> None:
        tensors = {id(tensor): tensor for tensor in tensors_in(value) if self.number_of(tensor)}
        if kind == "gives" and not path:  # views of the results count too
            numbers = {
                number: tensor.nbytes
                for tensor in tensors.values()
                for number in self._numbers_in(tensor)
            }
            self.record.hops.append(Hop(kind, path, tuple(sorted(numbers.items()))))
        else:
            self.record.hops.append(
                Hop(
                    kind,
                    path,
                    tuple((self.number_of(tensor), tensor.nbytes) for tensor in tensors.values()),
                )
            )

    def number_of(self, tensor: torch.Tensor) -> int:
        """Return the number of ``tensor`` in `Hop`; 0 if it is empty or on the host."""
        if tensor.device.type != self._device_type or not tensor.nbytes:
            return 0
        entry = self._hop_numbers.get(id(tensor))
        if entry is not None and entry[0]() is tensor:
            return entry[1]
        cdata = tensor.untyped_storage()._cdata
        number = self._new_number() * (-1 if cdata in self._existing else 1)
        self._hop_numbers[id(tensor)] = weakref.ref(tensor), number
        self._storage_numbers[cdata].add(number)
        return number

    @property
    def last_number(self) -> int:
        """The largest tensor number so far, without its sign."""
        return self._last_number

    def _new_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _numbers_in(self, tensor: torch.Tensor) -> Collection[int]:
        return self._storage_numbers.get(tensor.untyped_storage()._cdata, ())

    def _note_access(
        self, func: Any, args: Any, kwargs: Any, argument_tensors: Sequence[torch.Tensor]
    ) -> None:
        """Record which numbered tensors ``func`` reads and writes."""
        read_numbers = {
            number for tensor in argument_tensors for number in self._numbers_in(tensor)
        }
        last_hop = self.record.hops[-1] if self.record.hops else None
        if (
            last_hop is None
            or last_hop.kind != "reads"
            or not read_numbers <= {number for number, _ in last_hop.tensors}
        ):
            self.record.hops.append(
                Hop("reads", "", tuple((number, 0) for number in sorted(read_numbers)))
            )
        if getattr(func, "_schema", None) is not None and func._schema.is_mutable:
            arguments = {
                parameter.name: value
                for parameter, value in zip(func._schema.arguments, args, strict=False)
            } | kwargs
            written_names = {
                parameter.name
                for parameter in func._schema.arguments
                if parameter.alias_info and parameter.alias_info.is_write
            }
            written_values = [arguments[name] for name in written_names & arguments.keys()]
            if written_numbers := {
                number
                for tensor in tensors_of(written_values)
                for number in self._numbers_in(tensor)
            }:
                self.record.hops.append(
                    Hop("writes", "", tuple((number, 0) for number in sorted(written_numbers)))
                )

    def _watch_layer(self, layer: nn.Module, path: str) -> tuple[Any, Any]:
        """Register hooks that record when the layer at ``path`` runs, and its `LayerSpan`."""
        first_event = 0

        def begin(*_: Any) -> None:
            nonlocal first_event
            first_event, self._current_layer = len(self.record.events), path
            self._note_loose_modules((path,))
            # for a layer that is also a block, `_watch` has added the entry
            if self._stack[-1] != path:
                self.record.work.append((path, []))
            self._stack.append(path)

        def end(*_: Any) -> None:
            self._current_layer = ""
            self._stack.pop()
            self.record.spans.append(LayerSpan(path, first_event, len(self.record.events)))

        return layer.register_forward_pre_hook(begin), layer.register_forward_hook(end)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # or else `FusedKernels` intercepts every attribute access of a tensor
        with torch._C.DisableTorchFunction():
            if getattr(func, "_schema", None) is None:
                return self._higher_order(func, args)
            return self._operator(func, args, kwargs or {})

    def _higher_order(self, func: Any, args: Any) -> Any:
        """Record an operator that takes functions. Raises GraphrunError for an unknown one."""
        if func.name() != "flex_attention":
            raise GraphrunError(
                f"{self._class_name} calls torch.ops.higher_order.{func.name()} "
                f"({_line_of_code()}), which cannot be planned: of the operators that take "
                "functions only flex_attention can; write it with Python's if, for and calls"
            )
        results = flex_results(args, on_meta=self._device_type == "meta")
        self._note_access(func, (), {}, [*tensors_of(args[:3])])
        for tensor in results:
            self._note_new(tensor)
        kernel = flex_kernel(args, results[0])
        self.scratch(kernel, 0 if self._is_compiled else flex_scratch(kernel))
        self.count(kernel)
        return results

    def _operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return an operator's result, and record what it reads, allocates and computes."""
        if (
            func in _HOST_READS
            and args[0].is_meta
            and (answer := self._host_value(func, args, kwargs)) is not None
        ):
            return answer
        args, result = self._result(func, args, kwargs)
        argument_tensors, result_tensors = [*tensors_of(args)], [*tensors_of((result,))]
        self.note_held(argument_tensors)
        self._note_access(func, args, kwargs, argument_tensors)
        self.note_reads(
            argument_tensors, rows=args[1].numel() if func is aten.embedding.default else 0
        )
        is_mask_sum = func is aten.sum.default and args[0].dtype == torch.bool
        is_all_true = func is aten.all.default or self._compares_mask_sum(func, args)
        for tensor in result_tensors:
            if self._note_new(tensor) and func in MATRIX_PRODUCTS:
                self._note_product(argument_tensors, tensor)
            if is_all_true:
                self._all_true[tensor] = True
            elif is_mask_sum:
                self._mask_sums[tensor] = True
        if not launches_kernel(func):
            return result
        arguments, results = (
            [tensor for tensor in tensors if tensor.device.type == self._device_type]
            for tensors in (argument_tensors, result_tensors)
        )
        kernel = operator_kernel(func, args, kwargs, result, arguments, results)
        if kernel is not None:
            if func is aten.convolution.default:
                convolution = convolution_of(args, result)
                self.scratch(
                    kernel,
                    convolution_scratch(convolution),
                    hopper_convolution_scratch(convolution),
                )
            self.count(kernel)
        return result

    def _result(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return an operator's arguments and its result.

        In the arguments, boolean masks that index a tensor are replaced by tensors of indices.
        """
        if (computed := self.constants.computed(func, args, kwargs)) is not NotImplemented:
            return args, computed
        if func is aten.index.Tensor and args[0].is_meta:
            columns = self.constants.index_columns
            args = (
                args[0],
                [column for index in args[1] for column in columns(index, self._note_new)],
            )
        if func is aten.nonzero.default and args[0].is_meta:
            shape = (args[0].numel(), args[0].dim())
            return args, torch.empty(shape, dtype=torch.long, device="meta")
        device = kwargs.get("device") or META
        if func is aten._to_copy.default and args[0].is_meta and device.type != "meta":
            dtype = kwargs.get("dtype") or args[0].dtype
            return args, torch.zeros(args[0].shape, dtype=dtype, device=device)
        result = on_meta(func, args, kwargs)
        # ``mask.sum() == number`` has no constant value: it goes to ``_all_true``
        if not self._compares_mask_sum(func, args):
            self.constants.propagate(func, args, kwargs, result)
        return args, result

    def _compares_mask_sum(self, func: Any, args: Any) -> bool:
        return func is aten.eq.Scalar and args[0] in self._mask_sums

    def note_reads(self, tensors: Iterable[torch.Tensor], *, rows: int = 0) -> None:
        """Note the weights among ``tensors``, and the layers whose weights other code reads.

        ``rows``: how many rows a lookup reads; 0 for other operators.
        """
        for tensor in tensors:
            if (name := self._names.get(tensor.untyped_storage()._cdata)) is not None:
                owners = self._owners[name]
                self.record.read_weights.add(name)
                if name in self._tables:
                    self.record.note_table(name, rows)
                self.record.externally_read_layers |= (
                    owners - {self._current_layer} if self._current_layer else owners
                )
                self._note_loose_modules(owners)

    def _note_loose_modules(
        self, owners: Collection[str], entered_blocks: Collection[str] = ()
    ) -> None:
        """Add ``owners`` to `Call.loose_modules`: they are used while their block does not run.

        No effect if the block runs now (is on the stack). ``entered_blocks``: the blocks of a
        replayed section, which are not on the stack; they count as running. ``owners``: paths of
        the modules that have one weight. A weight that several blocks share is skipped: it is an
        unblocked weight in any case.
        """
        blocks = {_block_at(owner, self._blocks) for owner in owners}
        if (
            len(blocks) == 1
            and (block := blocks.pop())
            and block not in self._stack
            and block not in entered_blocks
        ):
            self.record.loose_modules.update(owners)

    def _host_value(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a `_HOST_READS` operator without running it. None: run it.

        The constant, if the value is known; else the fixed value of the class docstring. For
        ``bincount``: the result that takes the most memory.
        """
        if func is aten.bincount.default:
            self.has_guessed = True
            return self.constants.worst_bincount(args[0])
        value = self.constants.value(args[0])
        if func is aten._local_scalar_dense.default:
            if value is not None:
                return value.item()
            self.has_guessed = True
            return args[0] not in self._all_true if args[0].dtype == torch.bool else 1
        if value is None:
            return None
        return value.clone() if torch.device(kwargs.get("device") or "meta").type == "cpu" else None

    def count(self, kernel: Kernel) -> None:
        """Add a kernel to ``work``: to its last entry, or to a new one for another block."""
        number = self._kernel_number(kernel)
        if not self.record.work or self.record.work[-1][0] != self._stack[-1]:
            self.record.work.append((self._stack[-1], []))
        self.record.work[-1][1].append(number)

    def _kernel_number(self, kernel: Kernel) -> int:
        """Return the index of ``kernel`` in ``record.kernels``, where it is added if it is new."""
        number = self._kernel_numbers.setdefault(kernel, len(self._kernel_numbers))
        if number == len(self.record.kernels):
            self.record.kernels.append(kernel)
        return number

    def _note_product(self, factors: Sequence[torch.Tensor], result: torch.Tensor) -> None:
        """Record a product with a weight, directly after the allocation of ``result``."""
        for factor in factors:
            name = self._names.get(factor.untyped_storage()._cdata)
            if name is not None and factor.dim() == 2:
                self.record.products.append(
                    Product(len(self.record.events) - 1, name, result.numel() // result.shape[-1])
                )

    def note_held(self, tensors: Iterable[torch.Tensor]) -> None:
        """Record those of ``tensors`` on the device whose storage is new to the recorder.

        They existed before the call, or its code moved them to the device. Weights and arguments of
        the call are not new (`ignore`).
        """
        for tensor in tensors:
            self._note_new(tensor)

    def _note_new(self, tensor: torch.Tensor) -> bool:
        """Record ``tensor`` as the last event, and return True, if its storage is new."""
        return tensor.device.type == self._device_type and self._note_storage(
            tensor.untyped_storage()
        )

    def _note_storage(self, storage: torch.UntypedStorage) -> bool:
        cdata = storage._cdata
        # in events, 0 bytes mean a release
        if cdata in self._live or cdata in self._existing or not storage.nbytes():
            return False
        self._last_key += 1
        self._track(storage, self._last_key)
        self.record.events.append(
            MemoryEvent(self._last_key, round_up(storage.nbytes(), ROUND_BYTES))
        )
        return True

    def _track(self, storage: torch.UntypedStorage, key: int) -> None:
        """Note ``storage`` as live until it is garbage-collected, which records its release."""
        cdata = storage._cdata
        self._live[cdata] = key, weakref.ref(storage, functools.partial(self._release, cdata))

    def _release(self, cdata: int, _: object = None) -> None:
        self._storage_numbers.pop(cdata, None)
        if (entry := self._live.pop(cdata, None)) is not None:
            self.record.events.append(MemoryEvent(entry[0], 0))


def _line_of_code() -> str:
    """Return the innermost line outside PyTorch and this package, as file.py:line."""
    packages = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
    for frame, line in traceback.walk_stack(None):
        file = frame.f_code.co_filename
        if not file.startswith(packages) and Path(file).name != "contextlib.py":
            return f"{Path(file).name}:{line}"
    return "?"


def layer_paths(module: nn.Module) -> list[str]:
    """Return the paths of the layers of ``module``.

    A layer has parameters or buffers of its own, and no module inside it has any.
    """
    paths = []
    for path, child in named_modules_below(module):
        if (
            path
            and own_tensors(child)
            and not any(inner._parameters or inner._buffers for inner in modules_below(child)[1:])
        ):
            paths.append(path)
    return paths


def _block_at(path: str, blocks: Collection[str]) -> str:
    """Return the innermost block that is at ``path`` or contains it; "" if there is none."""
    while path and path not in blocks:
        path = path.rpartition(".")[0]
    return path
