"""Compare published bytes and seconds (data/published.csv, data/consumer.csv) with estimates.

    python benchmarks/published.py               every row; writes results/published.json
    python benchmarks/published.py cogvideox     bytes only of rows with this word in their
                                                 arguments; foreign_rows stay
    python benchmarks/published.py --left-out    also each row with constants fitted without its
                                                 source, and without its card (fit_costs.py), and
                                                 the probable ranges from them:
                                                 graphrun/model/ranges.json
    python benchmarks/published.py --table       ranges and tables of the recorded figures again
    python benchmarks/published.py --verdicts    whether runs fit in cards of 8 to 24 GiB

The constants of the cost model are fitted on the seconds of diffusers' rows: errors "as fitted"
describe the fit, errors "left out" what to expect for other cards and models. Rows of other engines
are not fitted. Without --left-out the recorded ones stay if the rows are the same.

A row's command is ``graphrun estimate`` with its ``arguments``, ``--ram 1T`` (hosts had RAM for all
weights) and ``--json``. ``code``: it ran other code than the installed libraries', which replaces
theirs for its bytes (`other_code`). ``of``: the whole call, a stage, a phase, or a step. Bytes are
those that PyTorch's allocator counts: ``load_gib`` the weights, ``peak_gib`` the peak (of a stage
or a phase: without weights). Peaks as nvidia-smi counts them are not compared.

Verdicts: a run fits in a card if its published peak is no larger. Wrong ones are counted for the
estimated peaks, which ``graphrun fit`` plans with, and for the rule that a model needs 1.2 times
its weights (with offloading, those of its largest component).
"""

from __future__ import annotations

import csv
import datetime
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.update(TRANSFORMERS_VERBOSITY="error", DIFFUSERS_VERBOSITY="error", HF_HUB_OFFLINE="1")

import numpy as np
from other_code import other_code
from typer.testing import CliRunner

from graphrun.cli.main import app
from graphrun.model import ranges

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "benchmarks/data"
RESULTS = ROOT / "benchmarks/results/published.json"
RANGES = ROOT / "graphrun/model/ranges.json"
GIB = 2**30
ABOUT = ("source", "facts", "engine", "code", "arguments", "of", "peak_kind", "note")
# Nine of ten runs of an unknown source are inside a range: a twentieth on either side.
TAIL = 0.05
ASSUMED = {ranges.LAPTOP: 2.0, ranges.UNKNOWN: 2.0}  # few published runs: a factor either way
LONG = (ranges.PUBLISHED, ranges.UNSEEN)
KEPT = ("weights_gib",)  # recorded figures that stay
CARDS_GIB, RULE = (8, 12, 16, 24), 1.2
# precisions of a similar size among those that estimates list by component
SIMILAR = {"int8wo": "int8", "quanto": "int8", "fp8wo": "fp8", "layerwise": "fp8"}
SIMILAR |= {"bf16": "bfloat16", "fp16": "float16"}


def published() -> Iterator[dict[str, Any]]:
    """Yield the rows that have arguments, with numbers as floats or None."""
    for name in ("published.csv", "consumer.csv"):
        with (DATA / name).open() as file:
            for row in csv.DictReader(file):
                if not row["arguments"]:
                    continue
                if name == "consumer.csv":
                    is_allocated = row["peak_kind"] == "allocated" and not row["of"]
                    peak = row["peak_gib"] if is_allocated else ""
                    row |= {"facts": "consumer", "code": "", "load_gib": "", "peak_gib": peak}
                numbers = ("seconds", "load_gib", "peak_gib")
                yield {
                    **{key: row[key] for key in ABOUT},
                    **{key: float(row[key]) if row[key] else None for key in numbers},
                }


def by_diffusers(row: Mapping[str, Any]) -> bool:
    """Return whether the row is of diffusers' own code, which estimates are of."""
    return bool(row["engine"] == "diffusers")


def estimate(arguments: str, code: str = "") -> dict[str, Any]:
    """Return the JSON of ``graphrun estimate ARGUMENTS --ram 1T``, run in this process.

    ``code``: the name of the `other_code` to use.
    """
    command = ["estimate", *arguments.split(), "--ram", "1T", "--json"]
    if code:
        command.append("--no-cache")
    with other_code(code):
        result = CliRunner().invoke(app, command, catch_exceptions=False)
    if result.exit_code:
        raise SystemExit(f"{arguments}: {result.output}")
    estimate_json: dict[str, Any] = json.loads(result.stdout)
    return estimate_json


def predicted(row: Mapping[str, Any], estimate_json: Mapping[str, Any]) -> dict[str, float]:
    """Return ``load_gib``, ``peak_gib`` and ``seconds`` of ``row`` in the estimate."""
    mode, phase_name = estimate_json["mode"], row["of"]
    phases = [
        phase for phase in estimate_json["phases"] if phase_name in (phase["stage"], phase["phase"])
    ]
    peak = (
        max(phase["allocated_bytes"] for phase in phases)
        if phase_name
        else mode["allocated_bytes"]
        if row["peak_kind"] != "reserved"
        else mode["reserved_bytes"]
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


def key(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Return the key of a row: its source, arguments, part of the call, and note."""
    return row["source"], row["arguments"], row["of"], row["note"]


def card_of(row: Mapping[str, Any]) -> str:
    words = row["arguments"].split()
    return ranges.chip(words[words.index("--hardware") + 1])


def mode_of(row: Mapping[str, Any]) -> str:
    """Return the mode of a row: ``resident`` in 16 bits, ``quantized``, or ``offloaded``."""
    words = row["arguments"].split()
    texts = [word for name, word in zip(words, words[1:], strict=False) if name == "--precision"]
    formats = {text.rpartition("=")[2] for text in texts} - {"bf16", "fp16", "fp32"}
    return "offloaded" if "--mode" in words else "quantized" if formats else "16 bits, resident"


# -- ranges: of rows with the figures that `fit_costs.left_out` returns


def factors(ratios: Sequence[float], sources: Sequence[str]) -> tuple[float, float]:
    """Return the factors of an estimate between which published seconds are.

    Weighted quantiles of ``ratios``, published over estimated; a source (or a card) with n rows
    counts as the square root of n. They are widened by one part in the number of sources, because
    the next source may be unlike all of them.
    """
    counts, order = Counter(sources), np.argsort(ratios)
    weights = np.array([1 / math.sqrt(counts[source]) for source in sources])[order]
    positions = (np.cumsum(weights) - weights / 2) / weights.sum()
    quantiles = np.interp((TAIL, 1 - TAIL), positions, np.log(ratios)[order])
    low, high = np.exp(quantiles * (1 + 1 / len(counts)))
    return round(min(1.0, float(low)), 3), round(max(1.0, float(high)), 3)


def range_table(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the cards with published runs, and the factors of each group, from diffusers' rows.

    Any card with long runs is an example of a card that was never published, whose range contains
    that of the others.
    """
    groups: dict[str, dict[str, Any]] = {}
    for name in (ranges.COPIES, ranges.SHORT, *LONG):
        own_group = ranges.PUBLISHED if name in LONG else name
        members = [row for row in rows if row["left_out"]["group"] == own_group]
        kind = "card" if name == ranges.UNSEEN else "source"
        owners = [card_of(row) if kind == "card" else row["source"] for row in members]
        groups[name] = {
            "factors": factors([row["left_out"][kind] for row in members], owners),
            "rows": len(members),
            f"{kind}s": len(set(owners)),
        }
    (low, high), (unseen_low, unseen_high) = (groups[name]["factors"] for name in LONG)
    groups[ranges.UNSEEN]["factors"] = min(low, unseen_low), max(high, unseen_high)
    for name, factor in ASSUMED.items():
        groups[name] = {"factors": (1 / factor, factor), "rows": 0}
    cards = {card_of(row) for row in rows if row["left_out"]["group"] == ranges.PUBLISHED}
    return {"cards": sorted(cards), "groups": groups}


def with_ranges(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the ``left_out`` figures of ``rows`` with the range by the rows of other sources."""
    fitted = [row for row in rows if by_diffusers(row)]
    tables = {
        source: range_table([row for row in fitted if row["source"] != source])
        for source in {row["source"] for row in rows}
    }
    results = []
    for row in rows:
        table, figures = tables[row["source"]], row["left_out"]
        is_unseen = figures["group"] == ranges.PUBLISHED and card_of(row) not in table["cards"]
        reason = ranges.UNSEEN if is_unseen else figures["group"]
        low, high = table["groups"][reason]["factors"]
        is_inside = low <= figures["source"] <= high
        results.append({**figures, "reason": reason, "range": [low, high], "inside": is_inside})
    return results


# -- tables


def within(errors: Sequence[float], percent: float) -> str:
    """Return how many of ``errors``, ratios less 1, are within ``percent``."""
    return f"{sum(abs(error) <= percent / 100 + 5e-4 for error in errors)} of {len(errors)}"


def seconds_line(
    title: str, rows: Sequence[Mapping[str, Any]], ratio: Callable[[Any], float]
) -> str:
    """Return a row of the table of seconds; ``ratio``: published over estimated."""
    errors = [1 / ratio(row) - 1 for row in rows]
    figures = [row["left_out"] for row in rows]
    widths = [figure["range"][1] / figure["range"][0] for figure in figures]
    cells = [title, str(len({row["source"] for row in rows}))]
    cells += [within(errors, 15), within(errors, 30)]
    cells += [
        f"{sum(figure['inside'] for figure in figures)} of {len(rows)}",
        f"{np.median(widths):.2f}x",
    ]
    return f"| {' | '.join(cells)} |"


def seconds_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of published seconds, as in docs/estimating.md."""
    timed_rows = [row for row in rows if "seconds" in row]
    diffusers = [row for row in timed_rows if by_diffusers(row)]
    foreign_rows = [row for row in timed_rows if not by_diffusers(row)]

    def without_source(row: Any) -> float:
        return float(row["left_out"]["source"])

    lines = [
        "| seconds | sources | within 15 % | within 30 % | inside the range | median width |",
        "|---|---|---|---|---|---|",
        seconds_line(
            "diffusers, as fitted",
            diffusers,
            lambda row: float(row["seconds"]["published"] / row["seconds"]["estimated"]),
        ),
        seconds_line("**diffusers, source left out**", diffusers, without_source),
        seconds_line(
            "diffusers, card left out", diffusers, lambda row: float(row["left_out"]["card"])
        ),
    ]
    sources = {
        card: {row["source"] for row in diffusers if card_of(row) == card}
        for card in map(card_of, diffusers)
    }

    def well_known_card(row: Any) -> str:
        return card_of(row) if len(sources[card_of(row)]) > 1 else "cards with one source"

    for key_of in (mode_of, well_known_card):
        for title in sorted({key_of(row) for row in diffusers}):
            members = [row for row in diffusers if key_of(row) == title]
            lines.append(seconds_line(f"- {title}", members, without_source))
    lines.append(seconds_line("other engines, not fitted", foreign_rows, without_source))
    return lines


def bytes_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of published bytes, as in docs/estimating.md."""
    lines = ["| bytes | within 2 % | within 5 % | within 10 % |", "|---|---|---|---|"]
    for name in ("load_gib", "peak_gib"):
        errors: dict[str, list[float]] = {}
        for row in rows:
            if name in row and by_diffusers(row):
                title = "weights" if name == "load_gib" else f"{row['peak_kind']} peaks"
                errors.setdefault(f"{title}, {mode_of(row)}", []).append(
                    row[name]["error_percent"] / 100
                )
        for title, figures in sorted(errors.items()):
            cells = [title, *(within(figures, share) for share in (2, 5, 10))]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def whole_runs(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of diffusers with the peak of a whole run, one for each command."""
    members = [row for row in rows if "peak_gib" in row and not row["of"] and by_diffusers(row)]
    return list({(row["arguments"], row["code"]): row for row in members}.values())


def weights_on_device(row: Mapping[str, Any], estimate_json: Mapping[str, Any]) -> int:
    """Return the bytes of the weights that the rule counts: all, or the largest component's."""
    if mode_of(row) != "offloaded":
        return int(estimate_json["mode"]["weights_bytes"])
    words = row["arguments"].split()
    texts = [word for name, word in zip(words, words[1:], strict=False) if name == "--precision"]
    formats = {name: value for name, _, value in (text.rpartition("=") for text in texts)}
    sizes = []
    for component in estimate_json["components"]:
        name = formats.get(component["name"], formats.get("", component["dtype"]))
        sizes.append(component["weights"][SIMILAR.get(name, name)]["bytes"])
    return int(max(sizes))


def set_verdicts(results: dict[str, Any], date: str) -> None:
    """Set the wrong verdicts by card in ``results``; estimate the weights of rows without them."""
    rows, verdicts = whole_runs(results["rows"]), dict[str, Any]()
    for row in rows:
        if "weights_gib" not in row:
            nbytes = weights_on_device(row, estimate(row["arguments"], row["code"]))
            row["weights_gib"] = round(nbytes / GIB, 4)
            print(row["arguments"], row["weights_gib"], flush=True)
    for size in CARDS_GIB:
        wrong: dict[str, list[str]] = {}
        for row in rows:
            peak = row["peak_gib"]
            verdicts_of_row = {
                "estimate": peak["estimated"] <= size,
                "rule": RULE * row["weights_gib"] <= size,
            }
            for name, fits in verdicts_of_row.items():
                if fits != (peak["published"] <= size):
                    wrong.setdefault(name, []).append("yes" if fits else "no")
        verdicts[str(size)] = {
            "runs": len(rows),
            "fitting": sum(row["peak_gib"]["published"] <= size for row in rows),
            "wrong": {
                name: {text: wrong.get(name, []).count(text) for text in ("yes", "no")}
                for name in ("estimate", "rule")
            },
        }
    results["verdicts"] = {"date": date, "cards": verdicts}


def verdict_table(verdicts: Mapping[str, Any]) -> list[str]:
    """Return the table of wrong verdicts; benchmarks/README.md has their sums."""
    lines = [
        "| fits in | runs that do | wrong: estimate | wrong: 1.2 x weights |",
        "|---|---|---|---|",
    ]
    for size, card in verdicts["cards"].items():
        cells = [f"{size} GiB", f"{card['fitting']} of {card['runs']}"]
        cells += [
            f"{sum(wrong.values())} ({wrong['yes']} yes, {wrong['no']} no)"
            for wrong in (card["wrong"][name] for name in ("estimate", "rule"))
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


CONDITIONS = {
    ranges.UNKNOWN: "a CPU, shared memory, AMD or Intel",
    ranges.COPIES: "over a tenth of the time is copying, which varies by host",
    ranges.LAPTOP: "a laptop's card: its sheet is for the highest power limit",
    ranges.SHORT: f"under {ranges.SHORT_SECONDS:g} s",
    ranges.PUBLISHED: "the card has published runs",
    ranges.UNSEEN: "another NVIDIA card",
}
"""When a range has a reason, in the order of `graphrun.model.ranges.range_group`."""


def range_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of ranges, as in docs/estimating.md."""
    table = range_table([row for row in rows if "seconds" in row and by_diffusers(row)])
    lines = [
        "| reason on screen | when (the first that applies) | rows | of "
        "| published over estimated |",
        "|---|---|---|---|---|",
    ]
    for name, condition in CONDITIONS.items():
        group = table["groups"][name]
        low, high = group["factors"]
        owners = next((f"{group[k]} {k}" for k in ("sources", "cards") if k in group), "assumed")
        cells = (name, condition, str(group["rows"]), owners, f"{low:.2f} to {high:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def summary(results: Mapping[str, Any]) -> str:
    """Return the sentence of README and docs/estimating.md."""
    rows = [row for row in results["rows"] if "seconds" in row and by_diffusers(row)]
    errors = [1 / row["left_out"]["source"] - 1 for row in rows]
    hits = sum(row["left_out"]["inside"] for row in rows)
    fifteen, thirty = within(errors, 15), within(errors, 30).partition(" ")[0]
    return (
        f"{results['constants']} constants are fitted on {len(rows)} published run times of "
        f"{len({row['source'] for row in rows})} sources. With the source left out of the fit, "
        f"{fifteen} are predicted within 15 %, {thirty} within 30 %, and {hits} are inside the "
        "range that screens print."
    )


def set_bytes(rows: Sequence[dict[str, Any]], words: Sequence[str], recorded: Any) -> None:
    """Set the estimated bytes of ``rows``; to ``recorded`` ones where no word applies."""
    estimates: dict[tuple[str, str], dict[str, Any]] = {}
    for row, figures in zip(rows, published(), strict=True):
        arguments, names = row["arguments"], ("load_gib", "peak_gib")
        if all(figures[name] is None for name in names):
            continue
        if words and key(row) in recorded and not any(word in arguments for word in words):
            row |= {name: recorded[key(row)][name] for name in names if figures[name] is not None}
            continue
        command = arguments, row["code"]
        if command not in estimates:
            estimates[command] = estimate(*command)
        figures = {**figures, "seconds": None}
        row |= compared(figures, predicted(figures, estimates[command]))
        print(arguments, row["of"], *(row[name] for name in names if name in row), flush=True)


def set_seconds(rows: Sequence[dict[str, Any]], recorded: Any, *, fits: bool) -> None:
    """Set the estimated seconds of ``rows``, and with ``fits`` those with rows left out."""
    from fit_costs import left_out, prepared

    by_key = {key(row): row for row in rows}
    ready = prepared([row for row in published() if row["seconds"]])
    for item in ready:
        figures = {**item.row, "load_gib": None, "peak_gib": None}
        by_key[key(figures)] |= compared(figures, {"seconds": item.seconds()})
    timed_rows = [by_key[key(item.row)] for item in ready]
    if fits:
        for item, figures in left_out(ready):
            by_key[key(item.row)]["left_out"] = figures
    elif all("left_out" in recorded.get(key(row), ()) for row in timed_rows):
        for row in timed_rows:
            row["left_out"] = recorded[key(row)]["left_out"]
    else:
        raise SystemExit("rows are new: run with --left-out")


def main() -> None:
    os.chdir(ROOT)
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    if "--verdicts" in sys.argv:
        set_verdicts(results, datetime.date.today().isoformat())
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(*verdict_table(results["verdicts"]), sep="\n")
        return
    if "--table" not in sys.argv:
        from fit_costs import EXPECTED

        recorded = {key(row): row for row in results.get("rows", ())}
        rows = [{name: row[name] for name in ABOUT} for row in published()]
        for row in rows:
            row |= {n: recorded[key(row)][n] for n in KEPT if n in recorded.get(key(row), ())}
        set_seconds(rows, recorded, fits="--left-out" in sys.argv)
        set_bytes(rows, words, recorded)
        date = datetime.date.today().isoformat()
        recorded_verdicts = {name: results[name] for name in ("verdicts",) if name in results}
        results = {"date": date, "constants": len(EXPECTED), "rows": rows, **recorded_verdicts}
    timed_rows = [row for row in results["rows"] if "seconds" in row]
    for row, figures in zip(timed_rows, with_ranges(timed_rows), strict=True):
        row["left_out"] = figures
    table = range_table([row for row in timed_rows if by_diffusers(row)])
    for path, data in ((RANGES, table), (RESULTS, results)):
        path.write_text(json.dumps(data, indent=1) + "\n")
    for table_of in (seconds_table, range_lines, bytes_table):
        print(*table_of(results["rows"]), "", sep="\n")
    print(summary(results))


if __name__ == "__main__":
    main()
