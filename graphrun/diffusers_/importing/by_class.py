"""Pipelines from their class and configuration files, without weights: sizes only.

A constructor argument has the class that the user names, by default the class in its configuration
or annotation. Weights are random.
"""

from __future__ import annotations

import enum
import inspect
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from graphrun.diffusers_.importing.found import (
    PipelineDescription,
    dtype_of,
    name_of,
    path_of,
    plain_settings,
)
from graphrun.diffusers_.importing.modular_spec import add_default, components_used_by, pipeline_of
from graphrun.diffusers_.importing.standin import MARKS, STAND_IN
from graphrun.errors import InputError
from graphrun.graph.document import read_json
from graphrun.graph.graph import DEFAULT_ALLOW
from graphrun.graph.values import did_you_mean
from graphrun.modules.classes import resolve_class
from graphrun.ops.modular import is_modular_class

# maximum length of CLIP's tokenizers; other tokenizers get the length in `MARKS`
CLIP_LENGTH = 77
USUAL_SCHEDULER = "EulerDiscreteScheduler"


@dataclass(frozen=True, slots=True)
class _Argument:
    """An argument of a pipeline. ``classes``: its possible classes; empty for a plain value.
    ``has_default``: the pipeline can create it."""

    classes: list[type[Any]]
    is_needed: bool
    has_default: bool = False


def of_class(
    class_path: str,
    configs: Mapping[str, str],
    excluded_names: Collection[str] = (),
    workflow: str = "",
    trust: tuple[str, ...] = (),
) -> PipelineDescription:
    """Return the description of the pipeline class ``class_path``.

    ``configs``: by constructor argument, ``FILE``, ``CLASS:FILE``, a folder (for a tokenizer), or a
    plain value. ``excluded_names``: members to omit. A modular pipeline needs only the members that
    ``workflow`` uses. Raises InputError if the class is not a pipeline, an argument is unknown, or
    a component has no configuration.
    """
    from diffusers import DiffusionPipeline

    kind = resolve_class(class_path, trust)
    description = PipelineDescription(class_path, class_path, name_of(kind), trust=trust)
    is_modular = is_modular_class(kind)
    if not is_modular and not issubclass(kind, DiffusionPipeline):
        raise InputError(f"{class_path} is no pipeline: give one such as diffusers.FluxPipeline")
    pipeline: Any = pipeline_of(kind) if is_modular else None
    members = (
        _of_blocks(pipeline, workflow)
        if is_modular
        else _of_constructor(kind, (*DEFAULT_ALLOW, *trust))
    )
    values = pipeline._config_specs if is_modular else {}
    if unknown := sorted({*configs, *excluded_names} - {*members, *values}):
        raise InputError(
            f"{unknown[0]}: {class_path} takes no such "
            f"argument{did_you_mean(unknown[0], [*members, *values])}"
        )
    plain_values = {name: _value(text) for name, text in configs.items() if name in values}
    absent, hints = list(excluded_names), list[str]()
    for name, argument in members.items():
        text, classes = configs.get(name), argument.classes
        if name in excluded_names:
            continue
        if (
            text is not None
            and not is_modular
            and not classes
            and not Path(text.rpartition(":")[2]).exists()
        ):
            plain_values[name] = _value(text)
        elif text is not None:
            _add_configured(description, name, text, classes)
        elif argument.has_default:
            add_default(description, pipeline, name)
        elif not argument.is_needed:
            absent.append(name)
        elif not (classes and _add_default(description, name, classes[0])):
            hints.append(
                f"--config {name}=FILE ({classes[0].__name__})"
                if classes
                else f"--config {name}=CLASS:FILE"
            )
    if hints:
        raise InputError(
            f"{class_path} needs configurations of its components: add {', '.join(hints)}"
        )
    if is_modular:
        description.settings = {
            name: value for name, value in plain_values.items() if value != values[name].default
        }
    else:
        description.settings = plain_settings(kind, plain_values, absent)
    return description


def _of_constructor(kind: type[Any], packages: Collection[str]) -> dict[str, _Argument]:
    arguments, optional_names, hints = (
        dict[str, _Argument](),
        getattr(kind, "_optional_components", ()),
        _hints(kind),
    )
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        if name not in ("self", "args", "kwargs"):
            classes = list(_classes(hints.get(name, parameter.annotation), packages))
            required = parameter.default is parameter.empty and name not in optional_names
            arguments[name] = _Argument(classes, required and bool(classes))
    return arguments


def _of_blocks(pipeline: Any, workflow: str) -> dict[str, _Argument]:
    component_names, specs = (
        components_used_by(pipeline._blocks, workflow),
        pipeline._component_specs,
    )
    return {
        name: _Argument(
            [spec.type_hint] if spec.type_hint is not None else [],
            name in component_names,
            getattr(pipeline, name) is not None,
        )
        for name, spec in specs.items()
    }


def _hints(kind: type[Any]) -> Mapping[str, Any]:
    try:
        return typing.get_type_hints(kind.__init__)
    except (NameError, TypeError, AttributeError, ImportError):
        return {}


def _classes(hint: Any, packages: Collection[str]) -> Iterator[type[Any]]:
    """Yield the classes of ``packages`` in an annotation, or the members of a scheduler enum."""
    if isinstance(hint, enum.EnumMeta):
        for member in sorted(hint.__members__, key=lambda name: name != USUAL_SCHEDULER):
            yield resolve_class(f"diffusers.{member}")
    elif isinstance(hint, type) and hint.__module__.split(".")[0] in packages:
        yield hint
    elif typing.get_origin(hint) in (typing.Union, types.UnionType):
        for item in typing.get_args(hint):
            yield from _classes(item, packages)


def _add_configured(
    description: PipelineDescription, name: str, text: str, classes: list[type[Any]]
) -> None:
    """Add the component or part that ``--config NAME=TEXT`` describes. Raises InputError."""
    class_text, colon, file = text.rpartition(":")
    path = Path(file).expanduser()
    option = f"--config {name}"
    if path.is_dir():
        config_file = next(
            (
                path / file_name
                for file_name in ("config.json", "scheduler_config.json")
                if (path / file_name).is_file()
            ),
            None,
        )
    else:
        config_file = path
        if not path.is_file():
            raise InputError(f"{option}: there is no file {path}")
    config = read_json(config_file, infinite=True) if config_file is not None else None
    class_path = class_text if colon else _class_path_in(config or {}, classes)
    if not class_path:
        class_names = ", ".join(map(path_of, classes)) or "a class"
        raise InputError(
            f"{option}: which class is it? write --config {name}=CLASS:{file} with {class_names}"
        )
    kind = resolve_class(class_path, description.trust, option)
    if config is None and issubclass(kind, nn.Module):
        raise InputError(f"{option}: {path} has no config.json")
    source = str(path.resolve()) if config is None else None
    tokenizer_file = STAND_IN if config is not None and _is_tokenizer(kind) else None
    description.add(
        name, class_path, config, dtype_of(config or {}, ()), source=source, file=tokenizer_file
    )


def _class_path_in(config: Mapping[str, Any], classes: list[type[Any]]) -> str:
    """Return the class path of a configuration; "" if there is none. Sources: diffusers' class name
    in it, the pipeline's annotation, transformers' ``architectures``."""
    class_name = config.get("_class_name")
    if isinstance(class_name, str):
        return f"diffusers.{class_name}"
    architectures = config.get("architectures") or [None]
    if len(classes) > 1 and (
        matches := [kind for kind in classes if kind.__name__ == architectures[0]]
    ):
        return path_of(matches[0])
    if classes:
        return path_of(classes[0])
    return f"transformers.{architectures[0]}" if isinstance(architectures[0], str) else ""


def _add_default(description: PipelineDescription, name: str, kind: type[Any]) -> bool:
    """Add a stand-in tokenizer, or a scheduler or processor with its defaults. Return False for a
    component, whose sizes are unknown."""
    if issubclass(kind, nn.Module):
        return False
    path = path_of(kind)
    if _is_tokenizer(kind):
        length = CLIP_LENGTH if "CLIP" in kind.__name__ else MARKS["model_max_length"]
        path = path.replace("AutoTokenizer", "PreTrainedTokenizerFast")
        description.add(name, path, {**MARKS, "model_max_length": length}, file=STAND_IN)
    else:
        description.add(name, path, {})
    return True


def _is_tokenizer(kind: type[Any]) -> bool:
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    return issubclass(kind, (PreTrainedTokenizerBase, AutoTokenizer))


def _value(text: str) -> Any:
    """Parse a plain constructor argument as YAML. Raises InputError."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{text!r} cannot be read: {error}") from error
