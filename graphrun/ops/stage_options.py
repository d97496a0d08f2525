"""Run options of a stage that a plan may choose, applied to the pipeline while the stage runs.

    option    effect                                                  output
    tiling    the VAE decodes tile by tile and blends the seams       changes
    slicing   the VAE decodes picture by picture                      does not change
    split     the denoiser is called once per sample, not per batch   changes by rounding

``tiling+slicing`` is both. `graphrun.graph.ops` defines the options of each stage, and what a user
must allow for them.
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

# maximum edge of a tile, in pixels: the tile of diffusers' video VAEs and of the SD VAE. A VAE's
# configuration names its training size, and a tile of 1024 saves nothing at 1024 pixels.
TILE_PIXELS = 512


@contextmanager
def apply_option(
    name: str, pipeline: Any, modules: Mapping[str, nn.Module], device: torch.device
) -> Iterator[None]:
    """Apply option ``name`` to ``pipeline`` within the context. ``modules``: the components of the
    stage. Raises GraphError if none of them supports the option."""
    with ExitStack() as stack:
        if name == "split":
            stack.enter_context(CallInterceptor(modules, device, _call_per_sample))
        else:
            switches = [f"enable_{part}" for part in name.split("+")]
            vaes = {
                key: module
                for key, module in modules.items()
                if all(hasattr(module, switch) for switch in switches)
            }
            if not vaes:
                raise GraphError(
                    f"option {name}: none of {', '.join(modules)} supports it; remove it from "
                    "the stage's options"
                )
            for module in vaes.values():
                attributes = {
                    key: value
                    for key, value in vars(module).items()
                    if key.startswith(("use_", "tile_"))
                }
                stack.callback(vars(module).update, attributes)
                for switch in switches:
                    getattr(module, switch)()
                _shrink_tiles(module)
        yield


def _shrink_tiles(module: nn.Module) -> None:
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
    method: str,
    proceed: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call ``proceed`` once per sample and join the results. Tensors whose first dimension counts
    samples are split; other arguments pass unchanged."""
    count = next((t.shape[0] for t in tensors_in((args, kwargs)) if t.ndim > 2), 1)
    if count == 1:
        return proceed(*args, **kwargs)
    results = []
    for number in range(count):
        sample_args, sample_kwargs = walk((args, kwargs), functools.partial(_sample, count, number))
        results.append(proceed(*sample_args, **sample_kwargs))
    return tree_map(
        lambda *items: torch.cat(items) if isinstance(items[0], torch.Tensor) else items[0],
        *results,
    )


def _sample(count: int, number: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return sample ``number`` of ``tensor`` [count ...] as a batch of one, else ``tensor``."""
    return tensor[number : number + 1] if tensor.ndim and tensor.shape[0] == count else tensor
