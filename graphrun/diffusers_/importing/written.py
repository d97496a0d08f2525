"""The text of a graph file from a pipeline spec and its stages, and the files that belong beside it.

Decides comments, order, and which configurations are inline and which in files of their own. Writes nothing to disk.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from graphrun.diffusers_.importing.fingerprint import EntryRecord
from graphrun.diffusers_.importing.layout import Layout
from graphrun.diffusers_.importing.spec import OF_CONFIG, OF_FILES, MemberSpec, PipelineSpec
from graphrun.diffusers_.importing.standin import stand_in_words
from graphrun.graph.graph import DEFAULT_ALLOW, Reference, Stage

WIDTH = 128  # characters in a line
SHORT = 90  # characters of JSON up to which a configuration is inline
COUNTS = {2: "Two", 3: "Three", 4: "Four", 5: "Five"}
STAND_IN = "tokenizers/bytes.json"


@dataclass(frozen=True, slots=True)
class Document:
    """The YAML ``text`` and the ``files`` beside it: relative path -> text, or a function that fills a folder at a path."""

    text: str
    files: Mapping[str, str | Callable[[Path], Any]]


def document_of(spec: PipelineSpec, layout: Layout, name: str) -> Document:
    """The graph file of the graph ``name``."""
    files: dict[str, str | Callable[[Path], Any]] = {}
    lines = [
        *_head(spec, layout),
        "graphrun: 1",
        f"name: {_flow(name)}",
        f"pipeline: {spec.pipeline}",
    ]
    if spec.settings:
        lines.append(f"pipeline_config: {_flow(dict(spec.settings))}")
    if spec.source is not None:
        lines.append(f"source: {_flow(spec.source)}")
    if spec.revision is not None:
        lines.append(f"revision: {_flow(spec.revision)}")
    if spec.trust:
        lines.append(f"allow: {_flow([*DEFAULT_ALLOW, *spec.trust])}")
    lines += ["", "inputs:", *(_entry(2, key, value) for key, value in layout.inputs.items())]
    order = list(dict.fromkeys(each.component for entries in layout.entered.values() for each in entries))
    components = sorted(spec.components.values(), key=lambda t: order.index(t.name) if t.name in order else len(order))
    lines += ["", "components:", *(line for t in components for line in _component(t, name, files))]
    if parts := [member for member in spec.members if not member.is_component]:
        lines += ["", "parts:"]
        if any(member.stand_in for member in parts):
            lines.append(
                "  # The file stands in for vocabularies that are not here: sizes come from the longest text there may be."
            )
        lines += [line for t in parts for line in _part(t, name, files, spec)]
    lines += ["", "stages:", *(line for stage in layout.stages for line in _stage(stage, layout.entered[stage.name]))]
    lines += ["", f"outputs: {_flow(dict(layout.outputs))}", ""]
    return Document("\n".join(lines), files)


def _head(spec: PipelineSpec, layout: Layout) -> list[str]:
    kind = spec.kind.__name__
    lines = [f"# Imported from {spec.origin}. Sizes are those of the configurations here; weights are read when it runs."]
    if spec.source is None and not any(member.source for member in spec.components.values()):
        lines = [
            f"# Imported from {spec.origin}. Without a source: weights are random; add the folder or repository that has them."
        ]
    lines += [f"# {note}" for note in spec.notes]
    if layout.why:
        lines.append(f"# The call of {kind} is one stage: {layout.why}.")
    else:
        several = COUNTS.get(len(layout.stages), str(len(layout.stages)))
        lines.append(f"# {several} stages that enter every component with the same values as {kind} does in one call.")
    if layout.unused:
        lines.append(f"# No stage enters {', '.join(layout.unused)} for these inputs.")
    return lines


def _component(member: MemberSpec, name: str, files: dict[str, Any]) -> list[str]:
    entry: dict[str, Any] = {"class": member.class_path, "config": _config(member, name, files), "dtype": member.dtype}
    if member.source is not None:
        entry["source"] = member.source
    entry |= member.extra
    if member.gguf is not None:
        entry["gguf"] = member.gguf
    note = "" if member.dtype_reason in (OF_FILES, OF_CONFIG) else f"  # {member.dtype_reason}"
    return [_entry(2, member.name, entry) + note]


def _part(member: MemberSpec, name: str, files: dict[str, Any], spec: PipelineSpec) -> list[str]:
    entry: dict[str, Any] = {"class": member.class_path}
    if member.stand_in:
        files[STAND_IN] = stand_in_words() + "\n"
        entry |= {"file": STAND_IN, "config": dict(member.config or {})}
        return [_entry(2, member.name, entry)]
    if member.config is not None:
        entry["config"] = _config(member, name, files)
    elif member.source is not None:
        entry["source"] = member.source
    elif spec.source is None:
        folder = f"tokenizers/{name}-{member.name}"
        files[folder] = member.live.save_pretrained
        entry["source"] = f"./{folder}"
    return [_entry(2, member.name, entry)]


def _config(member: MemberSpec, name: str, files: dict[str, Any]) -> Any:
    """The configuration itself where it is short, else the path of the file that holds it."""
    config = dict(member.config or {})
    if len(json.dumps(config)) <= SHORT:
        return config
    path = f"configs/{name}-{member.name}.json"
    files[path] = json.dumps(config, indent=2) + "\n"
    return path


def _stage(stage: Stage, entered: Iterable[EntryRecord]) -> list[str]:
    times = Counter(map(str, entered))
    entries = ", ".join(key if count == 1 else f"{key} {count} times" for key, count in times.items())
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
    """``key: value`` in one line where it fits in `WIDTH`, else one line for each entry of a mapping."""
    space = " " * indent
    line = f"{space}{key}: {_flow(value)}"
    if len(line) <= WIDTH or not isinstance(value, Mapping):
        return line
    return "\n".join([f"{space}{key}:", *(_entry(indent + 2, inner, item) for inner, item in value.items())])


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**9, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
