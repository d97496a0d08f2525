"""What a call on meta would allocate, read and compute, compared with the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from graphrun.model.hardware import ProcessorRates
from graphrun.profile.corrections import cpu_scratch
from graphrun.profile.fused_kernels import FusedKernels
from graphrun.profile.processor import cpu_estimate
from graphrun.profile.recorder import Recorder
from graphrun.profile.recording import MemoryEvent


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.output_layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return self.output_layer(
            nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        )


def record(
    module: nn.Module,
    call: Callable[[], object],
    blocks: tuple[str, ...] = (),
    inputs: tuple[torch.Tensor, ...] = (),
) -> Recorder:
    recorder = Recorder(module, blocks)
    recorder.ignore(inputs)
    with torch.no_grad(), FusedKernels(recorder), recorder:
        result = call()
    del result
    recorder.close()
    return recorder


def profiled_peak(module: nn.Module, x: torch.Tensor) -> int:
    """The CPU allocator's own peak over the same call, from the profiler's memory events."""
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        result = module(x)
    level = peak = 0
    for event in run.profiler.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    del result
    return peak


@pytest.mark.parametrize("width", [64, 256])
def test_the_peak_equals_the_cpu_profilers_where_there_is_no_convolution(width: int) -> None:
    module = nn.Sequential(
        nn.Linear(width, 4 * width),
        nn.GELU(),
        nn.Linear(4 * width, width),
        nn.SiLU(),
        nn.LayerNorm(width),
    )
    real = profiled_peak(module, torch.zeros(8, 128, width))
    meta, x = module.to("meta"), torch.zeros(8, 128, width, device="meta")
    assert record(meta, lambda: meta(x), inputs=(x,)).record.peak_bytes == real


def test_attention_makes_no_square_tensor_and_its_flops_are_counted() -> None:
    module = Attention(64).to("meta")
    tokens = 2048
    recorder = record(module, lambda: module(torch.zeros(1, tokens, 64, device="meta")))
    assert max(event.nbytes for event in recorder.record.events) < 4 * tokens * tokens
    linear = 2 * tokens * 64 * (192 + 64)
    assert recorder.record.flops == linear + 2 * 4 * tokens * tokens * (16 + 16)


@pytest.mark.parametrize(("dtype", "elements"), [(torch.bfloat16, 16 + 8), (torch.float32, 16)])
def test_a_convolution_takes_scratch_of_input_output_in_16_bit_and_weight(
    dtype: torch.dtype, elements: int
) -> None:
    module = nn.Conv2d(16, 8, 3, padding=1, bias=False).to("meta", dtype)
    recorder = record(
        module, lambda: module(torch.zeros(1, 16, 32, 32, dtype=dtype, device="meta"))
    )
    scratch = [event.nbytes for event in recorder.record.events if event.scratch]
    assert scratch == [dtype.itemsize * (elements * 32 * 32 + 8 * 16 * 9)]


@pytest.mark.parametrize(
    ("dtype", "elements"),
    [(torch.bfloat16, 16 * 33 * 33 + 8 * 16 * 16 + 8 * 16 * 9), (torch.float32, 0)],
)
def test_a_strided_convolution_takes_scratch_in_16_bit_only(
    dtype: torch.dtype, elements: int
) -> None:
    module = nn.Conv2d(16, 8, 3, stride=2, bias=False).to("meta", dtype)
    recorder = record(
        module, lambda: module(torch.zeros(1, 16, 33, 33, dtype=dtype, device="meta"))
    )
    assert (
        sum(event.nbytes for event in recorder.record.events if event.scratch)
        == dtype.itemsize * elements
    )


@pytest.mark.parametrize("is_boolean", [True, False])
def test_attention_converts_a_boolean_mask_and_its_result_has_the_order_of_the_query(
    is_boolean: bool,
) -> None:
    tokens, module = 256, nn.Identity()
    attend = nn.functional.scaled_dot_product_attention

    def call() -> list[torch.Tensor]:
        query = torch.zeros(1, 4, tokens, 16, dtype=torch.bfloat16, device="meta")
        dtype = torch.bool if is_boolean else torch.bfloat16
        mask = torch.zeros(1, 1, tokens, tokens, dtype=dtype, device="meta")
        return [attend(query, query, query), attend(query, query, query, attn_mask=mask)]

    recorder, results = Recorder(module, ()), []
    with torch.no_grad(), FusedKernels(recorder), recorder:
        results += call()
    assert [result.stride(1) > result.stride(2) for result in results] == [True, False]
    sizes = [event.nbytes for event in recorder.record.events if not event.scratch]
    assert sizes.count(2 * tokens * tokens) == 1  # the mask, or what it is converted to
    kernels = [k.operator for k in recorder.record.kernels if k.kind == "attention"]
    assert kernels == ["", "masked"]


def test_a_layer_norm_copies_an_input_that_is_not_contiguous() -> None:
    module = nn.LayerNorm(64, elementwise_affine=False).to("meta")
    x = torch.empty(16, 8, 64, device="meta").transpose(0, 1)
    recorder = record(module, lambda: module(x), inputs=(x,))
    assert recorder.record.peak_bytes >= 2 * x.nbytes


def test_math_attention_takes_a_square_tensor() -> None:
    module = Attention(64).to("meta")
    x = torch.zeros(1, 256, 64, device="meta")
    scratch = {}
    for fused in (True, False):
        recorder = Recorder(module, ())
        with torch.no_grad(), FusedKernels(recorder, fused=fused), recorder:
            module(x)
        recorder.close()
        scratch[fused] = [event.nbytes for event in recorder.record.events if event.scratch]
    rows = 4 * 256
    assert scratch == {True: [4 * rows], False: [4 * (2 * rows * 256 + 2 * rows * 16)]}


def test_weights_that_fused_kernels_read_are_read() -> None:
    module = nn.ParameterDict({name: torch.ones(1, 1, 4, 8) for name in ("scale", "query")})
    module = module.requires_grad_(False).to("meta")

    def call() -> torch.Tensor:
        x = torch.zeros(1, 1, 4, 8, device="meta")
        scaled = torch.rms_norm(x, x.shape, module["scale"])
        return nn.functional.scaled_dot_product_attention(module["query"], scaled, scaled)

    assert record(module, call).record.read_weights == {"scale", "query"}


def test_only_read_tensors_are_touched_and_every_allocation_is_released() -> None:
    module = nn.ModuleDict({"used": nn.Linear(8, 8), "idle": nn.Linear(8, 8)}).to("meta")
    recorder = record(module, lambda: module["used"](torch.zeros(2, 8, device="meta")))
    assert recorder.record.read_weights == {"used.weight", "used.bias"}
    keys = {event.key for event in recorder.record.events if event.nbytes and not event.scratch}
    assert keys == {event.key for event in recorder.record.events if not event.nbytes}


def test_an_empty_tensor_is_no_event() -> None:
    module = nn.Linear(8, 8).to("meta")

    def empty_and_full() -> torch.Tensor:
        x = torch.zeros(4, 8, device="meta")
        return torch.cat([module(x[:0]), module(x)])

    recorder = record(module, empty_and_full)
    keys = {event.key for event in recorder.record.events if event.nbytes and not event.scratch}
    assert keys == {event.key for event in recorder.record.events if not event.nbytes}


def test_flops_are_assigned_to_the_running_block() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 32)).to("meta")
    recorder = record(module, lambda: module(torch.zeros(2, 8, device="meta")), ("0", "1"))
    kernels = recorder.record.kernels
    by_block = [
        (path, sum(kernels[number].flops for number in numbers))
        for path, numbers in recorder.record.work
    ]
    assert [entry for entry in by_block if entry[0]] == [
        ("0", 2 * 2 * 8 * 8),
        ("1", 2 * 2 * 8 * 32),
    ]
    assert recorder.record.entered_blocks == ["0", "1"]


def test_hooks_are_removed_afterwards() -> None:
    module = nn.Sequential(nn.Linear(8, 8)).to("meta")
    record(module, lambda: module(torch.zeros(2, 8, device="meta")), ("0",))
    assert not module[0]._forward_hooks
    assert not module[0]._forward_pre_hooks


def test_bytes_are_counted_as_an_allocator_rounds_them() -> None:
    module = nn.Linear(1, 1, bias=False).to("meta")
    x = torch.zeros(1, 1, device="meta")
    assert record(module, lambda: module(x), inputs=(x,)).record.peak_bytes == 512


def test_mask_all_is_false_so_that_the_memory_of_a_mask_is_counted() -> None:
    class Masked(nn.Module):
        def forward(self, mask: torch.Tensor) -> torch.Tensor:
            return mask.float() if not mask.all() else mask

    module = Masked()
    mask = torch.ones(4, 1024, dtype=torch.bool, device="meta")
    recorder = Recorder(module, [])
    recorder.ignore([mask])
    with recorder:
        module(mask)
    assert recorder.record.peak_bytes >= 4 * 4 * 1024


def test_blocks_that_run_twice_in_a_call_are_in_the_unblocked(dry: Any) -> None:
    """Wan's decoder processes one frame after another; its transformer's blocks run once per
    call."""
    _, dry_run, _ = dry("wan-tiny")
    streamed = {
        name: [path for group in of_component.groups if group.streamable for path in group.blocks]
        for name, of_component in dry_run.profiles.items()
    }
    assert not any(path.startswith("decoder") for path in streamed["vae"])
    assert len(streamed["transformer"]) == 8


def test_an_empty_slice_is_no_event() -> None:
    class Padded(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x[:0].clone(), x])

    recorder = Recorder(Padded(), ())
    x = torch.empty(4, 128, device="meta")
    recorder.ignore([x])
    with torch.no_grad(), recorder:
        result = Padded()(x)
    del result
    recorder.close()
    assert recorder.record.events == [MemoryEvent(1, 2048), MemoryEvent(1, 0)]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x + self.embed(x)) * self.scale


class Reaching(nn.Module):
    """Its last lines use modules of blocks that have already run, as DiT's do."""

    def __init__(self, reach: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Inner() for _ in range(3))
        self.reach = reach

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        if self.reach == "call":
            x = self.blocks[0].embed(x)
        if self.reach == "read":
            x = x * self.blocks[1].scale
        if self.reach == "weight":
            x = x @ self.blocks[2].linear.weight
        return x


@pytest.mark.parametrize(
    ("reach", "loose"),
    [
        ("", set()),
        ("call", {"blocks.0.embed"}),
        ("read", {"blocks.1"}),
        ("weight", {"blocks.2.linear"}),
    ],
)
def test_modules_used_while_their_block_does_not_run_are_loose(reach: str, loose: set[str]) -> None:
    net, x = Reaching(reach).to("meta"), torch.empty(2, 8, device="meta")
    recorder = record(net, lambda: net(x), tuple(f"blocks.{n}" for n in range(3)), (x,))
    assert recorder.record.loose_modules == loose


def test_a_call_into_a_block_is_loose_if_weights_share_a_storage() -> None:
    net, x = Reaching("call"), torch.zeros(2, 8)
    recorder = Recorder(net, [f"blocks.{n}" for n in range(3)], torch.device("cpu"))
    with torch.no_grad(), recorder:
        net(x)
    recorder.close()
    assert recorder.record.loose_modules == {"blocks.0.embed"}


ROUNDS = 64  # so that an address that was free is taken again


def test_a_tensor_at_the_address_of_a_released_input_is_counted() -> None:
    """A component may release its inputs: a UNet removes an adapter's features from their list one
    by one."""

    class Taking(nn.Module):
        def forward(self, features: list[torch.Tensor]) -> list[torch.Tensor]:
            results = []
            while features:
                features.pop()
                results.append(torch.empty(128, device="meta"))
            return results

    features = [torch.empty(128, device="meta") for _ in range(ROUNDS)]
    recorder = Recorder(Taking(), ())
    recorder.ignore(features)
    with torch.no_grad(), recorder:
        tensors = Taking()(features)
    del tensors
    recorder.close()
    assert sum(event.nbytes for event in recorder.record.events) == ROUNDS * 512


def test_a_tensor_at_the_address_of_a_released_buffer_is_no_weight() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for number in range(ROUNDS):
                self.register_buffer(f"of_{number}", torch.empty(128, device="meta"))

        def forward(self) -> list[torch.Tensor]:
            results = []
            for number in range(ROUNDS):
                setattr(self, f"of_{number}", None)
                results.append(torch.empty(128, device="meta"))
            return [tensor + 1 for tensor in results]

    module = Counting()
    recorder = record(module, module)
    assert recorder.record.read_weights == set()
    assert sum(event.nbytes for event in recorder.record.events) == 2 * ROUNDS * 512


def norm(dtype: torch.dtype, *, weight_dtype: torch.dtype | None = None) -> nn.RMSNorm:
    module = nn.RMSNorm(64, elementwise_affine=weight_dtype is not None, eps=1e-6).to(dtype)
    return module if weight_dtype is None else module.to(weight_dtype)


@pytest.mark.parametrize("is_contiguous", [True, False])
def test_an_rms_norm_is_one_kernel_as_on_a_gpu(is_contiguous: bool) -> None:
    """It allocates the result, an fp32 figure for each row, and a contiguous copy if needed."""
    module = norm(torch.bfloat16, weight_dtype=torch.bfloat16).to("meta")
    x = torch.empty(8, 16, 64, dtype=torch.bfloat16, device="meta")
    x = x if is_contiguous else x.transpose(0, 1)
    recorder = record(module, lambda: module(x), inputs=(x,))
    result_bytes, row_bytes = 2 * 8 * 16 * 64, 4 * 8 * 16
    assert recorder.record.peak_bytes == result_bytes * (2 - is_contiguous) + row_bytes
    operators = [kernel.operator for kernel in recorder.record.kernels]
    assert operators == ["rms_norm"] if is_contiguous else ["transpose", "rms_norm"]


def test_an_rms_norm_with_a_weight_of_another_dtype_is_its_operators_as_on_a_gpu() -> None:
    module = norm(torch.bfloat16, weight_dtype=torch.float32).to("meta")
    x = torch.empty(8, 64, dtype=torch.bfloat16, device="meta")
    recorder = record(module, lambda: module(x), inputs=(x,))
    assert "rms_norm" not in {kernel.operator for kernel in recorder.record.kernels}
    assert "rsqrt" in {kernel.operator for kernel in recorder.record.kernels}


@pytest.mark.parametrize("is_weighted", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_rms_norm_on_a_cpu_takes_the_profilers_peak(
    dtype: torch.dtype, is_weighted: bool
) -> None:
    module = norm(dtype, weight_dtype=dtype if is_weighted else None)
    x = torch.ones(512, 64, dtype=dtype)
    expected = profiled_peak(module, x)
    meta_module, meta_x = module.to("meta"), x.to("meta")
    call = record(meta_module, lambda: meta_module(meta_x), inputs=(meta_x,)).record
    (kernel,) = call.kernels
    processor = cpu_estimate().kernels
    assert isinstance(processor, ProcessorRates)
    assert call.peak_bytes + cpu_scratch(kernel, processor) == expected
