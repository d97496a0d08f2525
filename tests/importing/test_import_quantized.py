"""Folders with quantized weights are imported in the precision of their files: nothing is
quantized again, and the picture is that of diffusers with the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign import sampled
from import_whole import Saved, equal, of_graph, planned, run
from quantized_folders import loaded, quantized_flux
from safetensors.torch import load_file, save_file

from graphrun.errors import InputError

PRECISIONS = {"nf4": "nf4", "nested": "nf4", "int8": "int8", "fp8": "fp8"}
# need `pip install torchao==0.18.0`, which slows every import of diffusers
TORCHAO = ("int8wo", "fp8wo")


def cast_to_fp8(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    matrices = {name for name, tensor in tensors.items() if tensor.dim() == 2}
    save_file(
        {n: t.to(torch.float8_e4m3fn) if n in matrices else t for n, t in tensors.items()}, file
    )


@pytest.fixture
def flux(tmp_path: Path) -> Saved:
    return of_graph("flux-tiny", tmp_path)


@pytest.mark.parametrize("kind", sampled(PRECISIONS, ["nested"], "more"))
def test_a_quantized_component_runs_as_diffusers_computes_it(
    kind: str, flux: Saved, tmp_path: Path
) -> None:
    folder, precision = flux.folder / "transformer", PRECISIONS[kind]
    if kind == "fp8":
        cast_to_fp8(folder)
    else:
        quantized_flux(folder, kind)
    graph = flux.imported().write(tmp_path / "graph.yaml")
    component = graph.component("transformer")
    assert component.precision == (precision,)
    assert component.dtype == "bfloat16"
    assert "quantization_config" not in component.config
    solution = planned(graph, flux.inputs)
    numbers = solution.problem.component("transformer")
    (file,) = folder.glob("*.safetensors")
    assert {variant.precision for variant in numbers.variants} == {precision}
    assert numbers.variants[0].transient_bytes == 0, "nothing is quantized"
    assert numbers.weight_bytes() < 1.1 * file.stat().st_size
    trace = run(graph, solution, flux.inputs)
    reference: Any = loaded(folder, **({} if kind == "fp8" else {"device_map": {"": "cpu"}}))
    for child in reference.modules():  # as graphrun's own layers: no repacking for this CPU
        if hasattr(child, "support_avx512bf16_for_cpu"):
            child.support_avx512bf16_for_cpu = False
    flux.pipe.register_modules(transformer=reference.eval())
    assert equal(trace.outputs["image"], flux.expected())


@pytest.mark.parametrize("precision", TORCHAO)
def test_a_pipeline_with_a_component_quantized_by_torchao_runs_as_diffusers_computes_it(
    precision: str, flux: Saved, tmp_path: Path
) -> None:
    """At a generous and at the smallest budget."""
    folder = flux.folder / "transformer"
    quantized_flux(folder, precision)
    graph = flux.imported().write(tmp_path / "graph.yaml")
    assert graph.component("transformer").precision == (precision,)
    reference: Any = loaded(folder)
    flux.pipe.register_modules(transformer=reference.eval())
    expected, peaks = flux.expected(), []
    for at_minimum in (False, True):
        trace = run(graph, planned(graph, flux.inputs, at_minimum=at_minimum), flux.inputs)
        assert equal(trace.outputs["image"], expected), at_minimum
        peaks.append(trace.peak_bytes)
    assert peaks[1] < 0.7 * peaks[0], "the weights do not fit the smallest budget"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "quanto", "weights_dtype": "int8"}, "quantized by quanto"),
        ({"quant_method": "torchao", "quant_type": "int8wo"}, "quantized by torchao"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
            "quantized by bitsandbytes in fp4",
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 4.0},
            "quantized by bitsandbytes in int8 with llm_int8_threshold 4.0",
        ),
    ],
)
def test_another_quantization_is_refused_with_what_to_type(
    settings: dict[str, Any], words: str, flux: Saved
) -> None:
    file = flux.folder / "transformer" / "config.json"
    config = {**json.loads(file.read_text()), "quantization_config": settings}
    file.write_text(json.dumps(config))
    with pytest.raises(InputError, match=f"{words}.*--allow nf4") as error:
        flux.imported()
    # weights of torchao and quanto cannot be attached either
    assert ("graphrun.attach" in str(error.value)) == ("bitsandbytes" in words)
