"""Execute an operator on simulated tensors: check devices, compute on the CPU, count the results.

    sim tensors --unwrap--> CPU tensors --same operator--> CPU results
                                --count new storages--> --wrap--> sim tensors

Results are counted after they are computed, and only if all results of the operator fit: a refusal
changes no counter. Results that share a counted storage are views and cost nothing. Operators count
on the machine of their inputs, not on the active machine. ``special.py`` has operators with special
rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch

from graphrun.sim.active import active_machine, is_simulated
from graphrun.sim.attention import as_on_cards, take_additive_mask
from graphrun.sim.flops import FORMULAS, Formula, launches_kernel
from graphrun.sim.generators import device_of
from graphrun.sim.special import (
    CONTIGUOUS,
    INDEX_WRITES,
    INDEXING,
    LEAVES,
    SPECIAL,
    OperatorHandler,
)
from graphrun.sim.tensor import SimTensor, sync_storage, wrap, wrap_all


class Traits(NamedTuple):
    """Properties of an operator, read once from its schema."""

    name: str
    handler: OperatorHandler | None
    composite: bool
    """Whether the operator decomposes into others. Undecomposed operators arrive in inference mode
    only, and are decomposed here."""
    written_arguments: tuple[tuple[int, str], ...]
    """(position, name) of arguments that are written and returned; empty: new results."""
    views: bool
    reshapes: bool
    """Whether the operator may change the shape or the storage of the arguments that it writes."""
    indexing: bool
    writes_by_index: bool
    size_position: int | None
    """Position of the argument with the created tensor's size (``zeros``), or None."""
    dynamic: bool
    """Whether the shapes of the results depend on values (indexing with a boolean mask)."""
    launches: bool
    """Whether the operator launches a kernel."""
    flops: Formula | None


@cache
def traits_of(func: Any) -> Traits:
    """Return the traits of operator ``func``."""
    schema = func._schema
    name = schema.name
    full = f"{name}.{schema.overload_name}" if schema.overload_name else name
    aliases = [result.alias_info for result in schema.returns]
    written_arguments: list[tuple[int, str]] = []
    if aliases and all(alias is not None and alias.is_write for alias in aliases):
        for alias in aliases:
            written_arguments += [
                (position, argument.name)
                for position, argument in enumerate(schema.arguments)
                if argument.alias_info is not None
                and argument.alias_info.before_set == alias.before_set
            ]
    has_out = any(argument.is_out for argument in schema.arguments)
    sizes = [
        position
        for position, argument in enumerate(schema.arguments)
        if argument.name == "size" and str(argument.type) == "List[int]"
    ]
    return Traits(
        name=name,
        handler=SPECIAL.get(full),
        composite=name not in LEAVES
        and torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), "CompositeImplicitAutograd"
        ),
        written_arguments=tuple(written_arguments),
        views=any(alias is not None and not alias.is_write for alias in aliases),
        reshapes=has_out or torch.Tag.inplace_view in func.tags or name == "aten::resize_as_",
        indexing=name in INDEXING,
        writes_by_index=name in INDEX_WRITES,
        size_position=sizes[0] if sizes and not any(aliases) else None,
        dynamic=torch.Tag.dynamic_output_shape in func.tags,
        launches=launches_kernel(func),
        flops=FORMULAS.get(name),
    )


def dispatch(
    func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Return the result of ``func`` on simulated tensors: ``SimTensor.__torch_dispatch__``."""
    traits = traits_of(func)
    if traits.handler is not None:
        return traits.handler(func, args, kwargs or {})
    if traits.composite:
        return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **(kwargs or {}))
    if traits.writes_by_index and args[0].device.type == "cpu":
        args = _indices_on_host(args)
    if traits.name in CONTIGUOUS:  # as on other devices
        args = (args[0].contiguous(), *args[1:])
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
    is_hollow = (
        machine.hollow_bytes is not None
        and not traits.views
        and _is_large(traits, raws, options, on_host, machine.hollow_bytes)
    )
    if is_hollow:
        output = uninitialized(func, raws, options)
    elif traits.name == "aten::linear" and args[1].requires_grad:
        output = _linear(func, raws)
    elif traits.name == "aten::scaled_dot_product_attention":
        mask = take_additive_mask(raws, options)
        device_mask = None if mask is None else wrap(mask, machine)
        output = as_on_cards(raws, options, func(*raws, **options))
        del device_mask
    else:
        output = func(*raws, **options)
    if traits.written_arguments:
        results = [
            args[i] if i < len(args) else (kwargs or {})[name]
            for i, name in traits.written_arguments
        ]
        if traits.reshapes:
            for result in results:
                sync_storage(result)
        output = results[0] if len(results) == 1 else tuple(results)
    elif isinstance(output, torch.Tensor):
        output = output if on_host else wrap(output, machine)
    elif isinstance(output, (list, tuple)) and not on_host:
        output = type(output)(wrap_all(output, machine))
    if machine.ordering is not None and not traits.views:
        _report(machine, traits, tensors, output)
    if traits.dynamic and machine.on_cut is not None:
        machine.on_cut([tensor.raw if type(tensor) is SimTensor else tensor for tensor in tensors])
    if traits.launches:
        machine.clock.launch()
    if traits.flops is not None:
        machine.charge(traits.flops(raws, output))
    return output


def _linear(func: Any, raws: list[Any]) -> Any:
    """Return ``aten::linear`` with a weight that requires gradients.

    `torch.matmul` sums in another order if a weight requires none (`should_fold` in PyTorch's
    ATen/native/LinearAlgebra.cpp). Its transpose requires them only where PyTorch tracks gradients
    and views, which it does not below this dispatch.
    """
    raws[1] = raws[1].detach().requires_grad_()
    with (
        torch.no_grad(),
        torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False),
        torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False),
    ):
        return func(*raws)


def _is_large(
    traits: Traits,
    raws: Sequence[Any],
    options: Mapping[str, Any],
    on_host: bool,
    limit_bytes: int,
) -> bool:
    """Return whether an argument or the created device tensor has more bytes than the limit.
    ``on_host``: the results are on the host."""
    if any(raw.nbytes > limit_bytes for raw in raws if isinstance(raw, torch.Tensor)):
        return True
    if on_host or traits.size_position is None:
        return False
    dtype: Any = options.get("dtype") or getattr(raws[0], "dtype", torch.get_default_dtype())
    elements: int = prod(raws[traits.size_position])
    return bool(elements * dtype.itemsize > limit_bytes)


def _report(machine: Any, traits: Traits, tensors: Sequence[Any], output: Any) -> None:
    """Report the operator's reads and writes to the ordering checker."""
    results = [
        tensor
        for tensor in (output if isinstance(output, (list, tuple)) else (output,))
        if type(tensor) is SimTensor
    ]
    written_ids = {id(tensor) for tensor in results}
    read_tensors = [
        tensor.raw if type(tensor) is SimTensor else tensor
        for tensor in tensors
        if id(tensor) not in written_ids
    ]
    machine.ordering.operator(
        traits.name, machine.agent(), read_tensors, [tensor.raw for tensor in results]
    )


def uninitialized(func: Any, raws: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Return results of ``func`` on CPU tensors with the right shapes and undefined contents.
    Unwritten pages take no host memory."""

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
    """Return ``value`` with raw tensors in place of simulated ones, which go into ``tensors``."""
    if type(value) is SimTensor:
        tensors.append(value)
        return value.raw
    if isinstance(value, torch.Tensor):
        tensors.append(value)
    elif isinstance(value, (list, tuple)) and value and type(value[0]) is not int:
        return [_unwrap(item, tensors) for item in value]
    return value


def _options(kwargs: Mapping[str, Any], options: dict[str, Any], tensors: list[Any]) -> bool:
    """Fill ``options``, the keyword arguments of the CPU operator. Return whether results are on
    the host."""
    on_host = False
    for key, value in kwargs.items():
        if key == "device":
            on_host = value is not None and not is_simulated(value)
            options[key] = value if on_host else torch.device("cpu")
        elif key == "generator" and value is not None:
            expected, generator_device = active_machine().device.type, device_of(value)
            if generator_device.type != expected:
                raise RuntimeError(
                    f"Expected a '{expected}' device type for generator but found "
                    f"'{generator_device.type}'"
                )
            if value.device.type == "cpu":  # else the default one draws the numbers
                options[key] = value
        elif key != "pin_memory":
            options[key] = _unwrap(value, tensors)
    return on_host


def _machine(traits: Traits, args: Sequence[Any], tensors: list[Any], device: Any) -> Any:
    """Return the machine of all ``tensors``; without tensors, the machine of ``device``.

    Raises RuntimeError, as CUDA does, if tensors are on different devices. Allowed on the CPU, as
    on CUDA: 0-dim tensors that are not written, and index tensors.
    """
    machine = None
    stray_tensor = None
    for tensor in tensors:
        if type(tensor) is SimTensor:
            tensor_machine = tensor.allocation.machine
            if machine is None:
                machine = tensor_machine
            elif machine is not tensor_machine and tensor_machine not in machine.machines:
                raise RuntimeError(
                    f"expected sim tensors of one machine, found two machines (op {traits.name})"
                )
            elif machine is not tensor_machine:
                raise _device_error(traits, machine.name, tensor_machine.name)
        elif (
            tensor.is_meta
            or (traits.written_arguments and tensor is args[0])
            or (tensor.dim() and not _is_index(traits, args, tensor))
        ):
            stray_tensor = tensor
    if machine is None:
        return active_machine(device)
    if stray_tensor is not None and not machine.unified:
        raise _device_error(traits, machine.name, stray_tensor.device)
    return machine


def _device_error(traits: Traits, first_device: Any, second_device: Any) -> RuntimeError:
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{first_device} and {second_device}! (op {traits.name})"
    )


def _indices_on_host(args: Sequence[Any]) -> Sequence[Any]:
    """Return ``args`` of a write by indices to a CPU tensor, with indices and scalars copied there.

    A mask's positions are computed on the device, as on CUDA.
    """
    indices: list[Any] = []
    for index in args[1]:
        if type(index) is not SimTensor:
            indices.append(index)
        elif index.dtype in (torch.bool, torch.uint8):
            indices += index.nonzero().cpu().unbind(1)
        else:
            indices.append(index.cpu())
    value = args[2].cpu() if type(args[2]) is SimTensor and not args[2].dim() else args[2]
    return (args[0], indices, value, *args[3:])


def _is_index(traits: Traits, args: Sequence[Any], tensor: torch.Tensor) -> bool:
    return traits.indexing and any(tensor is index for index in args[1])


SimTensor.__torch_dispatch__ = staticmethod(dispatch)
