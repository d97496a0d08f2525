"""A few mutants of each kind of file, always the same ones; `fuzzing.py` makes more."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
import fuzzing

EXAMPLES = {"graphs": 60, "plans": 24, "weights": 100, "loras": 100, "gguf": 60, "prompts": 100}


@pytest.mark.long
@pytest.mark.parametrize("reader", EXAMPLES)
def test_mutants(reader: str) -> None:
    found = fuzzing.run(reader, 2, EXAMPLES[reader])
    assert found["failures"] == []
    assert found["examples"] >= EXAMPLES[reader]
    assert len(found["outcomes"]) > 1, "mutants that are all refused, or all accepted, test nothing"


def test_counts_are_summed_over_seeds() -> None:
    one = {"examples": 2, "outcomes": {"accepted": 1, "refused": 1}, "most_seconds": 0.5, "failures": []}
    two = fuzzing.added(fuzzing.added({}, 2, one), 1, {**one, "outcomes": {"accepted": 2}, "most_seconds": 0.1, "failures": ["x"]})
    assert two == {
        "seeds": [1, 2],
        "examples": 4,
        "outcomes": {"accepted": 3, "refused": 1},
        "most_seconds": 0.5,
        "failures": ["x"],
    }
