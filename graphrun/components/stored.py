"""What the files of a component's source hold, against the module that its config makes: by their headers, before any data is read.

Decides whether a source may be what its graph says. Builds nothing and reads no weights; must not know plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from graphrun.components.weights import Stored, has_weights, local_folder, stored_tensors
from graphrun.errors import GraphError
from graphrun.graph.graph import Component


@dataclass(frozen=True, slots=True)
class Holding:
    """The tensors of a component's files: how many, their bytes as they lie there, by dtype; ``used_bytes`` of those that the
    module has under the same name, and how many of the module's saved tensors there are not (``missing``)."""

    folder: str
    tensors: int
    nbytes: int
    dtypes: tuple[tuple[str, int], ...]
    used_bytes: int
    missing: int


def stored_in(component: Component) -> tuple[Stored, ...] | None:
    """The tensors that the source of ``component`` holds, None where its files are not here. Raises GraphError for a broken one."""
    folder = local_folder(component.source) if component.source is not None else None
    if folder is None or not has_weights(folder):
        return None
    return stored_tensors(folder, component.where)


def holding(component: Component, module: nn.Module) -> Holding | None:
    """What the files of ``component`` hold, beside ``module``, its ghost. None where they are not on this machine.

    Raises GraphError where a file is broken, or has a tensor of the module's name in another shape: a plan for this module would be
    refused when its weights are read. Names that libraries give tensors anew while they read them are not judged.
    """
    stored = stored_in(component)
    if stored is None:
        return None
    by_name = {tensor.name: tensor for tensor in stored}
    state = module.state_dict(keep_vars=True)
    found = {name: by_name[key] for name in state if (key := saved_as(name, module, by_name)) in by_name}
    if differing := [
        f"{name} is {list(tensor.shape)} {tensor.dtype}, not {list(state[name].shape)}"
        for name, tensor in found.items()
        if tensor.shape != tuple(state[name].shape)
    ]:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        text = f"{component.source} is not what its config says: {'; '.join(differing[:3])}{more}"
        raise GraphError(f"components.{component.name}: {text}", component.where)
    there = {id(state[name]) for name in found}
    missing = {id(tensor) for tensor in state.values()} - there
    sizes: dict[str, int] = {}
    for tensor in stored:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    used = {tensor.name: tensor.nbytes for tensor in found.values()}
    return Holding(
        str(local_folder(component.source or "")),
        len(stored),
        sum(sizes.values()),
        tuple(sorted(sizes.items())),
        sum(used.values()),
        len(missing),
    )


def saved_as(name: str, module: nn.Module, saved: Mapping[str, Stored]) -> str:
    """The name under which a file has the module's tensor ``name``: transformers adds or drops the base model's prefix."""
    prefix = getattr(module, "base_model_prefix", "") or ""
    if name not in saved and prefix:
        for other in (f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
            if other in saved:
                return other
    return name
