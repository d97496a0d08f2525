"""The boundary of a component: its entry points are wrapped on the instance, and only the outermost entry counts.

Decides nothing: it hands each entry to a function. The wrapping is a subclass given to the component and to every module in it for
as long as the boundary stands, so that neither `forward` nor the class is touched, ``isinstance`` stays true, and leaving restores
everything. While it stands, ``module.device`` answers the boundary's device: where a component computes is said by the plan, not by
its parameters. For the same reason ``module.to(device)`` does nothing for that device, as pipelines call it; any other move is
refused. So is a cast, unless there is who carries it out.

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
    """Who carries out a cast of a component that is not entered. `forms.Forms` does."""

    def now(self, component: str) -> Any:
        """The form in which the component is, which has a ``name``."""

    def cast(self, component: str, change: Callable[[], object]) -> Any:
        """Carries out what ``change`` does to the component, which casts its tensors in place."""


class Boundary:
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
        self._casts = casts
        self._inside = self._casting = False
        self._classes: list[tuple[nn.Module, type[nn.Module]]] = []
        self._places: dict[int, tuple[str, str]] = {}  # id of a module -> component, path in it
        self._made: dict[type[nn.Module], type[nn.Module]] = {}

    def __enter__(self) -> Boundary:
        for name, module in self.modules.items():
            for path, child in module.named_modules():
                if id(child) not in self._places and not isinstance(child, torch.jit.ScriptModule):
                    self._places[id(child)] = name, path
                    self._classes.append((child, type(child)))
        for child, kind in self._classes:
            child.__class__ = self._made[kind] if kind in self._made else self._made.setdefault(kind, self._bounded(kind))
        return self

    @property
    def outermost(self) -> bool:
        """Whether no other boundary was put around this one."""
        return all(type(module) in self._made.values() for module, _ in self._classes)

    def __exit__(self, *_: object) -> None:
        while self._classes:
            module, kind = self._classes.pop()
            module.__class__ = kind
        self._places.clear()

    def _bounded(self, kind: type[Any]) -> type[nn.Module]:
        members: dict[str, Any] = {
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "__reduce_ex__": lambda module, protocol: plainly(kind, super(kind, module).__reduce_ex__(protocol)),
            "_graphrun_boundary": self,
            "__call__": self._wrapped("", kind.__call__),
            "to": self._moved(kind),
            "_apply": lambda module, *args, **kwargs: self._changed(kind, module, args, kwargs),
        }
        if self._reads is not None:
            members["__getattr__"] = self._read(kind)
        if self._dtypes and hasattr(kind, "dtype"):
            members["dtype"] = property(functools.partial(self._dtype, kind))
        if hasattr(kind, "device") or any(type(m) is kind and "device" not in vars(m) for m in self.modules.values()):
            members["device"] = property(lambda _: self.device)
        members |= {name: self._wrapped(name, method) for name, method in _methods(kind)}
        return type(kind.__name__, (kind,), members)

    def _dtype(self, kind: type[Any], module: nn.Module) -> Any:
        component, path = self._places.get(id(module), ("", ""))
        outside = not self._inside and not path and component in self._dtypes
        return self._dtypes[component] if outside else kind.dtype.fget(module)

    def _moved(self, kind: type[Any]) -> Callable[..., nn.Module]:
        def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            if self._casting or id(module) not in self._places:
                return kind.to(module, *args, **kwargs)  # type: ignore[no-any-return]
            kept = {key: value for key, value in kwargs.items() if key in ("device", "dtype", "non_blocking", "memory_format")}
            device, dtype, _, _ = torch._C._nn._parse_to(*args, **kept)
            here = device is None or (device.type == self.device.type and device.index in (None, self.device.index or 0))
            same = dtype is None or all(p.dtype == dtype for p in module.parameters() if p.is_floating_point())
            if not here or (not same and self._casts is None):
                _refuse_change(self._places[id(module)][0], device if not here else dtype)
            kept = {"memory_format": kwargs["memory_format"]} if kwargs.get("memory_format") is not None else {}
            return module if same and not kept else kind.to(module, dtype, **kept)

        return to

    def _changed(self, kind: type[Any], module: nn.Module, args: Any, kwargs: Any) -> nn.Module:
        """In place of ``Module._apply``, through which every move and cast of torch goes."""
        place = self._places.get(id(module))
        if self._casting or place is None:
            return kind._apply(module, *args, **kwargs)  # type: ignore[no-any-return]
        if self._casts is None or self._inside:
            _refuse_change(place[0], None)
        self._casting = True
        try:
            self._casts.cast(place[0], lambda: kind._apply(module, *args, **kwargs))  # type: ignore[union-attr]
        except NotImplementedError:  # meta tensors cannot be moved
            _refuse_change(place[0], None)
        finally:
            self._casting = False
        return module

    def _wrapped(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """``method``, as an entry when nothing is entered yet. ``name`` is empty for the call of a module itself."""
        always = not name or name in ENTRY_POINTS

        @functools.wraps(method)
        def enter(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            place = self._places.get(id(module))  # a copy of a module has none
            if self._inside or place is None or not (always or _holds_tensor((*args, *kwargs.values()))):
                return method(module, *args, **kwargs)
            component, path = self._form(place[0]), place[1]
            entry = f"{path}:{name}" if path and name else path or name or "forward"
            self._inside = True
            try:
                return self._around(component, entry, functools.partial(method, module), args, kwargs)
            finally:
                self._inside = False

        return enter

    def _form(self, component: str) -> str:
        return component if self._casts is None else str(self._casts.now(component).name)

    def _read(self, kind: type[nn.Module]) -> Callable[[nn.Module, str], Any]:
        """``__getattr__``, through which a module's parameters and buffers are looked up."""
        own: Callable[[nn.Module, str], Any] = kind.__getattr__

        def look_up(module: nn.Module, name: str) -> Any:
            value = own(module, name)
            place = self._places.get(id(module))
            if self._inside or self._reads is None or place is None or not isinstance(value, torch.Tensor):
                return value
            return self._reads(self._form(place[0]), f"{place[1]}.{name}" if place[1] else name, value)

        return look_up


def plainly(kind: type[Any], reduced: Any) -> Any:
    """What pickles and copies something of a class around ``kind``: the copy is of ``kind`` itself."""
    make, args, *rest = reduced
    return make, tuple(kind if isinstance(arg, type) and issubclass(arg, kind) else arg for arg in args), *rest


def entry_of(module: nn.Module, entry: str) -> Callable[..., Any]:
    """What ``entry``, as a `Boundary` names it, is in ``module``: something to call."""
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


def _refuse_change(name: str, wanted: object) -> nn.Module:
    """In place of what would move or cast the component."""
    asked = f" to {wanted}" if isinstance(wanted, (torch.device, torch.dtype)) else ""
    raise BrokenPlan(
        f"something moves or casts {name}{asked} during the run, whose weights are where the plan says: take the call out "
        f"(.to, .cuda, .half, ...), or give {name} another dtype in the graph"
    )


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
