"""Probable ranges of data-sheet estimates: by card, by what a run waits for, and by its length."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphrun.model import ranges
from graphrun.model.ranges import probable_range
from graphrun.profile import hardware as devices


@pytest.mark.parametrize(
    ("name", "seconds", "waiting_seconds", "reason"),
    [
        ("h100", 10.0, 0.0, ranges.PUBLISHED),
        ("h100", 10.0, 5.0, ranges.COPIES),
        ("h100", 1.0, 0.0, ranges.SHORT),
        ("h200", 10.0, 0.0, ranges.UNSEEN),
        ("rtx4070laptop", 10.0, 0.0, ranges.LAPTOP),
        ("rx7900xtx", 10.0, 0.0, ranges.UNKNOWN),
        ("arc-b580", 10.0, 0.0, ranges.UNKNOWN),
        ("m4max-64", 10.0, 0.0, ranges.UNKNOWN),
    ],
)
def test_a_range_has_the_reason_for_its_width(
    name: str, seconds: float, waiting_seconds: float, reason: str
) -> None:
    likely = probable_range(devices.hardware(name), seconds, waiting_seconds)
    assert likely.low < seconds < likely.high
    assert likely.reason == reason
    assert len(reason.split()) == 3


def test_what_is_unknown_has_a_wider_range() -> None:
    published, *unknown = (
        likely.high / likely.low
        for likely in (
            probable_range(devices.hardware(name), 10.0, waiting_seconds)
            for name, waiting_seconds in (("h100", 0), ("h200", 0), ("h100", 5), ("m4max-64", 0))
        )
    )
    assert published < 1.6
    assert published < min(unknown)
    assert 2 * unknown[0] < min(unknown[1:])


def test_a_measured_card_has_a_number() -> None:
    card = replace(devices.hardware("h100"), basis="measured")
    likely = probable_range(card, 10.0)
    assert (likely.bounds, likely.reason) == ((10.0, 10.0), "")


def test_names_tell_the_cards_of_other_vendors() -> None:
    for name, sheet in devices.SHEETS.items():
        reason = probable_range(devices.hardware(name), 10.0).reason
        is_other = sheet.architecture.startswith(("cdna", "rdna", "xe"))
        assert (reason == ranges.UNKNOWN) == is_other, name
