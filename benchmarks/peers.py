"""Compare graphrun with other tools on one instrument: equal seed, precision and cap.

    python benchmarks/peers.py                    every model and tool on the simulated accelerator;
                                                  writes results/peers-sim.json
    python benchmarks/peers.py --device cuda      the same at full size, with random weights, on a
                                                  card
    python benchmarks/peers.py --models flux --tools graphrun,"diffusers model offload" --steps 2
    python benchmarks/peers_report.py results/peers-sim.json    tables (Markdown) and plots (PNG)

Each cell is a process. Other tools than diffusers' are installed next to graphrun, in an
environment of their own; a missing one is reported:

    python -m venv peers && peers/bin/pip install -e . diffusers-mm mmgp

benchmarks/README.md describes the measurements and their limits.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
os.environ.update(
    TRANSFORMERS_VERBOSITY="error",
    DIFFUSERS_VERBOSITY="error",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)
os.environ.setdefault("OMP_NUM_THREADS", "1")

from peers_cell import GRAPHS, graph_file, hardware_for, process, subject  # noqa: E402
from peers_tools import OWN, TOOLS  # noqa: E402

PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "diffusers-mm", "mmgp", "highspy")
SHARES = (0.0, 0.125, 0.25, 0.5, 0.75)
"""Caps between the minimum of any peer and the needs of everything resident. The latter and
graphrun's minimum are added. So progress of graphrun moves no cell of a peer."""

TIGHT = 0.6
"""The tight RAM budget, as a share of all weights."""

REFERENCES = ("diffusers resident", "diffusers model offload", "diffusers sequential offload")
"""The first of these that finishes without a cap provides the reference output; on sim always the
first."""


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="sim", choices=("sim", "cuda"))
    parser.add_argument("--models", default=",".join(GRAPHS))
    parser.add_argument(
        "--tools",
        help="comma-separated, those with a comma of their own by a part of their name; peers: "
        "all others'; default all",
    )
    parser.add_argument("--steps", type=int, default=4, help="denoising steps")
    parser.add_argument("--caps", help="comma-separated sizes in place of the grid, such as 8G,16G")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time; on cuda always one")
    parser.add_argument("--limit", type=float, default=900, help="seconds for one cell")
    parser.add_argument(
        "--resume", action="store_true", help="keep the cells that the results have, run the others"
    )
    parser.add_argument(
        "--forget",
        default="",
        help="of the cells that are kept, not those of tools with this in their name",
    )
    parser.add_argument(
        "--out", type=Path, help="the results; default benchmarks/results/peers-<device>.json"
    )
    return parser.parse_args(arguments)


class Bench:
    """The cells of one run of this command, and where their results go. ``forks``: cells share the
    weights of this process, which then may not open the card."""

    def __init__(self, options: argparse.Namespace, cache: str, *, forks: bool = False) -> None:
        self.options, self.cache = options, cache
        self.forks = forks or options.device == "sim"
        patterns = options.tools.split(",") if options.tools else [""]
        tool_names = [*TOOLS, *OWN]
        patterns = [*TOOLS] if patterns == ["peers"] else patterns
        self.tools = [
            name
            for name in tool_names
            if any(part == name or (part not in tool_names and part in name) for part in patterns)
        ]
        self.path = options.out or HERE / "results" / f"peers-{options.device}.json"
        self.results: dict[str, Any] = {
            "about": {} if self.forks and options.device == "cuda" else about(options),
            "models": {},
            "cells": [],
        }
        if options.resume and self.path.exists():
            earlier_results = json.loads(self.path.read_text())
            earlier_cells = [
                c
                for c in earlier_results["cells"]
                if not options.forget or options.forget not in c["tool"]
            ]
            self.results |= {"models": earlier_results["models"], "cells": earlier_cells}
        self.folder: Path | None = None
        self._context: Any = multiprocessing.get_context("fork" if self.forks else "spawn")

    def cell(self, model: str, tool: str, kind: str = "run", **settings: Any) -> dict[str, Any]:
        """Run one cell in a process of its own. A process that dies or hangs is a result too."""
        model_facts = self.results["models"].get(model, {})
        request = _asked(model, tool, kind, settings) | {
            "device": self.options.device,
            "steps": self.options.steps,
            "cache": self.cache,
        }
        request |= {
            "activation_bytes": model_facts.get("activation_bytes", 0),
            "folder": str(self.folder) if request["ram_bytes"] else None,
        }
        receiver, sender = self._context.Pipe(duplex=False)
        start = time.perf_counter()
        worker = self._context.Process(target=process, args=(request, sender))
        worker.start()
        sender.close()
        answer: dict[str, Any] = {
            "status": "failed",
            "message": f"no answer within {self.options.limit:.0f} s",
            "runs": [],
        }
        try:
            if receiver.poll(self.options.limit):
                answer = receiver.recv()
        except EOFError:
            worker.join(10)
            answer["message"] = f"the process ended with {worker.exitcode}"
        if worker.is_alive():
            worker.join(10)
        if worker.is_alive():
            worker.kill()
        summary = {key: request[key] for key in ("model", "tool", "kind", "cap_bytes", "ram_bytes")}
        if (outputs := answer.pop("outputs", None)) and "outputs" in model_facts:
            reference = model_facts["outputs"] if kind == "run" else model_facts.get("embeds")
            answer["equal"] = (
                all(_same(output, reference, kind) for output in outputs) if reference else None
            )
        return {
            **summary,
            **answer,
            **({"raw": outputs} if not model_facts else {}),
            "took_seconds": round(time.perf_counter() - start, 2),
        }

    def facts(self, model: str, *, encodes: bool = True) -> dict[str, Any]:
        """Return the base of the grid: a run without a cap and its outputs, and, if the model
        ``encodes``, the outputs of its encoders alone."""
        model_subject = subject(model, self.options.device, self.options.steps)
        plain: dict[str, Any] = {"status": "", "message": "", "runs": []}
        for tool in REFERENCES:
            if plain["status"] != "finished":
                plain = self.cell(model, tool)
        if plain["status"] != "finished":
            return {"failed": plain["message"]}
        only_run = model_subject.encodes_only or not encodes
        embeds = plain if only_run else self.cell(model, plain["tool"], "encode")
        sizes = [c.weight_bytes() for c in self.ample(model_subject).components]
        resident = plain["tool"] == REFERENCES[0]
        peak = _peak(plain)
        activation = max(0, peak - (plain["runs"][0]["left_bytes"] if resident else max(sizes)))
        return {
            "graph": graph_file(model, self.options.device).stem,
            "reference": plain["tool"],
            "weight_bytes": sum(sizes),
            "resident_peak_bytes": peak if resident else sum(sizes) + activation,
            "activation_bytes": activation,
            "outputs": plain["raw"][0],
            "embeds": embeds["raw"][0],
        }

    def ample(self, model_subject: Any) -> Any:
        """Return graphrun's problem without limits. If cells are forked, this process may not open
        the card."""
        import graphrun

        hardware = hardware_for(model_subject.model, self.options.device)
        if self.forks and hardware is None:
            hardware = "h100"
        return graphrun.estimate(
            model_subject.graph,
            vram=1 << 50,
            ram=1 << 50,
            hardware=hardware,
            inputs=model_subject.settings,
            cache=Path(self.cache),
        )

    def model(self, name: str) -> None:
        """Run all cells of one model: without a cap, the grid, encoding alone, tight RAM."""
        from graphrun.solve.infeasible import smallest_budget

        path = graph_file(name, self.options.device)
        if not path.exists():
            self.results["models"][name] = {"failed": f"there is no {path.name}"}
            return
        model_subject = subject(name, self.options.device, self.options.steps)
        if self.options.device == "sim":
            model_subject.pipeline()  # forked cells share its modules and imports
            gc.freeze()  # and their garbage collectors must not write to them
        old_facts = self.results["models"].get(name, {})
        facts = old_facts if "outputs" in old_facts else self.facts(name)
        self.results["models"][name] = facts
        if "failed" in facts:
            return
        ample = self.ample(model_subject)
        facts["graphrun_smallest_bytes"] = smallest_budget(ample) - ample.hardware.context_bytes
        tools = [tool for tool in self.tools if tool in OWN or not TOOLS[tool].for_ram]
        uncapped = self.many([(name, tool, "run", {}) for tool in tools])
        peaks = [_peak(c) for c in uncapped if c["status"] == "finished" and c["tool"] not in OWN]
        facts.setdefault("peers_least_bytes", min(peaks, default=facts["graphrun_smallest_bytes"]))
        facts["caps"] = caps = self.caps(facts)
        runnable = [c for c in uncapped if c["status"] not in ("unavailable", "failed")]
        self.many(
            [
                (name, c["tool"], "run", {"cap_bytes": cap})
                for c in runnable
                for cap in self.caps_of(c, caps)
            ]
        )
        if not model_subject.encodes_only:
            self.many([(name, c["tool"], "encode", {}) for c in runnable])
        facts["tight_ram_bytes"] = ram = int(TIGHT * facts["weight_bytes"])
        tight = [tool for tool in self.tools if tool in OWN or TOOLS[tool].for_ram]
        self.folder = model_subject.stored(Path(self.cache))  # the weights in files, like a user's
        ram_caps = [
            between(facts["peers_least_bytes"], facts["resident_peak_bytes"], 0.5),
            facts["resident_peak_bytes"],
        ]
        self.many(
            [
                (name, tool, "run", {"cap_bytes": cap, "ram_bytes": ram})
                for cap in ram_caps
                for tool in tight
            ]
        )
        gc.unfreeze()

    def caps(self, facts: dict[str, Any]) -> list[int]:
        """Return the caps from the minimum of any peer to everything resident. They are multiples
        of 512 bytes. graphrun's minimum is added."""
        if self.options.caps:
            from graphrun.units import parse_size

            return [parse_size(text, name="cap") for text in self.options.caps.split(",")]
        graphrun_caps = (
            {facts["graphrun_smallest_bytes"]} if set(OWN) & set(self.tools) else set[int]()
        )
        low, high = facts["peers_least_bytes"], facts["resident_peak_bytes"]
        return sorted({between(low, high, share) for share in SHARES} | {high} | graphrun_caps)

    def caps_of(self, uncapped: dict[str, Any], caps: list[int]) -> list[int]:
        """Return the ``caps`` at which a tool must run: all, or the two around its peak.

        Two are enough if it ignores the cap: above its peak such a tool does the same as without a
        cap, below it it does not finish, and the two show this.
        """
        tool = uncapped["tool"]
        if (
            tool in OWN
            or self.options.device in TOOLS[tool].adapts
            or uncapped["status"] != "finished"
        ):
            return caps
        peak = _peak(uncapped)
        return [cap for cap in caps if cap < peak][-1:] + [cap for cap in caps if cap >= peak][:1]

    def many(self, cells: list[tuple[str, str, str, dict[str, Any]]]) -> list[dict[str, Any]]:
        """Return results of ``cells``, in order, writing each at once. Results of an earlier
        command are reused."""
        cells_by_key = {_key(c): c for c in self.results["cells"]}
        results = [
            cells_by_key[key]
            for key in (_key(_asked(*cell)) for cell in cells)
            if key in cells_by_key
        ]
        cells = [cell for cell in cells if _key(_asked(*cell)) not in cells_by_key]
        jobs = self.options.jobs if self.options.device == "sim" else 1
        with ThreadPoolExecutor(jobs) as pool:
            futures = deque(
                pool.submit(self.cell, model, tool, kind, **settings)
                for model, tool, kind, settings in cells
            )
            while futures:
                result = futures.popleft().result()
                results.append(result)
                self.results["cells"].append(result)
                self.write()
                print(_line(result), flush=True)
        return results

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.results, indent=1) + "\n")


def between(low: int, high: int, share: float) -> int:
    """Return a multiple of 512 bytes, as memory is allocated."""
    return low + int(share * (high - low)) // 512 * 512


def _asked(model: str, tool: str, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": model,
        "tool": tool,
        "kind": kind,
        "cap_bytes": None,
        "ram_bytes": None,
    } | settings


def _key(cell: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(cell[name] for name in ("model", "tool", "kind", "cap_bytes", "ram_bytes"))


def _same(output: list[str], reference: list[str], kind: str) -> bool:
    """Return whether outputs are equal bit for bit. A graph returns only those embeddings that the
    pipeline's call takes back, so some may be missing."""
    return output == reference if kind == "run" else bool(output) and set(output) <= set(reference)


def _peak(cell: dict[str, Any]) -> int:
    return max(int(run.get("reserved_peak_bytes", run["peak_bytes"])) for run in cell["runs"])


def _line(cell: dict[str, Any]) -> str:
    cap = "no cap" if cell["cap_bytes"] is None else f"{cell['cap_bytes'] / 2**20:.2f} MiB"
    runs = "  ".join(
        f"{run['seconds']:.4f} s {run['peak_bytes'] / 2**20:.2f} MiB" for run in cell["runs"]
    )
    equal = {True: "", False: "  OUTPUT DIFFERS", None: ""}[cell.get("equal")]
    return (
        f"{cell['model']:9} {cell['kind']:6} {cap:>12}  {cell['tool']:40} {cell['status']:11} "
        f"{runs}{equal}  {cell['message'][:80]}"
    )


def about(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return date, machine, versions, and what all cells share."""
    import torch

    facts: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["benchmarks/peers.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}",
        "device": arguments.device,
        "steps": arguments.steps,
        "versions": dict(_versions()),
    }
    if arguments.device == "cuda":
        card = torch.cuda.get_device_properties(0)
        facts["card"], facts["card_bytes"] = card.name, card.total_memory
    else:
        from graphrun.profile.hardware import simulated

        rates = simulated()
        facts["rates"] = {
            name: getattr(rates, name)
            for name in ("h2d_bytes_per_second", "d2h_bytes_per_second", "flops_per_second")
        }
    return facts


def _versions() -> Iterator[tuple[str, str | None]]:
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, None


def main() -> None:
    import torch

    arguments = options()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        return print(
            "there is no CUDA device here; without --device cuda the simulated accelerator is used"
        )
    torch.set_num_threads(1)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        bench = Bench(arguments, cache)
        for name in arguments.models.split(","):
            bench.model(name)
            bench.results["about"]["took_seconds"] = round(time.perf_counter() - start)
            bench.write()
    print(f"wrote {bench.path} after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
