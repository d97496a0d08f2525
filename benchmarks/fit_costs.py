"""Fit the constants of the cost model on the published seconds in data/published.csv.

    python benchmarks/fit_costs.py               prints the constants, to be written where they are
                                                 defined
    python benchmarks/published.py --left-out    fits without each source in turn, and records the
                                                 predictions for it

Minimizes the squared logarithms of estimated over published seconds, and of each constant over its
`EXPECTED` value, each in units of its uncertainty; outliers count less (soft L1). Rows of other
programs' code count less than diffusers'.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from published import ROOT, compared, published

import graphrun
from graphrun.disk_store import Store
from graphrun.modules.build import meta_modules
from graphrun.profile import costs, hardware, modes
from graphrun.profile.asked import options_by_stage, pictures_input, with_precisions
from graphrun.profile.problems import phase_spans
from graphrun.profile.recording import Call
from graphrun.store import dry_run

# Constant -> (expected value, uncertainty of its logarithm). Shares of data sheets: matrix products
# reach 80 to 90 % on A100 and H100 at their best sizes; FlashAttention 2 370 TFLOP/s on an H100
# with 128 features per head (arXiv:2407.08608).
EXPECTED: Mapping[str, tuple[float, float]] = {
    "ampere.matmul": (0.85, 0.15),
    "ampere.attention": (0.75, 0.15),
    "ampere.convolution": (0.55, 0.4),
    "hopper.matmul": (0.75, 0.2),
    "hopper.attention": (0.65, 0.15),
    "hopper.convolution": (0.5, 0.4),
    "geforce.matmul": (1.0, 0.06),
    "geforce.attention": (1.0, 0.08),
    "geforce.convolution": (0.8, 0.4),
    "hardware.MEMORY_SHARE": (0.88, 0.06),
    "hardware.WAVE_SECONDS": (5e-6, 0.5),
    "hardware.SOFTMAX_EXPONENTIALS": (3.0, 0.4),
    "hardware.LAUNCH_SECONDS": (20e-6, 0.4),
    "hardware.PAGEABLE_SHARE": (0.35, 0.4),
    "hardware.FRESH_PAGES_RATE": (2.5e9, 0.5),
    "costs.WIDE_ATTENTION": (0.35, 0.7),
    "costs.NORM_SECONDS": (0.8e-9, 0.3),
    "costs.INT8_WAIT_SECONDS": (0.4e-3, 1.0),
    "costs.SCALED_OUTPUT_BYTES": (12.0, 0.7),
    "costs.SCALED_WEIGHT_BYTES": (16.0, 0.7),
    "modes.TENSOR_SECONDS": (0.4e-3, 0.7),
}
ROW_ERROR, FOREIGN_ERROR = 0.06, 0.12
FOREIGN = ("Wan-Video", "fireworks", "sgl-project")
MODULES = {"hardware": hardware, "costs": costs, "modes": modes}


class Row:
    """A published row, ready to be estimated with any constants."""

    def __init__(self, row: dict[str, Any], store: Store) -> None:
        words = shlex.split(row["arguments"])
        options: dict[str, list[str]] = {}
        for name, value in zip(words[1::2], words[2::2], strict=True):
            options.setdefault(name.removeprefix("--"), []).append(value)
        graph, formats = with_precisions(
            graphrun.load(ROOT / words[0]), options.get("precision", ())
        )
        inputs: dict[str, Any] = dict(text.split("=", 1) for text in options.get("set", ()))
        if "batch" in options:
            inputs[pictures_input(graph)] = options["batch"][0]
        self.row, self.graph, self.card = row, graph, options["hardware"][0]
        self.run = dry_run(
            graph,
            graph.for_planning(inputs),
            store,
            options_by_stage(graph, options.get("option", ())),
        )
        resident_names, cpu, pinned = (
            options.get("keep", ()),
            options.get("cpu", ()),
            options.get("pinned") != ["0"],
        )
        self.mode = modes.parse_mode(
            options.get("mode", ["resident"])[0], graph, formats, resident_names, cpu, pinned=pinned
        )
        with meta_modules(graph) as modules:
            self.weights = {
                name: modes.weight_bytes(graph, name, module, formats)
                for name, module in modules.items()
            }
        self.error = FOREIGN_ERROR if row["source"].startswith(FOREIGN) else ROW_ERROR

    def seconds(self) -> float:
        """Return the seconds of the row with the present constants."""
        card = hardware._card(self.card, hardware.SHEETS[self.card])
        target, run = self.row["of"], self.run
        if ":" in target:  # a phase: the calls of that component in it
            number = int(target.partition("/")[2].partition(":")[0])
            entries = run.recording.entries()
            begin, end = phase_spans(entries)[number]
            return sum(sum(fast_work(call, card)) for _, call in entries[begin:end])
        seconds = modes.estimate_mode(self.graph, run, card, self.mode, self.weights).seconds
        return seconds[target] if target else sum(seconds.values())


_COUNTS: dict[int, tuple[Call, Counter[int], Counter[tuple[int, str]]]] = {}


def _counts(call: Call) -> tuple[Call, Counter[int], Counter[tuple[int, str]]]:
    if id(call) not in _COUNTS:
        kernels = Counter(number for _, numbers in call.work for number in numbers)
        layers = Counter(
            (number, path)
            for path, numbers in call.work
            for number in numbers
            if call.kernels[number].kind == "matmul"
        )
        _COUNTS[id(call)] = call, kernels, layers
    return _COUNTS[id(call)]


def fast_work(call: Call, card: Any) -> list[float]:
    """Return the sum of `costs.work_seconds`, from counts of kernels."""
    _, kernels, _ = _counts(call)
    total = sum(
        count * costs.kernel_seconds(call.kernels[number], card)
        for number, count in kernels.items()
    )
    return [max(total, card.launch_seconds * sum(kernels.values()))]


def fast_extra(
    call: Call, shapes: Mapping[str, tuple[int, int]], precision: str, card: Any
) -> dict[str, float]:
    """Return the sum of `costs.extra_seconds`, from counts of products."""
    if precision in ("bfloat16", "float16", "float32"):
        return {}
    by_shape: Counter[tuple[int, tuple[int, int]]] = Counter()
    for (number, path), count in _counts(call)[2].items():
        if (shape := shapes.get(f"{path}.weight")) is not None:
            by_shape[number, shape] += count
    products = (
        (costs.quantized_seconds(call.kernels[n], shape, precision, card), c)
        for (n, shape), c in by_shape.items()
    )
    return {"": sum(count * seconds for seconds, count in products)}


def put(values: Mapping[str, float]) -> None:
    """Set the constants in the modules that define them."""
    shares: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        owner, _, constant = name.partition(".")
        if owner in MODULES:
            setattr(MODULES[owner], constant, value)
        else:
            shares.setdefault(owner, {})[constant] = value
    hardware.SHARES = {
        name: hardware.Shares(**owner_shares) for name, owner_shares in shares.items()
    }


def fitted(rows: Sequence[Row], rounds: int = 6) -> dict[str, float]:
    """Return and set the constants fitted on ``rows`` (Gauss-Newton on logarithms)."""
    names = list(EXPECTED)
    centre = np.log([EXPECTED[name][0] for name in names])
    widths = np.array([EXPECTED[name][1] for name in names])

    def errors(x: Any) -> Any:
        put(dict(zip(names, np.exp(x), strict=True)))
        return np.array([math.log(row.seconds() / row.row["seconds"]) / row.error for row in rows])

    x = centre.copy()
    for _ in range(rounds):
        residuals = errors(x)
        slopes = np.stack(
            [(errors(x + 1e-3 * step) - residuals) / 1e-3 for step in np.eye(len(x))], axis=1
        )
        weight = (1 + residuals**2) ** -0.25  # square root of soft L1's weight
        matrix = np.vstack([weight[:, None] * slopes, np.diag(1 / widths)])
        x = (
            x
            - np.linalg.lstsq(
                matrix, np.concatenate([weight * residuals, (x - centre) / widths]), rcond=None
            )[0]
        )
    values = dict(zip(names, map(float, np.exp(x)), strict=True))
    put(values)
    return values


def prepared(rows: Sequence[dict[str, Any]]) -> list[Row]:
    """Return the rows that have seconds, with fast sums instead of sums kernel by kernel."""
    modes.work_seconds, modes.extra_seconds = fast_work, fast_extra  # type: ignore[assignment]
    from graphrun.cli.common import cache_folder

    store = Store(cache_folder(False) or ROOT)
    return [Row(row, store) for row in rows if row["seconds"]]


def left_out(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return errors of each source's rows with constants fitted on all other sources."""
    ready, results = prepared(rows), dict[int, dict[str, Any]]()
    for source in dict.fromkeys(row["source"] for row in rows):
        source_rows = [row for row in ready if row.row["source"] == source]
        if source_rows:
            fitted([row for row in ready if row.row["source"] != source])
        for row in source_rows:
            result = compared(
                {**row.row, "load_gib": None, "peak_gib": None}, {"seconds": row.seconds()}
            )
            results[id(row)] = {
                **{name: row.row[name] for name in ("source", "facts", "arguments", "of")},
                **result,
            }
        print(f"left out: {source}", flush=True)
    return {"constants": len(EXPECTED), "left_out": [results[id(row)] for row in ready]}


def main() -> None:
    ready = prepared(list(published()))
    for name, value in fitted(ready).items():
        print(f"{name:34s} {value:.4g}   expected {EXPECTED[name][0]:g}")
    for row in ready:
        print(
            f"{100 * (row.seconds() / row.row['seconds'] - 1):+6.1f} %",
            row.row["facts"],
            row.row["source"][:24],
            row.row["arguments"],
            row.row["of"],
        )


if __name__ == "__main__":
    main()
