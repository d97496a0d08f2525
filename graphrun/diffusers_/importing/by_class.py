"""Pipelines from their class and configuration files: there are sizes only, and weights are random.

The class of each constructor argument is the one that the user names, else the one in its
configuration, else its annotation.
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

from graphrun.diffusers_.importing.found import Found, dtype_of, name_of, path_of, plain_settings
from graphrun.diffusers_.importing.modular_spec import add_default, needed_by, pipeline_of
from graphrun.diffusers_.importing.standin import MARKS, STAND_IN
from graphrun.errors import InputError
from graphrun.graph.document import read_json
from graphrun.graph.graph import DEFAULT_ALLOW
from graphrun.graph.values import did_you_mean
from graphrun.modules.classes import resolve_class
from graphrun.ops.modular import is_modular_class

# Maximum length of CLIP's tokenizers; others get that of `MARKS`.
CLIP_LENGTH = 77
USUAL_SCHEDULER = "EulerDiscreteScheduler"


@dataclass(frozen=True, slots=True)
class _Argument:
    """An argument of a pipeline: the classes it may be of (none: a plain value), and whether the
    pipeline needs it.

    ``given``: the pipeline creates it itself.
    """

    classes: list[type[Any]]
    needed: bool
    given: bool = False


def of_class(
    class_path: str,
    configs: Mapping[str, str],
    without: Collection[str] = (),
    workflow: str = "",
    trust: tuple[str, ...] = (),
) -> Found:
    """The pipeline class ``class_path``.

    ``configs``: argument of its constructor -> ``FILE``, ``CLASS:FILE``, a folder (for a
    tokenizer), or a plain value. A modular pipeline needs only what ``workflow`` uses. Raises
    InputError where the class is not a pipeline, for an unknown argument, and for components
    without a configuration.
    """
    from diffusers import DiffusionPipeline

    kind = resolve_class(class_path, trust)
    found = Found(class_path, class_path, name_of(kind), trust=trust)
    modular = is_modular_class(kind)
    if not modular and not issubclass(kind, DiffusionPipeline):
        raise InputError(f"{class_path} is no pipeline: give one such as diffusers.FluxPipeline")
    pipeline: Any = pipeline_of(kind) if modular else None
    members = (
        _of_blocks(pipeline, workflow)
        if modular
        else _of_constructor(kind, (*DEFAULT_ALLOW, *trust))
    )
    values = pipeline._config_specs if modular else {}
    if unknown := sorted({*configs, *without} - {*members, *values}):
        raise InputError(
            f"{unknown[0]}: {class_path} takes no such argument{did_you_mean(unknown[0], [*members, *values])}"
        )
    plain = {name: _value(text) for name, text in configs.items() if name in values}
    absent, missing = list(without), list[str]()
    for name, argument in members.items():
        text, classes = configs.get(name), argument.classes
        if name in without:
            continue
        if (
            text is not None
            and not modular
            and not classes
            and not Path(text.rpartition(":")[2]).exists()
        ):
            plain[name] = _value(text)
        elif text is not None:
            _add_described(found, name, text, classes)
        elif argument.given:
            add_default(found, pipeline, name)
        elif not argument.needed:
            absent.append(name)
        elif not (classes and _add_default(found, name, classes[0])):
            missing.append(
                f"--config {name}=FILE ({classes[0].__name__})"
                if classes
                else f"--config {name}=CLASS:FILE"
            )
    if missing:
        raise InputError(
            f"{class_path} needs configurations of its components: add {', '.join(missing)}"
        )
    if modular:
        found.settings = {
            name: value for name, value in plain.items() if value != values[name].default
        }
    else:
        found.settings = plain_settings(kind, plain, absent)
    return found


def _of_constructor(kind: type[Any], packages: Collection[str]) -> dict[str, _Argument]:
    found, optional, hints = (
        dict[str, _Argument](),
        getattr(kind, "_optional_components", ()),
        _hints(kind),
    )
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        if name not in ("self", "args", "kwargs"):
            classes = list(_classes(hints.get(name, parameter.annotation), packages))
            required = parameter.default is parameter.empty and name not in optional
            found[name] = _Argument(classes, required and bool(classes))
    return found


def _of_blocks(pipeline: Any, workflow: str) -> dict[str, _Argument]:
    needed, specs = needed_by(pipeline._blocks, workflow), pipeline._component_specs
    return {
        name: _Argument(
            [spec.type_hint] if spec.type_hint is not None else [],
            name in needed,
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
    """The classes of ``packages`` in an annotation; for an enumeration of schedulers, its
    members."""
    if isinstance(hint, enum.EnumMeta):
        for member in sorted(hint.__members__, key=lambda name: name != USUAL_SCHEDULER):
            yield resolve_class(f"diffusers.{member}")
    elif isinstance(hint, type) and hint.__module__.split(".")[0] in packages:
        yield hint
    elif typing.get_origin(hint) in (typing.Union, types.UnionType):
        for item in typing.get_args(hint):
            yield from _classes(item, packages)


def _add_described(found: Found, name: str, text: str, classes: list[type[Any]]) -> None:
    """Adds the component or part that ``--config NAME=TEXT`` describes. Raises InputError."""
    asked, colon, file = text.rpartition(":")
    path = Path(file).expanduser()
    where = f"--config {name}"
    if path.is_dir():
        config_file = next(
            (
                path / own
                for own in ("config.json", "scheduler_config.json")
                if (path / own).is_file()
            ),
            None,
        )
    else:
        config_file = path
        if not path.is_file():
            raise InputError(f"{where}: there is no file {path}")
    config = read_json(config_file, infinite=True) if config_file is not None else None
    class_path = asked if colon else _class_named(config or {}, classes)
    if not class_path:
        named = ", ".join(map(path_of, classes)) or "a class"
        raise InputError(
            f"{where}: which class is it? write --config {name}=CLASS:{file} with {named}"
        )
    kind = resolve_class(class_path, found.trust, where)
    if config is None and issubclass(kind, nn.Module):
        raise InputError(f"{where}: {path} has no config.json")
    source = str(path.resolve()) if config is None else None
    file_of_it = STAND_IN if config is not None and _is_tokenizer(kind) else None
    found.add(name, class_path, config, dtype_of(config or {}, ()), source=source, file=file_of_it)


def _class_named(config: Mapping[str, Any], classes: list[type[Any]]) -> str:
    """The class path that a configuration names (diffusers), that the pipeline's annotation names,
    or that it was saved from (transformers' ``architectures``); empty where none does."""
    own = config.get("_class_name")
    if isinstance(own, str):
        return f"diffusers.{own}"
    saved = config.get("architectures") or [None]
    if len(classes) > 1 and (found := [kind for kind in classes if kind.__name__ == saved[0]]):
        return path_of(found[0])
    if classes:
        return path_of(classes[0])
    return f"transformers.{saved[0]}" if isinstance(saved[0], str) else ""


def _add_default(found: Found, name: str, kind: type[Any]) -> bool:
    """Adds a stand-in for a tokenizer, or a scheduler or processor with its defaults; not a
    component, whose sizes are unknown."""
    if issubclass(kind, nn.Module):
        return False
    path = path_of(kind)
    if _is_tokenizer(kind):
        length = CLIP_LENGTH if "CLIP" in kind.__name__ else MARKS["model_max_length"]
        path = path.replace("AutoTokenizer", "PreTrainedTokenizerFast")
        found.add(name, path, {**MARKS, "model_max_length": length}, file=STAND_IN)
    else:
        found.add(name, path, {})
    return True


def _is_tokenizer(kind: type[Any]) -> bool:
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    return issubclass(kind, (PreTrainedTokenizerBase, AutoTokenizer))


def _value(text: str) -> Any:
    """A plain constructor argument, parsed as YAML. Raises InputError."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{text!r} cannot be read: {error}") from error
