"""Walks over modules: the same modules, paths and order as PyTorch's own walks."""

import torch
from torch import nn

from graphrun.modules.trees import modules_below, named_modules_below, weights_below


def nested() -> nn.Module:
    """A module with a shared child, a missing child, tied weights and a buffer."""
    shared = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    layer, tied = nn.Linear(2, 3), nn.Linear(2, 3)
    tied.weight = layer.weight
    blocks = nn.ModuleList([shared, layer])
    blocks.register_module("absent", None)
    root = nn.ModuleDict({"first": blocks, "norm": nn.BatchNorm1d(2)})
    root["again"], root["last"] = shared, tied
    return root


def test_walks_give_the_modules_of_pytorch_s_walks_in_their_order() -> None:
    root = nested()
    assert modules_below(root) == list(root.modules())
    assert named_modules_below(root) == list(root.named_modules())
    every_path = named_modules_below(root, repeated=True)
    assert every_path == list(root.named_modules(remove_duplicate=False))
    assert [path for path, _ in every_path if path.startswith("again")] == [
        "again",
        "again.0",
        "again.1",
    ]


def test_weights_are_parameters_and_buffers_each_once() -> None:
    root = nested()
    expected: list[torch.Tensor] = [*root.parameters(), *root.buffers()]
    assert sorted(map(id, weights_below(root))) == sorted(map(id, expected))
