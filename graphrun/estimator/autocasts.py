"""`torch.autocast` in a dry run on meta, which it does not know: where code turns it off for the device of a tensor, or on in
fp32 (Mochi's positions), which turns it off on all devices, there is nothing to turn off.

Decides nothing else: where it is turned on, torch refuses as ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def autocast_off_on_meta() -> Iterator[None]:
    """A context in which ``torch.autocast("meta", enabled=False)`` and ``torch.autocast("meta", torch.float32)`` do nothing."""
    kind: Any = torch.autocast
    own = kind.__init__

    def begin(autocast: Any, device_type: str, dtype: Any = None, enabled: bool = True, **more: Any) -> None:
        if device_type == "meta" and (not enabled or dtype == torch.float32):
            device_type, dtype, enabled = "cpu", None, False
        own(autocast, device_type, dtype, enabled, **more)

    kind.__init__ = begin
    try:
        yield
    finally:
        kind.__init__ = own
