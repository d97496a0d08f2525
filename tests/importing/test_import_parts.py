"""Parts of an import: dtypes, bounds of inputs, fingerprint runs, and the sizes of a reference
graph."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from import_whole import saved
from tiny_pipelines import cases

from graphrun.diffusers_.importing.fingerprint import digest_of
from graphrun.diffusers_.importing.folder import of_folder
from graphrun.diffusers_.importing.imported import ImportOptions, find, import_source, with_dtypes
from graphrun.diffusers_.importing.signature import divisor, maximum
from graphrun.diffusers_.importing.split import lay_out
from graphrun.diffusers_.importing.standin import stand_in_words
from graphrun.diffusers_.importing.trial import build_trial
from graphrun.diffusers_.importing.written import document_of
from graphrun.profile.dry_run import probe
from graphrun.profile.hardware import simulated
from graphrun.profile.problems import ProblemLimits, problem_of

GRAPHS = Path(__file__).parent.parent.parent / "graphs"
AMPLE = 1 << 40


@pytest.mark.parametrize(
    ("name", "step", "bound"),
    [
        ("FluxPipeline", 4, 512),  # its VAE halves once here
        ("StableDiffusionXLPipeline", 8, None),
        ("WanPipeline", 16, None),
        ("StableDiffusion3Pipeline", 2, 512),
        ("LTXPipeline", 32, None),
    ],
)
def test_bounds_are_what_the_pipelines_own_checks_say(
    name: str, step: int, bound: int | None
) -> None:
    pipe = cases()[name].build()
    assert divisor(type(pipe), pipe, "height") == step
    assert maximum(type(pipe), pipe, "max_sequence_length") == bound


def test_dtypes_are_those_of_files_then_of_configurations_then_of_the_others(
    tmp_path: Path,
) -> None:
    source = saved("StableDiffusionPipeline", tmp_path)
    source.pipe.unet.to(torch.bfloat16).save_pretrained(source.folder / "unet")
    for file in (
        *(source.folder / "vae").glob("*.safetensors"),
        *(source.folder / "text_encoder").glob("*.safetensors"),
    ):
        file.unlink()
    spec = with_dtypes(of_folder(source.folder), {})
    assert {n: t.dtype for n, t in spec.components.items()} == {
        "unet": "bfloat16",
        "text_encoder": "float32",
        "vae": "bfloat16",
    }
    text = document_of(spec, _layout_of(source.folder), "graph").text
    assert "dtype: bfloat16}  # as the other components" in text
    description = with_dtypes(of_folder(source.folder), {"": "float16", "vae": "float32"})
    assert {n: t.dtype for n, t in description.components.items()} == {
        "unet": "float16",
        "text_encoder": "float16",
        "vae": "float32",
    }


@pytest.mark.sweep("more")
def test_a_vae_that_its_pipeline_casts_up_is_declared_in_fp32(tmp_path: Path) -> None:
    source = saved("StableDiffusionXLPipeline", tmp_path)
    graph = source.imported(dtypes={"": "float16"}).write(tmp_path / "graph.yaml")
    assert {n: c.dtype for n, c in graph.components.items()}["vae"] == "float32"
    assert len(graph.stages) == 3
    problem = problem_of(
        graph,
        probe(graph, graph.for_planning({})),
        simulated(),
        ProblemLimits(AMPLE, AMPLE),
        graph.for_planning({}),
    )
    assert [use.component for phase in problem.phases for use in phase.uses][-2:] == ["unet", "vae"]


def test_fingerprints_differ_from_the_first_argument_that_differs(tmp_path: Path) -> None:
    trial = build_trial(
        with_dtypes(of_folder(saved("StableDiffusionPipeline", tmp_path).folder), {})
    )
    call = {"prompt": "a", "height": 16, "width": 16}
    component_calls = trial.run_whole(call)
    trial.whole_runs.clear()
    assert trial.run_whole(call) == component_calls
    assert [str(component_call) for component_call in component_calls] == [
        "text_encoder",
        "text_encoder",
        "unet",
        "unet",
        "vae.decode",
    ]
    # the default is 7.5: the second step gets other latents
    other = trial.run_whole({**call, "guidance_scale": 7.0})
    assert [a == b for a, b in zip(component_calls, other, strict=True)] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert trial.run_whole(call, seed=1)[2:] != component_calls[2:]


class Halving(diffusers.StableDiffusionPipeline):  # type: ignore[misc]
    """A pipeline that scales latents from its caller, so that latents that it returned are not what
    it continues from."""

    def prepare_latents(self, *args: Any, **kwargs: Any) -> Any:
        halved = tuple(value / 2 if isinstance(value, torch.Tensor) else value for value in args)
        return super().prepare_latents(*halved, **kwargs)


@pytest.mark.sweep("more")
def test_a_call_whose_stages_would_compute_something_else_is_not_split(tmp_path: Path) -> None:
    spec = with_dtypes(of_folder(saved("StableDiffusionPipeline", tmp_path).folder), {})
    sizes = {"height": 16, "width": 16}
    assert lay_out(build_trial(spec), sizes).reason == ""
    other = replace(
        spec, pipeline=f"{__name__}.Halving", trust=(*spec.trust, __name__.partition(".")[0])
    )
    assert (
        lay_out(build_trial(other), sizes).reason
        == "split in three, it calls its components with other values"
    )


def test_a_digest_is_of_numbers_shapes_and_order() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert digest_of(x) == digest_of(x.t().contiguous().t()) != digest_of(x.reshape(3, 2))
    assert digest_of([x, 1]) != digest_of([1, x])
    assert digest_of({"a": None}) != digest_of({"b": None})


def test_the_stand_in_for_a_vocabulary_is_the_reference_graphs() -> None:
    from tokenizers import Tokenizer

    own_layout, other_layout = (
        Tokenizer.from_str(stand_in_words()),
        Tokenizer.from_file(str(GRAPHS / "tokenizers" / "bytes.json")),
    )
    for text in ("a lighthouse at dusk", "Füße 🙂"):
        assert own_layout.encode(text).ids == other_layout.encode(text).ids


@pytest.mark.sweep("more")
def test_from_a_class_and_the_reference_configurations_come_the_reference_graphs_numbers(
    tmp_path: Path, dry: Any
) -> None:
    """FLUX.1-dev in its true size: weights, phases and peaks of `graphs/flux-dev.yaml`, to the
    byte."""
    config_names = {
        "text_encoder": "clip-l",
        "text_encoder_2": "t5-xxl",
        "transformer": "flux-dev-transformer",
        "vae": "flux-vae",
    }
    configs = {
        n: str(GRAPHS / "configs" / f"{file}.json")
        for n, file in {**config_names, "scheduler": "flux-scheduler"}.items()
    }
    graph_import = import_source(
        "diffusers.FluxPipeline",
        ImportOptions(configs, {"": "bfloat16"}, input_defaults={"height": 1024, "width": 1024}),
    )
    assert diffusers.FluxPipeline is graph_import.description.kind
    graph = graph_import.write(tmp_path / "flux.yaml")
    inputs = graph.for_planning({})
    problem = problem_of(
        graph, probe(graph, inputs), simulated(), ProblemLimits(AMPLE, AMPLE), inputs
    )
    reference, dry_run, values = dry("flux-dev")
    reference_problem = problem_of(
        reference, dry_run, simulated(), ProblemLimits(AMPLE, AMPLE), values
    )
    assert {c.name: c.weight_bytes() for c in problem.components} == {
        c.name: c.weight_bytes() for c in reference_problem.components
    }
    assert problem.phases == reference_problem.phases


def test_of_a_class_only_what_has_no_default_must_be_configured() -> None:
    description = find(
        "diffusers.StableDiffusionPipeline",
        ImportOptions(dict.fromkeys(("vae", "unet", "text_encoder"), str(_EMPTY)), {}),
    )
    class_names = {
        name: (member.class_path, name in description.components)
        for name, member in (description.components | description.parts).items()
    }
    assert class_names["scheduler"] == ("diffusers.EulerDiscreteScheduler", False)
    assert class_names["tokenizer"] == ("transformers.CLIPTokenizer", False)
    assert set(class_names) == {"vae", "unet", "text_encoder", "scheduler", "tokenizer"}


# an object; what it says is not read before a module is made
_EMPTY = GRAPHS / "configs" / "flux-scheduler.json"


def _layout_of(folder: Path) -> Any:
    return import_source(
        str(folder), ImportOptions({}, {"": "float32"}, input_defaults={"height": 16, "width": 16})
    ).layout
