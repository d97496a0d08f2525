"""Intercept calls into components from outside, without changing their code.

While a `CallInterceptor` is active, the class of every component, and of every module inside it, is
replaced by a subclass made for this purpose. The original class and its `forward` are unchanged,
``isinstance`` gives the same answers, and leaving the context restores the classes. Only calls from
outside a component are intercepted, not calls between its own modules. A call's *entry* names the
part of the component that is called:

    code of the pipeline                              entry
    transformer(x)                                    forward
    vae.decode(z)                                     decode
    text_encoder.text_model.final_layer_norm(h)       text_model.final_layer_norm
    prior.post_process_latents(x)                     post_process_latents
    vae.bn.weight                                     none: not a call, but a read of a weight

- ``module.device`` returns the interceptor's device, wherever the parameters are: the plan decides
where a component computes.
- Parameters and buffers that code outside lists (``next(module.parameters()).device``, as in
Cosmos 3) report that device too.
- ``module.to(device)`` does nothing if ``device`` is the interceptor's, since pipelines move
components there. Code outside a component that moves it to the CPU, as pipelines do to offload, has
no effect either. Any other move is refused. A cast is refused unless ``casts`` does it.
- A method that changes weights (``fuse_lora``, ``load_state_dict``) is refused, except for
components at rest.
- A module without weights may compute a floating-point table on the CPU, such as the rotary
embeddings of CogView4 and GLM-Image. The table is moved once to the device of the module's inputs.
Otherwise the model's code would copy it in every attention layer.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from graphrun.errors import BrokenPlan, InputError
from graphrun.modules.compiled import is_compiled
from graphrun.modules.dtype_variants import DtypeVariants, HostCasts
from graphrun.modules.trees import tensors_in, walk
from graphrun.modules.weight_reads import DeferredTensor, with_values

# Methods besides `__call__` (which calls `forward`) that diffusers' pipelines call on components.
# Their calls are always intercepted; calls of other public methods only if an argument contains a
# tensor.
ENTRY_POINTS = (
    "encode",
    "decode",
    "generate",
    "get_text_features",
    "get_image_features",
    "encode_text",
    "encode_image",
)

CallHandler = Callable[[str, str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""(component, entry, proceed, args, kwargs) -> the result of the call."""
ReadHandler = Callable[[str, str, torch.Tensor], torch.Tensor]
"""(component, name of the weight, its tensor) -> the tensor that the reading code gets."""


# modules of the libraries whose methods with these prefixes add, remove or overwrite weights; their
# other methods set values that a forward reads
LOADERS = ("diffusers.loaders", "transformers.integrations.peft", "peft.")
WEIGHT_CHANGING = ("load_", "unload_", "add_", "delete_", "fuse_", "unfuse_", "merge", "unmerge")


def changes_weights(method: Callable[..., Any]) -> bool:
    """Return whether ``method`` of a pipeline or module adds, removes or overwrites weights."""
    loads = str(method.__module__).startswith(LOADERS) and method.__name__.startswith(
        WEIGHT_CHANGING
    )
    return loads or method is nn.Module.load_state_dict


def refuse_change(name: str) -> NoReturn:
    """Raise InputError for a call of the method ``name``, which changes weights."""
    raise InputError(
        f"weights cannot change while a call of this pipeline runs: call {name}() before or after "
        "it"
    )


class CallInterceptor:
    """A context manager that passes every call into ``modules`` from outside to a function.

    ``handle_call(component, entry, proceed, args, kwargs)`` returns the result of the call;
    ``proceed(*args, **kwargs)`` runs the component's own code. ``entry`` is ``forward``, the name
    of a method, the path of a module inside the component, or ``path:method`` for a method of such
    a module.

    ``reads(component, name, tensor)`` returns what code outside the component gets when it reads a
    weight. ``device`` may change while the interceptor is active. ``dtypes``: what
    ``component.dtype`` returns to code outside, for components that compute in another dtype.
    ``casts`` carries out casts; ``handle_call`` and ``reads`` then get the name of the component's
    current dtype variant as ``component``.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        device: torch.device,
        handle_call: CallHandler,
        *,
        reads: ReadHandler | None = None,
        dtypes: Mapping[str, torch.dtype] | None = None,
        casts: DtypeVariants | HostCasts | None = None,
    ) -> None:
        self.modules = dict(modules)
        self.device = device
        self._handle_call = handle_call
        self._reads = reads
        self._dtypes = dict(dtypes or {})
        self.casts = casts
        self._is_in_call = False
        self._is_casting = False
        # each module with its original class
        self._classes: list[tuple[nn.Module, type[nn.Module]]] = []
        self._paths: dict[int, tuple[str, str]] = {}  # id of a module -> component, path in it
        self._without_weights: set[int] = set()  # ids of modules

    def __enter__(self) -> CallInterceptor:
        for name, module in self.modules.items():
            self._register(name, "", module)
        component_classes = {
            type(module) for module in self.modules.values() if "device" not in vars(module)
        }
        kind: Any
        for child, kind in self._classes:
            intercepted = _intercepted_class(
                kind,
                self._reads is not None,
                bool(self._dtypes),
                kind in component_classes,
                id(child) in self._without_weights,
            )
            child.__dict__[intercepted.graphrun_interceptor] = self
            # `nn.Module.__setattr__` would do the same, but take most of the time of this loop
            object.__setattr__(child, "__class__", intercepted)
        return self

    @property
    def outermost(self) -> bool:
        """Whether this interceptor was entered last, and so gets calls before any other one."""
        return all(intercept(module) is self for module, _ in self._classes)

    def _register(self, name: str, path: str, module: nn.Module) -> bool:
        """Register ``module`` and modules inside it, except compiled ones; whether any has weights.

        To be safe, a compiled or already registered module counts as one with weights. Order as in
        `nn.Module.named_modules`, but without its nested generators, which are slower.
        """
        if id(module) in self._paths or is_compiled(module):
            return True
        if not isinstance(module, torch.jit.ScriptModule):
            self._paths[id(module)] = name, path
            self._classes.append((module, type(module)))
        has_weights = bool(module._parameters or module._buffers)
        for key, child in module._modules.items():
            if child is not None:
                has_weights |= self._register(name, f"{path}.{key}" if path else key, child)
        # torch's own modules compute on their input's device
        if not has_weights and not type(module).__module__.startswith("torch."):
            self._without_weights.add(id(module))
        return has_weights

    def __exit__(self, *_: object) -> None:
        while self._classes:
            module, kind = self._classes.pop()
            intercepted: Any = type(module)
            object.__setattr__(module, "__class__", kind)
            module.__dict__.pop(intercepted.graphrun_interceptor, None)
        self._paths.clear()
        self._without_weights.clear()

    def __deepcopy__(self, memo: object) -> CallInterceptor:
        """Return the interceptor itself: a copied module is not intercepted."""
        return self

    # in the following methods, ``original`` is the method of the original class of ``module``

    def reported_device(self) -> torch.device:
        """Return the value of ``module.device``. At rest, raises InputError if a pipeline that is
        not attached asks during a call: it would compute on a device that no plan has prepared."""
        if isinstance(self.casts, HostCasts) and (name := _calling_pipeline()):
            raise InputError(
                f"{name} shares components with an attached pipeline and is not attached itself: "
                f"call graphrun.attach({name}, "
                "...), or call detach() on the other one"
            )
        return self.device

    def dtype(self, original: Callable[..., Any], module: nn.Module) -> Any:
        """Return the value of ``module.dtype``."""
        component, path = self._paths.get(id(module), ("", ""))
        is_replaced = not self._is_in_call and not path and component in self._dtypes
        return self._dtypes[component] if is_replaced else original(module)

    def listed(
        self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the results of ``module.named_parameters(...)`` and ``named_buffers(...)``. All
        listings of weights use these."""
        weights: Iterator[tuple[str, torch.Tensor]] = original(module, *args, **kwargs)
        if self._is_in_call or self._is_casting or isinstance(self.casts, HostCasts):
            return weights
        return ((name, _reporting(tensor, self.device)) for name, tensor in weights)

    def move(
        self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
    ) -> nn.Module:
        """Carry out or refuse ``module.to(...)``."""
        if self._is_casting:
            return original(module, *args, **kwargs)  # type: ignore[no-any-return]
        torch_kwargs = {
            key: value
            for key, value in kwargs.items()
            if key in ("device", "dtype", "non_blocking", "memory_format")
        }
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **torch_kwargs)
        same_device = device is None or (
            device.type == self.device.type and device.index in (None, self.device.index or 0)
        )
        # pipelines offload components to the CPU (Cosmos its safety checker); this has no effect,
        # because the plan decides the placement
        same_device = same_device or (device == torch.device("cpu") and not self._is_in_call)
        same_dtype = dtype is None or all(
            p.dtype == dtype for p in module.parameters() if p.is_floating_point()
        )
        if not same_device or (not same_dtype and self.casts is None):
            self.refuse(module, device if not same_device else dtype)
        layout = (
            {"memory_format": kwargs["memory_format"]}
            if kwargs.get("memory_format") is not None
            else {}
        )
        return module if same_dtype and not layout else original(module, dtype, **layout)

    def change(
        self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
    ) -> nn.Module:
        """Carry out or refuse ``module._apply(...)``, which torch uses for every move and cast."""
        if self._is_casting:
            return original(module, *args, **kwargs)  # type: ignore[no-any-return]
        if self.casts is None or self._is_in_call:
            self.refuse(module)
        self._is_casting = True
        try:
            self.casts.cast(self._paths[id(module)][0], lambda: original(module, *args, **kwargs))
        # `DtypeVariants` tries the change on meta tensors, which cannot be moved: not a cast
        except NotImplementedError:
            self.refuse(module)
        finally:
            self._is_casting = False
        return module

    def change_weights(
        self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        if self._is_in_call or isinstance(self.casts, HostCasts):
            return original(module, *args, **kwargs)
        refuse_change(original.__name__)

    def refuse(self, module: nn.Module, destination: object = None) -> NoReturn:
        """Raise BrokenPlan for a move or cast of the component that contains ``module``.
        ``destination``: the device or dtype."""
        name = self._paths[id(module)][0]
        target = (
            f" to {destination}" if isinstance(destination, (torch.device, torch.dtype)) else ""
        )
        raise BrokenPlan(
            f"something moves or casts {name}{target} during the run, but the plan decides where "
            "its weights are: remove the call "
            "(.to, .cuda, .half, ...), leave out the argument that asks for it "
            f"(cpu_offloading=True), or give {name} another "
            "dtype in the graph"
        )

    def enter(
        self,
        module: nn.Module,
        name: str,
        method: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *,
        is_entry_point: bool,
    ) -> Any:
        """Call ``method`` of ``module``, through ``handle_call`` if the call comes from outside.

        ``name``: of the method; empty for ``module(...)`` itself. ``is_entry_point``: the call is
        intercepted even without a tensor among its arguments.
        """
        location = self._paths.get(id(module))  # None for a copy of a registered module
        if (
            self._is_in_call
            or location is None
            or not (is_entry_point or _holds_tensor((args, kwargs)))
        ):
            return method(module, *args, **kwargs)
        component, path = self._dtype_variant(location[0]), location[1]
        args, kwargs = with_values((args, kwargs))
        entry = f"{path}:{name}" if path and name else path or name or "forward"
        self._is_in_call = True
        try:
            return self._handle_call(
                component, entry, functools.partial(method, module), args, kwargs
            )
        finally:
            self._is_in_call = False

    def read(self, module: nn.Module, name: str, value: Any) -> Any:
        """Return the result, in place of ``value``, for code that reads the attribute ``name``."""
        location = self._paths.get(id(module))
        if (
            self._is_in_call
            or self._reads is None
            or location is None
            or not isinstance(value, torch.Tensor)
            or isinstance(value, DeferredTensor)  # of an outer interceptor
        ):
            return value
        path = f"{location[1]}.{name}" if location[1] else name
        component = self._dtype_variant(location[0])
        return DeferredTensor.of(
            value, self.device, functools.partial(self._reads, component, path, value)
        )

    def _dtype_variant(self, component: str) -> str:
        """Return the name of the component's current dtype variant; without ``casts``, its own
        name."""
        return component if self.casts is None else str(self.casts.current(component).name)


def intercept(module: nn.Module) -> CallInterceptor | None:
    """Return the interceptor on ``module`` that was entered last; None if none is active."""
    return vars(module).get(getattr(type(module), "graphrun_interceptor", ""))


@functools.cache
def _intercepted_class(kind: Any, reads: bool, dtypes: bool, add_device: bool, tables: bool) -> Any:
    """Return the subclass of ``kind`` whose instances are intercepted.

    ``reads``, ``dtypes``: intercept reads of weights and of ``dtype``. ``add_device``: the class
    gets a ``device`` even if ``kind`` has none. ``tables``: move the tables that the module
    computes to the device (see the top of this file).

    An instance stores its interceptor in an attribute; the class attribute ``graphrun_interceptor``
    is that attribute's name. An instance without it (a slice of a ModuleList) behaves like one of
    ``kind``. If an interceptor is entered while another is active, its classes are subclasses of
    the other's, and its attribute has another name.

    Cached: creating a class takes longer than the compute of a small component.
    """
    key = f"{getattr(kind, 'graphrun_interceptor', '_graphrun_interceptor')}_"
    members: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__class__": _reported_class(getattr(kind, "graphrun_kind", kind)),
        "graphrun_kind": getattr(kind, "graphrun_kind", kind),
        "__call__": _entry_method(key, "", kind.__call__, tables),
        "graphrun_interceptor": key,
        "__reduce_ex__": lambda module, protocol: reduced_as(
            kind, super(kind, module).__reduce_ex__(protocol)
        ),
        "to": _override(key, kind.to, CallInterceptor.move),
        "_apply": _override(key, kind._apply, CallInterceptor.change),
        "named_parameters": _override(key, kind.named_parameters, CallInterceptor.listed),
        "named_buffers": _override(key, kind.named_buffers, CallInterceptor.listed),
    }
    for name in dir(kind):
        method = inspect.getattr_static(kind, name)
        if isinstance(method, FunctionType) and changes_weights(method):
            members[name] = _override(key, method, CallInterceptor.change_weights)
        elif (
            isinstance(method, FunctionType)
            and not name.startswith("_")
            and not hasattr(nn.Module, name)
        ):
            members[name] = _entry_method(key, name, method)
    if reads:
        members["__getattr__"] = _reading_getattr(key, kind.__getattr__)
    if dtypes and isinstance(getattr(kind, "dtype", None), property):
        members["dtype"] = property(_override(key, kind.dtype.fget, CallInterceptor.dtype))
    if add_device or hasattr(kind, "device"):
        getter = (
            kind.device.fget if isinstance(getattr(kind, "device", None), property) else _device_of
        )
        members["device"] = property(
            _override(key, getter, lambda interceptor, *_: interceptor.reported_device())
        )
    return type(kind.__name__, (kind,), members)


def _reported_class(kind: type[Any]) -> property:
    """Return ``module.__class__`` as a property that reads ``kind`` and sets the type. diffusers'
    registries find a module's class by it."""
    return property(
        lambda _: kind, lambda module, value: object.__dict__["__class__"].__set__(module, value)
    )


def _calling_pipeline() -> str:
    """Return the class name of the pipeline that is computing; "" if something else asks.

    diffusers' pipelines read `_execution_device` only in methods that compute; its frame on the
    stack shows the pipeline. Attached pipelines answer without their components.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "_execution_device":
        frame = (
            frame.f_back
            if frame.f_globals["__name__"].startswith((__name__, "diffusers."))
            else None
        )
    return type(frame.f_locals["self"]).__name__ if frame is not None else ""


class _Reporting(torch.Tensor):
    """A weight that reports another ``device`` than its own. It shares the weight's memory; results
    computed from it are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    reported: torch.device
    device = property(lambda tensor: tensor.reported)


def _reporting(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a view of a plain ``tensor`` on another device that reports ``device``; other tensors
    unchanged."""
    if tensor.device.type == device.type or type(tensor) not in (torch.Tensor, nn.Parameter):
        return tensor
    view = tensor.detach().as_subclass(_Reporting)
    view.reported = device
    return view.requires_grad_(tensor.requires_grad)


def _device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _override(key: str, original: Any, change: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls ``change(interceptor, original, module, ...)`` if intercepted.

    For other modules it calls ``original(module, ...)``. ``key``: the attribute that stores the
    interceptor.
    """

    @functools.wraps(original)
    def method(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        interceptor: CallInterceptor | None = module.__dict__.get(key)
        if interceptor is None or id(module) not in interceptor._paths:
            return original(module, *args, **kwargs)
        return change(interceptor, original, module, *args, **kwargs)

    return method


def _entry_method(
    key: str, name: str, method: Callable[..., Any], tables: bool = False
) -> Callable[..., Any]:
    """Return ``method`` with its calls passed to the module's interceptor. Arguments as for
    `_override` and `_intercepted_class`; ``name`` is empty for ``__call__``."""
    is_entry_point = not name or name in ENTRY_POINTS

    @functools.wraps(method)
    def enter(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        interceptor: CallInterceptor | None = module.__dict__.get(key)
        if interceptor is None or interceptor._is_in_call:
            result = method(module, *args, **kwargs)
            return (
                result
                if interceptor is None or not tables
                else _move_tables(result, (args, kwargs))
            )
        return interceptor.enter(module, name, method, args, kwargs, is_entry_point=is_entry_point)

    return enter


def _move_tables(result: Any, inputs: Any) -> Any:
    """Return ``result`` with its tables moved to the device of the tensors in ``inputs``.

    Tables are floating-point and complex CPU tensors; each is copied once. Integer tensors stay:
    indices and sizes are used on the host. Nothing moves if the inputs are on the CPU or on more
    than one device.
    """

    def is_table(tensor: torch.Tensor) -> bool:
        return (
            tensor.device.type == "cpu"
            and tensor.dim() > 0
            and (tensor.is_floating_point() or tensor.is_complex())
        )

    tables = {id(tensor): tensor for tensor in tensors_in(result) if is_table(tensor)}
    devices = {tensor.device for tensor in tensors_in(inputs)} if tables else set()
    if len(devices) != 1 or (device := devices.pop()).type == "cpu":
        return result
    copies = {key: tensor.to(device) for key, tensor in tables.items()}
    return walk(result, lambda tensor: copies.get(id(tensor), tensor))


def _reading_getattr(
    key: str, original: Callable[[nn.Module, str], Any]
) -> Callable[[nn.Module, str], Any]:
    """Return a ``__getattr__`` that passes reads of weights from outside to the interceptor.
    ``original``: the ``__getattr__`` that looks up a module's parameters and buffers."""

    def look_up(module: nn.Module, name: str) -> Any:
        value = original(module, name)
        interceptor: CallInterceptor | None = module.__dict__.get(key)
        return (
            value
            if interceptor is None or interceptor._is_in_call
            else interceptor.read(module, name, value)
        )

    return look_up


def reduced_as(kind: type[Any], reduced: Any) -> Any:
    """Return ``reduced``, a `__reduce_ex__` of a subclass's instance, changed to give a ``kind``.
    Pickles and copies are then instances of ``kind`` itself, without an interceptor."""
    constructor, args, *rest = reduced
    if rest and isinstance(rest[0], dict):  # the instance's attributes
        rest[0] = {
            name: value for name, value in rest[0].items() if not isinstance(value, CallInterceptor)
        }
    return (
        constructor,
        tuple(kind if isinstance(arg, type) and issubclass(arg, kind) else arg for arg in args),
        *rest,
    )


def entry_of(module: nn.Module, entry: str) -> Callable[..., Any]:
    """Return the callable in ``module`` that ``entry`` names (see `CallInterceptor`)."""
    if entry == "forward":
        return module
    path, _, method = entry.rpartition(":")
    if path or callable(getattr(type(module), entry, None)):
        return getattr(module.get_submodule(path), method)  # type: ignore[no-any-return]
    return module.get_submodule(entry)


def _holds_tensor(values: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(values))
