"""The boundary of a component: its entry points are wrapped on the instance, and only the outermost entry counts.

Decides nothing: it hands each entry to a function. The wrapping is a subclass given to the instance for as long as the boundary
stands, so that neither `forward` nor the class is touched, ``isinstance`` stays true, and leaving restores everything. While it
stands, ``module.device`` answers the boundary's device: where a component computes is said by the plan, not by its parameters.
For the same reason ``module.to(device)`` does nothing for that device, as pipelines call it; any other move or cast is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from graphrun.errors import BrokenPlan

# Entry points that pipelines of diffusers call besides the module itself. `forward` is reached through `__call__`.
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


class Boundary:
    """A context manager that hands every outermost entry into ``modules`` to a function.

    ``around(component, entry, proceed, args, kwargs)`` returns the entry's result; ``proceed(*args, **kwargs)`` runs the
    component's own code. In place of ``around``: ``on_enter(component, entry)`` before that code and ``on_exit`` after it returned.
    ``device`` may be changed while the boundary stands. ``dtypes``: what ``module.dtype`` answers from outside, where the
    component computes in another one.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        device: torch.device,
        on_enter: Callable[[str, str], None] | None = None,
        on_exit: Callable[[str, str], None] | None = None,
        *,
        around: Around | None = None,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        self.modules = dict(modules)
        self.device = device
        self._around = around or functools.partial(_enter_and_exit, on_enter, on_exit)
        self._dtypes = dict(dtypes or {})
        self._inside = False
        self._classes: list[tuple[nn.Module, type[nn.Module]]] = []

    def __enter__(self) -> Boundary:
        for name, module in self.modules.items():
            self._classes.append((module, type(module)))
            module.__class__ = self._bounded(name, type(module))
        return self

    def __exit__(self, *_: object) -> None:
        while self._classes:
            module, kind = self._classes.pop()
            module.__class__ = kind

    def _bounded(self, name: str, kind: type[Any]) -> type[nn.Module]:
        members: dict[str, Any] = {
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "__call__": self._wrapped(name, "forward", kind.__call__),
            "device": property(lambda _: self.device),
            "to": self._moved(name),
            "_apply": functools.partialmethod(_refuse_change, name),
        }
        if name in self._dtypes:
            members["dtype"] = property(lambda module: self._dtypes[name] if not self._inside else kind.dtype.fget(module))
        for entry in ENTRY_POINTS:
            if callable(method := getattr(kind, entry, None)):
                members[entry] = self._wrapped(name, entry, method)
        return type(kind.__name__, (kind,), members)

    def _moved(self, name: str) -> Callable[..., nn.Module]:
        def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            kept = {key: value for key, value in kwargs.items() if key in ("device", "dtype", "non_blocking", "memory_format")}
            device, dtype, _, _ = torch._C._nn._parse_to(*args, **kept)
            here = device is None or (device.type == self.device.type and device.index in (None, self.device.index or 0))
            same = dtype is None or all(p.dtype == dtype for p in module.parameters() if p.is_floating_point())
            if not here or not same:
                _refuse_change(module, name, device if not here else dtype)
            return module

        return to

    def _wrapped(self, name: str, entry: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def enter(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return method(module, *args, **kwargs)
            self._inside = True
            try:
                return self._around(name, entry, functools.partial(method, module), args, kwargs)
            finally:
                self._inside = False

        return enter


def _refuse_change(module: nn.Module, name: str, wanted: object = None, *_: object) -> nn.Module:
    """In place of ``Module._apply``, through which every move and cast of torch goes, and of a ``to`` that changes something."""
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
