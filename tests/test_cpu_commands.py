"""Commands with ``--device cpu --memory``: one pool of memory."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from campaign import sampled
from PIL import Image

import graphrun as api
from graphrun import devices
from graphrun.model.hardware import ProcessorRates
from graphrun.profile.processor import cpu_estimate
from graphrun.units import GIB, MIB

SMALL = ("--set", "height=64", "--set", "width=64", "--set", "steps=2")
INPUTS = {"height": "64", "width": "64", "steps": "2", "prompt": "a"}
TOTAL_CPU = ("flux-tiny", "--device", "cpu", *SMALL)


@pytest.mark.sweep("more")
def test_the_smallest_memory_on_the_screen_is_enough_and_a_byte_less_is_not(graphrun: Any) -> None:
    code, _, screen = graphrun("plan", *TOTAL_CPU, "--memory", "300M")
    assert code == 3
    match = re.search(r"minimum memory: --memory (\S+) \((\d+) bytes\)", screen)
    assert match is not None, screen
    assert "VRAM" not in screen
    assert "RAM" not in screen
    code, _, screen = graphrun("plan", *TOTAL_CPU, "--memory", f"{int(match[2]) - 1}B")
    assert code == 3, screen
    assert graphrun("plan", *TOTAL_CPU, "--memory", f"{match[2]}B")[0] == 0
    assert graphrun("plan", *TOTAL_CPU, "--memory", match[1])[0] == 0
    with pytest.raises(api.Infeasible, match='memory=".*M": raise the memory budget'):
        api.plan(api.estimate(api.load("flux-tiny"), inputs=INPUTS, memory="300M"))


@pytest.mark.sweep("more")
def test_a_frontier_varies_the_memory(graphrun: Any) -> None:
    code, screen, _ = graphrun("frontier", *TOTAL_CPU, "--memory", "440M:2G")
    assert code == 0
    assert "minimum memory: --memory 4" in screen
    fastest = re.search(r"fastest: .*, from ([\d.]+) ([MG])iB on", screen)
    assert fastest, screen
    size = f"{float(fastest[1]):g}{fastest[2]}"
    assert re.search(rf"next: graphrun plan .*--memory {size} ", screen.replace("\\\n", "")), screen
    assert "RAM" not in screen
    code, data, _ = graphrun("frontier", *TOTAL_CPU, "--memory", "1G", "--json")
    (point,) = json.loads(data)["points"]
    assert (point["budget_bytes"], point["feasible"]) == (GIB, True)
    assert graphrun("frontier", *TOTAL_CPU)[0] == 2
    code, _, text = graphrun("frontier", *TOTAL_CPU, "--vram", "4G:8G")
    assert code == 2
    assert "give --memory 4G:8G" in text


@pytest.mark.sweep("more")
def test_an_estimate_says_whether_it_fits_in_the_memory(graphrun: Any) -> None:
    screen = graphrun("estimate", *TOTAL_CPU, "--memory", "2G")[1]
    assert "fits in 2.00 GiB of memory" in screen
    assert "--memory 2G" in screen
    assert "does not fit in 440.00 MiB" in graphrun("estimate", *TOTAL_CPU, "--memory", "440M")[1]
    code, _, text = graphrun("estimate", "flux-tiny", "--device", "sim", "--memory", "2G")
    assert code == 2
    assert "--device cpu" in text


def test_doctor_says_what_the_cpu_can_do(graphrun: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    code, text, _ = graphrun("doctor", "--json")
    findings = json.loads(text)
    checks = {check["name"]: check for check in findings["checks"]}
    assert code == 0
    assert findings["processor"]["cores"] >= 1
    assert findings["memory"]["auto_bytes"] > 0
    assert checks["calibration"]["fix"] == "graphrun calibrate --device cpu"
    assert "--memory auto is" in checks["memory"]["text"]
    assert all(row["direct"] is not None for row in findings["processor"]["direct_reads"])
    monkeypatch.setattr("graphrun.profile.doctor.enforceable", lambda: "no cgroups; type X")
    monkeypatch.setattr("graphrun.profile.doctor.reads_directly", lambda folder: False)
    screen = " ".join(graphrun("doctor")[1].split())
    assert "run --enforce has no effect here: no cgroups; type X" in screen
    assert "no O_DIRECT in" in screen
    monkeypatch.setattr("graphrun.profile.processor._cpu_facts", lambda: ("a CPU", 2, frozenset()))
    screen = " ".join(graphrun("doctor")[1].split())
    assert "2 cores, no bfloat16: graphs compute in float32" in screen
    facts = ("a Xeon", 2, frozenset({"avx512f", "avx512_bf16", "GenuineIntel"}))
    monkeypatch.setattr("graphrun.profile.processor._cpu_facts", lambda: facts)
    screen = " ".join(graphrun("doctor")[1].split())
    assert "bfloat16 by avx512_bf16, which is slower than float32 here" in screen
    facts = ("an EPYC", 2, frozenset({"avx512f", "avx512_bf16", "AuthenticAMD"}))
    monkeypatch.setattr("graphrun.profile.processor._cpu_facts", lambda: facts)
    assert "2 cores, bfloat16 by avx512_bf16 " in " ".join(graphrun("doctor")[1].split())


@pytest.mark.sweep("more")
@pytest.mark.long
def test_lists_and_sessions_run_within_the_memory(graphrun: Any, tmp_path: Path) -> None:
    (tmp_path / "inputs.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n', encoding="utf-8")
    options = (*TOTAL_CPU, "--memory", "2G", "--random-weights", "--set", "seed=1")
    code, screen, text = graphrun(
        "run", *options, "--inputs", "inputs.jsonl", "-o", "out", "--json"
    )
    assert code == 0, screen
    assert json.loads(screen)["measured"]["overruns"] == []
    files = [name for names in json.loads(screen)["files"].values() for name in names]
    assert len(files) == 2
    graph, inputs = api.load("flux-tiny"), {**INPUTS, "seed": 1}
    with api.Session(graph, memory="2G", random_weights=True, inputs=inputs) as session:
        assert session.solution.problem.budget_bytes == 2 * GIB
        assert not session.run().overruns
        trace = session.run({"height": "32"})  # another plan, within the same memory
        assert session.current is not None
        assert session.current.problem.budget_bytes == 2 * GIB
        assert trace.peak_bytes <= 2 * GIB - 432 * MIB


CPUS: list[tuple[str, tuple[str, ...], str]] = [
    ("avx2", (), "float32"),
    ("avx512f avx512_bf16", (), "bfloat16"),
    ("avx512f avx512_bf16 GenuineIntel", (), "float32"),
    ("avx512f avx512_bf16 amx_bf16 GenuineIntel", (), "bfloat16"),
    ("avx2", ("--dtype", "graph"), "bfloat16"),
    ("avx512f avx512_bf16", ("--dtype", "float32"), "float32"),
]


@pytest.mark.parametrize(
    ("slow_kind", "dtype"), [("matmul", "float32"), ("convolution", "float32"), ("", "bfloat16")]
)
def test_a_dtype_is_slow_if_products_or_convolutions_take_longer_than_in_fp32(
    slow_kind: str, dtype: str
) -> None:
    """As fp16 on a CPU with AVX-512 for it: products as fast as in fp32, convolutions half."""
    cpu = cpu_estimate()
    assert isinstance(cpu.kernels, ProcessorRates)
    rates = dict(cpu.kernels.rates)
    for kind in ("matmul", "convolution"):
        fp32_rate = rates[f"{kind} float32"]
        rates[f"{kind} bfloat16"] = (0.9 if kind == slow_kind else 1.0) * fp32_rate
    hardware = replace(cpu, kernels=replace(cpu.kernels, rates=tuple(rates.items())))
    graph = devices.in_dtype(api.load("flux-tiny"), None, hardware)
    assert graph.components["transformer"].dtype == dtype


@pytest.mark.parametrize("cpu", sampled(CPUS, CPUS[:3], "cpu"), ids=str)
def test_a_cpu_computes_in_the_dtype_that_it_is_fast_in(
    graphrun: Any,
    monkeypatch: pytest.MonkeyPatch,
    cpu: tuple[str, tuple[str, ...], str],
) -> None:
    """Without an option: what the CPU is fast in. The options are in the sweep."""
    features, options, dtype = cpu
    facts = ("a CPU", 2, frozenset(features.split()))
    monkeypatch.setattr("graphrun.profile.processor._cpu_facts", lambda: facts)
    command = (*TOTAL_CPU, "--memory", "2G", *options)
    code, screen, notes = graphrun("plan", *command, "-o", "plan.json", "-v")
    assert code == 0, notes
    is_replaced = dtype == "float32"
    assert ("float32 for bfloat16" in " ".join(screen.split())) == is_replaced
    assert ("--dtype graph keeps it" in notes) == (is_replaced and not options)
    problem = api.estimate(
        api.load("flux-tiny", dtype=dtype), inputs={**INPUTS, "prompt": ""}, memory="2G"
    )
    data = json.loads(Path("plan.json").read_text(encoding="utf-8"))["problem"]
    assert data["graph_digest"] == problem.graph_digest
    assert data.get("dtypes", []) == ([["bfloat16", "float32"]] if is_replaced else [])
    picture_options = ("--random-weights", "--prompt", "a", "--set", "seed=1", "--json")
    code, text, notes = graphrun("run", "plan.json", *picture_options, "-o", "a.png")
    # 4: plans are for a new process on another CPU, and this process takes more
    assert code in (0, 4), notes
    assert graphrun("run", *command, *picture_options, "-o", "b.png")[0] in (0, 4)
    with Image.open("a.png") as first, Image.open("b.png") as second:
        assert first.tobytes() == second.tobytes()
    code, _, notes = graphrun(
        "run", "plan.json", *picture_options, "--dtype", "bfloat16", "-o", "c.png"
    )
    assert code == 2
    assert "--dtype" in notes


def test_a_graph_that_fits_only_in_its_own_dtype_is_offered_in_it(
    graphrun: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a CPU that is faster in fp32, with 64 KiB less than fp32 needs. Without the VAE, which is
    in fp32 in both, and without what runs of other tests measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    facts = ("a CPU", 2, frozenset(["avx2"]))
    monkeypatch.setattr("graphrun.profile.processor._cpu_facts", lambda: facts)
    command = ("plan", *TOTAL_CPU, "--until", "denoise")
    _, screen, notes = graphrun(*command, "--memory", "440M")
    minimum = re.search(r"minimum memory: .*\((\d+) bytes\)", screen + notes)
    assert minimum is not None, screen + notes
    command = (*command, "--memory", f"{int(minimum[1]) - 65536}B")
    code, screen, notes = graphrun(*command)
    assert code == 3
    row = re.compile(r"^ --dtype graph +[\d.]+ m?s  changes the output$", re.MULTILINE)
    assert row.search(screen + notes), screen + notes
    assert graphrun(*command, "--dtype", "graph")[0] == 0
    _, screen, notes = graphrun(*command, "--dtype", "float32")
    assert not row.search(screen + notes)


def test_a_dtype_replaces_16_bits_alone() -> None:
    graph, in_fp32 = api.load("flux-tiny"), api.load("flux-tiny", dtype="float32")
    assert {c.dtype for c in in_fp32.components.values()} == {"float32"}
    assert in_fp32.in_dtype("bfloat16") == in_fp32, "components in fp32 stay"
    assert graph.in_dtype("float16") == graph.in_dtypes({"bfloat16": "float16"})
    with pytest.raises(api.InputError, match="dtype 'int8' is not known; it is bfloat16, float16"):
        api.load("flux-tiny", dtype="int8")


@pytest.mark.sweep("more")
def test_nothing_is_page_locked_on_a_cpu(graphrun: Any) -> None:
    code, _, text = graphrun("plan", *TOTAL_CPU, "--memory", "2G", "--pin", "transformer")
    assert code == 2
    assert "pin transformer: a CPU has no page-locked copies" in text
    graph = api.load("flux-tiny").directed(pin=["transformer"])  # as a graph file may say
    problem = api.estimate(graph, inputs=INPUTS, memory="2G")
    assert "pin" not in {directive.placement for directive in problem.directives}
