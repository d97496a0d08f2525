"""What modular pipelines are made of: the class of their blocks, the workflow, and where each
component comes from.

A graph file can name blocks that are of a class with that class's own settings, or a workflow of
such blocks. Runs no block.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from graphrun.diffusers_.importing.found import Found, path_of, plain_config
from graphrun.errors import InputError
from graphrun.graph.values import did_you_mean
from graphrun.modules.classes import resolve_class
from graphrun.ops.modular import BLOCKS, is_modular_class, quietly

WORKFLOW = "workflow"
# Attributes of a block instance that are not settings of its own.
NOT_OWN = frozenset(
    {"sub_blocks", "block_classes", "block_names", "_internal_dict", "_progress_bar_config"}
)


def blocks_of(blocks: Any, kind: type[Any], origin: str) -> tuple[dict[str, Any], str]:
    """(settings, workflow) that identify ``blocks`` in a graph file. ``kind`` is the pipeline's
    class.

    Raises InputError for blocks that were assembled or changed by code, and for code that came with
    a checkpoint.
    """
    if type(blocks).__module__.startswith("diffusers_modules"):
        raise InputError(f"{origin}: {own_code(type(blocks).__name__)}")
    usual = _default_blocks(kind)
    if usual is not None:
        if _same_blocks(usual, blocks):
            return {}, ""
        for workflow in usual._workflow_map or {}:
            if _same_blocks(usual.get_workflow(workflow), blocks):
                return {}, workflow
    if (
        type(blocks).__module__.split(".")[0] != "diffusers"
        or usual is None
        or type(blocks) is not type(usual)
    ):
        path = path_of(type(blocks))
        with suppress(TypeError):
            if _same_blocks(type(blocks)(), blocks):
                return {BLOCKS: path}, ""
    raise InputError(
        f"{origin}: its blocks ({', '.join(blocks.sub_blocks)}) were put together or changed by code, and a graph file names a "
        f"class: write one (class MyBlocks({type(blocks).__name__}) with block_classes and block_names) in a module that can be "
        "imported, and make the pipeline of it; or attach to it: graphrun.attach(pipe, vram=...)"
    )


def own_code(name: str) -> str:
    """The error text for blocks called ``name`` that came with a checkpoint."""
    return (
        f"{name} is code that came with a checkpoint, and such code is never run by a graph: install it as a package, and make the "
        "pipeline of its class; or attach to it: graphrun.attach(pipe, vram=...)"
    )


def _default_blocks(kind: type[Any]) -> Any:
    name = getattr(kind, "default_blocks_name", None)
    return resolve_class(f"diffusers.{name}", (), "", "blocks")() if name else None


def _same_blocks(one: Any, other: Any) -> bool:
    """Whether two blocks are of one class with equal settings and the same inner blocks under the
    same names."""
    if type(one) is not type(other) or list(one.sub_blocks) != list(other.sub_blocks):
        return False
    mine, theirs = vars(one), vars(other)  # an attribute that only one has was set during use
    if any(
        _comparable(mine[name]) != _comparable(theirs[name])
        for name in (mine.keys() & theirs.keys()) - NOT_OWN
    ):
        return False
    return all(
        _same_blocks(one.sub_blocks[name], other.sub_blocks[name]) for name in one.sub_blocks
    )


def _comparable(value: Any) -> Any:
    """``value`` in a comparable form. Of a parameter's declaration only the name counts, since
    blocks change its other fields."""
    if isinstance(value, (list, tuple)):
        return [_comparable(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _comparable(item) for key, item in value.items()}
    plain = value is None or isinstance(value, (bool, int, float, str))
    return value if plain else (type(value).__name__, getattr(value, "name", ""))


def add_default(found: Found, pipeline: Any, name: str) -> None:
    """Adds the guider, processor or other part that the blocks of ``pipeline`` create themselves
    under ``name``, if it has a configuration for the graph file."""
    made = getattr(pipeline, name)
    if hasattr(made, "config"):
        found.add(name, path_of(type(made)), plain_config(made.config))


def pipeline_of(kind: type[Any], blocks: str | None = None) -> Any:
    """A modular pipeline of class ``kind`` without components, with blocks of the class path
    ``blocks`` if given, else its own.

    Raises InputError where ``kind`` has no blocks of its own and ``blocks`` is None.
    """
    if blocks is None and _default_blocks(kind) is None:
        raise InputError(
            f"{kind.__name__} has no blocks of its own: name a class such as diffusers.FluxModularPipeline"
        )
    with quietly():
        return kind(blocks=resolve_class(blocks, (), "", "blocks")() if blocks else None)


def needed_by(blocks: Any, workflow: str) -> set[str]:
    """Names of the components that ``blocks`` use in ``workflow``, else in their first workflow."""
    workflows = blocks._workflow_map or {}
    chosen = workflow if workflow in workflows else next(iter(workflows), None)
    return set((blocks.get_workflow(chosen) if chosen else blocks).component_names)


def fresh_configs(pipe: Any) -> dict[str, Any]:
    """Default values of the plain settings that the blocks of ``pipe`` declare."""
    return {spec.name: spec.default for spec in pipe._blocks.expected_configs}


def loaded_from(spec: Any) -> str | None:
    """The folder or hub path that a component with this specification is loaded from; None where it
    names none."""
    path = spec.pretrained_model_name_or_path
    if not path:
        return None
    at = (
        f"{path}@{spec.revision.replace('/', '%2F')}"
        if spec.revision and not Path(path).is_dir()
        else str(path)
    )
    base = str(Path(path).resolve()) if Path(path).is_dir() else at
    return f"{base}/{spec.subfolder}" if spec.subfolder else base


def set_workflow(found: Found, sets: Mapping[str, Any]) -> Mapping[str, Any]:
    """``sets`` without the ``workflow`` of a modular pipeline, which ``found`` gets. Raises
    InputError for an unknown one."""
    if WORKFLOW not in sets or not is_modular_class(found.kind):
        return sets
    own = found.settings.get(BLOCKS)
    blocks = (
        resolve_class(own, found.trust, found.origin, "blocks")()
        if own
        else _default_blocks(found.kind)
    )
    known, asked = blocks._workflow_map or {}, sets[WORKFLOW]
    if asked not in known:
        raise InputError(
            f"workflow {asked}: {type(blocks).__name__} has no such workflow{did_you_mean(str(asked), known)}"
        )
    found.workflow = asked
    return {name: value for name, value in sets.items() if name != WORKFLOW}
