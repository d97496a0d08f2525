"""Device assignments, the columns of the master program: stages on a device or a team of a host.

The planner prices an assignment only when its lower bound shows that it may be chosen.

    share of the host's memory    1      whole plan: its RAM and its seconds
                                  1/2    the largest of SHARES below the used share: less RAM,
                                         not faster
                                  ...    until no plan fits
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, combinations_with_replacement
from typing import Any, NamedTuple

from graphrun import api
from graphrun.batch.schedule import segment_of
from graphrun.cluster.machines import Cluster
from graphrun.cluster.placement import Column, StageSpan, column_of, parts_of, separable
from graphrun.disk_store import store_in
from graphrun.graph.graph import Graph
from graphrun.model.choices import use_with
from graphrun.model.hardware import Hardware
from graphrun.model.problem import ComponentNumbers, Problem, Secondary, Use, ValueNumbers, Variant
from graphrun.store import fitting_for

# of a host's RAM and page-locked RAM, for one device assignment
SHARES = (
    1.0,
    3 / 4,
    1 / 2,
    1 / 3,
    1 / 4,
    1 / 8,
)
TOGETHER = 4  # most devices of a host in one device assignment
MOST_APART = 5  # stages of a graph; with more, a device gets consecutive stages only
# devices of a cluster; with more, a device gets consecutive stages only: with many devices,
# separate ones can run the first and the last stages
MOST_DEVICES_APART = 32
MOST_KINDS = 40  # of devices and teams of a host; with more, teams are smaller, but at least pairs


class DeviceClass(NamedTuple):
    """Equal devices: hardware, VRAM budget, and RAM and page-locked RAM (None: as RAM) of the host.
    ``secondaries``: the further devices of a team."""

    hardware: Hardware
    vram_bytes: int
    ram_bytes: int
    pinned_bytes: int | None
    secondaries: tuple[Secondary, ...] = ()

    @property
    def members(self) -> tuple[DeviceClass, ...]:
        """The class of each device of the team, the main one first."""
        secondary_kinds = (
            self._replace(
                hardware=secondary.hardware, vram_bytes=secondary.budget_bytes, secondaries=()
            )
            for secondary in self.secondaries
        )
        return self._replace(secondaries=()), *secondary_kinds


def kinds_with_teams(counts: Mapping[DeviceClass, int], max_size: int) -> list[DeviceClass]:
    """Return the classes of single devices in a host, and of teams of up to ``max_size`` devices.
    ``counts``: the host's devices of each class."""
    kinds = list(counts)
    for size in range(2, max_size + 1):
        teams = [kind for main in counts for kind in _teams(main, counts, size)]
        if size > 2 and len(kinds) + len(teams) > MOST_KINDS:
            break
        kinds += teams
    return kinds


def _teams(
    main: DeviceClass, counts: Mapping[DeviceClass, int], size: int
) -> Iterator[DeviceClass]:
    for secondaries in combinations_with_replacement(counts, size - 1):
        is_uniform = all(
            secondary.hardware.device == main.hardware.device for secondary in secondaries
        )
        if is_uniform and all(
            count <= counts[kind] for kind, count in Counter((main, *secondaries)).items()
        ):
            yield main._replace(
                secondaries=tuple(
                    Secondary(secondary.hardware, secondary.vram_bytes) for secondary in secondaries
                )
            )


def kinds_of(cluster: Cluster) -> dict[str, DeviceClass]:
    """Return the class of each device of ``cluster``, by the device's name."""
    return {
        device.name: DeviceClass(
            device.hardware, device.vram_bytes, host.ram_bytes, host.pinned_bytes
        )
        for host in cluster.hosts
        for device in host.devices
    }


@dataclass(frozen=True, slots=True)
class Option:
    """A device assignment of ``parts`` to a device class, within a ``share`` of the host's memory.

    A run starts after ``ahead_seconds`` and takes ``seconds`` once its values have arrived. Without
    a ``column`` the seconds are lower bounds, and the bytes are 0.
    """

    parts: tuple[StageSpan, ...]
    share: float
    seconds: float
    ahead_seconds: float = 0.0
    column: Column | None = None

    @property
    def ram_bytes(self) -> int:
        return self.column.ram_bytes if self.column is not None else 0

    @property
    def pinned_bytes(self) -> int:
        return self.column.pinned_bytes if self.column is not None else 0


class Pricing:
    """The options of each device class for ``stages``.

    ``price(kind, stages, share)`` returns the device assignment of the best plan within a share of
    the host's memory; None if nothing fits. ``lower_bound(kind, stage, share)`` returns seconds
    that no plan within that share can undercut. ``cold``: an item costs as much as a first item.
    ``whole``: all stages together are the only choice. ``max_team``: the most devices of a host in
    one assignment. ``has_gaps``: a device may run parts that are not consecutive, if ``values``
    allow it (`graphrun.cluster.placement.separable`).
    """

    def __init__(
        self,
        stages: Sequence[str],
        price: Callable[[DeviceClass, tuple[str, ...], float], Column | None],
        lower_bound: Callable[[DeviceClass, str, float], float],
        *,
        cold: bool = False,
        whole: bool = False,
        max_team: int = TOGETHER,
        has_gaps: bool = False,
        values: Sequence[ValueNumbers] = (),
    ) -> None:
        self.stages, self._price, self._lower_bound, self.cold, self.max_team = (
            tuple(stages),
            price,
            lower_bound,
            cold,
            max_team,
        )
        last = len(self.stages)
        spans = (
            [(0, last)]
            if whole
            else [(begin, end) for end in range(1, last + 1) for begin in range(end)]
        )
        self._parts: list[tuple[StageSpan, ...]] = [(span,) for span in spans]
        self._gapped_parts = (
            [
                parts
                for count in range(2, last)
                for selection in combinations(self.stages, count)
                if len(parts := parts_of(self.stages, selection)) > 1
                and separable(self.stages, values, parts)
            ]
            if has_gaps and last <= MOST_APART
            else []
        )
        self._options: dict[DeviceClass, dict[tuple[StageSpan, ...], list[Option]]] = {}
        self._only_priced_shares = False

    def price_no_smaller_shares(self) -> None:
        """From now on, offer shares of a host's memory below all of it only where they are
        priced: their plans read weights from disk, and take most of the time of pricing."""
        self._only_priced_shares = True

    def least_seconds(self, kind: DeviceClass, stage: str) -> float:
        """Return the lower bound of ``stage`` on ``kind``, in seconds."""
        return self._lower_bound(kind, stage, SHARES[0])

    def _least_seconds_of(
        self, kind: DeviceClass, parts: tuple[StageSpan, ...], share: float
    ) -> float:
        return sum(self._lower_bound(kind, stage, share) for stage in self._stages_in(parts))

    def _stages_in(self, parts: tuple[StageSpan, ...]) -> tuple[str, ...]:
        return tuple(stage for a, b in parts for stage in self.stages[a:b])

    def options(self, kind: DeviceClass) -> list[Option]:
        """Return the priced options, and bounds for each choice of stages that may improve."""
        return [
            option
            for chain in self._chains(kind).values()
            for option in chain
            if option.column is not None
            or option.share == SHARES[0]
            or not self._only_priced_shares
        ]

    def refine(self, kind: DeviceClass, option: Option) -> None:
        """Price ``option``, which has only bounds. Below share 1, price all smaller shares too."""
        chain = self._chains(kind)[option.parts]
        chain.remove(option)
        next_option = self._priced(kind, option, chain)
        while next_option is not None and option.share < SHARES[0]:
            next_option = self._priced(kind, next_option, chain)
        if next_option is not None:
            chain.append(next_option)

    def _priced(self, kind: DeviceClass, option: Option, chain: list[Option]) -> Option | None:
        """Price ``option`` into ``chain`` if a plan fits. Return bounds for the next smaller
        share."""
        column = self._price(kind, self._stages_in(option.parts), option.share)
        if column is None:
            return None
        ahead_seconds = column.ahead_seconds if self.cold else 0.0
        seconds = max(
            option.seconds,
            column.cold_seconds - ahead_seconds if self.cold else column.steady_seconds,
        )
        if not any(
            other.ram_bytes <= column.ram_bytes and other.pinned_bytes <= column.pinned_bytes
            for other in chain
        ):
            chain.append(
                replace(option, seconds=seconds, ahead_seconds=ahead_seconds, column=column)
            )
        pinned = column.pinned_bytes / kind.pinned_bytes if kind.pinned_bytes else 0.0
        memory_share = min(option.share, max(column.ram_bytes / kind.ram_bytes, pinned))
        smaller = next((share for share in SHARES if share < memory_share), None)
        if smaller is None:
            return None
        least_seconds = self._least_seconds_of(kind, option.parts, smaller)
        if self.cold:  # cold seconds do not fall, but more of them may be spent ahead
            least_seconds = max(option.seconds, least_seconds)
            return replace(
                option,
                share=smaller,
                seconds=least_seconds,
                ahead_seconds=max(0.0, seconds + ahead_seconds - least_seconds),
            )
        return replace(option, share=smaller, seconds=max(seconds, least_seconds))

    def _chains(self, kind: DeviceClass) -> dict[tuple[StageSpan, ...], list[Option]]:
        if kind not in self._options:
            part_choices = [*self._parts, *([] if kind.secondaries else self._gapped_parts)]
            self._options[kind] = {
                parts: [Option(parts, SHARES[0], self._least_seconds_of(kind, parts, SHARES[0]))]
                for parts in part_choices
            }
        return self._options[kind]


class Planner:
    """Prices device assignments of ``graph`` with the planner, as sessions of ``items`` runs.
    ``arguments``: of `api.estimate`. ``cache``: the folder for plans, or None."""

    def __init__(self, graph: Graph, items: int, cache: Any, arguments: Mapping[str, Any]) -> None:
        self._graph, self._items, self._arguments, self._cache = graph, items, arguments, cache
        self._store = store_in(cache)
        self._problems: dict[DeviceClass, Problem] = {}
        self._copyable_uses: set[tuple[str, str]] | None = None
        self._ways: dict[tuple[DeviceClass, str, float, bool], list[list[float]]] = {}
        self._columns: dict[tuple[DeviceClass, tuple[str, ...], float], Column | None] = {}

    def problem(self, kind: DeviceClass) -> Problem:
        if kind not in self._problems:
            limits = {
                "ram": kind.ram_bytes,
                "pinned": kind.pinned_bytes,
                "runs": self._items,
                "cache": self._cache,
            }
            vram, hardware = (
                [member.vram_bytes for member in kind.members],
                [member.hardware for member in kind.members],
            )
            arguments = {**self._arguments, **limits, "vram": vram, "hardware": hardware}
            self._problems[kind] = api.estimate(self._graph, **arguments)
        return self._problems[kind]

    def price(self, kind: DeviceClass, stages: tuple[str, ...], share: float) -> Column | None:
        """Return the device assignment as `Pricing` describes, cached."""
        key = kind, stages, share
        if key not in self._columns:
            self._columns[key] = self._plan(kind, stages, share)
        return self._columns[key]

    @property
    def price_count(self) -> int:
        """The number of device assignments priced so far."""
        return len(self._columns)

    def _plan(self, kind: DeviceClass, stages: tuple[str, ...], share: float) -> Column | None:
        whole = self.problem(kind)
        problem = segment_of(self._graph, whole, stages, self._items)[1]
        pinned = None if kind.pinned_bytes is None else int(share * kind.pinned_bytes)
        problem = replace(problem, ram_bytes=int(share * kind.ram_bytes), pinned_bytes=pinned)
        solution = fitting_for(problem, self._store)
        return (
            column_of([stage.name for stage in self._graph.stages], whole.values, solution)
            if solution is not None
            else None
        )

    def lower_bound_seconds(self, kind: DeviceClass, stage: str, share: float = 1.0) -> float:
        """Return the least seconds of ``stage`` within a share of the host's memory.

        Each component runs on its fastest device, and half of its calls if a copy may make the
        other half (`graphrun.model.copies`). Teams of more than two devices are bounded by their
        pairs, equal devices by one of them.
        """
        pairs = [
            kind._replace(secondaries=(secondary,))
            for secondary in dict.fromkeys(kind.secondaries)
            if secondary.hardware != kind.hardware
        ] or [kind._replace(secondaries=())]
        pair_uses = [
            self._uses(pair, stage, share, shares_weights=bool(kind.secondaries)) for pair in pairs
        ]
        ways = [
            [min(seconds) for seconds in zip(*way, strict=True)]
            for way in zip(*pair_uses, strict=True)
        ]
        return min(map(sum, ways))

    def _uses(
        self, kind: DeviceClass, stage: str, share: float, *, shares_weights: bool
    ) -> list[list[float]]:
        """Return the least seconds of each use of a component, for each way to run ``stage``.

        ``shares_weights``: further devices may have a part of the weights.
        """
        key = (kind, stage, share, shares_weights)
        if key in self._ways:
            return self._ways[key]
        problem = self.problem(kind)
        ram_bytes = int(share * kind.ram_bytes)
        pinned_bytes = ram_bytes if kind.pinned_bytes is None else int(share * kind.pinned_bytes)

        def fits(variant: Variant) -> bool:
            if variant.backing_store not in ("pinned", "pageable"):
                return True  # the bytes of a bounce buffer depend on the granularity
            return variant.host_bytes <= ram_bytes and variant.locked_bytes <= pinned_bytes

        def seconds(use: Use, activation_bytes: int) -> float:
            component = problem.component(use.component)
            device_bytes = max(0, problem.effective_bytes - activation_bytes)
            variants = [component.variants[index] for index in problem.usable(component)]
            return min(
                (
                    max(
                        _compute_seconds(use_with(use, component, variant), component.groups),
                        0.0
                        if shares_weights
                        else _copy_seconds(use, component, variant, device_bytes),
                    )
                    for variant in [*filter(fits, variants)] or variants
                ),
                default=0.0,
            )

        ways = [[phase for phase in problem.phases if phase.stage == stage]]
        ways += [list(option.phases) for option in problem.options if option.stage == stage]
        copyable_uses = self._find_copyable_uses(kind) if shares_weights else set()
        use_seconds = [
            [
                seconds(use, phase.steady_bytes)
                / (2 if (phase.name, use.component) in copyable_uses else 1)
                for phase in way
                for use in phase.uses
            ]
            for way in ways
        ]
        return self._ways.setdefault(key, use_seconds)

    def _find_copyable_uses(self, kind: DeviceClass) -> set[tuple[str, str]]:
        """Return the phases and components of which a team may make two calls at once.

        These depend on the dry run only, so the first team of any class tells.
        """
        if self._copyable_uses is None:
            secondary = Secondary(kind.hardware, kind.vram_bytes)
            problem = self.problem(kind._replace(secondaries=(secondary,)))
            option_phases = (phase for option in problem.options for phase in option.phases)
            self._copyable_uses = {
                (phase.name, use.component)
                for phase in (*problem.phases, *option_phases)
                for use in phase.uses
                if use.pairs
            }
        return self._copyable_uses


def _compute_seconds(use: Use, groups: Sequence[Any]) -> float:
    by_group = [
        len(group.blocks) * seconds for group, seconds in zip(groups, use.seconds, strict=True)
    ]
    return sum(calls * seconds for calls, seconds in zip(use.group_calls, by_group, strict=True))


def _copy_seconds(
    use: Use, component: ComponentNumbers, variant: Variant, device_bytes: int
) -> float:
    """Return the least seconds to copy the blocks that do not fit, from each call to the next.

    ``device_bytes``: for weights, when a call takes most memory.
    """
    if variant.device != "device":
        return 0.0
    return max(0, use.calls - 1) * max(
        _left_out_seconds(use, component, variant, seconds, device_bytes)
        for seconds in (variant.load_seconds, variant.disk_seconds)
    )


def _left_out_seconds(
    use: Use,
    component: ComponentNumbers,
    variant: Variant,
    seconds: Sequence[float],
    device_bytes: int,
) -> float:
    """Return the fewest ``seconds`` (per block of each group) of blocks beyond ``device_bytes``.

    Only blocks that run in every call count.
    """
    groups = [
        (block_seconds / max(1, nbytes), len(group.blocks) * nbytes)
        for group, calls, nbytes, block_seconds in zip(
            component.groups, use.group_calls, variant.block_bytes, seconds, strict=False
        )
        if calls == use.calls
    ]
    left_seconds, free_bytes = 0.0, device_bytes
    for seconds_per_byte, nbytes in sorted(groups, reverse=True):
        kept_bytes = min(nbytes, free_bytes)
        free_bytes -= kept_bytes
        left_seconds += (nbytes - kept_bytes) * seconds_per_byte
    return left_seconds
