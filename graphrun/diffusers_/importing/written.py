"""The text of a graph file from what is found in a source and its stages, and the files that belong
beside it.

Decides comments, order, and which configurations are inline and which in files of their own. Writes
nothing to disk.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from graphrun.diffusers_.importing.fingerprint import EntryRecord
from graphrun.diffusers_.importing.found import OF_CONFIG, OF_FILES, Found
from graphrun.diffusers_.importing.layout import Layout
from graphrun.diffusers_.importing.standin import stand_in_words
from graphrun.graph.graph import DEFAULT_ALLOW, Component, Part, Reference, Stage

WIDTH = 128  # characters in a line
SHORT = 90  # characters of JSON up to which a configuration is inline
COUNTS = {2: "Two", 3: "Three", 4: "Four", 5: "Five"}


@dataclass(frozen=True, slots=True)
class Document:
    """The YAML ``text`` and the ``files`` beside it: relative path -> text, or a function that
    fills a folder at a path."""

    text: str
    files: Mapping[str, str | Callable[[Path], Any]]


def document_of(found: Found, layout: Layout, name: str, folder: Path | None = None) -> Document:
    """The graph file of the graph ``name``; with sources relative to ``folder``, if that is where
    it will be."""
    files: dict[str, str | Callable[[Path], Any]] = {}
    lines = [
        *_head(found, layout),
        "graphrun: 1",
        f"name: {_flow(name)}",
        f"pipeline: {found.pipeline}",
    ]
    if found.settings:
        lines.append(f"pipeline_config: {_flow(found.settings)}")
    if found.source is not None:
        lines.append(f"source: {_flow(_near(found.source, folder))}")
    if found.revision is not None:
        lines.append(f"revision: {_flow(found.revision)}")
    if found.trust:
        lines.append(f"allow: {_flow([*DEFAULT_ALLOW, *found.trust])}")
    lines += ["", "inputs:", *(_entry(2, key, value) for key, value in layout.inputs.items())]
    order = list(
        dict.fromkeys(each.component for entries in layout.entered.values() for each in entries)
    )
    components = sorted(
        found.components.values(),
        key=lambda c: order.index(c.name) if c.name in order else len(order),
    )
    lines += ["", "components:"]
    for component in components:
        entry = _component(component, name, files, folder)
        reason = found.reasons[component.name]
        lines.append(
            _entry(2, component.name, entry)
            + ("" if reason in (OF_FILES, OF_CONFIG) else f"  # {reason}")
        )
    if found.parts:
        lines += ["", "parts:"]
        if any(part.file for part in found.parts.values()):
            lines.append(
                "  # The file stands in for vocabularies that are not here: sizes come from the longest text there may be."
            )
        lines += [
            _entry(2, part.name, _part(found, part, name, files, folder))
            for part in found.parts.values()
        ]
    lines += [
        "",
        "stages:",
        *(line for stage in layout.stages for line in _stage(stage, layout.entered[stage.name])),
    ]
    lines += ["", f"outputs: {_flow(dict(layout.outputs))}", ""]
    return Document("\n".join(lines), files)


def _head(found: Found, layout: Layout) -> list[str]:
    kind = found.kind.__name__
    sizes = "Sizes are those of the configurations here; weights are read when it runs."
    if found.source is None and not any(
        component.source for component in found.components.values()
    ):
        sizes = "Without a source: weights are random; add the folder or repository that has them."
    lines = [f"# Imported from {found.origin}. {sizes}", *(f"# {note}" for note in found.notes)]
    if layout.why:
        lines.append(f"# The call of {kind} is one stage: {layout.why}.")
    else:
        several = COUNTS.get(len(layout.stages), str(len(layout.stages)))
        lines.append(
            f"# {several} stages that enter every component with the same values as {kind} does in one call."
        )
    if layout.unused:
        lines.append(f"# No stage enters {', '.join(layout.unused)} for these inputs.")
    return lines


def _component(
    component: Component, name: str, files: dict[str, Any], folder: Path | None
) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "class": component.class_path,
        "config": _config(component, name, files),
        "dtype": component.dtype,
    }
    if component.source is not None:
        entry["source"] = _near(component.source, folder)
    if component.precision:
        entry["precision"] = list(component.precision)
    if component.gguf:
        entry["gguf"] = _near(component.gguf, folder)
    return entry


def _part(
    found: Found, part: Part, name: str, files: dict[str, Any], folder: Path | None
) -> dict[str, Any]:
    entry: dict[str, Any] = {"class": part.class_path}
    if part.file is not None:
        files[str(part.file)] = stand_in_words() + "\n"
        return entry | {"file": str(part.file), "config": part.config}
    if part.has_config:
        entry["config"] = _config(part, name, files)
    elif part.source is not None:
        entry["source"] = _near(part.source, folder)
    elif found.source is None:
        own = f"tokenizers/{name}-{part.name}"
        files[own] = found.live[part.name].save_pretrained
        entry["source"] = f"./{own}"
    return entry


def _config(member: Component | Part, name: str, files: dict[str, Any]) -> Any:
    """The configuration itself where it is short, else the path of the file that holds it."""
    if len(json.dumps(member.config)) <= SHORT:
        return member.config
    path = f"configs/{name}-{member.name}.json"
    files[path] = json.dumps(member.config, indent=2) + "\n"
    return path


def _near(source: str, folder: Path | None) -> str:
    """``source`` relative to ``folder`` where that needs at most one ``..``; other folders and
    repositories unchanged."""
    if folder is None or not Path(source).is_absolute():
        return source
    relative = os.path.relpath(source, folder.resolve())
    if relative.count("..") > 1:
        return source
    return relative if relative.startswith(".") else f"./{relative}"


def _stage(stage: Stage, entered: Iterable[EntryRecord]) -> list[str]:
    times = Counter(map(str, entered))
    entries = ", ".join(
        key if count == 1 else f"{key} {count} times" for key, count in times.items()
    )
    passed = {key: _written(value) for key, value in stage.arguments.items()}
    body: dict[str, Any] = {"op": stage.op, "uses": list(stage.uses)}
    if stage.options:
        body["options"] = list(stage.options)
    lines = [f"  # enters {entries}", f"  {stage.name}:"]
    return lines + [_entry(4, key, value) for key, value in {**body, "with": passed}.items()]


def _written(value: Any) -> Any:
    """An argument as the file writes it, with references by their names."""
    if isinstance(value, list):
        return [_written(item) for item in value]
    return str(value) if isinstance(value, Reference) else value


def _entry(indent: int, key: str, value: Any) -> str:
    """``key: value`` in one line where it fits in `WIDTH`, else one line for each entry of a
    mapping."""
    space = " " * indent
    line = f"{space}{key}: {_flow(value)}"
    if len(line) <= WIDTH or not isinstance(value, Mapping):
        return line
    return "\n".join(
        [f"{space}{key}:", *(_entry(indent + 2, inner, item) for inner, item in value.items())]
    )


def _flow(value: Any) -> str:
    text = yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, width=10**9, allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...")
