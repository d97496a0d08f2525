"""Proxy classes that intercept every public method of an attached pipeline.

Each pipeline object gets a subclass of its own class. The subclass decides by the method whether it
is a call to plan, a change to a pipeline at rest, or refused. Knows no plans.

    pipe(...)  pipe.encode_prompt(...)      own methods that return a value    a call: planned, then
    run pipe.fuse_qkv_projections()             own methods that return none       a change: runs
    with all weights on the CPU pipe.load_lora_weights(...)             methods of the loader mixins
    a change, likewise pipe.enable_model_cpu_offload()         methods that move weights
    refused, with what to do instead
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
from graphrun.modules.dtype_variants import AtRest
from graphrun.modules.interceptor import CallInterceptor, intercept

# Modules that define the methods which all pipelines inherit. These load, save and configure; they
# compute nothing.
COMMON_MODULES = (
    "diffusers.pipelines.pipeline_utils",
    "diffusers.configuration_utils",
    "diffusers.loaders",
    "diffusers.modular_pipelines",
    "diffusers.utils",
)
# The package of the loader mixins, whose methods read the pipeline's device and put what they load
# there.
LOADER_MODULES = "diffusers.loaders"
# Methods of diffusers that move weights themselves.
OFFLOADING = (
    "enable_model_cpu_offload",
    "enable_sequential_cpu_offload",
    "enable_group_offload",
    "reset_device_map",
    "remove_all_hooks",
)

Handler = Callable[[str, str, Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
"""(path of the pipeline, name of the method, the method, its pipeline, args, kwargs) -> what the
method returns."""


class PipelineProxy:
    """Gives each pipeline in ``pipe`` a subclass whose methods go to ``call`` (planned calls) or
    ``at_rest`` (changes and saving).

    ``reported_device()`` is the device that the pipelines report. ``entries``: of an object that is
    no pipeline of diffusers, the methods to plan. ``more``: further members of the subclasses.
    """

    def __init__(
        self,
        pipe: Any,
        entries: Collection[str],
        reported_device: Callable[[], torch.device],
        call: Handler,
        at_rest: Handler,
        **more: Any,
    ) -> None:
        self.pipelines = pipelines_in(pipe)
        self._classes: list[tuple[Any, type[Any]]] = []
        for path, owner in self.pipelines.items():
            kind = type(owner)
            members: dict[str, Any] = {
                name: _forwarding(call if planned else at_rest, path, name, method)
                for name, method, planned in (
                    _intercepted_methods(kind) if is_pipeline(owner) else _named(kind, entries)
                )
            }
            changes = [name for name in ("save_pretrained", "to") if hasattr(kind, name)]
            members |= {
                name: _forwarding(at_rest, path, name, getattr(kind, name)) for name in changes
            }
            members |= {name: _refusing(name) for name in OFFLOADING if hasattr(kind, name)} | more
            self._classes.append((owner, kind))
            owner.__class__ = subclass_on_device(kind, reported_device, **members)

    def remove(self) -> None:
        """Restores every pipeline's own class."""
        while self._classes:
            owner, kind = self._classes.pop()
            owner.__class__ = kind


def _forwarding(
    to: Handler, path: str, name: str, method: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(method)
    def forward(owner: Any, *args: Any, **kwargs: Any) -> Any:
        return to(path, name, method, owner, args, kwargs)

    return forward


def _named(
    kind: type[Any], entries: Iterable[str]
) -> Iterator[tuple[str, Callable[..., Any], bool]]:
    return ((name, getattr(kind, name), True) for name in entries)


def _intercepted_methods(kind: type[Any]) -> Iterator[tuple[str, Callable[..., Any], bool]]:
    """(name, method, whether a call of it is planned) of ``__call__``, of the public methods that
    ``kind`` does not share with all pipelines, and of those of the loader mixins."""
    seen = set[str]()
    for base in kind.__mro__:
        own, loads = (
            not base.__module__.startswith(COMMON_MODULES),
            base.__module__.startswith(LOADER_MODULES),
        )
        for name, method in vars(base).items():
            if isinstance(method, FunctionType) and name not in seen:
                if name == "__call__" or (own and not name.startswith("_")):
                    yield name, method, name == "__call__" or _returns_value(method)
                elif loads and not name.startswith(("_", "maybe_")):
                    yield name, method, False
            seen.add(name)


@functools.cache
def _returns_value(method: Callable[..., Any]) -> bool:
    """Whether ``method`` returns a value other than None, by its bytecode. One that does not checks
    or changes the pipeline."""
    code = inspect.unwrap(method).__code__
    done = list(dis.get_instructions(code))
    values = (
        (
            last.argval
            if last.opname == "RETURN_CONST"
            else before.opname != "LOAD_CONST" or before.argval
        )
        for before, last in pairwise(done)
        if last.opname in ("RETURN_VALUE", "RETURN_CONST")
    )
    return inspect.isgeneratorfunction(inspect.unwrap(method)) or any(
        value is not None for value in values
    )


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise InputError(f"graphrun places this pipeline's weights: detach() before {name}()")

    return refuse


def refuse_placed(pipe: Any) -> None:
    """Raises InputError where something else places the pipeline's weights already; the message
    says how to turn that off."""
    name = type(pipe).__name__
    for path, owner in pipelines_in(pipe).items():
        where = f"{name}.{path}" if path else name
        if own_class(owner) is not type(owner):
            raise InputError(f"graphrun is attached to {where} already: detach() it first")
        if getattr(owner, "_all_hooks", None):
            raise InputError(
                f"{where} has accelerate's hooks, which move its weights too: call remove_all_hooks() on it first"
            )
        if getattr(getattr(owner, "_components_manager", None), "_auto_offload_enabled", False):
            raise InputError(
                f"the ComponentsManager of {where} moves its weights too: call disable_auto_cpu_offload() on the manager first"
            )
        if getattr(owner, "hf_device_map", None):
            raise InputError(
                f"{where} was loaded with a device_map: call reset_device_map() on it, or load it without"
            )


def refuse_unnamed(
    program: Any, components: Mapping[str, torch.nn.Module] | None, entries: Collection[str]
) -> None:
    """Raises InputError where ``components`` and ``entries`` do not say what of ``program`` is to
    be placed and planned: all of its weights, and methods of its class. A pipeline of diffusers
    says that itself."""
    name, kind = type(program).__name__, type(program)
    if is_pipeline(program):
        if components is not None or entries:
            raise InputError(
                f"{name} is a pipeline of diffusers, whose components are known: leave out components= and entries="
            )
        return
    if not hasattr(program, "__dict__") or isinstance(program, (type, FunctionType)):
        raise InputError(
            f"attach takes a diffusers pipeline, or an object that holds modules, not {name}"
        )
    if not (held := modules_in(program)):
        raise InputError(
            f"{name} holds no module with weights: pass the object whose methods call the modules"
        )
    public = [
        key
        for key, value in vars(kind).items()
        if callable(value) and (key[0] != "_" or key == "__call__")
    ]
    if components is None or not entries:
        shown = ", ".join(f"{key!r}: ..." for key in held)
        raise InputError(
            f"{name} is no pipeline of diffusers: say what its components are and which methods to plan, "
            f"attach(..., components={{{shown}}}, entries=[...]); its own methods are {', '.join(public)}"
        )
    for entry in entries:
        if not callable(getattr(kind, entry, None)):
            raise InputError(
                f"entries: {name} has no method {entry}; its own methods are {', '.join(public)}"
            )
    inside = {id(part) for module in held.values() for part in module.modules()}
    for key, module in components.items():
        if not isinstance(module, torch.nn.Module) or not key.isidentifier():
            raise InputError(
                f"components: {key!r} must be a name, and its value a module, not {type(module).__name__}"
            )
        if id(module) not in inside:
            raise InputError(
                f"components: {name} does not hold {key} as a part, so its methods cannot be planned with it"
            )
    named = {id(part) for module in components.values() for part in module.modules()}
    tops = {**held, "": program} if isinstance(program, torch.nn.Module) else held
    for key, top in tops.items():
        for path, module in top.named_modules(prefix=key):
            if id(module) not in named and (module._parameters or module._buffers):
                raise InputError(
                    f"the weights of {path or name} are in no component: add the module that holds them to components="
                )


def dtype_of_to(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], here: torch.device
) -> torch.dtype | None:
    """The dtype in the arguments of ``pipe.to(...)``, None without one. Raises InputError for a
    device other than ``here``."""
    dtype = None
    for value in (
        *args,
        *(kwargs.get(key) for key in ("device", "torch_device", "dtype", "torch_dtype")),
    ):
        if isinstance(value, torch.dtype):
            dtype = value
        elif value is not None and str(value) not in (str(here), here.type):
            raise InputError(
                f"graphrun places this pipeline's weights on {here}: detach() before to({value})"
            )
    return dtype


def remove_interceptors(modules: Mapping[str, torch.nn.Module]) -> list[CallInterceptor]:
    """Removes every call interceptor around ``modules``, the outermost first, and returns them in
    that order.

    There are several where attached pipelines share components. Raises InputError, and removes
    none, where one of them belongs to a call that is running.
    """
    found: list[CallInterceptor] = []
    while installed := {id(b): b for module in modules.values() if (b := intercept(module))}:
        for interceptor in installed.values():
            if not isinstance(interceptor.casts, AtRest):
                shared = ", ".join(
                    name for name, module in modules.items() if intercept(module) is interceptor
                )
                raise InputError(
                    f"a call of another attached pipeline runs with {shared}: wait until it has ended"
                )
        outermost = next(b for b in installed.values() if b.outermost)
        outermost.__exit__()
        found.append(outermost)
    return found
