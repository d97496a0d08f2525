"""Long campaigns: they run when they are asked for (``make sweep``)."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips what is marked ``sweep`` unless it is asked for."""
    if "sweep" not in config.getoption("-m"):
        for item in items:
            if item.get_closest_marker("sweep"):
                item.add_marker(pytest.mark.skip(reason="run with -m sweep"))
