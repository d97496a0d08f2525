"""Embeddings are freed after the last stage that reads their numbers; the decoder's pipeline gets
their shapes only."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from stage_runs import stages_of

import graphrun
from graphrun.graph.order import read_by
from graphrun.graph.parts import Reference
from graphrun.modules.build import build
from graphrun.ops.outlines import Outline, materialize_outlines, outline_tensors

GRAPHS = Path(__file__).parents[2] / "graphs"
CPU = torch.device("cpu")


def test_only_the_sequence_dimension_is_reduced_to_one() -> None:
    value = {
        "prompt_embeds": torch.rand(2, 64, 32, dtype=torch.bfloat16),
        "pooled": torch.rand(2, 48),
        "layers": torch.rand(6, 2, 64, 32),
        "mask": torch.ones(2, 64, dtype=torch.int64),
        "each": [torch.rand(7, 32)],
        "scale": 0.5,
    }
    outlines = outline_tensors(value)
    assert outlines["layers"] == Outline((6, 2, 1, 32), torch.float32)
    tensors = materialize_outlines(outlines, CPU)
    assert {name: tuple(tensors[name].shape) for name in ("prompt_embeds", "pooled", "mask")} == {
        "prompt_embeds": (2, 1, 32),
        "pooled": (2, 48),
        "mask": (2, 1),
    }
    assert tensors["prompt_embeds"].dtype == torch.bfloat16
    assert tensors["mask"].all()  # a mask must not be empty
    assert tensors["each"][0].shape == (7, 32)  # [b d]: may be pooled, so its width stays
    assert tensors["scale"] == 0.5


def test_a_decoder_reads_latents_and_no_embeddings() -> None:
    decode = graphrun.load(GRAPHS / "sdxl-tiny.yaml").stage("decode")
    assert Reference("stage", "encode", "embeds") in decode.references
    assert [str(reference) for reference in read_by(decode) if reference.kind == "stage"] == [
        "$denoise.latents"
    ]


def test_a_plan_holds_embeddings_no_longer_than_the_loop() -> None:
    problem = graphrun.estimate(
        graphrun.load(GRAPHS / "flux-tiny.yaml"), vram=1 << 40, ram=1 << 40, hardware="sim"
    )
    embeds = next(value for value in problem.values if value.name == "encode.embeds")
    assert embeds.consumers == ("denoise",)
    assert problem.phases[embeds.last_phase].stage == "denoise"


@pytest.mark.sweep("more")
@pytest.mark.parametrize("precomputed", [False, True])
def test_no_embedding_is_in_memory_while_the_decoder_computes(precomputed: bool) -> None:
    graph = graphrun.load(GRAPHS / "flux-tiny.yaml")
    modules = {name: build(component, graph) for name, component in graph.components.items()}
    inputs, values, alive, outlined_names = (
        graph.resolve({"steps": 1}),
        dict[str, Any](),
        list[weakref.ref[torch.Tensor]](),
        list[int](),
    )

    def after_stage(stage: str, outputs: Mapping[str, Any]) -> None:
        if stage == "encode":
            alive.extend(weakref.ref(tensor) for tensor in outputs["embeds"].values())
        values.update({f"{stage}.{name}": value for name, value in outputs.items() if precomputed})

    def before_decoding(*_: Any) -> None:
        gc.collect()
        outlined_names.append(sum(embedding() is not None for embedding in alive))

    modules["vae"].decoder.register_forward_pre_hook(before_decoding)
    whole = stages_of(graph, modules, inputs, after_stage=after_stage).run()["image"]
    if precomputed:
        decode_graph = graph.with_precomputed(["encode", "denoise"])
        outputs = {
            str(reference)[1:]: values[str(reference)[1:]] for reference in decode_graph.precomputed
        }
        stages = stages_of(decode_graph, modules, inputs, precomputed=outputs)
        assert isinstance(stages.values["encode.embeds"]["prompt_embeds"], Outline)
        assert stages.run()["image"].tobytes() == whole.tobytes()
    else:
        assert len(alive) >= 2
        assert outlined_names == [0]
