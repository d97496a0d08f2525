"""Modular pipelines imported with a stage for each of their blocks: a run by the plan gives the
pipeline's own output."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers as d
import pytest
import tiny_modular
import torch
from campaign import sampled
from diffusers.modular_pipelines import ModularPipelineBlocks, SequentialPipelineBlocks
from import_whole import NAMES, SEED, equal, planned, run
from tiny_pipelines import cases, mask, modular, picture

import graphrun
from graphrun.diffusers_.description import LivePipeline
from graphrun.diffusers_.importing.imported import ImportOptions, import_source
from graphrun.errors import GraphError, InputError
from graphrun.graph.graph import Graph
from graphrun.graph.parts import Reference
from graphrun.ops.modular import initial_state

THREE = ["text_encoder", "denoise", "decode"]
IMAGED = ["text_encoder", "vae_encoder", "denoise", "decode"]
CASES = {  # name and workflow: stages
    "FluxPipeline": THREE,
    "FluxPipeline:image2image": IMAGED,
    "QwenImagePipeline:inpainting": IMAGED,
    "StableDiffusionXLPipeline": THREE,
    "WanImageToVideoPipeline": [
        "text_encoder",
        "image_encoder",
        "vae_encoder",
        "denoise",
        "decode",
    ],
    "WanPipeline-two-experts": THREE,
}


def call_of(name: str, pipe: Any, workflow: str = "") -> dict[str, Any]:
    """Arguments of a small call."""
    arguments = {
        k: v
        for k, v in cases()[name].arguments().items()
        if k in pipe.blocks.input_names and k != "output_type"
    }
    media = {"image": picture(16), "mask_image": mask(16)} if workflow else {}
    key_parameters = pipe.blocks._workflow_map[workflow] if workflow else ()
    return {
        **arguments,
        "num_inference_steps": 2,
        **({"strength": 0.9} if key_parameters else {}),
        **{k: media[k] for k in key_parameters if k in media},
    }


def sets_of(call: Mapping[str, Any], workflow: str = "") -> dict[str, Any]:
    plain = {
        NAMES.get(key, key): value for key, value in call.items() if isinstance(value, (int, float))
    }
    return plain | ({"workflow": workflow} if workflow else {})


def inputs_of(call: Mapping[str, Any], graph: Graph) -> dict[str, Any]:
    inputs = {NAMES.get(key, key): value for key, value in call.items()} | {"seed": SEED}
    return {name: value for name, value in inputs.items() if name in graph.inputs}


def expected(pipe: Any, call: Mapping[str, Any]) -> Any:
    output = "videos" if "videos" in pipe.blocks.output_names else "images"
    return pipe(
        **call, generator=torch.Generator().manual_seed(SEED), output_type="pil", output=output
    )


def imported(
    source: object, sets: Mapping[str, Any], configs: Mapping[str, str] | None = None
) -> Any:
    return import_source(str(source), ImportOptions(configs or {}, {}, input_defaults=sets))


def written(
    pipe: Any, call: Mapping[str, Any], path: Path, workflow: str = "", **options: Any
) -> tuple[LivePipeline, Graph]:
    live = graphrun.from_pipeline(pipe)
    return live, live.to_yaml(path, inputs=sets_of(call, workflow), **options)


@pytest.mark.parametrize(
    "case", sampled(CASES, ["FluxPipeline:image2image", "WanPipeline-two-experts"], "imports")
)
def test_a_modular_pipeline_is_split_at_its_blocks(case: str, tmp_path: Path) -> None:
    name, _, workflow = case.partition(":")
    pipe = modular(name)
    call = call_of(name, pipe, workflow)
    live, graph = written(pipe, call, tmp_path / "graph.yaml", workflow)
    assert [stage.name for stage in graph.stages] == CASES[case]
    assert all(stage.op == "block" for stage in graph.stages)
    inputs = inputs_of(call, graph)
    variations: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, {})]
    variations += (
        [({"negative_prompt": "blurry"},) * 2] if name.startswith("StableDiffusion") else []
    )
    for changes, in_call in variations:
        trace = run(graph, planned(graph, inputs | changes), inputs | changes, live.graph_modules)
        assert equal(next(iter(trace.outputs.values())), expected(pipe, call | in_call)), changes


NEW_MODELS = {  # name: (stages, arguments)
    "qwen_image_21": (THREE, {"height": 64, "width": 64, "num_inference_steps": 3}),
    "cosmos3": (
        THREE[1:],
        {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2},
    ),
    "cosmos3_distilled": (
        THREE[1:],
        {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 4},
    ),
    "minimax_h3": (
        THREE,
        {"height": 32, "width": 32, "num_frames": 124, "num_inference_steps": 3},
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", sampled(NEW_MODELS, ["cosmos3_distilled"], "imports"))
def test_a_model_of_blocks_only_gives_the_pipelines_own_output(name: str, tmp_path: Path) -> None:
    """From a live pipeline and, where no class of the tests is in it, from its folder."""
    pipe, (stages, arguments) = getattr(tiny_modular, name)(), NEW_MODELS[name]
    call = {"prompt": "a lighthouse at dusk", **arguments}
    live, graph = written(pipe, call, tmp_path / "graph.yaml")
    sources = [(graph, live.graph_modules)]
    if name.startswith("cosmos3"):
        pipe.save_pretrained(str(tmp_path / "saved"), overwrite_modular_index=True)
        folder_graph = imported(tmp_path / "saved", sets_of(call)).write(tmp_path / "folder.yaml")
        assert folder_graph.stages == graph.stages
        sources.append((folder_graph, None))
    want = expected(pipe, call)
    for source_graph, modules in sources:
        assert [stage.name for stage in source_graph.stages] == stages
        inputs = inputs_of(call, source_graph)
        solution = planned(source_graph, inputs, at_minimum=True)
        trace = run(source_graph, solution, inputs, modules)
        assert equal(next(iter(trace.outputs.values())), want)


@pytest.mark.sweep("more")
def test_settings_of_blocks_are_set_as_inputs_are(tmp_path: Path) -> None:
    """Cosmos 3 refuses to run without its checker unless the setting says so."""
    pipe = tiny_modular.cosmos3_distilled()
    pipe.update_components(enable_safety_checker=True)
    call = {"height": 32, "width": 32, "num_frames": 5}
    with pytest.raises(InputError, match="requires a safety checker"):
        written(pipe, call, tmp_path / "graph.yaml")
    live = graphrun.from_pipeline(pipe)
    sets = {**sets_of(call), "enable_safety_checker": False}
    graph = live.to_yaml(tmp_path / "graph.yaml", inputs=sets)
    assert graph.pipeline_config["enable_safety_checker"] is False
    assert "steps" not in graph.inputs  # its four noise levels are fixed
    assert planned(graph, inputs_of(call, graph)).plan


@pytest.mark.sweep("more")
def test_values_are_passed_by_name_and_random_numbers_continue(tmp_path: Path) -> None:
    """An encoder depends on another only where both draw from one generator, whose state passes
    between them."""
    pipe = modular("FluxPipeline")
    _, graph = written(
        pipe, call_of("FluxPipeline", pipe, "image2image"), tmp_path / "graph.yaml", "image2image"
    )
    assert graph.stage("text_encoder").outputs == ("prompt_embeds", "pooled_prompt_embeds")
    assert graph.stage("vae_encoder").outputs == ("image_latents", "generator")
    assert graph.producers("vae_encoder") == ()
    assert graph.stage("denoise").arguments["generator"] == Reference(
        "stage", "vae_encoder", "generator"
    )
    assert "seed" not in graph.stage("denoise").arguments
    assert graph.stage("decode").uses == ("vae",)
    assert (graph.inputs["height"].multiple_of, graph.kinds()) == (4, {"image": "image"})


def test_values_passed_in_are_in_the_groups_that_blocks_read() -> None:
    state = initial_state(modular("FluxPipeline"), {"height": 16}, {"prompt_embeds": torch.ones(1)})
    assert list(state.get_by_kwargs("denoiser_input_fields")) == ["prompt_embeds"]
    assert (state.height, state.width, state.num_inference_steps) == (16, None, 50)


@pytest.mark.sweep("more")
def test_a_batch_gives_the_pipelines_own_output(tmp_path: Path) -> None:
    pipe = modular("FluxPipeline")
    call = call_of("FluxPipeline", pipe)
    live, graph = written(pipe, call, tmp_path / "graph.yaml")
    inputs = inputs_of(call, graph) | {"batch": 2}
    image = run(graph, planned(graph, inputs), inputs, live.graph_modules).outputs["image"]
    assert equal(image, expected(pipe, call | {"num_images_per_prompt": 2}))


@pytest.mark.sweep("more")
def test_a_pipeline_pruned_to_a_workflow_is_that_workflow(tmp_path: Path) -> None:
    blocks = d.FluxAutoBlocks().get_workflow("image2image")
    pipe = modular("FluxPipeline", blocks)
    live = graphrun.from_pipeline(pipe)
    graph = live.to_yaml(
        tmp_path / "graph.yaml", inputs={"height": 16, "width": 16, "max_sequence_length": 16}
    )
    assert [stage.name for stage in graph.stages] == IMAGED
    assert "image" in graph.inputs


@pytest.mark.sweep("more")
def test_whole_is_one_stage_with_the_same_output(tmp_path: Path) -> None:
    pipe = modular("FluxPipeline")
    call = call_of("FluxPipeline", pipe)
    live, graph = written(pipe, call, tmp_path / "graph.yaml", whole=True)
    assert [(stage.name, stage.op) for stage in graph.stages] == [("make", "block")]
    inputs = inputs_of(call, graph)
    assert equal(
        run(graph, planned(graph), inputs, live.graph_modules).outputs["image"],
        expected(pipe, call),
    )


class Sized(ModularPipelineBlocks):
    """Enters no component, and passes on a value that a graph cannot hold."""

    @property
    def inputs(self) -> list[Any]:
        return [d.modular_pipelines.InputParam("height")]

    @property
    def intermediate_outputs(self) -> list[Any]:
        return [d.modular_pipelines.OutputParam("asked")]

    def __call__(self, components: Any, state: Any) -> Any:
        state.set("asked", {state.get("height")})
        return components, state


class Decoding(type(d.FluxAutoBlocks().sub_blocks["decode"])):  # type: ignore[misc]
    """A decoder that reads that value."""

    def __call__(self, components: Any, state: Any) -> Any:
        assert isinstance(state.get("asked"), set)
        return super().__call__(components, state)


class SizedBlocks(SequentialPipelineBlocks):
    """FLUX's blocks with an extra first block that passes a value to the last."""

    model_name = "flux"
    block_classes = [
        Sized,
        *(type(block) for block in list(d.FluxAutoBlocks().sub_blocks.values())[:-1]),
        Decoding,
    ]
    block_names = ["size", *d.FluxAutoBlocks().sub_blocks]


@pytest.mark.sweep("more")
def test_blocks_that_pass_a_value_that_a_graph_cannot_hold_are_one_stage(tmp_path: Path) -> None:
    pipe = modular("FluxPipeline", SizedBlocks())
    call = call_of("FluxPipeline", pipe)
    live, graph = written(pipe, call, tmp_path / "graph.yaml")
    assert [stage.name for stage in graph.stages] == ["make"]
    assert (
        "pass each other values that a graph cannot hold" in (tmp_path / "graph.yaml").read_text()
    )
    assert graph.pipeline_config == {"blocks": f"{__name__}.SizedBlocks"}
    assert graph.trust == (__name__.partition(".")[0],)
    inputs = inputs_of(call, graph)
    assert equal(
        run(graph, planned(graph), inputs, live.graph_modules).outputs["image"],
        expected(pipe, call),
    )


def test_blocks_put_together_by_code_have_no_name(tmp_path: Path) -> None:
    blocks = d.FluxAutoBlocks()
    blocks.sub_blocks.pop("vae_encoder")
    with pytest.raises(
        InputError,
        match=r"put together or changed by code.*"
        r"class MyBlocks\(FluxAutoBlocks\).*graphrun\.attach",
    ):
        graphrun.from_pipeline(modular("FluxPipeline", blocks)).to_yaml(tmp_path / "graph.yaml")


def test_an_unknown_workflow_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        InputError,
        match="workflow image2imag: FluxAutoBlocks has no such workflow; "
        "did you mean 'image2image'",
    ):
        written(modular("FluxPipeline"), {}, tmp_path / "graph.yaml", "image2imag")


@pytest.mark.sweep("more")
@pytest.mark.parametrize(
    ("old_text", "new_text", "message"),
    [
        (
            "blocks: [denoise]",
            "blocks: [denois]",
            "FluxAutoBlocks has no 'denois'; did you mean 'denoise'",
        ),
        (
            "guidance_scale: $guidance_scale",
            "guidanc_scale: $guidance_scale",
            "FluxAutoBlocks takes no 'guidanc_scale'; did you",
        ),
        (
            "latents: $denoise.latents",
            "latents: $denoise.latent",
            "its blocks do not compute latent",
        ),
    ],
)
def test_an_unknown_block_argument_or_output_is_an_error_at_its_stage(
    old_text: str, new_text: str, message: str, tmp_path: Path
) -> None:
    pipe, file = modular("FluxPipeline"), tmp_path / "graph.yaml"
    written(pipe, call_of("FluxPipeline", pipe), file)
    assert old_text in file.read_text()
    file.write_text(file.read_text().replace(old_text, new_text))
    with pytest.raises(GraphError, match=message) as error_info:
        planned(graphrun.load(file))
    assert "graph.yaml:" in str(error_info.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny modular FLUX as `save_pretrained` leaves it."""
    path = tmp_path_factory.mktemp("saved") / "flux"
    modular("FluxPipeline").save_pretrained(str(path), overwrite_modular_index=True)
    return path


def changed(folder: Path, **entries: Any) -> None:
    file = folder / "modular_model_index.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


@pytest.mark.sweep("more")
def test_a_folder_is_the_same_graph_with_its_weights(folder: Path, tmp_path: Path) -> None:
    """Also where the folder was moved and one component is in another folder."""
    pipe = modular("FluxPipeline")
    call = call_of("FluxPipeline", pipe)
    moved_folder = Path(shutil.copytree(folder, tmp_path / "moved"))
    (moved_folder / "vae").rename(tmp_path / "decoder")
    index = json.loads((moved_folder / "modular_model_index.json").read_text())
    library, kind, specification = index["vae"]
    changed(
        moved_folder,
        vae=[
            library,
            kind,
            {
                **specification,
                "pretrained_model_name_or_path": str(tmp_path),
                "subfolder": "decoder",
            },
        ],
    )
    graph = imported(moved_folder, sets_of(call)).write(tmp_path / "graph.yaml")
    assert {name: component.source for name, component in graph.components.items()} == {
        **{
            name: str(moved_folder / name)
            for name in ("text_encoder", "text_encoder_2", "transformer")
        },
        "vae": str(tmp_path / "decoder"),
    }
    assert graph.stages == written(pipe, call, tmp_path / "live.yaml")[1].stages
    inputs = inputs_of(call, graph)
    assert equal(run(graph, planned(graph), inputs).outputs["image"], expected(pipe, call))


@pytest.mark.sweep("more")
def test_a_class_needs_configurations_of_what_its_workflow_uses(
    folder: Path, tmp_path: Path
) -> None:
    configs = {
        name: f"{folder / name}/config.json"
        for name in ("text_encoder", "text_encoder_2", "transformer", "vae")
    }
    small = {"height": 16, "width": 16, "max_sequence_length": 16}
    for workflow, stages in (("text2image", THREE), ("image2image", IMAGED)):
        graph_import = imported(
            "diffusers.FluxModularPipeline", small | {"workflow": workflow}, configs
        )
        assert [stage.name for stage in graph_import.layout.stages] == stages
    graph = graph_import.write(tmp_path / "graph.yaml")
    assert graph.parts["tokenizer"].file is not None
    assert planned(graph).plan
    configs.pop("vae")
    with pytest.raises(InputError, match=r"add --config vae=FILE \(AutoencoderKL\)$"):
        imported("diffusers.FluxModularPipeline", {}, configs)


def test_a_class_needs_no_component_that_its_workflow_does_not_use() -> None:
    for workflow, is_required in (("text2image", False), ("controlnet_text2image", True)):
        with pytest.raises(InputError, match="add --config text_encoder=FILE") as error_info:
            imported("diffusers.StableDiffusionXLModularPipeline", {"workflow": workflow})
        assert ("--config controlnet=FILE" in str(error_info.value)) is is_required
        assert "image_encoder" not in str(error_info.value)


def test_modular_folders_that_cannot_be_imported(folder: Path, tmp_path: Path) -> None:
    def refused(**entries: Any) -> str:
        broken_folder = Path(shutil.copytree(folder, tmp_path / str(len(list(tmp_path.iterdir())))))
        changed(broken_folder, **entries)
        with pytest.raises(InputError) as error_info:
            imported(broken_folder, {})
        return str(error_info.value)

    assert "MyBlocks is code that came with a checkpoint, and such code is never run" in refused(
        _blocks_class_name="MyBlocks"
    )
    assert "such code is never run" in refused(_class_name=["mine", "MyPipeline"])
    assert "is of diffusers.FluxPipeline, which is not modular" in refused(
        _class_name="FluxPipeline"
    )
    specification = {
        "pretrained_model_name_or_path": "/nowhere",
        "subfolder": "other",
        "type_hint": ["diffusers", "AutoencoderKL"],
    }
    assert "vae: there is no folder /nowhere" in refused(
        vae=["diffusers", "AutoencoderKL", specification]
    )
    folder_copy = Path(shutil.copytree(folder, tmp_path / "own"))
    (folder_copy / "modular_config.json").write_text("{}")
    with pytest.raises(InputError, match="modular_config.json is code that came with a checkpoint"):
        imported(folder_copy, {})
