"""The backend ``brook``: a PyTorch device that graphrun's code does not know.

``import brook`` registers it, and builds it first if this PyTorch has no build of it yet, which
takes a minute. A process has one such backend: the simulated accelerator is not available in it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import types
from pathlib import Path
from typing import Any

import torch

from graphrun.device_kinds import DeviceKind

SOURCE = Path(__file__).with_name("brook.cpp")
# The registration of `graphrun.devices` (`registered`): tensors are counted in bytes, as this
# allocator has no pages.
KIND = DeviceKind("brook", page_rules="bytes", convolution_scratch=False, first_run_pages=0)


def can_build() -> bool:
    """Whether this machine has a compiler and ninja."""
    return bool(shutil.which("g++") or shutil.which("c++")) and shutil.which("ninja") is not None


def _build_folder() -> Path:
    digest = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:12]
    folder = SOURCE.parents[2] / "out" / f"brook-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def register() -> Any:
    """Build the backend if necessary, register it with PyTorch, and return its C++ module."""
    from torch.utils import cpp_extension

    os.environ.setdefault("MAX_JOBS", "1")
    native = cpp_extension.load(
        "graphrun_brook",
        [str(SOURCE)],
        extra_cflags=["-O1"],
        build_directory=str(_build_folder()),
        with_cuda=False,
    )
    torch.utils.rename_privateuse1_backend("brook")
    module = types.ModuleType("torch.brook")
    module.__dict__.update(
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        _lazy_init=lambda: None,
        _is_in_bad_fork=lambda: False,
        is_initialized=lambda: True,
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    )
    torch._register_device_module("brook", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    return native
