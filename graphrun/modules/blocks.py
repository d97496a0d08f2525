"""Which tensors of a module belong to which block, and where each lies inside its block's buffer.

Decides the layout alone: the estimator multiplies it out on meta, the executor copies by it, so both count the same bytes.

    block "transformer_blocks.0"      one buffer, one copy
    | weight        |pad| bias |pad| ... |     every tensor starts at a multiple of ALIGNMENT
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphrun.units import round_up

# Vectorized kernels and cuBLAS choose other code paths below 16-byte alignment; PyTorch's own allocations start at 512 on CUDA
# and 64 on CPU. 256 keeps every view as well aligned as cuBLASLt's heuristics ask for (they look at up to 256).
ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """One entry of ``owner._parameters``, ``owner._buffers`` or, where a quantized layer holds more, ``owner.__dict__``."""

    owner: Any
    kind: str  # "_parameters", "_buffers" or "__dict__"
    key: str

    def put(self, tensor: torch.Tensor) -> None:
        """``tensor`` is what stands here from now on."""
        getattr(self.owner, self.kind)[self.key] = tensor


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One distinct tensor of a block: its bytes at ``offset``, and every place that shares it (ties are one entry).

    ``names``: those under which the module knows it. ``field``: which of a quantized weight's tensors it is; "": a plain tensor.
    """

    offset: int
    nbytes: int
    tensor: torch.Tensor
    locations: tuple[TensorLocation, ...]
    names: tuple[str, ...] = ()
    field: str = ""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """A block's buffer: ``nbytes`` including alignment, and the tensors in it."""

    path: str
    nbytes: int
    entries: tuple[TensorEntry, ...]


@dataclass(slots=True)
class _Found:
    tensor: torch.Tensor
    field: str
    locations: list[TensorLocation]
    names: list[str]
    owners: set[str]


def lay_out(module: nn.Module, paths: Sequence[str], *, by_layer: bool = False) -> dict[str, BlockLayout]:
    """The layout of every block in ``paths`` (the root ``""`` included, it takes what no other block does).

    Parameters and buffers count alike, persistent or not, and so do the statistics that quantized layers hold beside them. A tensor
    tied across blocks belongs to the root, which is never streamed; ``by_layer`` one that only one of ``paths`` has belongs there,
    since a layer is a block only where nothing else reads its tensors. Works on meta modules too.
    """
    found: dict[int, _Found] = {}
    known = dict.fromkeys(path for path in paths if path)
    within = {"": ""}  # the block that a module lies in, which is that of what holds it, or its own
    for prefix, child in module.named_modules(remove_duplicate=False):
        owner = within[prefix] = prefix if prefix in known else within[prefix.rpartition(".")[0]]
        for tensor, field, place, key in held(child):
            item = found.setdefault(id(tensor), _Found(tensor, field, [], [], set()))
            item.owners.add(owner)
            item.names.append(f"{prefix}.{key}" if prefix else key)
            if not any(p.owner is place.owner and (p.kind, p.key) == (place.kind, place.key) for p in item.locations):
                item.locations.append(place)
    offsets = dict.fromkeys(("", *known), 0)
    entries: dict[str, list[TensorEntry]] = {path: [] for path in offsets}
    for item in found.values():
        owners = item.owners - {""} if by_layer else item.owners
        path = next(iter(owners)) if len(owners) == 1 else ""
        nbytes = item.tensor.numel() * item.tensor.element_size()
        names = tuple(dict.fromkeys(item.names))
        entries[path].append(TensorEntry(offsets[path], nbytes, item.tensor, tuple(item.locations), names, item.field))
        offsets[path] = round_up(offsets[path] + nbytes, ALIGNMENT)
    return {path: BlockLayout(path, offsets[path], tuple(entries[path])) for path in offsets}


def held(child: nn.Module) -> Iterator[tuple[torch.Tensor, str, TensorLocation, str]]:
    """The tensors that ``child`` itself holds: (tensor, field, place, the name of the parameter or buffer they make up).

    bitsandbytes keeps a 4-bit weight's statistics in its ``quant_state`` (and those of the statistics in ``state2``), and an 8-bit
    weight again as ``state.CB``, with its scales in ``state.SCB``.
    """
    for kind in ("_parameters", "_buffers"):
        for key, tensor in getattr(child, kind).items():
            if tensor is None:
                continue
            nf4, int8 = getattr(tensor, "quant_state", None), _int8_state(child) if key == "weight" else None
            yield tensor, "data" if nf4 is not None else "CB" if int8 is not None else "", TensorLocation(child, kind, key), key
            if nf4 is not None:
                for owner, label in ((nf4, ""), (getattr(nf4, "state2", None), "nested_")):
                    for name in ("absmax", "code", "offset"):
                        if isinstance(held := getattr(owner, name, None), torch.Tensor):
                            yield held, label + name, TensorLocation(owner, "__dict__", name), key
            if int8 is not None:
                yield tensor, "CB", TensorLocation(int8, "__dict__", "CB"), key
                yield int8.SCB, "SCB", TensorLocation(int8, "__dict__", "SCB"), key


def _int8_state(child: nn.Module) -> Any:
    """The state of an 8-bit layer that is quantized already."""
    state = child.__dict__.get("state")
    return state if isinstance(getattr(state, "SCB", None), torch.Tensor) else None
