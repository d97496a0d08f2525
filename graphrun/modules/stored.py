"""Compare the tensors in a component's files, by their headers, with the module of its config."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from graphrun.graph.parts import Component
from graphrun.graph.precisions import is_gguf
from graphrun.modules.classes import refusal
from graphrun.modules.contents import content_of, refuse_missing
from graphrun.modules.hub_headers import gguf_stand_in
from graphrun.modules.source_files import complete, has_weights, local_place


@dataclass(frozen=True, slots=True)
class Holding:
    """The tensors in a component's files: their number, bytes as stored, and bytes by dtype.

    ``used_bytes``: of tensors that the module has under the same name. ``absent_count``: saved
    tensors of the module that are missing from the files.
    """

    folder: str
    tensors: int
    nbytes: int
    dtypes: tuple[tuple[str, int], ...]
    used_bytes: int
    absent_count: int


def local_weights(component: Component, precision: str) -> Path | None:
    """Return the local path of ``component``'s weights in ``precision``, or None.

    Of the file under ``gguf:`` only the header has the tensor sizes: of one that is not local, the
    header is fetched. Raises GraphError without a network.
    """
    source = component.source_in(precision)
    variant = component.variant if component.checkpoint(precision) is None else ""
    place = local_place(source) if source is not None else None
    if place is None and precision == "gguf":
        place = gguf_stand_in(str(source), component.file_line)
    if place is None and precision == "gguf":
        text = (
            f"{source} is not on this machine, and its header is needed to plan: get it, or leave "
            "gguf out of precision:"
        )
        raise refusal(component, text)
    if source is None or place is None:
        return None
    # of a repository, the index of shards may be here without them
    is_here = is_gguf(precision) or (
        has_weights(place, variant)
        and (Path(source).is_absolute() or complete(source, component.file_line, variant))
    )
    return place if is_here else None


def holding(component: Component, module: nn.Module) -> Holding | None:
    """Compare the files of ``component`` with its meta module; None if they are not local.

    Raises GraphError if a file is broken, or has a tensor of the module's name in another shape: a
    plan for this module would fail when its weights are read. Names that a library changes while it
    reads a folder are not checked.
    """
    place = local_weights(component, "")
    if place is None:
        return None
    content = content_of(component, module, place, "")
    if place.is_file():
        refuse_missing(content, module.state_dict(), component)
    state = module.state_dict(keep_vars=True)
    sizes = Counter[str]()
    for tensor in content.tensors:
        sizes[tensor.dtype] += tensor.nbytes
    piece_bytes = {id(state[name]): piece.nbytes for name, piece in content.pieces.items()}
    absent_ids = {id(tensor) for tensor in state.values()} - piece_bytes.keys()
    dtypes = tuple(sorted(sizes.items()))
    return Holding(
        str(place),
        len(content.tensors),
        sizes.total(),
        dtypes,
        sum(piece_bytes.values()),
        len(absent_ids),
    )
