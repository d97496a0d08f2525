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


def run(reader: str, seed: int, examples: int, until: float = float("inf")) -> dict[str, Any]:
    """Counts of ``examples`` mutants from ``seed`` by outcome, the most seconds that one took, the
    failures with their mutants."""
    outcomes, failures, most = Counter[str](), list[str](), 0.0

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
        nonlocal most
        if time.time() > until:
            raise TimeIsOver
        try:
            said, seconds = outcome(reader, example)
            outcomes[said] += 1
            most = max(most, seconds)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001  (an untyped error, or a panic, is what this looks for)
            failures.append(f"{type(error).__name__}: {str(error)[:300]}: {repr(example)[:3_000]}")

    with contextlib.suppress(TimeIsOver):
        one()
    return {
        "examples": outcomes.total() + len(failures),
        "outcomes": dict(outcomes),
        "most_seconds": round(most, 2),
        "most_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        // 1024,  # of this process until now, libraries included
        "failures": failures,
    }


def added(before: dict[str, Any], seed: int, found: dict[str, Any]) -> dict[str, Any]:
    """``before``, the sums of other seeds, with the counts of ``seed``."""
    return {
        "seeds": sorted([*before.get("seeds", ()), seed]),
        "examples": before.get("examples", 0) + found["examples"],
        "outcomes": dict(Counter(before.get("outcomes", {})) + Counter(found["outcomes"])),
        "most_seconds": max(before.get("most_seconds", 0.0), found["most_seconds"]),
        "most_mib": max(before.get("most_mib", 0), found["most_mib"]),
        "failures": [*before.get("failures", ()), *found["failures"]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--reader", action="append", choices=list(READERS))
    parser.add_argument("--record", type=Path, default=RESULT)
    asked = parser.parse_args()
    until = time.time() + 60 * asked.minutes
    for seed, reader in product(
        range(asked.seed, asked.seed + asked.seeds), asked.reader or READERS
    ):
        sums = json.loads(asked.record.read_text()) if asked.record.exists() else {"readers": {}}
        before = sums["readers"].get(reader, {})
        if seed in before.get("seeds", ()) or time.time() > until:
            continue
        found = run(reader, seed, EXAMPLES[reader], until)
        sums["readers"][reader] = added(before, seed, found)
        asked.record.write_text(
            json.dumps({"about": about(), "readers": sums["readers"]}, indent=1, sort_keys=True)
            + "\n"
        )
        print(
            f"{reader}, seed {seed}: {found['examples']} mutants, {len(found['failures'])} failures",
            flush=True,
        )


if __name__ == "__main__":
    main()
