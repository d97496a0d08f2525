"""Read a YAML file as plain data with the line number of every entry, for error messages.

Accepts one document without tags, with unique keys and with limits on nesting, digits and alias
expansion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from graphrun import reading
from graphrun.errors import GraphError
from graphrun.limits import LIMITS, require

Location = Sequence[str | int]
_KEY_CHARACTERS = 1024  # as YAML 1.2 limits keys without a question mark (section 7.4)
_TEXT_CHARACTERS = 500  # at each end of a problem, which may quote a long value of the file


@dataclass(frozen=True, slots=True)
class Document:
    """The data read from ``path``, and the problems of its entries, which are reported together."""

    path: Path
    data: Any
    root: yaml.Node
    problems: dict[str, int] = field(default_factory=dict)  # text -> line
    # locations of entries that were dropped for their shape
    wrong: set[Location] = field(default_factory=set)
    # entries of mappings, by `id` of their node
    _entries: dict[int, dict[str, tuple[yaml.Node, yaml.Node]]] = field(default_factory=dict)

    def file_line(self, location: Location) -> str:
        """Return ``path:line`` of the entry at ``location``, or of the entry around it."""
        return f"{self.path}:{self._line(location)}"

    def _line(self, location: Location) -> int:
        node, line = self.root, self.root.start_mark.line
        for step in location:
            if isinstance(node, yaml.MappingNode):
                if id(node) not in self._entries:
                    self._entries[id(node)] = {
                        str(key.value): (key, value) for key, value in node.value
                    }
                entry = self._entries[id(node)].get(str(step))
            else:
                items = node.value if isinstance(node, yaml.SequenceNode) else []
                entry = (
                    next(((item, item) for item in items[step : step + 1]), None)
                    if isinstance(step, int)
                    else None
                )
            if entry is None:
                break
            key, node = entry
            line = key.start_mark.line
        return line + 1

    def add(self, location: Location, text: str, *, line_of: Location | None = None) -> None:
        """Add the problem ``text`` of the entry at ``location``. ``line_of``: the entry whose line
        is reported instead. Raises GraphError at the limit of problems."""
        line, entry = self._line(line_of or location), ".".join(map(str, location))
        if len(text) > 2 * _TEXT_CHARACTERS:
            text = f"{text[:_TEXT_CHARACTERS]} ... {text[-_TEXT_CHARACTERS:]}"
        self.problems.setdefault(
            ": ".join([f"{self.path}:{line}", *filter(None, [entry]), text]), line
        )
        if len(self.problems) == LIMITS.problems:
            self.raise_if_any()

    def raise_if_any(self) -> None:
        """Raise GraphError with one line per problem, by line number, if there are problems."""
        if self.problems:
            raise GraphError("\n".join(sorted(self.problems, key=self.problems.__getitem__)))


def read_document(path: Path) -> Document:
    """Return the YAML document in ``path``. Raises GraphError if it cannot be read, is not YAML, or
    repeats a key."""
    text = reading.read_text(path, GraphError, "yaml_bytes")
    try:
        loader = _Loader(path, text)
        root = loader.get_single_node()
        if root is None:
            raise GraphError("the file is empty", str(path))
        duplicates: list[str] = []
        _check(path, root, {}, (), duplicates)
        if duplicates:
            raise GraphError("\n".join(duplicates[: LIMITS.problems]))
        return Document(path, loader.construct_document(root), root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        file_line = f"{path}:{mark.line + 1}" if mark else str(path)
        raise GraphError(
            f"not YAML: {str(error.problem or error.context)[:200]}", file_line
        ) from None
    except yaml.reader.ReaderError as error:
        raise GraphError(
            f"not YAML: {error.reason} at character {error.position}", str(path)
        ) from None
    except ValueError as error:  # such as the date 2024-13-45
        raise GraphError(f"not YAML: {error}", str(path)) from None


class _Loader(yaml.SafeLoader):
    """Composes nodes up to the limits, so that a large or deep document is never read whole."""

    def __init__(self, path: Path, text: str) -> None:
        super().__init__(text)
        self._path, self._nodes, self._depth = path, 0, 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        self._nodes, self._depth = self._nodes + 1, self._depth + 1
        if self._depth > LIMITS.nesting:
            raise yaml.composer.ComposerError(
                None, None, f"nested more than {LIMITS.nesting} deep", event.start_mark
            )
        if getattr(event, "tag", None) not in (None, "!"):
            text = f"the tag {event.tag[:100]!r} is not read: leave it out"
            raise yaml.composer.ComposerError(None, None, text, event.start_mark)
        file_line = f"{self._path}:{event.start_mark.line + 1}"
        require(
            "nodes", self._nodes, f"it has {self._nodes:,} entries or more", file_line, GraphError
        )
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(node, yaml.ScalarNode):
            # 12 more for a sign, 0x, and _ between digits
            if node.tag.endswith(":int") and len(node.value) > LIMITS.digits + 12:
                text = f"an integer has {len(node.value):,} digits"
                raise yaml.composer.ComposerError(None, None, text, node.start_mark)
            reading.refuse_surrogates(node.value)
        return node


def read_json(path: Path, *, infinite: bool = False) -> dict[str, Any]:
    """Return the JSON object in ``path``; ``infinite`` allows infinite numbers. Raises GraphError
    if the file cannot be read or is something else."""
    data = reading.read_json(path, GraphError, infinite=infinite)
    if not isinstance(data, dict):
        raise GraphError(f"expected a JSON object, got {type(data).__name__}", str(path))
    return data


def _check(
    path: Path,
    node: yaml.Node,
    node_counts: dict[int, int],
    ancestors: tuple[int, ...],
    duplicates: list[str],
) -> int:
    """Return the number of nodes in ``node`` with aliases expanded; add keys given twice to
    ``duplicates``. Raises GraphError for too many nodes, or an alias within itself."""
    file_line = f"{path}:{node.start_mark.line + 1}"
    if id(node) in ancestors:
        raise GraphError("an alias that contains itself", file_line)
    if len(ancestors) > LIMITS.nesting:
        raise GraphError(
            f"nested more than {LIMITS.nesting} deep once its aliases are expanded", file_line
        )
    if id(node) not in node_counts:
        children: list[yaml.Node] = list(node.value) if isinstance(node, yaml.SequenceNode) else []
        keys: set[str] = set()
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            if len(key.value) > _KEY_CHARACTERS and isinstance(key, yaml.ScalarNode):
                raise GraphError(
                    f"a key has {len(key.value):,} characters", f"{path}:{key.start_mark.line + 1}"
                )
            if isinstance(key, yaml.ScalarNode) and key.value in keys and key.value != "<<":
                duplicates.append(
                    f"{path}:{key.start_mark.line + 1}: key {key.value!r} is given twice"
                )
            keys.add(str(key.value))
            children += [key, value]
        node_counts[id(node)] = 1 + sum(
            _check(path, child, node_counts, (*ancestors, id(node)), duplicates)
            for child in children
        )
        require(
            "nodes",
            node_counts[id(node)],
            f"it has {node_counts[id(node)]:,} entries once its aliases are expanded",
            file_line,
            GraphError,
        )
    return node_counts[id(node)]
