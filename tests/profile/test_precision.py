"""What a precision supports by version, the scratch of its layers, and the memory of quantizing;
compared with bitsandbytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import graphrun
from graphrun.model.allocator import Counting
from graphrun.modules.blocks import ALIGNMENT
from graphrun.modules.build import build, meta_module
from graphrun.modules.quantize import quantizable_layers
from graphrun.profile import doctor
from graphrun.profile.fused_kernels import FusedKernels
from graphrun.profile.precision import (
    MOVES,
    dequantization_seconds,
    flags,
    quantization_scratch_bytes,
    quantizing_bytes,
)
from graphrun.profile.quantized import (
    block_bytes_by_precision,
    block_layouts,
    tensor_bytes,
    weights_by_precision,
)
from graphrun.profile.recorder import Recorder
from graphrun.profile.recording import Call, MemoryEvent, Product
from graphrun.units import round_up

bnb = pytest.importorskip("bitsandbytes")
GRAPHS = Path(__file__).parents[2] / "graphs"
NOW = {
    "torch": "2.13",
    "diffusers": "0.42",
    "transformers": "5.23",
    "accelerate": "1.15",
    "bitsandbytes": "0.50",
}


def test_unquantized_precisions_move_stream_and_can_be_on_disk() -> None:
    for precision in ("float32", "bfloat16", "float16"):
        result = flags(precision, {})
        assert (
            result.available,
            result.movable,
            result.streamable,
            result.disk_able,
        ) == (True,) * 4
        assert result.reason == ""
    assert flags("fp8", NOW).disk_able


@pytest.mark.parametrize(
    ("precision", "package", "number", "available", "movable"),
    [
        ("nf4", "bitsandbytes", None, False, False),
        ("nf4", "bitsandbytes", "0.43.1", True, False),
        ("nf4", "bitsandbytes", "0.43.2", True, True),
        ("int8", "bitsandbytes", "0.47.0", True, False),
        ("int8", "bitsandbytes", "0.48.0", True, True),
        ("int8", "accelerate", "1.12", True, False),
        ("int8", "accelerate", None, True, False),
        ("int8", "transformers", "4.57.3", True, False),
        ("nf4", "accelerate", "1.12", True, True),
        ("int8", "bitsandbytes", "unreadable", False, False),
        ("fp8", "diffusers", "0.32", False, False),
    ],
)
def test_s1_1_whether_a_module_moves_depends_on_versions(
    precision: str, package: str, number: str | None, available: bool, movable: bool
) -> None:
    result = flags(precision, {**NOW, package: number})
    assert (result.available, result.movable, result.streamable) == (available, movable, movable)
    if not movable:
        assert package in result.reason


@pytest.mark.parametrize("precision", ["int8", "nf4"])
def test_s4_3_4_bit_is_streamed_by_blocks_alone_and_nothing_quantized_lies_on_disk(
    precision: str,
) -> None:
    result = flags(precision, NOW)
    assert result.streamable
    assert ("whole blocks only" in result.reason) == (precision == "nf4")
    assert not result.disk_able
    assert result.reason


def test_the_doctor_names_the_same_versions() -> None:
    needs_to_move = {need for needs in MOVES.values() for need in needs}
    assert needs_to_move <= {(package, first) for package, first, _, _ in doctor.RULES}


@pytest.fixture(scope="module")
def flux() -> Any:
    return graphrun.load(GRAPHS / "flux-tiny.yaml")


def bytes_by_precision(module: Any, groups: Any, dtype: str) -> dict[str, tuple[int, ...]]:
    layouts = block_layouts(module, groups)
    return block_bytes_by_precision(groups, layouts, tensor_bytes(module, dtype))


@pytest.mark.sweep("more")
def test_block_bytes_in_the_declared_precision_are_those_of_the_dry_run(dry: Any) -> None:
    for name in ("flux-dev", "sdxl-tiny"):
        graph, dry_run, _ = dry(name)
        for key, of_component in dry_run.profiles.items():
            component = graph.components[key]
            module = meta_module(component, graph.trust)
            block_bytes = bytes_by_precision(module, of_component.groups, component.dtype)
            assert (
                block_bytes[component.dtype]
                == of_component.precisions[component.dtype]
                == of_component.block_bytes
            ), key
            assert of_component.precisions["nf4"] == block_bytes["nf4"]


def test_a_dry_run_records_every_product_of_a_quantizable_layer(dry: Any) -> None:
    """FLUX's transformer calls each of its linear layers once; the trace names them as the profile
    does."""
    _, dry_run, _ = dry("flux-dev")
    of_component = dry_run.profiles["transformer"]
    call = next(call for _, call in dry_run.recording.entries() if call.component == "transformer")
    assert sorted(product.name for product in call.products) == sorted(of_component.layers)
    elements = sum(outputs * inputs for outputs, inputs in of_component.layers.values())
    assert 0.999 * of_component.parameters < elements < of_component.parameters
    single = {product.name for product in call.products if product.rows == 1}
    assert all("norm" in name or "time_text" in name for name in single)


def test_a_quantized_transformer_s_blocks_shrink_as_published(dry: Any) -> None:
    graph, dry_run, _ = dry("flux-dev")
    of_component, module = (
        dry_run.profiles["transformer"],
        meta_module(graph.components["transformer"], graph.trust),
    )
    block_bytes = bytes_by_precision(module, of_component.groups, "bfloat16")
    int8, nf4, fp8 = (block_bytes[precision] for precision in ("int8", "nf4", "fp8"))
    for index, unquantized in enumerate(block_bytes["bfloat16"]):
        assert int8[index] / unquantized == pytest.approx(0.5, abs=0.005)
        assert nf4[index] / unquantized == pytest.approx(0.5625 / 2, abs=0.005)
        assert 0.5 <= fp8[index] / unquantized < 0.75


def replaced(module: nn.Module, precision: str) -> None:
    """Replaces every linear layer of ``module`` by bitsandbytes' own, quantized on the CPU."""
    layers = {id(layer) for layer in quantizable_layers(module, torch.bfloat16).values()}
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if id(child) not in layers:
                continue
            sizes, bias = (child.in_features, child.out_features), child.bias
            if precision == "nf4":
                new = bnb.nn.Linear4bit(
                    *sizes, bias=bias is not None, quant_type="nf4", compress_statistics=False
                )
                new.weight = bnb.nn.Params4bit(
                    child.weight.data,
                    requires_grad=False,
                    quant_type="nf4",
                    compress_statistics=False,
                )
            else:
                new = bnb.nn.Linear8bitLt(*sizes, bias=bias is not None, has_fp16_weights=False)
                new.weight = bnb.nn.Int8Params(
                    child.weight.data, requires_grad=False, has_fp16_weights=False
                )
            new.bias = bias
            setattr(parent, name, new.to("cpu"))


def real_bytes(block: nn.Module) -> int:
    """Bytes of a block's tensors, those of quantized weights included, each at a multiple of
    `ALIGNMENT`."""
    tensors: dict[int, torch.Tensor] = {}
    for child in block.modules():
        for tensor in (*child._parameters.values(), *child._buffers.values()):
            if tensor is None:
                continue
            parts = [tensor.data]
            if isinstance(tensor, bnb.nn.Params4bit):
                state = tensor.quant_state
                parts += [state.absmax, state.code]
            elif isinstance(tensor, bnb.nn.Int8Params):
                parts.append(tensor.SCB)
            tensors |= {id(tensor) * 8 + n: part for n, part in enumerate(parts)}
    return sum(round_up(part.nbytes, ALIGNMENT) for part in tensors.values())


@pytest.mark.parametrize("precision", ["int8", "nf4"])
def test_a_block_takes_what_bitsandbytes_layers_take(dry: Any, flux: Any, precision: str) -> None:
    graph, dry_run, _ = dry("flux-tiny")
    groups = dry_run.profiles["transformer"].groups
    module = meta_module(graph.components["transformer"], graph.trust)
    expected = bytes_by_precision(module, groups, "bfloat16")[precision]
    module = build(flux.component("transformer"), flux)
    replaced(module, precision)
    for group, nbytes in zip(groups, expected, strict=True):
        if group.blocks != ("",):
            assert {
                round_up(real_bytes(module.get_submodule(path)), 512) for path in group.blocks
            } == {nbytes}, group.name


def test_a_language_model_s_head_is_not_quantized(flux: Any) -> None:
    config = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 96,
    }
    component = replace(
        flux.component("vae"), class_path="transformers.LlamaForCausalLM", config=config
    )
    module: Any = meta_module(component, flux.trust)
    assert module.lm_head.weight is not module.model.embed_tokens.weight
    assert set(quantizable_layers(module, torch.bfloat16).values()).isdisjoint({module.lm_head})
    assert len(quantizable_layers(module, torch.bfloat16)) == 7


def test_weights_by_precision_sum_the_bytes_of_all_tensors(flux: Any) -> None:
    module = meta_module(flux.component("transformer"), flux.trust)
    weights = weights_by_precision(module, "bfloat16")
    assert weights["bfloat16"] == sum(
        tensor.nbytes for tensor in (*module.parameters(), *module.buffers())
    )
    assert (
        weights["nf4"]
        < weights["fp8"]
        < weights["int8"]
        < weights["bfloat16"]
        == weights["float16"]
        < weights["float32"]
    )


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 96)
        self.second = nn.Linear(96, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens ``[b s 64]`` to ``[b s 32]``."""
        return self.second(self.first(x).relu())


def traced(tokens: int) -> tuple[Call, dict[str, tuple[int, int]]]:
    module = Two().to("meta", torch.bfloat16)
    recorder = Recorder(module, ())
    x = torch.zeros(1, tokens, 64, dtype=torch.bfloat16, device="meta")
    recorder.ignore([x])
    with torch.no_grad(), FusedKernels(recorder), recorder:
        result = module(x)
    del result
    recorder.close()
    return recorder.record, {"first.weight": (96, 64), "second.weight": (32, 96)}


def peak(call: Call) -> int:
    """The peak as the simulated accelerator counts it."""
    counter, peak = Counting(), 0
    for event in call.events:
        if event.nbytes:
            counter.allocate(event.key, event.nbytes)
            peak = max(peak, counter.used_bytes)
        else:
            counter.release(event.key)
    assert counter.used_bytes == 0
    return peak


def quantized_peak(
    call: Call,
    shapes: dict[str, tuple[int, int]],
    precision: str,
    dtype: str = "bfloat16",
    **options: bool,
) -> int:
    """The peak with quantized layers."""
    return peak(call) + quantization_scratch_bytes(call, shapes, precision, dtype, **options)


def test_products_are_recorded_with_weight_name_and_tokens() -> None:
    call, _ = traced(1000)
    assert [(product.name, product.rows) for product in call.products] == [
        ("first.weight", 1000),
        ("second.weight", 1000),
    ]
    assert [call.events[product.event].nbytes for product in call.products] == [
        2 * 1000 * 96,
        round_up(2 * 1000 * 32, 512),
    ]


def test_nf4_takes_the_dequantized_weight_beside_the_product() -> None:
    tokens = 16
    call, shapes = traced(tokens)
    assert quantized_peak(call, shapes, "nf4") == max(
        2 * 96 * 64 + 2 * tokens * 96, 2 * tokens * 96 + 2 * 32 * 96 + 2 * tokens * 32
    )
    assert dequantization_seconds(10**9, 1e9) == 2.0


def test_one_token_needs_no_weight_in_16_bit() -> None:
    call, shapes = traced(1)
    assert quantized_peak(call, shapes, "nf4") == peak(call)


def test_on_a_cpu_one_token_takes_the_weight_and_int8_more_tensors() -> None:
    call, shapes = traced(1)
    assert quantized_peak(call, shapes, "nf4", on_cpu=True) == 2 * 96 * 64 + 512
    tokens = 1024
    call, shapes = traced(tokens)
    assert quantized_peak(call, shapes, "int8", on_cpu=True) == tokens * (64 + 4) + tokens * 96 * 16


def test_int8_takes_its_input_and_its_product_in_other_dtypes() -> None:
    tokens = 1024
    call, shapes = traced(tokens)
    assert (
        quantized_peak(call, shapes, "int8")
        == tokens * (64 + 4) + tokens * 96 * 6 + tokens * 96 * 2
    )
    assert (
        quantized_peak(call, shapes, "int8", "float16")
        == tokens * (64 + 4) + tokens * 96 * 4 + tokens * 96 * 2
    )


def test_an_unquantized_layer_takes_no_scratch() -> None:
    call, shapes = traced(16)
    only = {"second.weight": shapes["second.weight"]}
    assert quantized_peak(call, only, "nf4") == 2 * 16 * 96 + 2 * 32 * 96 + 2 * 16 * 32
    assert quantized_peak(call, shapes, "nf4") == 2 * 96 * 64 + 2 * 16 * 96
    assert quantization_scratch_bytes(call, {}, "nf4") == 0
    assert quantization_scratch_bytes(call, shapes, "bfloat16") == 0


def test_the_peak_of_events_excludes_scratch() -> None:
    events = [
        MemoryEvent(1, 512),
        MemoryEvent(0, 4096, scratch=True),
        MemoryEvent(2, 1024),
        MemoryEvent(1, 0),
        MemoryEvent(3, 512),
        MemoryEvent(2, 0),
        MemoryEvent(3, 0),
    ]
    assert Call(events=events).peak_bytes == 1536


def test_a_product_has_one_weight() -> None:
    assert Product(3, "x.weight", 7).rows == 7


@pytest.mark.parametrize("precision", ["int8", "nf4"])
def test_quantizing_on_the_cpu_takes_no_more_than_predicted(precision: str) -> None:
    shape = (512, 2048)
    weight = torch.randn(*shape, dtype=torch.bfloat16)
    kind = {
        "nf4": lambda: bnb.nn.Params4bit(
            weight, requires_grad=False, quant_type="nf4", compress_statistics=False
        )
    }
    kind["int8"] = lambda: bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    kind[precision]().to("cpu")  # tables that are made once
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        layer = kind[precision]().to("cpu")
    level = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    assert layer is not None
    assert (
        0.97 * quantizing_bytes([shape], precision)
        < peak + weight.nbytes
        <= quantizing_bytes([shape], precision)
    )
    assert quantizing_bytes([(1, 1), shape], precision) == quantizing_bytes([shape], precision)
