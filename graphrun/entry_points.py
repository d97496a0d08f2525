"""What other installed packages add: device kinds, ops and exporters, by entry points.

    group               an entry point is                     imported when
    graphrun.devices    a DeviceKind of the same name         the caller names the device
    graphrun.ops        a function marked with graphrun.op,   a stage names it, and the caller
                        called PACKAGE.NAME                   trusts PACKAGE
    graphrun.exporters  a function (graph, solution) -> str   graphrun export --to names it

Nothing is imported because it is installed, or because a file names it. graphrun's own names come
first: an entry point cannot replace one.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from graphrun.errors import InputError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

DEVICES, OPS, EXPORTERS = "graphrun.devices", "graphrun.ops", "graphrun.exporters"


@functools.cache
def installed(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    """Return the entry points of ``group`` by name: one, or several that differ. None is loaded."""
    from importlib.metadata import entry_points

    points: dict[str, dict[str, EntryPoint]] = {}
    for point in entry_points(group=group):
        points.setdefault(point.name, {})[point.value] = point
    return {name: tuple(by_value.values()) for name, by_value in points.items()}


def entry_point(group: str, name: str) -> EntryPoint | None:
    """Return the entry point ``name`` of ``group``, or None. It is not loaded.

    Raises InputError if two packages add different objects by the name.
    """
    points = installed(group).get(name, ())
    if len(points) > 1:
        raise InputError(
            f"{group}: two packages add {name}, as {' and as '.join(p.value for p in points)}; "
            "uninstall one"
        )
    return points[0] if points else None


def load(point: EntryPoint) -> Any:
    """Return the object of ``point``. Raises InputError if it does not load."""
    try:
        return point.load()
    except Exception as error:  # noqa: BLE001  (another package's module may raise anything)
        raise InputError(
            f"{point.name}: the entry point {point.value} of {point.group} does not load: "
            f"{type(error).__name__}: {error}"
        ) from error
