"""Devices and budgets, as typed, become `Hardware` and bytes here.

--device --hardware     `cards_for`         one `Hardware` per device, the main device first
                        `devices_for`       the same opened, for an attached pipeline
--vram --ram --memory   `limits_for`        a budget per device and one of host RAM; one budget
                                            where device and host share memory
auto                    `resolved_budgets`  free memory changes during a session or a batch,
                                            so ``auto`` becomes bytes once
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from graphrun import device_kinds
from graphrun.device_kinds import kind_called
from graphrun.errors import InputError
from graphrun.units import MIB, parse_size, typed_size

if TYPE_CHECKING:
    from graphrun.device_kinds import DeviceKind
    from graphrun.graph.graph import Graph
    from graphrun.model.hardware import Hardware
    from graphrun.model.problem import ProblemLimits
    from graphrun.runtime.devices.device import Device


# On an A100, the communicator of a group of two took 544 MB (NVIDIA/nccl, issue 964). Two groups
# communicate: one divides and gathers tokens, one exchanges heads.
COMMUNICATORS, COMMUNICATOR_BYTES = 2, 519 * MIB


@dataclass(frozen=True, eq=False)
class Budget:
    """Memory limits for attached pipelines, each alone or several together.

    ``budget = graphrun.Budget("12G")``, then ``graphrun.attach(pipe, budget=budget)`` for each
    pipeline. Sizes are as for `estimate`; ``vram`` None: the free memory of the device when a
    pipeline is attached, less 5 %. ``memory`` is the budget of a CPU in place of both.
    Raises InputError for a text that is not a size.
    """

    vram: str | int | Sequence[str | int] | None = None
    ram: str | int = "auto"
    pinned: str | int | None = None
    disk: str | int | None = None
    memory: str | int | None = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Budget:
        """Return the budget in ``arguments`` of `graphrun.estimate`; others are ignored."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: arguments[name] for name in names if name in arguments})

    def __post_init__(self) -> None:
        sizes = [("vram", size) for size in _items(self.vram)] + [
            (name, getattr(self, name)) for name in ("ram", "pinned", "disk", "memory")
        ]
        for name, size in sizes:
            if size not in (None, "auto"):
                is_positive = name in ("vram", "memory")
                parse_size(size, whole_bytes=1 << 62, name=name, minimum=int(is_positive))


class DeviceOptions(NamedTuple):
    """Options of one device. None: not given."""

    vram: Any = None
    hardware: Any = None
    device: str | None = None


def per_device(vram: Any, hardware: Any = None, device: Any = None) -> list[DeviceOptions]:
    """Return the options of each device, from texts with commas or from sequences.

    As in ``--vram 24G,12G --hardware rtx4090,rtx3060 --device cuda:0,cuda:1``; a single
    ``hardware`` or ``device`` applies to all. Raises InputError if the numbers of items differ, if
    budgets have no units, or if devices are not numbered in order.
    """
    budgets, profiles, names = _items(vram), _items(hardware), _items(device)
    count = max(map(len, (budgets, profiles, names)))
    if count > 1 and (hosts := [name for name in names if name and kind_called(name).is_host]):
        raise InputError(
            f"device {', '.join(names)}: the CPU is one device; give --device {hosts[0]}"
        )
    if count > 1 and any(isinstance(budget, str) and budget.isdigit() for budget in budgets):
        raise InputError(
            f"vram: {vram!r} has budgets of {count} devices, and each needs its unit, as in "
            f"24G,12G; did you mean {str(vram).replace(',', '.')}?"
        )
    for option, items in (("vram", budgets), ("hardware", profiles), ("device", names)):
        if len(items) != count and (option == "vram" or len(items) != 1):
            raise InputError(
                f"{option} names {len(items)} of {count} devices: give one for each, as in "
                f"{_EXAMPLES[option]}"
            )
    profiles, names = (
        items * count if len(items) != count else items for items in (profiles, names)
    )
    rows = enumerate(zip(budgets, profiles, names, strict=True))
    return [
        DeviceOptions(nbytes, profile, _kind(name, number))
        for number, (nbytes, profile, name) in rows
    ]


_EXAMPLES = {"vram": "24G,12G", "hardware": "rtx4090,rtx3060", "device": "cuda:0,cuda:1"}


def cards_for(
    vram: Any,
    memory: Any,
    hardware: Any,
    device: Any = None,
    cache: Path | None = None,
    *,
    to_run: bool = False,
) -> list[Hardware]:
    """Return the hardware of each device, the main device first.

    ``memory`` alone, without ``hardware`` and ``device``, means this machine's card if it shares
    its memory with the host, and otherwise the CPU. Other arguments are as for `per_device` and
    `hardware_for`. Raises InputError if they contradict each other, or if the devices are not of
    one kind.
    """
    if memory is not None and hardware is None and device is None and vram is None:
        device = _kind_of_memory(cache)
    cards = [
        hardware_for(options.hardware, options.device, cache, to_run=to_run)
        for options in per_device(vram, hardware, device)
    ]
    if len({card.device for card in cards}) > 1:
        kinds = ", ".join(f"{card.name} is a {card.device} device" for card in cards)
        raise InputError(f"hardware: devices of one run are of one kind, and {kinds}")
    return cards


def with_host_copies(cards: Sequence[Hardware], budget: Any) -> list[Hardware]:
    """Return ``cards`` as an attached pipeline uses them, with memory apart from the host's.

    A pipeline has its weights on the host, and blocks are copied from there. On a card that shares
    its memory with the host, the budgets of both are taken from the one pool (`_of_one_pool`).
    Raises InputError for one budget of such a card.
    """
    if budget.memory is not None and _shares_memory(cards[0]):
        raise InputError(
            f"memory {budget.memory}: an attached pipeline keeps its weights on the host, and "
            f"{cards[0].name} gets copies of blocks: give vram for the copies, such as vram='4G', "
            "in place of memory; or compute on the CPU with device='cpu'"
        )
    return [card if card.kind.is_host else replace(card, unified=False) for card in cards]


def _shares_memory(card: Hardware) -> bool:
    """Return whether ``card`` is a GPU that shares its memory with the host."""
    return card.unified and not card.kind.is_host


def _of_one_pool(limits: ProblemLimits, modules: Iterable[Any]) -> ProblemLimits:
    """Return ``limits``, whose RAM is ``auto``, where the device's budget is part of that RAM.

    What remains has at least the weights of ``modules``, which are on the host already.
    """
    from graphrun.host_ram import taken_bytes

    remaining_bytes = limits.ram_bytes - limits.budget_bytes
    return replace(limits, ram_bytes=max(taken_bytes(modules), remaining_bytes))


def _kind_of_memory(cache: Path | None) -> str:
    """Return the kind that a budget of ``memory`` alone is for."""
    from graphrun.profile import hardware_profiles as profiles

    card = profiles.detect_card(cache)
    hosts = (kind.name for kind in device_kinds.built_in() if kind.is_host)
    return card.device if card is not None and card.unified else next(hosts)


def in_dtype(graph: Graph, dtype: str | None, hardware: Hardware | None) -> Graph:
    """Return ``graph`` with ``dtype`` in place of its 16-bit dtypes; ``"graph"``: unchanged.

    None: on a CPU, fp32 in place of the dtypes in which it computes slower, by its profile or data
    sheet. Graphs name the dtype of a card; diffusers computes in fp32 unless it is given a
    ``torch_dtype``. Raises InputError for another dtype.
    """
    from graphrun.graph.graph import HALF_DTYPES
    from graphrun.model.hardware import ProcessorRates

    rates = hardware.kernels if hardware is not None else None
    if dtype == "graph" or (dtype is None and not isinstance(rates, ProcessorRates)):
        return graph
    if dtype is not None:
        return graph.in_dtype(dtype)
    assert isinstance(rates, ProcessorRates)
    return graph.in_dtype("float32", [dtype for dtype in HALF_DTYPES if rates.is_slow(dtype)])


def hardware_for(
    hardware: str | Hardware | None,
    device: str | None = None,
    cache: Path | None = None,
    *,
    to_run: bool = False,
) -> Hardware:
    """Return the hardware to plan for, or to run on if ``to_run``.

    It is ``hardware``, or the profile or data-sheet estimate of that name. Without it: the device
    of the kind ``device``, the card of this machine, or the default data-sheet estimate. Raises
    InputError if the two contradict each other, for a kind that neither the table nor this PyTorch
    has, and to run without the device.
    """
    from graphrun.profile import hardware as estimates
    from graphrun.profile import hardware_profiles as profiles

    kind = None if device is None else _known_kind(device)
    card = profiles.hardware(hardware, cache) if isinstance(hardware, str) else hardware
    if card is None and kind is not None and kind.is_host:
        card = profiles.detect_cpu(cache)
    if card is None and kind is not None and kind.has_virtual_clock:
        card = kind.detect()
    if card is not None and device not in (None, card.device):
        raise InputError(
            f"hardware {card.name} is a {card.device} device, but device is {device}; leave one of "
            "them out"
        )
    if card is None or (to_run and not estimates.is_present(card)):
        detected_card = profiles.detect_card(cache, kind if card is None else card.kind)
        if detected_card is None and to_run:
            label = (card or estimates.default_of(kind)).kind.label
            raise InputError(
                f"no {label} found to run on: graphrun doctor shows why; or run on the CPU "
                "(--device cpu --memory 8G, in Python device='cpu', memory='8G') or on the "
                "simulated accelerator (--device sim, device='sim')"
            )
        card = card or detected_card or estimates.default_of(kind)
    return card


def _known_kind(name: str) -> DeviceKind:
    """Return the kind called ``name``. Raises InputError for an unknown one."""
    if name not in device_kinds.names():
        import torch

        try:
            torch.get_device_module(name)
        except RuntimeError:
            raise InputError(
                f"device {name!r} is not known; use {', '.join(device_kinds.names())}, or a "
                "backend of PyTorch that this process has imported"
            ) from None
    return kind_called(name)


class OpenedDevices(NamedTuple):
    """The devices of an attached pipeline.

    ``device``: the main one, with its secondary devices. ``cards``: the hardware of each.
    ``limits``: of problems on them.
    """

    device: Device
    cards: list[Hardware]
    limits: ProblemLimits


def devices_for(
    budget: Budget,
    hardware: Any,
    device: Any,
    modules: Collection[Any],
    cache: Path | None = None,
) -> OpenedDevices:
    """Open the devices that ``hardware`` and ``device`` name, with limits within ``budget``.

    ``device``: as for `cards_for`, or an opened device. ``modules``: as for `limits_for`. The
    hardware includes what opening shows: whether copies overlap compute, and on a CPU what the
    process takes. Raises InputError as `cards_for` and `limits_for` do, and if a device is missing.
    """
    from graphrun.runtime.devices.cpu import CpuDevice
    from graphrun.runtime.devices.device import Device as Opened
    from graphrun.runtime.devices.open import open_devices

    is_open = isinstance(device, Opened)
    kinds = device.name if is_open else device
    named_cards = cards_for(budget.vram, budget.memory, hardware, kinds, cache, to_run=not is_open)
    cards = with_host_copies(named_cards, budget)
    if is_open:
        if len(device.all_devices) != len(cards):
            raise InputError(
                f"vram has budgets of {len(cards)} devices, and device is "
                f"{len(device.all_devices)}: give a budget for each"
            )
        main_device = device
    else:
        refuse_wrong_budgets(cards[0], budget)
        main_device = open_devices(cards)
    cards = [as_opened(cards[0], main_device), *cards[1:]]
    if isinstance(main_device, CpuDevice):
        cards = [replace(cards[0], context_bytes=main_device.measured_context())]
    limits = limits_for(budget, cards, modules, main_device.all_devices)
    if budget.ram == "auto" and _shares_memory(named_cards[0]):
        limits = _of_one_pool(limits, modules)
    return OpenedDevices(main_device, cards, limits)


def as_opened(hardware: Hardware, device: Device) -> Hardware:
    """Return ``hardware`` with what opening ``device`` shows: whether copies overlap compute."""
    if not device.serial_copies or hardware.serial_copies:
        return hardware
    return replace(hardware, serial_copies=True)


def limits_for(
    budget: Budget,
    cards: Sequence[Hardware],
    modules: Iterable[Any] = (),
    targets: Sequence[Device] = (),
) -> ProblemLimits:
    """Return the limits of a problem on ``cards`` within ``budget``, in bytes.

    ``modules``: their weights, already in memory, are part of ``ram="auto"``. ``targets``: the
    opened devices, whose free memory is the default of ``vram``; without them it has no default.
    Raises InputError for a budget that the hardware does not have, with what to type.
    """
    from graphrun.host_ram import ram_budget
    from graphrun.model.problem import ProblemLimits, Secondary

    refuse_wrong_budgets(cards[0], budget)
    if cards[0].unified:
        nbytes = memory_budget(budget.memory, cards[0])
        return ProblemLimits(nbytes, nbytes, disk_bytes=parse_limit(budget.disk, "disk"))
    sizes: list[int] = []
    for number, (card, vram) in enumerate(zip(cards, _items(budget.vram), strict=True)):
        if vram in (None, "auto") and targets:
            sizes.append(_free_bytes(targets[number], card))
        elif vram is None:
            raise InputError("vram: give the budget of the device, such as vram='8G'")
        else:
            # a share means nothing on a device without memory of its own
            whole_bytes = card.capacity_bytes if card.kind.free_memory != "none" else None
            sizes.append(parse_size(vram, whole_bytes=whole_bytes, name="vram"))
    ram_bytes = ram_budget(budget.ram, modules)
    return ProblemLimits(
        sizes[0],
        ram_bytes,
        parse_limit(budget.pinned, "pinned", ram_bytes),
        parse_limit(budget.disk, "disk"),
        secondaries=tuple(map(Secondary, cards[1:], sizes[1:])),
    )


def refuse_wrong_budgets(hardware: Hardware, budget: Any) -> None:
    """Raise InputError if ``budget`` has limits that ``hardware`` does not have.

    Hardware that shares its memory with the host has one pool: ``memory``, and neither ``vram`` nor
    ``ram`` nor ``pinned``. Other hardware has no ``memory``.
    """
    if not hardware.unified:
        if budget.memory is None:
            return
        is_example = budget.memory == "auto" or hardware.kind.free_memory == "none"
        vram = "8G" if is_example else _no_more_than(budget.memory, hardware.capacity_bytes)
        raise InputError(
            f"memory {budget.memory}: {hardware.name} has memory of its own: give --vram {vram} "
            "and --ram in place of --memory, or add --device cpu to run on the CPU"
        )
    sizes = {"vram": _items(budget.vram)[0], "ram": budget.ram, "pinned": budget.pinned}
    wrong_sizes = {
        name: size for name, size in sizes.items() if size is not None and (name, size) != _RAM
    }
    if wrong_sizes:
        names = ", ".join(f"--{name}" for name in wrong_sizes)
        size = next((wrong_sizes[name] for name in ("vram", "ram") if name in wrong_sizes), "8G")
        correction = f"give --memory {size} instead" if budget.memory is None else "leave it out"
        raise InputError(
            f"{names}: {'a CPU' if hardware.kind.is_host else hardware.name} has one pool of "
            f"memory, with one budget for the whole process: {correction}"
        )


_RAM = ("ram", "auto")


def _no_more_than(size: str | int, capacity_bytes: int) -> str | int:
    """Return ``size``, or the capacity, rounded down, if that is less."""
    nbytes = parse_size(size, whole_bytes=capacity_bytes, name="memory")
    return size if nbytes <= capacity_bytes else typed_size(capacity_bytes, round_down=True)


def memory_budget(memory: str | int | None, hardware: Hardware) -> int:
    """Return the bytes of a budget for ``hardware`` with one pool of memory.

    ``memory`` None or ``auto``: what this process takes and what this machine, or its cgroup, has
    left, less 5 % (`profile.hardware.budget_of`); for hardware that this machine does not
    have, its memory less 5 %. Left is what the system has available (MemAvailable): on a
    GB10 CUDA reports MemFree, which shrinks with the page cache (unslothai/unsloth#10705). A
    percentage is of the machine's memory.
    """
    if memory not in (None, "auto"):
        return parse_size(memory, whole_bytes=hardware.capacity_bytes, name="memory")
    from graphrun.profile.hardware import available_memory, budget_of, is_present

    free_bytes = available_memory() if is_present(hardware) else hardware.capacity_bytes
    return min(budget_of(free_bytes), hardware.capacity_bytes)


def resolved_budgets(
    budgets: Mapping[str, Any], limits: ProblemLimits, hardware: Hardware
) -> dict[str, Any]:
    """Return ``budgets``, arguments of `graphrun.estimate`, with the memory of ``limits`` in bytes.

    Later plans then have the same budgets, although the free memory has changed.
    """
    if hardware.unified:
        return {**budgets, "memory": limits.budget_bytes}
    return {**budgets, "ram": limits.ram_bytes}


def resolved_in_process(
    budgets: Mapping[str, Any], modules: Iterable[Any], cache: Path | None
) -> tuple[list[Hardware], dict[str, Any]]:
    """Return the hardware that ``budgets`` name, and `resolved_budgets` without the hardware.

    For plans and runs in this process: a CPU's context has at least the bytes of this process,
    which may be more than a new process has. ``modules`` as in `limits_for`.
    """
    named_cards = cards_for(
        budgets.get("vram"), budgets.get("memory"), budgets.get("hardware"), cache=cache
    )
    cards = [_card_of_process(card) if card.kind.is_host else card for card in named_cards]
    limits = limits_for(Budget.of(budgets), cards, modules)
    other_budgets = {name: value for name, value in budgets.items() if name != "hardware"}
    return cards, resolved_budgets(other_budgets, limits, cards[0])


def _card_of_process(card: Hardware) -> Hardware:
    from graphrun.runtime.devices.cpu import CpuDevice

    context_bytes = CpuDevice(card).measured_context(to_plan=True)
    return replace(card, context_bytes=max(card.context_bytes, context_bytes))


def parse_limit(text: str | int | None, name: str, whole_bytes: int | None = None) -> int | None:
    """Return the bytes of a limit or a reserve, which may be 0; None without one."""
    return None if text is None else parse_size(text, whole_bytes=whole_bytes, name=name, minimum=0)


def _free_bytes(device: Device, hardware: Hardware) -> int:
    """Return the default budget (`graphrun.profile.hardware.budget_of`) of ``device``.

    It is based on the smaller of the device's memory and its free memory, context and workspace
    included. Raises InputError for a simulated device without a limit.
    """
    from graphrun.profile.hardware import budget_of

    available_bytes = device.available_bytes + hardware.context_bytes + hardware.workspace_bytes
    if hardware.kind.free_memory == "none" and available_bytes >= hardware.capacity_bytes:
        raise InputError(
            "the simulated device has no memory of its own: give vram, such as vram='8G'"
        )
    return budget_of(min(available_bytes, hardware.capacity_bytes))


def _items(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [item.strip() for item in value.split(",")]
    return list(value) if isinstance(value, Sequence) else [value]


def _kind(name: Any, number: int) -> Any:
    """Return the kind of device ``number``: the part before the colon, as in ``cuda:1``."""
    kind, colon, index = name.partition(":") if isinstance(name, str) else (name, "", "")
    if colon and index != str(number):
        raise InputError(
            f"device {name} is number {number} of those given: the first is {kind}:0, and the "
            "others follow in order; "
            "CUDA_VISIBLE_DEVICES changes which card has which number"
        )
    return kind


def share_of(
    processes: int, card: Hardware, limits: ProblemLimits
) -> tuple[Hardware, ProblemLimits, int]:
    """Return what each of ``processes`` processes has that divide a sequence.

    Each has a device like ``card``, and an equal part of host memory and of the disk. The last
    number: bytes on the device that communication takes.
    """
    sizes = {
        name: nbytes // processes
        for name in ("ram_bytes", "pinned_bytes", "disk_bytes")
        if (nbytes := getattr(limits, name)) is not None
    }
    if card.kind.is_host:
        sizes["budget_bytes"] = limits.budget_bytes // processes
    has_buffers = not (card.kind.has_virtual_clock or card.kind.is_host)
    rate = card.disk_bytes_per_second / processes  # each reads all files
    return (
        replace(card, disk_bytes_per_second=rate),
        replace(limits, **sizes),
        COMMUNICATORS * COMMUNICATOR_BYTES if has_buffers else 0,
    )
