"""Run options of a stage that a plan may choose, and what each changes in the pipeline while the
stage runs.

    tiling    the VAE decodes tile by tile and blends the seams             the output changes
    slicing   the VAE decodes picture by picture                            it does not
    split     every call of the denoiser is split into one per sample       it may, in the last bits

``tiling+slicing`` is both.

`graphrun.graph.ops` defines which stages have which options, and what a user must allow for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from graphrun.errors import GraphError
from graphrun.modules.interceptor import CallInterceptor
from graphrun.modules.trees import tensors_in, walk

# Edge of a tile in pixels, where a VAE's own tile is larger. A VAE's configuration names the size
# it was trained at; a tile of 1024 saves nothing at 1024 pixels. 512 is the tile of diffusers' own
# video VAEs and of the SD VAE.
TILE_PIXELS = 512


@contextmanager
def apply_option(
    name: str, pipeline: Any, modules: Mapping[str, nn.Module], device: torch.device
) -> Iterator[None]:
    """A context in which ``pipeline`` runs with the option ``name``; it is restored afterwards.

    ``modules``: the components the stage uses. Raises GraphError where none of them supports the
    option.
    """
    with ExitStack() as stack:
        if name == "split":
            stack.enter_context(CallInterceptor(modules, device, _call_per_sample))
        else:
            switches = [f"enable_{each}" for each in name.split("+")]
            vaes = {
                key: module
                for key, module in modules.items()
                if all(hasattr(module, switch) for switch in switches)
            }
            if not vaes:
                raise GraphError(
                    f"option {name}: none of {', '.join(modules)} supports it; remove it from the stage's options"
                )
            for module in vaes.values():
                before = {
                    key: value
                    for key, value in vars(module).items()
                    if key.startswith(("use_", "tile_"))
                }
                stack.callback(vars(module).update, before)
                for switch in switches:
                    getattr(module, switch)()
                _shrink_tiles(module)
        yield


def _shrink_tiles(module: nn.Module) -> None:
    """Limits the VAE's tiles to `TILE_PIXELS`."""
    size, latent = (
        getattr(module, "tile_sample_min_size", 0),
        getattr(module, "tile_latent_min_size", 0),
    )
    if size > TILE_PIXELS and latent:
        vars(module).update(
            tile_sample_min_size=TILE_PIXELS, tile_latent_min_size=latent * TILE_PIXELS // size
        )


def _call_per_sample(
    component: str,
    entry: str,
    proceed: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Calls ``proceed`` once per sample and joins the results. Tensors whose first dimension counts
    samples are split, others are passed as they are.
    """
    count = next((t.shape[0] for t in tensors_in((args, kwargs)) if t.ndim > 2), 1)
    if count == 1:
        return proceed(*args, **kwargs)
    results = []
    for number in range(count):
        own_args, own_kwargs = walk((args, kwargs), functools.partial(_sample, count, number))
        results.append(proceed(*own_args, **own_kwargs))
    return tree_map(
        lambda *items: torch.cat(items) if isinstance(items[0], torch.Tensor) else items[0],
        *results,
    )


def _sample(count: int, number: int, tensor: torch.Tensor) -> torch.Tensor:
    """Sample ``number`` of ``tensor`` [count ...], as a batch of one; any other tensor
    unchanged."""
    return tensor[number : number + 1] if tensor.ndim and tensor.shape[0] == count else tensor
