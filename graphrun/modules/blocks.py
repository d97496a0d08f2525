"""Assign every tensor of a module to a block, and compute its offset in the block's buffer.

The estimator applies this layout to meta modules and the executor to real ones, so both count the
same bytes.

    block "transformer_blocks.0"      one buffer, one copy
    | weight        |pad| bias |pad| ... |     every tensor starts at a multiple of ALIGNMENT
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from graphrun.modules.trees import named_modules_below
from graphrun.units import round_up

# Vectorized kernels and cuBLAS choose other code paths below 16-byte alignment. PyTorch aligns its
# allocations to 512 bytes on CUDA and 64 on the CPU. cuBLASLt's heuristics look at alignments of up
# to 256 bytes, so 256 is enough for every view.
ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """A place where a module refers to a tensor: an entry of ``owner._parameters``,
    ``owner._buffers`` or, for the state of a quantized layer, ``owner.__dict__``."""

    owner: Any
    kind: str  # "_parameters", "_buffers" or "__dict__"
    key: str

    def assign(self, tensor: torch.Tensor) -> None:
        getattr(self.owner, self.kind)[self.key] = tensor


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One distinct tensor of a block: ``nbytes`` at ``offset``, and all references to it.

    Tied tensors are one entry. ``names``: of the parameter or buffer in the module. ``field``:
    which of a quantized weight's tensors this is; "" for a plain tensor.
    """

    offset: int
    nbytes: int
    tensor: torch.Tensor
    locations: tuple[TensorLocation, ...]
    names: tuple[str, ...] = ()
    field: str = ""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The buffer of a block: ``nbytes`` including alignment padding, and its tensors."""

    path: str
    nbytes: int
    entries: tuple[TensorEntry, ...]

    def with_entries(self, entries: Iterable[TensorEntry]) -> BlockLayout:
        """Return the layout of a block of ``entries`` alone, one behind another."""
        offset, placed_entries = 0, list[TensorEntry]()
        for entry in entries:
            placed_entries.append(replace(entry, offset=offset))
            offset = round_up(offset + entry.nbytes, ALIGNMENT)
        return replace(self, nbytes=offset, entries=tuple(placed_entries))

    def without(self, names: Collection[str]) -> BlockLayout:
        """Return the layout without the tensors called ``names``, itself if it has none."""
        entries = [entry for entry in self.entries if not set(entry.names).intersection(names)]
        return self if len(entries) == len(self.entries) else self.with_entries(entries)


@dataclass(slots=True)
class _TensorUses:
    tensor: torch.Tensor
    field: str
    locations: dict[tuple[int, str, str], TensorLocation]  # by owner, kind and key
    names: dict[str, None]
    owners: set[str]


def lay_out(
    module: nn.Module, paths: Sequence[str], *, split_layers: bool = False
) -> dict[str, BlockLayout]:
    """Return the layout of every block in ``paths``, by path, and of the root ``""``.

    The root has the tensors of no other block. All parameters and buffers count, and the statistics
    of quantized layers. A tensor tied across blocks belongs to the root, which is never streamed.
    With ``split_layers`` (``paths`` are single layers), a tensor shared by exactly one of ``paths``
    and the root belongs to that layer, because a layer is a block only if nothing else reads its
    tensors. Works on meta modules too.
    """
    tensor_uses: dict[int, _TensorUses] = {}
    blocks = dict.fromkeys(path for path in paths if path)
    # module path -> the block it belongs to: itself, or the block of its parent
    block_of = {"": ""}
    for prefix, child in named_modules_below(module, repeated=True):
        owner = block_of[prefix] = (
            prefix if prefix in blocks else block_of[prefix.rpartition(".")[0]]
        )
        for tensor, field, location, key in direct_tensors(child):
            if (uses := tensor_uses.get(id(tensor))) is None:
                uses = tensor_uses[id(tensor)] = _TensorUses(tensor, field, {}, {}, set())
            uses.owners.add(owner)
            uses.names[f"{prefix}.{key}" if prefix else key] = None
            uses.locations[id(location.owner), location.kind, location.key] = location
    offsets = dict.fromkeys(("", *blocks), 0)
    entries: dict[str, list[TensorEntry]] = {path: [] for path in offsets}
    for uses in tensor_uses.values():
        owners = uses.owners - {""} if split_layers else uses.owners
        path = next(iter(owners)) if len(owners) == 1 else ""
        nbytes = uses.tensor.nbytes
        locations, names = tuple(uses.locations.values()), tuple(uses.names)
        entries[path].append(
            TensorEntry(offsets[path], nbytes, uses.tensor, locations, names, uses.field)
        )
        offsets[path] = round_up(offsets[path] + nbytes, ALIGNMENT)
    return {path: BlockLayout(path, offsets[path], tuple(entries[path])) for path in offsets}


def direct_tensors(child: nn.Module) -> Iterator[tuple[torch.Tensor, str, TensorLocation, str]]:
    """Yield the tensors of ``child`` itself: (tensor, field, location, parameter or buffer name).

    bitsandbytes stores a 4-bit weight's statistics in its ``quant_state`` (nested statistics in
    ``state2``). It refers to an 8-bit weight a second time as ``state.CB``, with the scales in
    ``state.SCB``.
    """
    for kind in ("_parameters", "_buffers"):
        for key, tensor in getattr(child, kind).items():
            if tensor is None:
                continue
            nf4, int8 = (
                getattr(tensor, "quant_state", None),
                _int8_state(child) if key == "weight" else None,
            )
            yield (
                tensor,
                "data" if nf4 is not None else "CB" if int8 is not None else "",
                TensorLocation(child, kind, key),
                key,
            )
            if nf4 is not None:
                for owner, label in ((nf4, ""), (getattr(nf4, "state2", None), "nested_")):
                    for name in ("absmax", "code", "offset"):
                        if isinstance(statistic := getattr(owner, name, None), torch.Tensor):
                            yield (
                                statistic,
                                label + name,
                                TensorLocation(owner, "__dict__", name),
                                key,
                            )
            if int8 is not None:
                yield tensor, "CB", TensorLocation(int8, "__dict__", "CB"), key
                yield int8.SCB, "SCB", TensorLocation(int8, "__dict__", "SCB"), key


def _int8_state(child: nn.Module) -> Any:
    """Return the ``MatmulLtState`` of an 8-bit layer that is already quantized, else None."""
    state = child.__dict__.get("state")
    return state if isinstance(getattr(state, "SCB", None), torch.Tensor) else None


@contextmanager
def with_weights_of(live: nn.Module, meta_module: nn.Module) -> Iterator[None]:
    """Give ``meta_module`` the tensors of ``live`` within the context, cast to its own dtypes."""
    pairs = [
        (location, tensor, borrowed)
        for meta_child, live_child in zip(meta_module.modules(), live.modules(), strict=True)
        for (tensor, _, location, _), (borrowed, *_) in zip(
            direct_tensors(meta_child), direct_tensors(live_child), strict=True
        )
    ]
    for location, tensor, borrowed in pairs:
        cast = borrowed if borrowed.dtype == tensor.dtype else borrowed.detach().to(tensor.dtype)
        as_parameter = isinstance(borrowed, nn.Parameter) and cast is not borrowed
        location.assign(nn.Parameter(cast, borrowed.requires_grad) if as_parameter else cast)
    try:
        yield
    finally:
        for location, tensor, _ in pairs:
            location.assign(tensor)
