"""Decide from a pipeline's source whether its denoising loop can be resumed in the middle.

This works if latents, the scheduler and random numbers are the only loop-carried state.

    for i, t in enumerate(timesteps):            one counted loop: can resume at any count
        noise = transformer(latents, old, ...)   reads `old` ...
        latents = scheduler.step(noise, t, latents)
        old = noise                              ... which the next step needs: cannot resume
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

# arguments of `__call__` for a step callback, the preferred one first
CALLBACKS = ("callback_on_step_end", "callback")
# a value that CogVideoX's DPM scheduler returns with the latents and takes in its next step; the
# scheduler of a journaled loop stores it (`steps`)
PREVIOUS_PREDICTION = "old_pred_original_sample"
_MUTATING_METHODS = frozenset({"append", "extend", "insert", "setdefault"})


def resume_obstacle(kind: Any) -> str:
    """Return why the loop of pipeline class ``kind`` cannot resume in the middle; "" if it can."""
    return _resume_obstacle(inspect.unwrap(kind.__call__))


@functools.cache  # called in every run, with different classes that share ``call``
def _resume_obstacle(call: Any) -> str:
    parameters = inspect.signature(call).parameters
    if "generator" not in parameters or not any(name in parameters for name in CALLBACKS):
        return "its pipeline takes no generator, or has no callback for the latents of a step"
    tree = ast.parse(textwrap.dedent(inspect.getsource(call)))
    loops = [
        node for node in ast.walk(tree) if isinstance(node, ast.For) and _is_timestep_loop(node)
    ]
    if len(loops) != 1:
        return f"its pipeline has {len(loops)} loops over timesteps, and only one is supported"
    if "latents" not in set(_stores(loops[0])):
        return "its pipeline's loop does not assign latents"
    if carried_names := sorted(_loop_carried(loops[0])):
        return (
            f"its pipeline's steps also read {', '.join(carried_names)} of the step before, "
            "which is not saved"
        )
    return ""


def _is_timestep_loop(loop: ast.For) -> bool:
    """Return whether ``loop`` is ``for i, t in enumerate(timesteps)``."""
    call, target = loop.iter, loop.target
    return (
        isinstance(call, ast.Call)
        and getattr(call.func, "id", "") == "enumerate"
        and ast.unparse(call.args[0]) in ("timesteps", "self.scheduler.timesteps")
        and isinstance(target, ast.Tuple)
    )


def _loop_carried(loop: ast.For) -> set[str]:
    """Return names and attributes that a step may read from an earlier step, except latents."""
    stores = Counter(name for node in (loop.target, *loop.body) for name in _stores(node))
    read_first = _names_read_first(loop.body, set(_stores(loop.target)), stores)
    return (read_first & stores.keys()) - {"latents", PREVIOUS_PREDICTION}


def _names_read_first(
    statements: Iterable[ast.stmt], assigned_names: set[str], stores: Counter[str]
) -> set[str]:
    """Return the names that ``statements`` may read before this step assigns them.

    ``assigned_names``: assigned so far in this step; names that ``statements`` always assign are
    added. ``stores``: how often the loop assigns each name.
    """
    result = set[str]()
    for node in statements:
        if isinstance(node, ast.If) and _calls_callback(node):
            result |= _names_read_first(node.orelse, assigned_names, stores)
        elif isinstance(node, ast.If):
            result |= _names_read(node.test) - assigned_names
            body_names, else_names = set(assigned_names), set(assigned_names)
            result |= _names_read_first(node.body, body_names, stores) | _names_read_first(
                node.orelse, else_names, stores
            )
            assigned_names |= body_names & else_names
            # add names that only this `if` assigns, if its condition is constant in the loop
            if not set(map(_name_of, ast.walk(node.test))) & stores.keys():
                store_counts = Counter(_stores(node))
                assigned_names |= {
                    name
                    for name in body_names ^ else_names
                    if store_counts[name] == stores[name] and not _assigned_in_both(name, node)
                }
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            result |= set().union(*map(_names_read, node.items)) - assigned_names
            result |= _names_read_first(node.body, assigned_names, stores)
        elif isinstance(node, (ast.For, ast.While, ast.Try)):
            result |= (
                _names_read(
                    getattr(node, "iter", None) or getattr(node, "test", None) or ast.Pass()
                )
                - assigned_names
            )
            # the body may not run at all
            inner_names = assigned_names | set(
                _stores(node.target) if isinstance(node, ast.For) else ()
            )
            handlers = [handler.body for handler in getattr(node, "handlers", [])]
            for part in (node.body, *handlers, node.orelse, getattr(node, "finalbody", [])):
                result |= _names_read_first(part, inner_names, stores)
        else:
            result |= _names_read(node) - assigned_names
            assigned_names |= set(_stores(node))
    return result


def _names_read(node: ast.AST) -> set[str]:
    """Return the names that ``node`` reads, except variables of its own comprehensions."""
    targets = {id(node.target)} if isinstance(node, ast.AugAssign) else set[int]()
    comprehension_names = {
        name
        for child in ast.walk(node)
        if isinstance(child, ast.comprehension)
        for name in _stores(child.target)
    }
    loads = (
        child
        for child in ast.walk(node)
        if id(child) in targets or isinstance(getattr(child, "ctx", None), ast.Load)
    )
    return set(map(_name_of, loads)) - comprehension_names - {""}


def _calls_callback(node: ast.AST) -> bool:
    """Return whether ``node`` is an ``if`` around the step callback; graphrun's changes nothing."""
    return isinstance(node, ast.If) and any(
        isinstance(name, ast.Name) and name.id in CALLBACKS for name in ast.walk(node.test)
    )


def _assigned_in_both(name: str, node: ast.If) -> bool:
    return all(
        name in {stored_name for child in branch for stored_name in _stores(child)}
        for branch in (node.body, node.orelse)
    )


def _stores(node: ast.AST) -> Iterator[str]:
    """Yield the names that ``node`` assigns, or changes in place as a list or dict."""
    if isinstance(node, ast.If) and _calls_callback(node):
        for statement in node.orelse:
            yield from _stores(statement)
        return
    if (
        isinstance(node, (ast.Name, ast.Attribute))
        and isinstance(node.ctx, ast.Store)
        and (name := _name_of(node))
    ):
        yield name
    if (
        isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
    ):
        yield node.value.id
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _MUTATING_METHODS
    ):
        yield _name_of(node.func.value)
    for child in ast.iter_child_nodes(node):
        yield from _stores(child)


def _name_of(node: ast.AST) -> str:
    """Return ``x`` for a name and ``self.x`` for an attribute of the pipeline, else "". An
    attribute loses its leading underscore, as in the property that reads it."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self":
        return f"self.{node.attr.lstrip('_')}"
    return ""
