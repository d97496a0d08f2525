"""Tensors that a module has outside of its weights, where its code moves them to the device."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from graphrun.profile.recorder import Recorder


class Moves(TorchFunctionMode):
    """Record what ``Tensor.to`` returns if it is new to ``recorder``.

    A module may have tables of positions in a list. In a trace they are on the traced device from
    the start, so that moving them copies nothing there, unlike on the real device.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.to:
            self.recorder.note_held((result,))
        return result
