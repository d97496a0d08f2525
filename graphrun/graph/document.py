"""Reads a YAML file as plain data with the line number of every entry, for error messages.

Accepted: a single document, safe tags, unique keys, bounded alias expansion. Knows nothing of graphs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from graphrun.errors import GraphError

# The most nodes of a document after its aliases are expanded. Reference graphs have about 200; a "billion laughs" file has 10**9.
MOST_NODES = 100_000

Location = Sequence[str | int]


@dataclass(frozen=True, slots=True)
class Document:
    """``data`` as read from ``path``. Collects the problems of its entries, to report all of them at once."""

    path: Path
    data: Any
    root: yaml.Node
    problems: dict[str, int] = field(default_factory=dict)  # text -> line

    def where(self, location: Location) -> str:
        """``path:line`` of the entry at ``location``, or of the nearest enclosing entry that the file has."""
        return f"{self.path}:{self._line(location)}"

    def _line(self, location: Location) -> int:
        node, line = self.root, self.root.start_mark.line
        for step in location:
            if isinstance(node, yaml.MappingNode):
                found = [(key, value) for key, value in node.value if key.value == str(step)]
            else:
                items = node.value if isinstance(node, yaml.SequenceNode) else []
                found = [(item, item) for number, item in enumerate(items) if number == step]
            if not found:
                break
            key, node = found[-1]
            line = key.start_mark.line
        return line + 1

    def add(self, location: Location, text: str, *, line_of: Location | None = None) -> None:
        """Adds the problem ``text`` of the entry at ``location``, with the line of that entry, or of the one at ``line_of``."""
        line, entry = self._line(line_of or location), ".".join(map(str, location))
        self.problems.setdefault(": ".join([f"{self.path}:{line}", *filter(None, [entry]), text]), line)

    def raise_if_any(self) -> None:
        """Raises GraphError with one line per problem, ordered by line number; nothing where there is none."""
        if self.problems:
            raise GraphError("\n".join(sorted(self.problems, key=self.problems.__getitem__)))


def read_document(path: Path) -> Document:
    """The YAML document in ``path``. Raises GraphError when it cannot be read, is no YAML, or repeats a key."""
    text = read_text(path)
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            raise GraphError("the file is empty", str(path))
        repeated: list[str] = []
        _check(path, root, {}, (), repeated)
        if repeated:
            raise GraphError("\n".join(repeated))
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


def _check(path: Path, node: yaml.Node, counted: dict[int, int], above: tuple[int, ...], repeated: list[str]) -> int:
    """The number of nodes below ``node`` with aliases expanded; adds keys that are given twice to ``repeated``.

    Raises GraphError for too many nodes, or an alias within itself.
    """
    where = f"{path}:{node.start_mark.line + 1}"
    if id(node) in above:
        raise GraphError("an alias that contains itself", where)
    if id(node) not in counted:
        children: list[yaml.Node] = list(node.value) if isinstance(node, yaml.SequenceNode) else []
        keys: set[str] = set()
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.value in keys and key.value != "<<":
                repeated.append(f"{path}:{key.start_mark.line + 1}: key {key.value!r} is given twice")
            keys.add(str(key.value))
            children += [key, value]
        counted[id(node)] = 1 + sum(_check(path, child, counted, (*above, id(node)), repeated) for child in children)
        if counted[id(node)] > MOST_NODES:
            raise GraphError("too large once its aliases are expanded", where)
    return counted[id(node)]
