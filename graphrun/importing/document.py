"""A recipe and its layout as the text of a graph file, with the files that belong beside it.

Decides what a person reads: comments, order, what stands in a line and what in a file of its own. Writes nothing to disk.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from graphrun.graph.graph import DEFAULT_ALLOW, Reference, Stage
from graphrun.importing.echo import Entered
from graphrun.importing.layout import Layout
from graphrun.importing.recipe import OF_CONFIG, OF_FILES, Recipe, Thing
from graphrun.importing.standin import stand_in_words

WIDTH = 128  # of a line
SHORT = 90  # characters of a configuration that stands in the line
COUNTS = {2: "Two", 3: "Three", 4: "Four", 5: "Five"}
STAND_IN = "tokenizers/bytes.json"


@dataclass(frozen=True, slots=True)
class Document:
    """The YAML, and by path relative to it what else is written: a text, or a function that fills a folder."""

    text: str
    files: Mapping[str, str | Callable[[Path], Any]]


def document_of(recipe: Recipe, layout: Layout, name: str) -> Document:
    """The graph file called ``name``."""
    files: dict[str, str | Callable[[Path], Any]] = {}
    lines = [
        *_head(recipe, layout),
        "graphrun: 1",
        f"name: {_flow(name)}",
        f"pipeline: {recipe.pipeline}",
    ]
    if recipe.settings:
        lines.append(f"pipeline_config: {_flow(dict(recipe.settings))}")
    if recipe.source is not None:
        lines.append(f"source: {_flow(recipe.source)}")
    if recipe.revision is not None:
        lines.append(f"revision: {_flow(recipe.revision)}")
    if recipe.trust:
        lines.append(f"allow: {_flow([*DEFAULT_ALLOW, *recipe.trust])}")
    lines += ["", "inputs:", *(_entry(2, key, value) for key, value in layout.inputs.items())]
    order = list(dict.fromkeys(each.component for entries in layout.entered.values() for each in entries))
    components = sorted(recipe.components.values(), key=lambda t: order.index(t.name) if t.name in order else len(order))
    lines += ["", "components:", *(line for t in components for line in _component(t, name, files))]
    if parts := [thing for thing in recipe.things if not thing.is_component]:
        lines += ["", "parts:"]
        if any(thing.stand_in for thing in parts):
            lines.append("  # The file stands in for vocabularies, which are not here: texts are as long as they may be.")
        lines += [line for t in parts for line in _part(t, name, files, recipe)]
    lines += ["", "stages:", *(line for stage in layout.stages for line in _stage(stage, layout.entered[stage.name]))]
    lines += ["", f"outputs: {_flow(dict(layout.outputs))}", ""]
    return Document("\n".join(lines), files)


def _head(recipe: Recipe, layout: Layout) -> list[str]:
    kind = recipe.kind.__name__
    lines = [f"# Imported from {recipe.origin}. Sizes are those of the configurations here; weights are read when it runs."]
    if recipe.source is None and not any(thing.source for thing in recipe.components.values()):
        lines = [
            f"# Imported from {recipe.origin}. Without a source: weights are random; add the folder or repository that has them."
        ]
    lines += [f"# {note}" for note in recipe.notes]
    if layout.why:
        lines.append(f"# {kind} runs whole, in one stage: {layout.why}.")
    else:
        several = COUNTS.get(len(layout.stages), str(len(layout.stages)))
        lines.append(f"# {several} stages that enter every component with the same numbers as {kind} does in one call.")
    if layout.unused:
        lines.append(f"# Nothing enters {', '.join(layout.unused)} for these inputs.")
    return lines


def _component(thing: Thing, name: str, files: dict[str, Any]) -> list[str]:
    entry: dict[str, Any] = {"class": thing.class_path, "config": _config(thing, name, files), "dtype": thing.dtype}
    if thing.source is not None:
        entry["source"] = thing.source
    entry |= thing.more
    if thing.gguf is not None:
        entry["gguf"] = thing.gguf
    note = "" if thing.why in (OF_FILES, OF_CONFIG) else f"  # {thing.why}"
    return [_entry(2, thing.name, entry) + note]


def _part(thing: Thing, name: str, files: dict[str, Any], recipe: Recipe) -> list[str]:
    entry: dict[str, Any] = {"class": thing.class_path}
    if thing.stand_in:
        files[STAND_IN] = stand_in_words() + "\n"
        entry |= {"file": STAND_IN, "config": dict(thing.config or {})}
        return [_entry(2, thing.name, entry)]
    if thing.config is not None:
        entry["config"] = _config(thing, name, files)
    elif thing.source is not None:
        entry["source"] = thing.source
    elif recipe.source is None:
        folder = f"tokenizers/{name}-{thing.name}"
        files[folder] = thing.live.save_pretrained
        entry["source"] = f"./{folder}"
    return [_entry(2, thing.name, entry)]


def _config(thing: Thing, name: str, files: dict[str, Any]) -> Any:
    """The configuration itself where it is short, else the file that it goes to."""
    config = dict(thing.config or {})
    if len(json.dumps(config)) <= SHORT:
        return config
    path = f"configs/{name}-{thing.name}.json"
    files[path] = json.dumps(config, indent=2) + "\n"
    return path


def _stage(stage: Stage, entered: Iterable[Entered]) -> list[str]:
    times = Counter(map(str, entered))
    heard = ", ".join(key if count == 1 else f"{key} {count} times" for key, count in times.items())
    passed = {key: _said(value) for key, value in stage.arguments.items()}
    body: dict[str, Any] = {"op": stage.op, "uses": list(stage.uses)}
    if stage.options:
        body["options"] = list(stage.options)
    lines = [f"  # enters {heard}", f"  {stage.name}:"]
    return lines + [_entry(4, key, value) for key, value in {**body, "with": passed}.items()]


def _said(value: Any) -> Any:
    """An argument as the file says it: a reference by its name."""
    if isinstance(value, list):
        return [_said(item) for item in value]
    return str(value) if isinstance(value, Reference) else value


def _entry(indent: int, key: str, value: Any) -> str:
    """``key: value`` in one line where it fits, else a line for each of a mapping's entries."""
    space = " " * indent
    line = f"{space}{key}: {_flow(value)}"
    if len(line) <= WIDTH or not isinstance(value, Mapping):
        return line
    return "\n".join([f"{space}{key}:", *(_entry(indent + 2, inner, item) for inner, item in value.items())])


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**9, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
