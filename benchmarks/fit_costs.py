"""Fit the constants of the cost model on published seconds of diffusers (``published.py``).

    python benchmarks/fit_costs.py               prints the constants, to be written where they are
                                                 defined
    python benchmarks/published.py --left-out    fits without each source and without each card in
                                                 turn, and records the predictions for them

Minimizes the squared logarithms of estimated over published seconds, and of each constant over its
`EXPECTED` value, each in units of its uncertainty; outliers count less (soft L1). A source with
many rows counts as four of them times the square root of the rest, since its rows share one host
and one version.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from published import ROOT, by_diffusers, published

import graphrun
from graphrun.disk_store import Store
from graphrun.model.hardware import Hardware
from graphrun.model.ranges import chip, range_group
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
    "ampere.convolution": (0.5, 0.4),
    "hopper.matmul": (0.75, 0.2),
    "hopper.attention": (0.65, 0.15),
    "geforce.convolution": (0.9, 0.3),
    "hardware.LAUNCH_SECONDS": (20e-6, 0.4),
    "hardware.PAGEABLE_SHARE": (0.35, 0.4),
    "hardware.FRESH_PAGES_RATE": (2.5e9, 0.5),
    "costs.KEY_MASKED_ATTENTION": (0.6, 0.3),
}
ROW_ERROR, FULL_ROWS = 0.1, 4
MODULES = {"hardware": hardware, "costs": costs}


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
            options.get("mode", ["resident"])[0],
            graph,
            formats,
            resident_names,
            cpu,
            pinned=pinned,
            libraries=options.get("library", ()),
        )
        self.weights = dict.fromkeys(graph.components, 0)  # resident weights are not copied
        if self.mode.name != "resident":
            with meta_modules(graph) as modules:
                self.weights = {
                    name: modes.weight_bytes(graph, name, module, self.mode)
                    for name, module in modules.items()
                }
        self.part, self.parts = row["of"], 1
        if row["of"] == "step":
            self.parts = int(inputs.get("steps", graph.inputs["steps"].default))
            stages = [stage.name for stage in graph.stages]
            self.part = "denoise" if "denoise" in stages else self._longest_phase()

    def _longest_phase(self) -> str:
        """Return the phase with most calls: that of the steps."""
        entries = self.run.recording.entries()
        lengths = [end - begin for begin, end in phase_spans(entries)]
        return f"/{lengths.index(max(lengths))}:"

    @property
    def hardware(self) -> Hardware:
        """The card with the present constants."""
        return hardware._card(self.card, hardware.SHEETS[self.card])

    def seconds(self) -> float:
        """Return the seconds of the row with the present constants."""
        return self._part_seconds(self.mode) / self.parts

    def waiting_seconds(self) -> float:
        """Return how many of the `seconds` wait for copies."""
        return self.seconds() - self._part_seconds(replace(self.mode, name="resident")) / self.parts

    def _part_seconds(self, mode: modes.Mode) -> float:
        card, target, run = self.hardware, self.part, self.run
        if ":" in target:  # a phase: the calls of that component in it
            number = int(target.partition("/")[2].partition(":")[0])
            entries = run.recording.entries()
            begin, end = phase_spans(entries)[number]
            return sum(sum(fast_work(call, card)) for _, call in entries[begin:end])
        seconds = modes.estimate_mode(self.graph, run, card, mode, self.weights).seconds
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
    for name, value in values.items():
        owner, _, constant = name.partition(".")
        if owner in MODULES:
            setattr(MODULES[owner], constant, value)
        else:
            shares = replace(hardware.SHARES[owner], **{constant: value})
            hardware.SHARES = {**hardware.SHARES, owner: shares}


class Fit:
    """The constants fitted on ``rows``, and what they are without some of the rows.

    Gauss-Newton on logarithms. Without some rows, one more step from the fit on all rows.
    """

    def __init__(self, rows: Sequence[Row], rounds: int = 6) -> None:
        self.rows = rows
        counts = Counter(row.row["source"] for row in rows)
        self.shares = np.array(
            [min(1.0, math.sqrt(FULL_ROWS / counts[row.row["source"]])) for row in rows]
        )
        self.centre = np.log([value for value, _ in EXPECTED.values()])
        self.widths = np.array([width for _, width in EXPECTED.values()])
        self.point = self.centre
        every_row = np.ones(len(rows), dtype=bool)
        for _ in range(rounds):
            self._expand()
            self.point = self._step(every_row)
        self._expand()

    def values(self, is_used: Callable[[Row], bool] = lambda row: True) -> dict[str, float]:
        """Return and set the constants fitted on the rows that are used."""
        row_mask = np.array([is_used(row) for row in self.rows])
        point = self.point if row_mask.all() else self._step(row_mask)
        values = dict(zip(EXPECTED, map(float, np.exp(point)), strict=True))
        put(values)
        return values

    def _expand(self) -> None:
        """Set errors and their slopes at `point`."""
        self.errors = self._errors(self.point)
        steps = 1e-3 * np.eye(len(EXPECTED))
        self.slopes = np.stack(
            [(self._errors(self.point + step) - self.errors) / 1e-3 for step in steps], axis=1
        )

    def _errors(self, point: Any) -> Any:
        put(dict(zip(EXPECTED, np.exp(point), strict=True)))
        ratios = [row.seconds() / row.row["seconds"] for row in self.rows]
        return np.log(ratios) / ROW_ERROR

    def _step(self, row_mask: Any) -> Any:
        """Return the minimum of the squares around `point`, for the rows of ``row_mask``."""
        weights = (self.shares * (1 + self.errors**2) ** -0.25)[row_mask]  # soft L1
        matrix = np.vstack([weights[:, None] * self.slopes[row_mask], np.diag(1 / self.widths)])
        targets = np.concatenate(
            [weights * self.errors[row_mask], (self.point - self.centre) / self.widths]
        )
        return self.point - np.linalg.lstsq(matrix, targets, rcond=None)[0]


def prepared(rows: Sequence[dict[str, Any]]) -> list[Row]:
    """Return the rows that have seconds, with fast sums instead of sums kernel by kernel."""
    modes.work_seconds, modes.extra_seconds = fast_work, fast_extra  # type: ignore[assignment]
    from graphrun.cli.common import cache_folder

    store = Store(cache_folder(False) or ROOT)
    return [Row(row, store) for row in rows if row["seconds"]]


def left_out(rows: Sequence[Row]) -> list[tuple[Row, dict[str, Any]]]:
    """Return each row with its group of ranges, and its published over estimated seconds with
    constants fitted on all other sources, and on all other cards."""
    fit = Fit([row for row in rows if by_diffusers(row.row)])
    results: dict[int, dict[str, Any]] = {id(row): {} for row in rows}
    for kind, name_of in (("source", source_of), ("card", card_of)):
        for name in dict.fromkeys(map(name_of, rows)):
            fit.values(lambda row: name_of(row) != name)  # noqa: B023
            for row in rows:
                if name_of(row) == name:
                    results[id(row)][kind] = round(row.row["seconds"] / row.seconds(), 4)
    fit.values()
    for row in rows:
        seconds, waiting_seconds = row.seconds(), row.waiting_seconds()
        group = range_group(row.hardware, seconds, waiting_seconds, frozenset({card_of(row)}))
        results[id(row)]["group"] = group
    return [(row, results[id(row)]) for row in rows]


def source_of(row: Row) -> str:
    return str(row.row["source"])


def card_of(row: Row) -> str:
    return chip(row.card)


def main() -> None:
    ready = prepared([row for row in published() if by_diffusers(row)])
    for name, value in Fit(ready).values().items():
        print(f"{name:34s} {value:.4g}   expected {EXPECTED[name][0]:g}")


if __name__ == "__main__":
    main()
