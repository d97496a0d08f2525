"""Which tensors of a module belong to which block, and where each lies inside its block's buffer.

Decides the layout alone: the estimator multiplies it out on meta, the executor copies by it, so both count the same bytes.

    block "transformer_blocks.0"      one buffer, one copy
    | weight        |pad| bias |pad| ... |     every tensor starts at a multiple of ALIGNMENT
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from graphrun.units import round_up

# Vectorized kernels and cuBLAS choose other code paths below 16-byte alignment; PyTorch's own allocations start at 512 on CUDA
# and 64 on CPU. 256 keeps every view as well aligned as cuBLASLt's heuristics ask for (they look at up to 256).
ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Place:
    """One entry of ``module._parameters`` or ``module._buffers`` that holds a tensor."""

    module: nn.Module
    kind: str  # "_parameters" or "_buffers"
    key: str


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One distinct tensor of a block: its bytes at ``offset``, and every place that shares it (ties are one entry)."""

    offset: int
    nbytes: int
    tensor: torch.Tensor
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """A block's buffer: ``nbytes`` including alignment, and the tensors in it."""

    path: str
    nbytes: int
    entries: tuple[TensorEntry, ...]


def lay_out(module: nn.Module, paths: Sequence[str]) -> dict[str, BlockLayout]:
    """The layout of every block in ``paths`` (the root ``""`` included, it takes what no other block does).

    Parameters and buffers count alike, persistent or not. A tensor tied across blocks belongs to the root, which is never
    streamed. Works on meta modules too.
    """
    found: dict[int, tuple[torch.Tensor, list[Place], set[str]]] = {}
    known = {path for path in paths if path}
    for prefix, child in module.named_modules(remove_duplicate=False):
        parts = prefix.split(".") if prefix else []
        owner = next((p for n in range(len(parts), 0, -1) if (p := ".".join(parts[:n])) in known), "")
        for kind in ("_parameters", "_buffers"):
            for key, tensor in getattr(child, kind).items():
                if tensor is None:
                    continue
                _, places, owners = found.setdefault(id(tensor), (tensor, [], set()))
                owners.add(owner)
                place = Place(child, kind, key)
                if not any(p.module is child and p.kind == kind and p.key == key for p in places):
                    places.append(place)
    offsets = dict.fromkeys(("", *known), 0)
    entries: dict[str, list[TensorEntry]] = {path: [] for path in offsets}
    for tensor, places, owners in found.values():
        path = owners.pop() if len(owners) == 1 else ""
        nbytes = tensor.numel() * tensor.element_size()
        entries[path].append(TensorEntry(offsets[path], nbytes, tensor, tuple(places)))
        offsets[path] = round_up(offsets[path] + nbytes, ALIGNMENT)
    return {path: BlockLayout(path, offsets[path], tuple(entries[path])) for path in offsets}
