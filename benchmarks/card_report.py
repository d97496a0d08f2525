"""Write docs/card-measured.md and a region of README from the results of `card.py`.

python benchmarks/card_report.py
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from page_text import folded

from graphrun.profile.hardware import CONTEXT_BYTES, data_sheet_estimates
from graphrun.units import GIB, MIB

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
PAGE, README = ROOT / "docs/card-measured.md", ROOT / "README.md"
REGION = re.compile(
    r"(?<=<!-- written by benchmarks/card_report.py -->\n).*?(?=<!-- end -->)", re.S
)
STEPS = ("rates", "flux", "check", "peers", "models")
Record = dict[str, Any]


def recorded() -> dict[str, Record]:
    return {step: json.loads((RESULTS / f"card-{step}.json").read_text()) for step in STEPS}


def budgets(flux: Record) -> dict[str, Record]:
    """Return the parts of FLUX.1-dev's step that have runs, by budget in GiB."""
    parts = flux["flux"]["results"]
    return {
        f"{part['budget_bytes'] / GIB:.3g}": part
        for name, part in parts.items()
        if name.startswith("flux-dev within")
    }


def slots(parts: Sequence[Record]) -> list[Record]:
    return [slot for part in parts for run in part["runs"] for slot in run["slots"]]


def exact(records: Sequence[Record]) -> int:
    """Return the number of slots that reserved exactly the planned bytes."""
    return sum(not over(slot) for slot in records)


def over(slot: Record) -> int:
    """Return the measured minus the planned peak of a slot, in bytes."""
    return int(slot["peak_bytes"] - slot["planned"]["peak_bytes"])


def memory_table(parts: dict[str, Record]) -> Iterator[str]:
    """Yield a row per budget: bytes, and seconds of the whole run."""
    yield (
        "| budget, GiB | planned peak, bytes | measured | of the budget, with context | GB copied "
        "| planned, s | two runs, s | picture |"
    )
    yield "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |"
    for budget, part in parts.items():
        runs, plan = part["runs"], part["planned"]
        equal = all(all(run["same_bits_as_resident"].values()) for run in runs)
        share = max(run["used_bytes_at_most"] for run in runs) / part["budget_bytes"]
        seconds = ", ".join(f"{run['seconds']:.2f}" for run in runs)
        yield (
            f"| {budget} | {plan['peak_bytes']:,} | {max(r['peak_bytes'] for r in runs):,} "
            f"| {share:.4f} | {plan['moved_bytes'] / 1e9:.1f} | {plan['seconds']:.2f} "
            f"| {seconds} | {'equal' if equal else 'differs'} |"
        )


def slot_table(part: Record) -> Iterator[str]:
    """Yield a row per slot of the last run that computes or copies."""
    yield "| slot | planned, s | measured | in calls | copying |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for slot in part["runs"][-1]["slots"]:
        if slot["seconds"] < 0.0005:
            continue
        yield (
            f"| {slot['slot'].strip()} | {slot['planned']['seconds']:.3f} "
            f"| {slot['seconds']:.3f} | {slot['run_seconds']:.3f} "
            f"| {slot['copy_busy_seconds']:.3f} |"
        )


def models_table(models: Record) -> Iterator[str]:
    """Yield a row per model: measured bytes and bytes that this version computes, within the budget
    and with the whole card."""
    yield (
        "| graph | budget, GiB | computed, MiB | measured | whole card: computed | measured "
        "| slots equal | largest excess, MiB | same bits |"
    )
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |"
    for name, parts in models.items():
        peaks: list[str] = []
        pairs: list[tuple[int, int]] = []
        picture = "-"
        for key in ("budget", "resident"):
            part = parts.get(key, {})
            if "replayed" not in part:
                peaks += ["-", "-"]
                continue
            planned_bytes = part["replayed"]["peak_bytes"]
            measured_bytes = [slot["peak_bytes"] for slot in part["runs"][-1]["slots"]]
            pairs += zip(measured_bytes, planned_bytes, strict=True)
            peaks += [f"{max(sizes) / MIB:,.0f}" for sizes in (planned_bytes, measured_bytes)]
            bits = [bit for run in part["runs"] for bit in run["same_bits_as_resident"].values()]
            if key == "resident":
                picture = "equal" if bits and all(bits) else "not compared"
        yield (
            f"| {name} | {parts['prepare']['budget_bytes'] / GIB:.3g} | {' | '.join(peaks)} "
            f"| {sum(a == b for a, b in pairs)} of {len(pairs)} "
            f"| {max(0, *(a - b for a, b in pairs)) / MIB:.0f} | {picture} |"
        )


def model_slots(models: Record) -> list[tuple[int, int]]:
    """Return the measured bytes of each slot, and the bytes that this version plans for it."""
    return [
        (slot["peak_bytes"], planned_bytes)
        for parts in models.values()
        for part in parts.values()
        if "replayed" in part
        for slot, planned_bytes in zip(
            part["runs"][-1]["slots"], part["replayed"]["peak_bytes"], strict=True
        )
    ]


def models_text(models: Record) -> list[str]:
    pairs = model_slots(models)
    over_bytes = [a - b for a, b in pairs if a > b]
    return [
        "## Other models at full size",
        "",
        f"{len(models)} graphs with their usual inputs, random weights and two denoising steps, "
        "within a budget and with the whole card (`benchmarks/card.sh models`). An earlier version "
        "made and ran these plans. *computed*: the peaks that this version computes for them "
        "(`benchmarks/card_models.py`). *same bits*: of both outputs. `-`: not run.",
        "",
        *models_table(models),
        "",
        f"- Of {len(pairs)} slots, {sum(a == b for a, b in pairs)} are equal to the byte and "
        f"{sum(a < b for a, b in pairs)} took less than computed. {len(over_bytes)} took more, at "
        f"most {max(over_bytes) / MIB:.0f} MiB, and none of them is the peak of its plan.",
        "- Plans have room for the longest prompt (CogView4, Qwen-Image), and for the most scratch "
        "of a convolution, by rules from 874 measured kernels (`benchmarks/card_kernels.py`).",
        "",
    ]


def page(recorded: dict[str, Record]) -> str:
    flux, rates = recorded["flux"], recorded["rates"]
    machine, parts = flux["about"], budgets(flux)
    resident = flux["flux"]["results"]["flux-dev resident"]
    allocators = [flux["flux"]["results"][name] for name in ("allocator", "allocator-minimum")]
    small = [
        part
        for name, part in recorded["check"]["tiny"]["results"]["tiny"].items()
        if " within " in name
    ]
    big_slots, small_slots = slots(list(parts.values())), slots(small)
    different = [slot for slot in big_slots if over(slot)]
    decode = next(call for call in resident["calls"] if call["component"] == "vae")
    norm = next(k for k in resident["kernels"] if "RowwiseMoments" in k["name"])
    steps = [call["seconds"] for call in resident["calls"] if call["component"] == "transformer"]
    use = next(
        use
        for phase in resident["estimated"]["phases"]
        for use in phase["uses"]
        if use["component"] == "transformer"
    )
    results = flux["flux"]["results"]
    host = results["flux-dev host within 24G"]
    mapping = sum(
        row["own_seconds"]
        for row in host["by own seconds"]
        if row["function"].endswith(("torch.empty>", "_cuda_emptyCache>"))
    )
    largest_bytes = _largest(allocators)
    difference = (
        f"differs from the card by at most {largest_bytes} B"
        if largest_bytes
        else "reserves what the card does, to the byte"
    )
    link, versions = machine["driver and link"].split(", "), machine["versions"]
    rows = [
        "# Measured on a card",
        "",
        "<!-- Written by benchmarks/card_report.py from benchmarks/results/card-*.json. -->",
        "",
        f"{machine['card']} (PCIe {link[1]}.0 x{link[2]}, driver {link[0]}), 16 cores, Python "
        f"{machine['machine'].rpartition(' ')[2]}, torch {versions['torch']} with CUDA "
        f"{machine['cuda']}, diffusers {versions['diffusers']}; {machine['date'][:10]}. "
        "FLUX.1-dev at full size, random weights in bfloat16 and pinned host memory, "
        "1024x1024, 4 steps. graphrun was calibrated first. [How to run it](howto/bare-gpu.md):",
        "",
        "<!-- not run: needs a CUDA device -->",
        "```sh",
        "benchmarks/card.sh rates && benchmarks/card.sh flux && benchmarks/card.sh check",
        "python benchmarks/card_report.py",
        "```",
        "",
        "## Memory",
        "",
        *memory_table(parts),
        "",
        "Peaks are bytes that PyTorch's allocator reserved, less cuBLAS's workspace, which it also "
        "reserves. *Of the budget, with context*: what the whole process took. The last budget is "
        "the minimum VRAM. Seconds are without the copy of weights into pinned memory.",
        "",
        f"- Of {len(big_slots)} slots, {exact(big_slots)} reserved exactly the planned bytes. "
        f"{len(different)} reserved more, at most "
        f"{max(over(slot) for slot in different) / MIB:.0f} MiB: load slots in a process's first "
        "run; and the denoiser, whose RMS norms the version that ran planned as several kernels. "
        "Peaks that this version computes equal those of the second runs to the byte "
        "(`tests/profile/test_allocator.py`).",
        f"- Of {len(small_slots)} slots of small FLUX and SDXL, "
        f"{exact(small_slots)} reserved exactly the planned bytes.",
        f"- In two runs with {allocators[0]['events']:,} and {allocators[1]['events']:,} "
        f"allocations, releases and pages, graphrun's model of the allocator {difference}.",
        "- The process took up to "
        f"{max(_context(part) for part in parts.values()) / 1e6:.0f} MB next to the allocator "
        "(CUDA context and loaded kernels); budgets count "
        f"{CONTEXT_BYTES['hopper'] / 1e6:.0f} MB.",
        "",
        *models_text(recorded["models"]["models"]["results"]),
        "## Seconds",
        "",
        *slot_table(next(iter(parts.values()))),
        "",
        f"The second run at {next(iter(parts))} GiB, by [slot](planning.md). *In calls*: while "
        "components compute; *copying*: while weights are copied; both may be at once. A step of "
        f"the transformer takes {statistics.median(steps[1:]):.3f} s, planned "
        f"{use['seconds_per_call']:.3f}, and copies take what was planned. Plans do not count:",
        "",
        f"- Mapping and unmapping pages: at {list(parts)[1]} GiB {mapping:.2f} s of "
        f"{_wall(host):.2f}, about 0.07 ms for a page of 20 MiB.",
        f"- Part of the VAE: planned {_decode(parts)['planned']['compute_seconds']:.3f} s, "
        f"measured {_decode(parts)['run_seconds']:.3f} s. Half of it, {norm['seconds']:.3f} s, is "
        "the kernel that computes the means of group norms ([costs](estimating.md#seconds)).",
        "- Host work outside of calls: tokenizer, scheduler, the picture to PIL; in this table "
        "also the benchmark's checksums of every value.",
        "",
        "Without checksums, the first and the second run of a process took "
        f"{_walls(results['flux-dev host within 8G'])} s at {list(parts)[0]} GiB, "
        f"{_walls(host)} s at {list(parts)[1]} GiB (wall time). The first also copies the weights "
        "into pinned memory. With everything resident, "
        f"diffusers' own pipeline took {resident['plain pipeline, seconds']:.2f} s, and "
        f"{decode['seconds']:.2f} s for its first decode, which loads kernels.",
        "",
        "## Next to other tools",
        "",
        *_peer_lines(recorded["peers"]),
        "",
        "## graphrun.attach and quantized weights",
        "",
        *_small_lines(recorded["check"]),
        "",
        "## Rates",
        "",
        *_rate_lines(rates),
    ]
    return folded("\n".join(rows)) + "\n"


def _context(part: Record) -> int:
    return max(
        slot["books"]["used_bytes"] - slot["books"]["reserved_bytes"]
        for run in part["runs"]
        for slot in run["slots"]
    )


def _largest(allocators: Sequence[Record]) -> int:
    keys = ("model_over_at_most_bytes", "model_under_at_most_bytes")
    return max(int(allocator[key]) for allocator in allocators for key in keys)


def _wall(host: Record) -> float:
    return float(host["runs"][-1]["wall_seconds"])


def _walls(host: Record) -> str:
    return " and ".join(f"{run['wall_seconds']:.2f}" for run in host["runs"])


def _decode(parts: dict[str, Record]) -> Record:
    """Return the slot of the first budget's last run in which the VAE decodes."""
    part = next(iter(parts.values()))
    return next(
        slot
        for slot in part["runs"][-1]["slots"]
        if slot["slot"].startswith("decode") and slot["run_seconds"]
    )


def _peer_lines(peers: Record) -> Iterator[str]:
    comparison = peers["peers"]["results"]
    reference = comparison["reference"]
    yield (
        "FLUX.1-dev, two runs in a new process per row. The cap is the limit of PyTorch's "
        "allocator. Weights are in ordinary (pageable) memory first. Everything resident "
        f"takes {reference['resident_peak_bytes'] / GIB:.1f} GiB."
    )
    yield ""
    yield "| cap, GiB | tool | first run, s | second, s | allocated at most, GiB | picture |"
    yield "| ---: | --- | ---: | ---: | ---: | --- |"
    order = sorted(
        comparison["cells"],
        key=lambda cell: (
            cell["cap_bytes"],
            cell["runs"][-1]["seconds"] if cell["runs"] else float("inf"),
        ),
    )
    for cell in order:
        cap = f"{cell['cap_bytes'] / GIB:g}"
        if cell["status"] != "finished":
            yield f"| {cap} | {cell['tool']} | out of memory | | | |"
            continue
        first, second = (f"{run['seconds']:.2f}" for run in cell["runs"])
        peak = max(run["peak_bytes"] for run in cell["runs"]) / GIB
        equal = "equal" if cell["equal"] else "differs"
        yield f"| {cap} | {cell['tool']} | {first} | {second} | {peak:.2f} | {equal} |"
    yield ""
    yield (
        "graphrun begins and ends each run with nothing on the card; an earlier version made its "
        "rows, whose first runs were faster than those above (why was not examined). Model offload "
        "also copies the weights back to pageable memory in each run. "
        "Not measured: `graphrun.attach` at this size, a session, diffusers-mm, "
        "accelerate's dispatch (`benchmarks/card.sh peers`)."
    )


def _small_lines(check: Record) -> Iterator[str]:
    models = check["attach"]["results"]
    equal = all(
        result[key]
        for result in models.values()
        for key in ("next run has the same bits", "plain pipeline has the same picture")
    )
    assert equal
    names = {"flux": "FLUX", "sdxl": "SDXL", "wan": "Wan"}
    yield (
        f'With `graphrun.attach(pipe, vram="1G")`, small {", ".join(names[m] for m in models)} '
        "give the picture of diffusers' own pipeline, bit for bit, in two calls."
    )
    yield ""
    yield (
        "`graphrun run` of small FLUX with its transformer in int8 (bitsandbytes) reserved the "
        "planned bytes in every phase. Its first run in a process takes "
        f"{_done(check['run, int8'])}, in bfloat16 {_done(check['run, bfloat16'])}: plans do not "
        "count that CUDA loads each kernel at its first use."
    )


def _done(run: Record) -> str:
    """Return the time of the run as the command printed it."""
    line = next(line for line in run["output"] if line.startswith("done: "))
    return line.removeprefix("done: ").partition(")")[0] + ")"


def _rate_lines(rates: Record) -> Iterator[str]:
    figures = rates["calibrate"]["output"]["figures"]
    machine = rates["machine"]["results"]["machine"]
    sheet = data_sheet_estimates()["h100"]
    yield "| | measured | data sheet |"
    yield "| --- | ---: | ---: |"
    for name, key in (
        ("pinned memory to card, GB/s", "h2d_bytes_per_second"),
        ("card to pinned memory, GB/s", "d2h_bytes_per_second"),
        ("pageable memory to card, GB/s", "pageable_bytes_per_second"),
        ("disk, GB/s", "disk_bytes_per_second"),
    ):
        yield f"| {name} | {figures[key] / 1e9:.1f} | {getattr(sheet, key) / 1e9:.1f} |"
    rate = machine["both ways"]["to device beside products, GB/s"]
    yield f"| pinned memory to card during matrix products, GB/s | {rate:.1f} | |"
    for name in ("FLUX 4608x3072 by 3072x12288",):
        rate = machine["products"][f"torch.bfloat16 {name}, TFLOP/s"]
        yield f"| bfloat16 products, {name}, TFLOP/s | {rate:.0f} | |"
    for name in ("FLUX 24x4608x128", "SDXL 20x4096x64"):
        yield f"| attention, {name}, TFLOP/s | {machine['attention'][f'{name}, TFLOP/s']:.0f} | |"
    for name in ("VAE 512x256x256 bf16", "VAE 128x1024x1024 bf16"):
        rate = machine["convolution"][f"{name}, TFLOP/s"]
        yield f"| convolution, {name}, TFLOP/s | {rate:.0f} | |"


def readme(recorded: dict[str, Record]) -> str:
    flux = recorded["flux"]
    parts = budgets(flux)
    part = next(iter(parts.values()))
    models = recorded["models"]["models"]["results"]
    pairs = model_slots(models)
    run, reference = part["runs"][-1], recorded["peers"]["peers"]["results"]["reference"]
    resident = flux["flux"]["results"]["flux-dev resident"]["plain pipeline, seconds"]
    paragraphs = (
        f"On an {flux['about']['card']}, FLUX.1-dev at full size (random weights in pinned RAM, "
        f"1024x1024, 4 steps) takes {run['seconds']:.1f} s a picture within 8 GiB; "
        f"diffusers with everything on the GPU ({reference['resident_peak_bytes'] / GIB:.0f} GiB) "
        f"takes {resident:.1f} s. The picture is the same, bit for bit. The planned "
        f"peak is {part['planned']['peak_bytes']:,} bytes, the measured peak "
        f"{run['peak_bytes']:,}.",
        f"An earlier version ran plans of {len(models)} other models, from SDXL to Wan and "
        f"HunyuanVideo. Of their {len(pairs)} slots (stretches of time), "
        f"{sum(a == b for a, b in pairs)} took exactly the bytes that this version computes, "
        f"{sum(a < b for a, b in pairs)} took less, and {sum(a > b for a, b in pairs)} took at "
        f"most {max(a - b for a, b in pairs) / MIB:.0f} MiB more (`benchmarks/card.sh`, [all "
        "figures, and where plans were wrong](docs/card-measured.md)).",
    )
    text = "\n\n".join(paragraphs)
    return f"\n{folded(text)}\n\n"


def main() -> None:
    results = recorded()
    PAGE.write_text(page(results))
    README.write_text(REGION.sub(lambda _: readme(results), README.read_text()))


if __name__ == "__main__":
    main()
