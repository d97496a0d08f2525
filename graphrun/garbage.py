"""Less garbage collection while graphrun makes many objects and hardly any reference cycles.

The settings are those of the whole process, and are restored afterwards.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SELDOM = 50_000  # new objects between two collections; Python's default is 700


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Context of planning, which makes millions of tuples.

    At Python's default rate, collections take two fifths of the time to plan FLUX.1-dev in a
    process that has imported PyTorch and diffusers.
    """
    thresholds = gc.get_threshold()
    if thresholds[0]:  # 0: collection is off
        gc.set_threshold(max(SELDOM, thresholds[0]), *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


@contextmanager
def not_collected() -> Iterator[Callable[[], None]]:
    """Context in which modules are imported and components are built.

    Both create permanent objects. Imports alone create a million, and scanning these repeatedly
    takes a quarter of the import time. The yielded function starts collection again, and freezes
    the objects until the context ends (`gc.freeze`).
    """
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.disable()

    def resume() -> None:
        if enabled:
            if not frozen:
                gc.freeze()
            gc.enable()

    try:
        yield resume
    finally:
        if enabled:
            gc.enable()
        if enabled and not frozen:
            gc.unfreeze()
