"""Decides what an operator on simulated tensors does: check devices, compute on the CPU, account for what came out.

    sim tensors --unwrap--> CPU tensors --same operator--> CPU results --count new storages--> wrap --> sim tensors

A result is counted after it was computed, and only when all results of the operator fit: a refusal changes no count. Results that
share a storage with something counted are views and cost nothing. It must not know which machine is active (operators
count on the machine of their inputs), and it must not know single operators: those that are special are in ``special.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from graphrun.sim.active import active_machine
from graphrun.sim.flops import FORMULAS, Formula
from graphrun.sim.special import INDEXING, LEAVES, SPECIAL, Handler
from graphrun.sim.wrap import settle, wrap, wrap_all


class Traits(NamedTuple):
    """What must be known of an operator, read once from its schema."""

    name: str
    handler: Handler | None
    composite: bool
    """It is made of other operators; it arrives whole only in inference mode and is taken apart here."""
    written: tuple[tuple[int, str], ...]
    """(position, name) of the arguments that it writes into and returns, in order of the results; empty: results are new."""
    views: bool
    """Its results are views of what it is given, and no bytes are computed."""
    reshapes: bool
    """It may change the shape or the storage of what it writes into."""
    indexing: bool
    flops: Formula | None


@cache
def traits_of(func: Any) -> Traits:
    """The traits of operator ``func``."""
    schema = func._schema
    name = schema.name
    full = f"{name}.{schema.overload_name}" if schema.overload_name else name
    aliases = [result.alias_info for result in schema.returns]
    written: list[tuple[int, str]] = []
    if aliases and all(alias is not None and alias.is_write for alias in aliases):
        for alias in aliases:
            written += [
                (position, argument.name)
                for position, argument in enumerate(schema.arguments)
                if argument.alias_info is not None and argument.alias_info.before_set == alias.before_set
            ]
    has_out = any(argument.is_out for argument in schema.arguments)
    return Traits(
        name=name,
        handler=SPECIAL.get(full),
        composite=name not in LEAVES and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"),
        written=tuple(written),
        views=any(alias is not None and not alias.is_write for alias in aliases),
        reshapes=has_out or torch.Tag.inplace_view in func.tags or name == "aten::resize_as_",
        indexing=name in INDEXING,
        flops=FORMULAS.get(name),
    )


def dispatch(cls: Any, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
    """The result of ``func`` on simulated tensors; the body of ``__torch_dispatch__`` of the tensor subclass ``cls``."""
    traits = traits_of(func)
    if traits.handler is not None:
        return traits.handler(cls, func, args, kwargs or {})
    if traits.composite:
        return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **(kwargs or {}))
    tensors: list[Any] = []
    raws: list[Any] = []
    for value in args:
        kind = type(value)
        if kind is cls:
            tensors.append(value)
            raws.append(value.raw)
        elif kind is int or kind is float or kind is bool:
            raws.append(value)
        else:
            raws.append(_unwrap(cls, value, tensors))
    options: dict[str, Any] = {}
    on_host = False
    if kwargs:
        on_host = _options(cls, kwargs, options, tensors)
    machine = _machine(cls, traits, args, tensors)
    hollow = machine.hollow_bytes is not None and any(r.nbytes > machine.hollow_bytes for r in raws if isinstance(r, torch.Tensor))
    out = untouched(func, raws, options) if hollow and not traits.views else func(*raws, **options)
    if traits.written:
        results = [args[i] if i < len(args) else (kwargs or {})[name] for i, name in traits.written]
        if traits.reshapes:
            for result in results:
                settle(cls, result)
        out = results[0] if len(results) == 1 else tuple(results)
    elif isinstance(out, torch.Tensor):
        out = out if on_host else wrap(cls, out, machine)
    elif isinstance(out, (list, tuple)) and not on_host:
        out = type(out)(wrap_all(cls, out, machine))
    if machine.ordering is not None and not traits.views:
        _report(cls, machine, traits, tensors, out)
    if traits.flops is not None:
        machine.charge(traits.flops(raws, out))
    return out


def _report(cls: Any, machine: Any, traits: Traits, tensors: Sequence[Any], out: Any) -> None:
    """Tells the ordering checker what the operator read and wrote."""
    results = [each for each in (out if isinstance(out, (list, tuple)) else (out,)) if type(each) is cls]
    written = {id(each) for each in results}
    read = [tensor.raw if type(tensor) is cls else tensor for tensor in tensors if id(tensor) not in written]
    machine.ordering.operator(traits.name, machine.clock.current, read, [each.raw for each in results])


def untouched(func: Any, raws: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Results of ``func`` on CPU tensors in memory that nobody has written: of the right sizes, and free until it is touched."""

    def there(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return [there(item) for item in value] if isinstance(value, list) else value

    def back(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
        return type(value)(back(item) for item in value) if isinstance(value, (list, tuple)) else value

    on_meta = {key: torch.device("meta") if key == "device" else there(value) for key, value in options.items()}
    return back(func(*map(there, raws), **on_meta))


def _unwrap(cls: Any, value: Any, tensors: list[Any]) -> Any:
    """``value`` with raw tensors in place of simulated ones; every tensor met is added to ``tensors``."""
    if type(value) is cls:
        tensors.append(value)
        return value.raw
    if isinstance(value, torch.Tensor):
        tensors.append(value)
    elif isinstance(value, (list, tuple)) and value and type(value[0]) is not int:
        return [_unwrap(cls, item, tensors) for item in value]
    return value


def _options(cls: Any, kwargs: Mapping[str, Any], options: dict[str, Any], tensors: list[Any]) -> bool:
    """Whether results are asked for on the host; fills ``options`` with what the CPU operator gets."""
    on_host = False
    for key, value in kwargs.items():
        if key == "device":
            on_host = value is not None and torch.device(value).type != "sim"
            options[key] = value if on_host else torch.device("cpu")
        elif key == "generator" and value is not None:
            raise RuntimeError(f"Expected a 'sim' device type for generator but found '{value.device.type}'")
        elif key != "pin_memory":
            options[key] = _unwrap(cls, value, tensors)
    return on_host


def _machine(cls: Any, traits: Traits, args: Sequence[Any], tensors: list[Any]) -> Any:
    """The machine that all of ``tensors`` are on; raises RuntimeError as CUDA does when some are elsewhere.

    Allowed on the CPU, as on CUDA: tensors without dimensions that are not written to, and index tensors.
    """
    machine = None
    stray = None
    for tensor in tensors:
        if type(tensor) is cls:
            found = tensor.allocation.machine
            if machine is None:
                machine = found
            elif machine is not found:
                raise RuntimeError(f"sim tensors of two machines met in {traits.name}")
        elif (traits.written and tensor is args[0]) or (tensor.dim() and not _is_index(traits, args, tensor)):
            stray = tensor
    if machine is None:
        return active_machine()
    if stray is not None:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, sim:0 and {stray.device}! "
            f"(op {traits.name})"
        )
    return machine


def _is_index(traits: Traits, args: Sequence[Any], tensor: torch.Tensor) -> bool:
    return traits.indexing and any(tensor is index for index in args[1])
