"""Records what one call into a component would allocate, read and compute. The call runs on the meta device, or where that is
not possible on the CPU with real weights.

`Recorder` sees every operator that PyTorch dispatches. Two operators allocate differently on meta than on a GPU:

    attention      on meta the math backend runs, which allocates the scores, S x S for S tokens. Fused kernels do not allocate
                   them, so `FusedAttention` intercepts attention before dispatch. It records the output, and as scratch the fp32
                   logsumexp that the fused kernels return.
    convolution    on a GPU takes scratch that the dispatcher does not see: copies of its tensors in another memory layout.

Scratch is memory that is allocated and freed within one operator. `graphrun.profile.corrections` has the amounts.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from graphrun.profile.constants import ConstantValues, Storages
from graphrun.profile.corrections import Convolution, attention_scratch, convolution_scratch
from graphrun.profile.meta_ops import on_meta
from graphrun.profile.recording import Product, Span
from graphrun.units import round_up

# PyTorch's CUDA caching allocator rounds every allocation up to a multiple of this (kMinBlockSize).
ROUND_BYTES = 512
META = torch.device("meta")
aten = torch.ops.aten
MATRIX_PRODUCTS = (aten.mm.default, aten.addmm.default)

# Operators of which `_host_value` may know the result: they copy values from the device to the host, or their output's size depends
# on values.
_HOST_READS = frozenset({aten._local_scalar_dense.default, aten._to_copy.default, aten.bincount.default})


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A section of what a `Recorder` recorded, which it can record once more (`Recorder.replay`). Fields as in `Recorder`;
    numbers of events in ``products`` and ``spans`` count from the start of the section. ``outputs``: keys of the storages that
    are still live at its end."""

    events: tuple[tuple[int, int], ...]
    flops: tuple[tuple[str, float], ...]
    entered: tuple[str, ...]
    touched: frozenset[str]
    outputs: tuple[int, ...]
    products: tuple[Product, ...] = ()
    spans: tuple[Span, ...] = ()
    outside: frozenset[str] = frozenset()
    loose: frozenset[str] = frozenset()

    def renamed(self, path: str, other: str) -> Excerpt:
        """This excerpt of the block at ``path`` as the equal block at ``other`` would give it: with its names of modules and
        tensors."""

        def rename(name: str) -> str:
            return other + name[len(path) :] if name == path or name.startswith(f"{path}.") else name

        flops = tuple((rename(name), number) for name, number in self.flops)
        products = tuple(replace(product, name=rename(product.name)) for product in self.products)
        entered, touched = tuple(map(rename, self.entered)), frozenset(map(rename, self.touched))
        spans = tuple(replace(span, path=rename(span.path)) for span in self.spans)
        outside, loose = frozenset(map(rename, self.outside)), frozenset(map(rename, self.loose))
        return Excerpt(self.events, flops, entered, touched, self.outputs, products, spans, outside, loose)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The start of an excerpt: the lengths of the recorder's lists, and the contents of its sets, which were emptied then."""

    events: int
    flops: int
    entered: int
    spans: int
    touched: set[str]
    outside: set[str]
    loose: set[str]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records the allocations and releases of storages, the weights read, and the FLOPs of each block.

    Attributes, which become fields of `graphrun.profile.recording.Call`: ``events``, ``peak_bytes``, ``touched``, ``flops``,
    ``products``, ``spans``, ``outside``, ``loose`` and ``kept`` have the meaning described there. ``entered``: paths of the blocks
    that were called, in order.

    Meta tensors have no values, so results that depend on values are fixed: ``item()`` returns True for a bool and 1 for a
    number, ``nonzero`` returns as many rows as are possible, and a copy to the host returns zeros. Tensors with a constant value
    (see `ConstantValues`) give that value. ``mask.all()`` is False: encoders drop a mask that is all ones, so this is the case
    that takes more memory.

    ``blocks``: paths of the blocks in ``module``. ``device``: meta, or the device on which the call runs with real weights.
    """

    def __init__(self, module: nn.Module, blocks: Iterable[str], device: torch.device = META) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[tuple[int, int]] = []
        self.peak_bytes = 0
        self.touched: set[str] = set()
        self.flops: list[tuple[str, float]] = []
        self.entered: list[str] = []
        self.products: list[Product] = []
        self.spans: list[Span] = []
        self.outside: set[str] = set()
        self.loose: set[str] = set()
        self.kept: tuple[int, ...] = ()
        self._running = ""  # path of the layer that runs
        self._device_type = device.type
        self.constants = ConstantValues()
        self._live_bytes = 0
        self._last_key = 0  # keys in events number the storages
        # Below, ``cdata`` is the address of a storage's C++ object, by which it is recognized while it is alive.
        self._live: dict[int, tuple[int, int, Any]] = {}  # cdata -> (key, bytes, weak reference)
        self._stack = [""]  # paths of the blocks and layers that are running, innermost last
        self._names: dict[int, str] = {}  # cdata of a weight -> its first name; tied weights have several
        weights = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        if self._device_type != "meta":  # weights may share a storage, so which are read is unknown: all are noted
            self.touched |= {name for name, _ in weights}
            self.outside |= set(layer_paths(module))
        # Storages that exist before the call. Holding them keeps new storages from reusing their addresses.
        self._existing: dict[int, torch.UntypedStorage] = {}
        self.ignore(tensor for _, tensor in weights)
        for name, tensor in weights:
            self._names.setdefault(tensor.untyped_storage()._cdata, name)
        self._owners: dict[str, set[str]] = {}  # first name of a weight -> paths of the modules that have it
        for name, tensor in weights:
            self._owners.setdefault(self._names[tensor.untyped_storage()._cdata], set()).add(name.rpartition(".")[0])
        blocks = list(blocks)
        self._blocks = _blocks_of(module, frozenset(blocks))  # path of a module -> path of the block that it is in
        self._hooks = [hook for path in blocks for hook in self._watch(module.get_submodule(path), path)]
        self._hooks += [hook for path in layer_paths(module) for hook in self._watch_layer(module.get_submodule(path), path)]
        self._all_true = Storages()  # results of ``mask.all()`` or ``mask.sum() == mask.numel()``
        self._mask_sums = Storages()  # results of ``mask.sum()``

    @property
    def weights(self) -> Collection[int]:
        """Addresses of the storages of the module's weights."""
        return self._names.keys()

    def end(self) -> None:
        """Sets ``kept``. To be called when the call has returned and its results are released: what is still live then is kept
        by the component."""
        self.kept = tuple(key for key, _, _ in self._live.values())

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leaves out the storages of ``tensors``, the inputs or weights of the call: they exist before it. Their
        release is not recorded either."""
        self._existing |= {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}

    def close(self) -> None:
        """Removes the hooks, and records the release of everything that is still live: outputs, and what the component keeps."""
        for hook in self._hooks:
            hook.remove()
        for cdata in list(self._live):
            self._release(cdata)
        self._existing.clear()

    def checkpoint(self) -> Checkpoint:
        """Begins an excerpt, which `since` ends. In between, ``touched``, ``outside`` and ``loose`` hold only what was added."""
        self.flops.append((self._stack[-1], 0.0))  # a new entry, so that `count` adds nothing to one before the excerpt
        before, self.touched = self.touched, set()
        outside, self.outside = self.outside, set()
        loose, self.loose = self.loose, set()
        return Checkpoint(len(self.events), len(self.flops) - 1, len(self.entered), len(self.spans), before, outside, loose)

    def since(self, start: Checkpoint, outs: Sequence[torch.Tensor]) -> Excerpt | None:
        """The excerpt that ``start`` began; None if it cannot be replayed.

        It can if, of the storages allocated in it, exactly those of ``outs`` are still live, one for each.
        """
        touched = frozenset(self.touched)
        outside, loose = frozenset(self.outside), frozenset(self.loose)
        self.touched |= start.touched
        self.outside |= start.outside
        self.loose |= start.loose
        events = tuple(self.events[start.events :])
        allocated = {key for key, nbytes in events if nbytes > 0}
        outputs = tuple(self._live[cdata][0] for out in outs if (cdata := out.untyped_storage()._cdata) in self._live)
        still_live = {key for key, _, _ in self._live.values()} & allocated
        if len(outputs) != len(outs) or len(set(outputs)) != len(outs) or still_live != set(outputs):
            return None
        products = tuple(replace(of, event=of.event - start.events) for of in self.products if of.event >= start.events)
        spans = tuple(replace(of, begin=of.begin - start.events, end=of.end - start.events) for of in self.spans[start.spans :])
        flops, entered = tuple(self.flops[start.flops :]), tuple(self.entered[start.entered :])
        return Excerpt(events, flops, entered, touched, outputs, products, spans, outside, loose)

    def replay(self, excerpt: Excerpt, outs: Sequence[torch.Tensor]) -> None:
        """Records ``excerpt`` once more. ``outs``: new tensors, not yet recorded, in the place of the excerpt's outputs."""
        keys: dict[int, tuple[int, int]] = {}  # key in the excerpt -> (new key, bytes)
        positions = []  # number of each event here
        for key, nbytes in excerpt.events:
            positions.append(len(self.events))
            if nbytes < 0:  # scratch
                self.events.append((key, nbytes))
            elif nbytes > 0:
                self._last_key += 1
                keys[key] = self._last_key, nbytes
                self._allocate(self._last_key, nbytes)
            elif (found := keys.pop(key, None)) is not None:  # releases of storages from before the excerpt are left out
                self.events.append((found[0], 0))
                self._live_bytes -= found[1]
        for key, out in zip(excerpt.outputs, outs, strict=True):
            self._track(out, *keys[key])
        self.flops += excerpt.flops
        self.entered += excerpt.entered
        self.touched |= excerpt.touched
        self.products += (replace(product, event=positions[product.event]) for product in excerpt.products)
        positions.append(len(self.events))
        self.spans += (replace(span, begin=positions[span.begin], end=positions[span.end]) for span in excerpt.spans)
        self.outside |= excerpt.outside
        self.loose |= excerpt.loose
        for name in excerpt.touched:
            self._note_loose(self._owners.get(name, ()), excerpt.entered)

    def scratch(self, nbytes: int, spared_bytes: int = 0) -> None:
        """Records ``nbytes`` of scratch. GPUs that avoid large copies (`Hardware.spares_large_copies`) need ``spared_bytes``
        less."""
        if nbytes:
            self.events.append((spared_bytes, -nbytes))

    def _watch(self, block: nn.Module, path: str) -> tuple[Any, Any]:
        """Hooks that record when the block at ``path`` runs."""

        def begin(*_: Any) -> None:
            self._stack.append(path)
            self.entered.append(path)
            self.flops.append((path, 0.0))  # an entry even for a block without counted FLOPs, since the order of blocks matters

        def end(*_: Any) -> None:
            self._stack.pop()

        return block.register_forward_pre_hook(begin), block.register_forward_hook(end)

    def _watch_layer(self, layer: nn.Module, path: str) -> tuple[Any, Any]:
        """Hooks that record when the layer at ``path`` runs, and its `Span`."""
        first_event = 0

        def begin(*_: Any) -> None:
            nonlocal first_event
            first_event, self._running = len(self.events), path
            self._note_loose((path,))
            if self._stack[-1] != path:  # for a layer that is a block too, `_watch` has made the entry
                self.flops.append((path, 0.0))
            self._stack.append(path)

        def end(*_: Any) -> None:
            self._running = ""
            self._stack.pop()
            self.spans.append(Span(path, first_event, len(self.events)))

        return layer.register_forward_pre_hook(begin), layer.register_forward_hook(end)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # otherwise `FusedAttention` intercepts every attribute access of a tensor
            return self._operator(func, args, kwargs or {})

    def _operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in _HOST_READS and args[0].is_meta and (answer := self._host_value(func, args, kwargs)) is not None:
            return answer
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return args[0] not in self._all_true if args[0].dtype == torch.bool else 1
        if func is aten.index.Tensor and args[0].is_meta:
            args = args[0], [column for index in args[1] for column in self.constants.index_columns(index, self._note_new)]
        if func is aten.nonzero.default and args[0].is_meta:
            out = torch.empty(args[0].numel(), args[0].dim(), dtype=torch.long, device="meta")
        elif func is aten._to_copy.default and args[0].is_meta and _needs_values(kwargs.get("device")):
            out = torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=kwargs["device"])
        else:
            out = on_meta(func, args, kwargs)
            if func is not aten.eq.Scalar or args[0] not in self._mask_sums:  # that comparison means "all true": see ``_all_true``
                self.constants.propagate(func, args, kwargs, out)
        for tensor in _tensors(args):
            if (name := self._names.get(tensor.untyped_storage()._cdata)) is not None:
                self.touched.add(name)
                self.outside |= self._owners[name] - {self._running} if self._running else self._owners[name]
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
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.count(formula(*args, **kwargs, out_val=out))
        return out

    def _note_loose(self, owners: Collection[str], entered: Collection[str] = ()) -> None:
        """Adds ``owners`` to ``loose`` if they are inside a block that neither runs nor is among the ``entered`` ones.
        ``owners``: paths of the modules that have one weight.

        A weight that several blocks share is skipped: it belongs to the remainder in any case.
        """
        blocks = {self._blocks.get(owner, "") for owner in owners}
        if len(blocks) == 1 and (block := blocks.pop()) and block not in self._stack and block not in entered:
            self.loose.update(owners)

    def _host_value(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Result of one of `_HOST_READS`: for ``bincount`` the worst case, for the others the value on the CPU if it is
        constant. None if unknown."""
        if func is aten.bincount.default:
            return self.constants.worst_bincount(args[0])
        if (value := self.constants.value(args[0])) is None:
            return None
        if func is aten._local_scalar_dense.default:
            return value.item()
        return value.clone() if torch.device(kwargs.get("device") or "meta").type == "cpu" else None

    def count(self, flops: float) -> None:
        """Adds FLOPs of the running block or layer: to the last entry if that is its own, else in a new entry."""
        path = self._stack[-1]
        if self.flops and self.flops[-1][0] == path:
            flops += self.flops.pop()[1]
        self.flops.append((path, flops))

    def _note_product(self, args: Any, result: torch.Tensor) -> None:
        """Records a matrix product with a weight. To be called directly after the allocation of ``result``, the last event."""
        for factor in _tensors(args):
            name = self._names.get(factor.untyped_storage()._cdata)
            if name is not None and factor.dim() == 2:
                self.products.append(Product(len(self.events) - 1, name, result.numel() // result.shape[-1]))

    def _note_new(self, tensor: torch.Tensor) -> bool:
        """Records the allocation of ``tensor`` if its storage is new. Returns whether it is; the allocation is then the last
        event."""
        storage = tensor.untyped_storage()
        cdata = storage._cdata
        known = cdata in self._live or cdata in self._existing
        if tensor.device.type != self._device_type or known or not storage.nbytes():  # in events, 0 bytes mean a release
            return False
        nbytes = round_up(storage.nbytes(), ROUND_BYTES)
        self._last_key += 1
        self._track(tensor, self._last_key, nbytes)
        self._allocate(self._last_key, nbytes)
        return True

    def _allocate(self, key: int, nbytes: int) -> None:
        self.events.append((key, nbytes))
        self._live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)

    def _track(self, tensor: torch.Tensor, key: int, nbytes: int) -> None:
        """Notes the storage of ``tensor`` as live until it is garbage-collected, which records its release."""
        storage = tensor.untyped_storage()
        cdata = storage._cdata
        self._live[cdata] = key, nbytes, weakref.ref(storage, functools.partial(self._release, cdata))

    def _release(self, cdata: int, _: object = None) -> None:
        if (found := self._live.pop(cdata, None)) is not None:
            self.events.append((found[0], 0))
            self._live_bytes -= found[1]


def layer_paths(module: nn.Module) -> list[str]:
    """Paths of the layers of ``module``: modules that have parameters or buffers of their own, and nothing inside that has."""
    found = []
    for path, child in module.named_modules():
        own = any(tensor is not None for tensor in (*child._parameters.values(), *child._buffers.values()))
        if path and own and all(inner is child or not (inner._parameters or inner._buffers) for inner in child.modules()):
            found.append(path)
    return found


def _blocks_of(module: nn.Module, blocks: Collection[str]) -> dict[str, str]:
    """For each module that is one of ``blocks`` or inside of one: its path -> the path of the innermost such block."""
    found: dict[str, str] = {}
    for path, _ in module.named_modules():  # parents come before their children
        block = path if path in blocks else found.get(path.rpartition(".")[0], "")
        if block:
            found[path] = block
    return found


class FusedAttention(TorchFunctionMode):
    """Replaces `scaled_dot_product_attention` by what it allocates on a GPU, and gives ``torch.tensor([...])`` a constant value.

    Recorded for b batches, h heads, s_q queries, s_k keys, and features d_k of keys and d_v of values: the output ``[b h s_q
    d_v]``; as scratch the fp32 logsumexp ``[b h s_q]``; FLOPs of two matrix products, 2 b h s_q s_k (d_k + d_v).
    ``fused=False``: the scratch of the math backend, with its scores ``[b h s_q s_k]``."""

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
        query, key, value = (*args, *(kwargs[name] for name in ("query", "key", "value")[len(args) :]))[:3]
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        rows = query.numel() // query.shape[-1]  # b h s_q
        width, keys = query.shape[-1], key.shape[-2]  # d_k, s_k
        self.recorder.scratch(attention_scratch(rows, keys, width, query.element_size(), fused=self.fused))
        self.recorder.count(2.0 * rows * keys * (width + value.shape[-1]))
        return out


def _convolution(source: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, stride: Sequence[int]) -> Convolution:
    return Convolution(
        input_bytes=source.numel() * source.element_size(),
        output_bytes=result.numel() * result.element_size(),
        weight_bytes=weight.numel() * weight.element_size(),
        element_bytes=result.element_size(),
        inputs=source.shape[1],
        outputs=result.shape[1],
        taps=weight.numel() // (weight.shape[0] * weight.shape[1]),
        strided=max(stride) > 1,
    )


def _needs_values(device: torch.device | None) -> bool:
    """Whether a copy of a meta tensor to ``device`` has to give it values."""
    return device is not None and device.type != "meta"


def _tensors(items: Any) -> Iterable[torch.Tensor]:
    """The tensors in ``items``, and in lists and tuples inside it."""
    for item in items:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from _tensors(item)
