"""graphrun beside what people use today, on one instrument: one process per cell, the same seed,
precision and cap.

python benchmarks/peers.py                         every model and tool on the simulated
accelerator; writes results/peers-sim.json python benchmarks/peers.py --device cuda           the
same at full size, with random weights, on a card python benchmarks/peers.py --models flux --tools
graphrun,"diffusers model offload" --steps 2 python benchmarks/peers_report.py
results/peers-sim.json      tables (Markdown) and plots (PNG) from the results

Peers that are not diffusers' own are installed beside graphrun, in an environment of one's own; one
that is missing is reported:

    python -m venv peers && peers/bin/pip install -e . diffusers-mm mmgp

benchmarks/README.md says what is measured, how, and what this cannot show.
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
"""Caps between the least that any peer takes and what everything resident needs. That is added, and
so is graphrun's smallest: what graphrun learns moves no cell of a peer's."""

TIGHT = 0.6
"""The tight RAM budget, as a share of all weights."""

REFERENCES = ("diffusers resident", "diffusers model offload", "diffusers sequential offload")
"""The first of these that finishes without a cap says what the output is; on sim that is always the
first."""


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="sim", choices=("sim", "cuda"))
    parser.add_argument("--models", default=",".join(GRAPHS))
    parser.add_argument(
        "--tools",
        help="comma-separated, those with a comma of their own by a part of their name; peers: all others'; default all",
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
    """The cells of one run of this command, and where their results go."""

    def __init__(self, asked: argparse.Namespace, cache: str) -> None:
        self.asked, self.cache = asked, cache
        wanted = asked.tools.split(",") if asked.tools else [""]
        known = [*TOOLS, *OWN]
        wanted = [*TOOLS] if wanted == ["peers"] else wanted
        self.tools = [
            name
            for name in known
            if any(part == name or (part not in known and part in name) for part in wanted)
        ]
        self.path = asked.out or HERE / "results" / f"peers-{asked.device}.json"
        self.results: dict[str, Any] = {"about": about(asked), "models": {}, "cells": []}
        if asked.resume and self.path.exists():
            before = json.loads(self.path.read_text())
            kept = [c for c in before["cells"] if not asked.forget or asked.forget not in c["tool"]]
            self.results |= {"models": before["models"], "cells": kept}
        self.folder: Path | None = None
        self._context: Any = multiprocessing.get_context(
            "fork" if asked.device == "sim" else "spawn"
        )

    def cell(self, model: str, tool: str, kind: str = "run", **more: Any) -> dict[str, Any]:
        """One cell in a process of its own. A process that dies or hangs is a result too."""
        known = self.results["models"].get(model, {})
        asked = _asked(model, tool, kind, more) | {
            "device": self.asked.device,
            "steps": self.asked.steps,
            "cache": self.cache,
        }
        asked |= {
            "activation_bytes": known.get("activation_bytes", 0),
            "folder": str(self.folder) if asked["ram_bytes"] else None,
        }
        receiver, sender = self._context.Pipe(duplex=False)
        start = time.perf_counter()
        worker = self._context.Process(target=process, args=(asked, sender))
        worker.start()
        sender.close()
        found: dict[str, Any] = {
            "status": "failed",
            "message": f"no answer within {self.asked.limit:.0f} s",
            "runs": [],
        }
        try:
            if receiver.poll(self.asked.limit):
                found = receiver.recv()
        except EOFError:
            worker.join(10)
            found["message"] = f"the process ended with {worker.exitcode}"
        if worker.is_alive():
            worker.join(10)
        if worker.is_alive():
            worker.kill()
        shown = {key: asked[key] for key in ("model", "tool", "kind", "cap_bytes", "ram_bytes")}
        if (outputs := found.pop("outputs", None)) and "outputs" in known:
            reference = known["outputs"] if kind == "run" else known.get("embeds")
            found["equal"] = (
                all(_same(output, reference, kind) for output in outputs) if reference else None
            )
        return {
            **shown,
            **found,
            **({"raw": outputs} if not known else {}),
            "took_seconds": round(time.perf_counter() - start, 2),
        }

    def facts(self, model: str) -> dict[str, Any]:
        """What the grid is made from: a run without a cap, its outputs, and graphrun's smallest
        budget."""
        of = subject(model, self.asked.device, self.asked.steps)
        plain: dict[str, Any] = {"status": "", "message": "", "runs": []}
        for tool in REFERENCES:
            if plain["status"] != "finished":
                plain = self.cell(model, tool)
        if plain["status"] != "finished":
            return {"failed": plain["message"]}
        embeds = plain if of.encodes_only else self.cell(model, plain["tool"], "encode")
        sizes = [c.weight_bytes() for c in self.ample(of).components]
        resident = plain["tool"] == REFERENCES[0]
        peak = _peak(plain)
        activation = max(0, peak - (plain["runs"][0]["left_bytes"] if resident else max(sizes)))
        return {
            "graph": graph_file(model, self.asked.device).stem,
            "reference": plain["tool"],
            "weight_bytes": sum(sizes),
            "resident_peak_bytes": peak if resident else sum(sizes) + activation,
            "activation_bytes": activation,
            "outputs": plain["raw"][0],
            "embeds": embeds["raw"][0],
        }

    def ample(self, of: Any) -> Any:
        """graphrun's problem without limits."""
        import graphrun

        hardware = hardware_for(of.model, self.asked.device)
        return graphrun.estimate(
            of.graph,
            vram=1 << 50,
            ram=1 << 50,
            hardware=hardware,
            inputs=of.given,
            cache=Path(self.cache),
        )

    def model(self, name: str) -> None:
        """All cells of one model: without a cap, the grid, encoding alone, tight RAM."""
        from graphrun.solve.infeasible import smallest_budget

        path = graph_file(name, self.asked.device)
        if not path.exists():
            self.results["models"][name] = {"failed": f"there is no {path.name}"}
            return
        of = subject(name, self.asked.device, self.asked.steps)
        if self.asked.device == "sim":
            of.pipeline()  # forked cells share its modules and what it imports
            gc.freeze()  # nor need their collectors look at all that
        known = self.results["models"].get(name, {})
        facts = known if "outputs" in known else self.facts(name)
        self.results["models"][name] = facts
        if "failed" in facts:
            return
        ample = self.ample(of)
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
        if not of.encodes_only:
            self.many([(name, c["tool"], "encode", {}) for c in runnable])
        facts["tight_ram_bytes"] = ram = int(TIGHT * facts["weight_bytes"])
        tight = [tool for tool in self.tools if tool in OWN or TOOLS[tool].for_ram]
        self.folder = of.stored(Path(self.cache))  # the weights in files, as a user's are
        at = [
            between(facts["peers_least_bytes"], facts["resident_peak_bytes"], 0.5),
            facts["resident_peak_bytes"],
        ]
        self.many(
            [
                (name, tool, "run", {"cap_bytes": cap, "ram_bytes": ram})
                for cap in at
                for tool in tight
            ]
        )
        gc.unfreeze()

    def caps(self, facts: dict[str, Any]) -> list[int]:
        """From the least that a peer needs to what all resident needs, in multiples of 512 bytes,
        and graphrun's smallest."""
        if self.asked.caps:
            from graphrun.units import parse_size

            return [parse_size(text, name="cap") for text in self.asked.caps.split(",")]
        own = {facts["graphrun_smallest_bytes"]} if set(OWN) & set(self.tools) else set[int]()
        low, high = facts["peers_least_bytes"], facts["resident_peak_bytes"]
        return sorted({between(low, high, share) for share in SHARES} | {high} | own)

    def caps_of(self, uncapped: dict[str, Any], caps: list[int]) -> list[int]:
        """Those of ``caps`` at which a tool has to be run: all, but for one that does not look at
        the cap the two around its peak.

        Above its peak such a tool does the same as without a cap, below it it does not finish; the
        two show that this is so.
        """
        tool = uncapped["tool"]
        if (
            tool in OWN
            or self.asked.device in TOOLS[tool].adapts
            or uncapped["status"] != "finished"
        ):
            return caps
        peak = _peak(uncapped)
        return [cap for cap in caps if cap < peak][-1:] + [cap for cap in caps if cap >= peak][:1]

    def many(self, cells: list[tuple[str, str, str, dict[str, Any]]]) -> list[dict[str, Any]]:
        """Results of ``cells``, in order; kept and written as they come. Those of an earlier
        command are not run again."""
        kept = {_key(c): c for c in self.results["cells"]}
        done = [kept[key] for key in (_key(_asked(*cell)) for cell in cells) if key in kept]
        cells = [cell for cell in cells if _key(_asked(*cell)) not in kept]
        jobs = self.asked.jobs if self.asked.device == "sim" else 1
        with ThreadPoolExecutor(jobs) as pool:
            waiting = deque(
                pool.submit(self.cell, model, tool, kind, **more)
                for model, tool, kind, more in cells
            )
            while waiting:
                found = waiting.popleft().result()
                done.append(found)
                self.results["cells"].append(found)
                self.write()
                print(_line(found), flush=True)
        return done

    def write(self) -> None:
        """What there is so far."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.results, indent=1) + "\n")


def between(low: int, high: int, share: float) -> int:
    """In multiples of 512 bytes, as memory is allocated."""
    return low + int(share * (high - low)) // 512 * 512


def _asked(model: str, tool: str, kind: str, more: dict[str, Any]) -> dict[str, Any]:
    return {"model": model, "tool": tool, "kind": kind, "cap_bytes": None, "ram_bytes": None} | more


def _key(cell: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(cell[name] for name in ("model", "tool", "kind", "cap_bytes", "ram_bytes"))


def _same(output: list[str], reference: list[str], kind: str) -> bool:
    """Bit for bit. Of the embeddings a graph keeps those that the pipeline's call takes back, so
    not all need be there."""
    return output == reference if kind == "run" else bool(output) and set(output) <= set(reference)


def _peak(cell: dict[str, Any]) -> int:
    return max(int(run.get("reserved_peak_bytes", run["peak_bytes"])) for run in cell["runs"])


def _line(cell: dict[str, Any]) -> str:
    cap = "no cap" if cell["cap_bytes"] is None else f"{cell['cap_bytes'] / 2**20:.2f} MiB"
    runs = "  ".join(
        f"{run['seconds']:.4f} s {run['peak_bytes'] / 2**20:.2f} MiB" for run in cell["runs"]
    )
    equal = {True: "", False: "  OUTPUT DIFFERS", None: ""}[cell.get("equal")]
    return f"{cell['model']:9} {cell['kind']:6} {cap:>12}  {cell['tool']:40} {cell['status']:11} {runs}{equal}  {cell['message'][:80]}"


def about(asked: argparse.Namespace) -> dict[str, Any]:
    """Date, machine, versions, and what the cells have in common."""
    import torch

    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["benchmarks/peers.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "device": asked.device,
        "steps": asked.steps,
        "versions": dict(_versions()),
    }
    if asked.device == "cuda":
        of = torch.cuda.get_device_properties(0)
        found["card"], found["card_bytes"] = of.name, of.total_memory
    else:
        from graphrun.profile.hardware import simulated

        rates = simulated()
        found["rates"] = {
            name: getattr(rates, name)
            for name in ("h2d_bytes_per_second", "d2h_bytes_per_second", "flops_per_second")
        }
    return found


def _versions() -> Iterator[tuple[str, str | None]]:
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, None


def main() -> None:
    """Runs what was asked for, and says where the results are."""
    import torch

    asked = options()
    if asked.device == "cuda" and not torch.cuda.is_available():
        return print(
            "there is no CUDA device here; without --device cuda the simulated accelerator is used"
        )
    torch.set_num_threads(1)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        bench = Bench(asked, cache)
        for name in asked.models.split(","):
            bench.model(name)
            bench.results["about"]["took_seconds"] = round(time.perf_counter() - start)
            bench.write()
    print(f"wrote {bench.path} after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
