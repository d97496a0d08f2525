"""Copies tensors between devices around calls, and blocks, that compute on a secondary device.

    split component    | block | block | block | code  | block | block | device
    |#######|       |       |#######|       |#######| secondary device                     >
    |#####|#####| > > |###| >        constants cross once, at the first block that gets them

What a block on the secondary device gets is copied there unless it was copied in this call before.
Of what it returns, what only further blocks there get stays (`Transfer.stay`), and all else is
copied back. PyTorch orders the streams of both devices around each copy.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from graphrun.modules.trees import walk
from graphrun.runtime.devices.device import Device
from graphrun.runtime.residency import Residency

Copies = dict[int, tuple["weakref.ref[torch.Tensor]", torch.Tensor]]
"""By id, tensors on the device, and the same on the secondary device."""

Stays = Mapping[str, frozenset[int]]
"""By path of a block on a secondary device, numbers of the tensors that stay there, of those that
it makes."""


def moved(
    value: Any, source: torch.device, target: torch.device, copies: Copies | None = None
) -> Any:
    """``value`` with every tensor on ``source`` replaced by a copy on ``target``; one that is there
    twice, or in ``copies``, is copied once."""
    known: Copies = {} if copies is None else copies

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device != source:
            return tensor
        if id(tensor) not in known or known[id(tensor)][0]() is not tensor:
            known[id(tensor)] = weakref.ref(tensor), tensor.to(target)
        return known[id(tensor)][1]

    return walk(value, move)


def call_split(
    device: Device,
    residency: Residency,
    stays: Stays,
    proceed: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """What ``proceed`` returns, a call of the component of ``residency``; some of its blocks may be
    on secondary devices of ``device``."""
    with contextlib.ExitStack() as stack:
        for secondary, paths in residency.splits:
            _cross_at(
                stack,
                device,
                secondary,
                {path: residency.module.get_submodule(path) for path in paths},
                stays,
            )
        result = proceed(*args, **kwargs)
        for secondary, _ in residency.splits:  # of a call that leaves out the last block there
            result = moved(result, secondary.torch_device, device.torch_device)
        return result


def _cross_at(
    stack: contextlib.ExitStack,
    device: Device,
    secondary: Device,
    blocks: Mapping[str, nn.Module],
    stays: Stays,
) -> None:
    """Hooks, until ``stack`` is closed, with which ``blocks`` compute on ``secondary``."""
    here, there, copies = device.torch_device, secondary.torch_device, Copies()
    current = stack.enter_context(contextlib.ExitStack())

    def before(_: Any, args: Any, kwargs: Any) -> Any:
        for known in [known for known, (original, _) in copies.items() if original() is None]:
            del copies[known]
        current.enter_context(secondary.current())
        return moved((args, kwargs), here, there, copies)

    def after(path: str, result: Any) -> Any:
        current.close()
        originals = {id(copy): original for original, copy in copies.values()}
        staying, made = stays.get(path, frozenset()), dict[int, torch.Tensor]()

        def back(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device != there or not tensor.nbytes:
                return tensor.to(here) if tensor.device == there else tensor
            if (original := originals.get(id(tensor))) is not None and (
                given := original()
            ) is not None:
                return given  # the block returns what it got
            if id(tensor) not in made:
                number = len(made)
                made[id(tensor)] = tensor if number in staying else tensor.to(here)
                if number not in staying:
                    copies[id(made[id(tensor)])] = weakref.ref(made[id(tensor)]), tensor
            return made[id(tensor)]

        return walk(result, back)

    for path, block in blocks.items():
        stack.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
        stack.callback(
            block.register_forward_hook(lambda _, __, result, path=path: after(path, result)).remove
        )
    stack.callback(copies.clear)
