"""Weights of an attached pipeline: their layout in arenas, and what stays on the device.

    between calls   the module's tensors are arena tensors on the host; loaded blocks stay on the
                    device, not reachable from the module
    in a call       loaded blocks are bound to the module's tensors

On unified memory there are no arenas: the host tensors are the caller's own, and the mapped ones
(`graphrun.modules.mapped`) are blocks.

So between calls the whole pipeline appears to be on the host, and may be changed. Changed weights
are loaded again. A component gets a new layout when its blocks change, for example when a new kind
of call finds other blocks in it. `Leftovers` removes the tensors that a call left on the device.
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
from graphrun.modules.blocks import direct_tensors
from graphrun.modules.dtype_variants import DtypeVariant, DtypeVariants
from graphrun.modules.mapped import MappedTensors, MappedWriter
from graphrun.modules.memos import (
    HeldAttributes,
    Owned,
    attributes_of,
    cached_in,
    lru_caches,
    on_device,
)
from graphrun.modules.replica import can_be_replicated, refresh, replica
from graphrun.modules.trees import PLAIN, found_in, may_hold, replace_in, tensors_in
from graphrun.runtime.devices.device import Device
from graphrun.runtime.host import Host, layout_of
from graphrun.runtime.movers import refuse_movers
from graphrun.runtime.residency import Residency
from graphrun.units import round_up, show_size

# the hosts of all attached pipelines in this process, which evict each other's weights
_HOSTS: WeakSet[LiveHost] = WeakSet()
_RUNS = itertools.count(1)


class LiveHost(Host):
    """Host side of an attached pipeline.

    ``modules`` stay in their own memory until a plan uses them, and then move to arenas; `restore`
    undoes this. ``budget``: any object; hosts with the same object share one device budget. If two
    hosts have the same module with the same blocks, they share its layout.

    ``mapped_tensors``: on unified memory, the tensors mapped from files when the host was made, or
    at the last `begin`.

    Order of calls: `begin`, `lay_out`, `make_room`, `bind_loaded_blocks`, a run,
    `bind_host_tensors`.
    """

    def __init__(self, modules: Mapping[str, nn.Module], device: Device, budget: object) -> None:
        refuse_movers(modules, adapters=True)
        self.modules = dict(modules)
        self.residencies: dict[str, Residency] = {}
        self.casts: dict[str, Any] = {}
        self.copies = {}  # replicas of modules, by name (`graphrun.model.copies`)
        self.sources = ()
        self.dtype_variants: DtypeVariants | None = None
        self._variants = {}
        self._device, self._budget = device, budget
        self._room_bytes = self._page_bytes = 0  # set by `make_room` for each run
        self._numbers: dict[str, ComponentNumbers] = {}
        self.awake = False  # whether a call runs, with loaded blocks bound to the modules
        self.mapped_tensors = MappedTensors(self.modules.values()) if device.unified else None
        _HOSTS.add(self)

    def find_mapped(self) -> bool:
        """Update the tensors mapped from files, on unified memory. Return whether they changed. If
        so, drop the layouts. Raises InputError if a file that is used was changed or deleted."""
        if self.mapped_tensors is None:
            return False
        self.mapped_tensors.refuse_changed_files(self.modules)
        if (mapped_tensors := MappedTensors(self.modules.values())) == self.mapped_tensors:
            return False
        self.restore()
        self.mapped_tensors = mapped_tensors
        return True

    def unmapped_text(self) -> str:
        """Return which components stay in memory, since their parameters are not mapped from files.

        Components with less than a hundredth of such bytes are omitted. "" unless device and host
        are one memory.
        """
        if (mapped_tensors := self.mapped_tensors) is None:
            return ""
        sizes = {
            name: mapped_tensors.unmapped_bytes(module) for name, module in self.modules.items()
        }
        sizes = {
            name: nbytes
            for name, nbytes in sizes.items()
            if 100 * nbytes > sum(tensor.nbytes for tensor in self.modules[name].parameters())
        }
        if not sizes:
            return ""
        return (
            f"{show_size(sum(sizes.values()))} of {', '.join(sizes)} stay in memory, since no file "
            "has these weights as they are; to read them from files, call "
            "pipe.save_pretrained(FOLDER) and load the pipeline from FOLDER in the same dtype"
        )

    def begin(self, *, has_changed: bool) -> None:
        """Prepare for a call: read the components' present dtypes. ``has_changed``: the pipeline
        changed since the last call."""
        if not has_changed and self.dtype_variants is not None and self.dtype_variants.first:
            self.dtype_variants.begin()
            return
        if self.dtype_variants is not None:
            self.release()
        refuse_movers(self.modules, adapters=True)
        vars(self).pop("_caches", None)  # of the previous modules
        self._drop_copies()
        self.residencies = {
            name: residency for name, residency in self.residencies.items() if name in self.modules
        }
        self.dtype_variants = DtypeVariants(self.modules, self._leave, self._join)

    def replace_modules(self, modules: Mapping[str, nn.Module]) -> None:
        """Restore, then make ``modules`` the components. Raises InputError if other code moves a
        new component between devices."""
        new_modules = {
            name: module for name, module in modules.items() if self.modules.get(name) is not module
        }
        refuse_movers(new_modules, adapters=True)
        self.restore()
        self.modules, self.dtype_variants = dict(modules), None

    def lay_out(self, problem: Problem, dtype_variants: Mapping[str, DtypeVariant]) -> None:
        """Lay out every component of ``problem`` in arenas, each in its dtype variant. Call this
        between runs, or with an empty device."""
        assert self.dtype_variants is not None
        copies = [numbers for numbers in problem.components if numbers.copy_of]
        for numbers in problem.components:
            if numbers in copies:
                continue
            with self.dtype_variants.using(dtype_variants[numbers.name]):
                self._variants[numbers.name] = numbers.variants[0]
                module = self.modules[dtype_variants[numbers.name].component]
                if not self._is_laid_out(numbers, self.mapped_tensors):
                    self.residencies[numbers.name] = self._shared_residency(
                        module, numbers
                    ) or self._new_residency(module, numbers)
                self._place(self.residencies[numbers.name], numbers)
                self._numbers[numbers.name] = numbers
        for numbers in copies:
            self._add_copy(numbers)
        written_ids = {
            id(residency.source_module)
            for residency in self.residencies.values()
            if residency.changed()
        }
        for residency in self.residencies.values():
            if id(residency.source_module) in written_ids:
                residency.release()
                residency.note_contents()

    def copyable(self, used_variants: Iterable[DtypeVariant] = ()) -> list[str]:
        """Return the components of which a plan may have copies on secondary devices.

        None that a call with ``used_variants`` casts: the variants of a component are one module.
        """
        cast_names = {
            variant.component for variant in used_variants if variant.name != variant.component
        }
        return [
            name
            for name, module in self.modules.items()
            if name not in cast_names and can_be_replicated(module)
        ]

    def _add_copy(self, numbers: ComponentNumbers) -> None:
        """Add the copy ``numbers`` of a component, or prepare the one from an earlier run."""
        original, residency = self.residencies[numbers.copy_of], self.residencies.get(numbers.name)
        if residency is not None and residency.backing_store is original.backing_store:
            self._place(residency, numbers)
        else:
            if residency is not None:
                residency.release()
            self.copies[numbers.name] = replica(original.module)
            self._forget_memos()
            self.residencies[numbers.name] = residency = Residency(
                self.copies[numbers.name], numbers, self._device, original=original
            )
            residency.deactivate()
        self._variants[numbers.name] = numbers.variants[0]
        self.refresh_copies()

    def refresh_copies(self) -> None:
        """Give the copies the attributes of their originals, in place of what a call left there."""
        for name, module in self.copies.items():
            refresh(module, self.residencies[name].source_module)

    def _drop_copies(self) -> None:
        for name in self.copies:
            self.residencies.pop(name).release()
        self.copies.clear()
        self._forget_memos()

    def _place(self, residency: Residency, numbers: ComponentNumbers) -> None:
        """Evict blocks that another plan left on a device where the component does not compute."""
        residency.place(numbers, self._device)

    def _is_laid_out(self, numbers: ComponentNumbers, mapped_tensors: MappedTensors | None) -> bool:
        """Return whether the component's layout has the blocks of ``numbers`` and its own tensors.
        Loading other weights replaces the tensors. ``mapped_tensors``: mapped now."""
        previous = self._numbers.get(numbers.name)
        is_same_layout = previous is not None and layout_of(previous) == layout_of(numbers)
        return (
            is_same_layout
            and numbers.name in self.residencies
            and self.residencies[numbers.name].holds_module(mapped_tensors)
        )

    def _shared_residency(self, module: nn.Module, numbers: ComponentNumbers) -> Residency | None:
        """Return another host's residency of ``module`` with these blocks, or None."""
        for host in self._other_hosts():
            if host.modules.get(numbers.name) is module and host._is_laid_out(
                numbers, self.mapped_tensors
            ):
                return host.residencies[numbers.name]
        return None

    def _new_residency(self, module: nn.Module, numbers: ComponentNumbers) -> Residency:
        if numbers.name in self.residencies:
            self.residencies.pop(numbers.name).release()
        for host in self._other_hosts():
            host.release_module(module)
        writer = None if self.mapped_tensors is None else MappedWriter(self.mapped_tensors)
        residency = Residency(module, numbers, self._device, writer)
        if not self.awake:
            residency.deactivate()
        return residency

    # -- what stays on the device between calls

    def _other_hosts(self) -> list[LiveHost]:
        """Return the other hosts at rest on the same device."""
        hosts = (host for host in _HOSTS if host is not self and not host.awake)
        return [host for host in hosts if host._device.memory == self._device.memory]

    def bind_loaded_blocks(self) -> None:
        """Bind loaded blocks of the components' present variants to the modules. Call
        `bind_host_tensors` after the run."""
        assert self.dtype_variants is not None
        self.awake = True
        for name in self.modules:
            self._join(self.dtype_variants.current(name).name)
        for name in self.copies:
            self._join(name)

    def bind_host_tensors(self, component_names: Iterable[str]) -> None:
        """Give the modules their host tensors; loaded blocks stay on the device.
        ``component_names``: used in the run."""
        run_number = next(_RUNS)
        for name, residency in self.residencies.items():
            residency.deactivate()
            if name in component_names:
                residency.note_contents()
                residency.last_use = run_number
        self.awake = False
        if any(host.awake for host in _HOSTS if host._device.memory == self._device.memory):
            self.evict()  # inside a call of another pipeline, whose plan does not count them

    def loaded(self) -> dict[str, tuple[str, ...]]:
        """Return the paths of the blocks on the device, by component."""
        return {
            name: residency.loaded_paths
            for name, residency in self.residencies.items()
            if residency.loaded_paths
        }

    @functools.cached_property
    def _caches(self) -> tuple[Any, ...]:
        return lru_caches(self.modules)

    def _cached_storages(self) -> dict[int, int]:
        """Return the bytes of tensors that methods cached on the device, by storage."""
        tensors = (tensor for cache in self._caches for tensor in tensors_in(cached_in(cache)))
        return _storages([tensor for tensor in tensors if self._device.holds(tensor)], self._device)

    @property
    def cached_bytes(self) -> int:
        """Bytes of the tensors that the modules' methods cached on the device."""
        return sum(self._cached_storages().values())

    def clear_memos(self) -> None:
        """Free what modules cache on the device.

        Cached results of methods stay if they fit next to the plan's peak, or are in the process's
        own memory: this call and the next ones then reuse them, as without graphrun.
        """
        sizes = self._cached_storages().values()
        if self._device.unified and not sizes:
            return
        fits = bool(sizes) and sum(sizes) + 2 * self._page_bytes * len(sizes) <= self._room_bytes
        kept_ids = [id(cache) for cache in self._caches] if fits else []
        for memo in self.memos:
            if id(memo) not in kept_ids:
                memo.cache_clear()

    def _other_cached_bytes(self, hosts: Iterable[LiveHost]) -> int:
        """Return the bytes that methods of ``hosts``' modules cached, without this host's caches.
        All hosts with modules of a class share its cache."""
        own_storages = self._cached_storages()
        storage_bytes = {
            key: nbytes
            for host in hosts
            for key, nbytes in host._cached_storages().items()
            if key not in own_storages
        }
        return sum(storage_bytes.values())

    def evict(self) -> None:
        """Evict all weights and all cached results of methods from the device."""
        super().evict()
        if not self._device.unified or self._cached_storages():
            _clear(self._caches)

    def held_bytes(self, excluded_names: Collection[str] | None = None) -> int:
        """Return the bytes on the device of this host and others at rest: weights and caches.

        ``excluded_names``: omit these components of this host, and all its caches. Bytes on
        secondary devices do not count.
        """
        excluded_residencies = [
            residency
            for name, residency in self.residencies.items()
            if excluded_names is not None and name in excluded_names
        ]
        residencies = (
            r
            for host in (self, *self._other_hosts())
            for r in host.residencies.values()
            if r not in excluded_residencies
        )
        cached_bytes = self._other_cached_bytes(self._other_hosts()) + (
            self.cached_bytes if excluded_names is None else 0
        )
        return _loaded_bytes(residencies, self._device) + cached_bytes

    @property
    def outside_bytes(self) -> int:
        """Bytes on the device of hosts at rest with other budgets."""
        own_residencies = list(self.residencies.values())
        other_hosts = [host for host in self._other_hosts() if host._budget is not self._budget]
        loaded_bytes = _loaded_bytes(
            (
                r
                for host in other_hosts
                for r in host.residencies.values()
                if r not in own_residencies
            ),
            self._device,
        )
        return loaded_bytes + self._other_cached_bytes(other_hosts)

    def make_room(
        self,
        peak_bytes: int,
        limit_bytes: int,
        component_names: Collection[str],
        secondary: int = 0,
        page_bytes: int | None = None,
    ) -> None:
        """Evict weights of other plans so that a run of ``component_names`` with this peak fits.

        ``secondary``: number of the secondary device to make room on; 0 is the main device.

        Order: first all cached results of methods, if room is short; then weights of the same
        budget, until all fit ``limit_bytes``; then weights of other budgets, until the device has
        room. The least recently used weights go first.

        Results that methods cache in this run may stay in the free room (`clear_memos`). Each such
        tensor may also keep a page of ``page_bytes`` before and after it reserved. None: no cached
        result stays.
        """
        own_residencies = [
            residency for name, residency in self.residencies.items() if name in component_names
        ]
        device = self._device.all_devices[secondary]
        idle: dict[bool, dict[int, Residency]] = {True: {}, False: {}}
        for host in (self, *self._other_hosts()):
            candidates = (
                (id(r), r)
                for r in host.residencies.values()
                if r not in own_residencies and r.loaded_bytes(device)
            )
            idle[host._budget is self._budget].update(candidates)
        same_budget, other_budgets = (
            idle[True].values(),
            [r for key, r in idle[False].items() if key not in idle[True]],
        )
        budget_hosts = [
            host for host in self._other_hosts() if host._budget is self._budget and secondary == 0
        ]

        def free_bytes() -> int:
            """Return the bytes left of the budget and of the device."""
            other_bytes = _loaded_bytes(same_budget, device) + self._other_cached_bytes(
                budget_hosts
            )
            taken_bytes = (
                device.allocated_bytes - _loaded_bytes(own_residencies, device) - self.cached_bytes
            )
            return min(limit_bytes - other_bytes, device.available_bytes - taken_bytes) - peak_bytes

        if secondary == 0 and not self._device.unified and free_bytes() < self.cached_bytes:
            for host in (self, *self._other_hosts()):
                _clear(host._caches)
        _evict(same_budget, device, peak_bytes + _loaded_bytes(same_budget, device) - limit_bytes)
        taken_bytes = device.allocated_bytes - _loaded_bytes(own_residencies, device)
        _evict(
            (*same_budget, *other_budgets),
            device,
            peak_bytes + taken_bytes - device.available_bytes,
        )
        if secondary == 0:
            self._room_bytes, self._page_bytes = (
                free_bytes() if page_bytes is not None else 0,
                page_bytes or 0,
            )

    def release(self) -> None:
        """Evict all weights of these modules, also from other hosts at rest."""
        self.evict()
        for module in self.modules.values():
            for host in self._other_hosts():
                host.release_module(module)

    def release_module(self, module: nn.Module) -> None:
        for residency in self.residencies.values():
            if residency.source_module is module:
                residency.release()

    def _leave(self, dtype_variant: str) -> None:
        if self.awake and dtype_variant in self.residencies:
            self.residencies[dtype_variant].deactivate()

    def _join(self, dtype_variant: str) -> None:
        if self.awake and dtype_variant in self.residencies:
            self.residencies[dtype_variant].activate()

    def match_layout(self, problem: Problem) -> None:
        """No-op: `lay_out` has already laid out the components of ``problem``."""

    def restore(self) -> None:
        """Give every weight its own memory outside the arenas, and evict all weights.
        ``requires_grad`` stays. On unified memory every weight stays where it is."""
        self.release()
        self._drop_copies()
        if self._device.unified:
            self.residencies.clear()
            self._numbers.clear()
            return
        dtype_variants = self.dtype_variants.variants if self.dtype_variants is not None else {}
        for name in {dtype_variants[dtype_variant].component for dtype_variant in self.residencies}:
            copies: dict[int, torch.Tensor] = {}
            for child in self.modules[name].modules():
                for tensor, _, location, _ in list(direct_tensors(child)):
                    location.assign(copies.setdefault(id(tensor), _own_copy(tensor)))
        self.residencies.clear()
        self._numbers.clear()


def _clear(caches: Iterable[Any]) -> None:
    for cache in caches:
        cache.cache_clear()


def _loaded_bytes(residencies: Iterable[Residency], device: Device) -> int:
    """Return the bytes of ``residencies`` on ``device``, counting each once."""
    return sum(
        {id(residency): residency.loaded_bytes(device) for residency in residencies}.values()
    )


def _evict(residencies: Iterable[Residency], device: Device, excess_bytes: int) -> None:
    """Evict blocks from ``device``, least recently used first, until ``excess_bytes`` are free."""
    for residency in sorted(residencies, key=lambda residency: residency.last_use):
        for path in reversed(residency.loaded_paths):
            if excess_bytes <= 0:
                return
            if residency.device_of(path).memory != device.memory:
                continue
            excess_bytes -= residency.allocated_bytes(path)
            residency.evict(path)


def _own_copy(tensor: torch.Tensor) -> torch.Tensor:
    twin = tensor.detach().to("cpu", copy=True)
    if isinstance(tensor, nn.Parameter):
        twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
        if tensor.device.type == "cpu":
            twin.__dict__.update(tensor.__dict__)
    return twin


class Leftovers:
    """Removes tensors that a call left on ``device``, other than planned weights and results.

    On unified memory only views of weights count (`Device.holds`); they are copied. Tensors in
    parts (a scheduler's timesteps) move to the host. So do weights that a module got during the
    call, for example from a callback that fuses projections. Attributes in which modules cached
    tensors get back their value from before the call.
    """

    def __init__(
        self,
        pipe: Any,
        modules: Mapping[str, nn.Module],
        owned_modules: list[Owned],
        device: Device,
    ) -> None:
        """``owned_modules``: the attributes of ``modules`` before the call."""
        self._pipe, self._modules, self._device = pipe, modules, device
        self.owned_modules = owned_modules  # after `clear`: the attributes after the call
        self._weights = {
            id(child): {*child._parameters, *child._buffers} for _, child, _ in owned_modules
        }
        self._held_attributes = {
            id(child): HeldAttributes(child, attributes) for _, child, attributes in owned_modules
        }
        helpers = (
            value
            for _, _, attributes in owned_modules
            for value in attributes.values()
            if type(value) not in PLAIN and may_hold(value)
        )
        self._helper_attributes = {
            id(helper): HeldAttributes(helper, {**vars(helper)}) for helper in helpers
        }
        self._previous_tensors: Any = WeakTensorKeyDictionary()  # used as a set; weak
        tensors = found_in(self._parts(), torch.Tensor)
        self._previous_tensors.update(
            (tensor, None) for tensor in tensors if _is_on(tensor, device)
        )

    def clear(self) -> None:
        """Remove everything that the call left on the device."""
        host_copies: dict[int, torch.Tensor] = {}

        def to_host(tensor: torch.Tensor) -> torch.Tensor:
            if not _is_on(tensor, self._device) or tensor in self._previous_tensors:
                return tensor
            return host_copies.setdefault(id(tensor), tensor.to("cpu", copy=True))

        def restore(attributes: HeldAttributes, keys: Collection[str]) -> None:
            table = vars(attributes.holder)
            for key in keys:
                attributes.restore(key)
                if key in table:  # an older object that now has tensors
                    table[key] = replace_in(table[key], to_host, visited)

        def names_on_device(attributes: Mapping[str, Any]) -> list[str]:
            return on_device(attributes, lambda tensor: _is_on(tensor, self._device))

        visited = set[int]()
        for part in self._parts():
            replace_in(part, to_host, visited)
        self.owned_modules, has_changed = attributes_of(self._modules), False
        for _, child, own_attributes in self.owned_modules:
            tables: tuple[dict[str, Any], ...] = (child._parameters, child._buffers)
            for table in tables:
                for key in table.keys() - self._weights.get(id(child), ()):
                    if device_bytes(table[key], self._device):
                        table[key] = _own_copy(table[key])
            if (keys := names_on_device(own_attributes)) and id(child) in self._held_attributes:
                restore(self._held_attributes[id(child)], keys)
                has_changed = True
        for attributes in self._helper_attributes.values():
            restore(attributes, names_on_device(vars(attributes.holder)))
        if has_changed:
            self.owned_modules = attributes_of(self._modules)

    def _parts(self) -> list[dict[str, Any]]:
        """Return the attributes of the pipelines, without the attributes of their components."""
        return [vars(owner) for owner in pipelines_in(self._pipe).values()]


def _is_on(tensor: torch.Tensor, device: Device) -> bool:
    """Return whether ``tensor`` is on a device of the kind of ``device``, and not on the host."""
    kind = device.torch_device.type
    return device.holds(tensor) if device.unified else tensor.device.type == kind


def device_bytes(value: Any, device: Device, excluded: Any = ()) -> int:
    """Return the bytes of tensor storages in ``value`` on ``device``, without ``excluded`` ones."""
    excluded_storages = _storages(excluded, device) if excluded else {}
    return sum(
        nbytes for key, nbytes in _storages(value, device).items() if key not in excluded_storages
    )


def _storages(value: Any, device: Device) -> dict[int, int]:
    raws = (
        getattr(tensor, "raw", tensor) for tensor in tensors_in(value) if _is_on(tensor, device)
    )
    storages = (raw.untyped_storage() for raw in raws)
    return {storage._cdata: round_up(storage.nbytes(), ALLOCATION_BYTES) for storage in storages}
