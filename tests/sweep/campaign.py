"""Which tests run: the small ones, or those marked ``sweep``. ``--part`` and ``--minutes`` take
some of these, ``--record`` notes how they ended, with what they noted by pytest's
``record_property("figures", ...)``.

``pytest.mark.sweep("NAME")`` marks a long test of part NAME; without a name the part is called
after the file (``test_NAME.py``). ``pytest.mark.sweep("NAME", sample=2)``: two of its cases are
small ones, far apart in their order. ``pytest.mark.sweep("NAME", of_all=6)``: where all parts run,
six of its cases, every day others; the part alone runs all of them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

SEED = 17  # of the order in which a slice is run
LEFT = "no time left"
LIBRARIES = (
    "torch",
    "diffusers",
    "transformers",
    "accelerate",
    "bitsandbytes",
    "highspy",
    "ortools",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", help="Of the tests marked sweep, those of this part alone.")
    parser.addoption(
        "--minutes", type=float, help="Start tests for so many minutes, in one random order."
    )
    parser.addoption("--record", type=Path, help="Write the outcome of each part to this file.")
    parser.addoption("--started", type=float, default=time.time(), help=argparse.SUPPRESS)


def sampled(cases: Iterable[Any], sample: Iterable[Any], part: str, **counts: int) -> list[Any]:
    """``cases`` as parameters of a test: those in ``sample`` always run, the others in the part of
    the sweep called ``part``, some of them (``of_all``) where all parts run."""
    required = set(sample)
    return [
        pytest.param(case, marks=[] if case in required else [pytest.mark.sweep(part, **counts)])
        for case in cases
    ]


def part_of(item: pytest.Item) -> str | None:
    """The part of the sweep that a test belongs to; None for a small one."""
    mark = item.get_closest_marker("sweep")
    if mark is None:
        return None
    return mark.args[0] if mark.args else item.path.stem.removeprefix("test_")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part_option = config.getoption("--part")
    sweeping = part_option is not None or "sweep" in config.getoption("-m")
    small = sample_of(items)
    parts = {item: None if item in small else part_of(item) for item in items}
    if part_option is not None and part_option not in parts.values():
        raise pytest.UsageError(
            f"there is no part {part_option}; there are: "
            f"{', '.join(sorted({part for part in parts.values() if part}))}"
        )
    selection = [
        item
        for item, part in parts.items()
        if (part is not None) == sweeping and part_option in (None, part)
    ]
    if config.getoption("--minutes"):
        random.Random(SEED).shuffle(selection)
    elif part_option is None:
        selection = of_the_day(selection, config.getoption("--started"))
    config.hook.pytest_deselected(items=[item for item in items if item not in set(selection)])
    items[:] = selection
    for item in items:
        item.user_properties.append(("part", parts[item]))


def cases_of(items: Iterable[pytest.Item], option: str) -> Iterator[tuple[list[pytest.Item], int]]:
    """Yield the cases of each test whose mark has ``option``, and its number."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if (mark := item.get_closest_marker("sweep")) and option in mark.kwargs:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for group in cases.values():
        yield group, group[0].get_closest_marker("sweep").kwargs[option]  # type: ignore[union-attr]


def sample_of(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """The cases of tests marked ``sample`` that run with the small tests."""
    return {
        group[number * (len(group) - 1) // max(1, count - 1)]
        for group, count in cases_of(items, "sample")
        for number in range(count)
    }


def of_the_day(items: list[pytest.Item], started: float) -> list[pytest.Item]:
    """``items`` without those cases of a test marked ``of_all`` that are for another day."""
    day = int(started // 86_400)
    excluded = set[pytest.Item]()
    for group, count in cases_of(items, "of_all"):
        random.Random(SEED).shuffle(group)
        first = day * count % len(group)
        excluded |= set(group) - set((group + group)[first : first + count])
    return [item for item in items if item not in excluded]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("--minutes")
    if minutes and time.time() > item.config.getoption("--started") + 60 * minutes:
        pytest.skip(LEFT)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    counts_by_part: dict[str, Counter[str]] = {}
    left_out_counts: Counter[str] = Counter()
    figures: dict[str, Any] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            properties = dict(getattr(report, "user_properties", ()))
            part = properties.get("part")  # a file that fails to import has none
            if part is None:
                continue
            late = outcome == "skipped" and LEFT in str(report.longrepr)
            if "figures" in properties:
                figures[report.nodeid] = properties["figures"]
            counts_by_part.setdefault(part, Counter())[
                "left" if late else "failed" if outcome == "error" else outcome
            ] += 1
            counts_by_part[part]["seconds"] += round(report.duration)
            if late:
                left_out_counts[report.nodeid.partition("[")[0]] += 1
    if not counts_by_part:
        return
    terminalreporter.section("sweep")
    for part, counts in sorted(counts_by_part.items()):
        run = counts["passed"] + counts["failed"]
        terminalreporter.line(
            f"{part}: {run} run, {counts['failed']} failed, {counts['left']} left, "
            f"{counts['seconds']} s"
        )
    for name, count in sorted(left_out_counts.items()):
        terminalreporter.line(f"  left: {count} of {name}")
    if record := config.getoption("--record"):
        outcomes = {
            "about": about(),
            "parts": counts_by_part,
            **({"figures": figures} if figures else {}),
        }
        record.write_text(json.dumps(outcomes, indent=1, sort_keys=True) + "\n")


def about() -> dict[str, Any]:
    """Date, machine, versions."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}",
        "versions": {name: version(name) for name in LIBRARIES},
    }
