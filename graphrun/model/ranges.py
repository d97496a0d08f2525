"""Probable ranges of seconds that come from data sheets.

A range is of a group of published runs (``ranges.json``): of runs whose publication was left out of
the fit of the cost model, nine of ten took between ``low`` and ``high`` times the estimate.
``benchmarks/published.py --left-out`` computes the table. A group has a reason, which screens
print:

    host copies vary        over `COPY_SHARE` of the seconds are copies, which depend on the host
    short runs vary         under `SHORT_SECONDS`: launches, and kernels that do not fill the card
    like published runs     the card has published runs
    card never published    another NVIDIA card, whose rates come from cards of its kind
    laptop power varies     a laptop's card, whose sheet is for the highest power limit
    no published times      any other device; the factors are assumed
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphrun.model.hardware import Hardware

COPY_SHARE = 0.1
OTHER_VENDORS = ("rx", "mi", "arc")  # names of AMD's and Intel's cards begin so
SHORT_SECONDS = 2.0
COPIES, SHORT, PUBLISHED = "host copies vary", "short runs vary", "like published runs"
UNSEEN, LAPTOP, UNKNOWN = "card never published", "laptop power varies", "no published times"


@dataclass(frozen=True, slots=True)
class ProbableRange:
    """``low`` and ``high`` seconds, and why they are that far apart, in three words."""

    low: float
    high: float
    reason: str

    @property
    def bounds(self) -> tuple[float, float]:
        return self.low, self.high


def probable_range(
    hardware: Hardware, seconds: float, waiting_seconds: float = 0.0
) -> ProbableRange:
    """Return the probable range of ``seconds``, ``waiting_seconds`` of which wait for copies.

    A point without a reason unless the rates come from a data sheet.
    """
    if hardware.basis != "data sheet":
        return ProbableRange(seconds, seconds, "")
    reason = range_group(hardware, seconds, waiting_seconds, frozenset(_table()["cards"]))
    low, high = _table()["groups"][reason]["factors"]
    return ProbableRange(seconds * low, seconds * high, reason)


def range_group(
    hardware: Hardware, seconds: float, waiting_seconds: float, cards: frozenset[str]
) -> str:
    """Return the group of a run on ``hardware``; ``cards``: chips with published runs."""
    name = hardware.name
    if hardware.unified or hardware.kind.is_host or name.startswith(OTHER_VENDORS):
        return UNKNOWN
    if waiting_seconds > COPY_SHARE * seconds:
        return COPIES
    if name.endswith("laptop"):
        return LAPTOP
    if seconds < SHORT_SECONDS:
        return SHORT
    return PUBLISHED if chip(name) in cards else UNSEEN


def chip(name: str) -> str:
    """Return the card's name without its memory size: ``a100`` of ``a100-40``."""
    return name.partition("-")[0]


@functools.cache
def _table() -> Any:
    return json.loads((files("graphrun.model") / "ranges.json").read_text(encoding="utf-8"))
