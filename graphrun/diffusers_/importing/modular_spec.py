"""Description of modular pipelines: class of their blocks, workflow, source of each component.

A graph file can name blocks of a class with the class's own settings, or a workflow of such blocks.
This module runs no block.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from graphrun.diffusers_.importing.found import PipelineDescription, path_of, plain_config
from graphrun.errors import InputError
from graphrun.graph.values import did_you_mean
from graphrun.modules.classes import resolve_class
from graphrun.ops.modular import BLOCKS, is_modular_class, silence_diffusers

WORKFLOW = "workflow"
# attributes of a block instance that are not settings
NON_SETTINGS = frozenset(
    {"sub_blocks", "block_classes", "block_names", "_internal_dict", "_progress_bar_config"}
)


def blocks_of(blocks: Any, kind: type[Any], origin: str) -> tuple[dict[str, Any], str]:
    """Return (settings, workflow) that identify ``blocks`` in a graph file.

    ``kind``: the pipeline's class. Raises InputError for blocks assembled or changed by code, and
    for code that came with a checkpoint.
    """
    if type(blocks).__module__.startswith("diffusers_modules"):
        raise InputError(f"{origin}: {own_code(type(blocks).__name__)}")
    default_blocks = _default_blocks(kind)
    if default_blocks is not None:
        if _same_blocks(default_blocks, blocks):
            return {}, ""
        for workflow in default_blocks._workflow_map or {}:
            if _same_blocks(default_blocks.get_workflow(workflow), blocks):
                return {}, workflow
    if (
        type(blocks).__module__.split(".")[0] != "diffusers"
        or default_blocks is None
        or type(blocks) is not type(default_blocks)
    ):
        path = path_of(type(blocks))
        with suppress(TypeError):
            if _same_blocks(type(blocks)(), blocks):
                return {BLOCKS: path}, ""
    raise InputError(
        f"{origin}: its blocks ({', '.join(blocks.sub_blocks)}) were put together or changed by "
        "code, and a graph file names a "
        f"class: write one (class MyBlocks({type(blocks).__name__}) with block_classes and "
        "block_names) in a module that can be "
        "imported, and make the pipeline of it; or attach to it: graphrun.attach(pipe, vram=...)"
    )


def own_code(name: str) -> str:
    """Return the error text for blocks ``name`` that came with a checkpoint."""
    return (
        f"{name} is code that came with a checkpoint, and such code is never run by a graph: "
        "install it as a package, and make the "
        "pipeline of its class; or attach to it: graphrun.attach(pipe, vram=...)"
    )


def _default_blocks(kind: type[Any]) -> Any:
    name = getattr(kind, "default_blocks_name", None)
    return resolve_class(f"diffusers.{name}", (), "", "blocks")() if name else None


def _same_blocks(blocks: Any, other_blocks: Any) -> bool:
    """Return whether two blocks have the same class, settings and named inner blocks."""
    if type(blocks) is not type(other_blocks) or list(blocks.sub_blocks) != list(
        other_blocks.sub_blocks
    ):
        return False
    attributes, other_attributes = (
        vars(blocks),
        vars(other_blocks),
    )  # attributes of one side only were set during use
    if any(
        _comparable(attributes[name]) != _comparable(other_attributes[name])
        for name in (attributes.keys() & other_attributes.keys()) - NON_SETTINGS
    ):
        return False
    return all(
        _same_blocks(blocks.sub_blocks[name], other_blocks.sub_blocks[name])
        for name in blocks.sub_blocks
    )


def _comparable(value: Any) -> Any:
    """Return ``value`` in a comparable form: parameter objects by name alone, since blocks change
    their other fields."""
    if isinstance(value, (list, tuple)):
        return [_comparable(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _comparable(item) for key, item in value.items()}
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return value if is_plain else (type(value).__name__, getattr(value, "name", ""))


def add_default(description: PipelineDescription, pipeline: Any, name: str) -> None:
    """Add the part ``name`` that the blocks of ``pipeline`` create, such as a guider or processor.
    A part without a configuration cannot be in a graph file and is omitted."""
    part = getattr(pipeline, name)
    if hasattr(part, "config"):
        description.add(name, path_of(type(part)), plain_config(part.config))


def pipeline_of(kind: type[Any], blocks: str | None = None) -> Any:
    """Return a modular pipeline of class ``kind`` without components. ``blocks``: class path of its
    blocks; None: the default of ``kind``. Raises InputError if there is no default."""
    if blocks is None and _default_blocks(kind) is None:
        raise InputError(
            f"{kind.__name__} has no blocks of its own: name a class such as "
            "diffusers.FluxModularPipeline"
        )
    with silence_diffusers():
        return kind(blocks=resolve_class(blocks, (), "", "blocks")() if blocks else None)


def components_used_by(blocks: Any, workflow: str) -> set[str]:
    """Return the component names of ``workflow``, or of the first workflow of ``blocks``."""
    workflows = blocks._workflow_map or {}
    selection = workflow if workflow in workflows else next(iter(workflows), None)
    return set((blocks.get_workflow(selection) if selection else blocks).component_names)


def fresh_configs(pipe: Any) -> dict[str, Any]:
    """Return the default values of the plain settings of the blocks of ``pipe``."""
    return {spec.name: spec.default for spec in pipe._blocks.expected_configs}


def source_of(spec: Any) -> str | None:
    """Return the folder or hub path of the component with this specification, or None."""
    path = spec.pretrained_model_name_or_path
    if not path:
        return None
    location = (
        f"{path}@{spec.revision.replace('/', '%2F')}"
        if spec.revision and not Path(path).is_dir()
        else str(path)
    )
    base = str(Path(path).resolve()) if Path(path).is_dir() else location
    return f"{base}/{spec.subfolder}" if spec.subfolder else base


def set_settings(
    description: PipelineDescription, input_defaults: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Set the workflow and settings of a modular pipeline; return the other ``input_defaults``.

    Raises InputError for an unknown workflow.
    """
    if not is_modular_class(description.kind):
        return input_defaults
    blocks_path = description.settings.get(BLOCKS)
    blocks = (
        resolve_class(blocks_path, description.trust, description.origin, "blocks")()
        if blocks_path
        else _default_blocks(description.kind)
    )
    if blocks is None:
        return input_defaults
    defaults = {spec.name: spec.default for spec in blocks.expected_configs}
    settings = {name: value for name, value in input_defaults.items() if name in defaults}
    for name, value in settings.items():
        description.settings.pop(name, None)
        if value != defaults[name]:
            description.settings[name] = value
    input_defaults = {k: v for k, v in input_defaults.items() if k not in settings}
    if WORKFLOW not in input_defaults:
        return input_defaults
    workflows, workflow = blocks._workflow_map or {}, input_defaults[WORKFLOW]
    if workflow not in workflows:
        raise InputError(
            f"workflow {workflow}: {type(blocks).__name__} has no such "
            f"workflow{did_you_mean(str(workflow), workflows)}"
        )
    description.workflow = workflow
    return {name: value for name, value in input_defaults.items() if name != WORKFLOW}
