"""The text of an imported graph file, and the files next to it. Nothing is written to disk here.
This module decides comments, order, and which configurations are inline or in their own files."""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from graphrun.diffusers_.importing.fingerprint import ComponentCall
from graphrun.diffusers_.importing.found import OF_CONFIG, OF_FILES, PipelineDescription
from graphrun.diffusers_.importing.layout import GraphLayout
from graphrun.diffusers_.importing.standin import stand_in_words
from graphrun.graph.graph import DEFAULT_ALLOW
from graphrun.graph.parts import Component, Part, Reference, Stage
from graphrun.modules.texts import restored_limits

WIDTH = 128  # characters in a line
SHORT = 90  # characters of JSON up to which a configuration is inline
COUNTS = {2: "Two", 3: "Three", 4: "Four", 5: "Five"}


@dataclass(frozen=True, slots=True)
class GraphDocument:
    """The YAML ``text`` of a graph file, and the ``files`` next to it: by relative path, the text,
    or a function that fills a folder at a given path."""

    text: str
    files: Mapping[str, str | Callable[[Path], Any]]


def document_of(
    description: PipelineDescription, layout: GraphLayout, name: str, folder: Path | None = None
) -> GraphDocument:
    """Return the graph file of graph ``name``, with sources relative to ``folder`` if given."""
    files: dict[str, str | Callable[[Path], Any]] = {}
    lines = [
        *_head(description, layout),
        "graphrun: 1",
        f"name: {_flow(name)}",
        f"pipeline: {description.pipeline}",
    ]
    if description.settings:
        lines.append(f"pipeline_config: {_flow(description.settings)}")
    if description.source is not None:
        lines.append(f"source: {_flow(_relative_source(description.source, folder))}")
    if description.revision is not None:
        lines.append(f"revision: {_flow(description.revision)}")
    if description.trust:
        lines.append(f"allow: {_flow([*DEFAULT_ALLOW, *description.trust])}")
    lines += ["", "inputs:", *(_entry(2, key, value) for key, value in layout.inputs.items())]
    order = list(
        dict.fromkeys(
            component_call.component
            for entries in layout.component_calls.values()
            for component_call in entries
        )
    )
    components = sorted(
        description.components.values(),
        key=lambda component: (
            order.index(component.name) if component.name in order else len(order)
        ),
    )
    lines += ["", "components:"]
    for component in components:
        entry = _component(component, name, files, folder)
        reason = description.reasons[component.name]
        lines.append(
            _entry(2, component.name, entry)
            + ("" if reason in (OF_FILES, OF_CONFIG) else f"  # {reason}")
        )
    if description.parts:
        lines += ["", "parts:"]
        if any(part.file for part in description.parts.values()):
            lines.append(
                "  # The file stands in for vocabularies that are not here: sizes come from the "
                "longest text there may be."
            )
        lines += [
            _entry(2, part.name, _part(description, part, name, files, folder))
            for part in description.parts.values()
        ]
    lines += [
        "",
        "stages:",
        *(
            line
            for stage in layout.stages
            for line in _stage(stage, layout.component_calls[stage.name])
        ),
    ]
    lines += ["", f"outputs: {_flow(dict(layout.outputs))}", ""]
    return GraphDocument("\n".join(lines), files)


def _head(description: PipelineDescription, layout: GraphLayout) -> list[str]:
    kind = description.kind.__name__
    sizes = "Sizes are those of the configurations here; weights are read when it runs."
    if description.source is None and not any(
        component.source for component in description.components.values()
    ):
        sizes = "Without a source: weights are random; add the folder or repository that has them."
    lines = [
        f"# Imported from {description.origin}. {sizes}",
        *(f"# {note}" for note in description.notes),
    ]
    if layout.reason:
        lines.append(f"# The call of {kind} is one stage: {layout.reason}.")
    else:
        count_text = COUNTS.get(len(layout.stages), str(len(layout.stages)))
        lines.append(
            f"# {count_text} stages that enter every component with the same values as {kind} "
            "does in one call."
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
        entry["source"] = _relative_source(component.source, folder)
    if not component.keep_fp32:
        entry["keep_fp32"] = False
    if component.precision:
        entry["precision"] = list(component.precision)
    if component.variant:
        entry["variant"] = component.variant
    if component.gguf:
        entry["gguf"] = _relative_source(component.gguf, folder)
    return entry


def _part(
    description: PipelineDescription,
    part: Part,
    name: str,
    files: dict[str, Any],
    folder: Path | None,
) -> dict[str, Any]:
    entry: dict[str, Any] = {"class": part.class_path}
    if part.file is not None:
        files[str(part.file)] = stand_in_words() + "\n"
        return entry | {"file": str(part.file), "config": part.config}
    if part.has_config:
        entry["config"] = _config(part, name, files)
    elif part.source is not None:
        entry["source"] = _relative_source(part.source, folder)
    elif description.source is None:
        folder_path = f"tokenizers/{name}-{part.name}"
        files[folder_path] = functools.partial(_save, description.live[part.name])
        entry["source"] = f"./{folder_path}"
    return entry


def _save(live: Any, folder: Path) -> None:
    """Save a tokenizer or processor without the limits of its last call."""
    with restored_limits([live], lifted=True):
        live.save_pretrained(folder)


def _config(member: Component | Part, name: str, files: dict[str, Any]) -> Any:
    """Return the configuration if it is short, else the path of a new file with it."""
    if len(json.dumps(member.config)) <= SHORT:
        return member.config
    path = f"configs/{name}-{member.name}.json"
    files[path] = json.dumps(member.config, indent=2) + "\n"
    return path


def _relative_source(source: str, folder: Path | None) -> str:
    """Return ``source`` relative to ``folder`` if that needs at most one ``..``, else unchanged."""
    if folder is None or not Path(source).is_absolute():
        return source
    relative = os.path.relpath(source, folder.resolve())
    if relative.count("..") > 1:
        return source
    return relative if relative.startswith(".") else f"./{relative}"


def _stage(stage: Stage, component_calls: Iterable[ComponentCall]) -> list[str]:
    times = Counter(map(str, component_calls))
    calls_text = ", ".join(
        key if count == 1 else f"{key} {count} times" for key, count in times.items()
    )
    arguments = {key: _argument_value(value) for key, value in stage.arguments.items()}
    body: dict[str, Any] = {"op": stage.op, "uses": list(stage.uses)}
    if stage.options:
        body["options"] = list(stage.options)
    lines = [f"  # enters {calls_text}", f"  {stage.name}:"]
    return lines + [_entry(4, key, value) for key, value in {**body, "with": arguments}.items()]


def _argument_value(value: Any) -> Any:
    """Return an argument as it stands in the file, with references as text."""
    if isinstance(value, list):
        return [_argument_value(item) for item in value]
    return str(value) if isinstance(value, Reference) else value


def _entry(indent: int, key: str, value: Any) -> str:
    """Return ``key: value`` in one line of `WIDTH`, or a line per entry of a mapping."""
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
