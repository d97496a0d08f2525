"""Tiny reference graphs' pipelines, imported from a folder, a live object and a class: one graph,
and the pipeline's own output."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from campaign import sampled
from import_whole import GRAPHS, Saved, equal, planned, run
from PIL import Image

import graphrun
from graphrun.diffusers_.importing.found import path_of
from graphrun.diffusers_.importing.imported import ImportOptions, import_source
from graphrun.graph.graph import Graph
from graphrun.graph.loading import load
from graphrun.graph.parts import Reference
from graphrun.modules.build import build, build_part, resolve_class

TWINS = (
    "wan22-i2v",
    "flux-controlnet",
    "flux2-dev",
    "flux2-klein",
    "z-image",
    "chroma",
    "krea2",
    "ernie-image",
    "ideogram4",
    "hunyuan-image",
    "bria-fibo",
    "cosmos3-nano",
    "sana",
    "stable-cascade",
    "kandinsky5",
    "hunyuan-video15",
    "ltx2",
    "stable-audio",
    "stable-audio-3",
    "ace-step",
)
PICTURES = {"image": Image.linear_gradient("L").resize((64, 64)).convert("RGB")}
SMALL = {"steps": 2, "height": 64, "width": 64}


def twin(graph: Graph, folder: Path) -> Saved:
    """The own pipeline of ``graph`` as `save_pretrained` leaves it in ``folder``, with the
    arguments of the graph's first call."""
    main_pipeline, kind = graph.pipeline_called(""), resolve_class(graph.pipeline, graph.trust)
    things = main_pipeline.by_pipeline_name(
        {key: build(component, graph) for key, component in graph.components.items()}
    )
    parts = main_pipeline.by_pipeline_name(
        {key: build_part(part, graph) for key, part in graph.parts.items()}
    )
    for part in parts.values():  # a graph's tokenizer has a class of its own, which checks texts
        part.__class__ = next(
            base
            for base in type(part).__mro__
            if getattr(import_module(base.__module__), base.__name__, None) is base
        )
    things |= parts
    members = {**dict.fromkeys(kind._optional_components), **things, **main_pipeline.config}
    pipe = kind(
        **{
            name: value
            for name, value in members.items()
            if name in inspect.signature(kind.__init__).parameters
        }
    )
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(folder / graph.name)
    inputs = {
        name: size
        for name, size in SMALL.items()
        if name in graph.inputs and not size % (graph.inputs[name].multiple_of or 1)
    }
    inputs |= {
        name: PICTURES[input_spec.type]
        for name, input_spec in graph.inputs.items()
        if input_spec.type in PICTURES
    }
    values = graph.resolve(inputs)
    arguments: dict[str, Any] = {}
    for stage in graph.stages if graph.stages[0].op != "call" else graph.stages[:1]:
        for name, argument in stage.arguments.items():
            if not (isinstance(argument, Reference) and argument.kind == "stage"):
                arguments[name] = (
                    values[argument.name] if isinstance(argument, Reference) else argument
                )
    arguments |= {"num_inference_steps": arguments.pop("steps")} if "steps" in arguments else {}
    left_out = ("seed", "tiling", "output_type", "num_images")
    return Saved(
        graph.name,
        folder / graph.name,
        pipe,
        {k: v for k, v in arguments.items() if v is not None and k not in left_out},
    )


def described(source: Saved, graph: Graph) -> dict[str, str]:
    """What ``--config`` says of each part of the pipeline's class: its class and file, its folder,
    or a value."""
    config = {name: str(value) for name, value in graph.pipeline_called("").config.items()}
    for name, part in source.pipe.components.items():
        files = [
            *(source.folder / name).glob("config.json"),
            *(source.folder / name).glob("scheduler_config.json"),
        ]
        if part is not None:
            config[name] = f"{path_of(type(part))}:{files[0] if files else source.folder / name}"
    return config


@pytest.mark.parametrize("name", sampled(TWINS, ["z-image"], "imports"))
def test_a_folder_a_live_pipeline_and_a_class_are_one_graph_with_the_pipelines_own_output(
    name: str, tmp_path: Path
) -> None:
    graph = load(GRAPHS / f"{name}-tiny.yaml")
    source = twin(graph, tmp_path)
    expected = source.expected()
    file_graph = source.imported().write(tmp_path / "read.yaml")
    live = graphrun.from_pipeline(source.pipe)
    live_graph = live.to_yaml(tmp_path / "live.yaml", inputs=source.sets)
    options = ImportOptions(
        configs=described(source, graph), dtypes={"": "float32"}, input_defaults=source.sets
    )
    class_graph = import_source(graph.pipeline, options).write(tmp_path / "class.yaml")
    assert live_graph.stages == file_graph.stages == class_graph.stages
    assert live_graph.inputs == file_graph.inputs == class_graph.inputs
    trace = run(file_graph, planned(file_graph, source.inputs, at_minimum=True), source.inputs)
    assert equal(next(iter(trace.outputs.values())), expected)
