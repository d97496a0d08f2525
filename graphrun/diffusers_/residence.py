"""Host memory of an attached pipeline: weights in arenas as the plan lays them out, and cleanup of what a call left on the device.

A component is laid out again when the problem's numbers for it change, as when a new kind of call shows other blocks in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from graphrun.diffusers_.live import pipelines_in
from graphrun.model.problem import ALLOCATION_BYTES, ComponentNumbers, Problem
from graphrun.modules.blocks import held
from graphrun.modules.dtype_variants import DtypeVariant, DtypeVariants
from graphrun.modules.memos import forget, is_helper
from graphrun.modules.trees import tensors_in, walk
from graphrun.runtime.devices.device import Device
from graphrun.runtime.host import Host
from graphrun.runtime.movers import refuse_movers
from graphrun.runtime.residency import Residency
from graphrun.units import round_up

# Attributes that every module has. None of them is a tensor that a call left behind.
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


class LiveHost(Host):
    """Host side of an attached pipeline: ``modules`` keep their own memory until a plan uses them, and then move to arenas.

    `restore` gives them memory of their own again.
    """

    def __init__(self, modules: Mapping[str, nn.Module], device: Device) -> None:
        refuse_movers(modules, adapters=True)
        self.modules = dict(modules)
        self.residencies: dict[str, Residency] = {}
        self.casts: dict[str, Any] = {}
        self.sources = ()
        self.dtype_variants: DtypeVariants | None = None
        self._variants = {}
        self._device = device
        self._numbers: dict[str, ComponentNumbers] = {}

    def begin(self, *, changed: bool) -> None:
        """Prepares for a call: takes the components' present dtypes. ``changed``: the pipeline changed since the last call."""
        if not changed and self.dtype_variants is not None and self.dtype_variants.first:
            self.dtype_variants.begin()
            return
        refuse_movers(self.modules, adapters=True)
        self.residencies = {name: residency for name, residency in self.residencies.items() if name in self.modules}
        self.dtype_variants = DtypeVariants(self.modules, self._leave, self._join)

    def replace_modules(self, modules: Mapping[str, nn.Module]) -> None:
        """Makes ``modules`` the components, after `restore`. Raises InputError where a new one is moved by something else."""
        added = {name: module for name, module in modules.items() if self.modules.get(name) is not module}
        refuse_movers(added, adapters=True)
        self.restore()
        self.modules, self.dtype_variants = dict(modules), None

    def lay_out(self, problem: Problem, dtype_variants: Mapping[str, DtypeVariant]) -> None:
        """Lays out every component of ``problem`` in arenas, each in its dtype variant.

        Call it between runs, or with nothing on the device.
        """
        assert self.dtype_variants is not None
        for numbers in problem.components:
            with self.dtype_variants.within(dtype_variants[numbers.name]):
                if self._numbers.get(numbers.name) != numbers or not self._is_laid_out(numbers.name):
                    self.residencies.pop(numbers.name, None)
                    module = self.modules[dtype_variants[numbers.name].component]
                    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
                    self.residencies[numbers.name] = Residency(module, numbers, self._device)
                    for name in trained:
                        module.get_parameter(name).requires_grad_(True)
                    self._numbers[numbers.name], self._variants[numbers.name] = numbers, numbers.variants[0]

    def _leave(self, dtype_variant: str) -> None:
        if dtype_variant in self.residencies:
            self.residencies[dtype_variant].leave()

    def _join(self, dtype_variant: str) -> None:
        if dtype_variant in self.residencies:
            self.residencies[dtype_variant].join()

    def match_layout(self, problem: Problem) -> None:
        """Does nothing: `lay_out` has laid out the components of ``problem`` already."""

    def restore(self) -> None:
        """Gives every weight memory of its own outside the arenas, with ``requires_grad`` as it was."""
        known = self.dtype_variants.known if self.dtype_variants is not None else {}
        for name in {known[dtype_variant].component for dtype_variant in self.residencies}:
            made: dict[int, torch.Tensor] = {}
            for child in self.modules[name].modules():
                for tensor, _, location, _ in list(held(child)):
                    location.put(made.setdefault(id(tensor), _own_copy(tensor)))
        self.residencies.clear()
        self._numbers.clear()

    def _is_laid_out(self, name: str) -> bool:
        """Whether the component's tensors are still those that were laid out. Loading other weights replaces them."""
        return name in self.residencies and self.residencies[name].holds_module()


def _own_copy(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().to("cpu", copy=True)
    if isinstance(tensor, nn.Parameter):
        copied = nn.Parameter(copied, requires_grad=tensor.requires_grad)
        if tensor.device.type == "cpu":
            copied.__dict__.update(tensor.__dict__)
    return copied


class Leftovers:
    """Finds and removes what a call left on ``device`` besides weights and results, by comparison with the state before it.

    Tensors that a part keeps (a scheduler's timesteps) are moved to the host, and so are weights that a module was given during the
    call (by a callback that fuses projections). Attributes in which modules cached tensors get their value from before the call.
    """

    def __init__(self, pipe: Any, modules: Mapping[str, nn.Module], device: torch.device) -> None:
        self._pipe, self._modules, self._device = pipe, modules, device
        children = [child for module in modules.values() for child in module.modules()]
        helpers = (value for child in children for value in vars(child).values() if is_helper(value))
        self._weights = {child: {*child._parameters, *child._buffers} for child in children}
        self._caches = [(holder, _attributes(holder)) for holder in {id(h): h for h in (*children, *helpers)}.values()]
        self._kept: Any = WeakTensorKeyDictionary()  # used as a set; holds no tensor alive
        held = (tensor for holder in self._holders() for value in vars(holder).values() for tensor in tensors_in(value))
        self._kept.update((tensor, None) for tensor in held if tensor.device.type == device.type)

    def clear(self) -> None:
        """Removes everything that the call put on the device."""
        for holder in self._holders():
            for key, value in list(vars(holder).items()):
                if _on_device(value, self._device) and not all(tensor in self._kept for tensor in tensors_in(value)):
                    vars(holder)[key] = walk(value, lambda tensor: tensor if tensor in self._kept else tensor.cpu())
        for child in (child for module in self._modules.values() for child in module.modules()):
            tables: tuple[dict[str, Any], ...] = (child._parameters, child._buffers)
            for table in tables:
                for key, tensor in list(table.items()):
                    if key not in self._weights.get(child, ()) and _on_device(tensor, self._device):
                        table[key] = _own_copy(tensor)
        for child, before in self._caches:
            for key, value in list(vars(child).items()):
                if key not in MODULE_ATTRIBUTES and _on_device(value, self._device):
                    _restore_attribute(vars(child), key, before)
        forget(self._modules.values())

    def _holders(self) -> Iterator[Any]:
        """The pipelines, the objects they hold besides modules, and library helpers inside those (a guider's buffer)."""
        for owner in pipelines_in(self._pipe).values():
            yield owner
            for value in list(vars(owner).values()):
                if hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)):
                    yield value
                    yield from (inner for inner in list(vars(value).values()) if is_helper(inner))


def _attributes(module: Any) -> dict[str, tuple[Any, Any]]:
    """Attributes of ``module`` besides weights, children and hooks: name -> (value, a copy of it if it is a list or dict)."""
    found = ((key, value) for key, value in vars(module).items() if key not in MODULE_ATTRIBUTES)
    return {key: (value, value.copy() if isinstance(value, (list, dict)) else None) for key, value in found}


def _restore_attribute(holder: dict[str, Any], key: str, before: Mapping[str, tuple[Any, Any]]) -> None:
    if key not in before:
        del holder[key]
        return
    holder[key], content = before[key]
    if isinstance(content, list):
        holder[key][:] = content
    elif isinstance(content, dict):
        holder[key].clear()
        holder[key].update(content)


def _on_device(value: Any, device: torch.device) -> bool:
    return isinstance(value, (torch.Tensor, list, tuple, dict)) and device_bytes(value, device) > 0


def device_bytes(value: Any, device: torch.device, besides: Any = ()) -> int:
    """Bytes on ``device`` of the storages of tensors in ``value``, without those that ``besides`` shares."""
    known = _storages(besides, device)
    return sum(nbytes for key, nbytes in _storages(value, device).items() if key not in known)


def _storages(value: Any, device: torch.device) -> dict[int, int]:
    raws = (getattr(tensor, "raw", tensor) for tensor in tensors_in(value) if tensor.device.type == device.type)
    found = (raw.untyped_storage() for raw in raws)
    return {storage._cdata: round_up(storage.nbytes(), ALLOCATION_BYTES) for storage in found}
