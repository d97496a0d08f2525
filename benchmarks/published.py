"""Bytes and seconds that others published beside those of ``graphrun estimate``: every row of data/published.csv.

    .venv/bin/python benchmarks/published.py             runs every row's command; writes benchmarks/results/published.json
    .venv/bin/python benchmarks/published.py cogvideox   runs the rows with this word in their arguments, keeps the others
    .venv/bin/python benchmarks/published.py --left-out  also each row with constants fitted without its source (fit_costs.py)

A row's command is ``graphrun estimate`` with its ``arguments`` and ``--json``. ``of``: the whole call, a stage, or a phase. Bytes
are those that PyTorch's allocator counts: ``load_gib`` the weights, ``peak_gib`` the peak (of a stage or a phase: without weights).
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
    """The rows of data/published.csv, with numbers as floats or None."""
    with (ROOT / "benchmarks/data/published.csv").open() as file:
        for row in csv.DictReader(file):
            numbers = {name: float(row[name]) if row[name] else None for name in ("seconds", "load_gib", "peak_gib")}
            yield {**row, **numbers}


def estimate(arguments: str) -> dict[str, Any]:
    """What ``graphrun estimate ARGUMENTS --json`` prints, run in this process."""
    done = CliRunner().invoke(app, ["estimate", *arguments.split(), "--json"], catch_exceptions=False)
    if done.exit_code:
        raise SystemExit(f"{arguments}: {done.output}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def predicted(row: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, float]:
    """``seconds``, ``load_gib`` and ``peak_gib`` of ``row`` in the estimate ``found``."""
    mode, of = found["mode"], row["of"]
    phases = [phase for phase in found["phases"] if of in (phase["stage"], phase["phase"])]
    peak = max(phase["allocated_bytes"] for phase in phases) if of else mode["allocated_bytes"]
    by_name = mode["stages"] | {phase["phase"]: phase["seconds"] for phase in phases}
    seconds = by_name[of] if of else mode["seconds"]
    names = {phase["phase"].partition(":")[2] for phase in phases}
    weights = {each["name"]: each["weights"][each["dtype"]]["bytes"] for each in found["components"]}
    load = sum(weights[name] for name in names) if of else mode["weights_bytes"]
    return {"seconds": seconds, "load_gib": load / GIB, "peak_gib": peak / GIB}


def compared(row: Mapping[str, Any], ours: Mapping[str, float]) -> dict[str, Any]:
    """Published figures beside ours, with errors in percent."""
    found: dict[str, Any] = {}
    for name in ("seconds", "load_gib", "peak_gib"):
        if (theirs := row[name]) is not None:
            error = round(100 * (ours[name] / theirs - 1), 1)
            found[name] = {"published": theirs, "estimated": round(ours[name], 4), "error_percent": error}
    return found


def within(rows: list[dict[str, Any]], name: str, percent: float) -> str:
    """How many of the rows with the figure ``name`` are within ``percent``."""
    errors = [abs(row[name]["error_percent"]) for row in rows if name in row]
    return f"{sum(error <= percent for error in errors)} of {len(errors)}"


def main() -> None:
    """Runs the rows, prints and writes them."""
    os.chdir(ROOT)
    path, words = ROOT / "benchmarks/results/published.json", [word for word in sys.argv[1:] if word != "--left-out"]
    before: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    kept = {(row["arguments"], row["source"]): row for row in before.get("rows", ())} if words else {}
    estimates: dict[str, dict[str, Any]] = {}
    rows = []
    for row in published():
        arguments = row["arguments"]
        if (known := kept.get((arguments, row["source"]))) and not any(word in arguments for word in words):
            rows.append(known)
            continue
        if arguments not in estimates:
            estimates[arguments] = estimate(arguments)
        result = compared(row, predicted(row, estimates[arguments]))
        rows.append({**{name: row[name] for name in ("source", "facts", "arguments", "of", "note")}, **result})
        shown = [f"{name} {of['published']:g} {of['estimated']:g} {of['error_percent']:+.1f}%" for name, of in result.items()]
        print(row["source"][:32].ljust(32), arguments, row["of"], "  ", *shown, flush=True)
    listed = [row for row in rows if row["facts"] != "more"]
    summary = {
        f"{name} within {percent} %, {kind}": within(of, name, percent)
        for name in ("seconds", "load_gib", "peak_gib")
        for kind, of in (("required", listed), ("all", rows))
        for percent in (15, 30)
    }
    left = {name: before[name] for name in ("left_out_within_25_percent", "constants", "left_out") if name in before}
    result = {"date": datetime.date.today().isoformat(), "summary": summary, "rows": rows, **left}
    if "--left-out" in sys.argv:
        from fit_costs import left_out

        result |= left_out(list(published()))
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(*(f"{name}: {value}" for name, value in summary.items()), sep="\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
