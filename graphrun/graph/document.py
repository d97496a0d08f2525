"""Reads a YAML file as plain data with the line number of every entry, for error messages.

Accepted: a single document, safe tags, unique keys, bounded alias expansion. Knows nothing of graphs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from graphrun.errors import GraphError

# The most nodes of a document after its aliases are expanded. Reference graphs have about 200; a "billion laughs" file has 10**9.
MOST_NODES = 100_000

Location = Sequence[str | int]


@dataclass(frozen=True, slots=True)
class Document:
    """``data`` as read from ``path``."""

    path: Path
    data: Any
    root: yaml.Node

    def where(self, location: Location) -> str:
        """``path:line`` of the entry at ``location``, or of the nearest enclosing entry that the file has."""
        node, line = self.root, self.root.start_mark.line
        for step in location:
            found = _child(node, step)
            if found is None:
                break
            line, node = found
        return f"{self.path}:{line + 1}"


def read_document(path: Path) -> Document:
    """The YAML document in ``path``. Raises GraphError when it cannot be read, is no YAML, or repeats a key."""
    text = read_text(path)
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            raise GraphError("the file is empty", str(path))
        _count(path, root, {}, ())
        problems = [f"{path}:{line}: key {key!r} is given twice" for line, key in _repeated(root, set())]
        if problems:
            raise GraphError("\n".join(problems))
        return Document(path, loader.construct_document(root), root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise GraphError(f"not YAML: {error.problem or error.context}", where) from None
    except yaml.reader.ReaderError as error:
        raise GraphError(f"not YAML: {error.reason} at character {error.position}", str(path)) from None
    except ValueError as error:  # such as the date 2024-13-45
        raise GraphError(f"not YAML: {error}", str(path)) from None
    except RecursionError:
        raise GraphError("not YAML: nested too deeply", str(path)) from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``. Raises GraphError when it cannot be read or is something else."""
    try:
        data = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise GraphError(f"not JSON: {error.msg}", f"{path}:{error.lineno}") from None
    except RecursionError:
        raise GraphError("not JSON: nested too deeply", str(path)) from None
    if not isinstance(data, dict):
        raise GraphError(f"expected a JSON object, got {type(data).__name__}", str(path))
    return data


def read_text(path: Path) -> str:
    """The text in ``path``. Raises GraphError when there is no such file or it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise GraphError("no such file", str(path)) from None
    except UnicodeDecodeError as error:
        raise GraphError(f"not a text file: byte {error.start} is not UTF-8", str(path)) from None
    except (OSError, ValueError) as error:
        raise GraphError(f"cannot be read: {getattr(error, 'strerror', None) or error}", str(path)) from None


def _child(node: yaml.Node, step: str | int) -> tuple[int, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        found = [(key.start_mark.line, value) for key, value in node.value if key.value == str(step)]
        return found[-1] if found else None
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        return node.value[step].start_mark.line, node.value[step]
    return None


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _count(path: Path, node: yaml.Node, counted: dict[int, int], above: tuple[int, ...]) -> int:
    """The number of nodes below ``node`` with aliases expanded. Raises GraphError for too many, or an alias within itself."""
    where = f"{path}:{node.start_mark.line + 1}"
    if id(node) in above:
        raise GraphError("an alias that contains itself", where)
    if id(node) not in counted:
        counted[id(node)] = 1 + sum(_count(path, child, counted, (*above, id(node))) for child in _children(node))
        if counted[id(node)] > MOST_NODES:
            raise GraphError("too large once its aliases are expanded", where)
    return counted[id(node)]


def _repeated(node: yaml.Node, seen: set[int]) -> Iterator[tuple[int, str]]:
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in keys and key.value != "<<":
                yield key.start_mark.line + 1, key.value
            keys.add(str(key.value))
    for child in _children(node):
        yield from _repeated(child, seen)


class Problems:
    """Collects the problems of a document, to report all of them at once."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._found: list[tuple[int, str]] = []

    def add(self, location: Location, text: str, *, line_of: Location | None = None) -> None:
        """Adds the problem ``text`` of the entry at ``location``, with the line of that entry, or of the one at ``line_of``."""
        where = self._document.where(line_of or location)
        entry = ".".join(str(step) for step in location)
        self._found.append((int(where.rsplit(":", 1)[1]), f"{where}: {entry}: {text}" if entry else f"{where}: {text}"))

    def raise_if_any(self) -> None:
        """Raises GraphError with one line per problem, ordered by line number; nothing where there is none."""
        if self._found:
            raise GraphError("\n".join(dict.fromkeys(line for _, line in sorted(self._found, key=lambda found: found[0]))))
