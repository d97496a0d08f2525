"""Many mutants of each kind of file (`fuzz`): ``make fuzz``, with SEED=7, SEEDS=10 (from there on)
and MINUTES=30.

Each run adds its counts to those of runs with other seeds in the result file; a seed that is there
already is not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import sys
import time
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "sweep")]
for name in ("HF_HUB_OFFLINE", "OMP_NUM_THREADS"):
    os.environ.setdefault(name, "1")

from campaign import about  # noqa: E402
from fuzz import READERS, outcome  # noqa: E402

RESULT = Path(__file__).parents[2] / "benchmarks/results/fuzz.json"
# of one seed; ten seeds are due
EXAMPLES = {
    "graphs": 2_000,
    "plans": 500,
    "weights": 100,
    "loras": 100,
    "gguf": 100,
    "tokenizers": 200,
    "schedulers": 200,
    "components": 100,
    "prompts": 200,
}


class TimeIsOver(KeyboardInterrupt):
    """Ends a run early. hypothesis lets interrupts pass."""


def run(reader: str, seed: int, examples: int, deadline: float = float("inf")) -> dict[str, Any]:
    """Counts of ``examples`` mutants from ``seed`` by outcome, the most seconds that one took, the
    failures with their mutants."""
    outcomes, failures, maximum = Counter[str](), list[str](), 0.0

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(READERS[reader][0])
    def one(example: Any) -> None:
        nonlocal maximum
        if time.time() > deadline:
            raise TimeIsOver
        try:
            result, seconds = outcome(reader, example)
            outcomes[result] += 1
            maximum = max(maximum, seconds)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001  (an untyped error, or a panic, is what this looks for)
            failures.append(f"{type(error).__name__}: {str(error)[:300]}: {repr(example)[:3_000]}")

    with contextlib.suppress(TimeIsOver):
        one()
    return {
        "examples": outcomes.total() + len(failures),
        "outcomes": dict(outcomes),
        "most_seconds": round(maximum, 2),
        "most_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        // 1024,  # of this process until now, libraries included
        "failures": failures,
    }


def added(sums: dict[str, Any], seed: int, counts: dict[str, Any]) -> dict[str, Any]:
    """``sums`` of other seeds, with the counts of ``seed``."""
    return {
        "seeds": sorted([*sums.get("seeds", ()), seed]),
        "examples": sums.get("examples", 0) + counts["examples"],
        "outcomes": dict(Counter(sums.get("outcomes", {})) + Counter(counts["outcomes"])),
        "most_seconds": max(sums.get("most_seconds", 0.0), counts["most_seconds"]),
        "most_mib": max(sums.get("most_mib", 0), counts["most_mib"]),
        "failures": [*sums.get("failures", ()), *counts["failures"]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--reader", action="append", choices=list(READERS))
    parser.add_argument("--record", type=Path, default=RESULT)
    options = parser.parse_args()
    deadline = time.time() + 60 * options.minutes
    for seed, reader in product(
        range(options.seed, options.seed + options.seeds), options.reader or READERS
    ):
        sums = (
            json.loads(options.record.read_text()) if options.record.exists() else {"readers": {}}
        )
        reader_sums = sums["readers"].get(reader, {})
        if seed in reader_sums.get("seeds", ()) or time.time() > deadline:
            continue
        counts = run(reader, seed, EXAMPLES[reader], deadline)
        sums["readers"][reader] = added(reader_sums, seed, counts)
        options.record.write_text(
            json.dumps({"about": about(), "readers": sums["readers"]}, indent=1, sort_keys=True)
            + "\n"
        )
        print(
            f"{reader}, seed {seed}: {counts['examples']} mutants, "
            f"{len(counts['failures'])} failures",
            flush=True,
        )


if __name__ == "__main__":
    main()
