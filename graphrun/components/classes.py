"""From a class path in a graph file to the class, within the packages that the graph allows.

Decides what code a graph may name. Imports only the package that is named. Must not know files or weights.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from graphrun.errors import GraphError
from graphrun.graph.values import did_you_mean


def resolve_class(class_path: str, allow: Sequence[str], where: str = "") -> type[Any]:
    """The class that ``class_path`` names, such as ``diffusers.AutoencoderKL``.

    The class itself must live in an allowed package: ``diffusers.utils.x.subprocess.Popen`` does not.
    Raises GraphError at ``where``.
    """
    package, *steps = class_path.split(".")
    if package not in allow:
        raise GraphError(f"{class_path} is outside the allowed packages ({', '.join(allow)}); to trust it, add it to allow:", where)
    found: Any = _import(package, class_path, where)
    for step in steps:
        found = _member(found, step, class_path, where)
    if not isinstance(found, type):
        raise GraphError(f"{class_path} is not a class", where)
    if found.__module__.split(".")[0] not in allow:
        raise GraphError(f"{class_path} is {found.__module__}.{found.__qualname__}, outside the allowed packages", where)
    return found


def _member(owner: Any, name: str, class_path: str, where: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        if isinstance(owner, ModuleType) and hasattr(owner, "__path__"):
            try:
                return importlib.import_module(f"{owner.__name__}.{name}")
            except ModuleNotFoundError:
                pass
        known = [member for member in dir(owner) if member[:1].isupper()]
        raise GraphError(f"unknown class {class_path}{did_you_mean(name, known)}", where) from None
    except (ImportError, RuntimeError) as error:
        raise GraphError(f"{class_path} cannot be imported: {error}", where) from error


def _import(package: str, class_path: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise GraphError(f"{class_path} cannot be imported: {error}", where) from error
