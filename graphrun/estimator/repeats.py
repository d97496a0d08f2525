"""Calls inside a component that repeat: a VAE decodes and blends tile after tile of one shape. The first is run, others replayed.

Decides which calls are the same. Must not know what is in them: their events are the recorder's.

A call repeats another when its tensors have the same shapes, strides and dtypes and all else is equal. It may be replayed if it
left nothing behind but what it returned: Wan's decoder keeps frames for its next call in a list that it is handed, and is always
run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from graphrun.estimator.recorder import Excerpt, Recorder

PLAIN = (bool, int, float, str, type(None))

# A component's own helpers that run once for each tile, as diffusers' autoencoders name them.
HELPERS = re.compile(r"blend_[a-z]|_?(temporal_)?tiled_decode")


@dataclass(frozen=True, slots=True)
class Given:
    """Stands for the argument that a call returned as it was handed in."""

    index: int


class Repeats:
    """A context manager in which repeated calls into ``module``'s children and helpers are replayed from ``recorder``'s record."""

    def __init__(self, module: nn.Module, recorder: Recorder) -> None:
        self.module = module
        self.recorder = recorder
        self._known: dict[Any, tuple[Excerpt, Sequence[Any], Any]] = {}
        self._classes: list[tuple[nn.Module, type[nn.Module]]] = []

    def __enter__(self) -> Repeats:
        for name, child in self.module.named_children():
            self._wrap(child, name, ["__call__"])
        self._wrap(self.module, "", [name for name in dir(type(self.module)) if HELPERS.fullmatch(name)])
        return self

    def __exit__(self, *_: object) -> None:
        while self._classes:
            module, kind = self._classes.pop()
            module.__class__ = kind

    def _wrap(self, module: nn.Module, name: str, methods: Sequence[str]) -> None:
        kind = type(module)
        self._classes.append((module, kind))
        members: dict[str, Any] = {method: self._repeated((name, method), getattr(kind, method)) for method in methods}
        module.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **members})

    def _repeated(self, place: tuple[str, str], run: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            leaves, shape = tree_flatten((args, kwargs))
            if not all(isinstance(leaf, (torch.Tensor, *PLAIN)) for leaf in leaves):
                return run(module, *args, **kwargs)
            key = place, str(shape), tuple(_told(leaf) for leaf in leaves)
            if (known := self._known.get(key)) is not None:
                return self._again(leaves, *known)
            given = [id(leaf) for leaf in leaves]
            del leaves  # what the call lets go of in a container must go
            begin = self.recorder.begin()
            out = run(module, *args, **kwargs)
            outs, form = tree_flatten(out)
            changed = [id(leaf) for leaf in tree_leaves((args, kwargs))] != given
            kept = [Given(given.index(id(leaf))) if isinstance(leaf, torch.Tensor) and id(leaf) in given else leaf for leaf in outs]
            made = [leaf for leaf in kept if isinstance(leaf, torch.Tensor)]
            if not changed and (excerpt := self.recorder.since(begin, made)) is not None:
                with _disable_current_modes():
                    self._known[key] = excerpt, [_like(leaf) for leaf in kept], form
            return out

        return call

    def _again(self, leaves: Sequence[Any], excerpt: Excerpt, kept: Sequence[Any], form: Any) -> Any:
        with _disable_current_modes():
            outs = [leaves[leaf.index] if isinstance(leaf, Given) else _like(leaf) for leaf in kept]
        new = [out for out, leaf in zip(outs, kept, strict=True) if isinstance(leaf, torch.Tensor)]
        self.recorder.replay(excerpt, new)
        return tree_unflatten(outs, form)


def _told(leaf: Any) -> Any:
    return (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf)


def _like(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
