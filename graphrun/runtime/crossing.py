"""Copies tensors between devices around calls, and blocks, that compute on a helper.

    split component    | block | block | block | block | block |
    device             |#######|       |       |       |#######|
    helper                     > |#####|#######|#####| >            constants cross once, at the first block that gets them

What a block on the helper gets is copied there unless it was copied in this call before; what the last of them returns is copied
back. PyTorch orders the streams of both devices around each copy.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graphrun.modules.trees import walk
from graphrun.runtime.devices.device import Device
from graphrun.runtime.residency import Residency

Copies = dict[int, tuple["weakref.ref[torch.Tensor]", torch.Tensor]]
"""By id, tensors that were copied, and their copies."""


def moved(value: Any, source: torch.device, target: torch.device, copies: Copies | None = None) -> Any:
    """``value`` with every tensor on ``source`` replaced by a copy on ``target``; one that is there twice, or in ``copies``, is
    copied once."""
    known: Copies = {} if copies is None else copies

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device != source:
            return tensor
        if id(tensor) not in known or known[id(tensor)][0]() is not tensor:
            known[id(tensor)] = weakref.ref(tensor), tensor.to(target)
        return known[id(tensor)][1]

    return walk(value, move)


def call_split(
    device: Device, residency: Residency, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """What ``proceed`` returns, a call of the component of ``residency``; some of its blocks may be on helpers of ``device``."""
    with contextlib.ExitStack() as stack:
        for helper, paths in residency.splits:
            _cross_at(stack, device, helper, [residency.module.get_submodule(path) for path in paths])
        result = proceed(*args, **kwargs)
        for helper, _ in residency.splits:  # of a call that leaves out the last block there
            result = moved(result, helper.torch_device, device.torch_device)
        return result


def _cross_at(stack: contextlib.ExitStack, device: Device, helper: Device, blocks: Sequence[nn.Module]) -> None:
    """Hooks, until ``stack`` is closed, with which ``blocks``, one after another, compute on ``helper``."""
    here, there, copies = device.torch_device, helper.torch_device, Copies()
    current = stack.enter_context(contextlib.ExitStack())

    def before(block: Any, args: Any, kwargs: Any) -> Any:
        if block is blocks[0]:
            current.enter_context(helper.current())
        return moved((args, kwargs), here, there, copies)

    def after(_: Any, __: Any, result: Any) -> Any:
        current.close()
        copies.clear()
        return moved(result, there, here)

    for block in blocks:
        stack.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
    stack.callback(blocks[-1].register_forward_hook(after).remove)
    stack.callback(copies.clear)
