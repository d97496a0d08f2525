"""Flex attention on simulated devices: one operator, as its compiled kernel is on a card.

PyTorch checks the names of devices, and compiles the operator before it runs it. Neither is
possible for a simulated device, so both are skipped while a machine is active. The last machine
restores PyTorch's functions.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from graphrun.sim.active import active
from graphrun.sim.tensor import SimTensor, wrap_all

LIBRARY = "torch.nn.attention.flex_attention"
# mask entries computed to find the blocks that a mask hides
SAMPLE_ELEMENTS = 1 << 24
_SHARES: Any = WeakKeyDictionary()  # mask function -> visible share, by sizes


_LOCK = threading.Lock()
_ORIGINALS: dict[str, Any] = {}  # replaced attributes of the library
_MACHINES: set[int] = set()  # active machines


def enter(machine: int) -> None:
    """Let flex attention, if imported, run on the tensors of ``machine`` (a number), now active."""
    with _LOCK:
        _MACHINES.add(machine)
        if LIBRARY in sys.modules and not _ORIGINALS:
            _replace(sys.modules[LIBRARY])


def leave(machine: int) -> None:
    """Restore PyTorch's functions if no machine other than ``machine`` is active."""
    with _LOCK:
        _MACHINES.discard(machine)
        if not _MACHINES:
            for name, original in _ORIGINALS.items():
                setattr(sys.modules[LIBRARY], name, original)
            _ORIGINALS.clear()


def dense(*args: Any) -> Any:
    """Return the results of the operator on CPU tensors, computed with all scores."""
    kernel = torch.ops.higher_order.flex_attention.py_kernels[
        torch._C.DispatchKey.CompositeExplicitAutograd
    ]
    return kernel(*args)


def flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any) -> int:
    """Return the FLOPs of the blocks that ``mask`` leaves: two matrix products. ``mask``:
    `BlockMask.as_tuple`. Queries are [b h s_q d_k], keys and values [b h s_k d]."""
    rows, keys = query.numel() // query.shape[-1], key.shape[-2]
    share = visible_share(mask, query.shape[-2], keys)
    return round(2 * rows * keys * (query.shape[-1] + value.shape[-1]) * share)


def visible_share(mask: Any, queries: int, keys: int) -> float:
    """Return the share of blocks of queries and keys in which ``mask`` leaves anything.

    1 if the mask function reads tensors, whose values a dry run does not have. For a large mask,
    some rows of blocks are computed, and of very long rows some queries.
    """
    *_, query_block, key_block, function = mask
    sizes = (queries, keys, query_block, key_block)
    shares = _SHARES.setdefault(function, {})
    if sizes not in shares:
        shares[sizes] = _computed_share(function, *sizes)
    return float(shares[sizes])


def _computed_share(
    function: Callable[..., Any], queries: int, keys: int, query_block: int, key_block: int
) -> float:
    query_block, key_block = min(query_block, queries), min(key_block, keys)
    starts = list(range(0, queries, query_block))
    step = min(-(-len(starts) * query_block * keys // SAMPLE_ELEMENTS), len(starts))
    row_step = max(1, query_block * keys // SAMPLE_ELEMENTS)
    zero, columns = torch.zeros((), dtype=torch.int), torch.arange(keys)
    visible = total = 0
    for start in starts[step // 2 :: step]:
        rows = torch.arange(start, min(start + query_block, queries), row_step)
        try:
            entries = function(zero, zero, rows[:, None], columns[None])
        except Exception:  # noqa: BLE001  (a mask function is any code)
            return 1.0
        if not isinstance(entries, torch.Tensor) or type(entries) is SimTensor or entries.is_meta:
            return 1.0
        blocks = torch.split(entries.expand(len(rows), keys).any(0), key_block)
        visible += sum(bool(block.any()) for block in blocks)
        total += len(blocks)
    return visible / total


class _Unwrapped(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes on the CPU, also with the simulated tensors that a mask function reads."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(
            SimTensor, lambda tensor: tensor.raw, (tuple(args), dict(kwargs or {}))
        )
        return func(*args, **kwargs)


def _on_machine(*args: Any) -> Any:
    """Run the operator on simulated tensors: its results are counted, and its FLOPs charged."""
    query, key, value, _, mask, *_ = args
    machine = query.allocation.machine
    raws = tree_map_only(SimTensor, lambda tensor: tensor.raw, args)
    with _Unwrapped():  # type: ignore[no-untyped-call]
        output = dense(*raws)
    machine.clock.launch()
    machine.charge(flops(query, key, value, mask))
    return tuple(wrap_all(output, machine))


class _WhileActive:
    """A switch that is on while a machine is active, and otherwise unchanged."""

    def __init__(self, otherwise: object) -> None:
        self._otherwise = otherwise

    def __bool__(self) -> bool:
        return active.get() is not None or bool(self._otherwise)


def _replace(library: Any) -> None:
    switch, check_name = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", "_validate_device"
    check_device = getattr(library, check_name, None)

    def check(query: torch.Tensor, *tensors: torch.Tensor) -> None:
        if active.get() is None and check_device is not None:
            check_device(query, *tensors)

    for name, value in ((check_name, check), (switch, _WhileActive(getattr(library, switch, 0)))):
        if hasattr(library, name):
            _ORIGINALS[name] = getattr(library, name)
            setattr(library, name, value)
    _register()


@cache
def _register() -> None:
    torch.ops.higher_order.flex_attention.py_impl(SimTensor)(_on_machine)
