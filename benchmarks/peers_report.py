"""Write tables (Markdown) and plots (time against budget, peak against cap) of peers.py's results.

    python benchmarks/peers_report.py [results/peers-sim.json]    writes peers-sim.md and
                                                                  peers-sim-*.png next to it

Only ratios are computed. A cell that was not run, because its tool ignores the cap, shows the
tool's results without a cap.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from peers_plots import plot, save

HERE = Path(__file__).resolve().parent
GRAPHRUN, SESSION = "graphrun", "graphrun, session of 2"
OWN = (GRAPHRUN, SESSION)
IN_README = ("peers-sim", "flux", "time")
"""The plot that README shows, also on a dark page."""
SLACK = 1.0005
"""A ratio above this counts as slower: figures are shown with three digits."""

Cell = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Results:
    """The content of a results file, by model and tool."""

    data: dict[str, Any]

    @property
    def models(self) -> list[str]:
        return [name for name, facts in self.data["models"].items() if "caps" in facts]

    def facts(self, model: str) -> dict[str, Any]:
        return dict(self.data["models"][model])

    def tools(self) -> list[str]:
        """The tools in the order of the cells, graphrun last."""
        return sorted(
            dict.fromkeys(c["tool"] for c in self.data["cells"]), key=lambda name: name in OWN
        )

    def cells(self, model: str, kind: str, tight: bool = False) -> list[Cell]:
        """Return the cells of ``model``, with tight RAM or without a RAM limit."""
        return [
            c
            for c in self.data["cells"]
            if c["model"] == model and c["kind"] == kind and (c["ram_bytes"] is not None) == tight
        ]

    def at(self, model: str, tool: str, cap: int | None) -> Cell | None:
        """Return the tool's cell at ``cap``, as run or as implied by the nearest run; None if
        unknown."""
        cells_by_cap = {c["cap_bytes"]: c for c in self.cells(model, "run") if c["tool"] == tool}
        if cap in cells_by_cap or cap is None or None not in cells_by_cap or tool in OWN:
            return cells_by_cap.get(cap)
        free = cells_by_cap[None]
        if free["status"] != "finished":
            return free
        if cap >= peak(free):
            return {**free, "cap_bytes": cap}
        failures = [c for c in cells_by_cap.values() if c["status"] != "finished"]
        return {
            **(failures[0] if failures else free),
            "status": "oom",
            "cap_bytes": cap,
            "runs": [],
        }

    def smallest(self, model: str, tool: str) -> tuple[int, bool] | None:
        """Return the smallest cap with which the tool finished, and whether that is exact."""
        if tool in OWN:
            minimum = self.facts(model)["graphrun_smallest_bytes"]
            cell = self.at(model, tool, minimum)
            return (minimum, True) if cell is not None and good(cell) else None
        tool_cells = [c for c in self.cells(model, "run") if c["tool"] == tool]
        capped = [c["cap_bytes"] for c in tool_cells if c["cap_bytes"] is not None and good(c)]
        free = self.at(model, tool, None)
        finished_caps = {c["cap_bytes"] for c in tool_cells} - {None}
        if free is not None and good(free) and len(finished_caps) < len(self.facts(model)["caps"]):
            return peak(free), True
        return (min(capped), False) if capped else None


def good(cell: Cell) -> bool:
    """Return whether both runs finished with the right output."""
    return cell["status"] == "finished" and cell.get("equal") is not False


def peak(cell: Cell) -> int:
    """Return the most bytes of all its runs, as the cap counts."""
    return max(int(run.get("reserved_peak_bytes", run["peak_bytes"])) for run in cell["runs"])


def first(cell: Cell) -> float:
    """Return the seconds of run 1."""
    return float(cell["runs"][0]["seconds"])


def second(cell: Cell) -> float:
    """Return the seconds of run 2."""
    return float(cell["runs"][1]["seconds"])


ALIKE = ((GRAPHRUN, "run 1", first), (SESSION, "run 2", second))
"""One run, planned as one, against a peer's first; a later run of a session, against a peer's
second."""
UNLIKE = ((GRAPHRUN, "run 2", second), (SESSION, "run 1", first))


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first row is the head."""
    head, *rest = rows
    lines = [head, ["---", *("---:" for _ in head[1:])], *rest]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.2f}"


def smallest_table(results: Results) -> str:
    """Return a row per tool and a column per model with the smallest cap that it finishes with; the
    minimum of a column is bold."""
    smallest_caps = {
        (model, tool): results.smallest(model, tool)
        for model in results.models
        for tool in results.tools()
    }
    column_minimum = {
        m: min((v[0] for (model, _), v in smallest_caps.items() if model == m and v), default=0)
        for m in results.models
    }
    rows = [["tool", *(f"{model} MiB" for model in results.models)]]
    for tool in results.tools():
        row = [tool]
        for model in results.models:
            value = smallest_caps[model, tool]
            text = "" if value is None else f"{'' if value[1] else '≤ '}{mib(value[0])}"
            row.append(
                f"**{text}**" if value and value[0] == column_minimum[model] else text or "-"
            )
        if any(cell != "-" for cell in row[1:]):
            rows.append(row)
    return table(rows)


def _shown(cell: Cell | None, seconds: Callable[[Cell], float]) -> str:
    if cell is None:
        return "-"
    if cell["status"] == "finished":
        return f"{1e3 * seconds(cell):.1f}" if good(cell) else "wrong output"
    runs = len(cell["runs"])
    names = {"oom": "OOM in run 2" if runs else "OOM", "refused": "does not fit"}
    return names.get(cell["status"], str(cell["status"]))


def best(
    results: Results, model: str, cap: int, seconds: Callable[[Cell], float]
) -> tuple[float, str] | None:
    """Return the fastest peer that finishes."""
    cells = [results.at(model, tool, cap) for tool in results.tools() if tool not in OWN]
    return min(((seconds(c), c["tool"]) for c in cells if c is not None and good(c)), default=None)


def time_table(results: Results, model: str, seconds: Callable[[Cell], float]) -> str:
    """Return a row per tool and a column per cap in virtual milliseconds; below, graphrun's time
    over the best peer's."""
    caps = results.facts(model)["caps"]
    rows = [["tool", *(f"{mib(cap)} MiB" for cap in caps)]]
    for tool in results.tools():
        row = [_shown(results.at(model, tool, cap), seconds) for cap in caps]
        if any(cell not in ("-", "unavailable", "failed") for cell in row):
            rows.append([tool, *row])
    return table(
        [
            *rows,
            *(_ratios(results, model, tool, seconds) for tool in OWN if tool in results.tools()),
        ]
    )


def _ratios(results: Results, model: str, tool: str, seconds: Callable[[Cell], float]) -> list[str]:
    row = [f"**{tool} / best peer**"]
    for cap in results.facts(model)["caps"]:
        graphrun_cell, peer = results.at(model, tool, cap), best(results, model, cap, seconds)
        if graphrun_cell is not None and good(graphrun_cell):
            row.append("no peer" if peer is None else f"**{seconds(graphrun_cell) / peer[0]:.3f}**")
        else:
            row.append(
                "not run" if graphrun_cell is None else "none" if peer is None else "**behind**"
            )
    return row


def behind(
    results: Results, pairs: Sequence[tuple[str, str, Callable[[Cell], float]]]
) -> list[str]:
    """Return every cell in which graphrun is slower than the fastest peer, by model and cap.
    ``pairs``: its regime and the run to compare."""
    lines = []
    for model in results.models:
        for cap in results.facts(model)["caps"]:
            for tool, name, seconds in (pair for pair in pairs if pair[0] in results.tools()):
                graphrun_cell, place = (
                    results.at(model, tool, cap),
                    f"{model} within {mib(cap)} MiB",
                )
                if graphrun_cell is None:
                    lines.append(f"{place}: {tool} was not run")
                    continue
                peer = best(results, model, cap, seconds)
                if peer is not None and not good(graphrun_cell):
                    lines.append(
                        f"{place}: {tool} {_shown(graphrun_cell, seconds)}; the fastest "
                        "that finishes "
                        f"is {peer[1]}"
                    )
                elif peer is not None and seconds(graphrun_cell) > SLACK * peer[0]:
                    milliseconds, ratio = (
                        1e3 * seconds(graphrun_cell),
                        seconds(graphrun_cell) / peer[0],
                    )
                    lines.append(
                        f"{place}, {tool}, {name}: {milliseconds:.2f} ms, {peer[1]} "
                        f"{1e3 * peer[0]:.2f} ms ({ratio:.3f})"
                    )
    return lines


def behind_in_ram(
    results: Results, pairs: Sequence[tuple[str, str, Callable[[Cell], float]]]
) -> list[str]:
    """As `behind` for tight RAM, where only graphrun is charged for reading files."""
    lines = []
    for model in results.models:
        cells = results.cells(model, "run", tight=True)
        for graphrun_cell, name, seconds in (
            (c, name, s) for tool, name, s in pairs for c in cells if c["tool"] == tool
        ):
            peer_cells = [
                c
                for c in cells
                if c["tool"] not in OWN and c["cap_bytes"] == graphrun_cell["cap_bytes"] and good(c)
            ]
            best_one = min(peer_cells, key=seconds, default=None)
            place = (
                f"{model} within {mib(graphrun_cell['cap_bytes'])} MiB and "
                f"{mib(graphrun_cell['ram_bytes'])} MiB of "
                f"RAM: {graphrun_cell['tool']}"
            )
            if best_one is not None and not good(graphrun_cell):
                lines.append(
                    f"{place} {_shown(graphrun_cell, seconds)}; the fastest that finishes is "
                    f"{best_one['tool']}"
                )
            elif best_one is not None and seconds(graphrun_cell) > SLACK * seconds(best_one):
                ratio, peer_text = (
                    seconds(graphrun_cell) / seconds(best_one),
                    f"{best_one['tool']} {1e3 * seconds(best_one):.2f} ms",
                )
                lines.append(
                    f"{place}, {name}: {1e3 * seconds(graphrun_cell):.2f} ms, {peer_text} "
                    f"({ratio:.3f})"
                )
    return lines


def encode_table(results: Results, model: str) -> str:
    """Return the use of two calls of encode_prompt alone, without a cap."""
    rows = [["tool", "peak MiB", "second time MiB", "left MiB", "left the second time MiB"]]
    for cell in results.cells(model, "encode") or results.cells(
        model, "run"
    ):  # a graph that only encodes has no separate cells for it
        if cell["cap_bytes"] is None and cell["status"] == "finished":
            first_run, second_run = cell["runs"]
            rows.append(
                [
                    cell["tool"],
                    *(
                        mib(r[k])
                        for k in ("peak_bytes", "left_bytes")
                        for r in (first_run, second_run)
                    ),
                ]
            )
    return table(rows)


def books_table(results: Results, model: str) -> str:
    """Return the use of whole runs without a cap: bytes moved, left, and in host memory."""
    rows = [
        [
            "tool",
            "peak 1 MiB",
            "peak 2 MiB",
            "in MiB",
            "out MiB",
            "left MiB",
            "host held MiB",
            "of it pinned MiB",
        ]
    ]
    for cell in results.cells(model, "run"):
        if cell["cap_bytes"] is None and cell["status"] == "finished":
            first_run, second_run = cell["runs"]
            moved_cells = [mib(first_run.get(f"{way}_bytes", 0)) for way in ("in", "out")]
            host = [mib(cell["host"].get(key, 0)) for key in ("held", "pinned")]
            rows.append(
                [
                    cell["tool"],
                    mib(first_run["peak_bytes"]),
                    mib(second_run["peak_bytes"]),
                    *moved_cells,
                    mib(second_run["left_bytes"]),
                    *host,
                ]
            )
    return table(rows)


def ram_table(results: Results, model: str) -> str:
    rows = [
        [
            "tool",
            "cap MiB",
            "result",
            "run 1 ms",
            "run 2 ms",
            "read MiB",
            "host held MiB",
            "message",
        ]
    ]
    for cell in results.cells(model, "run", tight=True):
        runs = [f"{1e3 * run['seconds']:.1f}" for run in cell["runs"]] + ["", ""]
        read_text = (
            mib(cell["runs"][0].get("read_bytes", 0))
            if cell["tool"] in OWN and cell["runs"]
            else ""
        )
        host = mib(cell["host"]["held"]) if cell.get("host") else ""
        rows.append(
            [
                cell["tool"],
                mib(cell["cap_bytes"]),
                cell["status"],
                *runs[:2],
                read_text,
                host,
                _text(cell["message"]),
            ]
        )
    return table(rows)


def not_run(results: Results) -> str:
    """Return the tools that could not run, each with its own message."""
    rows = [["tool", "model", "cap MiB", "message"]]
    for cell in results.data["cells"]:
        if cell["status"] in ("unavailable", "failed"):
            cap = "none" if cell["cap_bytes"] is None else mib(cell["cap_bytes"])
            rows.append([cell["tool"], cell["model"], cap, _text(cell["message"])])
    return table(rows) if len(rows) > 1 else "All could run everywhere."


def _text(message: str) -> str:
    return message.replace("|", "/").replace("\n", " ")[:160]


def markdown(results: Results, name: str) -> str:
    facts_of_run = results.data["about"]
    versions = ", ".join(f"{k} {v}" for k, v in facts_of_run["versions"].items() if v)
    worse, mixed, graphrun_only = (
        [*behind(results, ALIKE), *behind_in_ram(results, ALIKE)],
        behind(results, UNLIKE),
        _alone(results),
    )
    # cells that do not finish are reported above
    mixed = [line for line in mixed if "run 1" in line or "run 2" in line]
    parts = [
        f"# Side by side on {facts_of_run['device']}",
        f"`{facts_of_run['command']}`, {facts_of_run['date']}, {facts_of_run['machine']}; "
        f"{facts_of_run['steps']} steps; {versions}. "
        "How this is measured, and what it cannot show: [benchmarks/README.md](../README.md).",
        "## The smallest budget in which each tool finishes, with the right output",
        smallest_table(results),
        "≤: the tool adapts to the cap; the least cap of the grid with which it finished.",
        "## Where graphrun is behind",
        "A peer's run 1 beside graphrun's cold run, a peer's run 2 beside a session's "
        "second: each finds what the other does.",
        "\n".join(f"- {line}" for line in worse) if worse else "Nowhere.",
        "The other way round: a peer's run 2 beside a cold run, which begins and ends with "
        "an empty device; a peer's run 1 "
        "beside the first run of a session, which is planned for those behind it.",
        "\n".join(f"- {line}" for line in mixed) if mixed else "Nowhere.",
        "## Cells that graphrun alone finishes",
        "\n".join(f"- {line}" for line in graphrun_only) if graphrun_only else "None.",
    ]
    for model in results.models:
        facts = results.facts(model)
        parts += [
            f"## {model}",
            f"{facts['graph']}: weights {mib(facts['weight_bytes'])} MiB, resident "
            f"{mib(facts['resident_peak_bytes'])} MiB.",
            "Run 1, from weights in host memory, "
            f"milliseconds\n\n{time_table(results, model, first)}",
            f"Run 2, milliseconds\n\n{time_table(results, model, second)}",
            f"![time]({name}-{model}-time.png) ![peak]({name}-{model}-peak.png)",
            f"`encode_prompt` alone, without a cap\n\n{encode_table(results, model)}",
            f"Whole runs without a cap\n\n{books_table(results, model)}",
            f"Within {mib(facts['tight_ram_bytes'])} MiB of RAM\n\n{ram_table(results, model)}"
            if "tight_ram_bytes" in facts
            else "",
        ]
    return "\n\n".join([*filter(None, parts), "## What could not run", not_run(results)]) + "\n"


def _alone(results: Results) -> list[str]:
    return [
        f"{model} within {mib(cap)} MiB"
        for model in results.models
        for cap in results.facts(model)["caps"]
        if (graphrun_cell := results.at(model, GRAPHRUN, cap)) is not None
        and good(graphrun_cell)
        and best(results, model, cap, first) is None
    ]


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results" / "peers-sim.json"
    results = Results(json.loads(path.read_text()))
    path.with_suffix(".md").write_text(markdown(results, path.stem))
    for model in results.models:
        caps = results.facts(model)["caps"]
        finished = {
            tool: [
                (cap / 2**20, c)
                for cap in caps
                if (c := results.at(model, tool, cap)) is not None and good(c)
            ]
            for tool in results.tools()
        }
        times = {
            tool: [(cap, 1e3 * first(c)) for cap, c in cells] for tool, cells in finished.items()
        }
        peaks = {
            tool: [(cap, peak(c) / 2**20) for cap, c in cells] for tool, cells in finished.items()
        }
        for kind, title, lines, unit in (
            ("time", f"{model}: run 1 against budget", times, "ms"),
            ("peak", f"{model}: peak against cap", peaks, "MiB"),
        ):
            picture = path.with_name(f"{path.stem}-{model}-{kind}.png")
            save(
                partial(plot, title, lines, "cap, MiB", unit, GRAPHRUN),
                picture,
                dark=(path.stem, model, kind) == IN_README,
                metadata={"Software": None},
            )
    print(f"wrote {path.with_suffix('.md')} and {2 * len(results.models)} pictures")


if __name__ == "__main__":
    main()
