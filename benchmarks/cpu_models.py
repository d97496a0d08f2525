"""Models of `cpu.py`: original configurations with random weights, written as diffusers' folders.

    FOLDER/<model>/model_index.json, scheduler/, tokenizer/, ...
    FOLDER/<model>/<component>/config.json, *.safetensors          shards of at most 1 GB
    FOLDER/<model>/graph.yaml                                      the same for graphrun

Shards are written one after the other, which takes the memory of one shard.
"""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
GRAPHS = ROOT / "graphs"
SHARD_BYTES = 10**9
GIB = 2**30
PROMPT = "a lighthouse at dusk, oil on canvas"
SEED = 3
SDCPP_PREFIXES = {
    "unet": "unet.",
    "vae": "vae.",
    "text_encoder": "cond_stage_model.transformer.",
    "text_encoder_2": "cond_stage_model.1.transformer.",
}
NAMES = {"steps": "num_inference_steps", "frames": "num_frames"}  # of graphs -> of pipelines


def fast_dtype() -> str:
    """Return bfloat16, or float32 if the CPU has no instructions for it: the precision of the
    weights, and so of the computation, for all tools."""
    from graphrun.profile.processor import bfloat16_instructions

    return "bfloat16" if bfloat16_instructions() else "float32"


@dataclass(frozen=True, slots=True)
class Model:
    """A graph with other configurations, precisions and inputs, and the memory caps in GiB.

    ``configs``: component -> keys that replace keys of the graph's configuration. ``dtypes``:
    component -> precision, by default `fast_dtype`. ``repeated``: caps with three runs. The names
    of models of the full size end with a precision other than bfloat16.
    """

    name: str
    graph: Path
    inputs: Mapping[str, Any]
    caps: tuple[float, ...]
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    repeated: tuple[float, ...] = ()

    def dtype(self, component: str) -> str:
        return self.dtypes.get(component, fast_dtype())

    @property
    def call_inputs(self) -> dict[str, Any]:
        """The inputs of every run, prompt and seed included."""
        return {**self.inputs, "prompt": PROMPT, "seed": SEED}


SQUARE = {"height": 256, "width": 256, "steps": 4}
FLUX = {**SQUARE, "max_sequence_length": 256}
SMALL_T5 = {"vocab_size": 512, "d_model": 512, "d_ff": 1024, "num_layers": 4, "num_heads": 8}
SMALL_CLIP = {"vocab_size": 512, "num_hidden_layers": 2}
SMALL_WAN_VAE = {"base_dim": 32, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1}
SMALL_VAE = {"block_out_channels": [32, 64, 64, 64], "layers_per_block": 1}

_MODELS = (
    Model("flux-schnell", GRAPHS / "flux-schnell.yaml", FLUX, (6, 8, 12, 16), repeated=(6, 12)),
    Model(
        "sdxl",
        GRAPHS / "sdxl.yaml",
        {"height": 512, "width": 512, "steps": 4},
        (3, 4, 6),
        repeated=(3, 4),
    ),
    Model(
        "wan-1.3b",
        ROOT / "benchmarks/graphs/wan-1.3b.yaml",
        {**SQUARE, "frames": 17},
        (3, 4, 6),
        dtypes={"vae": "float32"},
        repeated=(3, 4),
    ),
)
FULL = tuple(
    model if fast_dtype() == "bfloat16" else replace(model, name=f"{model.name}-{fast_dtype()}")
    for model in _MODELS
)
TRIAL = Model(
    "flux-3gb",
    GRAPHS / "flux-schnell.yaml",
    FLUX,
    (2,),
    configs={
        "transformer": {
            "num_layers": 7,
            "num_single_layers": 22,
            "num_attention_heads": 12,
            "joint_attention_dim": 512,
        },
        "text_encoder": SMALL_CLIP,
        "text_encoder_2": SMALL_T5,
        "vae": SMALL_VAE,
    },
)
TINY = (
    Model(
        "flux-tiny",
        GRAPHS / "flux-schnell.yaml",
        {"height": 64, "width": 64, "steps": 4, "max_sequence_length": 64},
        (0.75, 2),
        configs={
            "transformer": {
                "num_layers": 5,
                "num_single_layers": 10,
                "num_attention_heads": 6,
                "joint_attention_dim": 512,
            },
            "text_encoder": SMALL_CLIP,
            "text_encoder_2": SMALL_T5,
            "vae": SMALL_VAE,
        },
    ),
    Model(
        "sdxl-tiny",
        GRAPHS / "sdxl.yaml",
        {"height": 64, "width": 64, "steps": 4},
        (0.75, 2),
        configs={
            "unet": {
                "block_out_channels": [64, 128, 320],
                "transformer_layers_per_block": [1, 2, 4],
            },
            "text_encoder": SMALL_CLIP,
            "text_encoder_2": SMALL_CLIP,
            "vae": SMALL_VAE,
        },
    ),
    Model(
        "wan-tiny",
        ROOT / "benchmarks/graphs/wan-1.3b.yaml",
        {"height": 64, "width": 64, "frames": 5, "steps": 4, "max_sequence_length": 64},
        (0.75, 2),
        configs={
            "transformer": {
                "num_attention_heads": 8,
                "num_layers": 12,
                "ffn_dim": 4096,
                "text_dim": 512,
            },
            "text_encoder": SMALL_T5,
            "vae": SMALL_WAN_VAE,
        },
        dtypes={"vae": "float32"},
    ),
)
MINI = Model(  # for tests
    "flux-mini",
    GRAPHS / "flux-schnell.yaml",
    {"height": 64, "width": 64, "steps": 2, "max_sequence_length": 64},
    (1,),
    configs={
        "transformer": {
            "num_layers": 2,
            "num_single_layers": 2,
            "num_attention_heads": 2,
            "joint_attention_dim": 64,
        },
        "text_encoder": SMALL_CLIP,
        "text_encoder_2": {**SMALL_T5, "d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 2},
        "vae": SMALL_VAE,
    },
)
MODELS = {model.name: model for model in (*FULL, TRIAL, *TINY, MINI)}


def graph_for(model: Model) -> Any:
    """Return the graph of ``model`` with its configurations and precisions, without sources."""
    import graphrun

    graph = graphrun.load(model.graph).without_sources()
    return replace(
        graph,
        components={
            name: replace(
                component,
                config={**component.config, **model.configs.get(name, {})},
                dtype=model.dtype(name),
                precision=(model.dtype(name),),
            )
            for name, component in graph.components.items()
        },
    )


def write(model: Model, folder: Path, tell: Callable[[str], None] = print) -> None:
    """Write the weights of ``model`` to ``folder``, completely or not at all."""
    if folder.is_dir():
        return
    from graphrun.modules.build import build_part

    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    graph, modules = graph_for(model), dict[str, nn.Module]()
    for name in graph.components:
        modules[name] = _write_component(graph, name, partial / name)
        tell(f"{name}: {weight_bytes(partial / name) / 1e9:.2f} GB written")
    parts = {name: build_part(part, graph) for name, part in graph.parts.items()}
    _pipeline(graph, {**modules, **parts}).save_config(partial)
    for name, part in parts.items():
        part.save_pretrained(partial / name)
    document = _document(model, folder)
    (partial / "graph.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    partial.rename(folder)


def weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


@cache
def needed_bytes(name: str) -> int:
    """Return the bytes of the weights that `write` writes for the model ``name``."""
    from graphrun.modules.build import draft

    graph, nbytes = graph_for(MODELS[name]), 0
    for component in graph.components.values():
        module, writer = draft(component, graph, component.dtype)
        nbytes += sum(tensor.nbytes for shard in _shards(module) for tensor in shard.values())
        writer.close()
    return nbytes


def write_gguf(folder: Path, file: Path) -> None:
    """Write the weights of SDXL in ``folder`` to one GGUF file, in their precision.

    Names are diffusers', with the prefixes that stable-diffusion.cpp gives to components. Text
    encoders get the ``text_model.`` of published checkpoints.
    """
    import numpy
    from gguf import GGMLQuantizationType, GGUFWriter

    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    writer = GGUFWriter(partial, "sdxl")
    for component, prefix in SDCPP_PREFIXES.items():
        for path in sorted((folder / component).glob("*.safetensors")):
            data = numpy.memmap(path, numpy.uint8, "r")
            start = 8 + int.from_bytes(data[:8].tobytes(), "little")
            header = json.loads(data[8:start].tobytes())
            header.pop("__metadata__", None)
            for name, row in header.items():
                begin, end = row["data_offsets"]
                rows = row["shape"][:-1]
                is_bare = component.startswith("text") and not name.startswith("text_")
                writer.add_tensor(
                    prefix + ("text_model." if is_bare else "") + name,
                    data[start + begin : start + end].reshape(*rows, -1),
                    raw_dtype=GGMLQuantizationType[row["dtype"]],
                )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(file)


def load_pipeline(folder: Path, model: Model, **options: Any) -> Any:
    """Return the pipeline in ``folder`` as its users load it."""
    from diffusers import DiffusionPipeline

    dtypes = {"default": getattr(torch, fast_dtype())}
    dtypes |= {name: getattr(torch, dtype) for name, dtype in model.dtypes.items()}
    pipeline = DiffusionPipeline.from_pretrained(folder, dtype=dtypes, **options)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def empty_pipeline(model: Model) -> Any:
    """Return the pipeline of ``model`` without memory for weights. Each parameter is one repeated
    NaN: the output shows if a block computes before it is loaded."""
    from graphrun.modules.build import build_part, draft

    graph = graph_for(model)
    modules = dict[str, nn.Module]()
    for name, component in graph.components.items():
        modules[name], _ = draft(component, graph, component.dtype)
        placeholders = dict[int, nn.Parameter]()
        for owner in modules[name].modules():
            for key, tensor in owner._parameters.items():
                if tensor is not None:
                    value = torch.full((), torch.nan, dtype=tensor.dtype).expand(tensor.shape)
                    owner._parameters[key] = placeholders.setdefault(
                        id(tensor), nn.Parameter(value, tensor.requires_grad)
                    )
    parts = {name: build_part(part, graph) for name, part in graph.parts.items()}
    pipeline = _pipeline(graph, {**modules, **parts})
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def load_graph(folder: Path) -> Any:
    """Return the graph in ``folder``, with pictures as floating-point numbers to compare."""
    import graphrun

    graph = graphrun.load(folder / "graph.yaml")
    return replace(
        graph,
        stages=tuple(
            replace(stage, arguments={**stage.arguments, "output_type": "np"})
            if stage.op == "decode"
            else stage
            for stage in graph.stages
        ),
    )


def call(pipeline: Any, model: Model) -> Any:
    """Return the picture or video of ``pipeline`` as floating-point numbers."""
    inputs = model.call_inputs
    generator = torch.Generator("cpu").manual_seed(inputs.pop("seed"))
    arguments = {NAMES.get(name, name): value for name, value in inputs.items()}
    with torch.no_grad():
        return pipeline(generator=generator, output_type="np", return_dict=False, **arguments)[0]


def _pipeline(graph: Any, objects: Mapping[str, Any]) -> Any:
    from graphrun.modules.build import resolve_class

    kind = resolve_class(graph.pipeline, graph.trust)
    parameters = inspect.signature(kind.__init__).parameters
    absent = {
        name: None
        for name, parameter in parameters.items()
        if name != "self" and parameter.default is inspect.Parameter.empty
    }
    return kind(**{**absent, **graph.pipeline_config, **objects})


def _write_component(graph: Any, name: str, folder: Path) -> nn.Module:
    """Write ``config.json`` and shards of one component; return its module on meta."""
    from graphrun.modules.build import draft

    component = graph.components[name]
    module, writer = draft(component, graph, component.dtype)
    folder.mkdir(parents=True)
    is_diffusers = hasattr(module, "save_config")
    if is_diffusers:
        module.save_config(folder)
    else:
        module.config.architectures = [type(module).__name__]
        module.config.dtype = getattr(torch, component.dtype)
        module.config.save_pretrained(folder)
    stem = "diffusion_pytorch_model" if is_diffusers else "model"
    _write_shards(folder, stem, list(_shards(module)), writer)
    writer.close()
    return module


def _shards(module: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of each shard; a tied tensor has its first name."""
    shard, nbytes, first = dict[str, torch.Tensor](), 0, set[int]()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) in first:
            continue
        first.add(id(tensor))
        if shard and nbytes + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, nbytes = {}, 0
        shard[name] = tensor
        nbytes += tensor.nbytes
    yield shard


def _write_shards(
    folder: Path, stem: str, shards: list[dict[str, torch.Tensor]], writer: Any
) -> None:
    from safetensors.torch import save_file

    files, total_bytes = dict[str, str](), 0
    for number, shard in enumerate(shards, start=1):
        middle = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        file = f"{stem}{middle}.safetensors"
        values = {name: torch.empty_like(tensor, device="cpu") for name, tensor in shard.items()}
        for name, value in values.items():
            writer.read_into(name, value)
        save_file(values, folder / file, {"format": "pt"})
        files |= dict.fromkeys(shard, file)
        total_bytes += sum(value.nbytes for value in values.values())
        del values
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": files}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _document(model: Model, folder: Path) -> dict[str, Any]:
    """Return the graph file for the weights in ``folder``."""
    document = yaml.safe_load(model.graph.read_text())
    document.pop("source", None)
    for name, component in document["components"].items():
        component["source"] = str(folder / name)
        component["dtype"] = model.dtype(name)
        for key in ("config", "precision"):
            component.pop(key, None)
    for part in document["parts"].values():
        for key in ("config", "file"):
            if isinstance(part.get(key), str):
                part[key] = str((model.graph.parent / part[key]).resolve())
    return document
