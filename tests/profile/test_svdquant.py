"""SVDQuant formats: bytes of layers beside diffusers' own, of models beside published files, and
which cards have plans with them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import graphrun
from graphrun.graph.precisions import PLANNED_ONLY, planned_only_reason
from graphrun.model.problem import Problem
from graphrun.modules.build import meta_module
from graphrun.modules.quantize import quantizable_layers
from graphrun.profile.costs import quantized_seconds
from graphrun.profile.hardware import hardware
from graphrun.profile.quantized import svdquant_bytes
from graphrun.profile.recording import Kernel
from graphrun.profile.svdquant import layer_kind, layer_tensors

SHAPES = [(64, 128), (3072, 3072), (12288, 3072), (3072, 12288)]


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """diffusers' module with SVDQuant's layers. It imports compiled kernels for CUDA; these stand
    in for them."""
    kernels: Any = ModuleType("kernels")
    kernels.get_kernel = lambda *args, **options: SimpleNamespace(ops=None)
    utils = importlib.import_module("diffusers.utils")
    monkeypatch.setitem(sys.modules, "kernels", kernels)
    monkeypatch.setattr(utils, "is_kernels_available", lambda: True)
    monkeypatch.setattr(utils, "is_kernels_version", lambda *args: False)
    constants = importlib.import_module("diffusers.utils.constants")
    monkeypatch.setattr(constants, "DIFFUSERS_TRUST_REMOTE_KERNELS", True)
    name = "diffusers.quantizers.nunchaku.utils"
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


def nbytes_of(layer: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in layer.parameters())


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("precision", PLANNED_ONLY)
def test_a_layer_has_the_tensors_of_diffusers_layer(
    precision: str, outputs: int, inputs: int, layers: Any
) -> None:
    name, group = ("int4", 64) if precision == "svdq-int4" else ("nvfp4", 16)
    options = {"bias": False, "device": "meta"}
    layer = layers.SVDQW4A4Linear(inputs, outputs, precision=name, group_size=group, **options)
    actual = sum(layer_tensors(outputs, inputs, precision))
    # files also have the smoothing factors before they were merged, which no kernel reads
    assert actual == nbytes_of(layer) + 2 * inputs
    modulation = layers.AWQW4A16Linear(inputs, outputs, **options)
    assert sum(layer_tensors(outputs, inputs, precision, "modulation")) == nbytes_of(modulation)


def weights(name: str, precision: str) -> int:
    component = graphrun.load(name).components["transformer"]
    module = meta_module(component, ())
    return sum(map(sum, svdquant_bytes(module, "bfloat16", precision).values()))


def test_weights_are_those_of_published_files() -> None:
    """The file of FLUX.1-schnell also has a header: the names of 2,500 tensors."""
    file_bytes = graphrun.load("flux-schnell").components["transformer"].checkpoint("svdq-int4")
    assert file_bytes is not None
    assert file_bytes.nbytes == 6_747_849_760
    header_bytes = file_bytes.nbytes - weights("flux-schnell", "svdq-int4")
    assert 0 < header_bytes < 400_000
    assert f"{weights('flux-dev', 'svdq-int4') / 1e9:.2f}" == "6.77"
    assert f"{weights('z-image', 'svdq-int4') / 2**30:.2f}" == "3.36"


def test_embeddings_and_modulation_of_z_image_stay_in_16_bits() -> None:
    module = meta_module(graphrun.load("z-image").components["transformer"], ())
    paths = quantizable_layers(module, torch.bfloat16)
    names = [path for path in paths if layer_kind(path)]
    assert layer_kind("layers.0.attention.to_q") == "own"
    assert layer_kind("noise_refiner.1.feed_forward.w3") == "shared"
    assert len(names) == (30 + 2 + 2) * 7
    assert not [name for name in names if "embedder" in name or "adaLN" in name or "final" in name]
    assert layer_kind("layers.0.attention.to_q", ["layers.0"]) is None


def problem_on(card: str, *allow: str, cache: Path | None = None) -> Problem:
    return graphrun.estimate(
        graphrun.load("flux-schnell"),
        vram="8G",
        ram="64G",
        hardware=card,
        inputs={"height": 64, "width": 64},
        allow=allow,
        cache=cache,
    )


def formats_in(problem: Problem) -> set[str]:
    return {variant.precision for variant in problem.component("transformer").variants}


@pytest.mark.sweep("more")
def test_a_plan_has_them_by_name_only_and_on_cards_that_multiply_them(tmp_path: Path) -> None:
    for allow in ((), ("4bit",), ("precision",)):
        problem = problem_on("rtx4060laptop", *allow, cache=tmp_path)
        assert not formats_in(problem) & set(PLANNED_ONLY)
    assert "svdq-fp4" in formats_in(problem_on("rtx5090", "svdq-fp4", cache=tmp_path))
    problem = problem_on("rtx4060laptop", "4bit", "svdq-int4", cache=tmp_path)
    assert {"svdq-int4", "nf4"} <= formats_in(problem)
    component = problem.component("transformer")
    numbers = [v.precision for v in component.variants].index("svdq-int4")
    assert component.weight_bytes(numbers) == pytest.approx(6_747_849_760, rel=0.002)
    assert not component.variants[numbers].transient_bytes, "nothing is quantized"
    assert component.variants[numbers].needs == "svdq-int4"


@pytest.mark.parametrize(
    ("card", "allow", "words"),
    [
        ("rtx5090", "svdq-int4", "rtx5090 .* allow svdq-fp4 in its place"),
        ("rtx4090", "svdq-fp4", "rtx4090 .* allow svdq-int4 in its place"),
        ("h100", "svdq-int4", "h100 .* leave it out"),
        ("sim", "svdq-int4", "sim .* leave it out"),
        ("rx7900xtx", "svdq-fp4", "rx7900xtx .* leave it out"),
    ],
)
def test_a_card_without_such_products_is_named_with_what_to_allow(
    card: str, allow: str, words: str
) -> None:
    with pytest.raises(graphrun.InputError, match=f"allow {allow}: {words}"):
        problem_on(card, allow)


def test_products_take_an_eighth_of_the_time_and_the_low_rank_branch_is_added() -> None:
    rows, outputs, inputs = 4608, 3072, 3072
    card = hardware("rtx4090")
    kernel = Kernel("matmul", "bfloat16", 2.0 * rows * outputs * inputs, 0)
    plain = kernel.flops / card.flops_per_second
    seconds = plain + quantized_seconds(kernel, (outputs, inputs), "svdq-int4", card)
    assert plain / 8 < seconds < plain / 4
    one_row = Kernel("matmul", "bfloat16", 2.0 * outputs * inputs, 0)
    assert quantized_seconds(one_row, (outputs, inputs), "svdq-int4", card) == 0.0


def test_a_run_is_refused_in_one_sentence() -> None:
    assert planned_only_reason({"vae": "bfloat16", "transformer": "nf4"}) == ""
    reason = planned_only_reason({"vae": "bfloat16", "transformer": "svdq-int4"})
    assert reason == (
        "transformer in svdq-int4 is planned only, since graphrun does not load SVDQuant "
        "checkpoints: plan without --allow svdq-int4 (--allow 4bit has formats that run)"
    )
