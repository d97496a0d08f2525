"""Checkpoints that torchao quantized and diffusers saved: read as they are, and computed bit for
bit as torchao computes them, resident and streamed.

torchao slows every import of diffusers, so most tests need `pip install torchao==0.18.0` first. The
last ones read `torchao-0.18.safetensors`, which it wrote, with the output that it computed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from streamed_pictures import problems_with_the_same_picture
from test_bitsandbytes_files import arguments_for, with_weights
from torch import nn

import graphrun
from graphrun.errors import GraphError
from graphrun.graph.graph import Graph
from graphrun.graph.parts import Adapter, Component
from graphrun.modules.build import build, draft
from graphrun.modules.quantize import convert
from graphrun.modules.source_files import stored_tensors
from graphrun.modules.sources import FileSource
from graphrun.modules.torchao_files import torchao_weights

GRAPHS = Path(__file__).parents[2] / "graphs"
WEIGHTS = "diffusion_pytorch_model.safetensors"
CONFIGS = {"int8wo": "Int8WeightOnlyConfig", "fp8wo": "Float8WeightOnlyConfig"}


@pytest.fixture(scope="module")
def flux() -> Graph:
    return graphrun.load(GRAPHS / "flux-tiny.yaml")


@pytest.fixture(scope="module", params=CONFIGS)
def folder(
    request: pytest.FixtureRequest, flux: Graph, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder that diffusers wrote with torchao."""
    plain, target = (tmp_path_factory.mktemp(name) for name in ("plain", request.param))
    build(flux.component("transformer"), flux).save_pretrained(plain)  # type: ignore[operator]
    write_quantized(plain, target, CONFIGS[request.param])
    return target


def write_quantized(plain: Path, target: Path, config: str, **settings: Any) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    from diffusers import TorchAoConfig

    quant_type = getattr(quantization, config)(**settings)
    loaded(plain, quantization_config=TorchAoConfig(quant_type)).save_pretrained(target)


def loaded(folder: Path, **options: Any) -> Any:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16, **options)


def precision_of(folder: Path) -> str:
    return next(name for name in CONFIGS if folder.name.startswith(name))


def component_in(flux: Graph, folder: Path) -> Component:
    precision = (precision_of(folder),)
    return replace(flux.component("transformer"), precision=precision, source=str(folder))


def test_outputs_are_those_of_diffusers_loading_the_same_folder(flux: Graph, folder: Path) -> None:
    reference = loaded(folder)
    module = with_weights(component_in(flux, folder), flux, precision_of(folder))
    assert type(module.get_submodule("proj_out")).__name__.endswith("RowsLinear")
    arguments = arguments_for(reference.config)
    with torch.no_grad():
        output, expected = module(**arguments)[0], reference(**arguments)[0]
    assert expected.isfinite().all()
    assert torch.equal(output, expected)


def test_streamed_and_resident_with_the_same_picture_at_the_planned_bytes(
    flux: Graph, folder: Path
) -> None:
    component = component_in(flux, folder)
    graph = replace(flux, components={**flux.components, "transformer": component})
    _, writer = draft(component, graph, precision_of(folder))
    assert writer.reads_as_stored
    for problem in problems_with_the_same_picture(graph):
        numbers = problem.component("transformer")
        assert numbers.variants[0].transient_bytes == 0, "nothing is quantized"


def test_a_lora_is_refused_with_what_to_type(flux: Graph, folder: Path, tmp_path: Path) -> None:
    lora = Adapter(str(tmp_path / "lora.safetensors"))
    component = replace(component_in(flux, folder), loras=(lora,))
    with pytest.raises(GraphError, match="take a source in 16 bits, or leave loras: out"):
        draft(component, flux, precision_of(folder))


def test_the_weights_are_dequantized_for_another_precision(flux: Graph, folder: Path) -> None:
    module = build(replace(flux.component("transformer"), source=str(folder)), flux)
    quantized_count = 0
    for name, expected in loaded(folder).named_parameters():
        if hasattr(expected, "qdata"):
            expected = expected.dequantize()
            quantized_count += 1
        assert torch.equal(module.get_parameter(name), expected), name
    assert quantized_count > 10


@pytest.mark.parametrize(
    ("config", "settings", "words"),
    [
        ("Int8DynamicActivationInt8WeightConfig", {}, "quantize activations"),
        ("IntxWeightOnlyConfig", {"weight_dtype": torch.int4}, "IntxUnpackedToInt8Tensor"),
        ("Int8WeightOnlyConfig", {"granularity": "PerTensor"}, "not fp32 per row"),
    ],
)
def test_another_format_of_torchao_is_refused_by_name(
    flux: Graph, tmp_path: Path, config: str, settings: dict[str, Any], words: str
) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    build(flux.component("transformer"), flux).save_pretrained(tmp_path / "plain")  # type: ignore[operator]
    if "granularity" in settings:
        settings = {"granularity": getattr(quantization, settings["granularity"])()}
    write_quantized(tmp_path / "plain", tmp_path / "int8wo", config, **settings)
    with pytest.raises(GraphError, match=f"quantized weight that cannot be read: .*{words}"):
        draft(component_in(flux, tmp_path / "int8wo"), flux, "int8wo")


WRITTEN = Path(__file__).with_name("torchao-0.18.safetensors")


def of_written(target: Path, **changes: Any) -> dict[str, Any]:
    """The tensors and, under "metadata", the kinds of WRITTEN with ``changes``, in ``target``."""
    with safe_open(WRITTEN, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    for name, change in changes.items():
        part = metadata if name in metadata else tensors
        part[name] = change(part[name])
    save_file(tensors, target, metadata)
    return {**tensors, "metadata": metadata}


@pytest.mark.parametrize("precision", CONFIGS)
def test_a_layer_computes_what_torchao_computed(precision: str, tmp_path: Path) -> None:
    """Inputs are small integers, so that sums do not depend on the kernel of a CPU."""
    tensors = of_written(tmp_path / "model.safetensors")
    file_tensors = {t.name: t for t in stored_tensors(tmp_path, "")}
    packed = torchao_weights(file_tensors)[f"{precision}.weight"]
    assert packed.precision == precision
    assert set(packed.names) <= {
        name for name in file_tensors if name.startswith(f"{precision}._weight")
    }
    module = nn.ModuleDict({precision: nn.Linear(64, 32, dtype=torch.bfloat16, device="meta")})
    convert(module, precision, torch.bfloat16)
    layer: Any = module[precision]
    source = FileSource(packed.fields)
    for name, parameter in list(layer.named_parameters()):
        value = tensors[f"{precision}.bias"]
        if name != "bias":
            value = torch.empty_like(parameter, device="cpu")
            source.read_into(name, value)
        layer.register_parameter(name, nn.Parameter(value, requires_grad=False))
    assert torch.equal(layer(tensors["input"]), tensors[f"{precision}.output"])
    assert layer(tensors["input"]).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("int8wo.weight", lambda _: "{", "Expecting|property name"),
        ("int8wo.weight", lambda _: "[]", "not of torchao's format"),
        ("fp8wo.weight", lambda text: text.replace("Float8Tensor", "NVFP4Tensor"), "NVFP4Tensor"),
        ("fp8wo._weight_scale", lambda scale: scale[:-1].clone(), "not fp32 per row"),
        ("int8wo._weight_qdata", lambda data: data.float(), "not a matrix of int8"),
    ],
)
def test_a_damaged_file_is_refused(name: str, change: Any, words: str, tmp_path: Path) -> None:
    of_written(tmp_path / "model.safetensors", **{name: change})
    file_tensors = {t.name: t for t in stored_tensors(tmp_path, "")}
    with pytest.raises(ValueError, match=words):
        torchao_weights(file_tensors)


def test_without_files_the_format_is_refused(flux: Graph) -> None:
    component = replace(flux.component("transformer"), precision=("int8wo",), source=None)
    with pytest.raises(GraphError, match="int8wo is read from files that torchao quantized"):
        draft(component, flux, "int8wo")
