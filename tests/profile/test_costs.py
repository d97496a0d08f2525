"""The cost model: seconds of kernels by class, and the priors it is fed with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from graphrun.model.hardware import ProcessorRates
from graphrun.profile import hardware as devices
from graphrun.profile.corrections import cpu_scratch
from graphrun.profile.costs import (
    NORM_BLOCKS,
    NORM_SECONDS,
    ROW_SECONDS,
    cpu_work,
    extra_seconds,
    kernel_seconds,
    output_tiles,
    quantized_seconds,
    work_seconds,
)
from graphrun.profile.fused_kernels import FusedKernels
from graphrun.profile.processor import cpu_estimate
from graphrun.profile.recorder import Recorder
from graphrun.profile.recording import KEY_MASKED, MASKED, Call, Kernel, MemoryEvent
from graphrun.units import GIB

H100 = devices.hardware("h100")


def product(rows: int, inputs: int, outputs: int, dtype: str = "bfloat16") -> Kernel:
    """A matrix product [rows inputs] [inputs outputs]."""
    nbytes = 2 * (rows * inputs + inputs * outputs + rows * outputs)
    return Kernel(
        "matmul", dtype, 2.0 * rows * inputs * outputs, nbytes, output_tiles(rows, outputs)
    )


def kernels(module: nn.Module, *shape: int) -> list[Kernel]:
    """The kernels of one call of ``module`` on meta, in order."""
    module = module.to("meta", torch.bfloat16)
    recorder, x = Recorder(module, ()), torch.empty(*shape, device="meta", dtype=torch.bfloat16)
    recorder.ignore([x])
    with torch.no_grad(), FusedKernels(recorder), recorder:
        module(x)
    recorder.close()
    return [
        recorder.record.kernels[number] for _, numbers in recorder.record.work for number in numbers
    ]


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.view(1, x.shape[1], 4, -1).transpose(1, 2)  # views launch nothing
        return nn.functional.scaled_dot_product_attention(heads, heads, heads)


def test_kernels_are_recorded_by_class_with_bytes_and_tiles() -> None:
    (linear,) = kernels(nn.Linear(256, 512), 300, 256)
    weights, moved_bytes = 256 * 512, 300 * (256 + 512)
    assert linear == Kernel(
        "matmul",
        "bfloat16",
        2.0 * 300 * weights,
        2 * (weights + 512 + moved_bytes),
        3 * 4,
        shape=(1, 300, 256, 512),
    )
    (activation,) = kernels(nn.SiLU(), 300, 256)
    result_bytes = 2 * 300 * 256
    assert activation == Kernel(
        "elementwise", "bfloat16", 0.0, 2 * result_bytes, operator="silu", shape=(result_bytes,)
    )
    (attention,) = kernels(Attention(), 1, 300, 256)
    assert (attention.kind, attention.scores, attention.tiles) == (
        "attention",
        4 * 300 * 300,
        4 * 3,
    )
    (wide,) = kernels(Attention(), 1, 300, 2048)
    assert wide.kind == "wide attention"
    (convolution,) = kernels(nn.Conv2d(16, 256, 3, padding=1), 1, 16, 32, 32)
    assert (convolution.kind, convolution.tiles) == ("convolution", 8 * 2)


def test_the_last_wave_takes_as_long_as_a_full_one() -> None:
    assert H100.kernels is not None
    assert H100.kernels.multiprocessors == 11 * 12
    # 132 and 133 tiles
    full_wave, partial_wave = (
        product(11 * 128, 4096, 12 * 128),
        product(7 * 128, 4096, 19 * 128),
    )
    assert kernel_seconds(partial_wave, H100) == pytest.approx(2 * kernel_seconds(full_wave, H100))


def test_a_group_norm_takes_the_time_of_one_group_in_addition_to_its_bytes() -> None:
    def means_seconds(kernel: Kernel) -> float:
        return kernel_seconds(kernel, H100) - kernel.nbytes / H100.memory_bytes_per_second

    single, batch, large_batch = (
        kernels(nn.GroupNorm(32, 64), pictures, 64, 128, 128)[0] for pictures in (1, 4, 33)
    )
    assert (single.tiles, single.scores) == (32, 64 * 128 * 128)
    assert means_seconds(single) == pytest.approx(2 * 128 * 128 * NORM_SECONDS)
    assert means_seconds(batch) == pytest.approx(means_seconds(single)), "128 groups run at once"
    assert large_batch.tiles == 2 * NORM_BLOCKS * 132
    assert means_seconds(large_batch) == pytest.approx(2 * means_seconds(single))


def test_an_rms_norm_takes_the_time_of_its_rows_or_of_its_bytes() -> None:
    narrow, wide = (kernels(nn.RMSNorm(width), 4096, width)[0] for width in (64, 65536))
    assert kernel_seconds(narrow, H100) == pytest.approx(4096 * ROW_SECONDS / 132)
    assert kernel_seconds(narrow, H100) > 4 * narrow.nbytes / H100.memory_bytes_per_second
    assert kernel_seconds(wide, H100) == pytest.approx(wide.nbytes / H100.memory_bytes_per_second)


def test_an_rms_norm_on_a_cpu_takes_the_time_of_its_operators() -> None:
    (fused,) = kernels(nn.RMSNorm(256), 512, 256)
    elements = 512 * 256
    assert cpu_work(fused) == {
        "elementwise _to_copy": 2 * 6 * elements,
        "elementwise pow": 8 * elements,
        "elementwise mean": 4 * elements,
        "elementwise mul": 16 * elements,
    }


def test_a_product_of_one_row_takes_as_long_as_its_weight() -> None:
    kernel = product(1, 8192, 8192)
    assert kernel_seconds(kernel, H100) == pytest.approx(
        kernel.nbytes / H100.memory_bytes_per_second
    )


def test_cards_without_bfloat16_multiply_it_as_fp32() -> None:
    rows = (
        product(8192, 8192, 8192),
        product(8192, 8192, 8192, "float16"),
        product(8192, 8192, 8192, "float32"),
    )
    bf16, fp16, fp32 = (kernel_seconds(kernel, devices.hardware("t4")) for kernel in rows)
    assert bf16 == fp32 > 5 * fp16
    bf16, fp16, _ = (kernel_seconds(kernel, H100) for kernel in rows)
    assert bf16 == fp16


def test_a_call_takes_at_least_what_the_host_needs_to_launch_it() -> None:
    small = Kernel("elementwise", "bfloat16", 0.0, 1024)
    call = Call(work=[("a", [0] * 10), ("b", [0] * 30)], kernels=[small])
    assert work_seconds(call, H100) == pytest.approx(
        [10 * H100.launch_seconds, 30 * H100.launch_seconds]
    )
    assert all(
        isinstance(seconds, float)
        for seconds in work_seconds(replace(call, work=[("a", [])]), H100)
    ), "0 would read back as 0.0"
    large = replace(call, kernels=[small._replace(nbytes=10**9)])
    assert sum(work_seconds(large, H100)) == pytest.approx(40 * 1e9 / H100.memory_bytes_per_second)


def test_quantized_layers_take_what_their_libraries_do() -> None:
    """A FLUX layer of 4608 tokens on an H100: bitsandbytes' int8 is slower than 16 bits, torchao's
    fp8 products are faster."""
    kernel, shape = product(4608, 3072, 12288), (12288, 3072)
    plain = kernel_seconds(kernel, H100)
    extra = {
        name: quantized_seconds(kernel, shape, name, H100)
        for name in ("int8", "nf4", "int8wo", "fp8wo", "fp8dq", "bfloat16")
    }
    assert extra["int8"] > plain / 2 > extra["nf4"] > 0
    assert extra["fp8dq"] < 0 < extra["fp8wo"] < extra["int8wo"]
    assert extra["bfloat16"] == 0
    call = Call(work=[("block.linear", [0]), ("block.other", [0])], kernels=[kernel])
    assert extra_seconds(call, {"block.linear.weight": shape}, "nf4", H100) == {
        "block.linear": extra["nf4"]
    }


def test_the_simulated_accelerator_has_a_single_rate() -> None:
    sim = devices.simulated()
    for kind in ("matmul", "convolution", "attention"):
        assert (
            kernel_seconds(Kernel(kind, "float32", 1e9, 10**9, 5), sim)
            == 1e9 / sim.flops_per_second
        )  # type: ignore[arg-type]
    assert kernel_seconds(Kernel("elementwise", "float32", 0.0, 10**9), sim) == 0
    assert quantized_seconds(product(64, 64, 64), (64, 64), "int8", sim) == 0


@pytest.mark.parametrize("name", devices.SHEETS)
def test_priors_are_within_their_data_sheets(name: str) -> None:
    card, sheet = devices.hardware(name), devices.SHEETS[name]
    assert card.kernels is not None
    assert 0.3 * sheet.tensor * 1e12 < card.flops_per_second <= sheet.tensor * 1e12
    assert card.memory_bytes_per_second <= sheet.memory * 1e9
    assert card.pageable_bytes_per_second < card.h2d_bytes_per_second
    assert card.basis == "data sheet"


class CrossAttention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.view(1, x.shape[1], 4, -1).transpose(1, 2)
        keys = heads[:, :, :77]
        return nn.functional.scaled_dot_product_attention(heads, keys, keys)


def test_attention_on_a_cpu_takes_its_products_and_its_queries() -> None:
    (kernel,) = kernels(CrossAttention(), 1, 300, 256)
    elements = 300 * 256
    assert cpu_work(kernel) == {"attention": 4.0 * elements * 77, "queries": elements}
    unknown_shape = kernel._replace(shape=(*kernel.shape[:-1], 0))
    assert cpu_work(unknown_shape) == cpu_work(kernel)


@pytest.mark.parametrize(
    ("pixels", "classes"),
    [
        (90, ("convolution", "small copies")),
        (181, ("convolution", "large copies")),
        (182, ("huge convolution", "huge copies")),
    ],
)
def test_convolutions_of_huge_channels_have_a_rate_of_their_own_on_a_cpu(
    pixels: int, classes: tuple[str, str]
) -> None:
    (kernel,) = kernels(nn.Conv2d(16, 32, 1, bias=False), 1, 16, pixels, pixels)
    flops, elements = 2 * 16 * 32 * pixels**2, (16 + 3 * 32) * pixels**2
    work = cpu_work(kernel)
    assert {name: work[name] for name in classes} == {classes[0]: flops, classes[1]: 2 * elements}
    assert set(work) == {*classes, "weight copies"}


@pytest.mark.parametrize(("rows", "new_rows"), [(4095, 0), (4096, 4096)])
def test_tensors_from_32_mib_on_get_new_memory_on_a_cpu(rows: int, new_rows: int) -> None:
    """glibc adds a header, so a tensor of exactly its largest threshold is never kept."""
    (kernel,) = kernels(nn.SiLU(), rows, 4096)
    assert cpu_work(kernel).get("new memory", 0) == 2 * 4096 * new_rows


@pytest.mark.parametrize(("seconds", "is_long"), [(1.9, False), (2.1, True)])
def test_a_long_call_gets_its_memory_from_the_host_of_a_virtual_machine(
    seconds: float, is_long: bool
) -> None:
    """The host takes free memory back within two seconds."""
    cpu = replace(cpu_estimate(), launch_seconds=0.0)
    assert isinstance(cpu.kernels, ProcessorRates)
    (convolution,) = kernels(nn.Conv2d(64, 64, 3), 1, 64, 64, 64)
    nbytes = round(seconds / 3 * cpu.kernels.rate("elementwise", "bfloat16"))
    call = Call(
        events=[
            MemoryEvent(7, GIB),
            MemoryEvent(1, 0, scratch=True),
            MemoryEvent(7, 0),
            MemoryEvent(8, GIB),
        ],
        work=[("a", [0]), ("b", [0, 0])],
        kernels=[Kernel("elementwise", "bfloat16", 0.0, nbytes), convolution],
    )
    assert sum(work_seconds(call, cpu)) == pytest.approx(seconds)
    new_bytes = GIB + cpu_scratch(convolution, cpu.kernels)
    total = seconds + (2e-9 * new_bytes if is_long else 0)
    slow_cpu = replace(cpu, first_touch_seconds=2e-9)
    assert work_seconds(call, slow_cpu) == pytest.approx([total / 3, 2 * total / 3])


def attention(features: int, operator: str = "") -> Kernel:
    """Attention of 4096 tokens with 8 heads of ``features``."""
    tokens, heads = 4096, 8
    return Kernel(
        "attention",
        "float16",
        4.0 * heads * tokens * tokens * features,
        8 * heads * tokens * features,
        heads * tokens // 128,
        heads * tokens * tokens,
        operator,
        (heads, tokens, tokens, features),
    )


def test_heads_are_padded_to_the_next_size_of_flash_attention() -> None:
    narrow, padded, wide = (kernel_seconds(attention(n), H100) for n in (32, 40, 64))
    assert narrow < padded == wide


def test_attention_with_a_mask_or_on_an_old_card_is_slower() -> None:
    plain, keys, queries = (
        kernel_seconds(attention(128, name), H100) for name in ("", KEY_MASKED, MASKED)
    )
    assert plain < keys < queries
    t4, a100 = devices.hardware("t4"), devices.hardware("a100")
    assert t4.kernels is not None
    assert t4.kernels.attention_flops_per_second < t4.flops_per_second
    assert kernel_seconds(attention(128), t4) > 5 * kernel_seconds(attention(128), a100)


@pytest.mark.parametrize(("rows", "operator"), [(1, KEY_MASKED), (300, MASKED)])
def test_a_mask_is_recorded_by_whether_it_differs_by_query(rows: int, operator: str) -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = x.view(1, x.shape[1], 4, -1).transpose(1, 2)
            mask = x.new_zeros(1, 1, rows, x.shape[1])
            return nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)

    recorded = [kernel for kernel in kernels(Masked(), 1, 300, 256) if kernel.kind == "attention"]
    assert [kernel.operator for kernel in recorded] == [operator]
