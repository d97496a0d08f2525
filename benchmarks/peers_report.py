"""Renders the results of peers.py: tables as Markdown, time against budget and peak against cap as
pictures (SVG).

python benchmarks/peers_report.py [results/peers-sim.json]      writes peers-sim.md and
peers-sim-*.png beside it

It computes nothing but ratios. A cell that was not run, because its tool does not look at the cap,
shows what the tool did without.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers_plots import plot

HERE = Path(__file__).resolve().parent
GRAPHRUN, SESSION = "graphrun", "graphrun, session of 2"
OWN = (GRAPHRUN, SESSION)
SLACK = 1.0005
"""A ratio above this is behind: figures are shown with three digits."""

Cell = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Results:
    """What a results file holds, by model and tool."""

    data: dict[str, Any]

    @property
    def models(self) -> list[str]:
        """Those that were run."""
        return [name for name, facts in self.data["models"].items() if "caps" in facts]

    def facts(self, model: str) -> dict[str, Any]:
        """Caps, weights, peaks."""
        return dict(self.data["models"][model])

    def tools(self) -> list[str]:
        """In the order of the cells, graphrun last."""
        return sorted(
            dict.fromkeys(c["tool"] for c in self.data["cells"]), key=lambda name: name in OWN
        )

    def cells(self, model: str, kind: str, tight: bool = False) -> list[Cell]:
        """Of ``model``; with tight RAM or without a limit of it."""
        return [
            c
            for c in self.data["cells"]
            if c["model"] == model and c["kind"] == kind and (c["ram_bytes"] is not None) == tight
        ]

    def at(self, model: str, tool: str, cap: int | None) -> Cell | None:
        """The tool's cell at ``cap``: as it was run, or as the nearest that was run says it is.
        None where there is none."""
        own = {c["cap_bytes"]: c for c in self.cells(model, "run") if c["tool"] == tool}
        if cap in own or cap is None or None not in own or tool in OWN:
            return own.get(cap)
        free = own[None]
        if free["status"] != "finished":
            return free
        if cap >= peak(free):
            return {**free, "cap_bytes": cap}
        below = [c for c in own.values() if c["status"] != "finished"]
        return {**(below[0] if below else free), "status": "oom", "cap_bytes": cap, "runs": []}

    def smallest(self, model: str, tool: str) -> tuple[int, bool] | None:
        """The least cap the tool finished with, and whether that is exact (else it is the least of
        the grid)."""
        if tool in OWN:
            least = self.facts(model)["graphrun_smallest_bytes"]
            found = self.at(model, tool, least)
            return (least, True) if found is not None and good(found) else None
        own = [c for c in self.cells(model, "run") if c["tool"] == tool]
        capped = [c["cap_bytes"] for c in own if c["cap_bytes"] is not None and good(c)]
        free = self.at(model, tool, None)
        ran = {c["cap_bytes"] for c in own} - {None}
        if free is not None and good(free) and len(ran) < len(self.facts(model)["caps"]):
            return peak(free), True
        return (min(capped), False) if capped else None


def good(cell: Cell) -> bool:
    """Whether both runs finished with the right output."""
    return cell["status"] == "finished" and cell.get("equal") is not False


def peak(cell: Cell) -> int:
    """The most it took in any of its runs: what the cap counts."""
    return max(int(run.get("reserved_peak_bytes", run["peak_bytes"])) for run in cell["runs"])


def first(cell: Cell) -> float:
    """Seconds of run 1."""
    return float(cell["runs"][0]["seconds"])


def second(cell: Cell) -> float:
    """Seconds of run 2."""
    return float(cell["runs"][1]["seconds"])


ALIKE = ((GRAPHRUN, "run 1", first), (SESSION, "run 2", second))
"""One run, planned as one, beside a peer's first; of many, one that finds what the last left, as a
peer's second does."""
UNLIKE = ((GRAPHRUN, "run 2", second), (SESSION, "run 1", first))


def table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown, the first row being the head."""
    head, *rest = rows
    lines = [head, ["---", *("---:" for _ in head[1:])], *rest]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def mib(nbytes: float) -> str:
    """With two decimals."""
    return f"{nbytes / 2**20:.2f}"


def smallest_table(of: Results) -> str:
    """A row per tool, a column per model: the least cap it finishes with. The least of a column is
    bold."""
    found = {(model, tool): of.smallest(model, tool) for model in of.models for tool in of.tools()}
    least = {
        m: min((v[0] for (model, _), v in found.items() if model == m and v), default=0)
        for m in of.models
    }
    rows = [["tool", *(f"{model} MiB" for model in of.models)]]
    for tool in of.tools():
        row = [tool]
        for model in of.models:
            value = found[model, tool]
            text = "" if value is None else f"{'' if value[1] else '≤ '}{mib(value[0])}"
            row.append(f"**{text}**" if value and value[0] == least[model] else text or "-")
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
    of: Results, model: str, cap: int, seconds: Callable[[Cell], float]
) -> tuple[float, str] | None:
    """The fastest peer that finishes."""
    cells = [of.at(model, tool, cap) for tool in of.tools() if tool not in OWN]
    return min(((seconds(c), c["tool"]) for c in cells if c is not None and good(c)), default=None)


def time_table(of: Results, model: str, seconds: Callable[[Cell], float]) -> str:
    """A row per tool, a column per cap, virtual milliseconds; below, graphrun's time over the best
    peer's."""
    caps = of.facts(model)["caps"]
    rows = [["tool", *(f"{mib(cap)} MiB" for cap in caps)]]
    for tool in of.tools():
        row = [_shown(of.at(model, tool, cap), seconds) for cap in caps]
        if any(cell not in ("-", "unavailable", "failed") for cell in row):
            rows.append([tool, *row])
    return table(
        [*rows, *(_ratios(of, model, tool, seconds) for tool in OWN if tool in of.tools())]
    )


def _ratios(of: Results, model: str, tool: str, seconds: Callable[[Cell], float]) -> list[str]:
    row = [f"**{tool} / best peer**"]
    for cap in of.facts(model)["caps"]:
        own, other = of.at(model, tool, cap), best(of, model, cap, seconds)
        if own is not None and good(own):
            row.append("no peer" if other is None else f"**{seconds(own) / other[0]:.3f}**")
        else:
            row.append("not run" if own is None else "none" if other is None else "**behind**")
    return row


def behind(of: Results, pairs: Sequence[tuple[str, str, Callable[[Cell], float]]]) -> list[str]:
    """Every cell in which graphrun is behind the fastest peer, by model and cap; ``pairs``: its
    regime and the run to compare."""
    lines = []
    for model in of.models:
        for cap in of.facts(model)["caps"]:
            for tool, name, seconds in (pair for pair in pairs if pair[0] in of.tools()):
                own, place = of.at(model, tool, cap), f"{model} within {mib(cap)} MiB"
                if own is None:
                    lines.append(f"{place}: {tool} was not run")
                    continue
                other = best(of, model, cap, seconds)
                if other is not None and not good(own):
                    lines.append(
                        f"{place}: {tool} {_shown(own, seconds)}; the fastest that finishes is {other[1]}"
                    )
                elif other is not None and seconds(own) > SLACK * other[0]:
                    mine, ratio = 1e3 * seconds(own), seconds(own) / other[0]
                    lines.append(
                        f"{place}, {tool}, {name}: {mine:.2f} ms, {other[1]} {1e3 * other[0]:.2f} ms ({ratio:.3f})"
                    )
    return lines


def behind_in_ram(
    of: Results, pairs: Sequence[tuple[str, str, Callable[[Cell], float]]]
) -> list[str]:
    """As `behind`, of the cells with tight RAM, where reading files is charged to graphrun
    alone."""
    lines = []
    for model in of.models:
        cells = of.cells(model, "run", tight=True)
        for own, name, seconds in (
            (c, name, s) for tool, name, s in pairs for c in cells if c["tool"] == tool
        ):
            others = [
                c
                for c in cells
                if c["tool"] not in OWN and c["cap_bytes"] == own["cap_bytes"] and good(c)
            ]
            best_one = min(others, key=seconds, default=None)
            place = f"{model} within {mib(own['cap_bytes'])} MiB and {mib(own['ram_bytes'])} MiB of RAM: {own['tool']}"
            if best_one is not None and not good(own):
                lines.append(
                    f"{place} {_shown(own, seconds)}; the fastest that finishes is {best_one['tool']}"
                )
            elif best_one is not None and seconds(own) > SLACK * seconds(best_one):
                ratio, theirs = (
                    seconds(own) / seconds(best_one),
                    f"{best_one['tool']} {1e3 * seconds(best_one):.2f} ms",
                )
                lines.append(
                    f"{place}, {name}: {1e3 * seconds(own):.2f} ms, {theirs} ({ratio:.3f})"
                )
    return lines


def encode_table(of: Results, model: str) -> str:
    """What encode_prompt alone takes and leaves, with no cap, called twice."""
    rows = [["tool", "peak MiB", "second time MiB", "left MiB", "left the second time MiB"]]
    for cell in of.cells(model, "encode") or of.cells(
        model, "run"
    ):  # a graph that only encodes has no cells for that alone
        if cell["cap_bytes"] is None and cell["status"] == "finished":
            one, two = cell["runs"]
            rows.append(
                [
                    cell["tool"],
                    *(mib(r[k]) for k in ("peak_bytes", "left_bytes") for r in (one, two)),
                ]
            )
    return table(rows)


def books_table(of: Results, model: str) -> str:
    """What whole runs take without a cap: bytes moved, left, and held on the host."""
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
    for cell in of.cells(model, "run"):
        if cell["cap_bytes"] is None and cell["status"] == "finished":
            one, two = cell["runs"]
            moved = [mib(one.get(f"{way}_bytes", 0)) for way in ("in", "out")]
            host = [mib(cell["host"].get(key, 0)) for key in ("held", "pinned")]
            rows.append(
                [
                    cell["tool"],
                    mib(one["peak_bytes"]),
                    mib(two["peak_bytes"]),
                    *moved,
                    mib(two["left_bytes"]),
                    *host,
                ]
            )
    return table(rows)


def ram_table(of: Results, model: str) -> str:
    """The cells with tight RAM."""
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
    for cell in of.cells(model, "run", tight=True):
        runs = [f"{1e3 * run['seconds']:.1f}" for run in cell["runs"]] + ["", ""]
        read = (
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
                read,
                host,
                _text(cell["message"]),
            ]
        )
    return table(rows)


def not_run(of: Results) -> str:
    """Tools that could not run, each with its own message."""
    rows = [["tool", "model", "cap MiB", "message"]]
    for cell in of.data["cells"]:
        if cell["status"] in ("unavailable", "failed"):
            cap = "none" if cell["cap_bytes"] is None else mib(cell["cap_bytes"])
            rows.append([cell["tool"], cell["model"], cap, _text(cell["message"])])
    return table(rows) if len(rows) > 1 else "All could run everywhere."


def _text(message: str) -> str:
    return message.replace("|", "/").replace("\n", " ")[:160]


def markdown(of: Results, name: str) -> str:
    """The whole page."""
    about = of.data["about"]
    versions = ", ".join(f"{k} {v}" for k, v in about["versions"].items() if v)
    worse, mixed, alone = (
        [*behind(of, ALIKE), *behind_in_ram(of, ALIKE)],
        behind(of, UNLIKE),
        _alone(of),
    )
    # where it does not finish is said above
    mixed = [line for line in mixed if "run 1" in line or "run 2" in line]
    parts = [
        f"# Side by side on {about['device']}",
        f"`{about['command']}`, {about['date']}, {about['machine']}; {about['steps']} steps; {versions}. "
        "How this is measured, and what it cannot show: [benchmarks/README.md](../README.md).",
        "## The smallest budget in which each tool finishes, with the right output",
        smallest_table(of),
        "≤: the tool adapts to the cap; the least cap of the grid with which it finished.",
        "## Where graphrun is behind",
        "A peer's run 1 beside graphrun's cold run, a peer's run 2 beside a session's second: each finds what the other does.",
        "\n".join(f"- {line}" for line in worse) if worse else "Nowhere.",
        "The other way round: a peer's run 2 beside a cold run, which begins and ends with an empty device; a peer's run 1 "
        "beside the first run of a session, which is planned for those behind it.",
        "\n".join(f"- {line}" for line in mixed) if mixed else "Nowhere.",
        "## Cells that graphrun alone finishes",
        "\n".join(f"- {line}" for line in alone) if alone else "None.",
    ]
    for model in of.models:
        facts = of.facts(model)
        parts += [
            f"## {model}",
            f"{facts['graph']}: weights {mib(facts['weight_bytes'])} MiB, resident {mib(facts['resident_peak_bytes'])} MiB.",
            f"Run 1, from weights in host memory, milliseconds\n\n{time_table(of, model, first)}",
            f"Run 2, milliseconds\n\n{time_table(of, model, second)}",
            f"![time]({name}-{model}-time.png) ![peak]({name}-{model}-peak.png)",
            f"`encode_prompt` alone, without a cap\n\n{encode_table(of, model)}",
            f"Whole runs without a cap\n\n{books_table(of, model)}",
            f"Within {mib(facts['tight_ram_bytes'])} MiB of RAM\n\n{ram_table(of, model)}"
            if "tight_ram_bytes" in facts
            else "",
        ]
    return "\n\n".join([*filter(None, parts), "## What could not run", not_run(of)]) + "\n"


def _alone(of: Results) -> list[str]:
    return [
        f"{model} within {mib(cap)} MiB"
        for model in of.models
        for cap in of.facts(model)["caps"]
        if (own := of.at(model, GRAPHRUN, cap)) is not None
        and good(own)
        and best(of, model, cap, first) is None
    ]


def main() -> None:
    """Writes the page and its pictures beside the results."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results" / "peers-sim.json"
    of = Results(json.loads(path.read_text()))
    path.with_suffix(".md").write_text(markdown(of, path.stem))
    for model in of.models:
        caps = of.facts(model)["caps"]
        finished = {
            tool: [
                (cap / 2**20, c)
                for cap in caps
                if (c := of.at(model, tool, cap)) is not None and good(c)
            ]
            for tool in of.tools()
        }
        times = {
            tool: [(cap, 1e3 * first(c)) for cap, c in found] for tool, found in finished.items()
        }
        peaks = {
            tool: [(cap, peak(c) / 2**20) for cap, c in found] for tool, found in finished.items()
        }
        for kind, title, lines, unit in (
            ("time", f"{model}: run 1 against budget", times, "ms"),
            ("peak", f"{model}: peak against cap", peaks, "MiB"),
        ):
            picture = path.with_name(f"{path.stem}-{model}-{kind}.png")
            plot(title, lines, "cap, MiB", unit, GRAPHRUN).savefig(
                picture, metadata={"Software": None}
            )
    print(f"wrote {path.with_suffix('.md')} and {2 * len(of.models)} pictures")


if __name__ == "__main__":
    main()
