"""An offload strategy for diffusers' `ComponentsManager`, which decides by plan.

    manager.enable_auto_cpu_offload("cuda", offload_strategy=graphrun.strategy("8G"))

The manager copies a component to the device when it is called, and asks the strategy which others
leave. diffusers' default frees the smallest sufficient combination. This strategy knows the order
of uses:

    uses      te  t5  dit  vae | te  t5  dit  vae | te        a cycle has been seen: the next uses
                                 `---- matched ---'           are those after the longest match
    leave     the components whose leaving moves the fewest bytes over two rounds of these uses
              (every choice is compared; beyond `COMPARED` components: used again last). Before
              that: the fewest bytes, then least recently used

Belady's rule is this choice for components of one size. In rounds of an order, only the first ones
may move more bytes than the default: the order is then known in part, and a match of `MATCHED` uses
may go on differently.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import nn

from graphrun.errors import InputError
from graphrun.units import show_size

logger = logging.getLogger(__name__)

COMPARED = 8
"""With more components on the device, not every choice is compared."""
MATCHED = 2
"""Fewer uses in the order of earlier ones tell nothing: one component is in many places."""
REMEMBERED = 512  # uses, without repetitions in a row


class UserOffloadHook(Protocol):
    """A component on the device, as `ComponentsManager` names it."""

    model_id: str
    model: nn.Module


class OffloadStrategy:
    """Choose which components of a `ComponentsManager` leave the device (`graphrun.strategy`)."""

    def __init__(self, budget_bytes: int, reserve_bytes: int | None) -> None:
        self._budget_bytes, self._is_fixed = budget_bytes, reserve_bytes is not None
        self._reserve_bytes = budget_bytes // 4 if reserve_bytes is None else reserve_bytes
        self._uses = deque[str](maxlen=REMEMBERED)
        self._rooms, self._peaks = dict[str, int](), dict[str, int]()
        self._modules = dict[str, nn.Module]()
        self._watched: WeakSet[Any] = WeakSet()
        self._device = torch.device("cpu")
        self._peak_bytes = 0
        self._use_count = self._loaded_count = self._loaded_bytes = self._evicted_bytes = 0

    def __call__(
        self,
        hooks: Sequence[UserOffloadHook],
        model_id: str,
        model: nn.Module,
        execution_device: torch.device,
    ) -> list[Any]:
        """Return those of ``hooks``, components on the device, that leave before ``model`` is
        copied there."""
        self._device = torch.device(execution_device)
        if (hook := getattr(model, "_hf_hook", None)) not in self._watched:
            self._watch_all(model_id, model, hook)
            self._use(model_id)
        sizes = {other.model_id: weight_bytes(other.model) for other in hooks}
        sizes[model_id] = _bytes_to_copy(model)
        resident = [name for name in self._least_recent(sizes) if name != model_id]
        evicted = self._evicted(model_id, resident, sizes)
        if sizes[model_id] > self._budget_bytes:
            logger.warning(
                "%s takes %s, more than the budget of %s: graphrun.attach(pipe, vram=...) streams "
                "it block by block",
                model_id,
                show_size(sizes[model_id]),
                show_size(self._budget_bytes),
            )
        self._loaded_count += 1
        self._loaded_bytes += sizes[model_id]
        self._evicted_bytes += sum(sizes[name] for name in evicted)
        return [other for other in hooks if other.model_id in evicted]

    def report(self) -> str:
        """Return what the strategy did so far, as a line: uses, copies in bytes, and the room that
        it leaves for activations."""
        room = max(map(self._room, self._modules), default=self._reserve_bytes)
        return (
            f"{self._use_count} uses, {self._loaded_count} of them of components that were not on "
            f"the device: {show_size(self._loaded_bytes)} copied there, "
            f"{show_size(self._evicted_bytes)} back; {show_size(room)} of "
            f"{show_size(self._budget_bytes)} for activations"
        )

    def _watch_all(self, model_id: str, model: nn.Module, hook: Any) -> None:
        """Note from now on each use of ``model``, and of the components that share its device."""
        if not hasattr(hook, "other_hooks"):
            raise InputError(
                f"{model_id}: is no component of a ComponentsManager that offloads: pass "
                "graphrun.strategy(...) to its enable_auto_cpu_offload(offload_strategy=...)"
            )
        hooks = [(model_id, model, hook)]
        hooks += [(other.model_id, other.model, other.hook) for other in hook.other_hooks or ()]
        self._modules = {name: module for name, module, _ in hooks}
        self._peak_bytes = self._peak() or 0
        for name, _, component_hook in hooks:
            self._watch(name, component_hook)

    def _watch(self, name: str, hook: Any) -> None:
        pre_forward = hook.pre_forward

        def noting(*args: Any, **kwargs: Any) -> Any:
            self._use(name)
            return pre_forward(*args, **kwargs)

        # the manager drops its hooks, and with them this, when offloading is disabled
        hook.pre_forward = noting
        self._watched.add(hook)

    def _use(self, name: str) -> None:
        """Note that ``name`` is used now."""
        self._measure()
        self._use_count += 1
        if not self._uses or self._uses[-1] != name:
            self._uses.append(name)

    def _measure(self) -> None:
        """Update the room of the component that was used last.

        The device reports its peak since the start. If it has risen, the last use took the
        difference to the weights there; if not, at most that. Without such a report nothing
        changes. The peak is not reset, since it is the program's.
        """
        peak_bytes = self._peak()
        if self._is_fixed or not self._uses or peak_bytes is None:
            return
        name, weights = self._uses[-1], sum(map(weight_bytes, self._resident_modules()))
        room = max(0, peak_bytes - weights)
        if peak_bytes > self._peak_bytes:
            self._peak_bytes = peak_bytes
            self._peaks[name] = max(room, self._peaks.get(name, 0))
            self._rooms[name] = self._peaks[name]
        else:
            self._rooms[name] = max(self._peaks.get(name, 0), min(room, self._room(name)))

    def _resident_modules(self) -> Iterator[nn.Module]:
        for module in self._modules.values():
            tensor = next(module.parameters(), None)
            if tensor is not None and tensor.device.type == self._device.type:
                yield module

    def _peak(self) -> int | None:
        read_peak: Any = getattr(
            torch.get_device_module(self._device), "max_memory_allocated", None
        )
        return None if read_peak is None else int(read_peak(self._device))

    def _room(self, name: str) -> int:
        """Return the bytes that are left free beyond weights while ``name`` is used."""
        return self._rooms.get(name, self._reserve_bytes)

    def _fits(self, names: Sequence[str], sizes: Mapping[str, int]) -> bool:
        room = max(map(self._room, names), default=0)
        return sum(sizes[name] for name in names) + room <= self._budget_bytes

    def _least_recent(self, names: Mapping[str, int]) -> list[str]:
        """Return ``names``, the least recently used one first."""
        places = {name: place for place, name in enumerate(self._uses)}
        return sorted(names, key=lambda name: places.get(name, -1))

    def _evicted(self, name: str, resident: Sequence[str], sizes: Mapping[str, int]) -> set[str]:
        """Return which ``resident`` components leave for ``name``."""
        future = [other for other in next_uses(list(self._uses)) if other in self._modules]
        sizes = {**{other: _bytes_to_copy(self._modules[other]) for other in future}, **sizes}
        if len({*resident, *future}) > COMPARED:
            return self._used_last(name, resident, sizes, future)
        # components on the device -> bytes moved until then, those that leave now
        states: dict[frozenset[str], tuple[int, tuple[str, ...]]] = {frozenset(resident): (0, ())}
        for number, user in enumerate((name, *future)):
            next_states = dict[frozenset[str], tuple[int, tuple[str, ...]]]()
            for residents, (moved_bytes, first) in states.items():
                for leaving in self._choices(user, residents, sizes):
                    cost = moved_bytes + sum(sizes[other] for other in leaving)
                    cost += 0 if user in residents else sizes[user]
                    next_residents = residents - set(leaving) | {user}
                    choice = (cost, leaving if number == 0 else first)
                    if next_residents not in next_states or cost < next_states[next_residents][0]:
                        next_states[next_residents] = choice
            states = next_states
        return set(min(states.values(), key=lambda state: state[0])[1])

    def _choices(
        self, user: str, residents: frozenset[str], sizes: Mapping[str, int]
    ) -> Iterator[tuple[str, ...]]:
        """Yield the smallest sets of ``residents`` whose leaving makes ``user`` fit; all of them if
        none suffices."""
        if user in residents:
            yield ()
            return
        candidates = self._least_recent(dict.fromkeys(residents, 0))
        sufficient = list[set[str]]()
        for count in range(len(candidates) + 1):
            for leaving in combinations(candidates, count):
                if any(smaller <= set(leaving) for smaller in sufficient):
                    continue
                if self._fits([*(residents - set(leaving)), user], sizes) or len(leaving) == len(
                    residents
                ):
                    sufficient.append(set(leaving))
                    yield leaving

    def _used_last(
        self, name: str, resident: Sequence[str], sizes: Mapping[str, int], future: Sequence[str]
    ) -> set[str]:
        """Return the components that leave by Belady's rule: those that are used again last."""
        leaving = set[str]()
        for other in sorted(
            resident, key=lambda other: -future.index(other) if other in future else -len(future)
        ):
            if self._fits([*({*resident} - leaving), name], sizes):
                break
            leaving.add(other)
        return leaving


def next_uses(uses: Sequence[str]) -> list[str]:
    """Return the uses that follow ``uses``, if they go on as after their longest match: two rounds.

    The match is of the last uses, at least `MATCHED`, earlier in ``uses``. Without one: empty.
    """
    best, begin = 0, 0
    for end in range(len(uses) - 1, 0, -1):
        length = 0
        while length < end and uses[end - 1 - length] == uses[-1 - length]:
            length += 1
        if length > best:
            best, begin = length, end
    return list(uses[begin:]) * 2 if best >= MATCHED else []


def weight_bytes(module: nn.Module) -> int:
    """Return the bytes of the distinct parameters and buffers of ``module``."""
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


def _bytes_to_copy(module: nn.Module) -> int:
    """Return the bytes that the manager copies to the device for ``module``: none if diffusers'
    group offloading copies its blocks."""
    from diffusers.hooks.group_offloading import _is_group_offload_enabled

    return 0 if _is_group_offload_enabled(module) else weight_bytes(module)
