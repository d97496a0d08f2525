"""Executes an operator on simulated tensors: checks devices, computes on the CPU, counts the memory
of the results.

    sim tensors --unwrap--> CPU tensors --same operator--> CPU results --count new storages--> wrap
    --> sim tensors

Results are counted after they were computed, and only if all results of the operator fit: a refusal
changes no counter. Results that share a counted storage are views and cost nothing. Operators count
on the machine of their inputs, not on the active one. Operators with special rules are in
``special.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from graphrun.sim.active import active_machine, is_simulated
from graphrun.sim.flops import FORMULAS, Formula, launches_kernel
from graphrun.sim.special import INDEXING, LEAVES, SPECIAL, Handler
from graphrun.sim.tensor import SimTensor, sync_storage, wrap, wrap_all


class Traits(NamedTuple):
    """Properties of an operator, read once from its schema."""

    name: str
    handler: Handler | None
    composite: bool
    """Whether it decomposes into other operators. It arrives undecomposed only in inference mode,
    and is decomposed here."""
    written: tuple[tuple[int, str], ...]
    """(position, name) of the arguments that it writes and returns, in order of the results; empty:
    results are new tensors."""
    views: bool
    """Whether its results are views of its arguments."""
    reshapes: bool
    """Whether it may change the shape or the storage of the arguments that it writes."""
    indexing: bool
    dynamic: bool
    """Whether the shapes of its results depend on values (a boolean mask that cuts)."""
    launches: bool
    """Whether it launches a kernel."""
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
                if argument.alias_info is not None
                and argument.alias_info.before_set == alias.before_set
            ]
    has_out = any(argument.is_out for argument in schema.arguments)
    return Traits(
        name=name,
        handler=SPECIAL.get(full),
        composite=name not in LEAVES
        and torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), "CompositeImplicitAutograd"
        ),
        written=tuple(written),
        views=any(alias is not None and not alias.is_write for alias in aliases),
        reshapes=has_out or torch.Tag.inplace_view in func.tags or name == "aten::resize_as_",
        indexing=name in INDEXING,
        dynamic=torch.Tag.dynamic_output_shape in func.tags,
        launches=launches_kernel(func),
        flops=FORMULAS.get(name),
    )


def dispatch(
    func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """The result of ``func`` on simulated tensors; the body of ``SimTensor.__torch_dispatch__``."""
    traits = traits_of(func)
    if traits.handler is not None:
        return traits.handler(func, args, kwargs or {})
    if traits.composite:
        return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **(kwargs or {}))
    tensors: list[Any] = []
    raws: list[Any] = []
    for value in args:
        kind = type(value)
        if kind is SimTensor:
            tensors.append(value)
            raws.append(value.raw)
        elif kind is int or kind is float or kind is bool:
            raws.append(value)
        else:
            raws.append(_unwrap(value, tensors))
    options: dict[str, Any] = {}
    on_host = False
    if kwargs:
        on_host = _options(kwargs, options, tensors)
    machine = _machine(traits, args, tensors, None if on_host else (kwargs or {}).get("device"))
    hollow = machine.hollow_bytes is not None and any(
        r.nbytes > machine.hollow_bytes for r in raws if isinstance(r, torch.Tensor)
    )
    out = (
        uninitialized(func, raws, options)
        if hollow and not traits.views
        else func(*raws, **options)
    )
    if traits.written:
        results = [args[i] if i < len(args) else (kwargs or {})[name] for i, name in traits.written]
        if traits.reshapes:
            for result in results:
                sync_storage(result)
        out = results[0] if len(results) == 1 else tuple(results)
    elif isinstance(out, torch.Tensor):
        out = out if on_host else wrap(out, machine)
    elif isinstance(out, (list, tuple)) and not on_host:
        out = type(out)(wrap_all(out, machine))
    if machine.ordering is not None and not traits.views:
        _report(machine, traits, tensors, out)
    if traits.dynamic and machine.on_cut is not None:
        machine.on_cut([tensor.raw if type(tensor) is SimTensor else tensor for tensor in tensors])
    if traits.launches:
        machine.clock.launch()
    if traits.flops is not None:
        machine.charge(traits.flops(raws, out))
    return out


def _report(machine: Any, traits: Traits, tensors: Sequence[Any], out: Any) -> None:
    """Tells the ordering checker what the operator read and wrote."""
    results = [
        each
        for each in (out if isinstance(out, (list, tuple)) else (out,))
        if type(each) is SimTensor
    ]
    written = {id(each) for each in results}
    read = [
        tensor.raw if type(tensor) is SimTensor else tensor
        for tensor in tensors
        if id(tensor) not in written
    ]
    machine.ordering.operator(traits.name, machine.agent(), read, [each.raw for each in results])


def uninitialized(func: Any, raws: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Results of ``func`` on CPU tensors with the right shapes and undefined contents. Unwritten
    pages take no host memory."""

    def to_meta(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="meta"
            )
        return [to_meta(item) for item in value] if isinstance(value, list) else value

    def to_cpu(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
        return (
            type(value)(to_cpu(item) for item in value)
            if isinstance(value, (list, tuple))
            else value
        )

    on_meta = {
        key: torch.device("meta") if key == "device" else to_meta(value)
        for key, value in options.items()
    }
    return to_cpu(func(*map(to_meta, raws), **on_meta))


def _unwrap(value: Any, tensors: list[Any]) -> Any:
    """``value`` with raw tensors in place of simulated ones; every tensor found is appended to
    ``tensors``."""
    if type(value) is SimTensor:
        tensors.append(value)
        return value.raw
    if isinstance(value, torch.Tensor):
        tensors.append(value)
    elif isinstance(value, (list, tuple)) and value and type(value[0]) is not int:
        return [_unwrap(item, tensors) for item in value]
    return value


def _options(kwargs: Mapping[str, Any], options: dict[str, Any], tensors: list[Any]) -> bool:
    """Whether the results are to be on the host. Adds to ``options`` the keyword arguments of the
    CPU operator."""
    on_host = False
    for key, value in kwargs.items():
        if key == "device":
            on_host = value is not None and not is_simulated(value)
            options[key] = value if on_host else torch.device("cpu")
        elif key == "generator" and value is not None:
            expected = active_machine().device.type
            raise RuntimeError(
                f"Expected a '{expected}' device type for generator but found '{value.device.type}'"
            )
        elif key != "pin_memory":
            options[key] = _unwrap(value, tensors)
    return on_host


def _machine(traits: Traits, args: Sequence[Any], tensors: list[Any], device: Any) -> Any:
    """The machine that all of ``tensors`` are on, without any that of ``device``; raises
    RuntimeError, as CUDA does, if tensors are on different devices.

    Allowed on the CPU, as on CUDA: 0-dim tensors that are not written, and index tensors.
    """
    machine = None
    stray = None
    for tensor in tensors:
        if type(tensor) is SimTensor:
            found = tensor.allocation.machine
            if machine is None:
                machine = found
            elif machine is not found and found not in machine.machines:
                raise RuntimeError(
                    f"expected sim tensors of one machine, found two machines (op {traits.name})"
                )
            elif machine is not found:
                raise _apart(traits, machine.name, found.name)
        elif (
            tensor.is_meta
            or (traits.written and tensor is args[0])
            or (tensor.dim() and not _is_index(traits, args, tensor))
        ):
            stray = tensor
    if machine is None:
        return active_machine(device)
    if stray is not None:
        raise _apart(traits, machine.name, stray.device)
    return machine


def _apart(traits: Traits, one: Any, other: Any) -> RuntimeError:
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {one} and {other}! (op {traits.name})"
    )


def _is_index(traits: Traits, args: Sequence[Any], tensor: torch.Tensor) -> bool:
    return traits.indexing and any(tensor is index for index in args[1])


SimTensor.__torch_dispatch__ = staticmethod(dispatch)
