"""Pipeline specs from a pipeline's class and configuration files: there are sizes only, and weights are random.

The class of each constructor argument is the one that the user names, else the one in its configuration, else its annotation.
"""

from __future__ import annotations

import enum
import inspect
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphrun.diffusers_.importing.modular_spec import default_member, needed_by, pipeline_of
from graphrun.diffusers_.importing.spec import MemberSpec, PipelineSpec, dtype_of, is_module, plain_settings, slug
from graphrun.diffusers_.importing.standin import MARKS
from graphrun.errors import GraphError, InputError
from graphrun.graph.document import read_json
from graphrun.graph.graph import DEFAULT_ALLOW
from graphrun.graph.values import did_you_mean
from graphrun.modules.classes import resolve_class
from graphrun.ops.modular import is_modular_class

# Maximum length of CLIP's tokenizers; others get that of `MARKS`.
CLIP_LENGTH = 77
USUAL_SCHEDULER = "EulerDiscreteScheduler"


def of_class(class_path: str, configs: Mapping[str, str], without: Collection[str] = (), workflow: str = "") -> PipelineSpec:
    """The spec of the pipeline class ``class_path``.

    ``configs``: argument of its constructor -> ``FILE``, ``CLASS:FILE``, a folder (for a tokenizer), or a plain value. A modular
    pipeline needs only what ``workflow`` uses. Raises InputError where the class is not a pipeline, for an unknown argument, and
    for components without a configuration.
    """
    kind = resolve_class(class_path)
    if is_modular_class(kind):
        return _of_blocks(class_path, kind, configs, without, workflow)
    from diffusers import DiffusionPipeline

    if not issubclass(kind, DiffusionPipeline):
        raise InputError(f"{class_path} is no pipeline: give one such as diffusers.FluxPipeline")
    parameters = {n: p for n, p in inspect.signature(kind.__init__).parameters.items() if n not in ("self", "args", "kwargs")}
    if unknown := sorted({*configs, *without} - parameters.keys()):
        raise InputError(f"{unknown[0]}: {class_path} takes no such argument{did_you_mean(unknown[0], parameters)}")
    hints = _hints(kind)
    members: list[MemberSpec] = []
    plain, absent, missing = dict[str, Any](), list(without), list[str]()
    for name, parameter in parameters.items():
        if name in without:
            continue
        classes = list(_classes(hints.get(name, parameter.annotation)))
        text = configs.get(name)
        if text is not None and not classes and not Path(text.rpartition(":")[2]).exists():
            plain[name] = _value(text)
        elif text is not None:
            members.append(_described_member(name, text, classes, class_path))
        elif (optional := _optional(kind, name, parameter)) or not classes:
            absent += [name] if optional or not classes else []
        elif (made := _default_member(name, classes)) is not None:
            members.append(made)
        else:
            missing.append(f"--config {name}=FILE ({classes[0].__name__})")
    if missing:
        raise InputError(f"{class_path} needs configurations of its components: add {', '.join(missing)}")
    return PipelineSpec(
        origin=class_path,
        name=slug(kind.__name__.removesuffix("Pipeline")),
        pipeline=class_path,
        source=None,
        members=tuple(members),
        settings=plain_settings(kind, plain, absent),
    )


def _of_blocks(
    class_path: str, kind: type[Any], configs: Mapping[str, str], without: Collection[str], workflow: str
) -> PipelineSpec:
    """The spec of a modular pipeline's class, with the components that its blocks expect."""
    pipeline = pipeline_of(kind)
    specs, plain = pipeline._component_specs, pipeline._config_specs
    if unknown := sorted({*configs, *without} - {*specs, *plain}):
        raise InputError(f"{unknown[0]}: {class_path} takes no such argument{did_you_mean(unknown[0], [*specs, *plain])}")
    needed, members, missing = needed_by(pipeline._blocks, workflow), list[MemberSpec](), list[str]()
    for name, spec in specs.items():
        classes = [spec.type_hint] if spec.type_hint is not None else []
        if name in without:
            continue
        if name in configs:
            members.append(_described_member(name, configs[name], classes, class_path))
        elif getattr(pipeline, name) is not None:
            members += default_member(pipeline, name)
        elif name in needed and (made := _default_member(name, classes) if classes else None) is not None:
            members.append(made)
        elif name in needed:
            missing.append(f"--config {name}=FILE ({classes[0].__name__})" if classes else f"--config {name}=CLASS:FILE")
    if missing:
        raise InputError(f"{class_path} needs configurations of its components: add {', '.join(missing)}")
    settings = {name: value for name in plain if name in configs and (value := _value(configs[name])) != plain[name].default}
    name = slug(kind.__name__.removesuffix("ModularPipeline"))
    return PipelineSpec(origin=class_path, name=name, pipeline=class_path, source=None, members=tuple(members), settings=settings)


def _optional(kind: type[Any], name: str, parameter: inspect.Parameter) -> bool:
    return parameter.default is not parameter.empty or name in getattr(kind, "_optional_components", ())


def _hints(kind: type[Any]) -> Mapping[str, Any]:
    try:
        return typing.get_type_hints(kind.__init__)
    except (NameError, TypeError, AttributeError, ImportError):
        return {}


def _classes(hint: Any) -> Iterator[type[Any]]:
    """The classes of allowed libraries in an annotation; for an enumeration of schedulers, its members."""
    if isinstance(hint, enum.EnumMeta):
        for member in sorted(hint.__members__, key=lambda name: name != USUAL_SCHEDULER):
            yield resolve_class(f"diffusers.{member}")
    elif isinstance(hint, type) and hint.__module__.split(".")[0] in DEFAULT_ALLOW:
        yield hint
    elif typing.get_origin(hint) in (typing.Union, types.UnionType):
        for item in typing.get_args(hint):
            yield from _classes(item)


def _path_of(kind: type[Any]) -> str:
    """The class path of ``kind``: the short one where its library exports it."""
    library = kind.__module__.split(".")[0]
    short = f"{library}.{kind.__name__}"
    try:
        return short if resolve_class(short) is kind else f"{kind.__module__}.{kind.__qualname__}"
    except GraphError:
        return f"{kind.__module__}.{kind.__qualname__}"


def _described_member(name: str, text: str, classes: list[type[Any]], origin: str) -> MemberSpec:
    """The component or part that ``--config NAME=TEXT`` describes. Raises InputError."""
    asked, colon, file = text.rpartition(":")
    path = Path(file).expanduser()
    where = f"--config {name}"
    if path.is_dir():
        config_file = next((path / found for found in ("config.json", "scheduler_config.json") if (path / found).is_file()), None)
    else:
        config_file = path
        if not path.is_file():
            raise InputError(f"{where}: there is no file {path}")
    config = dict(read_json(config_file)) if config_file is not None else None
    class_path = asked if colon else _class_named(config or {}, classes)
    if not class_path:
        named = ", ".join(_path_of(kind) for kind in classes) or "a class"
        raise InputError(f"{where}: which class is it? write --config {name}=CLASS:{file} with {named}")
    if is_module(class_path, (), where):
        if config is None:
            raise InputError(f"{where}: {path} has no config.json")
        dtype, reason = dtype_of(config, ())
        return MemberSpec(name, class_path, config, dtype=dtype or "unknown", dtype_reason=reason)
    if path.is_dir() and config is None:
        return MemberSpec(name, class_path, None, source=str(path.resolve()))
    made = MemberSpec(name, class_path, config)
    return replace(made, stand_in=True) if _is_tokenizer(resolve_class(class_path)) else made


def _class_named(config: Mapping[str, Any], classes: list[type[Any]]) -> str:
    """The class path that a configuration names (diffusers), that the pipeline's annotation names, or that it was saved from
    (transformers' ``architectures``); empty where none does."""
    own = config.get("_class_name")
    if isinstance(own, str):
        return f"diffusers.{own}"
    saved = config.get("architectures") or [None]
    if len(classes) > 1 and (found := [kind for kind in classes if kind.__name__ == saved[0]]):
        return _path_of(found[0])
    if classes:
        return _path_of(classes[0])
    return f"transformers.{saved[0]}" if isinstance(saved[0], str) else ""


def _default_member(name: str, classes: list[type[Any]]) -> MemberSpec | None:
    """A stand-in for a tokenizer, or a scheduler or processor with its defaults; None for a component, whose sizes are unknown."""
    kind = classes[0]
    path = _path_of(kind)
    if is_module(path, (), name):
        return None
    if _is_tokenizer(kind):
        length = CLIP_LENGTH if "CLIP" in kind.__name__ else MARKS["model_max_length"]
        path = path.replace("AutoTokenizer", "PreTrainedTokenizerFast")
        return MemberSpec(name, path, {**MARKS, "model_max_length": length}, stand_in=True)
    return MemberSpec(name, path, {})


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
