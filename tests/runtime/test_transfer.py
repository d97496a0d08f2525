"""Tensors that move between devices, with the memory of a meta device as the target."""

from __future__ import annotations

import torch

from graphrun.runtime.transfer import Copies, move_tensors

CPU, META = torch.device("cpu"), torch.device("meta")


def test_a_tensor_is_copied_once_and_others_stay() -> None:
    shared, meta_tensor = torch.zeros(3), torch.zeros(2, device=META)
    copies: Copies = {}
    first, (second, unmoved) = move_tensors((shared, [shared, meta_tensor]), CPU, META, copies)
    assert (first.device, first.shape, unmoved is meta_tensor) == (META, (3,), True)
    assert second is first
    assert move_tensors({"a": shared, "b": 1}, CPU, META, copies) == {"a": first, "b": 1}
    assert move_tensors(torch.ones(3), CPU, META, copies) is not first
