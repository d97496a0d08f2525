"""Copy tensors between devices around calls and blocks that compute on a secondary device.

    split component     | block | block | block | code  | block | block |
    device              |#######|       |       |#######|       |#######|
    secondary device            >|#####|#####| >       >|#####| >

An input of a block on the secondary device is copied there once per call, at the first block there
that receives it. An output that only further blocks there receive stays there
(`DeviceTransfer.stay`). All other outputs are copied back. PyTorch orders the streams of both
devices around each copy.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from graphrun.modules.trees import walk
from graphrun.modules.weight_reads import DeferredTensor
from graphrun.runtime.devices.device import Device
from graphrun.runtime.residency import Residency

Copies = dict[int, tuple["weakref.ref[torch.Tensor]", torch.Tensor]]
"""id of a tensor on the device -> the tensor, and its copy on the secondary device."""

StayingOutputs = Mapping[str, frozenset[int]]
"""Path of a block on a secondary device -> numbers of its output tensors that stay there."""


def move_tensors(
    value: Any, source: torch.device, target: torch.device, copies: Copies | None = None
) -> Any:
    """Return ``value`` with tensors on ``source`` copied to ``target`` once, or from ``copies``."""
    copies_by_id: Copies = {} if copies is None else copies

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device != source:
            return tensor
        if id(tensor) not in copies_by_id or copies_by_id[id(tensor)][0]() is not tensor:
            copies_by_id[id(tensor)] = weakref.ref(tensor), tensor.to(target)
        return copies_by_id[id(tensor)][1]

    return walk(value, move)


def deferred_tensors(value: Any, source: torch.device, target: torch.device) -> Any:
    """Return ``value`` with tensors on ``source`` that are copied to ``target`` when read."""

    def defer(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device != source:
            return tensor
        return DeferredTensor.of(tensor, target, functools.partial(tensor.to, target))

    return walk(value, defer)


def call_split(
    device: Device,
    residency: Residency,
    staying_outputs: StayingOutputs,
    proceed: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call ``proceed`` with some blocks of the component on secondary devices."""
    with contextlib.ExitStack() as stack:
        for secondary, paths in residency.splits:
            _hook_transfers(
                stack,
                device,
                secondary,
                {path: residency.module.get_submodule(path) for path in paths},
                staying_outputs,
            )
        result = proceed(*args, **kwargs)
        # ``staying_outputs`` are for later blocks there. If a call ends before these blocks, its
        # result is still on the secondary device.
        for secondary, _ in residency.splits:
            result = move_tensors(result, secondary.torch_device, device.torch_device)
        return result


def _hook_transfers(
    stack: contextlib.ExitStack,
    device: Device,
    secondary: Device,
    blocks: Mapping[str, nn.Module],
    staying_outputs: StayingOutputs,
) -> None:
    """Make ``blocks`` compute on ``secondary`` until ``stack`` is closed."""
    main, target, copies = device.torch_device, secondary.torch_device, Copies()
    current = stack.enter_context(contextlib.ExitStack())

    def before(_: Any, args: Any, kwargs: Any) -> Any:
        for key in [copy_id for copy_id, (original, _) in copies.items() if original() is None]:
            del copies[key]
        current.enter_context(secondary.current())
        return move_tensors((args, kwargs), main, target, copies)

    def after(path: str, result: Any) -> Any:
        current.close()
        originals = {id(copy): original for original, copy in copies.values()}
        staying, outputs = staying_outputs.get(path, frozenset()), dict[int, torch.Tensor]()

        def move_back(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device != target or not tensor.nbytes:
                return tensor.to(main) if tensor.device == target else tensor
            if (original := originals.get(id(tensor))) is not None and (
                argument := original()
            ) is not None:
                return argument  # the block returns an input unchanged
            if id(tensor) not in outputs:
                number = len(outputs)
                outputs[id(tensor)] = tensor if number in staying else tensor.to(main)
                if number not in staying:
                    copies[id(outputs[id(tensor)])] = weakref.ref(outputs[id(tensor)]), tensor
            return outputs[id(tensor)]

        return walk(result, move_back)

    for path, block in blocks.items():
        stack.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
        stack.callback(
            block.register_forward_hook(lambda _, __, result, path=path: after(path, result)).remove
        )
    stack.callback(copies.clear)
