"""Compare calls 2 to 5 of attached pipelines with other tools, all warm.

    python benchmarks/warm_calls.py [NAME ...]    writes results/warm_calls.json
    python benchmarks/warm_calls.py --table       prints the table from there

Tiny pipelines of ten families (`TABLE` of tests/attach/test_attach_warm.py), each within half of
its weights' bytes (or graphrun's minimum), nine tenths and ten times as much. Every tool calls its
pipeline five times, then with two sizes in turn.

    bytes      most bytes copied to the simulated accelerator in one of calls 2 to 5, including the
               pipeline's own copies, which `.to(device)` shows alone
    seconds    virtual, the mean of calls 2 to 5
    in turn    bytes of two calls, one of each size, after both were called before

A tool that takes more than the budget does not fit, and is not compared. Tools that adapt to the
budget run with each.
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
    """Return the same calls with twice the height, or else another number of steps."""
    arguments = case.arguments()
    size_input = (
        {"height": 2 * arguments["height"]}
        if "height" in arguments
        else {"num_inference_steps": case.steps + 1}
    )
    return replace(case, arguments=lambda: {**case.arguments(), **size_input})


def measured(
    simulator: Sim, case: Case, pipe: Any, expected: Any, put: Callable[[Any], Any]
) -> dict[str, Any]:
    """Measure five calls of ``pipe``, then two sizes in turn. ``expected``: the first output, equal
    for all; None: not compared."""
    resized_case, marks = resized(case), []
    for next_case in (*[case] * 5, resized_case, case, resized_case, case):
        start, start_bytes = simulator.seconds(), simulator.moved()["in"]
        output = next_case.call(pipe, put)
        marks.append((simulator.seconds() - start, simulator.moved()["in"] - start_bytes))
        assert expected is None or next_case is resized_case or equal(output, expected), (
            "another output"
        )
    return {
        "bytes": max(nbytes for _, nbytes in marks[1:5]),
        "seconds": sum(seconds for seconds, _ in marks[1:5]) / 4,
        "in turn": sum(nbytes for _, nbytes in marks[7:]),
        "peak_bytes": simulator.peak_bytes(),
    }


def peer(
    name: str, case: Case, cap_bytes: int | None, activation_bytes: int, expected: Any
) -> dict[str, Any]:
    """Run a tool of `peers_tools`; return its failure if it fails."""
    simulator, pipe = Sim(cap_bytes), case.build()
    try:
        with simulator.open(), torch.no_grad():
            TOOLS[f"diffusers {name}"].put(
                pipe, Cell(simulator.device, cap_bytes, None, activation_bytes)
            )
            return measured(
                simulator, case, pipe, expected, lambda tensor: tensor.to(simulator.device)
            )
    except Exception as error:  # noqa: BLE001 - what a tool raises is a result
        return {"failed": f"{type(error).__name__}: {str(error)[:100]}"}


def attached(case: Case, budget_bytes: int, expected: Any) -> dict[str, Any]:
    """Run graphrun within the budget, or within its minimum if that is more."""
    simulator, pipe = Sim(None), case.build()
    with graphrun.attach(pipe, vram=budget_bytes, device=simulator.executor()):
        try:
            return {
                "budget_bytes": budget_bytes,
                **measured(simulator, case, pipe, expected, torch.Tensor.cpu),
            }
        except Infeasible as error:
            least_bytes = error.smallest_budget_bytes
    # for the first size; the other one may need a little more
    return attached(case, int(1.05 * least_bytes), expected)


def family(case: Case) -> dict[str, Any]:
    """Run all tools on one pipeline: ``.to(device)``, the peers without a cap, and by budget
    graphrun and ComponentsManager."""
    weights, expected = weight_bytes(case.build()), case.call(case.build())
    resident = peer("resident", case, None, 0, expected)
    activation_bytes = max(0, resident.get("peak_bytes", weights) - weights)
    results: dict[str, Any] = {"weight_bytes": weights, "resident": resident}
    results |= {name: peer(name, case, None, activation_bytes, expected) for name in PEERS}
    budgets = []
    for share in SHARES:
        graphrun_figures = attached(case, int(share * weights), expected)
        managed = peer(
            "ComponentsManager", case, graphrun_figures["budget_bytes"], activation_bytes, expected
        )
        tools = {
            "ComponentsManager": managed,
            **{name: results[name] for name in ("resident", *PEERS)},
        }
        fitting_tools = {
            name: figures
            for name, figures in tools.items()
            if figures.get("peak_bytes", graphrun_figures["budget_bytes"] + 1)
            <= graphrun_figures["budget_bytes"]
        }
        best = min(
            fitting_tools,
            key=lambda name: (fitting_tools[name]["bytes"], fitting_tools[name]["seconds"]),
            default=None,
        )
        budgets.append(
            {
                "share": share,
                "graphrun": graphrun_figures,
                "ComponentsManager": managed,
                "best": best,
                "fitting": sorted(fitting_tools),
            }
        )
    return {**results, "budgets": budgets}


def table(result: dict[str, Any]) -> str:
    """Return a row per pipeline and budget: graphrun and the best of the tools that fit."""
    lines = [
        "| pipeline | budget | bytes | best peer | its bytes | ms | its ms | in turn | its "
        "bytes in turn |",
        "|---|" + "---|" * 8,
    ]
    for name, pipeline in result["pipelines"].items():
        for row in pipeline["budgets"]:
            graphrun_figures, best = row["graphrun"], row["best"]
            peer_figures = (
                (row if best == "ComponentsManager" else pipeline)[best] if best else None
            )
            cells = [
                name.removesuffix("Pipeline"),
                f"{graphrun_figures['budget_bytes'] / pipeline['weight_bytes']:.2f}",
                f"{graphrun_figures['bytes']:,}",
                best or "none fits",
            ]
            cells += [
                f"{peer_figures['bytes']:,}" if peer_figures else "",
                f"{1e3 * graphrun_figures['seconds']:.2f}",
                f"{1e3 * peer_figures['seconds']:.2f}" if peer_figures else "",
            ]
            cells += [
                f"{graphrun_figures['in turn']:,}",
                f"{peer_figures['in turn']:,}" if peer_figures else "",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--table", action="store_true", help="print the table of the results, and measure nothing"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="the results")
    parser.add_argument("names", nargs="*", help="of TABLE; the others' results stay")
    options = parser.parse_args()
    result: dict[str, Any] = (
        json.loads(options.out.read_text()) if options.out.exists() else {"pipelines": {}}
    )
    if not options.table:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        result |= {
            "date": datetime.date.today().isoformat(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python "
            f"{platform.python_version()}",
            "versions": {
                name: version(name)
                for name in ("torch", "diffusers", "transformers", "accelerate", "highspy")
            },
        }
        for name in options.names or TABLE:
            result["pipelines"][name] = family(cases()[name])
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
