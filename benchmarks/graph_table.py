"""Write docs/graphs.md and graphs/figures.json, the figures of `graphrun list`.

    python benchmarks/graph_table.py [NAME ...]    all graphs, or the named ones; others keep their
                                                   lines
    python benchmarks/graph_table.py --fits [NAME ...]
                                                   the table of choices, from `graphrun fit`, and
                                                   benchmarks/results/fits.json; with names, the
                                                   others keep their rows

The table: every reference graph's predicted time and peak at four budgets on an RTX 4090, and its
weights in GiB. The choices: the first of ``graphrun fit GRAPH --card CARD --ram RAM --json``, with
dry runs in a cache, as they are in a wheel. Needs no weights and no GPU. Pyramid-Flow's code is no
package: its rows need its folder on PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from page_text import folded

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "docs" / "graphs.md"
FIGURES = ROOT / "graphs" / "figures.json"
FITS = ROOT / "benchmarks" / "results" / "fits.json"
FIT_CARDS, FIT_RAM = {"rtx4060laptop": 8, "rtx4070": 12, "rtx5060ti": 16}, (16, 32, 64)  # GiB
FIT_NAMES = (
    "flux-dev",
    "flux2-klein",
    "z-image",
    "sdxl",
    "sd35-large",
    "qwen-image",
    "wan22-t2v",
    "hidream",
    "ltx2",
)
# graphs planned with `--allow compile`
COMPILED = ("wan-animate-2",)
# packages that must be on Python's path
CODE = {"pyramid-flow": ("pyramid_dit", "video_vae", "diffusion_schedulers")}
HARDWARE = "rtx4090"
BUDGETS = ("8G", "12G", "16G", "24G")
RAM = "64G"
NAMES = (
    "flux-dev",
    "flux-schnell",
    "sdxl",
    "sdxl-int8",
    "sdxl-nf4",
    "sdxl-img2img",
    "sdxl-inpaint",
    "sdxl-controlnet",
    "sdxl-depth",
    "sdxl-refined",
    "sd21-upscaled",
    "flux-kontext",
    "flux-fill",
    "flux-controlnet",
    "flux2-dev",
    "flux2-klein",
    "flux3-klein",
    "chroma",
    "z-image",
    "krea2",
    "ernie-image",
    "ideogram4",
    "hunyuan-image",
    "bria-fibo",
    "bria-fibo-2",
    "sana",
    "stable-cascade",
    "sd3",
    "sd35-large",
    "hidream",
    "cogview4",
    "auraflow",
    "pixart-sigma",
    "hunyuan-dit",
    "qwen-image",
    "qwen-image-21",
    "qwen-image-edit",
    "wan-14b",
    "wan22-t2v",
    "wan22-i2v",
    "wan-animate-2",
    "hunyuan-video",
    "hunyuan-video15",
    "kandinsky5",
    "kandinsky6",
    "cogvideox-5b",
    "ltx",
    "ltx2",
    "cosmos3-nano",
    "minimax-h3",
    "pyramid-flow",
    "stable-audio",
    "stable-audio-3",
    "ace-step",
)

HEAD = f"""# Reference graphs

Each file in `graphs/` plans without weights and GPU.

Seconds are of one cold run, predicted for an RTX 4090 with {RAM[:-1]} GiB of RAM at the graph's \
default inputs, with weights read from disk.
Next to them is the peak in GiB, as `nvidia-smi` shows it. `-`: does not fit; the minimum VRAM is \
in parentheses. Weights are in GiB, in
the checkpoint's precision; `graphrun estimate NAME` shows each component.

| graph | {" | ".join(f"{budget[:-1]} GiB" for budget in BUDGETS)} | weights |
|---{"|---" * len(BUDGETS)}|---|
"""
TAIL = """
- Pyramid-Flow needs [its own code](howto/own-code.md#a-program-of-any-class), \
and `--trust-package`.
- Kandinsky 5 and 6 and HunyuanVideo 1.5 decode in tiles; `--set tiling=false` switches that off. \
sd21-upscaled decodes 2048 pixels; with
  `--allow tiling`, 8 GiB are enough (39 s).
- Wan-Animate 2 is planned with `--allow compile`, without which its attention keeps all scores. \
Each segment's keys and values take 32 GiB; with `--set height=496 --set width=400`, 24 GiB are \
enough (568 s).
- MiniMax-H3 takes 1,403 s for 50 steps in 24 GiB. Published: 1,951 s with compiled blocks on an \
RTX 4090 (NVlabs/Sana#466), and 721 s on an RTX 4090 D, at settings not compared \
(sgl-project/sglang#35858).
- Ideogram 4's pipeline calls layers of its text encoder one by one; such layers are not streamed.
- Qwen-Image 2.1, Qwen-Image-Edit, FLUX.3, MiniMax-H3, Kandinsky 6 and Bria FIBO 2 need \
torchvision to run, not to plan.
- Missing: LTX-2.5 (the attention of its decoder takes 332,191 GiB unless it is compiled), \
GLM-Image (its language model writes 1,281 tokens, with a call of all layers for each), Anima (its \
transformer needs torchvision, also to plan), Kolors (needs sentencepiece and its \
vocabulary), Cosmos 2.5 (needs a checker whose configuration diffusers does not have).
"""


FITS_TITLE = "\n## On cards that people have\n"
FITS_HEAD = f"""{FITS_TITLE}
The first choice of `graphrun fit GRAPH --card CARD --ram RAM` with the RTX 4060 laptop (8 GiB), \
4070 (12) and 5060 Ti (16): what to allow, predicted seconds of one run from files, and enough VRAM
+ RAM for weights in GiB. A choice that keeps the picture (16-bit) comes first unless another is \
25 % faster.

"""
FITS_TAIL = """
Each{untimed} took {seconds} CPU seconds with a wheel's dry run, and {cached} from the cache (user \
time on two cores of a busy Xeon at 2.5 GHz), by \
`python benchmarks/graph_table.py --fits`.
"""


def fit_of(name: str, card: str, ram_gib: int, cache: str) -> tuple[list[dict[str, Any]], float]:
    """Return the choices of ``graphrun fit`` and the user seconds that the command took."""
    words = ("-m", "graphrun", "fit", name, "--card", card, "--ram", f"{ram_gib}G", "--json")
    start = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    answer = subprocess.run(
        (sys.executable, *words),
        env={**os.environ, "XDG_CACHE_HOME": cache},
        stdout=subprocess.PIPE,
        check=False,
        text=True,
    )
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - start
    return json.loads(answer.stdout)["choices"], round(seconds, 2)


def measure_fits(names: Sequence[str]) -> None:
    """Write FITS: the first choice of each graph on each machine, and seconds of the command."""
    rows = json.loads(FITS.read_text()) if FITS.is_file() else []
    rows = [row for row in rows if row["graph"] not in names]
    with tempfile.TemporaryDirectory() as cache:
        for name in names:
            fit_of(name, "rtx4090", 128, cache)  # makes the dry run
            for card in FIT_CARDS:
                for ram_gib in FIT_RAM:
                    choices, seconds = fit_of(name, card, ram_gib, cache)
                    row = {"graph": name, "card": card, "ram_gib": ram_gib, "cpu_seconds": seconds}
                    if ram_gib == FIT_RAM[0]:
                        row["cached_cpu_seconds"] = fit_of(name, card, ram_gib, cache)[1]
                    rows.append({**row, "choices": choices[:1]})
                    FITS.write_text(json.dumps(rows, indent=1) + "\n")
                    print(name, card, ram_gib, fit_cell(choices), seconds, flush=True)


def fit_cell(choices: Sequence[dict[str, Any]]) -> str:
    """Return the first choice as a cell: format, seconds, VRAM + RAM."""
    if not choices:
        return "-"
    best = choices[0]
    sizes = (f"{best[key] / 2**30:.0f}" for key in ("enough_vram_bytes", "enough_ram_bytes"))
    return f"{','.join(best['allow']) or '16-bit'} {best['seconds']:.0f}, {'+'.join(sizes)}"


def fits_table() -> str:
    """Return the section with the choices in FITS; "" if they were not measured."""
    if not FITS.is_file():
        return ""
    rows = json.loads(FITS.read_text())
    cells = {(row["graph"], row["card"], row["ram_gib"]): fit_cell(row["choices"]) for row in rows}
    machines = [(card, ram_gib) for card in FIT_CARDS for ram_gib in FIT_RAM]
    head = [f"{FIT_CARDS[card]} / {ram_gib} GiB" for card, ram_gib in machines]
    lines = [f"| graph | {' | '.join(head)} |", f"|---{'|---' * len(machines)}|"]
    for name in FIT_NAMES:
        lines.append(f"| {name} | {' | '.join(cells[name, *machine] for machine in machines)} |")
    seconds = _range([row["cpu_seconds"] for row in rows if "cpu_seconds" in row])
    cached = _range([row["cached_cpu_seconds"] for row in rows if "cached_cpu_seconds" in row])
    # rows from another machine have no CPU seconds: these would not compare
    untimed = ", ".join(sorted({row["graph"] for row in rows if "cpu_seconds" not in row}))
    tail = FITS_TAIL.format(
        untimed=f" but {untimed}" * bool(untimed), seconds=seconds, cached=cached
    )
    return FITS_HEAD + "\n".join(lines) + "\n" + tail


def _range(numbers: Sequence[float]) -> str:
    return f"{min(numbers):.1f} to {max(numbers):.1f}"


def weights_cell(name: str) -> str:
    """Return the last cell of a graph's row: the GiB of its components."""
    import graphrun
    from graphrun.modules.build import meta_module

    graph = graphrun.load(ROOT / "graphs" / f"{name}.yaml", trust=CODE.get(name, ()))
    modules = (meta_module(component, graph.trust) for component in graph.components.values())
    return f"{sum(map(nbytes, modules)) / 2**30:.1f}"


def figures(name: str, row_cells: Sequence[str]) -> dict[str, Any]:
    """Return the parameters of a graph, and the smallest sufficient one of `BUDGETS` with `RAM`.
    The budget and its seconds come from the cells of the graph's row."""
    import graphrun
    from graphrun.modules.build import meta_module

    graph = graphrun.load(ROOT / "graphs" / f"{name}.yaml", trust=CODE.get(name, ()))
    modules = [meta_module(component, graph.trust) for component in graph.components.values()]
    row: dict[str, Any] = {
        "parameters": sum(p.numel() for module in modules for p in module.parameters())
    }
    for budget, cell in zip(BUDGETS, row_cells, strict=False):
        if match := re.match(r"([\d.]+) s,", cell):
            return {
                **row,
                "card_gib": int(budget[:-1]),
                "ram_gib": int(RAM[:-1]),
                "seconds": float(match[1]),
            }
    return row


def nbytes(module: Any) -> int:
    return sum(
        t.numel() * t.element_size()
        for t in {id(t): t for t in (*module.parameters(), *module.buffers())}.values()
    )


def plan_cells(name: str) -> list[str]:
    """Return the time and the peak of a graph at each of `BUDGETS`."""
    import graphrun
    from graphrun.profile.dry_run import probe
    from graphrun.profile.hardware import hardware
    from graphrun.profile.problems import ProblemLimits, problem_of
    from graphrun.solve.infeasible import Infeasible, smallest_budget
    from graphrun.units import parse_size

    graph = graphrun.load(ROOT / "graphs" / f"{name}.yaml", trust=CODE.get(name, ()))
    inputs = graph.for_planning({})
    recording = probe(graph, inputs)
    cells = []
    for budget in BUDGETS:
        ram = parse_size(RAM, name="ram")
        allow = ("compile",) if name in COMPILED else ()
        limits = ProblemLimits(parse_size(budget, name="vram"), ram, allow=allow)
        problem = problem_of(graph, recording, hardware(HARDWARE), limits, inputs)
        try:
            solution = graphrun.plan(problem)
        except Infeasible:
            cells.append(f"- ({smallest_budget(problem) / 2**30:.1f})")
            continue
        simulation = solution.simulation
        peak_bytes = simulation.peak_bytes + problem.budget_bytes - problem.effective_bytes
        cells.append(f"{simulation.seconds:.1f} s, {peak_bytes / 2**30:.1f}")
    return cells


def cells_of(text: str) -> dict[str, list[str]]:
    """Return the cells of the rows by graph, as they are in the document."""
    table = text.partition(FITS_TITLE)[0]
    rows = (line.removeprefix("| ").removesuffix(" |").split(" | ") for line in table.splitlines())
    return {name: cells for name, *cells in rows if name in NAMES}


def document(rows: dict[str, list[str]]) -> str:
    lines = (f"| {' | '.join([name, *rows[name]])} |\n" for name in NAMES if name in rows)
    return folded(HEAD + "".join(lines) + TAIL + fits_table())


def main(names: list[str]) -> None:
    """Rewrite the rows of ``names``; by default of all graphs."""
    rows = cells_of(TABLE.read_text()) if TABLE.is_file() else {}
    if names[:1] == ["--fits"]:
        measure_fits(names[1:] or FIT_NAMES)
        TABLE.write_text(document(rows))
        return
    absent = [
        name
        for name, packages in CODE.items()
        if any(find_spec(package) is None for package in packages)
    ]
    for name in names or [name for name in NAMES if name not in absent]:
        rows[name] = [*plan_cells(name), weights_cell(name)]
        print(name, *rows[name], sep=" | ", flush=True)
        TABLE.write_text(document(rows))
        figures_by_name = json.loads(FIGURES.read_text()) if FIGURES.is_file() else {}
        FIGURES.write_text(
            json.dumps(
                figures_by_name | {name: figures(name, rows[name])}, indent=1, sort_keys=True
            )
            + "\n"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
