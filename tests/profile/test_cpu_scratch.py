"""What operators take on a CPU besides their tensors, by rule and as the kernel counts it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from graphrun.model.hardware import ProcessorRates
from graphrun.profile import corrections
from graphrun.profile.corrections import cpu_scratch, scratch_on
from graphrun.profile.fused_kernels import FusedKernels
from graphrun.profile.hardware import hardware
from graphrun.profile.precision import quantization_scratch_bytes
from graphrun.profile.processor import bfloat16_instructions, cpu_estimate
from graphrun.profile.recorder import Recorder
from graphrun.profile.recording import Call, MemoryEvent, Product

THREADS = 2
WITH_AMX, WITHOUT_AMX = (ProcessorRates(THREADS, (), amx=amx) for amx in (True, False))
WITH_AVX2 = ProcessorRates(THREADS, (), unfolds_bfloat16=True)
# With AMX, sums of a product, per thread: at most 2.4 MB of 7 shapes. Plans do not count them.
PRODUCT_BYTES = 2_400_000
# The kernel counts pages of each thread in steps of 64 (`SPLIT_RSS_COUNTING`).
COUNTER_BYTES = 64 * 4096

# Runs one operator in a process of its own, and prints bytes beyond its inputs and its result: the
# kernel's watermark (proc(5), clear_refs and VmHWM).
MEASURE = r"""
import ctypes, gc, json, re, sys
library = ctypes.CDLL(None)
library.mallopt(-3, 64 * 1024)
library.mallopt(-1, 128 * 1024)
import torch

def numbers():
    text = open("/proc/self/status").read()
    values = dict(re.findall(r"(\w+):\s+(\d+) kB", text))
    return {key: 1024 * int(values[key]) for key in ("VmHWM", "RssFile", "RssAnon")}

def layer(kind, weight):
    import bitsandbytes
    outputs, inputs = weight.shape
    if kind == "int8":
        module = bitsandbytes.nn.Linear8bitLt(
            inputs, outputs, has_fp16_weights=False, threshold=6.0
        )
    else:
        module = bitsandbytes.nn.Linear4bit(
            inputs, outputs, compute_dtype=weight.dtype, quant_type="nf4", compress_statistics=False
        )
        module.support_avx512bf16_for_cpu = False  # as graphrun's layers
    module.load_state_dict({"weight": weight, "bias": torch.rand(outputs)})
    return module.to("cpu").eval()

def quantized(tensor, layer):
    return layer(tensor)

torch.set_num_threads(int(sys.argv[2]))
results = []
for kind, dtype, sizes, options in json.loads(sys.argv[1]):
    dtype = getattr(torch, dtype)
    tensors = [torch.rand(size).to(dtype) for size in sizes]
    if kind in ("int8", "nf4"):
        tensors = [tensors[0], layer(kind, tensors[1])]
    functional = torch.nn.functional
    operator = {
        "convolution": torch.conv2d if tensors[0].dim() == 4 else torch.conv3d,
        "attention": functional.scaled_dot_product_attention,
        "linear": functional.linear,
        "int8": quantized,
        "nf4": quantized,
    }[kind]
    for _ in range(2):
        gc.collect()
        library.malloc_trim(0)
        before = numbers()
        open("/proc/self/clear_refs", "w").write("5")
        with torch.no_grad():
            result = operator(*tensors, **options)
        after = numbers()
        nbytes = result.nbytes
        del result
    results.append(after["VmHWM"] - after["RssFile"] - before["RssAnon"] - nbytes)
print(json.dumps(results))
"""

Case = tuple[str, str, list[list[int]], dict[str, Any]]


def convolution(
    dtype: str, inputs: int, outputs: int, *pixels: int, taps: int = 3, batch: int = 1
) -> Case:
    weight = [outputs, inputs, *[taps] * len(pixels)]
    options = {"padding": taps // 2}
    return "convolution", dtype, [[batch, inputs, *pixels], weight], options


# None of these shapes was measured when the rules were made.
CASES: list[Case] = [
    convolution("bfloat16", 256, 320, 96, 112),
    convolution("bfloat16", 192, 3, 256, 256),
    convolution("bfloat16", 4, 320, 160, 160),
    convolution("bfloat16", 1024, 640, 48, 64, taps=1),
    convolution("bfloat16", 768, 768, 32, 64, taps=1, batch=2),
    convolution("bfloat16", 320, 320, 63, 65, taps=1, batch=2),
    convolution("bfloat16", 144, 144, 4, 48, 48),
    convolution("float32", 256, 320, 96, 112),
    convolution("float32", 192, 3, 256, 256),
    convolution("float32", 1024, 640, 48, 64, taps=1),
    convolution("float32", 144, 144, 4, 48, 48),
    ("attention", "bfloat16", [[1, 16, 1600, 96]] * 3, {}),
    ("attention", "float32", [[2, 8, 900, 80], [2, 8, 308, 80], [2, 8, 308, 80]], {}),
    ("linear", "bfloat16", [[1, 700, 2560], [5120, 2560]], {}),
    ("linear", "float32", [[1, 700, 2560], [5120, 2560]], {}),
]


# On AVX2, where PyTorch's own code convolves in 16 bits.
UNFOLDED_CASES: list[Case] = [
    convolution("bfloat16", 64, 48, 96, 96, batch=2),
    convolution("float16", 64, 48, 96, 96, batch=2),
    convolution("float16", 96, 64, 4, 48, 48),
]


class Operator(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.kind, self.options = case[0], case[3]

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        if self.kind == "convolution":
            source, weight = tensors
            operator: Any = torch.conv2d if source.dim() == 4 else torch.conv3d
            result: torch.Tensor = operator(source, weight, **self.options)
            return result
        if self.kind == "attention":
            query, key, value = tensors
            return nn.functional.scaled_dot_product_attention(query, key, value)
        return nn.functional.linear(*tensors)


def recorded(case: Case) -> Call:
    module = Operator(case)
    tensors = [torch.empty(size, dtype=getattr(torch, case[1]), device="meta") for size in case[2]]
    recorder = Recorder(module, ())
    recorder.ignore(tensors)
    with torch.no_grad(), FusedKernels(recorder), recorder:
        module(*tensors)
    recorder.close()
    return recorder.record


@pytest.mark.sweep("profile")
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's watermark is Linux's")
def test_the_rules_predict_what_the_kernel_counts_for_shapes_they_were_not_made_from() -> None:
    estimate = cpu_estimate().kernels
    assert isinstance(estimate, ProcessorRates)
    if not bfloat16_instructions() and not estimate.unfolds_bfloat16:
        pytest.skip("the rules were measured with avx512_bf16 and with AVX2")
    processor = WITH_AMX if estimate.amx else WITHOUT_AMX
    cases = CASES
    if estimate.unfolds_bfloat16:  # rules of other operators were measured with avx512_bf16
        processor = WITH_AVX2
        cases = [*UNFOLDED_CASES, *(case for case in CASES if case[1] != "float32")]
    arguments = [sys.executable, "-c", MEASURE, json.dumps(cases)]
    result = subprocess.run(
        [*arguments, str(THREADS)], capture_output=True, text=True, check=True, timeout=300
    )
    errors = {}
    for case, measured_bytes in zip(cases, json.loads(result.stdout), strict=True):
        call = recorded(case)
        if processor.amx and case[:2] == ("linear", "bfloat16"):
            measured_bytes -= THREADS * PRODUCT_BYTES
        scratch = sum(cpu_scratch(kernel, processor) for kernel in call.kernels)
        generated_bytes = sum(
            corrections.generated_by(kernel, processor) for kernel in call.kernels
        )
        total_bytes = measured_bytes + call.peak_bytes
        lowest, highest = (
            measured_bytes - generated_bytes - 0.01 * total_bytes - COUNTER_BYTES,
            measured_bytes + 0.03 * total_bytes + COUNTER_BYTES,
        )
        if not lowest < scratch < highest:
            errors[str(case)] = f"{scratch / 1e6:.1f} MB predicted, {measured_bytes / 1e6:.1f}"
    assert not errors


# (rows, inputs, outputs); none was measured when the rules were made
QUANTIZED_CASES = [(900, 2560, 5120), (700, 6400, 1600), (1, 2560, 5120)]


@pytest.mark.sweep("profile")
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's watermark is Linux's")
@pytest.mark.skipif(not bfloat16_instructions(), reason="the rules were measured with avx512_bf16")
@pytest.mark.parametrize("precision", ["int8", "nf4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_rules_of_quantized_layers_predict_what_the_kernel_counts(
    precision: str, dtype: str
) -> None:
    pytest.importorskip("bitsandbytes")
    cases = [
        (precision, dtype, [[1, rows, inputs], [outputs, inputs]], {})
        for rows, inputs, outputs in QUANTIZED_CASES
    ]
    arguments = [sys.executable, "-c", MEASURE, json.dumps(cases), str(THREADS)]
    result = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=300)
    errors = {}
    for (rows, inputs, outputs), measured_bytes in zip(
        QUANTIZED_CASES, json.loads(result.stdout), strict=True
    ):
        product_bytes = 2 * rows * outputs
        call = Call(events=[MemoryEvent(1, product_bytes)], products=[Product(0, "weight", rows)])
        planned_bytes = call.peak_bytes + quantization_scratch_bytes(
            call, {"weight": (outputs, inputs)}, precision, dtype, on_cpu=True
        )
        total_bytes = measured_bytes + product_bytes
        # the product itself takes some MB with a bias
        if not -0.03 * total_bytes < total_bytes - planned_bytes < 0.03 * total_bytes + 6e6:
            errors[rows, inputs, outputs] = planned_bytes / 1e6, total_bytes / 1e6
    assert not errors


def test_a_cpu_takes_its_own_scratch_and_a_card_that_of_cudnn() -> None:
    call = recorded(convolution("float32", 64, 32, 128, 128))
    (event,) = (event for event in call.events if event.scratch)
    inputs, outputs, weight = (4 * n for n in (64 * 128**2, 32 * 128**2, 64 * 32 * 9))
    assert scratch_on(cpu_estimate(), call, event) == inputs + weight
    assert scratch_on(hardware("rtx4090"), call, event) == inputs + weight
    assert scratch_on(hardware("sim"), call, event) == 0
    half = recorded(convolution("bfloat16", 64, 32, 128, 128))
    (event,) = (event for event in half.events if event.scratch)
    assert cpu_scratch(half.kernels[0], WITHOUT_AMX) == (inputs + weight) // 2
    assert scratch_on(hardware("rtx4090"), half, event) == (inputs + weight + outputs) // 2


def test_a_convolution_to_a_picture_pads_channels() -> None:
    (kernel,) = recorded(convolution("float32", 64, 3, 128, 128)).kernels
    pixels = 128 * 128
    assert cpu_scratch(kernel, WITHOUT_AMX) == 4 * (64 * pixels + 64 * 16 * 9 + 13 * pixels)


def test_a_convolution_with_one_tap_takes_at_most_sums_of_all_outputs() -> None:
    (kernel,) = recorded(convolution("bfloat16", 512, 512, 64, 64, taps=1)).kernels
    copies = 2 * (512 * 64 * 64 + 512 * 512)
    assert cpu_scratch(kernel, WITHOUT_AMX) == copies + 4 * 512 * 64 * 64


def test_a_convolution_with_the_matrix_unit_copies_its_output_twice() -> None:
    """(inputs, outputs) and bytes that the kernel counted on a Xeon with AMX, with 2 threads."""
    for inputs, outputs, pixels, taps, measured_bytes in (
        (256, 320, (96, 112), 3, 13.7e6),
        (4, 320, (160, 160), 3, 32.6e6),
        (1024, 640, (48, 64), 1, 7.8e6),
        (512, 256, (128, 128), 3, 20.3e6),
        (1280, 1280, (16, 16), 3, 31.0e6),
        (128, 128, (128, 128), 3, 8.3e6),
        (96, 96, (3, 64, 64), 3, 4.7e6),
    ):
        case = convolution("bfloat16", inputs, outputs, *pixels, taps=taps)
        (kernel,) = recorded(case).kernels
        assert cpu_scratch(kernel, WITH_AMX) == pytest.approx(measured_bytes, rel=0.06), case


def test_attention_with_the_matrix_unit_packs_keys_and_values() -> None:
    (kernel,) = recorded(("attention", "bfloat16", [[1, 16, 1600, 96]] * 3, {})).kernels
    packed_bytes = 2 * 2 * 16 * 1600 * 96
    assert cpu_scratch(kernel, WITH_AMX) == cpu_scratch(kernel, WITHOUT_AMX) + packed_bytes
    assert cpu_scratch(kernel, WITH_AMX) == pytest.approx(11.6e6, rel=0.02), "as the kernel counts"


def test_small_videos_are_unfolded_by_pytorch() -> None:
    """Bytes that the kernel counted: 96 x 3 x 64 inputs are few, the 64 columns do not count."""
    for case, measured_bytes in (
        (convolution("float32", 96, 96, 3, 64, 64), 127.3e6),
        (convolution("float32", 192, 192, 3, 32, 32), 63.6e6),
        (convolution("float32", 96, 96, 4, 96, 96), 15.1e6),
    ):
        (kernel,) = recorded(case).kernels
        assert cpu_scratch(kernel, WITHOUT_AMX) == pytest.approx(measured_bytes, rel=0.02), case


def test_attention_that_is_not_fused_on_a_cpu_takes_its_scores() -> None:
    (kernel,) = recorded(("attention", "float32", [[16, 256, 64]] * 3, {})).kernels
    assert kernel.shape[-1] == 0
    assert cpu_scratch(kernel, WITHOUT_AMX) >= 2 * 4 * 16 * 256 * 256


def test_every_rule_has_a_source() -> None:
    assert all(rule.source for rule in corrections.CORRECTIONS)
    assert isinstance(cpu_estimate().kernels, ProcessorRates)
