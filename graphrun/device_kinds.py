"""The kinds of devices, in one table, with everything that depends on the kind.

    kind   opened by                 memory      pinned memory   copies overlap compute
    cuda   devices.cuda              separate    in place        proved when it is opened
    xpu    devices.accelerator       separate    at allocation   proved when it is opened
    mps    devices.accelerator       unified     none            never: one queue
    cpu    devices.cpu               unified     none            reads of files do
    sim    devices.simulated         separate    in place        on the virtual clock

Other packages add kinds by entry points (`graphrun.entry_points`):

    [project.entry-points."graphrun.devices"]
    npu = "graphrun_npu:KIND"

Any other name stands for a backend of PyTorch of that name, with the defaults of `DeviceKind`.
Functions are named by texts, ``module:function``, and imported when they are called, so that
planning does not import torch.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any, Literal

from graphrun.entry_points import DEVICES, entry_point, installed, load
from graphrun.errors import GraphrunError, InputError

FreeMemory = Literal["driver", "system", "none"]
Cap = Literal["allocator", "own allocations", "process", "machine"]
PageRules = Literal["pages", "bytes"]
Pinning = Literal["in place", "at allocation", "none"]
Overlap = Literal["proved", "never", "simulated"]


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A kind of device. The defaults are for a backend of PyTorch about which nothing is known.

    ``name``: the name of ``--device`` and of the torch device. ``title``: for messages. ``opener``:
    ``module:function``, called with the `Hardware`, the device's number, the main device (None for
    itself) and, if ``has_virtual_clock``, ``check_ordering``; returns a `Device`. ``detector``:
    ``module:function``, called with the kind; returns the `Hardware` of this machine's first
    device, or None.

    ``free_memory``: what reports free memory: the ``driver``; the ``system`` (MemAvailable), where
    memory is the host's; ``none`` for a device without memory of its own. ``cap``: what refuses
    memory beyond the budget: PyTorch's ``allocator`` for all tensors of the process; the device for
    its ``own allocations``, which are weights and ring buffers; the ``process`` and its cgroup; the
    simulated ``machine``. ``page_rules``: the allocator reserves ``pages``, of PyTorch's sizes, or
    ``bytes`` of tensors. ``convolution_scratch``: convolutions take scratch that PyTorch's
    dispatcher does not see. ``pinning``: how host memory is page-locked. ``overlap``: whether
    copies overlap compute. ``unified``: every device of the kind shares its memory with the host;
    `Hardware.unified` is of one device, and `graphrun.attach` plans without.

    ``has_virtual_clock``: seconds are simulated. ``is_host``: the processor that runs Python
    computes. ``clock``: whose seconds a run has, for screens. ``first_run_pages``: pages of the
    allocator's pool for small tensors that slots of a process's first run may reserve beyond their
    plan (`graphrun.trace`). ``visibility``: environment variable that selects cards by number, in a
    cluster; "": no clusters, unless it is simulated. ``platforms``: values of ``sys.platform`` with
    such devices; empty: any. ``signs``: files one of which exists on Linux where there is a device;
    empty: not known. ``calibration``: `graphrun calibrate` measures the kind.
    """

    name: str
    title: str = ""
    opener: str = "graphrun.runtime.devices.accelerator:open_accelerator"
    detector: str = "graphrun.profile.hardware:detect_accelerator"
    free_memory: FreeMemory = "driver"
    cap: Cap = "allocator"
    page_rules: PageRules = "pages"
    convolution_scratch: bool = True
    pinning: Pinning = "at allocation"
    overlap: Overlap = "proved"
    unified: bool = False
    has_virtual_clock: bool = False
    is_host: bool = False
    clock: str = "on the card"
    first_run_pages: int = 0
    visibility: str = ""
    platforms: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    calibration: bool = False

    @property
    def label(self) -> str:
        return self.title or f"{self.name} device"

    @property
    def in_clusters(self) -> bool:
        return bool(self.visibility) or self.has_virtual_clock

    @property
    def has_host_kernels(self) -> bool:
        """Whether the host's kernels compute, as on the simulated accelerator."""
        return self.is_host or self.has_virtual_clock

    def open(self, *args: Any, **kwargs: Any) -> Any:
        """Return the opened `Device`. Raises InputError if another package's opener fails."""
        device = self._call("opener", *args, **kwargs)
        if device is None:
            raise InputError(f"{self.name}: the opener {self.opener} returned None, and no Device")
        return device

    def detect(self) -> Any:
        """Return the `Hardware` of this machine's first device of the kind, or None.

        Raises InputError if another package's detector fails.
        """
        card = self._call("detector", self)
        if card is not None and getattr(card, "device", None) != self.name:
            raise InputError(
                f"{self.name}: the detector {self.detector} returned {card!r}, and has to return "
                f"None or the Hardware of a device {self.name!r}"
            )
        return card

    def _call(self, role: Literal["opener", "detector"], *args: Any, **kwargs: Any) -> Any:
        """Return what the function for ``role`` returns."""
        reference: str = getattr(self, role)
        module, _, function = reference.partition(":")
        if module.partition(".")[0] == __package__:
            return getattr(importlib.import_module(module), function)(*args, **kwargs)
        try:
            return getattr(importlib.import_module(module), function)(*args, **kwargs)
        except GraphrunError:
            raise
        except Exception as error:  # noqa: BLE001  (another package's function may raise anything)
            raise InputError(
                f"{self.name}: the {role} {reference} fails: {type(error).__name__}: {error}"
            ) from error


# kinds with cards first, in the order in which a device is looked for
_TABLE = (
    DeviceKind(
        "cuda",
        "CUDA device",
        opener="graphrun.runtime.devices.cuda:open_cuda",
        detector="graphrun.profile.hardware:detect_cuda",
        pinning="in place",
        first_run_pages=2,
        visibility="CUDA_VISIBLE_DEVICES",
        # without one, torch.cuda opens nothing (NVIDIA, WSL, ROCm)
        signs=("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"),
        calibration=True,
    ),
    # Intel's kernel drivers; on Windows' Linux its cards are behind /dev/dxg
    DeviceKind("xpu", "XPU device", signs=("/sys/module/xe", "/sys/module/i915", "/dev/dxg")),
    DeviceKind(
        "mps",
        "MPS device",
        opener="graphrun.runtime.devices.mps:open_mps",
        detector="graphrun.profile.hardware:detect_mps",
        free_memory="system",
        pinning="none",
        overlap="never",
        unified=True,
        platforms=("darwin",),
    ),
    DeviceKind(
        "cpu",
        "CPU",
        opener="graphrun.runtime.devices.cpu:open_cpu",
        detector="graphrun.profile.processor:detect_processor",
        free_memory="system",
        cap="process",
        page_rules="bytes",
        convolution_scratch=False,
        pinning="none",
        unified=True,
        is_host=True,
        clock="on the CPU",
        calibration=True,
    ),
    DeviceKind(
        "sim",
        "simulated accelerator",
        opener="graphrun.runtime.devices.simulated:open_simulated",
        detector="graphrun.profile.hardware:detect_simulated",
        free_memory="none",
        cap="machine",
        page_rules="bytes",
        convolution_scratch=False,
        pinning="in place",
        overlap="simulated",
        has_virtual_clock=True,
        clock="on the virtual clock",
        calibration=True,
    ),
)
_BUILT_IN = {kind.name: kind for kind in _TABLE}


def names() -> tuple[str, ...]:
    """Return the names of all kinds: graphrun's, then those of other packages."""
    return *_BUILT_IN, *(name for name in installed(DEVICES) if name not in _BUILT_IN)


def built_in() -> tuple[DeviceKind, ...]:
    """Return graphrun's own kinds."""
    return _TABLE


@functools.cache
def kind_called(name: str) -> DeviceKind:
    """Return the kind called ``name``; for a name that is not in the table, one with the defaults.

    Raises InputError if another package adds the kind and does not load, or loads as something
    else.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    if (point := entry_point(DEVICES, name)) is None:
        return DeviceKind(name)
    kind = load(point)
    if not isinstance(kind, DeviceKind) or kind.name != name:
        raise InputError(
            f"{name}: the entry point {point.value} of {DEVICES} is "
            f"{getattr(kind, 'name', kind)!r}, and has to be a DeviceKind with the name {name!r}"
        )
    return kind
