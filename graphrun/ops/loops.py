"""Decides from a pipeline's source whether its denoising loop can be resumed in the middle.

It can where latents, the scheduler and random numbers are the only loop-carried state.

    for i, t in enumerate(timesteps):            one counted loop: it can be resumed at any count
        noise = transformer(latents, old, ...)   `old` is read here ... latents =
        scheduler.step(noise, t, latents) old = noise                              ... and set for
        the next step here: resuming would change the result
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

# Arguments of `__call__` that take a step callback, the preferred one first.
CALLBACKS = ("callback_on_step_end", "callback")
# What CogVideoX's DPM scheduler returns beside latents and takes in its next step. The scheduler of
# a journaled loop stores it (`steps`).
REMEMBERED = "old_pred_original_sample"
_MUTATING_METHODS = frozenset({"append", "extend", "insert", "setdefault"})


def why_not(kind: Any) -> str:
    """Why the loop of the pipeline class ``kind`` cannot be resumed in the middle; "" where it
    can."""
    return _why_not(inspect.unwrap(kind.__call__))


@functools.cache  # called in every run, each with a class of its own that has the same ``call``
def _why_not(call: Any) -> str:
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
    if carried := sorted(_loop_carried(loops[0])):
        return f"its pipeline's steps also read {', '.join(carried)} of the step before, which is not saved"
    return ""


def _is_timestep_loop(loop: ast.For) -> bool:
    """Whether this is ``for i, t in enumerate(timesteps)``."""
    call, target = loop.iter, loop.target
    return (
        isinstance(call, ast.Call)
        and getattr(call.func, "id", "") == "enumerate"
        and ast.unparse(call.args[0]) in ("timesteps", "self.scheduler.timesteps")
        and isinstance(target, ast.Tuple)
    )


def _loop_carried(loop: ast.For) -> set[str]:
    """Names and attributes of the pipeline that a step may read as an earlier step left them,
    except latents."""
    stores = Counter(name for node in (loop.target, *loop.body) for name in _stores(node))
    exposed = _exposed(loop.body, set(_stores(loop.target)), stores)
    return (exposed & stores.keys()) - {"latents", REMEMBERED}


def _exposed(statements: Iterable[ast.stmt], assigned: set[str], stores: Counter[str]) -> set[str]:
    """The names that may be read in ``statements`` before this step assigns them.

    ``assigned``: the names assigned so far in this step; those that the statements always assign
    are added. ``stores``: how often each name is assigned in the loop.
    """
    found = set[str]()
    for node in statements:
        if isinstance(node, ast.If) and _calls_callback(node):
            found |= _exposed(node.orelse, assigned, stores)
        elif isinstance(node, ast.If):
            found |= _read(node.test) - assigned
            one, other = set(assigned), set(assigned)
            found |= _exposed(node.body, one, stores) | _exposed(node.orelse, other, stores)
            assigned |= one & other
            # Names that only this `if` assigns, where its condition does not change in the loop.
            if not set(map(_name_of, ast.walk(node.test))) & stores.keys():
                own = Counter(_stores(node))
                assigned |= {
                    name
                    for name in one ^ other
                    if own[name] == stores[name] and not _assigned_in_both(name, node)
                }
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            found |= set().union(*map(_read, node.items)) - assigned
            found |= _exposed(node.body, assigned, stores)
        elif isinstance(node, (ast.For, ast.While, ast.Try)):
            found |= (
                _read(getattr(node, "iter", None) or getattr(node, "test", None) or ast.Pass())
                - assigned
            )
            # the body may not run at all
            inside = assigned | set(_stores(node.target) if isinstance(node, ast.For) else ())
            handlers = [handler.body for handler in getattr(node, "handlers", [])]
            for part in (node.body, *handlers, node.orelse, getattr(node, "finalbody", [])):
                found |= _exposed(part, inside, stores)
        else:
            found |= _read(node) - assigned
            assigned |= set(_stores(node))
    return found


def _read(node: ast.AST) -> set[str]:
    """The names that ``node`` reads, except those that its own comprehensions assign."""
    targets = {id(node.target)} if isinstance(node, ast.AugAssign) else set[int]()
    own = {
        name
        for child in ast.walk(node)
        if isinstance(child, ast.comprehension)
        for name in _stores(child.target)
    }
    read = (
        child
        for child in ast.walk(node)
        if id(child) in targets or isinstance(getattr(child, "ctx", None), ast.Load)
    )
    return set(map(_name_of, read)) - own - {""}


def _calls_callback(node: ast.AST) -> bool:
    """Whether this ``if`` calls the step callback. It is not part of the step, since graphrun's
    callback changes nothing."""
    return isinstance(node, ast.If) and any(
        isinstance(name, ast.Name) and name.id in CALLBACKS for name in ast.walk(node.test)
    )


def _assigned_in_both(name: str, node: ast.If) -> bool:
    """Whether both branches assign ``name``."""
    return all(
        name in {stored for child in branch for stored in _stores(child)}
        for branch in (node.body, node.orelse)
    )


def _stores(node: ast.AST) -> Iterator[str]:
    """The names that ``node`` and all in it assign, or change in place as a list or dict."""
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
    """``x`` for a name, and ``self.x`` for an attribute of the pipeline, without the underscore
    that its property hides; else "".
    """
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self":
        return f"self.{node.attr.lstrip('_')}"
    return ""
