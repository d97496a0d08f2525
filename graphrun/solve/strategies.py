"""Heuristics of the search, each with a switch. A plan is valid without any of them.

`benchmarks/ablation.py` measures the seconds of plans that each saves, and the seconds of planning
that it costs.

    deeper ring buffers  try ring buffers of three and four blocks
    baselines            try fixed strategies for running a pipeline
    layers               split a component into layers where that is faster
    near plans           if pages exceed the budget, search near the last plan first
    reserved pages       reserve the page overhead in its own slot before reducing the budget
    paged baselines      try the baselines too where a plan with page overhead is not proven optimal
    slower disk          prefer a nearly equal plan that loses less on a slower disk
    likely variants      solve large programs with one variant per component first
    main device          solve large programs of several devices for the main device too
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, get_args

Strategy = Literal[
    "deeper ring buffers",
    "baselines",
    "layers",
    "near plans",
    "reserved pages",
    "paged baselines",
    "slower disk",
    "likely variants",
    "main device",
]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

_OFF: ContextVar[frozenset[Strategy]] = ContextVar("off", default=frozenset())
_CONSULTED: ContextVar[set[Strategy] | None] = ContextVar("consulted", default=None)


def has(strategy: Strategy) -> bool:
    """Return whether the search uses ``strategy``. Asked only where that may change the plan."""
    if (consulted := _CONSULTED.get()) is not None:
        consulted.add(strategy)
    return strategy not in _OFF.get()


@contextmanager
def without(*strategies: Strategy) -> Iterator[set[Strategy]]:
    """Context in which the search does not use ``strategies``. Yields those it has asked for."""
    consulted = set[Strategy]()
    tokens = _OFF.set(_OFF.get() | frozenset(strategies)), _CONSULTED.set(consulted)
    try:
        yield consulted
    finally:
        _OFF.reset(tokens[0])
        _CONSULTED.reset(tokens[1])
