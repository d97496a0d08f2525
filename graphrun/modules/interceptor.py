"""Intercepts calls into components from outside, without touching their code.

While a `CallInterceptor` is active, every component and every module inside it has a subclass of its own class. `forward` and the
class itself stay untouched, ``isinstance`` holds, and leaving the context restores everything. Only the outermost call counts:
calls that a component makes inside itself pass through.

    pipeline's code   vae.decode(z)    text_encoder.text_model.final_layer_norm(h)    prior.post_process_latents(x)    vae.bn.weight
    entry             decode           text_model.final_layer_norm                    post_process_latents             a read

- ``module.device`` returns the interceptor's device: the plan decides where a component computes, not its parameters.
- ``module.to(device)`` does nothing for that device, because pipelines call it, nor for the CPU from outside, where pipelines
  offload a component. Any other move is refused. A cast is refused unless there is a `Casts` to carry it out.
- A floating-point table that a module without weights computes on the CPU is moved to the device of the module's inputs once.
  Otherwise the model's code copies it in every attention layer: the rotary embeddings of CogView4 and GLM-Image.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import nn

from graphrun.errors import BrokenPlan
from graphrun.modules.trees import tensors_in, walk

# Methods besides `__call__` that diffusers' pipelines call as entry points, whatever their arguments. Any other public method
# counts as an entry when an argument holds a tensor. `forward` is reached through `__call__`.
ENTRY_POINTS = (
    "encode",
    "decode",
    "generate",
    "get_text_features",
    "get_image_features",
    "encode_text",
    "encode_image",
)

Around = Callable[[str, str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
Reads = Callable[[str, str, torch.Tensor], torch.Tensor]


class Casts(Protocol):
    """Carries out casts of a component from outside. `dtype_variants.DtypeVariants` does."""

    def now(self, component: str) -> Any:
        """The current dtype variant of the component, which has a ``name``."""

    def cast(self, component: str, change: Callable[[], object]) -> Any:
        """Carries out ``change``, which casts the component's tensors in place."""


class CallInterceptor:
    """A context manager that passes every outermost call into ``modules`` to a function.

    ``around(component, entry, proceed, args, kwargs)`` returns the call's result; ``proceed(*args, **kwargs)`` runs the component's
    own code. Instead of ``around``: ``on_enter(component, entry)`` before that code and ``on_exit`` after it returned. ``entry`` is
    ``forward``, the name of a method, the path of a module inside the component that is called directly, or ``path:method``.

    ``reads(component, path, tensor)`` returns what code outside the component gets when it reads a weight. ``device`` may be
    changed while the interceptor is active. ``dtypes``: what ``module.dtype`` returns outside, where the component computes in
    another dtype. ``casts`` carries out casts; ``around`` then gets the name of the component's current dtype variant as
    ``component``.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        device: torch.device,
        on_enter: Callable[[str, str], None] | None = None,
        on_exit: Callable[[str, str], None] | None = None,
        *,
        around: Around | None = None,
        reads: Reads | None = None,
        dtypes: Mapping[str, torch.dtype] | None = None,
        casts: Casts | None = None,
    ) -> None:
        self.modules = dict(modules)
        self.device = device
        self._around = around or functools.partial(_notify, on_enter, on_exit)
        self._reads = reads
        self._dtypes = dict(dtypes or {})
        self.casts = casts
        self._inside = self._casting = False
        self._classes: list[tuple[nn.Module, type[nn.Module]]] = []
        self._paths: dict[int, tuple[str, str]] = {}  # id of a module -> component, path in it
        self._without_weights: set[int] = set()  # ids of modules without weights

    def __enter__(self) -> CallInterceptor:
        for name, module in self.modules.items():
            self._register(name, "", module)
        roots = {type(module) for module in self.modules.values() if "device" not in vars(module)}
        kind: Any
        for child, kind in self._classes:
            intercepted = _intercepted_class(
                kind, self._reads is not None, bool(self._dtypes), kind in roots, id(child) in self._without_weights
            )
            child.__dict__[intercepted.graphrun_interceptor] = self
            # Not through `nn.Module.__setattr__`, which would take most of the time of this loop.
            object.__setattr__(child, "__class__", intercepted)
        return self

    @property
    def outermost(self) -> bool:
        """Whether no other interceptor was entered around this one."""
        return all(intercept(module) is self for module, _ in self._classes)

    def _register(self, name: str, path: str, module: nn.Module) -> bool:
        """Registers ``module`` and its children, like `named_modules` without its generators. Returns whether it may hold
        weights.
        """
        if id(module) in self._paths:
            return True
        if not isinstance(module, torch.jit.ScriptModule):
            self._paths[id(module)] = name, path
            self._classes.append((module, type(module)))
        held = bool(module._parameters or module._buffers)
        for key, child in module._modules.items():
            if child is not None:
                held |= self._register(name, f"{path}.{key}" if path else key, child)
        if not held and not type(module).__module__.startswith("torch."):  # torch's own modules compute on their input's device
            self._without_weights.add(id(module))
        return held

    def __exit__(self, *_: object) -> None:
        while self._classes:
            module, kind = self._classes.pop()
            intercepted: Any = type(module)
            object.__setattr__(module, "__class__", kind)
            module.__dict__.pop(intercepted.graphrun_interceptor, None)
        self._paths.clear()
        self._without_weights.clear()

    def __deepcopy__(self, memo: object) -> CallInterceptor:
        """A copied module is not intercepted, so it needs no copy of the interceptor."""
        return self

    def dtype(self, kind: Any, module: nn.Module) -> Any:
        """The value of ``module.dtype``; ``kind`` is the module's own class."""
        component, path = self._paths.get(id(module), ("", ""))
        outside = not self._inside and not path and component in self._dtypes
        return self._dtypes[component] if outside else kind.dtype.fget(module)

    def move(self, kind: Any, module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Replaces ``module.to`` of class ``kind``."""
        if self._casting:
            return kind.to(module, *args, **kwargs)  # type: ignore[no-any-return]
        known = {key: value for key, value in kwargs.items() if key in ("device", "dtype", "non_blocking", "memory_format")}
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **known)
        stays = device is None or (device.type == self.device.type and device.index in (None, self.device.index or 0))
        # Cosmos offloads its safety checker to the CPU; here the plan does
        stays = stays or (device == torch.device("cpu") and not self._inside)
        same = dtype is None or all(p.dtype == dtype for p in module.parameters() if p.is_floating_point())
        if not stays or (not same and self.casts is None):
            return self.refuse(module, device if not stays else dtype)
        layout = {"memory_format": kwargs["memory_format"]} if kwargs.get("memory_format") is not None else {}
        return module if same and not layout else kind.to(module, dtype, **layout)

    def change(self, kind: Any, module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Replaces ``module._apply``, through which torch carries out every move and cast."""
        if self._casting:
            return kind._apply(module, *args, **kwargs)  # type: ignore[no-any-return]
        if self.casts is None or self._inside:
            return self.refuse(module)
        self._casting = True
        try:
            self.casts.cast(self._paths[id(module)][0], lambda: kind._apply(module, *args, **kwargs))
        except NotImplementedError:  # meta tensors cannot be moved
            return self.refuse(module)
        finally:
            self._casting = False
        return module

    def refuse(self, module: nn.Module, wanted: object = None) -> nn.Module:
        """Raises BrokenPlan for a move or cast of the component that ``module`` belongs to."""
        name = self._paths[id(module)][0]
        target = f" to {wanted}" if isinstance(wanted, (torch.device, torch.dtype)) else ""
        raise BrokenPlan(
            f"something moves or casts {name}{target} during the run, but the plan decides where its weights are: remove the call "
            f"(.to, .cuda, .half, ...), or give {name} another dtype in the graph"
        )

    def enter(self, module: nn.Module, name: str, method: Callable[..., Any], args: Any, kwargs: Any, *, always: bool) -> Any:
        """Calls ``method`` of ``module``, through ``around`` if no component is being called yet. ``name`` is empty for
        ``module(...)`` itself.
        """
        location = self._paths.get(id(module))  # None for a copy of a module
        if self._inside or location is None or not (always or _holds_tensor((*args, *kwargs.values()))):
            return method(module, *args, **kwargs)
        component, path = self._dtype_variant(location[0]), location[1]
        entry = f"{path}:{name}" if path and name else path or name or "forward"
        self._inside = True
        try:
            return self._around(component, entry, functools.partial(method, module), args, kwargs)
        finally:
            self._inside = False

    def read(self, module: nn.Module, name: str, value: Any) -> Any:
        """What code gets that looks up ``name`` of ``module``, whose value is ``value``."""
        location = self._paths.get(id(module))
        if self._inside or self._reads is None or location is None or not isinstance(value, torch.Tensor):
            return value
        return self._reads(self._dtype_variant(location[0]), f"{location[1]}.{name}" if location[1] else name, value)

    def _dtype_variant(self, component: str) -> str:
        return component if self.casts is None else str(self.casts.now(component).name)


def intercept(module: nn.Module) -> CallInterceptor | None:
    """The outermost interceptor active on ``module``, if any."""
    return vars(module).get(getattr(type(module), "graphrun_interceptor", ""))


@functools.cache
def _intercepted_class(kind: Any, reads: bool, typed: bool, has_device: bool, tables: bool) -> Any:
    """The subclass of ``kind`` whose instances are intercepted. Its attribute ``graphrun_interceptor`` names the instance attribute
    with the interceptor.

    Cached per class: creating a class takes longer than a small component computes. A nested interceptor uses a subclass of the
    outer one's class, with another attribute name. An instance without that attribute (a slice of a ModuleList) behaves as one of
    ``kind``.
    """
    key = f"{getattr(kind, 'graphrun_interceptor', '_graphrun_interceptor')}_"
    members: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__call__": _entry_method(key, "", kind.__call__, tables),
        "graphrun_interceptor": key,
        "__reduce_ex__": lambda module, protocol: plainly(kind, super(kind, module).__reduce_ex__(protocol)),
        "to": _override(key, kind.to, lambda interceptor, *args, **kwargs: interceptor.move(kind, *args, **kwargs)),
        "_apply": _override(key, kind._apply, lambda interceptor, *args, **kwargs: interceptor.change(kind, *args, **kwargs)),
    }
    if reads:
        members["__getattr__"] = _reading_getattr(key, kind.__getattr__)
    if typed and isinstance(getattr(kind, "dtype", None), property):
        members["dtype"] = property(_override(key, kind.dtype.fget, lambda interceptor, module: interceptor.dtype(kind, module)))
    if has_device or hasattr(kind, "device"):
        own = kind.device.fget if isinstance(getattr(kind, "device", None), property) else _device_of
        members["device"] = property(_override(key, own, lambda interceptor, _: interceptor.device))
    members |= {name: _entry_method(key, name, method) for name, method in _methods(kind)}
    return type(kind.__name__, (kind,), members)


def _device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _override(key: str, own: Any, change: Callable[..., Any]) -> Callable[..., Any]:
    """A method that calls ``change(interceptor, module, ...)`` for intercepted modules, and ``own(module, ...)`` for others."""

    def method(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        interceptor: CallInterceptor | None = module.__dict__.get(key)
        if interceptor is None or id(module) not in interceptor._paths:
            return own(module, *args, **kwargs)
        return change(interceptor, module, *args, **kwargs)

    return method


def _entry_method(key: str, name: str, method: Callable[..., Any], tables: bool = False) -> Callable[..., Any]:
    always = not name or name in ENTRY_POINTS

    @functools.wraps(method)
    def enter(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        interceptor: CallInterceptor | None = module.__dict__.get(key)
        if interceptor is None or interceptor._inside:
            made = method(module, *args, **kwargs)
            return made if interceptor is None or not tables else _move_tables(made, (args, kwargs))
        return interceptor.enter(module, name, method, args, kwargs, always=always)

    return enter


def _move_tables(made: Any, inputs: Any) -> Any:
    """``made`` with its tables moved to the device of the tensors in ``inputs``, each copied once. Integer tensors stay, since
    indices and sizes are used on the host.
    """

    def is_table(tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu" and tensor.dim() > 0 and (tensor.is_floating_point() or tensor.is_complex())

    tables = {id(tensor): tensor for tensor in tensors_in(made) if is_table(tensor)}
    devices = {tensor.device for tensor in tensors_in(inputs)} if tables else set()
    if len(devices) != 1 or (device := devices.pop()).type == "cpu":
        return made
    copies = {key: tensor.to(device) for key, tensor in tables.items()}
    return walk(made, lambda tensor: copies.get(id(tensor), tensor))


def _reading_getattr(key: str, own: Callable[[nn.Module, str], Any]) -> Callable[[nn.Module, str], Any]:
    """Wraps ``__getattr__``, which looks up a module's parameters and buffers."""

    def look_up(module: nn.Module, name: str) -> Any:
        value = own(module, name)
        interceptor: CallInterceptor | None = module.__dict__.get(key)
        return value if interceptor is None or interceptor._inside else interceptor.read(module, name, value)

    return look_up


def plainly(kind: type[Any], reduced: Any) -> Any:
    """The result of `__reduce_ex__` for an instance of a subclass of ``kind``, changed so that pickles and copies are plain
    instances of ``kind``.
    """
    make, args, *rest = reduced
    if rest and isinstance(rest[0], dict):
        rest[0] = {name: value for name, value in rest[0].items() if not isinstance(value, CallInterceptor)}
    return make, tuple(kind if isinstance(arg, type) and issubclass(arg, kind) else arg for arg in args), *rest


def entry_of(module: nn.Module, entry: str) -> Callable[..., Any]:
    """The callable in ``module`` that ``entry`` names (see `CallInterceptor`)."""
    if entry == "forward":
        return module
    path, _, method = entry.rpartition(":")
    if path:
        return getattr(module.get_submodule(path), method)  # type: ignore[no-any-return]
    return (
        getattr(module, entry) if "." not in entry and callable(getattr(type(module), entry, None)) else module.get_submodule(entry)
    )


def _methods(kind: type[nn.Module]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public methods of ``kind`` that `nn.Module` does not have."""
    seen = set[str]()
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for name, value in vars(base).items():
            if isinstance(value, FunctionType) and not name.startswith("_") and name not in seen and not hasattr(nn.Module, name):
                yield name, value
            seen.add(name)


def _holds_tensor(values: tuple[Any, ...]) -> bool:
    for value in values:
        if isinstance(value, torch.Tensor) or (isinstance(value, (list, tuple)) and _holds_tensor(tuple(value))):
            return True
        if isinstance(value, dict) and _holds_tensor(tuple(value.values())):
            return True
    return False


def _notify(
    on_enter: Callable[[str, str], None] | None,
    on_exit: Callable[[str, str], None] | None,
    component: str,
    entry: str,
    proceed: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if on_enter is not None:
        on_enter(component, entry)
    result = proceed(*args, **kwargs)
    if on_exit is not None:
        on_exit(component, entry)
    return result
