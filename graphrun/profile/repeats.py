"""Replay repeated calls inside a component, such as equal blocks and tiles of one shape.

Two calls are equal if their tensors have the same shapes, strides and dtypes, and all other
arguments are equal. A call is replayed only if the first call has no side effects besides its
result. Wan's decoder stores frames for its next call in a list argument, and a causal convolution
may keep its input in an attribute, so these always run.
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

from graphrun.modules.trees import PLAIN, found_in, modules_below, named_modules_below
from graphrun.profile.recorder import Recorder
from graphrun.profile.recording import Call

PLAIN_TYPES = (bool, int, float, str, type(None))

# not compared between blocks: the block's index, and attributes of `nn.Module`
INDEX_ATTRIBUTES = frozenset({"layer_idx", "layer_index", *vars(nn.Module())})

# methods that diffusers' autoencoders call once for each tile
TILE_METHODS = re.compile(r"blend_[a-z]|_?(temporal_)?tiled_decode")


@dataclass(frozen=True, slots=True)
class ReturnedArgument:
    """In a stored result: argument number ``index``, which the call returns unchanged."""

    index: int


@dataclass(frozen=True, slots=True)
class Repeatable:
    """A call that can be replayed.

    ``section``: its recording for the module at ``path``. ``results``: its result with empty
    tensors, flattened by pytree as in ``spec``. ``numbers``: of the tensors in its arguments and
    results (`Hop`). ``base_number``: the last number before the call.
    """

    path: str
    section: Call
    results: Sequence[Any]
    spec: Any
    numbers: Sequence[int]
    base_number: int


class Repeats:
    """Context that replays repeated calls into children and tile methods of ``module``."""

    def __init__(self, module: nn.Module, recorder: Recorder) -> None:
        self.module = module
        self.recorder = recorder
        self._first: dict[Any, Repeatable] = {}
        self._classes: list[tuple[nn.Module, type[nn.Module]]] = []

    def __enter__(self) -> Repeats:
        for name, child in self.module.named_children():
            self._wrap(child, name, name, ["__call__"])
        for path, blocks in named_modules_below(self.module):
            if (
                isinstance(blocks, nn.ModuleList)
                and len(blocks) > 1
                and not any(block is None for block in blocks)
            ):
                for index, block in enumerate(blocks):
                    self._wrap(block, f"{path}.{index}", (path, _structure(block)), ["__call__"])
        self._wrap(
            self.module,
            "",
            "",
            [name for name in dir(type(self.module)) if TILE_METHODS.fullmatch(name)],
        )
        return self

    def __exit__(self, *_: object) -> None:
        while self._classes:
            module, kind = self._classes.pop()
            module.__class__ = kind

    def _wrap(self, module: nn.Module, path: str, structure: Any, methods: Sequence[str]) -> None:
        """Make ``methods`` of ``module`` replayable.

        ``structure``: a key that is equal for modules that compute the same. If ``forward`` is
        replaced on an instance, as diffusers' hooks do, calls may differ, and none is replayed.
        """
        if any("forward" in vars(inner) for inner in modules_below(module)):
            return
        kind = type(module)
        self._classes.append((module, kind))
        members: dict[str, Any] = {
            method: self._replayable(path, (structure, method), getattr(kind, method))
            for method in methods
        }
        module.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **members})

    def _replayable(self, path: str, structure: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            leaves, spec = tree_flatten((args, kwargs))
            if _has_foreign_hooks(module) or not all(
                isinstance(leaf, (torch.Tensor, *PLAIN_TYPES)) for leaf in leaves
            ):
                return run(module, *args, **kwargs)
            constants = self.recorder.constants
            key = (
                structure,
                str(spec),
                tuple((_key_of(leaf), constants.content(leaf)) for leaf in leaves),
            )
            if (first := self._first.get(key)) is not None:
                return self._replay(path, leaves, first)
            references, numbers = [_reference(leaf) for leaf in leaves], self._numbers_of(leaves)
            base_number = self.recorder.last_number
            del leaves  # tensors that the call removes from a container must be released
            initial_tensors = _attribute_tensors(module)
            with self.recorder.section() as section:
                output = run(module, *args, **kwargs)
            outputs, out_spec = tree_flatten(output)
            final_leaves = tree_leaves((args, kwargs))
            has_same_arguments = len(final_leaves) == len(references) and all(
                leaf is ref() for leaf, ref in zip(final_leaves, references, strict=True)
            )
            results = [
                next(
                    (
                        ReturnedArgument(n)
                        for n, ref in enumerate(references)
                        if isinstance(leaf, torch.Tensor) and leaf is ref()
                    ),
                    leaf,
                )
                for leaf in outputs
            ]
            new_tensors = [leaf for leaf in results if isinstance(leaf, torch.Tensor)]
            repeatable = self.recorder.repeatable(section, new_tensors)
            if (
                repeatable is not None
                and has_same_arguments
                and _attribute_tensors(module) == initial_tensors
            ):
                with _disable_current_modes():
                    empty, numbers = (
                        [_empty_like(leaf) for leaf in results],
                        [*numbers, *self._numbers_of(new_tensors)],
                    )
                    self._first[key] = Repeatable(
                        path, repeatable, empty, out_spec, numbers, base_number
                    )
            return output

        return call

    def _numbers_of(self, leaves: Sequence[Any]) -> list[int]:
        return [self.recorder.number_of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def _replay(self, path: str, leaves: Sequence[Any], first: Repeatable) -> Any:
        with _disable_current_modes():
            outputs = [
                leaves[leaf.index] if isinstance(leaf, ReturnedArgument) else _empty_like(leaf)
                for leaf in first.results
            ]
        new_tensors = [
            output
            for output, leaf in zip(outputs, first.results, strict=True)
            if isinstance(leaf, torch.Tensor)
        ]
        numbers = dict(
            zip(
                first.numbers,
                [*self._numbers_of(leaves), *self._numbers_of(new_tensors)],
                strict=True,
            )
        )
        section = first.section if path == first.path else first.section.renamed(first.path, path)
        self.recorder.replay(section, new_tensors, numbers, first.base_number)
        return tree_unflatten(outputs, first.spec)


def _has_foreign_hooks(module: nn.Module) -> bool:
    """Return whether other code hooks every call, as transformers does for hidden states."""
    return any(
        not str(hook.__module__).startswith("graphrun.") for hook in module._forward_hooks.values()
    )


def _attribute_tensors(module: nn.Module) -> list[tuple[int, str, int]]:
    """Return (module, attribute, address) of tensors in attributes, without weights."""
    return [
        (id(inner), key, id(tensor))
        for inner in modules_below(module)
        for key, value in vars(inner).items()
        if type(value) not in PLAIN and key not in INDEX_ATTRIBUTES
        for tensor in found_in(value, torch.Tensor)
    ]


def _structure(block: nn.Module) -> Any:
    """Return a key that is equal for blocks that compute the same, whatever their index."""
    return tuple(
        (
            name,
            type(inner).__qualname__,
            tuple(
                (key, _key_of(tensor))
                for key, tensor in (*inner._parameters.items(), *inner._buffers.items())
            ),
            tuple(
                (key, _attribute_key(value))
                for key, value in vars(inner).items()
                if key not in INDEX_ATTRIBUTES
            ),
        )
        for name, inner in named_modules_below(block)
    )


def _attribute_key(value: Any) -> Any:
    if isinstance(value, PLAIN_TYPES):
        return type(value), value
    return (
        repr(value)
        if isinstance(value, (tuple, list)) and len(repr(value)) < 200
        else type(value).__qualname__
    )


def _key_of(leaf: Any) -> Any:
    return (
        (leaf.shape, leaf.stride(), leaf.dtype, leaf.device.type)
        if isinstance(leaf, torch.Tensor)
        else (type(leaf), leaf)
    )


def _reference(leaf: Any) -> Callable[[], Any]:
    """Return a function that returns ``leaf``, or None if it is a tensor that was released."""
    return weakref.ref(leaf) if isinstance(leaf, torch.Tensor) else lambda: leaf


def _empty_like(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
