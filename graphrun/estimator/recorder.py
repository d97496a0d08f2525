"""Runs one call into a component on meta and records what it would allocate, read and compute. No weights, no device.

Attention and convolution are the two places where meta shows something else than a card does:

    attention      on meta falls back to the math backend and shows a tensor of S x S that no fused kernel makes. It is answered
                   before dispatch: its output, and as scratch the fp32 logsumexp that the fused kernels return.
    convolution    takes scratch that no dispatcher sees: copies of its tensors in another layout.

How much scratch: `graphrun.estimator.corrections`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from graphrun.estimator.corrections import attention_scratch, convolution_scratch
from graphrun.units import round_up

ROUND_BYTES = 512
META = torch.device("meta")
aten = torch.ops.aten


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active: live bytes by storage, parameters read, and FLOPs by the block that is running.

    On meta an index hits everything: ``item()`` answers True or 1, ``nonzero`` its largest shape. ``mask.all()`` answers False:
    encoders leave a full mask out, and one that is not full takes memory. A copy to the host is zeros.
    """

    def __init__(self, module: nn.Module, blocks: Iterable[str], place: torch.device = META) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[tuple[int, int]] = []
        self.peak_bytes = 0
        self.touched: set[str] = set()
        self.flops: list[tuple[str, float]] = []
        self.entered: list[str] = []
        self._place = place.type
        self._now = 0
        self._next = 0
        self._live: dict[int, tuple[int, int, Any]] = {}
        self._stack = [""]
        self._names: dict[int, str] = {}
        weights = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        if self._place != "meta":  # weights may lie in one storage, so that which of them is read cannot be told
            self.touched |= {name for name, _ in weights}
        for name, tensor in weights:
            self._names.setdefault(tensor.untyped_storage()._cdata, name)
        self._hooks = [hook for path in blocks for hook in self._watch(module.get_submodule(path), path)]
        self._ignored: set[int] = set()
        self._whole: set[int] = set()  # results of ``mask.all()``, or of ``mask.sum() == mask.numel()``
        self._sums: set[int] = set()  # results of ``mask.sum()``

    @property
    def live_bytes(self) -> int:
        """Bytes that live now."""
        return self._now

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """The inputs of the call: they are there already."""
        self._ignored |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def close(self) -> None:
        """Take the hooks off, and release what is still live (the call's outputs) at the end of the record."""
        for hook in self._hooks:
            hook.remove()
        for cdata in list(self._live):
            self._release(cdata)

    def scratch(self, nbytes: int, spared_bytes: int = 0) -> None:
        """Note ``nbytes`` that are taken and given back within one kernel, and how many of them some cards do without."""
        if nbytes:
            self.events.append((spared_bytes, -nbytes))

    def _watch(self, block: nn.Module, path: str) -> tuple[Any, Any]:
        def begin(*_: Any) -> None:
            self._stack.append(path)
            self.entered.append(path)
            self.count(0.0)  # a place in the order also for a block that computes nothing that is counted

        def end(*_: Any) -> None:
            self._stack.pop()

        return block.register_forward_pre_hook(begin), block.register_forward_hook(end)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            full = args[0].untyped_storage()._cdata not in self._whole
            return full if args[0].dtype == torch.bool else 1
        if func is aten.nonzero.default and args[0].is_meta:
            out = torch.empty(args[0].numel(), args[0].dim(), dtype=torch.long, device="meta")
        elif func is aten._to_copy.default and args[0].is_meta and _leaves_meta(kwargs.get("device")):
            out = torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=kwargs["device"])
        else:
            out = func(*args, **kwargs)
        for tensor in _tensors(args):
            if (name := self._names.get(tensor.untyped_storage()._cdata)) is not None:
                self.touched.add(name)
        for tensor in _tensors((out,)):
            self._keep(tensor)
            if func is aten.all.default or (func is aten.eq.Scalar and args[0].untyped_storage()._cdata in self._sums):
                self._whole.add(tensor.untyped_storage()._cdata)
            elif func is aten.sum.default and args[0].dtype == torch.bool:
                self._sums.add(tensor.untyped_storage()._cdata)
        if func is aten.convolution.default:
            source, made, weight = (t.numel() * t.element_size() for t in (args[0], out, args[1]))
            self.scratch(*convolution_scratch(source, made, weight, out.element_size()))
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.count(formula(*args, **kwargs, out_val=out))
        return out

    def count(self, flops: float) -> None:
        """Add FLOPs to the block that is running: to its last stretch, if nothing else computed since."""
        path = self._stack[-1]
        if self.flops and self.flops[-1][0] == path:
            flops += self.flops.pop()[1]
        self.flops.append((path, flops))

    def _keep(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        cdata = storage._cdata
        known = cdata in self._live or cdata in self._names or cdata in self._ignored
        if tensor.device.type != self._place or known or not storage.nbytes():
            return
        self._next += 1
        nbytes = round_up(storage.nbytes(), ROUND_BYTES)
        self._live[cdata] = self._next, nbytes, weakref.ref(storage, functools.partial(self._gone, cdata))
        self.events.append((self._next, nbytes))
        self._now += nbytes
        self.peak_bytes = max(self.peak_bytes, self._now)

    def _gone(self, cdata: int, _: object) -> None:
        self._release(cdata)

    def _release(self, cdata: int) -> None:
        self._whole.discard(cdata)
        self._sums.discard(cdata)
        if (found := self._live.pop(cdata, None)) is not None:
            self.events.append((found[0], 0))
            self._now -= found[1]


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
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key, value = (*args, *(kwargs[name] for name in ("query", "key", "value")[len(args) :]))[:3]
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        rows = query.numel() // query.shape[-1]
        width, keys = query.shape[-1], key.shape[-2]
        self.recorder.scratch(attention_scratch(rows, keys, width, query.element_size(), fused=self.fused))
        self.recorder.count(2.0 * rows * keys * (width + value.shape[-1]))
        return out


def _leaves_meta(device: torch.device | None) -> bool:
    """Whether a copy to ``device`` asks for numbers that meta does not have."""
    return device is not None and device.type != "meta"


def _tensors(items: Any) -> Iterable[torch.Tensor]:
    for item in items:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from _tensors(item)
