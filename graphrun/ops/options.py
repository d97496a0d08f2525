"""Other ways to run a stage that a plan may choose: what each does to the pipeline for as long as the stage runs.

    tiling    the VAE decodes tile by tile and blends the seams             the output changes
    slicing   the VAE decodes picture by picture                            it does not
    split     every call of the denoiser is cut into calls of one sample    it may, in the last bits

Which stages have them, and what must be allowed for them, says `graphrun.graph.ops`. Knows nothing of memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from graphrun.errors import GraphError
from graphrun.modules.interceptor import CallInterceptor
from graphrun.modules.trees import tensors_in, walk

# Pixels of a tile's edge, where a VAE's own is larger: its configuration names the size it was trained at, and 1024 saves nothing
# at 1024. 512 is the tile that diffusers' own video VAEs and the SD VAE come with.
TILE_PIXELS = 512


@contextmanager
def applied(name: str, pipeline: Any, modules: Mapping[str, nn.Module], device: torch.device) -> Iterator[None]:
    """A context in which ``pipeline`` runs the way that option ``name`` means; afterwards it is as it was.

    ``modules``: the components the stage uses. Raises GraphError where they cannot do that.
    """
    with ExitStack() as stack:
        if name == "split":
            stack.enter_context(CallInterceptor(modules, device, around=_one_by_one))
        else:
            vaes = {key: module for key, module in modules.items() if hasattr(module, f"enable_{name}")}
            if not vaes:
                raise GraphError(f"option {name}: none of {', '.join(modules)} can do that; take it out of the stage's options")
            for module in vaes.values():
                before = {key: value for key, value in vars(module).items() if key.startswith(("use_", "tile_"))}
                stack.callback(vars(module).update, before)
                getattr(module, f"enable_{name}")()
                _shrink_tiles(module)
        yield


def _shrink_tiles(module: nn.Module) -> None:
    size, latent = getattr(module, "tile_sample_min_size", 0), getattr(module, "tile_latent_min_size", 0)
    if size > TILE_PIXELS and latent:
        vars(module).update(tile_sample_min_size=TILE_PIXELS, tile_latent_min_size=latent * TILE_PIXELS // size)


def _one_by_one(component: str, entry: str, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The entry's result, from a call for each sample: tensors whose first dimension counts samples are cut, others go along."""
    count = next((t.shape[0] for t in tensors_in((args, kwargs)) if t.ndim > 2), 1)
    if count == 1:
        return proceed(*args, **kwargs)
    results = []
    for number in range(count):
        own_args, own_kwargs = walk((args, kwargs), functools.partial(_sample, count, number))
        results.append(proceed(*own_args, **own_kwargs))
    return _joined(results)


def _sample(count: int, number: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[number : number + 1] if tensor.ndim and tensor.shape[0] == count else tensor


def _joined(results: list[Any]) -> Any:
    first = results[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(results)
    if isinstance(first, Mapping):
        return type(first)(**{key: _joined([result[key] for result in results]) for key in first})
    if isinstance(first, (list, tuple)):
        return type(first)(_joined(list(items)) for items in zip(*results, strict=True))
    return first
