"""Calls 2 to 5 of attached pipelines beside other tools, all warm: bytes copied to the simulated
accelerator, and virtual time.

.venv/bin/python benchmarks/warm_calls.py [NAME ...]     writes benchmarks/results/warm_calls.json
.venv/bin/python benchmarks/warm_calls.py --table        prints the table from there

Tiny pipelines of ten families (`TABLE` of tests/attach/test_attach_warm.py), each within half of
its weights' bytes (or the least that graphrun needs), nine tenths and ten times as much. Every tool
calls its pipeline five times, then with two sizes in turn.

bytes     most bytes copied to the device in one of calls 2 to 5; its own code's included, which
`.to(device)` shows alone seconds   virtual, the mean of calls 2 to 5 in turn   bytes of two calls,
one of each size, after both were called before A tool that takes more than the budget does not fit,
and is not compared. Those that look at the budget are run with each.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [
    str(ROOT),
    str(ROOT / "benchmarks"),
    *(str(ROOT / "tests" / part) for part in ("attach", "sweep")),
]
os.environ.update(
    TRANSFORMERS_VERBOSITY="error",
    DIFFUSERS_VERBOSITY="error",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)

import torch  # noqa: E402
from peers_machine import Sim  # noqa: E402
from peers_tools import TOOLS, Cell  # noqa: E402
from test_attach_pipelines import equal, weight_bytes  # noqa: E402
from test_attach_warm import TABLE  # noqa: E402
from tiny_pipelines import Case, cases  # noqa: E402

import graphrun  # noqa: E402
from graphrun.solve.infeasible import Infeasible  # noqa: E402

SHARES = (0.5, 0.9, 10.0)
PEERS = ("model offload", "group offload, block, stream", "group offload, leaf, stream")
RESULTS = ROOT / "benchmarks/results/warm_calls.json"


def resized(case: Case) -> Case:
    """The same calls of twice the height; of another number of steps where the height cannot be
    said."""
    given = case.arguments()
    other = (
        {"height": 2 * given["height"]}
        if "height" in given
        else {"num_inference_steps": case.steps + 1}
    )
    return replace(case, arguments=lambda: {**case.arguments(), **other})


def measured(
    on: Sim, case: Case, pipe: Any, want: Any, put: Callable[[Any], Any]
) -> dict[str, Any]:
    """Five calls of ``pipe``, then two sizes in turn. ``want``: the first output, which all equal;
    None: not compared."""
    other, marks = resized(case), []
    for each in (*[case] * 5, other, case, other, case):
        start, moved = on.seconds(), on.moved()["in"]
        found = each.call(pipe, put)
        marks.append((on.seconds() - start, on.moved()["in"] - moved))
        assert want is None or each is other or equal(found, want), "another output"
    return {
        "bytes": max(nbytes for _, nbytes in marks[1:5]),
        "seconds": sum(seconds for seconds, _ in marks[1:5]) / 4,
        "in turn": sum(nbytes for _, nbytes in marks[7:]),
        "peak_bytes": on.peak_bytes(),
    }


def peer(
    name: str, case: Case, cap_bytes: int | None, activation_bytes: int, want: Any
) -> dict[str, Any]:
    """A tool of `peers_tools`; how it fails, where it does."""
    on, pipe = Sim(cap_bytes), case.build()
    try:
        with on.open(), torch.no_grad():
            TOOLS[f"diffusers {name}"].put(pipe, Cell(on.device, cap_bytes, None, activation_bytes))
            return measured(on, case, pipe, want, lambda tensor: tensor.to(on.device))
    except Exception as error:  # noqa: BLE001 - what a tool raises is a result
        return {"failed": f"{type(error).__name__}: {str(error)[:100]}"}


def attached(case: Case, budget_bytes: int, want: Any) -> dict[str, Any]:
    """graphrun's own, within the budget, or within the least that it needs where that is more."""
    on, pipe = Sim(None), case.build()
    with graphrun.attach(pipe, vram=budget_bytes, device=on.executor()):
        try:
            return {
                "budget_bytes": budget_bytes,
                **measured(on, case, pipe, want, torch.Tensor.cpu),
            }
        except Infeasible as error:
            least_bytes = error.smallest_budget_bytes
    # of the first size; the other one may need a little more
    return attached(case, int(1.05 * least_bytes), want)


def family(case: Case) -> dict[str, Any]:
    """All tools on one pipeline: ``.to(device)``, the peers without a cap, and by budget graphrun
    and ComponentsManager."""
    weights, want = weight_bytes(case.build()), case.call(case.build())
    resident = peer("resident", case, None, 0, want)
    activation_bytes = max(0, resident.get("peak_bytes", weights) - weights)
    found: dict[str, Any] = {"weight_bytes": weights, "resident": resident}
    found |= {name: peer(name, case, None, activation_bytes, want) for name in PEERS}
    budgets = []
    for share in SHARES:
        own = attached(case, int(share * weights), want)
        managed = peer("ComponentsManager", case, own["budget_bytes"], activation_bytes, want)
        tools = {
            "ComponentsManager": managed,
            **{name: found[name] for name in ("resident", *PEERS)},
        }
        fitting = {
            name: of
            for name, of in tools.items()
            if of.get("peak_bytes", own["budget_bytes"] + 1) <= own["budget_bytes"]
        }
        best = min(
            fitting,
            key=lambda name: (fitting[name]["bytes"], fitting[name]["seconds"]),
            default=None,
        )
        budgets.append(
            {
                "share": share,
                "graphrun": own,
                "ComponentsManager": managed,
                "best": best,
                "fitting": sorted(fitting),
            }
        )
    return {**found, "budgets": budgets}


def table(result: dict[str, Any]) -> str:
    """A row per pipeline and budget: graphrun beside the best of the tools that fit."""
    lines = [
        "| pipeline | budget | bytes | best peer | its bytes | ms | its ms | in turn | its bytes in turn |",
        "|---|" + "---|" * 8,
    ]
    for name, of in result["pipelines"].items():
        for row in of["budgets"]:
            own, best = row["graphrun"], row["best"]
            its = (row if best == "ComponentsManager" else of)[best] if best else None
            cells = [
                name.removesuffix("Pipeline"),
                f"{own['budget_bytes'] / of['weight_bytes']:.2f}",
                f"{own['bytes']:,}",
                best or "none fits",
            ]
            cells += [
                f"{its['bytes']:,}" if its else "",
                f"{1e3 * own['seconds']:.2f}",
                f"{1e3 * its['seconds']:.2f}" if its else "",
            ]
            cells += [f"{own['in turn']:,}", f"{its['in turn']:,}" if its else ""]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measures, writes after each pipeline, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--table", action="store_true", help="print the table of the results, and measure nothing"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="the results")
    parser.add_argument("names", nargs="*", help="of TABLE; the others' results stay")
    given = parser.parse_args()
    result: dict[str, Any] = (
        json.loads(given.out.read_text()) if given.out.exists() else {"pipelines": {}}
    )
    if not given.table:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        result |= {
            "date": datetime.date.today().isoformat(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            "versions": {
                name: version(name)
                for name in ("torch", "diffusers", "transformers", "accelerate", "highspy")
            },
        }
        for name in given.names or TABLE:
            result["pipelines"][name] = family(cases()[name])
            given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
