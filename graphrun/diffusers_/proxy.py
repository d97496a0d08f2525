"""What stands between a pipeline and its caller while graphrun is attached: a class around its own that hands every call on.

Decides which methods are calls, which change the pipeline at rest, and which are refused. Must not know plans.

    pipe(...)  pipe.encode_prompt(...)      its own that return    a call: planned, then run
    pipe.fuse_qkv_projections()             its own that do not    changes it at rest: everything is on the host, and says so
    pipe.load_lora_weights(...)             what all pipelines     likewise
    pipe.enable_model_cpu_offload()         what moves weights     refused, with what to do
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from types import FunctionType
from typing import Any

import torch

from graphrun.diffusers_.live import is_pipeline, own_class, pipelines_in, placed
from graphrun.errors import InputError
from graphrun.modules.dtype_variants import AtRest
from graphrun.modules.interceptor import CallInterceptor, intercept

# Where methods come from that every pipeline has: they load, save and set, and compute nothing.
COMMON = (
    "diffusers.pipelines.pipeline_utils",
    "diffusers.configuration_utils",
    "diffusers.loaders",
    "diffusers.modular_pipelines",
    "diffusers.utils",
)
# Those that look at where the pipeline is, and put what they load there.
LOADERS = "diffusers.loaders"
# Of these, what adds, removes or overwrites weights, which a call streams from the host. Others set what a forward looks at.
REWEIGHTING = ("load_", "unload_", "fuse_", "unfuse_", "delete_")
# What moves weights, and would be a second mover.
MOVING = (
    "enable_model_cpu_offload",
    "enable_sequential_cpu_offload",
    "enable_group_offload",
    "reset_device_map",
    "remove_all_hooks",
)

Called = Callable[[str, str, Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
"""(path of the pipeline, name of the method, the method, its pipeline, arguments) -> what the method returns."""


class PipelineProxy:
    """A class around that of each pipeline in ``pipe``: ``call`` gets its calls, ``at_rest`` what changes or saves it.

    ``place()`` is the device on which the pipeline says it is, ``more``: what else it has meanwhile.
    """

    def __init__(self, pipe: Any, place: Callable[[], torch.device], call: Called, at_rest: Called, **more: Any) -> None:
        self.pipelines = pipelines_in(pipe)
        self._classes: list[tuple[Any, type[Any]]] = []
        for path, owner in self.pipelines.items():
            kind = type(owner)
            members: dict[str, Any] = {
                name: _handing(call if name == "__call__" or _returns(method) else at_rest, path, name, method)
                for name, method in _own_methods(kind)
            }
            members |= {name: _handing(at_rest, path, name, method) for name, method in _loaders(kind)}
            members |= {name: _handing(at_rest, path, name, getattr(kind, name)) for name in ("save_pretrained", "to")}
            members |= {name: _refusing(name) for name in MOVING if hasattr(kind, name)} | more
            self._classes.append((owner, kind))
            owner.__class__ = placed(kind, place, **members)

    def leave(self) -> None:
        """Every pipeline is of its own class."""
        while self._classes:
            owner, kind = self._classes.pop()
            owner.__class__ = kind


def _handing(to: Called, path: str, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def handed(owner: Any, *args: Any, **kwargs: Any) -> Any:
        return to(path, name, method, owner, args, kwargs)

    return handed


def _own_methods(kind: type[Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The call of a pipeline, and the public methods that are its own."""
    for name, base, method in _functions(kind):
        if name == "__call__" or (not name.startswith("_") and not base.__module__.startswith(COMMON)):
            yield name, method


@functools.cache
def _returns(method: Callable[..., Any]) -> bool:
    """Whether ``method`` returns a value. One that does not computes nothing for its caller: it checks or changes the pipeline."""
    code = inspect.unwrap(method).__code__
    done = list(dis.get_instructions(code))
    values = (
        (last.argval if last.opname == "RETURN_CONST" else before.opname != "LOAD_CONST" or before.argval)
        for before, last in pairwise(done)
        if last.opname in ("RETURN_VALUE", "RETURN_CONST")
    )
    return inspect.isgeneratorfunction(inspect.unwrap(method)) or any(value is not None for value in values)


def _loaders(kind: type[Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, base, method in _functions(kind):
        if not name.startswith("_") and base.__module__.startswith(LOADERS) and not name.startswith("maybe_"):
            yield name, method


def _functions(kind: type[Any]) -> Iterator[tuple[str, type[Any], Callable[..., Any]]]:
    seen = set[str]()
    for base in kind.__mro__:
        for name, value in vars(base).items():
            if isinstance(value, FunctionType) and name not in seen:
                yield name, base, value
            seen.add(name)


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise InputError(f"graphrun places this pipeline's weights: detach() before {name}()")

    return refuse


def refuse_placed(pipe: Any) -> None:
    """Raises InputError where somebody else places the pipeline's weights already, with how to stop that."""
    name = type(pipe).__name__
    if not is_pipeline(pipe):
        raise InputError(f"attach takes a diffusers pipeline, not {name}")
    for path, owner in pipelines_in(pipe).items():
        where = f"{name}.{path}" if path else name
        if own_class(owner) is not type(owner):
            raise InputError(f"graphrun is attached to {where} already: detach() it first")
        if getattr(owner, "_all_hooks", None):
            raise InputError(f"{where} carries accelerate's hooks, which move its weights too: call remove_all_hooks() on it first")
        if getattr(getattr(owner, "_components_manager", None), "_auto_offload_enabled", False):
            raise InputError(
                f"the ComponentsManager of {where} moves its weights too: call disable_auto_cpu_offload() on the manager first"
            )
        if getattr(owner, "hf_device_map", None):
            raise InputError(f"{where} was loaded with a device_map: call reset_device_map() on it, or load it without")


def cast_alone(args: tuple[Any, ...], kwargs: Mapping[str, Any], here: torch.device) -> torch.dtype | None:
    """The dtype that a ``to`` of a pipeline asks for, if any. Raises InputError where it asks for another device than ``here``."""
    dtype = None
    for value in (*args, *(kwargs.get(key) for key in ("device", "torch_device", "dtype", "torch_dtype"))):
        if isinstance(value, torch.dtype):
            dtype = value
        elif value is not None and str(value) not in (str(here), here.type):
            raise InputError(f"graphrun places this pipeline's weights on {here}: detach() before to({value})")
    return dtype


def lifted(modules: Mapping[str, torch.nn.Module]) -> list[CallInterceptor]:
    """Takes away every boundary around ``modules``, the outermost first, and returns them: pipelines may share components.

    Raises InputError, and takes none away, where one is that of a run.
    """
    found: list[CallInterceptor] = []
    while standing := {id(b): b for module in modules.values() if (b := intercept(module))}:
        for interceptor in standing.values():
            if not isinstance(interceptor.casts, AtRest):
                shared = ", ".join(name for name, module in modules.items() if intercept(module) is interceptor)
                raise InputError(f"a call of another attached pipeline runs with {shared}: wait until it has ended")
        outermost = next(b for b in standing.values() if b.outermost)
        outermost.__exit__()
        found.append(outermost)
    return found
