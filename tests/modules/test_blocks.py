"""Block layouts: every tensor belongs to one block, and is aligned in its buffer."""

from __future__ import annotations

import torch
from torch import nn

from graphrun.modules.blocks import ALIGNMENT, BlockLayout, lay_out


def names(module: nn.Module, layout: BlockLayout) -> set[str]:
    locations = {
        id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    return {locations[id(entry.tensor)] for entry in layout.entries}


def test_a_tensor_belongs_to_the_longest_matching_path_else_to_the_root() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    layouts = lay_out(module, ["1", "1.0"])
    assert names(module, layouts["1.0"]) == {"1.0.weight", "1.0.bias"}
    assert names(module, layouts["1"]) >= {
        "1.1.weight",
        "1.1.running_mean",
        "1.1.num_batches_tracked",
    }
    assert names(module, layouts[""]) == {"0.weight", "0.bias"}


def test_a_tensor_tied_across_blocks_belongs_to_the_root_and_counts_once() -> None:
    module = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    module[1].weight = module[0].weight
    layouts = lay_out(module, ["0", "1"])
    assert names(module, layouts[""]) == {"0.weight"}
    assert [len(entry.locations) for entry in layouts[""].entries] == [2]
    assert [names(module, layouts[path]) for path in "01"] == [{"0.bias"}, {"1.bias"}]


def test_tensors_start_at_multiples_of_the_alignment_and_do_not_overlap() -> None:
    layout = lay_out(nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 1, dtype=torch.float64)), [])[""]
    ends = [0, *(entry.offset + entry.nbytes for entry in layout.entries)]
    assert all(
        entry.offset % ALIGNMENT == 0 and entry.offset >= end
        for entry, end in zip(layout.entries, ends, strict=False)
    )
    assert layout.nbytes >= ends[-1]
