"""Compare published bytes and seconds, data/published.csv, with ``graphrun estimate``.

    python benchmarks/published.py               runs every row's command; writes
                                                 results/published.json
    python benchmarks/published.py cogvideox     only rows with this word in their arguments; others
                                                 stay
    python benchmarks/published.py --left-out    also each row with constants fitted without its
                                                 source (fit_costs.py); a quarter of an hour

The constants of the cost model are fitted on the seconds of these rows: errors "as fitted" describe
the fit, errors "left out" what to expect for other cards and models. Without --left-out the
recorded ones stay if the rows are the same.

A row's command is ``graphrun estimate`` with its ``arguments`` and ``--json``. ``of``: the whole
call, a stage, or a phase. Bytes are those that PyTorch's allocator counts: ``load_gib`` the
weights, ``peak_gib`` the peak (of a stage or a phase: without weights).
"""

from __future__ import annotations

import csv
import datetime
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.update(TRANSFORMERS_VERBOSITY="error", DIFFUSERS_VERBOSITY="error", HF_HUB_OFFLINE="1")

from typer.testing import CliRunner

from graphrun.cli.main import app

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30


def published() -> Iterator[dict[str, Any]]:
    """Yield the rows of data/published.csv, with numbers as floats or None."""
    with (ROOT / "benchmarks/data/published.csv").open() as file:
        for row in csv.DictReader(file):
            numbers = {
                name: float(row[name]) if row[name] else None
                for name in ("seconds", "load_gib", "peak_gib")
            }
            yield {**row, **numbers}


def estimate(arguments: str) -> dict[str, Any]:
    """Return the JSON of ``graphrun estimate ARGUMENTS --ram 1T``, run in this process: published
    rows are of hosts with RAM for all weights."""
    command = ["estimate", *arguments.split(), "--ram", "1T", "--json"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    if result.exit_code:
        raise SystemExit(f"{arguments}: {result.output}")
    estimate_json: dict[str, Any] = json.loads(result.stdout)
    return estimate_json


def predicted(row: Mapping[str, Any], estimate_json: Mapping[str, Any]) -> dict[str, float]:
    """Return ``seconds``, ``load_gib`` and ``peak_gib`` of ``row`` in the estimate."""
    mode, phase_name = estimate_json["mode"], row["of"]
    phases = [
        phase for phase in estimate_json["phases"] if phase_name in (phase["stage"], phase["phase"])
    ]
    peak = (
        max(phase["allocated_bytes"] for phase in phases) if phase_name else mode["allocated_bytes"]
    )
    by_name = mode["stages"] | {phase["phase"]: phase["seconds"] for phase in phases}
    seconds = by_name[phase_name] if phase_name else mode["seconds"]
    names = {phase["phase"].partition(":")[2] for phase in phases}
    weights = {
        component["name"]: component["weights"][component["dtype"]]["bytes"]
        for component in estimate_json["components"]
    }
    load = sum(weights[name] for name in names) if phase_name else mode["weights_bytes"]
    return {"seconds": seconds, "load_gib": load / GIB, "peak_gib": peak / GIB}


def compared(row: Mapping[str, Any], estimates: Mapping[str, float]) -> dict[str, Any]:
    """Return published and estimated figures, with errors in percent."""
    comparison: dict[str, Any] = {}
    for name in ("seconds", "load_gib", "peak_gib"):
        if (published_value := row[name]) is not None:
            error = round(100 * (estimates[name] / published_value - 1), 1)
            comparison[name] = {
                "published": published_value,
                "estimated": round(estimates[name], 4),
                "error_percent": error,
            }
    return comparison


def key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the key of a row: its source, arguments and part of the call."""
    return row["source"], row["arguments"], row["of"]


def timed(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what the errors of a recorded row depend on, except code."""
    return *key(row), row["seconds"]["published"]


def summary_of(rows: list[dict[str, Any]], left_out: list[dict[str, Any]]) -> dict[str, str]:
    """Return how many figures are within the percentages in README and docs/estimating.md."""
    shares = {"seconds": (15, 25, 30), "load_gib": (1, 15), "peak_gib": (2, 3, 15)}
    counts = {}
    for kind in ("required", "all"):
        fitted, unfitted = (
            [row for row in group if kind == "all" or row["facts"] != "more"]
            for group in (rows, left_out)
        )
        counts |= {
            f"{name} within {share} %, {kind}": within(fitted, name, share)
            for name in shares
            for share in shares[name]
        }
        if unfitted:
            counts |= {
                f"seconds within {share} %, {kind}, left out": within(unfitted, "seconds", share)
                for share in shares["seconds"]
            }
    return counts


def within(rows: list[dict[str, Any]], name: str, percent: float) -> str:
    """Return how many of the rows with the figure ``name`` are within ``percent``."""
    errors = [abs(row[name]["error_percent"]) for row in rows if name in row]
    return f"{sum(error <= percent for error in errors)} of {len(errors)}"


def main() -> None:
    os.chdir(ROOT)
    path, words = (
        ROOT / "benchmarks/results/published.json",
        [word for word in sys.argv[1:] if word != "--left-out"],
    )
    earlier_results: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    earlier_rows = {key(row): row for row in earlier_results.get("rows", ())} if words else {}
    estimates: dict[str, dict[str, Any]] = {}
    rows = []
    for row in published():
        arguments = row["arguments"]
        if (earlier_row := earlier_rows.get(key(row))) and not any(
            word in arguments for word in words
        ):
            rows.append(earlier_row)
            continue
        if arguments not in estimates:
            estimates[arguments] = estimate(arguments)
        result = compared(row, predicted(row, estimates[arguments]))
        rows.append(
            {
                **{name: row[name] for name in ("source", "facts", "arguments", "of", "note")},
                **result,
            }
        )
        texts = [
            f"{name} {figure['published']:g} {figure['estimated']:g} "
            f"{figure['error_percent']:+.1f}%"
            for name, figure in result.items()
        ]
        print(row["source"][:32].ljust(32), arguments, row["of"], "  ", *texts, flush=True)
    recorded = {name: earlier_results.get(name) for name in ("constants", "left_out")}
    if "--left-out" in sys.argv:
        from fit_costs import left_out

        recorded = left_out(list(published()))
    elif [timed(row) for row in recorded["left_out"] or ()] != [
        timed(row) for row in rows if "seconds" in row
    ]:
        recorded = {}
        print(
            "the recorded left-out figures are of other rows and are dropped: run with --left-out"
        )
    summary = summary_of(rows, recorded.get("left_out") or [])
    result = {
        "date": datetime.date.today().isoformat(),
        "summary": summary,
        "rows": rows,
        **recorded,
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(*(f"{name}: {value}" for name, value in summary.items()), sep="\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
