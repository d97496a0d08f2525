"""Runs one call into a component on meta and records what it would allocate, read and compute. No weights, no device.

Attention and convolution are the two places where meta shows something else than a card does:

    attention      on meta falls back to the math backend and shows a tensor of S x S that no fused kernel makes. It is answered
                   before dispatch: its output, and as scratch the fp32 logsumexp that the fused kernels return.
    convolution    takes scratch that no dispatcher sees: copies of its tensors in another layout.

How much scratch: `graphrun.profile.corrections`.
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

ROUND_BYTES = 512
META = torch.device("meta")
aten = torch.ops.aten
MATRIX_PRODUCTS = (aten.mm.default, aten.addmm.default)

# Where values go from the device to the host, or decide a size.
_ANSWERED = frozenset({aten._local_scalar_dense.default, aten._to_copy.default, aten.bincount.default})


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A stretch of a record that can be replayed: as the fields of `Recorder`; ``left`` holds the keys that live on after it."""

    events: tuple[tuple[int, int], ...]
    flops: tuple[tuple[str, float], ...]
    entered: tuple[str, ...]
    touched: frozenset[str]
    left: tuple[int, ...]
    products: tuple[Product, ...] = ()  # their events counted from the stretch's first, as those of spans
    spans: tuple[Span, ...] = ()
    outside: frozenset[str] = frozenset()
    loose: frozenset[str] = frozenset()

    def elsewhere(self, path: str, other: str) -> Excerpt:
        """What a block at ``other`` does that is like the one at ``path``."""

        def there(name: str) -> str:
            return other + name[len(path) :] if name == path or name.startswith(f"{path}.") else name

        flops = tuple((there(name), number) for name, number in self.flops)
        products = tuple(replace(product, name=there(product.name)) for product in self.products)
        entered, touched = tuple(map(there, self.entered)), frozenset(map(there, self.touched))
        spans = tuple(replace(span, path=there(span.path)) for span in self.spans)
        outside, loose = frozenset(map(there, self.outside)), frozenset(map(there, self.loose))
        return Excerpt(self.events, flops, entered, touched, self.left, products, spans, outside, loose)


@dataclass(frozen=True, slots=True)
class Beginning:
    """A place in a record: lengths of its lists, and what its sets held before."""

    events: int
    flops: int
    entered: int
    spans: int
    touched: set[str]
    outside: set[str]
    loose: set[str]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active: live bytes by storage, parameters read, and FLOPs by the block that is running.

    On meta an index hits everything: ``item()`` of what is not `ConstantValues` answers True or 1, ``nonzero`` its largest shape.
    ``mask.all()`` answers False: encoders leave a full mask out, and one that is not full takes memory. A copy to the host: zeros.
    """

    def __init__(self, module: nn.Module, blocks: Iterable[str], place: torch.device = META) -> None:
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
        self._running = ""  # the layer whose call this is
        self._place = place.type
        self.known = ConstantValues()
        self._now = 0
        self._next = 0
        self._live: dict[int, tuple[int, int, Any]] = {}
        self._stack = [""]
        self._names: dict[int, str] = {}
        weights = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        if self._place != "meta":  # weights may lie in one storage, so that which of them is read cannot be told
            self.touched |= {name for name, _ in weights}
            self.outside |= set(layer_paths(module))
        # Storages that are there before the call. While they are held, none that is made has the address of one.
        self._there: dict[int, torch.UntypedStorage] = {}
        self.ignore(tensor for _, tensor in weights)
        for name, tensor in weights:
            self._names.setdefault(tensor.untyped_storage()._cdata, name)
        self._owners: dict[str, set[str]] = {}
        for name, tensor in weights:
            self._owners.setdefault(self._names[tensor.untyped_storage()._cdata], set()).add(name.rpartition(".")[0])
        blocks = list(blocks)
        self._units = _units_of(module, frozenset(blocks))
        self._hooks = [hook for path in blocks for hook in self._watch(module.get_submodule(path), path)]
        self._hooks += [hook for path in layer_paths(module) for hook in self._watch_layer(module.get_submodule(path), path)]
        self._whole = Storages()  # results of ``mask.all()``, or of ``mask.sum() == mask.numel()``
        self._sums = Storages()  # results of ``mask.sum()``

    @property
    def weights(self) -> Collection[int]:
        """The storages of the module's weights."""
        return self._names.keys()

    def end(self) -> None:
        """The call has ended, and its results are gone: what lives now is kept."""
        self.kept = tuple(key for key, _, _ in self._live.values())

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """The inputs of the call: they are there already, also when the component lets go of them."""
        self._there |= {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}

    def close(self) -> None:
        """Take the hooks off, and release what is still live (the call's outputs) at the end of the record."""
        for hook in self._hooks:
            hook.remove()
        for cdata in list(self._live):
            self._gone(cdata)
        self._there.clear()

    def begin(self) -> Beginning:
        """A place in the record, which `since` must be called with."""
        self.flops.append((self._stack[-1], 0.0))
        before, self.touched = self.touched, set()
        outside, self.outside = self.outside, set()
        loose, self.loose = self.loose, set()
        return Beginning(len(self.events), len(self.flops) - 1, len(self.entered), len(self.spans), before, outside, loose)

    def since(self, begin: Beginning, outs: Sequence[torch.Tensor]) -> Excerpt | None:
        """What was recorded since ``begin``, where nothing of it lives on but ``outs``, each in a storage of its own; else None."""
        touched = frozenset(self.touched)
        outside, loose = frozenset(self.outside), frozenset(self.loose)
        self.touched |= begin.touched
        self.outside |= begin.outside
        self.loose |= begin.loose
        events = tuple(self.events[begin.events :])
        made = {key for key, nbytes in events if nbytes > 0}
        left = tuple(self._live[cdata][0] for out in outs if (cdata := out.untyped_storage()._cdata) in self._live)
        alive = {key for key, _, _ in self._live.values()} & made
        if len(left) != len(outs) or len(set(left)) != len(outs) or alive != set(left):
            return None
        products = tuple(replace(of, event=of.event - begin.events) for of in self.products if of.event >= begin.events)
        spans = tuple(replace(of, begin=of.begin - begin.events, end=of.end - begin.events) for of in self.spans[begin.spans :])
        flops, entered = tuple(self.flops[begin.flops :]), tuple(self.entered[begin.entered :])
        return Excerpt(events, flops, entered, touched, left, products, spans, outside, loose)

    def replay(self, excerpt: Excerpt, outs: Sequence[torch.Tensor]) -> None:
        """Record ``excerpt`` once more. ``outs``, new tensors that are nowhere recorded, take the places of what it left."""
        keys: dict[int, tuple[int, int]] = {}
        places = []
        for key, nbytes in excerpt.events:
            places.append(len(self.events))
            if nbytes < 0:
                self.events.append((key, nbytes))
            elif nbytes > 0:
                self._next += 1
                keys[key] = self._next, nbytes
                self._enter(self._next, nbytes)
            elif (found := keys.pop(key, None)) is not None:
                self.events.append((found[0], 0))
                self._now -= found[1]
        for key, out in zip(excerpt.left, outs, strict=True):
            self._follow(out, *keys[key])
        self.flops += excerpt.flops
        self.entered += excerpt.entered
        self.touched |= excerpt.touched
        self.products += (replace(product, event=places[product.event]) for product in excerpt.products)
        places.append(len(self.events))
        self.spans += (replace(span, begin=places[span.begin], end=places[span.end]) for span in excerpt.spans)
        self.outside |= excerpt.outside
        self.loose |= excerpt.loose
        for name in excerpt.touched:
            self._note_loose(self._owners.get(name, ()), excerpt.entered)

    def scratch(self, nbytes: int, spared_bytes: int = 0) -> None:
        """Note ``nbytes`` that are taken and given back within one kernel, and how many of them some cards do without."""
        if nbytes:
            self.events.append((spared_bytes, -nbytes))

    def _watch(self, block: nn.Module, path: str) -> tuple[Any, Any]:
        def begin(*_: Any) -> None:
            self._stack.append(path)
            self.entered.append(path)
            self.flops.append((path, 0.0))  # a place in the order also for a block that computes nothing that is counted

        def end(*_: Any) -> None:
            self._stack.pop()

        return block.register_forward_pre_hook(begin), block.register_forward_hook(end)

    def _watch_layer(self, layer: nn.Module, path: str) -> tuple[Any, Any]:
        started = 0

        def begin(*_: Any) -> None:
            nonlocal started
            started, self._running = len(self.events), path
            self._note_loose((path,))
            if self._stack[-1] != path:  # a layer that is a block has its place already
                self.flops.append((path, 0.0))
            self._stack.append(path)

        def end(*_: Any) -> None:
            self._running = ""
            self._stack.pop()
            self.spans.append(Span(path, started, len(self.events)))

        return layer.register_forward_pre_hook(begin), layer.register_forward_hook(end)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # `FusedAttention` would be asked for each attribute of a tensor
            return self._operator(func, args, kwargs or {})

    def _operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in _ANSWERED and args[0].is_meta and (answer := self._answer(func, args, kwargs)) is not None:
            return answer
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            full = args[0] not in self._whole
            return full if args[0].dtype == torch.bool else 1
        if func is aten.index.Tensor and args[0].is_meta:
            args = args[0], [column for index in args[1] for column in self.known.columns(index, self._keep)]
        if func is aten.nonzero.default and args[0].is_meta:
            out = torch.empty(args[0].numel(), args[0].dim(), dtype=torch.long, device="meta")
        elif func is aten._to_copy.default and args[0].is_meta and _leaves_meta(kwargs.get("device")):
            out = torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=kwargs["device"])
        else:
            out = on_meta(func, args, kwargs)
            if func is not aten.eq.Scalar or args[0] not in self._sums:
                self.known.follow(func, args, kwargs, out)
        for tensor in _tensors(args):
            if (name := self._names.get(tensor.untyped_storage()._cdata)) is not None:
                self.touched.add(name)
                self.outside |= self._owners[name] - {self._running} if self._running else self._owners[name]
                self._note_loose(self._owners[name])
        for tensor in _tensors((out,)):
            if self._keep(tensor) and func in MATRIX_PRODUCTS:
                self._note_product(args, tensor)
            if func is aten.all.default or (func is aten.eq.Scalar and args[0] in self._sums):
                self._whole[tensor] = True
            elif func is aten.sum.default and args[0].dtype == torch.bool:
                self._sums[tensor] = True
        if func is aten.convolution.default:
            self.scratch(*convolution_scratch(_convolution(args[0], args[1], out, args[3])))
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.count(formula(*args, **kwargs, out_val=out))
        return out

    def _note_loose(self, owners: Collection[str], entered: Collection[str] = ()) -> None:
        """Notes those of ``owners`` that lie in a block which neither runs nor is among the ``entered``. What several blocks share
        is the rest's anyway."""
        units = {self._units.get(owner, "") for owner in owners}
        if len(units) == 1 and (unit := units.pop()) and unit not in self._stack and unit not in entered:
            self.loose.update(owners)

    def _answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the host reads from the device, where it is known; a count of what data chooses."""
        if func is aten.bincount.default:
            return self.known.counted(args[0])
        if (value := self.known.value(args[0])) is None:
            return None
        if func is aten._local_scalar_dense.default:
            return value.item()
        return value.clone() if torch.device(kwargs.get("device") or "meta").type == "cpu" else None

    def count(self, flops: float) -> None:
        """Add FLOPs to the block that is running: to its last stretch, if nothing else computed since."""
        path = self._stack[-1]
        if self.flops and self.flops[-1][0] == path:
            flops += self.flops.pop()[1]
        self.flops.append((path, flops))

    def _note_product(self, args: Any, made: torch.Tensor) -> None:
        for factor in _tensors(args):
            name = self._names.get(factor.untyped_storage()._cdata)
            if name is not None and factor.dim() == 2:
                self.products.append(Product(len(self.events) - 1, name, made.numel() // made.shape[-1]))

    def _keep(self, tensor: torch.Tensor) -> bool:
        """Whether it is a new tensor: its allocation is then the last event."""
        storage = tensor.untyped_storage()
        cdata = storage._cdata
        known = cdata in self._live or cdata in self._there
        if tensor.device.type != self._place or known or not storage.nbytes():  # in a record 0 bytes are a release
            return False
        nbytes = round_up(storage.nbytes(), ROUND_BYTES)
        self._next += 1
        self._follow(tensor, self._next, nbytes)
        self._enter(self._next, nbytes)
        return True

    def _enter(self, key: int, nbytes: int) -> None:
        self.events.append((key, nbytes))
        self._now += nbytes
        self.peak_bytes = max(self.peak_bytes, self._now)

    def _follow(self, tensor: torch.Tensor, key: int, nbytes: int) -> None:
        storage = tensor.untyped_storage()
        cdata = storage._cdata
        self._live[cdata] = key, nbytes, weakref.ref(storage, functools.partial(self._gone, cdata))

    def _gone(self, cdata: int, _: object = None) -> None:
        if (found := self._live.pop(cdata, None)) is not None:
            self.events.append((found[0], 0))
            self._now -= found[1]


def layer_paths(module: nn.Module) -> list[str]:
    """Paths of the layers of ``module``: modules that own tensors, and of whose children none does."""
    found = []
    for path, child in module.named_modules():
        own = any(tensor is not None for tensor in (*child._parameters.values(), *child._buffers.values()))
        if path and own and all(inner is child or not (inner._parameters or inner._buffers) for inner in child.modules()):
            found.append(path)
    return found


def _units_of(module: nn.Module, blocks: Collection[str]) -> dict[str, str]:
    """For each module that is one of ``blocks`` or lies in one: which."""
    found: dict[str, str] = {}
    for path, _ in module.named_modules():  # what holds a module comes before it
        unit = path if path in blocks else found.get(path.rpartition(".")[0], "")
        if unit:
            found[path] = unit
    return found


class FusedAttention(TorchFunctionMode):
    """Answers `scaled_dot_product_attention` as a fused kernel does: output ``[b h s d]``, logsumexp ``[b h s]`` in fp32, no S x S.

    FLOPs: two matrix products, 2 b h s_q s_k (d_k + d_v). Not ``fused``: with what the math backend takes, S x S included.
    """

    def __init__(self, recorder: Recorder, *, fused: bool = True) -> None:
        super().__init__()
        self.recorder = recorder
        self.fused = fused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor:
            return self.recorder.known.written(func(*args, **kwargs), args, kwargs)
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key, value = (*args, *(kwargs[name] for name in ("query", "key", "value")[len(args) :]))[:3]
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        rows = query.numel() // query.shape[-1]
        width, keys = query.shape[-1], key.shape[-2]
        self.recorder.scratch(attention_scratch(rows, keys, width, query.element_size(), fused=self.fused))
        self.recorder.count(2.0 * rows * keys * (width + value.shape[-1]))
        return out


def _convolution(source: torch.Tensor, weight: torch.Tensor, made: torch.Tensor, stride: Sequence[int]) -> Convolution:
    read, written, filters = (tensor.numel() * tensor.element_size() for tensor in (source, made, weight))
    taps, strided = weight.numel() // (weight.shape[0] * weight.shape[1]), max(stride) > 1
    return Convolution(read, written, filters, made.element_size(), source.shape[1], made.shape[1], taps, strided)


def _leaves_meta(device: torch.device | None) -> bool:
    """Whether a copy to ``device`` asks for numbers that meta does not have."""
    return device is not None and device.type != "meta"


def _tensors(items: Any) -> Iterable[torch.Tensor]:
    for item in items:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from _tensors(item)
