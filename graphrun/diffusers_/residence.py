"""Weights of an attached pipeline: in arenas as the plan lays them out, and what stays on the
device between calls. Also removes what else a call left there.

    between calls     the module's tensors are those of the arena, on the host; loaded blocks stay
    on the device, bound to nothing in a call         loaded blocks are bound to the module's
    tensors

So between calls a pipeline looks as if all of it were on the host, and may be changed. What was
written to is loaded again, and a component is laid out again when its blocks change, as when a new
kind of call shows others in it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from graphrun.diffusers_.live import pipelines_in
from graphrun.model.problem import ALLOCATION_BYTES, ComponentNumbers, Problem
from graphrun.modules.blocks import held
from graphrun.modules.dtype_variants import DtypeVariant, DtypeVariants
from graphrun.modules.memos import HeldAttributes, Owned, cached_in, lru_caches, on_device, owned
from graphrun.modules.trees import PLAIN, found_in, may_hold, replace_in, tensors_in
from graphrun.runtime.devices.device import Device
from graphrun.runtime.host import Host, layout_of
from graphrun.runtime.movers import refuse_movers
from graphrun.runtime.residency import Residency
from graphrun.units import round_up

# The hosts of all attached pipelines in this process. They give way to each other on a device.
_HOSTS: WeakSet[LiveHost] = WeakSet()
_RUNS = itertools.count(1)


class LiveHost(Host):
    """Host side of an attached pipeline: ``modules`` keep their own memory until a plan uses them,
    and then move to arenas.

    `restore` gives them memory of their own again. ``budget``: an object that hosts share whose
    weights on the device are within one budget. Components of two hosts that are one module, with
    the same blocks, are laid out once.

        begin   lay_out   make_room   wake   a run   rest
    """

    def __init__(self, modules: Mapping[str, nn.Module], device: Device, budget: object) -> None:
        refuse_movers(modules, adapters=True)
        self.modules = dict(modules)
        self.residencies: dict[str, Residency] = {}
        self.casts: dict[str, Any] = {}
        self.sources = ()
        self.dtype_variants: DtypeVariants | None = None
        self._variants = {}
        self._device, self._budget = device, budget
        self._room_bytes = self._page_bytes = 0  # `make_room` sets them for the present run
        self._numbers: dict[str, ComponentNumbers] = {}
        self.awake = False  # whether a call runs, so that loaded blocks are bound to the modules
        _HOSTS.add(self)

    def begin(self, *, changed: bool) -> None:
        """Prepares for a call: takes the components' present dtypes. ``changed``: the pipeline
        changed since the last call."""
        if not changed and self.dtype_variants is not None and self.dtype_variants.first:
            self.dtype_variants.begin()
            return
        if self.dtype_variants is not None:
            self.release()
        refuse_movers(self.modules, adapters=True)
        for name in ("memos", "_caches"):  # those of the modules before
            vars(self).pop(name, None)
        self.residencies = {
            name: residency for name, residency in self.residencies.items() if name in self.modules
        }
        self.dtype_variants = DtypeVariants(self.modules, self._leave, self._join)

    def replace_modules(self, modules: Mapping[str, nn.Module]) -> None:
        """Makes ``modules`` the components, after `restore`. Raises InputError where a new one is
        moved by something else."""
        added = {
            name: module for name, module in modules.items() if self.modules.get(name) is not module
        }
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
                self._variants[numbers.name] = numbers.variants[0]
                module = self.modules[dtype_variants[numbers.name].component]
                if not self._is_laid_out(module, numbers):
                    self.residencies[numbers.name] = self._laid_out_elsewhere(
                        module, numbers
                    ) or self._laid_out(module, numbers)
                self._place(self.residencies[numbers.name], numbers)
                self._numbers[numbers.name] = numbers
        written = {
            id(residency.module) for residency in self.residencies.values() if residency.changed()
        }
        for residency in self.residencies.values():
            if id(residency.module) in written:
                residency.release()
                residency.note_contents()

    def _place(self, residency: Residency, numbers: ComponentNumbers) -> None:
        """Evicts what another plan left on another device than that on which the component is to
        compute."""
        residency.place(numbers, self._device)

    def _is_laid_out(self, module: nn.Module, numbers: ComponentNumbers) -> bool:
        """Whether the component has the blocks of ``numbers``, and its tensors are still those that
        were laid out. Loading other weights replaces them."""
        before = self._numbers.get(numbers.name)
        same = before is not None and layout_of(before) == layout_of(numbers)
        return (
            same
            and numbers.name in self.residencies
            and self.residencies[numbers.name].holds_module()
        )

    def _laid_out_elsewhere(self, module: nn.Module, numbers: ComponentNumbers) -> Residency | None:
        """The residency of ``module``, with these blocks, that another host on the device has."""
        for host in self._others():
            if host.modules.get(numbers.name) is module and host._is_laid_out(module, numbers):
                return host.residencies[numbers.name]
        return None

    def _laid_out(self, module: nn.Module, numbers: ComponentNumbers) -> Residency:
        if numbers.name in self.residencies:
            self.residencies.pop(numbers.name).release()
        for host in self._others():
            host.release_module(module)
        trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        made = Residency(module, numbers, self._device)
        for name in trained:
            module.get_parameter(name).requires_grad_(True)
        if not self.awake:
            made.leave()
        return made

    # -- what stays on the device between calls

    def _others(self) -> list[LiveHost]:
        """The hosts at rest, besides this one, on the same device."""
        hosts = (host for host in _HOSTS if host is not self and not host.awake)
        return [host for host in hosts if host._device.memory == self._device.memory]

    def wake(self) -> None:
        """Binds the loaded blocks of the components' present variants to the modules. Call `rest`
        after the run."""
        assert self.dtype_variants is not None
        self.awake = True
        for name in self.modules:
            self._join(self.dtype_variants.now(name).name)

    def rest(self, used: Iterable[str]) -> None:
        """Gives the modules their tensors on the host; loaded blocks stay. ``used``: names of the
        components that the run used."""
        now = next(_RUNS)
        for name, residency in self.residencies.items():
            residency.leave()
            if name in used:
                residency.note_contents()
                residency.last_use = now
        self.awake = False
        if any(host.awake for host in _HOSTS if host._device.memory == self._device.memory):
            self.evict()  # inside a call of another pipeline, whose plan knows nothing of these

    def loaded(self) -> dict[str, tuple[str, ...]]:
        """By component, the paths of blocks on the device."""
        return {
            name: residency.loaded
            for name, residency in self.residencies.items()
            if residency.loaded
        }

    @functools.cached_property
    def _caches(self) -> tuple[Any, ...]:
        return lru_caches(self.modules)

    def _cached(self) -> dict[int, int]:
        """Bytes by storage of what methods of the modules cached on the device: tables of positions
        (Qwen-Image)."""
        tensors = (tensor for cache in self._caches for tensor in tensors_in(cached_in(cache)))
        return _storages(
            [tensor for tensor in tensors if self._device.holds(tensor)], self._device.torch_device
        )

    @property
    def cached_bytes(self) -> int:
        """Bytes of what methods of the modules cached on the device."""
        return sum(self._cached().values())

    def clear_memos(self) -> None:
        """Frees what modules cache on the device; but not the results of methods, where the highest
        slot leaves room for them: as ``.to(device)`` the next call, and the rest of this one, finds
        them there."""
        found = self._cached().values()
        fits = bool(found) and sum(found) + 2 * self._page_bytes * len(found) <= self._room_bytes
        stay = [id(cache) for cache in self._caches] if fits else []
        for memo in self.memos:
            if id(memo) not in stay:
                memo.cache_clear()

    def _cached_beside(self, hosts: Iterable[LiveHost]) -> int:
        """Bytes that methods of modules of ``hosts`` cached, without those that are this host's
        too: classes share them."""
        own = self._cached()
        found = {
            key: nbytes
            for host in hosts
            for key, nbytes in host._cached().items()
            if key not in own
        }
        return sum(found.values())

    def evict(self) -> None:
        """Evicts all weights from the device, and what methods cached there."""
        super().evict()
        _clear(self._caches)

    def held_bytes(self, besides: Collection[str] | None = None) -> int:
        """Bytes that this host and others at rest have on the device: weights, and what methods
        cached. ``besides``: without these components of this one, and without what its methods
        cached. What is on secondary devices does not count."""
        mine = [
            residency
            for name, residency in self.residencies.items()
            if besides is not None and name in besides
        ]
        every = (
            r
            for host in (self, *self._others())
            for r in host.residencies.values()
            if r not in mine
        )
        cached_bytes = self._cached_beside(self._others()) + (
            self.cached_bytes if besides is None else 0
        )
        return _loaded_bytes(every, self._device) + cached_bytes

    @property
    def outside_bytes(self) -> int:
        """Bytes at rest on the device that are within other budgets."""
        own = list(self.residencies.values())
        others = [host for host in self._others() if host._budget is not self._budget]
        loaded_bytes = _loaded_bytes(
            (r for host in others for r in host.residencies.values() if r not in own), self._device
        )
        return loaded_bytes + self._cached_beside(others)

    def make_room(
        self,
        peak_bytes: int,
        limit_bytes: int,
        used: Collection[str],
        secondary: int = 0,
        page_bytes: int | None = None,
    ) -> None:
        """Evicts weights of other plans so that a run fits whose components ``used`` take up to
        ``peak_bytes``, on the device or on ``secondary``.

        First those within the same budget, until all fit ``limit_bytes``; then those of other
        budgets, until the device has room. Those whose last run is longest ago give way first;
        before them, where room is short, all that methods cached. What they cache in this run may
        stay in the room that is left (`clear_memos`): each tensor with a page of ``page_bytes``
        before and after it, which it may keep reserved; None: nothing stays.
        """
        mine = [residency for name, residency in self.residencies.items() if name in used]
        device = self._device.every[secondary]
        idle: dict[bool, dict[int, Residency]] = {True: {}, False: {}}
        for host in (self, *self._others()):
            of = (
                (id(r), r)
                for r in host.residencies.values()
                if r not in mine and r.loaded_bytes(device)
            )
            idle[host._budget is self._budget].update(of)
        shared, outside = (
            idle[True].values(),
            [r for key, r in idle[False].items() if key not in idle[True]],
        )
        same = [host for host in self._others() if host._budget is self._budget and secondary == 0]

        def room_bytes() -> int:
            """That is left of the budget and of the device."""
            beside_bytes = _loaded_bytes(shared, device) + self._cached_beside(same)
            taken_bytes = device.allocated_bytes - _loaded_bytes(mine, device) - self.cached_bytes
            return (
                min(limit_bytes - beside_bytes, device.available_bytes - taken_bytes) - peak_bytes
            )

        if secondary == 0 and room_bytes() < self.cached_bytes:
            for host in (self, *self._others()):
                _clear(host._caches)
        _evict(shared, device, peak_bytes + _loaded_bytes(shared, device) - limit_bytes)
        taken_bytes = device.allocated_bytes - _loaded_bytes(mine, device)
        _evict((*shared, *outside), device, peak_bytes + taken_bytes - device.available_bytes)
        if secondary == 0:
            self._room_bytes, self._page_bytes = (
                room_bytes() if page_bytes is not None else 0,
                page_bytes or 0,
            )

    def release(self) -> None:
        """Evicts everything of these modules, also what other hosts at rest have on the device."""
        self.evict()
        for module in self.modules.values():
            for host in self._others():
                host.release_module(module)

    def release_module(self, module: nn.Module) -> None:
        """Evicts everything of ``module``."""
        for residency in self.residencies.values():
            if residency.module is module:
                residency.release()

    def _leave(self, dtype_variant: str) -> None:
        if self.awake and dtype_variant in self.residencies:
            self.residencies[dtype_variant].leave()

    def _join(self, dtype_variant: str) -> None:
        if self.awake and dtype_variant in self.residencies:
            self.residencies[dtype_variant].join()

    def match_layout(self, problem: Problem) -> None:
        """Does nothing: `lay_out` has laid out the components of ``problem`` already."""

    def restore(self) -> None:
        """Gives every weight memory of its own outside the arenas, with ``requires_grad`` as it
        was. Empties the device of them."""
        self.release()
        known = self.dtype_variants.known if self.dtype_variants is not None else {}
        for name in {known[dtype_variant].component for dtype_variant in self.residencies}:
            made: dict[int, torch.Tensor] = {}
            for child in self.modules[name].modules():
                for tensor, _, location, _ in list(held(child)):
                    location.put(made.setdefault(id(tensor), _own_copy(tensor)))
        self.residencies.clear()
        self._numbers.clear()


def _clear(caches: Iterable[Any]) -> None:
    for cache in caches:
        cache.cache_clear()


def _loaded_bytes(residencies: Iterable[Residency], device: Device) -> int:
    """Bytes on ``device``, each residency once."""
    return sum({id(of): of.loaded_bytes(device) for of in residencies}.values())


def _evict(residencies: Iterable[Residency], device: Device, excess_bytes: int) -> None:
    """Evicts blocks of ``residencies`` from ``device``, those used longest ago first, until
    ``excess_bytes`` are free there."""
    for residency in sorted(residencies, key=lambda residency: residency.last_use):
        for path in reversed(residency.loaded):
            if excess_bytes <= 0:
                return
            if residency.device_of(path).memory != device.memory:
                continue
            excess_bytes -= residency.held_bytes(path)
            residency.evict(path)


def _own_copy(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().to("cpu", copy=True)
    if isinstance(tensor, nn.Parameter):
        copied = nn.Parameter(copied, requires_grad=tensor.requires_grad)
        if tensor.device.type == "cpu":
            copied.__dict__.update(tensor.__dict__)
    return copied


class Leftovers:
    """Finds and removes what a call left on ``device`` besides weights and results, by comparison
    with the state before it.

    Tensors that a part keeps (a scheduler's timesteps) are moved to the host, and so are weights
    that a module was given during the call (by a callback that fuses projections). Attributes in
    which modules cached tensors get their value from before the call.
    """

    def __init__(
        self, pipe: Any, modules: Mapping[str, nn.Module], found: list[Owned], device: torch.device
    ) -> None:
        """``found``: the attributes of ``modules`` before the call."""
        self._pipe, self._modules, self._device = pipe, modules, device
        self.found = found  # after `clear`, those after the call
        self._weights = {id(child): {*child._parameters, *child._buffers} for _, child, _ in found}
        self._before = {id(child): HeldAttributes(child, own) for _, child, own in found}
        secondaries = (
            value
            for _, _, own in found
            for value in own.values()
            if type(value) not in PLAIN and may_hold(value)
        )
        self._secondaries = {
            id(secondary): HeldAttributes(secondary, {**vars(secondary)})
            for secondary in secondaries
        }
        self._kept: Any = WeakTensorKeyDictionary()  # used as a set; holds no tensor alive
        tensors = found_in(self._parts(), torch.Tensor)
        self._kept.update((tensor, None) for tensor in tensors if tensor.device.type == device.type)

    def clear(self) -> None:
        """Removes everything that the call put on the device."""
        moved: dict[int, torch.Tensor] = {}

        def to_host(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type != self._device.type or tensor in self._kept:
                return tensor
            return moved.setdefault(id(tensor), tensor.cpu())

        def restore(attributes: HeldAttributes, keys: Collection[str]) -> None:
            table = vars(attributes.holder)
            for key in keys:
                attributes.restore(key)
                if key in table:  # an object that was there before, which got tensors
                    table[key] = replace_in(table[key], to_host, seen)

        seen = set[int]()
        for part in self._parts():
            replace_in(part, to_host, seen)
        self.found, changed = owned(self._modules), False
        for _, child, own in self.found:
            tables: tuple[dict[str, Any], ...] = (child._parameters, child._buffers)
            for table in tables:
                for key in table.keys() - self._weights.get(id(child), ()):
                    if device_bytes(table[key], self._device):
                        table[key] = _own_copy(table[key])
            if (keys := on_device(own)) and id(child) in self._before:
                restore(self._before[id(child)], keys)
                changed = True
        for attributes in self._secondaries.values():
            restore(attributes, on_device(vars(attributes.holder)))
        if changed:
            self.found = owned(self._modules)

    def _parts(self) -> list[dict[str, Any]]:
        """The attributes of the pipelines; those of their components, which are modules, are not
        reached from them."""
        return [vars(owner) for owner in pipelines_in(self._pipe).values()]


def device_bytes(value: Any, device: torch.device, besides: Any = ()) -> int:
    """Bytes on ``device`` of the storages of tensors in ``value``, without those that ``besides``
    shares."""
    known = _storages(besides, device) if besides else {}
    return sum(nbytes for key, nbytes in _storages(value, device).items() if key not in known)


def _storages(value: Any, device: torch.device) -> dict[int, int]:
    raws = (
        getattr(tensor, "raw", tensor)
        for tensor in tensors_in(value)
        if tensor.device.type == device.type
    )
    found = (raw.untyped_storage() for raw in raws)
    return {storage._cdata: round_up(storage.nbytes(), ALLOCATION_BYTES) for storage in found}
