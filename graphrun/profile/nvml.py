"""NVIDIA's management library: memory in use on each card, by all processes."""

from __future__ import annotations

import ctypes


class _Memory(ctypes.Structure):
    _fields_ = [
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


def cards_used_bytes() -> dict[str, int]:
    """Return UUID -> bytes in use on the card by all processes, by NVML; {} without it."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return {}
    used_bytes: dict[str, int] = {}
    count, handle, memory, name = (
        ctypes.c_uint(),
        ctypes.c_void_p(),
        _Memory(),
        ctypes.create_string_buffer(96),
    )
    if nvml.nvmlInit_v2() != 0:
        return {}
    try:
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return {}
        for index in range(count.value):
            has_handle = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0
            has_name = has_handle and nvml.nvmlDeviceGetUUID(handle, name, len(name)) == 0
            if has_name and nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0:
                used_bytes[name.value.decode()] = int(memory.used)
    finally:
        nvml.nvmlShutdown()
    return used_bytes
