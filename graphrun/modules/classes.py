"""Resolves a class path in a file to the class, and refuses classes that an untrusted file may not
name.

Without further permission a file may name certain kinds of classes of diffusers and transformers.
Imports only the named package.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any, Literal

from graphrun.errors import GraphError
from graphrun.graph.graph import DEFAULT_ALLOW, Component, Graph, Pipeline
from graphrun.graph.ops import DECLARED
from graphrun.graph.values import did_you_mean, outside, to_trust

Kind = Literal["component", "part", "pipeline", "program", "blocks"]
# The base class that a class of diffusers or transformers must have, by package and name.
# ConfigMixin covers classes that are constructed from their configuration alone: diffusers' image
# processors and pachifiers.
_BASES: dict[str, frozenset[tuple[str, str]]] = {
    "component": frozenset({("torch", "Module")}),
    "part": frozenset(
        {("diffusers", base) for base in ("SchedulerMixin", "BaseGuidance", "ConfigMixin")}
        | {
            ("transformers", base)
            for base in ("PreTrainedTokenizerBase", "ProcessorMixin", "FeatureExtractionMixin")
        }
        | {
            ("transformers", base)
            for base in (
                "ImageProcessingMixin",
                "AutoTokenizer",
                "AutoProcessor",
                "AutoImageProcessor",
            )
        }
        | {("transformers", "AutoFeatureExtractor")}
    ),
    "pipeline": frozenset({("diffusers", "DiffusionPipeline"), ("diffusers", "ModularPipeline")}),
    "program": frozenset(),
    "blocks": frozenset({("diffusers", "ModularPipelineBlocks")}),
}
# What each kind is, and what every class of it has: of a trusted package too, since it is what such
# a class is used by.
_DESCRIPTIONS = {
    "component": ("a module with weights", "is a torch.nn.Module"),
    "part": ("a scheduler, guider, tokenizer or processor", "has from_config or from_pretrained"),
    "pipeline": ("a pipeline", "is a DiffusionPipeline or ModularPipeline of diffusers"),
    "program": ("a class whose methods stages call", "is of a package that you trust"),
    "blocks": ("blocks of a modular pipeline", "is a ModularPipelineBlocks of diffusers"),
}


def refusal(component: Component, text: str, member: str = "") -> GraphError:
    """The error that says ``text`` about ``component``, or about its ``member`` such as ``.loras``,
    at the component's line."""
    return GraphError(f"components.{component.name}{member}: {text}", component.where)


def resolve_class(
    class_path: str, trust: Collection[str] = (), where: str = "", *kinds: Kind
) -> type[Any]:
    """The class that ``class_path`` names, such as ``diffusers.AutoencoderKL``.

    It must be defined in diffusers or transformers and be one of ``kinds`` (any kind where none is
    given), or be defined in a package that the caller trusts, and be usable as one of ``kinds``
    (see `_DESCRIPTIONS`). The package that counts is the one that defines the class:
    ``diffusers.utils.x.subprocess.Popen`` belongs to subprocess. Raises GraphError at ``where``.
    """
    package, *steps = class_path.split(".")
    packages = dict.fromkeys((*DEFAULT_ALLOW, *trust))
    if package not in packages:
        raise GraphError(f"{class_path} is {outside(package, packages)}", where)
    found: Any = _import(package, class_path, where)
    for step in steps:
        found = _member(found, step, class_path, where)
    if not isinstance(found, type):
        raise GraphError(f"{class_path} is not a class", where)
    own = found.__module__.split(".")[0]
    if own not in packages:
        raise GraphError(
            f"{class_path} is {found.__module__}.{found.__qualname__}, {outside(own, packages)}",
            where,
        )
    if own not in trust and not any(_is_kind(found, kind) for kind in kinds or _BASES):
        wanted = " nor ".join(_DESCRIPTIONS[kind][0] for kind in kinds or _BASES)
        raise GraphError(
            f"{class_path} is not {wanted}, and a file may name no other class here; {to_trust(own)}",
            where,
        )
    if kinds and not any(
        _is_kind(found, kind) or _can_be(found, kind, own in trust) for kind in kinds
    ):
        needed = " or ".join(
            f"{what}: such a class {has}" for what, has in (_DESCRIPTIONS[kind] for kind in kinds)
        )
        raise GraphError(f"{class_path} is not {needed}", where)
    return found


def pipeline_class(pipeline: Pipeline, trust: Collection[str]) -> type[Any]:
    """The class of ``pipeline``. Raises GraphError where it is declared."""
    return resolve_class(
        pipeline.class_path, trust, pipeline.where, "program" if pipeline.program else "pipeline"
    )


def require_code(graph: Graph) -> None:
    """Raises GraphError where a package that the caller trusts is not on Python's path, with where
    the graph says to get it."""
    absent = [package for package in graph.trust if importlib.util.find_spec(package) is None]
    if absent and graph.code:
        what = f"{', '.join(absent)} cannot be imported: get the code from {graph.code} and add its folder to PYTHONPATH"
        raise GraphError(what, graph.where)


def resolve_function(
    path: str, trust: Collection[str], where: str
) -> Callable[..., Mapping[str, Any]]:
    """The op that ``path`` names, such as ``mypackage.mymodule:sharpen``: a function with
    `graphrun.op` of a package in ``trust``.

    Raises GraphError at ``where``.
    """
    name, _, attribute = path.partition(":")
    package = name.split(".")[0]
    if package not in trust:
        raise GraphError(
            f"{path} is a function, and a file may name none of {package}; {to_trust(package)}",
            where,
        )
    try:
        module = importlib.import_module(name)
    except Exception as error:  # code of the package runs, which may raise anything
        raise GraphError(
            f"{path} cannot be imported: {type(error).__name__}: {error}", where
        ) from error
    declared = [key for key, value in vars(module).items() if hasattr(value, DECLARED)]
    if attribute not in declared:
        what = (
            "is no op: put @graphrun.op() above it"
            if hasattr(module, attribute)
            else f"is not in {module.__file__}"
        )
        raise GraphError(
            f"{path} {what}{did_you_mean(attribute, declared) if declared else ''}", where
        )
    function: Callable[..., Mapping[str, Any]] = getattr(module, attribute)
    return function


def _can_be(found: type[Any], kind: Kind, trusted: bool) -> bool:
    if kind == "part":
        return hasattr(found, "from_config") or hasattr(found, "from_pretrained")
    return kind == "program" and trusted


def _is_kind(found: type[Any], kind: str) -> bool:
    if (
        type(found).__name__ == "DummyObject"
    ):  # replaces a class whose dependencies are missing; constructing it says so
        return True
    bases = {(base.__module__.split(".")[0], base.__name__) for base in found.__mro__} & _BASES[
        kind
    ]
    # A class with ConfigMixin only is constructed from its configuration. One that also has
    # `from_pretrained`, such as AutoModel, loads another class by a name in a file.
    return bool(bases) and (
        bases != {("diffusers", "ConfigMixin")} or not hasattr(found, "from_pretrained")
    )


def _member(owner: Any, name: str, class_path: str, where: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        if isinstance(owner, ModuleType) and hasattr(owner, "__path__"):
            try:
                return importlib.import_module(f"{owner.__name__}.{name}")
            except ModuleNotFoundError:
                pass
        known = [member for member in dir(owner) if member[:1].isupper()]
        raise GraphError(f"unknown class {class_path}{did_you_mean(name, known)}", where) from None
    except (ImportError, RuntimeError) as error:
        raise GraphError(f"{class_path} cannot be imported: {error}", where) from error


def _import(package: str, class_path: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise GraphError(f"{class_path} cannot be imported: {error}", where) from error
