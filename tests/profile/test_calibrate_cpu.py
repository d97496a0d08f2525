"""Calibration of the CPU: which classes its probes measure, and for which machine a profile is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import metadata
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphrun
from graphrun.model.hardware import NEW_PAGES, Hardware, ProcessorRates, ReadRates
from graphrun.profile import calibrate, calibrate_cpu, doctor, processor
from graphrun.profile import hardware_profiles as profiles
from graphrun.profile.calibrate_cpu import (
    FASTEST,
    ColdPool,
    Probe,
    fitted_rates,
    measured_cpu,
    probes,
    work_of,
)
from graphrun.profile.costs import kernel_seconds, quantized_seconds
from graphrun.report.machine_screens import calibrate_screen
from graphrun.units import GIB, MIB


def rates_of(hardware: Hardware) -> ProcessorRates:
    assert isinstance(hardware.kernels, ProcessorRates)
    return hardware.kernels


def test_rates_are_those_that_give_the_probes_their_seconds() -> None:
    work = [{"matmul": 8e9}, {"matmul": 4e9, "reads": 1e9}, {"reads": 3e9, "results": 1e9}]
    rates, errors = fitted_rates(work, [2.0, 1.5, 1.5])
    assert (rates["matmul"], rates["reads"]) == pytest.approx((4e9, 2e9))
    assert rates["results"] == FASTEST, "nothing is left for it"
    assert errors == pytest.approx([0, 0, 0])


@pytest.mark.parametrize("name", ["convolution float32", "huge convolution float32"])
def test_convolutions_are_not_much_faster_than_products(name: str) -> None:
    """The copies of weights could explain all seconds of these convolutions."""
    work = [
        {"matmul float32": 8e9},
        {name: 4e9, "weight copies": 4e7},
        {name: 8e9, "weight copies": 1e8},
    ]
    rates, errors = fitted_rates(work, [2.0, 2.0, 5.0])
    assert (rates["matmul float32"], rates[name]) == pytest.approx((4e9, 5e9))
    assert rates["weight copies"] > 2e7
    assert max(map(abs, errors)) < 0.1


def cpu_of(features: str, monkeypatch: pytest.MonkeyPatch) -> Hardware:
    """Return the estimate of a CPU of two cores with these instruction sets."""
    monkeypatch.setattr(processor, "_cpu_facts", lambda: ("a CPU", 2, frozenset(features.split())))
    return processor.cpu_estimate()


@pytest.mark.parametrize(
    ("features", "left_out"),
    [
        ("avx2 avx512f avx512_bf16", set()),
        # a probe of them would take 15 s or more, nearly all of it products
        ("avx2", {"huge convolution bfloat16", "large copies bfloat16", "huge copies bfloat16"}),
    ],
)
def test_every_class_of_the_estimate_is_measured(
    features: str, left_out: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    probe_list = probes(cpu_of(features, monkeypatch))
    names_measured = {name for probe in probe_list for name in work_of(probe.kernels())}
    names = {name for name, _ in rates_of(processor.cpu_estimate()).rates}
    names -= {f"elementwise {dtype}" for dtype in calibrate_cpu.DTYPES}
    names = {name for name in names if not name.startswith("dequantize ")}  # measured directly
    names = {name for name in names if "float16" not in name.split()}
    names -= {*NEW_PAGES}  # measured directly
    assert names - names_measured == left_out


@pytest.mark.parametrize(
    ("features", "dtype"),
    [
        ("avx2 avx512f avx512_bf16", "bfloat16"),
        ("avx2 avx512f avx512_bf16 GenuineIntel", "float32"),
        ("avx2", "float32"),
    ],
)
def test_a_probe_is_one_operator_or_block_of_a_second_at_most(
    features: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kernel,) = Probe(nn.functional.linear, "float32", ((7, 64), (32, 64))).kernels()
    assert (kernel.kind, kernel.shape) == ("matmul", (1, 7, 64, 32))
    base = cpu_of(features, monkeypatch)
    probe_list = probes(base)
    assert all(len(probe.kernels()) == 1 for probe in probe_list if not probe.is_block)
    seconds = [sum(kernel_seconds(kernel, base) for kernel in p.kernels()) for p in probe_list]
    assert max(seconds) < 1.1
    assert sum(seconds) < 10, "four calls of each take less than a minute"
    blocks = [probe for probe in probe_list if probe.is_block]
    assert {probe.dtype for probe in blocks} == {dtype}
    assert [sum(kernel.kind == "matmul" for kernel in probe.kernels()) for probe in blocks] == [
        6,
        10,
        1,
    ]


def test_launches_are_what_small_blocks_take_beside_their_work() -> None:
    base, block_seconds = processor.cpu_estimate(), list[float]()
    small_blocks = zip(
        calibrate_cpu._small_blocks("cpu"), calibrate_cpu._small_blocks("meta"), strict=True
    )
    for block, recorded in small_blocks:
        with torch.no_grad():
            block.operator(*block.tensors("cpu"))
        kernels = recorded.kernels()
        assert len(kernels) >= 10
        block_seconds.append(
            sum(kernel_seconds(kernel, base) - base.launch_seconds + 3e-6 for kernel in kernels)
        )
    launch = calibrate_cpu.launch_seconds_in_blocks(block_seconds, rates_of(base))
    assert launch == pytest.approx(3e-6)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> Hardware:
    """A CPU 3 times as fast as the estimate, and probes that take its seconds."""
    base = cpu_of("avx2 avx512f avx512_bf16", monkeypatch)
    kernels = rates_of(base)
    rates = tuple((name, 3 * rate) for name, rate in kernels.rates)
    hardware = replace(base, kernels=replace(kernels, rates=rates), launch_seconds=1e-6)

    def seconds(calls: Iterable[Probe | str], _: float) -> dict[Probe | str, float]:
        seconds_by_call = dict[Probe | str, float]()
        for call in calls:
            if isinstance(call, str):
                rate = rates_of(hardware).rate(call, "")
                seconds_by_call[call] = calibrate_cpu.TOUCH_BYTES / rate
            elif isinstance(call.operator, nn.Module):  # of quantized layers, and the chain
                seconds_by_call[call] = calibrate_cpu.LAUNCHED * 1e-6
            else:
                seconds_by_call[call] = sum(kernel_seconds(k, hardware) for k in call.kernels())
        return seconds_by_call

    monkeypatch.setattr(calibrate_cpu, "typical_seconds", seconds)
    monkeypatch.setattr(calibrate_cpu, "launch_seconds_in_blocks", lambda *_: 1e-6)
    monkeypatch.setattr(calibrate_cpu, "_small_blocks", lambda _: ())
    monkeypatch.setattr(calibrate_cpu, "LAYER_SIZE", 256)
    monkeypatch.setattr(calibrate_cpu, "POOL_BYTES", 1 << 16)
    return hardware


def test_a_quantized_layer_takes_what_it_takes_longer_than_its_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calibrate_cpu, "LAYER_SIZE", 256)
    layers = calibrate_cpu.quantized_layers("float32")
    seconds = {precision: 1.5 if precision else 1.0 for precision in layers}
    rates = calibrate_cpu.dequantization_rates(seconds, "float32")
    assert set(rates.values()) == {4 * 256 * 256 / 0.5}
    precisions = {name.split()[1] for name in rates}
    assert {"nf4", "int8", "fp8", "gguf", "Q4_K", "Q6_K", "Q8_0"} <= precisions
    assert len(layers) == len(precisions)  # one plain, and gguf counts as Q4_K
    estimate = rates_of(processor.cpu_estimate())
    assert precisions == {
        name.split()[1] for name, _ in estimate.rates if name.startswith("dequantize")
    }
    tokens = torch.randn(4, 256)
    for layer in layers.values():
        kind = type(layer.operator).__name__
        with torch.no_grad():
            expected = tokens @ (
                torch.zeros(256, 256) if kind == "_GgufLinear" else torch.ones(256, 256)
            )
            assert layer.operator(tokens) == pytest.approx(expected, rel=0.05, abs=0.5), kind


def test_gguf_is_dequantized_on_a_cpu_at_its_own_rate() -> None:
    base = processor.cpu_estimate()
    (kernel,) = Probe(nn.functional.linear, "float32", ((7, 64), (32, 64))).kernels()
    slow = replace(
        rates_of(base), rates=(*rates_of(base).rates, ("dequantize Q4_K float32", 4096.0))
    )
    hardware = replace(base, kernels=slow)
    assert quantized_seconds(kernel, (32, 64), "Q4_K_M", hardware) == 4 * 32 * 64 / 4096
    assert quantized_seconds(kernel, (32, 64), "fp8wo", hardware) == quantized_seconds(
        kernel, (32, 64), "fp8", hardware
    )
    copy = rates_of(base).rate("elementwise _to_copy", "float32")
    assert quantized_seconds(kernel, (32, 64), "quanto", hardware) == 4 * 32 * 64 / copy


def test_kernels_take_as_long_as_they_were_measured_to(fast: Hardware) -> None:
    """Within the share of operators that only blocks have, which are left out."""
    base = processor.cpu_estimate()
    profile, figures = measured_cpu(base, 1.0)
    operators = {
        name
        for probe in probes(base)
        if not probe.is_block
        for name in calibrate_cpu.work_of(probe.kernels())
    }
    shares = []
    for probe in probes(base):
        seconds = [(kernel_seconds(kernel, fast), kernel) for kernel in probe.kernels()]
        left_out = (
            duration
            for duration, kernel in seconds
            if kernel.kind == "elementwise"
            and not operators & calibrate_cpu.work_of([kernel]).keys()
        )
        shares.append(sum(left_out) / sum(duration for duration, _ in seconds))
    assert max(shares) < 0.005
    assert profile.basis == "measured"
    assert figures["largest_probe_error"] <= max(shares)
    probe = Probe(nn.functional.linear, "bfloat16", ((300, 2048), (2048, 2048)))
    for kernel in probe.kernels():
        assert kernel_seconds(kernel, profile) == pytest.approx(
            kernel_seconds(kernel, fast), rel=max(shares)
        )


def test_an_operator_that_only_a_block_has_gets_no_rate_of_its_own(fast: Hardware) -> None:
    profile, _ = measured_cpu(processor.cpu_estimate(), 1.0)
    names = {name for name, _ in rates_of(profile).rates}
    assert "elementwise mul float32" in names
    assert not any(name.startswith("elementwise add_ ") for name in names)


def test_tensors_are_read_from_new_places_until_the_pool_ends() -> None:
    pool, weight = ColdPool(3 * 4096), torch.empty(100, 10, dtype=torch.float32)
    addresses = [pool.take(weight).data_ptr() for _ in range(4)]
    assert [address - addresses[0] for address in addresses] == [0, 4096, 8192, 0]
    assert pool.take(weight).isfinite().all()


@pytest.mark.parametrize(("available", "nbytes"), [(8 * GIB, 2 * GIB), (64 * GIB, 3 * GIB)])
def test_the_pool_is_larger_than_caches_and_at_most_a_quarter_of_the_memory(
    monkeypatch: pytest.MonkeyPatch, available: int, nbytes: int
) -> None:
    class PoolMadeError(Exception):
        pass

    def pool(size: int) -> ColdPool:
        raise PoolMadeError(size)

    monkeypatch.setattr(calibrate_cpu, "available_bytes", lambda: available)
    monkeypatch.setattr(calibrate_cpu, "ColdPool", pool)
    with pytest.raises(PoolMadeError, match=f"^{nbytes}$"):
        measured_cpu(processor.cpu_estimate(), 1.0)


def test_probes_are_timed() -> None:
    probe = Probe(nn.functional.linear, "float32", ((7, 64), (32, 64)))
    pool = ColdPool(1 << 20)
    calls = {probe: probe.timed(pool), calibrate_cpu.launch_chain(): lambda: 2.0}
    seconds, chain_seconds = calibrate_cpu.typical_seconds(calls, 0).values()
    assert 0 < seconds < 1
    assert chain_seconds == 2


def test_all_calls_meet_the_same_states_of_the_machine() -> None:
    """It slows down to a half in the middle, and two calls are disturbed."""
    order = list[str]()

    def call_of(name: str, seconds: float) -> Callable[[], float]:
        def call() -> float:
            order.append(name)
            number = order.count(name) - 2  # the first is not measured
            return {1: 100.0, 3: 0.0}.get(number, seconds * (1 if number < 2 else 2))

        return call

    calls = {"a": call_of("a", 1.0), "b": call_of("b", 3.0)}
    assert calibrate_cpu.typical_seconds(calls, 0) == {"a": 5 / 3, "b": 5.0}
    assert order == ["a", "b"] * 6


@pytest.mark.parametrize(("available_chunks", "chunks"), [(1, 0), (5, 2), (9, 4)])
def test_new_memory_is_written_in_at_most_half_of_what_is_available(
    monkeypatch: pytest.MonkeyPatch, available_chunks: int, chunks: int
) -> None:
    chunks_seen, allocate = list[Any](), calibrate_cpu.anonymous_memory

    def noted(nbytes: int) -> Any:
        chunks_seen.append(allocate(nbytes))
        return chunks_seen[-1]

    nbytes = calibrate_cpu.TOUCH_BYTES
    monkeypatch.setattr(calibrate_cpu, "available_bytes", lambda: available_chunks * nbytes)
    monkeypatch.setattr(calibrate_cpu, "anonymous_memory", noted)
    seconds = calibrate_cpu.first_touch_seconds(60.0)
    assert [len(chunk) for chunk in chunks_seen] == [nbytes] * chunks
    # enough elements for PyTorch to divide among threads
    assert all(chunk[:] == b"\1" * nbytes for chunk in chunks_seen)
    assert (seconds > 0) == bool(chunks)


@pytest.mark.sweep("more")
def test_a_profile_is_for_one_model_of_cpu_its_threads_and_one_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: Hardware
) -> None:
    read_rates = iter((ReadRates(2e9, 1.5e9, 0.02e-9, 1e-3), ReadRates(2e9, 0.5e9, 0.04e-9, 3e-3)))

    def measure(folder: Path, seconds: float) -> ReadRates:
        return next(read_rates)

    assert profiles.detect_cpu(tmp_path).basis == "data sheet"
    result = calibrate.measure_and_keep("cpu", tmp_path, measure_reads=measure)
    profile = profiles.detect_cpu(tmp_path)
    assert (profile.name, profile.basis) == ("cpu-measured", "measured")
    rate = profile.disk_bytes_per_second
    assert rate == pytest.approx(0.75e9), "while all cores compute, of as many bytes each time"
    assert rates_of(profile).read_cpu_seconds == pytest.approx(0.03e-9)
    assert profile.copy_start_seconds == pytest.approx(2e-3)
    assert 0 < profile.first_touch_seconds < 1e-7
    assert rates_of(profile).threads == torch.get_num_threads()
    assert result["figures"]["disk_alone_bytes_per_second"] == pytest.approx(2e9)
    assert next(read_rates, None) is None, "reads are measured before and after the kernels"
    assert not profiles.other_cpu_profiles(tmp_path)
    rows = calibrate_screen(result).splitlines()
    for title, dtype in (("bf16", "bfloat16"), ("fp32", "float32")):
        rate = rates_of(profile).rate("matmul", dtype)
        (row,) = [row for row in rows if f"matrix products, {title}" in row]
        assert f"{rate / 1e12:.2f} TFLOP/s" in row or f"{rate / 1e9:.2f} GFLOP/s" in row

    name, cores, features = processor._cpu_facts()
    other_features = features ^ {"amx_bf16"}  # a hypervisor hides it under the same name
    for facts, threads, torch_version in (
        (("another CPU", cores, features), processor.cpu_threads(), metadata.version("torch")),
        ((name, cores, other_features), processor.cpu_threads(), metadata.version("torch")),
        ((name, cores, features), processor.cpu_threads() + 1, metadata.version("torch")),
        ((name, cores, features), processor.cpu_threads(), "1.0"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(processor, "_cpu_facts", lambda facts=facts: facts)
            patch.setattr(processor, "cpu_threads", lambda threads=threads: threads)
            patch.setattr(metadata, "version", lambda _, text=torch_version: text)
            assert profiles.detect_cpu(tmp_path).basis == "data sheet"
            assert profiles.other_cpu_profiles(tmp_path) == ["cpu-measured"]
            rows = doctor.examine(tmp_path)["checks"]
            (row,) = [row for row in rows if row["name"] == "profile"]
            assert row["verdict"] == "note"
            assert row["fix"] == "graphrun calibrate --device cpu"
    assert profiles.detect_cpu(tmp_path).basis == "measured"

    (file,) = (tmp_path / "profiles").glob("*.json")
    text = file.read_text()
    file.write_text(text.replace("queries float32", "scores float32"))
    assert profiles.detect_cpu(tmp_path).basis == "data sheet", "of an older version"


@pytest.mark.parametrize(
    ("name", "expected_name"),
    [
        ("Intel(R) Xeon(R) Processor", "Intel(R) Xeon(R) Processor, family 6, model 207"),
        ("Intel Xeon CPU @ 2.20GHz", "Intel Xeon CPU @ 2.20GHz, family 6, model 207"),
        ("AMD EPYC 9B14", "AMD EPYC 9B14"),
    ],
)
def test_a_name_of_several_generations_of_processors_has_the_number_of_the_model(
    name: str, expected_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"processor : 0\ncpu family : 6\nmodel : 207\nmodel name : {name}\nflags : avx2\n"
    monkeypatch.setattr(Path, "read_text", lambda _, encoding: text)
    facts = processor._cpu_facts.__wrapped__()
    assert (facts[0], "avx2" in facts[2]) == (expected_name, True)


def test_threads_are_those_of_torch() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert processor.cpu_threads() == threads + 1
        assert rates_of(processor.cpu_estimate()).threads == threads + 1
    finally:
        torch.set_num_threads(threads)


@pytest.mark.sweep("more")
def test_small_blocks_are_not_read_again_at_every_step(tmp_path: Path) -> None:
    """Starting a read, and the code around it, takes longer than getting new memory for a small
    block."""
    card = replace(processor.cpu_estimate(), first_touch_seconds=1e-9)
    moved_bytes = []
    for hardware in (card, replace(card, copy_start_seconds=0.0, launch_seconds=0.0)):
        problem = graphrun.estimate(
            graphrun.load("shapes"), memory="700M", hardware=hardware, cache=tmp_path
        )
        moved_bytes.append(graphrun.plan(problem).simulation.moved_bytes)
    assert moved_bytes[0] < 6 * MIB < moved_bytes[1]


@pytest.mark.parametrize("library", ["", "libtorch_cuda.so", "torch_cuda.dll"])
def test_a_pytorch_built_for_cuda_takes_more_of_a_cpu_s_memory(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").touch()
    if library:
        (tmp_path / "torch" / "lib" / library).touch()
    spec = spec_from_file_location("torch", tmp_path / "torch" / "__init__.py")
    monkeypatch.setattr(processor, "find_spec", lambda _: spec)
    processor.process_bytes.cache_clear()
    try:
        more_bytes = processor.cpu_estimate().context_bytes - processor.PROCESS_BYTES
    finally:
        processor.process_bytes.cache_clear()
    assert more_bytes == (processor.CUDA_LIBRARIES_BYTES if library else 0)
