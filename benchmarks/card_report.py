"""The report on the results of `card.py`: docs/card-measured.md and a region of README.

python benchmarks/card_report.py
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from graphrun.profile.hardware import CONTEXT_BYTES
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
    """Return the recorded results of each step."""
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
    """Return the slots of all runs of ``parts``."""
    return [slot for part in parts for run in part["runs"] for slot in run["slots"]]


def exact(records: Sequence[Record]) -> int:
    """Return the number of slots that reserved exactly the planned bytes."""
    return sum(not over(slot) for slot in records)


def over(slot: Record) -> int:
    """Return the measured peak of a slot less the planned one, in bytes."""
    return int(slot["peak_bytes"] - slot["planned"]["peak_bytes"])


def memory_table(parts: dict[str, Record]) -> Iterator[str]:
    """Yield a row per budget: bytes, and seconds of the whole run."""
    yield (
        "| budget, GiB | planned peak | measured peak | of the budget, with context | GB copied "
        "| planned, s | measured, s | picture |"
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
    """Yield a row per slot of the last run."""
    yield (
        "| slot | planned peak, MiB | measured | planned, s | calls, measured | copies, measured "
        "| whole slot, measured |"
    )
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for slot in part["runs"][-1]["slots"]:
        plan = slot["planned"]
        yield (
            f"| {slot['slot'].strip()} | {plan['peak_bytes'] / MIB:,.1f} "
            f"| {slot['peak_bytes'] / MIB:,.1f} | {plan['seconds']:.3f} "
            f"| {slot['run_seconds']:.3f} | {slot['copy_busy_seconds']:.3f} "
            f"| {slot['seconds']:.3f} |"
        )


def models_table(models: Record) -> Iterator[str]:
    """Yield a row per model and plan: bytes that the card took and that this version plans."""
    yield (
        "| graph | plan | slots equal | peak planned, MiB | peak measured | largest slot over plan "
        "| same bits as within the budget |"
    )
    yield "| --- | --- | ---: | ---: | ---: | ---: | --- |"
    for name, parts in models.items():
        for key in ("budget", "resident"):
            part = parts.get(key, {})
            if "replayed" not in part:
                continue
            planned_bytes = part["replayed"]["peak_bytes"]
            measured_bytes = [slot["peak_bytes"] for slot in part["runs"][-1]["slots"]]
            pairs = list(zip(measured_bytes, planned_bytes, strict=True))
            bits = [bit for run in part["runs"] for bit in run["same_bits_as_resident"].values()]
            picture = "" if key == "budget" else "equal" if bits and all(bits) else "not compared"
            budget = parts["prepare"]["budget_bytes"] / GIB
            yield (
                f"| {name} | {f'{budget:.3g} GiB' if key == 'budget' else 'all of the card'} "
                f"| {sum(a == b for a, b in pairs)} of {len(pairs)} "
                f"| {max(planned_bytes) / MIB:,.0f} | {max(measured_bytes) / MIB:,.0f} "
                f"| {max(0, *(a - b for a, b in pairs)) / MIB:+.0f} MiB "
                f"| {picture} |"
            )


def model_slots(models: Record) -> list[tuple[int, int]]:
    """Return bytes that the card took and that this version plans, of each slot."""
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
    """Return the section on other models."""
    pairs = model_slots(models)
    over_bytes = [a - b for a, b in pairs if a > b]
    return [
        "## Other models at full size",
        "",
        f"{len(models)} graphs at their full size and usual inputs, random weights, two denoising "
        "steps (`benchmarks/card.sh models`). Each plan ran within its budget, or within the "
        "minimum VRAM where that is more, and with the whole card. The table compares what the "
        "card took with what this version plans for the slots of the plan that ran "
        "(`benchmarks/card_models.py`; a part of it in `tests/profile/test_allocator.py`).",
        "",
        *models_table(models),
        "",
        f"- Of {len(pairs)} slots, {sum(a == b for a, b in pairs)} are equal to the byte and "
        f"{sum(a < b for a, b in pairs)} took less than planned. {len(over_bytes)} took more, at "
        f"most {max(over_bytes) / MIB:.0f} MiB, and none of them is the peak of its plan.",
        "- CogView4's and Qwen-Image's text encoders took less because a plan has room for the "
        "longest prompt. cuDNN takes up to 16.5 MiB of scratch that depends on a convolution's "
        "shape in ways we could not derive; plans count the most.",
        "- When these plans were made, plans did not yet know what the first of them showed: SDXL, "
        "SD3.5, Wan and HunyuanVideo 1.5 took 116 to 4,900 MiB more than planned. The causes were "
        "copies that cuDNN makes in convolutions, the order in memory of attention's results, "
        "boolean masks, which attention converts, and layer norms, which copy an input that is not "
        "contiguous. 874 kernels, measured one by one, gave the rules "
        "(`benchmarks/card_kernels.py`, `tests/profile/test_corrections.py`). Plans made with them "
        "kept their cap in all runs.",
        "",
    ]


def page(recorded: dict[str, Record]) -> str:
    """Return docs/card-measured.md."""
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
    link, versions = machine["driver and link"].split(", "), machine["versions"]
    rows = [
        "# Measured on a card",
        "",
        "<!-- Written by benchmarks/card_report.py from benchmarks/results/card-*.json. -->",
        "",
        f"{machine['card']} (PCIe {link[1]}.0 x{link[2]}, driver {link[0]}), 16 cores, Python "
        f"{machine['machine'].rpartition(' ')[2]}, torch {versions['torch']} with CUDA "
        f"{machine['cuda']}, diffusers {versions['diffusers']}; {machine['date'][:10]}. "
        "FLUX.1-dev at its full size, random weights in bfloat16 and pinned host memory, "
        "1024x1024, 4 steps. graphrun was calibrated on the card first. "
        "[How to run it](howto/bare-gpu.md):",
        "",
        "<!-- not run: needs a CUDA device -->",
        "```sh",
        "benchmarks/card.sh rates && benchmarks/card.sh flux && benchmarks/card.sh check",
        "python benchmarks/card_report.py     # writes this page",
        "```",
        "",
        "## Memory",
        "",
        *memory_table(parts),
        "",
        "Peaks are bytes that PyTorch's allocator reserved, without cuBLAS's workspace. *Of the "
        "budget, with context*: what the whole process took of the card, over the budget. The last "
        "budget is the minimum VRAM of the plan. Each plan ran twice.",
        "",
        f"- Of {len(big_slots)} slots, {exact(big_slots)} reserved exactly the "
        "planned bytes. The others: "
        + "; ".join(
            f"{slot['slot'].strip()}, {over(slot) / MIB:+.0f} MiB of "
            f"{slot['planned']['peak_bytes'] / MIB:,.0f}"
            for slot in different
        )
        + ". No run exceeded the cap for tensors.",
        f"- Of {len(small_slots)} slots of small FLUX and SDXL, "
        f"{exact(small_slots)} reserved exactly the planned bytes.",
        "- Of two runs, the first and the last budget, the card recorded all "
        f"{allocators[0]['events']:,} and {allocators[1]['events']:,} allocations, releases and "
        "pages. Replayed through graphrun's model of the allocator, the model and the card reserve "
        f"the same bytes at each of them (largest difference {_largest(allocators)} B, "
        f"peaks {allocators[0]['peak_reserved_bytes']:,} and "
        f"{allocators[1]['peak_reserved_bytes']:,} B with cuBLAS's workspace).",
        "- The slots of the denoiser that reserved more: on the card an RMS norm is one kernel "
        "with one result, and these plans counted its operators with their fp32 copies. Plans "
        "count the kernel now, and give for each slot of the second runs the bytes that the card "
        "reserved "
        "(`tests/profile/test_allocator.py`). The load slots reserved more in the first run of a "
        "process only.",
        "- The process took up to "
        f"{max(_context(part) for part in parts.values()) / 1e6:.0f} MB beside the allocator (CUDA "
        f"context and loaded kernels); budgets count {CONTEXT_BYTES['hopper'] / 1e6:.0f} MB.",
        "",
        *models_text(recorded["models"]["models"]["results"]),
        "## Seconds",
        "",
        *slot_table(next(iter(parts.values()))),
        "",
        f"The second run at {next(iter(parts))} GiB. Copies and the transformer's calls take what "
        f"was planned: a step {statistics.median(steps[1:]):.3f} s, planned "
        f"{use['seconds_per_call']:.3f}. The whole run takes longer than planned, for three "
        "reasons:",
        "",
        f"- Mapping and unmapping pages. At {list(parts)[1]} GiB the host was in the allocator for "
        f"{mapping:.2f} s of {_wall(host):.2f}, about 0.07 ms for each page of 20 MiB that it maps "
        "and as much to unmap it. Slots that only load map pages while others are copied. Plans do "
        "not count it.",
        f"- The VAE: planned {_decode(parts)['planned']['compute_seconds']:.3f} s, measured "
        f"{_decode(parts)['run_seconds']:.3f} s. Half of it, {norm['seconds']:.3f} s, is the "
        "kernel that computes the means of group norms ([costs](estimating.md#seconds)).",
        "- Host work in a slot outside of calls: tokenizer, scheduler, the picture to PIL. In this "
        "table also the benchmark's digests of every value. Plans do not count it.",
        "",
        f"Without digests, runs took {_walls(results['flux-dev host within 8G'])} s at "
        f"{list(parts)[0]} GiB and {_walls(host)} s at {list(parts)[1]} GiB (wall time of the "
        "first and the second). In the first, the host copies the weights into pinned memory. "
        f"Everything resident, diffusers' own pipeline took {resident['plain pipeline, seconds']} "
        f"s. The first decode in a process took {decode['seconds']:.2f} s, since its kernels are "
        "loaded then.",
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
    return "\n".join(rows) + "\n"


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
    """The slot of the first budget's last run in which the VAE decodes."""
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
        "FLUX.1-dev again, in a process of its own for each row, two runs, without digests. The "
        "cap is that of PyTorch's allocator. Weights are in pageable host memory before the first "
        f"run. Everything resident takes {reference['resident_peak_bytes'] / GIB:.1f} GiB."
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
        "graphrun begins and ends each of these runs with nothing on the card. Its rows are of "
        "the version before slots mapped pages while copying. Not run in the time that was left: "
        "`graphrun.attach` at this size, a graphrun session, diffusers-mm, accelerate's dispatch "
        "(`benchmarks/card.sh peers`)."
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
        f'After `graphrun.attach(pipe, vram="1G")`, small {", ".join(names[m] for m in models)} '
        "gave the picture of diffusers' own pipeline on the card, bit for bit, in two calls."
    )
    yield ""
    yield (
        "`graphrun run` of small FLUX with its transformer in int8 (bitsandbytes) reserved the "
        "planned bytes in every phase. Its first run in a process takes "
        f"{_done(check['run, int8'])}, and that in bfloat16 {_done(check['run, bfloat16'])}: CUDA "
        "loads each kernel when it is first used, which plans do not count."
    )


def _done(run: Record) -> str:
    """What the command said of the run's time."""
    line = next(line for line in run["output"] if line.startswith("done: "))
    return line.removeprefix("done: ").partition(")")[0] + ")"


def _rate_lines(rates: Record) -> Iterator[str]:
    figures = rates["calibrate"]["output"]["figures"]
    machine = rates["machine"]["results"]["machine"]
    assumed = rates["calibrate"]["output"]["assumed"]
    yield "| | measured | data-sheet estimate |"
    yield "| --- | ---: | ---: |"
    for name, key in (
        ("pinned memory to card, GB/s", "h2d_bytes_per_second"),
        ("card to pinned memory, GB/s", "d2h_bytes_per_second"),
        ("pageable memory to card, GB/s", "pageable_bytes_per_second"),
        ("disk, GB/s", "disk_bytes_per_second"),
    ):
        yield f"| {name} | {figures[key] / 1e9:.1f} | {assumed[key] / 1e9:.1f} |"
    rate = machine["both ways"]["to device beside products, GB/s"]
    yield f"| pinned memory to card during matrix products, GB/s | {rate:.1f} | |"
    for name in ("8192 cubed", "FLUX 4608x3072 by 3072x12288"):
        rate = machine["products"][f"torch.bfloat16 {name}, TFLOP/s"]
        yield f"| bfloat16 products, {name}, TFLOP/s | {rate:.0f} | |"
    for name in ("FLUX 24x4608x128", "SDXL 20x4096x64"):
        yield f"| attention, {name}, TFLOP/s | {machine['attention'][f'{name}, TFLOP/s']:.0f} | |"
    for name in ("VAE 512x256x256 bf16", "VAE 128x1024x1024 bf16"):
        convolution = machine["convolution"]
        yield f"| convolution, {name}, TFLOP/s | {convolution[f'{name}, TFLOP/s']:.0f} | |"
        scratch, rule = (
            convolution[f"{name}, scratch{end}"]
            for end in (" bytes", " by the rule in + out + weight")
        )
        yield f"| its scratch, bytes | {scratch:,} | {rule:,} |"


def readme(recorded: dict[str, Record]) -> str:
    """Return the lines of README."""
    flux = recorded["flux"]
    parts = budgets(flux)
    part = next(iter(parts.values()))
    models = recorded["models"]["models"]["results"]
    pairs = model_slots(models)
    run, reference = part["runs"][-1], recorded["peers"]["peers"]["results"]["reference"]
    resident = flux["flux"]["results"]["flux-dev resident"]["plain pipeline, seconds"]
    return (
        f"\nOn an {flux['about']['card']}, FLUX.1-dev at full size (1024x1024, 4 steps) takes "
        f"{run['seconds']:.1f} s a picture within 8 GiB,\nand {resident:.1f} s with everything on "
        f"the GPU ({reference['resident_peak_bytes'] / GIB:.0f} GiB). The picture is the same, bit "
        f"for bit. The planned peak is\n{part['planned']['peak_bytes']:,} bytes, the measured peak "
        f"{run['peak_bytes']:,}.\n\n"
        f"The plans of {len(models)} other models, from SDXL to Wan and HunyuanVideo, have "
        f"{len(pairs)} slots (stretches of time). Of these\n{sum(a == b for a, b in pairs)} took "
        f"exactly the planned bytes, {sum(a < b for a, b in pairs)} took less, and "
        f"{sum(a > b for a, b in pairs)} took at most {max(a - b for a, b in pairs) / MIB:.0f} MiB "
        "more\n(`benchmarks/card.sh`, "
        "[all figures, and where plans were wrong](docs/card-measured.md)).\n\n"
    )


def main() -> None:
    """Write the page and the region."""
    results = recorded()
    PAGE.write_text(page(results))
    README.write_text(REGION.sub(lambda _: readme(results), README.read_text()))


if __name__ == "__main__":
    main()
