"""Whether a pipeline's denoising loop can be begun in its middle, read from the pipeline's source.

It can where latents, the scheduler and random numbers are all that one step hands to the next. Knows no state and no file.

    for i, t in enumerate(timesteps):            one loop, counted: it can be counted from where it was broken off
        noise = transformer(latents, old, ...)   `old` is read here ...
        latents = scheduler.step(noise, t, latents)
        old = noise                              ... and set for the next step here: begun in its middle it would be another loop
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

# Arguments that hear of a step's latents, the one that is taken first.
CALLBACKS = ("callback_on_step_end", "callback")
# What CogVideoX's DPM scheduler returns beside latents, and takes in its next step: the scheduler of a journaled loop holds it.
REMEMBERED = "old_pred_original_sample"
_CHANGES = frozenset({"append", "extend", "insert", "setdefault"})


def why_not(kind: Any) -> str:
    """Why the loop of the pipeline class ``kind`` cannot be begun in its middle; empty where it can."""
    return _why_not(kind)


@functools.cache  # each run asks
def _why_not(kind: Any) -> str:
    parameters = inspect.signature(kind.__call__).parameters
    if "generator" not in parameters or not any(name in parameters for name in CALLBACKS):
        return "its pipeline takes no generator, or tells nobody of a step's latents"
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(kind.__call__))))
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For) and _counted(node)]
    if len(loops) != 1:
        return f"its pipeline has {len(loops)} loops over timesteps where one is understood"
    if "latents" not in set(_stores(loops[0])):
        return "its pipeline's loop makes no latents"
    if handed := sorted(_handed_on(loops[0])):
        return f"its pipeline's steps hand on {', '.join(handed)}, which nothing keeps"
    return ""


def _counted(loop: ast.For) -> bool:
    """Whether this is ``for i, t in enumerate(timesteps)``."""
    call, target = loop.iter, loop.target
    return (
        isinstance(call, ast.Call)
        and getattr(call.func, "id", "") == "enumerate"
        and ast.unparse(call.args[0]) in ("timesteps", "self.scheduler.timesteps")
        and isinstance(target, ast.Tuple)
    )


def _handed_on(loop: ast.For) -> set[str]:
    """Names and the pipeline's own attributes that a step may read as an earlier step left them, but latents."""
    stores = Counter(name for node in (loop.target, *loop.body) for name in _stores(node))
    steps = _Reads(set(_stores(loop.target)), stores)
    steps.block(loop.body)
    return (steps.early & stores.keys()) - {"latents", REMEMBERED}


@dataclass
class _Reads:
    """Goes through statements in order: ``early`` was read where this step had perhaps not set it yet. ``stores``: how often."""

    known: set[str]
    stores: Counter[str]
    early: set[str] = field(default_factory=set)

    def block(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.If):
            self.branch(node)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                self.read(item)
            self.block(node.body)
        elif isinstance(node, (ast.For, ast.While, ast.Try)):
            self.read(node.iter if isinstance(node, ast.For) else node.test if isinstance(node, ast.While) else ast.Pass())
            before = set(self.known)
            self.known |= set(_stores(node.target)) if isinstance(node, ast.For) else set()
            for part in ("body", "handlers", "orelse", "finalbody"):
                for child in getattr(node, part, []):
                    self.block(child.body if isinstance(child, ast.ExceptHandler) else [child])
            self.known = before  # it may not have run at all
        else:
            self.read(node)
            self.known |= set(_stores(node))

    def branch(self, node: ast.If) -> None:
        """Behind it is known what both ways set; or what no other place sets, where every step takes the same way."""
        if _hears(node):
            self.block(node.orelse)
            return
        self.read(node.test)
        before = set(self.known)
        self.block(node.body)
        one, self.known = self.known, before
        self.block(node.orelse)
        either, own = one ^ self.known, Counter(_stores(node))
        self.known &= one
        if not set(map(_named, ast.walk(node.test))) & self.stores.keys():
            self.known |= {name for name in either if own[name] == self.stores[name] and not _twice(name, node)}

    def read(self, node: ast.AST) -> None:
        targets = {id(node.target)} if isinstance(node, ast.AugAssign) else set[int]()
        own = {name for child in ast.walk(node) if isinstance(child, ast.comprehension) for name in _stores(child.target)}
        for child in ast.walk(node):
            name = _named(child)
            if name and (id(child) in targets or isinstance(getattr(child, "ctx", None), ast.Load)):
                self.early |= {name} - self.known - own


def _hears(node: ast.AST) -> bool:
    """Whether this is what tells others of a step: no part of the step, since nothing comes back that changes it."""
    return isinstance(node, ast.If) and any(isinstance(name, ast.Name) and name.id in CALLBACKS for name in ast.walk(node.test))


def _twice(name: str, node: ast.If) -> bool:
    """Whether both ways set ``name``."""
    return all(name in {stored for child in way for stored in _stores(child)} for way in (node.body, node.orelse))


def _stores(node: ast.AST) -> Iterator[str]:
    """What ``node`` and all in it set, or change in place where it is a list."""
    if isinstance(node, ast.If) and _hears(node):
        for statement in node.orelse:
            yield from _stores(statement)
        return
    if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store) and (name := _named(node)):
        yield name
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
        yield node.value.id
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
        yield _named(node.func.value)
    for child in ast.iter_child_nodes(node):
        yield from _stores(child)


def _named(node: ast.AST) -> str:
    """``x``, and ``self.x`` of the pipeline, which its property shows without the underscore."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self":
        return f"self.{node.attr.lstrip('_')}"
    return ""
