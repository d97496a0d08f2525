"""Proxy classes that intercept every public method of an attached pipeline.

Each pipeline object gets a subclass of its own class. The subclass plans a call, runs a change at
rest, or refuses, depending on the method:

    pipe(...), pipe.encode_prompt(...)   own methods that return a value   planned, then run
    pipe.fuse_qkv_projections()          own methods that return nothing   run with all weights on
                                                                           the CPU
    pipe.load_lora_weights(...)          methods of the loader mixins      likewise
    pipe.enable_model_cpu_offload()      methods that move weights         refused
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from types import FunctionType
from typing import Any

import torch

from graphrun.diffusers_.live import (
    is_pipeline,
    modules_in,
    own_class,
    pipelines_in,
    subclass_on_device,
)
from graphrun.errors import InputError
from graphrun.modules.dtype_variants import HostCasts
from graphrun.modules.interceptor import CallInterceptor, intercept

# modules with the methods that all pipelines inherit: load, save and configure, no compute
COMMON_MODULES = (
    "diffusers.pipelines.pipeline_utils",
    "diffusers.configuration_utils",
    "diffusers.loaders",
    "diffusers.modular_pipelines",
    "diffusers.utils",
)
# the package of the loader mixins, whose methods load weights onto the pipeline's device
LOADER_MODULES = "diffusers.loaders"
# methods of diffusers that move weights themselves
OFFLOADING = (
    "enable_model_cpu_offload",
    "enable_sequential_cpu_offload",
    "enable_group_offload",
    "reset_device_map",
    "remove_all_hooks",
)

MethodHandler = Callable[[str, str, Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
"""(path of the pipeline, name of the method, the method, its pipeline, args, kwargs) -> result."""


class PipelineProxy:
    """Gives each pipeline in ``pipe`` a subclass that routes its methods to handlers.

    ``call``: handler of calls to plan. ``at_rest``: handler of changes and saving.
    ``reported_device()``: the device that the pipelines report. ``entries``: the methods to plan of
    an object that is not a diffusers pipeline. ``extra_members``: more members of the subclasses.
    """

    def __init__(
        self,
        pipe: Any,
        entries: Collection[str],
        reported_device: Callable[[], torch.device],
        call: MethodHandler,
        at_rest: MethodHandler,
        **extra_members: Any,
    ) -> None:
        self.pipelines = pipelines_in(pipe)
        self._classes: list[tuple[Any, type[Any]]] = []
        for path, owner in self.pipelines.items():
            kind = type(owner)
            members: dict[str, Any] = {
                name: _forwarding_method(call if is_planned else at_rest, path, name, method)
                for name, method, is_planned in (
                    _intercepted_methods(kind)
                    if is_pipeline(owner)
                    else _planned_methods(kind, entries)
                )
            }
            changes = [name for name in ("save_pretrained", "to") if hasattr(kind, name)]
            members |= {
                name: _forwarding_method(at_rest, path, name, getattr(kind, name))
                for name in changes
            }
            members |= {
                name: _refusing_method(name) for name in OFFLOADING if hasattr(kind, name)
            } | extra_members
            self._classes.append((owner, kind))
            owner.__class__ = subclass_on_device(kind, reported_device, **members)

    def remove(self) -> None:
        while self._classes:
            owner, kind = self._classes.pop()
            owner.__class__ = kind


def _forwarding_method(
    handler: MethodHandler, path: str, name: str, method: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(method)
    def forward(owner: Any, *args: Any, **kwargs: Any) -> Any:
        return handler(path, name, method, owner, args, kwargs)

    return forward


def _planned_methods(
    kind: type[Any], names: Iterable[str]
) -> Iterator[tuple[str, Callable[..., Any], bool]]:
    return ((name, getattr(kind, name), True) for name in names)


def _intercepted_methods(kind: type[Any]) -> Iterator[tuple[str, Callable[..., Any], bool]]:
    """Yield (name, method, whether to plan its calls) for each method of ``kind`` to intercept.

    These are ``__call__``, the public methods that not all pipelines share, and the public methods
    of the loader mixins.
    """
    visited_names = set[str]()
    for base in kind.__mro__:
        is_own, is_loader = (
            not base.__module__.startswith(COMMON_MODULES),
            base.__module__.startswith(LOADER_MODULES),
        )
        for name, method in vars(base).items():
            if isinstance(method, FunctionType) and name not in visited_names:
                if name == "__call__" or (is_own and not name.startswith("_")):
                    yield name, method, name == "__call__" or _returns_value(method)
                elif is_loader and not name.startswith(("_", "maybe_")):
                    yield name, method, False
            visited_names.add(name)


@functools.cache
def _returns_value(method: Callable[..., Any]) -> bool:
    """Return whether ``method`` returns a value other than None, by its bytecode. A method that
    returns nothing checks or changes the pipeline."""
    code = inspect.unwrap(method).__code__
    instructions = list(dis.get_instructions(code))
    values = (
        (
            last.argval
            if last.opname == "RETURN_CONST"
            else previous.opname != "LOAD_CONST" or previous.argval
        )
        for previous, last in pairwise(instructions)
        if last.opname in ("RETURN_VALUE", "RETURN_CONST")
    )
    return inspect.isgeneratorfunction(inspect.unwrap(method)) or any(
        value is not None for value in values
    )


def _refusing_method(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise InputError(f"graphrun manages this pipeline's weights: call detach() before {name}()")

    return refuse


def refuse_placed(pipe: Any) -> None:
    """Raise InputError if other code already places the weights, saying how to stop that."""
    name = type(pipe).__name__
    for path, owner in pipelines_in(pipe).items():
        label = f"{name}.{path}" if path else name
        if own_class(owner) is not type(owner):
            raise InputError(f"graphrun is attached to {label} already: call detach() first")
        if getattr(owner, "_all_hooks", None):
            raise InputError(
                f"{label} has accelerate's hooks, which move its weights too: call "
                "remove_all_hooks() on it first"
            )
        if getattr(getattr(owner, "_components_manager", None), "_auto_offload_enabled", False):
            raise InputError(
                f"the ComponentsManager of {label} moves its weights too: call "
                "disable_auto_cpu_offload() on the manager first"
            )
        if getattr(owner, "hf_device_map", None):
            raise InputError(
                f"{label} was loaded with a device_map: call reset_device_map() on it, or load it "
                "without"
            )


def refuse_unnamed(
    program: Any, components: Mapping[str, torch.nn.Module] | None, entries: Collection[str]
) -> None:
    """Raise InputError unless ``components`` and ``entries`` cover what to plan of ``program``.

    ``components`` must contain all weights, ``entries`` methods of the class. For a diffusers
    pipeline both must be empty.
    """
    name, kind = type(program).__name__, type(program)
    if is_pipeline(program):
        if components is not None or entries:
            raise InputError(
                f"{name} is a pipeline of diffusers, whose components are known: leave out "
                "components= and entries="
            )
        return
    if not hasattr(program, "__dict__") or isinstance(program, (type, FunctionType)):
        raise InputError(
            f"attach takes a diffusers pipeline, or an object that owns modules, not {name}"
        )
    if not (modules := modules_in(program)):
        raise InputError(
            f"{name} has no module with weights: pass the object whose methods call the modules"
        )
    method_names = [
        key
        for key, value in vars(kind).items()
        if callable(value) and (key[0] != "_" or key == "__call__")
    ]
    if components is None or not entries:
        example = ", ".join(f"{key!r}: ..." for key in modules)
        raise InputError(
            f"{name} is not a pipeline of diffusers: name its components and the methods to plan, "
            f"attach(..., components={{{example}}}, entries=[...]); its own methods are "
            f"{', '.join(method_names)}"
        )
    for entry in entries:
        if not callable(getattr(kind, entry, None)):
            raise InputError(
                f"entries: {name} has no method {entry}; its own methods are "
                f"{', '.join(method_names)}"
            )
    module_ids = {id(part) for module in modules.values() for part in module.modules()}
    for key, module in components.items():
        if not isinstance(module, torch.nn.Module) or not key.isidentifier():
            raise InputError(
                f"components: {key!r} must be a name, and its value a module, not "
                f"{type(module).__name__}"
            )
        if id(module) not in module_ids:
            raise InputError(
                f"components: {name} does not own the module {key}: pass a module that its methods "
                "call"
            )
    component_ids = {id(part) for module in components.values() for part in module.modules()}
    roots = {**modules, "": program} if isinstance(program, torch.nn.Module) else modules
    for key, root in roots.items():
        for path, module in root.named_modules(prefix=key):
            if id(module) not in component_ids and (module._parameters or module._buffers):
                raise InputError(
                    f"the weights of {path or name} are in no component: add the module that holds "
                    "them to components="
                )


def dtype_of_to(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
) -> torch.dtype | None:
    """Return the dtype among the arguments of ``pipe.to(...)``, or None. Raises InputError if they
    name a device other than ``device``."""
    dtype = None
    for value in (
        *args,
        *(kwargs.get(key) for key in ("device", "torch_device", "dtype", "torch_dtype")),
    ):
        if isinstance(value, torch.dtype):
            dtype = value
        elif value is not None and str(value) not in (str(device), device.type):
            raise InputError(
                f"graphrun manages this pipeline's weights on {device}: call detach() before "
                f"to({value})"
            )
    return dtype


def remove_interceptors(modules: Mapping[str, torch.nn.Module]) -> list[CallInterceptor]:
    """Remove all call interceptors around ``modules``, and return them, the outermost first.

    There are several if attached pipelines share components. Raises InputError, and removes none,
    if one of them belongs to a running call.
    """
    removals: list[CallInterceptor] = []
    while interceptors := {
        id(handle): handle for module in modules.values() if (handle := intercept(module))
    }:
        for interceptor in interceptors.values():
            if not isinstance(interceptor.casts, HostCasts):
                component_names = ", ".join(
                    name for name, module in modules.items() if intercept(module) is interceptor
                )
                raise InputError(
                    f"another attached pipeline is using {component_names}: "
                    "wait until its call ends"
                )
        outermost = next(handle for handle in interceptors.values() if handle.outermost)
        outermost.__exit__()
        removals.append(outermost)
    return removals


def reinstall(interceptors: list[CallInterceptor]) -> None:
    """Undo `remove_interceptors`."""
    for interceptor in reversed(interceptors):
        interceptor.__enter__()
