"""The weights of a live pipeline in host arenas, laid out as the plan at hand needs them; and what a call left on the device.

Decides nothing about when. A component is laid out anew where a new kind of call has shown other blocks in it.
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

# What every module has; none of it is a tensor that a call left.
OWN = frozenset(vars(nn.Module()))


class LiveHost(Host):
    """``modules`` where they are, until a plan uses them; then in arenas. `restore` gives them memory of their own again."""

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
        """A call comes: components are in the form that they are in now. ``changed``: so is the pipeline, since the last one."""
        if not changed and self.dtype_variants is not None and self.dtype_variants.first:
            self.dtype_variants.begin()
            return
        refuse_movers(self.modules, adapters=True)
        self.residencies = {name: residency for name, residency in self.residencies.items() if name in self.modules}
        self.dtype_variants = DtypeVariants(self.modules, self._leave, self._join)

    def adopt(self, modules: Mapping[str, nn.Module]) -> None:
        """``modules`` are the components from now on. Those that are none any more have their weights to themselves again."""
        lent = {name: module for name, module in modules.items() if self.modules.get(name) is not module}
        refuse_movers(lent, adapters=True)
        self.restore()
        self.modules, self.dtype_variants = dict(modules), None

    def arrange(self, problem: Problem, dtype_variants: Mapping[str, DtypeVariant]) -> None:
        """Every component of ``problem`` is laid out as it says, each in its form. Between runs, or with nothing on the device."""
        assert self.dtype_variants is not None
        for numbers in problem.components:
            with self.dtype_variants.within(dtype_variants[numbers.name]):
                if self._numbers.get(numbers.name) != numbers or not self._current(numbers.name):
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
        """Nothing is left to do: `arrange` has laid out what ``problem`` says."""

    def restore(self) -> None:
        """Every weight has memory of its own, outside of arenas, and may be trained if it might before."""
        for name in (
            {self.dtype_variants.known[dtype_variant].component for dtype_variant in self.residencies}
            if self.dtype_variants is not None
            else ()
        ):
            made: dict[int, torch.Tensor] = {}
            for child in self.modules[name].modules():
                for tensor, _, place, _ in list(held(child)):
                    place.put(made.setdefault(id(tensor), _own(tensor)))
        self.residencies.clear()
        self._numbers.clear()

    def _current(self, name: str) -> bool:
        """Whether the component's tensors are those that were laid out: loading other weights replaces them."""
        return name in self.residencies and self.residencies[name].holds_module()


def _own(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().to("cpu", copy=True)
    if isinstance(tensor, nn.Parameter):
        copied = nn.Parameter(copied, requires_grad=tensor.requires_grad)
        if tensor.device.type == "cpu":
            copied.__dict__.update(tensor.__dict__)
    return copied


class Leftovers:
    """What a call leaves on ``device`` outside of weights and results, found against what was there before it.

    A scheduler's timesteps go to the host, and so do weights that a module was given meanwhile (a callback that fuses projections);
    what a module has cached is forgotten, as it was before the call.
    """

    def __init__(self, pipe: Any, modules: Mapping[str, nn.Module], device: torch.device) -> None:
        self._pipe, self._modules, self._device = pipe, modules, device
        children = [child for module in modules.values() for child in module.modules()]
        helpers = (value for child in children for value in vars(child).values() if is_helper(value))
        self._weights = {child: {*child._parameters, *child._buffers} for child in children}
        self._caches = [(holder, _attributes(holder)) for holder in {id(h): h for h in (*children, *helpers)}.values()]
        self._kept: Any = WeakTensorKeyDictionary()  # a set; what the call lets go of is let go of
        held = (tensor for holder in self._holders() for value in vars(holder).values() for tensor in tensors_in(value))
        self._kept.update((tensor, None) for tensor in held if tensor.device.type == device.type)

    def clear(self) -> None:
        """Nothing that the call put on the device stays there."""
        for holder in self._holders():
            for key, value in list(vars(holder).items()):
                if _on_device(value, self._device) and not all(tensor in self._kept for tensor in tensors_in(value)):
                    vars(holder)[key] = walk(value, lambda tensor: tensor if tensor in self._kept else tensor.cpu())
        for child in (child for module in self._modules.values() for child in module.modules()):
            tables: tuple[dict[str, Any], ...] = (child._parameters, child._buffers)
            for table in tables:
                for key, tensor in list(table.items()):
                    if key not in self._weights.get(child, ()) and _on_device(tensor, self._device):
                        table[key] = _own(tensor)
        for child, before in self._caches:
            for key, value in list(vars(child).items()):
                if key not in OWN and _on_device(value, self._device):
                    _put_back(vars(child), key, before)
        forget(self._modules.values())

    def _holders(self) -> Iterator[Any]:
        """The pipelines, what they hold besides modules, and what of the libraries' own that holds in turn: a guider's buffer."""
        for owner in pipelines_in(self._pipe).values():
            yield owner
            for value in list(vars(owner).values()):
                if hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)):
                    yield value
                    yield from (inner for inner in list(vars(value).values()) if is_helper(inner))


def _attributes(module: Any) -> dict[str, tuple[Any, Any]]:
    """What ``module`` has beside weights, children and hooks: each value, and its content where that can change."""
    found = ((key, value) for key, value in vars(module).items() if key not in OWN)
    return {key: (value, value.copy() if isinstance(value, (list, dict)) else None) for key, value in found}


def _put_back(holder: dict[str, Any], key: str, before: Mapping[str, tuple[Any, Any]]) -> None:
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
    """Bytes on ``device`` of the tensors in ``value``, those of ``besides`` apart."""
    known = _storages(besides, device)
    return sum(nbytes for key, nbytes in _storages(value, device).items() if key not in known)


def _storages(value: Any, device: torch.device) -> dict[int, int]:
    raws = (getattr(tensor, "raw", tensor) for tensor in tensors_in(value) if tensor.device.type == device.type)
    found = (raw.untyped_storage() for raw in raws)
    return {storage._cdata: round_up(storage.nbytes(), ALLOCATION_BYTES) for storage in found}
