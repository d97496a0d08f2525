"""The boundary of a component: its entry points are wrapped on the instance, and only the outermost entry counts.

Decides nothing: it hands each entry to a function. The wrapping is a subclass given to the component and to every module in it for
as long as the boundary stands, so that neither `forward` nor the class is touched, ``isinstance`` stays true, and leaving restores
everything. While it stands, ``module.device`` answers the boundary's device: where a component computes is said by the plan, not by
its parameters. For the same reason ``module.to(device)`` does nothing for that device, as pipelines call it, nor does putting it
away to the CPU from outside; any other move is refused. So is a cast, unless there is who carries it out. A table that a module
without weights makes on the host goes to the device once, where a model's code would have every attention copy it: CogView4's and
GLM-Image's rotary embeddings.

    pipeline's code   vae.decode(z)    text_encoder.text_model.final_layer_norm(h)    prior.post_process_latents(x)    vae.bn.weight
    entry             decode           text_model.final_layer_norm                    post_process_latents             a read
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

# Entry points that pipelines of diffusers call besides the module itself, whatever they are handed. Any other public method of a
# module is an entry when it is handed a tensor. `forward` is reached through `__call__`.
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
    """Who carries out a cast of a component that is not entered. `dtype_variants.DtypeVariants` does."""

    def now(self, component: str) -> Any:
        """The form in which the component is, which has a ``name``."""

    def cast(self, component: str, change: Callable[[], object]) -> Any:
        """Carries out what ``change`` does to the component, which casts its tensors in place."""


class CallInterceptor:
    """A context manager that hands every outermost entry into ``modules`` to a function.

    ``around(component, entry, proceed, args, kwargs)`` returns the entry's result; ``proceed(*args, **kwargs)`` runs the
    component's own code. In place of ``around``: ``on_enter(component, entry)`` before that code and ``on_exit`` after it returned.
    ``entry`` is ``forward``, the name of a method, the path of a module in the component that is called directly, or
    ``path:method``. ``reads(component, path, tensor)`` returns what code outside of the component gets in place of a weight that it
    looks at. ``device`` may be changed while the boundary stands. ``dtypes``: what ``module.dtype`` answers from outside, where the
    component computes in another one. ``casts``: who carries out casts; entries are then told the name of the component's form.
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
        self._around = around or functools.partial(_enter_and_exit, on_enter, on_exit)
        self._reads = reads
        self._dtypes = dict(dtypes or {})
        self.casts = casts
        self._inside = self._casting = False
        self._classes: list[tuple[nn.Module, type[nn.Module]]] = []
        self._places: dict[int, tuple[str, str]] = {}  # id of a module -> component, path in it
        self._bare: set[int] = set()  # ids of modules without weights

    def __enter__(self) -> CallInterceptor:
        for name, module in self.modules.items():
            self._take(name, "", module)
        placed = {type(module) for module in self.modules.values() if "device" not in vars(module)}
        kind: Any
        for child, kind in self._classes:
            bounded = _bounded(kind, self._reads is not None, bool(self._dtypes), kind in placed, id(child) in self._bare)
            child.__dict__[bounded.graphrun_boundary] = self
            object.__setattr__(child, "__class__", bounded)  # the module's own `__setattr__` takes longer than all else here
        return self

    @property
    def outermost(self) -> bool:
        """Whether no other boundary was put around this one."""
        return all(intercept(module) is self for module, _ in self._classes)

    def _take(self, name: str, path: str, module: nn.Module) -> bool:
        """``module`` and what is in it, as `named_modules` walks, without a generator for each. Whether it may hold weights."""
        if id(module) in self._places:
            return True
        if not isinstance(module, torch.jit.ScriptModule):
            self._places[id(module)] = name, path
            self._classes.append((module, type(module)))
        held = bool(module._parameters or module._buffers)
        for key, child in module._modules.items():
            if child is not None:
                held |= self._take(name, f"{path}.{key}" if path else key, child)
        if not held and not type(module).__module__.startswith("torch."):  # PyTorch's own compute where their input is
            self._bare.add(id(module))
        return held

    def __exit__(self, *_: object) -> None:
        while self._classes:
            module, kind = self._classes.pop()
            bounded: Any = type(module)
            object.__setattr__(module, "__class__", kind)
            module.__dict__.pop(bounded.graphrun_boundary, None)
        self._places.clear()
        self._bare.clear()

    def __deepcopy__(self, memo: object) -> CallInterceptor:
        """A copy of a module has no place in it, and takes no copy of it along."""
        return self

    def dtype(self, kind: Any, module: nn.Module) -> Any:
        """What ``module.dtype`` answers, of class ``kind``."""
        component, path = self._places.get(id(module), ("", ""))
        outside = not self._inside and not path and component in self._dtypes
        return self._dtypes[component] if outside else kind.dtype.fget(module)

    def move(self, kind: Any, module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """In place of ``module.to``, which is ``kind``'s."""
        if self._casting:
            return kind.to(module, *args, **kwargs)  # type: ignore[no-any-return]
        kept = {key: value for key, value in kwargs.items() if key in ("device", "dtype", "non_blocking", "memory_format")}
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kept)
        here = device is None or (device.type == self.device.type and device.index in (None, self.device.index or 0))
        here = here or (device == torch.device("cpu") and not self._inside)  # Cosmos puts its checker away: the plan does
        same = dtype is None or all(p.dtype == dtype for p in module.parameters() if p.is_floating_point())
        if not here or (not same and self.casts is None):
            return self.refuse(module, device if not here else dtype)
        kept = {"memory_format": kwargs["memory_format"]} if kwargs.get("memory_format") is not None else {}
        return module if same and not kept else kind.to(module, dtype, **kept)

    def change(self, kind: Any, module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """In place of ``module._apply``, through which every move and cast of torch goes."""
        if self._casting:
            return kind._apply(module, *args, **kwargs)  # type: ignore[no-any-return]
        if self.casts is None or self._inside:
            return self.refuse(module)
        self._casting = True
        try:
            self.casts.cast(self._places[id(module)][0], lambda: kind._apply(module, *args, **kwargs))
        except NotImplementedError:  # meta tensors cannot be moved
            return self.refuse(module)
        finally:
            self._casting = False
        return module

    def refuse(self, module: nn.Module, wanted: object = None) -> nn.Module:
        """In place of what would move or cast the component that ``module`` is of."""
        name = self._places[id(module)][0]
        asked = f" to {wanted}" if isinstance(wanted, (torch.device, torch.dtype)) else ""
        raise BrokenPlan(
            f"something moves or casts {name}{asked} during the run, whose weights are where the plan says: take the call out "
            f"(.to, .cuda, .half, ...), or give {name} another dtype in the graph"
        )

    def enter(self, module: nn.Module, name: str, method: Callable[..., Any], args: Any, kwargs: Any, *, always: bool) -> Any:
        """``method`` of ``module``, as an entry when nothing is entered yet. ``name`` is empty for the call of a module itself."""
        place = self._places.get(id(module))  # a copy of a module has none
        if self._inside or place is None or not (always or _holds_tensor((*args, *kwargs.values()))):
            return method(module, *args, **kwargs)
        component, path = self._dtype_variant(place[0]), place[1]
        entry = f"{path}:{name}" if path and name else path or name or "forward"
        self._inside = True
        try:
            return self._around(component, entry, functools.partial(method, module), args, kwargs)
        finally:
            self._inside = False

    def read(self, module: nn.Module, name: str, value: Any) -> Any:
        """What code gets that looks up ``name`` of ``module``, which is ``value``."""
        place = self._places.get(id(module))
        if self._inside or self._reads is None or place is None or not isinstance(value, torch.Tensor):
            return value
        return self._reads(self._dtype_variant(place[0]), f"{place[1]}.{name}" if place[1] else name, value)

    def _dtype_variant(self, component: str) -> str:
        return component if self.casts is None else str(self.casts.now(component).name)


def intercept(module: nn.Module) -> CallInterceptor | None:
    """The outermost boundary that stands around ``module``."""
    return vars(module).get(getattr(type(module), "graphrun_boundary", ""))


@functools.cache
def _bounded(kind: Any, reads: bool, typed: bool, placed: bool, tables: bool) -> Any:
    """The subclass of ``kind`` whose instances are inside a boundary, which each holds under ``graphrun_boundary``'s name.

    Made once for a class: making one takes longer than a small component computes. A class of a boundary inside another has a name
    of its own for it. An instance without one (a slice of a ModuleList) is as if its class were ``kind``.
    """
    key = f"{getattr(kind, 'graphrun_boundary', '_graphrun_interceptor')}_"
    members: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__call__": _wrapped(key, "", kind.__call__, tables),
        "graphrun_boundary": key,
        "__reduce_ex__": lambda module, protocol: plainly(kind, super(kind, module).__reduce_ex__(protocol)),
        "to": _instead(key, kind.to, lambda interceptor, *args, **kwargs: interceptor.move(kind, *args, **kwargs)),
        "_apply": _instead(key, kind._apply, lambda interceptor, *args, **kwargs: interceptor.change(kind, *args, **kwargs)),
    }
    if reads:
        members["__getattr__"] = _reading(key, kind.__getattr__)
    if typed and isinstance(getattr(kind, "dtype", None), property):
        members["dtype"] = property(_instead(key, kind.dtype.fget, lambda interceptor, module: interceptor.dtype(kind, module)))
    if placed or hasattr(kind, "device"):
        own = kind.device.fget if isinstance(getattr(kind, "device", None), property) else _device_of
        members["device"] = property(_instead(key, own, lambda interceptor, _: interceptor.device))
    members |= {name: _wrapped(key, name, method) for name, method in _methods(kind)}
    return type(kind.__name__, (kind,), members)


def _device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _instead(key: str, own: Any, change: Callable[..., Any]) -> Callable[..., Any]:
    """``change(interceptor, module, ...)`` in place of ``own(module, ...)``, where the module is inside a boundary."""

    def method(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        interceptor: CallInterceptor | None = module.__dict__.get(key)
        if interceptor is None or id(module) not in interceptor._places:
            return own(module, *args, **kwargs)
        return change(interceptor, module, *args, **kwargs)

    return method


def _wrapped(key: str, name: str, method: Callable[..., Any], tables: bool = False) -> Callable[..., Any]:
    always = not name or name in ENTRY_POINTS

    @functools.wraps(method)
    def enter(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        interceptor: CallInterceptor | None = module.__dict__.get(key)
        if interceptor is None or interceptor._inside:
            made = method(module, *args, **kwargs)
            return made if interceptor is None or not tables else _beside(made, (args, kwargs))
        return interceptor.enter(module, name, method, args, kwargs, always=always)

    return enter


def _beside(made: Any, given: Any) -> Any:
    """``made`` with its tables on the device of the tensors that were ``given``, each copied once. What is no floating point number
    stays where it is: indices and sizes are for the host."""

    def is_table(tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu" and tensor.dim() > 0 and (tensor.is_floating_point() or tensor.is_complex())

    tables = {id(tensor): tensor for tensor in tensors_in(made) if is_table(tensor)}
    places = {tensor.device for tensor in tensors_in(given)} if tables else set()
    if len(places) != 1 or (place := places.pop()).type == "cpu":
        return made
    copies = {key: tensor.to(place) for key, tensor in tables.items()}
    return walk(made, lambda tensor: copies.get(id(tensor), tensor))


def _reading(key: str, own: Callable[[nn.Module, str], Any]) -> Callable[[nn.Module, str], Any]:
    """``__getattr__``, through which a module's parameters and buffers are looked up."""

    def look_up(module: nn.Module, name: str) -> Any:
        value = own(module, name)
        interceptor: CallInterceptor | None = module.__dict__.get(key)
        return value if interceptor is None or interceptor._inside else interceptor.read(module, name, value)

    return look_up


def plainly(kind: type[Any], reduced: Any) -> Any:
    """What pickles and copies something of a class around ``kind``: the copy is of ``kind`` itself, and inside no boundary."""
    make, args, *rest = reduced
    if rest and isinstance(rest[0], dict):
        rest[0] = {name: value for name, value in rest[0].items() if not isinstance(value, CallInterceptor)}
    return make, tuple(kind if isinstance(arg, type) and issubclass(arg, kind) else arg for arg in args), *rest


def entry_of(module: nn.Module, entry: str) -> Callable[..., Any]:
    """What ``entry``, as a `CallInterceptor` names it, is in ``module``: something to call."""
    if entry == "forward":
        return module
    path, _, method = entry.rpartition(":")
    if path:
        return getattr(module.get_submodule(path), method)  # type: ignore[no-any-return]
    return (
        getattr(module, entry) if "." not in entry and callable(getattr(type(module), entry, None)) else module.get_submodule(entry)
    )


def _methods(kind: type[nn.Module]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public methods of ``kind`` that not every module has."""
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


def _enter_and_exit(
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
