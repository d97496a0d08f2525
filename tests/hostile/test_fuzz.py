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


@pytest.mark.long
@pytest.mark.parametrize("reader", EXAMPLES)
def test_mutants(reader: str) -> None:
    seed, count = EXAMPLES[reader]
    found = fuzzing.run(reader, seed, count)
    assert found["failures"] == []
    assert found["examples"] >= count
    assert len(found["outcomes"]) > 1, "mutants that are all refused, or all accepted, test nothing"


def test_counts_are_summed_over_seeds() -> None:
    one = {
        "examples": 2,
        "outcomes": {"accepted": 1, "refused": 1},
        "most_seconds": 0.5,
        "most_mib": 300,
        "failures": [],
    }
    other = {
        **one,
        "outcomes": {"accepted": 2},
        "most_seconds": 0.1,
        "most_mib": 400,
        "failures": ["x"],
    }
    two = fuzzing.added(fuzzing.added({}, 2, one), 1, other)
    assert two == {
        "seeds": [1, 2],
        "examples": 4,
        "outcomes": {"accepted": 3, "refused": 1},
        "most_seconds": 0.5,
        "most_mib": 400,
        "failures": ["x"],
    }
