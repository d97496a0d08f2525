"""Calls inside a component that repeat: one block after another like it, tile after tile of one shape. The first is run, others
replayed.

Decides which calls are the same. Must not know what is in them: their events are the recorder's.

A call repeats another when its tensors have the same shapes, strides and dtypes and all else is equal. It may be replayed if it
outputs nothing behind but what it returned: Wan's decoder keeps frames for its next call in a list that it is handed, and is always
run.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from graphrun.profile.recorder import Excerpt, Recorder

PLAIN = (bool, int, float, str, type(None))

# Attributes of a block that say where it stands, and what `nn.Module` keeps of its own.
NUMBERS = frozenset({"layer_idx", "layer_index", *vars(nn.Module())})

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
        self._known: dict[Any, tuple[str, Excerpt, Sequence[Any], Any]] = {}
        self._classes: list[tuple[nn.Module, type[nn.Module]]] = []

    def __enter__(self) -> Repeats:
        for name, child in self.module.named_children():
            self._wrap(child, name, name, ["__call__"])
        for path, blocks in list(self.module.named_modules()):
            if isinstance(blocks, nn.ModuleList) and len(blocks) > 1 and not any(block is None for block in blocks):
                for index, block in enumerate(blocks):
                    self._wrap(block, f"{path}.{index}", (path, _described(block)), ["__call__"])
        self._wrap(self.module, "", "", [name for name in dir(type(self.module)) if HELPERS.fullmatch(name)])
        return self

    def __exit__(self, *_: object) -> None:
        while self._classes:
            module, kind = self._classes.pop()
            module.__class__ = kind

    def _wrap(self, module: nn.Module, path: str, alike: Any, methods: Sequence[str]) -> None:
        """``alike``: the same for modules that do the same."""
        kind = type(module)
        self._classes.append((module, kind))
        members: dict[str, Any] = {method: self._repeated(path, (alike, method), getattr(kind, method)) for method in methods}
        module.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **members})

    def _repeated(self, path: str, place: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            leaves, shape = tree_flatten((args, kwargs))
            if _heard(module) or not all(isinstance(leaf, (torch.Tensor, *PLAIN)) for leaf in leaves):
                return run(module, *args, **kwargs)
            key = place, str(shape), tuple(_told(leaf) for leaf in leaves)
            if (known := self._known.get(key)) is not None:
                return self._again(path, leaves, *known)
            given = [_noted(leaf) for leaf in leaves]
            del leaves  # what the call lets go of in a container must go
            start = self.recorder.checkpoint()
            out = run(module, *args, **kwargs)
            outs, form = tree_flatten(out)
            now = tree_leaves((args, kwargs))
            changed = len(now) != len(given) or any(leaf is not noted() for leaf, noted in zip(now, given, strict=True))
            kept = [
                next((Given(n) for n, noted in enumerate(given) if isinstance(leaf, torch.Tensor) and leaf is noted()), leaf)
                for leaf in outs
            ]
            made = [leaf for leaf in kept if isinstance(leaf, torch.Tensor)]
            excerpt = self.recorder.since(start, made)
            if excerpt is not None and not changed:
                with _disable_current_modes():
                    self._known[key] = path, excerpt, [_like(leaf) for leaf in kept], form
            return out

        return call

    def _again(self, path: str, leaves: Sequence[Any], first: str, excerpt: Excerpt, kept: Sequence[Any], form: Any) -> Any:
        with _disable_current_modes():
            outs = [leaves[leaf.index] if isinstance(leaf, Given) else _like(leaf) for leaf in kept]
        new = [out for out, leaf in zip(outs, kept, strict=True) if isinstance(leaf, torch.Tensor)]
        self.recorder.replay(excerpt if path == first else excerpt.renamed(first, path), new)
        return tree_unflatten(outs, form)


def _heard(module: nn.Module) -> bool:
    """Whether somebody else hears every call: transformers collects hidden states by hooks on the layers."""
    return any(not hook.__module__.startswith("graphrun.") for hook in module._forward_hooks.values())


def _described(block: nn.Module) -> Any:
    """The same for blocks that do the same: classes, tensors and plain attributes of all modules, the block's number apart."""
    return tuple(
        (
            name,
            type(inner).__qualname__,
            tuple((key, _told(tensor)) for key, tensor in (*inner._parameters.items(), *inner._buffers.items())),
            tuple((key, _attribute(value)) for key, value in vars(inner).items() if key not in NUMBERS),
        )
        for name, inner in block.named_modules()
    )


def _attribute(value: Any) -> Any:
    if isinstance(value, PLAIN):
        return type(value), value
    return repr(value) if isinstance(value, (tuple, list)) and len(repr(value)) < 200 else type(value).__qualname__


def _told(leaf: Any) -> Any:
    return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device.type) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf)


def _noted(leaf: Any) -> Callable[[], Any]:
    """What tells later which leaf this was, and holds no tensor for it: None for one that is gone."""
    return weakref.ref(leaf) if isinstance(leaf, torch.Tensor) else lambda: leaf


def _like(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
