"""A few mutants of each kind of file, always the same ones; `fuzzing.py` makes more."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
import fuzzing

# Reader -> seed and number of mutants; with these, some of each kind are accepted, some refused.
EXAMPLES = {
    "graphs": (0, 60),
    "plans": (2, 24),
    "weights": (0, 100),
    "loras": (0, 100),
    "gguf": (0, 60),
}
EXAMPLES |= {
    "tokenizers": (0, 60),
    "schedulers": (0, 60),
    "components": (0, 30),
    "prompts": (0, 100),
}


@pytest.mark.sweep("more", sample=2)
@pytest.mark.long
@pytest.mark.parametrize("reader", EXAMPLES)
def test_mutants(reader: str) -> None:
    seed, count = EXAMPLES[reader]
    counts = fuzzing.run(reader, seed, count)
    assert counts["failures"] == []
    assert counts["examples"] >= count
    assert len(counts["outcomes"]) > 1, (
        "mutants that are all refused, or all accepted, test nothing"
    )


def test_counts_are_summed_over_seeds() -> None:
    counts = {
        "examples": 2,
        "outcomes": {"accepted": 1, "refused": 1},
        "most_seconds": 0.5,
        "most_mib": 300,
        "failures": [],
    }
    other = {
        **counts,
        "outcomes": {"accepted": 2},
        "most_seconds": 0.1,
        "most_mib": 400,
        "failures": ["x"],
    }
    sums = fuzzing.added(fuzzing.added({}, 2, counts), 1, other)
    assert sums == {
        "seeds": [1, 2],
        "examples": 4,
        "outcomes": {"accepted": 3, "refused": 1},
        "most_seconds": 0.5,
        "most_mib": 400,
        "failures": ["x"],
    }
