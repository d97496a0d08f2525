"""Reference graphs that no other test runs: most take a processor of texts and images, without
torchvision. Runs with ample and with the least VRAM make the pipeline's own output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import diffusers as d
import pytest
import torch
import transformers as t
from campaign import sampled
from import_whole import GRAPHS, SEED, equal, planned, run
from tiny_pipelines import film, picture

from graphrun.errors import GraphError
from graphrun.graph.graph import Graph
from graphrun.graph.loading import load
from graphrun.modules.build import build, build_part, resolve_class
from graphrun.ops.modular import silence_diffusers

TEXT = "two ships"
NAMES = ("qwen-image-21", "flux3-klein", "minimax-h3", "bria-fibo-2", "wan-animate-2")
PARAMETERS = {"frames": "num_frames"}
OTHERS = ("frames", "max_sequence_length", "image", "driving_video", "segment_frame_length")
MEDIA = {"wan-animate-2": {"image": picture(64), "driving_video": film(9, 64)}}


def components_of(graph: Graph) -> dict[str, Any]:
    return {
        **{key: build(component, graph) for key, component in graph.components.items()},
        **{key: build_part(part, graph) for key, part in graph.parts.items()},
    }


def own_output(graph: Graph, inputs: Mapping[str, Any]) -> Any:
    """The first output of the pipeline's own call with ``inputs`` of the graph."""
    kind, components = resolve_class(graph.pipeline, graph.trust), components_of(graph)
    values = graph.resolve(inputs)
    arguments = {
        "prompt": TEXT,
        "height": values["height"],
        "width": values["width"],
        "num_inference_steps": values["steps"],
        "generator": torch.Generator().manual_seed(SEED),
    }
    arguments |= {PARAMETERS.get(key, key): values[key] for key in OTHERS if key in values}
    if not issubclass(kind, d.ModularPipeline):
        return kind(**components)(**arguments).images[0]
    with silence_diffusers():
        pipe = kind()
        pipe._blocks.sub_blocks.pop("prompt_upsampler", None)
        pipe = pipe._blocks.init_pipeline()
        pipe.update_components(**components)
        output = "videos" if "videos" in pipe.blocks.output_names else "images"
        return pipe(**arguments, output_type="pil", output=output)[0]


@pytest.mark.long
@pytest.mark.parametrize("name", sampled(NAMES, ["flux3-klein", "qwen-image-21"], "imports"))
def test_the_pipelines_own_output(name: str) -> None:
    graph = load(GRAPHS / f"{name}-tiny.yaml")
    inputs = {"prompt": TEXT, "seed": SEED, **MEDIA.get(name, {})}
    expected = own_output(graph, inputs)
    for at_minimum in (False, True):
        trace = run(graph, planned(graph, inputs, at_minimum=at_minimum), inputs)
        assert trace.overruns == ()
        assert equal(next(iter(trace.outputs.values())), expected)


def test_a_processor_reads_texts_and_pictures() -> None:
    graph = load(GRAPHS / "qwen-image-21-tiny.yaml")
    processor = build_part(graph.parts["processor"], graph)
    assert isinstance(processor, t.Qwen3VLProcessor)
    picture = torch.zeros(3, 64, 64, dtype=torch.uint8)
    encoded = processor(text=["<|image_pad|> a"], images=[picture], return_tensors="pt")
    assert encoded["pixel_values"].shape == (16, 3 * 2 * 16 * 16)  # patches of 16 pixels, twice
    assert (encoded["input_ids"] == processor.image_token_id).sum() == 4  # merged four to one


def test_an_unknown_setting_of_a_processors_pictures() -> None:
    graph = load(GRAPHS / "qwen-image-21-tiny.yaml")
    part = graph.parts["processor"]
    part.config["image_procesor"] = {}
    with pytest.raises(GraphError, match="unknown key 'image_procesor'"):
        build_part(part, graph)
