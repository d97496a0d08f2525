"""Resolve a class path in a file to the class, and refuse classes that need the user's trust.

By default a file may name certain kinds of classes of diffusers and transformers. Only the named
package is imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any, Literal

from graphrun.entry_points import OPS, entry_point, installed
from graphrun.errors import GraphError
from graphrun.graph.graph import DEFAULT_ALLOW, Graph
from graphrun.graph.ops import DECLARED
from graphrun.graph.parts import Component, Pipeline
from graphrun.graph.values import did_you_mean, outside, to_trust

ClassKind = Literal["component", "part", "pipeline", "program", "blocks"]
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
# description of each kind, and what graphrun needs of it, even from a trusted package
_DESCRIPTIONS = {
    "component": ("a module with weights", "is a torch.nn.Module"),
    "part": ("a scheduler, guider, tokenizer or processor", "has from_config or from_pretrained"),
    "pipeline": ("a pipeline", "is a DiffusionPipeline or ModularPipeline of diffusers"),
    "program": ("a class whose methods stages call", "is of a package that you trust"),
    "blocks": ("blocks of a modular pipeline", "is a ModularPipelineBlocks of diffusers"),
}


def refusal(component: Component, text: str, member: str = "") -> GraphError:
    """Return the error ``text`` about ``component``, or about its ``member`` such as ``.loras``.
    The error names the component's line."""
    return GraphError(f"components.{component.name}{member}: {text}", component.file_line)


def resolve_class(
    class_path: str, trust: Collection[str] = (), file_line: str = "", *kinds: ClassKind
) -> type[Any]:
    """Return the class that ``class_path`` names, such as ``diffusers.AutoencoderKL``.

    A class of diffusers or transformers must be one of ``kinds``; none: any. A class of a trusted
    package must be usable as one of ``kinds`` (see `_DESCRIPTIONS`). The package that counts is the
    one that defines the class: ``diffusers.utils.x.subprocess.Popen`` belongs to subprocess. Raises
    GraphError at ``file_line``.
    """
    package, *steps = class_path.split(".")
    packages = dict.fromkeys((*DEFAULT_ALLOW, *trust))
    if package not in packages:
        raise GraphError(f"{class_path} is {outside(package, packages)}", file_line)
    target: Any = _import(package, class_path, file_line)
    for step in steps:
        target = _member(target, step, class_path, file_line)
    if not isinstance(target, type):
        raise GraphError(f"{class_path} is not a class", file_line)
    home_package = target.__module__.split(".")[0]
    if home_package not in packages:
        raise GraphError(
            f"{class_path} is {target.__module__}.{target.__qualname__}, "
            f"{outside(home_package, packages)}",
            file_line,
        )
    if home_package not in trust and not any(_is_kind(target, kind) for kind in kinds or _BASES):
        description = " nor ".join(_DESCRIPTIONS[kind][0] for kind in kinds or _BASES)
        raise GraphError(
            f"{class_path} is not {description}, and a file may name no other class here; "
            f"{to_trust(home_package)}",
            file_line,
        )
    if kinds and not any(
        _is_kind(target, kind) or _can_be(target, kind, home_package in trust) for kind in kinds
    ):
        requirement = " or ".join(
            f"{noun}: such a class {has}" for noun, has in (_DESCRIPTIONS[kind] for kind in kinds)
        )
        raise GraphError(f"{class_path} is not {requirement}", file_line)
    return target


def pipeline_class(pipeline: Pipeline, trust: Collection[str]) -> type[Any]:
    """Return the class of ``pipeline``. Raises GraphError at the pipeline's line."""
    return resolve_class(
        pipeline.class_path,
        trust,
        pipeline.file_line,
        "program" if pipeline.program else "pipeline",
    )


def require_code(graph: Graph) -> None:
    """Raise GraphError, with the graph's hint, if a trusted package is not on Python's path."""
    absent = [package for package in graph.trust if importlib.util.find_spec(package) is None]
    if absent and graph.code:
        problem = (
            f"{', '.join(absent)} cannot be imported: get the code from {graph.code} and add its "
            "folder to PYTHONPATH"
        )
        raise GraphError(problem, graph.file_line)


def resolve_function(
    path: str, trust: Collection[str], file_line: str
) -> Callable[..., Mapping[str, Any]]:
    """Return the op that ``path`` names: ``mypackage.mymodule:sharpen``, or ``mypackage.sharpen``
    by an entry point. An op is a function with `graphrun.op` of a package in ``trust``. Raises
    GraphError at ``file_line``."""
    package = re.split("[.:]", path)[0]
    if package not in trust:
        raise GraphError(
            f"{path} is a function, and a file may name none of {package}; {to_trust(package)}",
            file_line,
        )
    place = path if ":" in path else _registered(path, package, file_line)
    name, _, attribute = place.partition(":")
    try:
        module = importlib.import_module(name)
    except Exception as error:  # the package's code runs, and may raise anything
        raise GraphError(
            f"{path} cannot be imported: {type(error).__name__}: {error}", file_line
        ) from error
    op_names = [key for key, value in vars(module).items() if hasattr(value, DECLARED)]
    if attribute not in op_names:
        problem = (
            "is no op: put @graphrun.op() above it"
            if hasattr(module, attribute)
            else f"is not in {module.__file__}"
        )
        raise GraphError(
            f"{path} {problem}{did_you_mean(attribute, op_names) if op_names else ''}", file_line
        )
    function: Callable[..., Mapping[str, Any]] = getattr(module, attribute)
    return function


def _registered(name: str, package: str, file_line: str) -> str:
    """Return the path of the op that the entry point ``name`` of ``package`` registers."""
    point = entry_point(OPS, name)
    if point is None:
        raise GraphError(
            f"{name}: no installed package has an entry point of this name in the group {OPS}"
            f"{did_you_mean(name, installed(OPS))}",
            file_line,
        )
    module, _, attribute = (part.strip() for part in point.value.partition(":"))
    if module.split(".")[0] != package:  # else trust in one package would import another
        raise GraphError(
            f"{name}: the entry point is {point.value}, which is not in {package}", file_line
        )
    return f"{module}:{attribute}"


def _can_be(target: type[Any], kind: ClassKind, trusted: bool) -> bool:
    if kind == "part":
        return hasattr(target, "from_config") or hasattr(target, "from_pretrained")
    return kind == "program" and trusted


def _is_kind(target: type[Any], kind: str) -> bool:
    # replaces a class whose dependencies are missing; constructing it says so
    if type(target).__name__ == "DummyObject":
        return True
    bases = {(base.__module__.split(".")[0], base.__name__) for base in target.__mro__} & _BASES[
        kind
    ]
    # A class with ConfigMixin only is constructed from its configuration. One that also has
    # `from_pretrained`, such as AutoModel, loads another class by a name in a file.
    return bool(bases) and (
        bases != {("diffusers", "ConfigMixin")} or not hasattr(target, "from_pretrained")
    )


def _member(owner: Any, name: str, class_path: str, file_line: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        if isinstance(owner, ModuleType) and hasattr(owner, "__path__"):
            try:
                return importlib.import_module(f"{owner.__name__}.{name}")
            except ModuleNotFoundError:
                pass
        class_names = [member for member in dir(owner) if member[:1].isupper()]
        raise GraphError(
            f"unknown class {class_path}{did_you_mean(name, class_names)}", file_line
        ) from None
    except (ImportError, RuntimeError) as error:
        raise GraphError(f"{class_path} cannot be imported: {error}", file_line) from error


def _import(package: str, class_path: str, file_line: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise GraphError(f"{class_path} cannot be imported: {error}", file_line) from error
