"""What ``graphrun estimate --mode`` says of diffusers' own ways of placing a pipeline, and the
precisions it can be asked for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import graphrun
from graphrun.errors import InputError
from graphrun.graph.graph import Graph
from graphrun.modules.build import meta_modules
from graphrun.profile import hardware as devices
from graphrun.profile.asked import pictures_input, with_attention, with_precisions
from graphrun.profile.dry_run import probe
from graphrun.profile.modes import Estimate, Mode, estimate_mode, parse_mode, weight_bytes
from graphrun.profile.recording import DryRun

GRAPHS = Path(__file__).parent.parent.parent / "graphs"
CARD = devices.hardware("rtx4090")


@pytest.fixture(scope="module")
def sd3() -> tuple[Graph, DryRun, dict[str, int]]:
    """Stable Diffusion 3, small: the graph, its dry run, bytes of its weights."""
    graph = graphrun.load(GRAPHS / "sd3-tiny.yaml")
    dry_run = probe(graph, graph.for_planning({"steps": 2}))
    with meta_modules(graph) as modules:
        return (
            graph,
            dry_run,
            {name: weight_bytes(graph, name, module) for name, module in modules.items()},
        )


def placed(
    sd3: tuple[Graph, DryRun, dict[str, int]], name: str, keep: Iterable[str] = (), **options: Any
) -> Estimate:
    """The estimate of the mode called ``name``."""
    graph, dry_run, weights = sd3
    return estimate_mode(
        graph,
        dry_run,
        CARD,
        parse_mode(name, graph, {}, keep, options.pop("cpu", ()), **options),
        weights,
    )


def test_resident_weights_are_all_there_and_nothing_is_copied(
    sd3: tuple[Graph, DryRun, dict[str, int]],
) -> None:
    estimate = placed(sd3, "resident")
    assert set(estimate.on_device) == {sum(sd3[2].values())}
    assert (estimate.copied_in_bytes, estimate.copied_out_bytes) == (0, 0)


def test_the_hook_chain_leaves_t5_beside_clip_g(sd3: tuple[Graph, DryRun, dict[str, int]]) -> None:
    """text_encoder -> text_encoder_2 -> text_encoder_3 -> transformer -> vae: with guidance the
    encoders are called twice, and only the transformer's hook evicts T5."""
    graph, dry_run, weights = sd3
    estimate = placed(sd3, "model")
    components = [call.component for _, call in dry_run.recording.entries()]
    assert components[:6] == ["text_encoder", "text_encoder_2", "text_encoder_3"] * 2
    clip, bigg, t5 = (weights[name] for name in components[:3])
    assert estimate.on_device[:7] == [
        clip,
        bigg,
        t5,
        t5 + clip,
        t5 + bigg,
        t5,
        weights["transformer"],
    ]
    weight_bytes = sum(weights.values())
    assert estimate.copied_in_bytes == estimate.copied_out_bytes == weight_bytes + clip + bigg, (
        "CLIP is copied twice; all goes back at the end"
    )
    copied_names = (
        estimate.copied_in_bytes / CARD.pageable_bytes_per_second
        + estimate.copied_out_bytes / CARD.d2h_pageable_bytes_per_second
    )
    assert sum(estimate.seconds.values()) == pytest.approx(
        sum(placed(sd3, "resident").seconds.values()) + copied_names
    )


def test_sequential_offloading_copies_what_every_call_reads(
    sd3: tuple[Graph, DryRun, dict[str, int]],
) -> None:
    graph, dry_run, weights = sd3
    calls = [call.component for _, call in dry_run.recording.entries()]
    estimate = placed(sd3, "sequential")
    assert estimate.copied_out_bytes == 0
    assert estimate.copied_in_bytes <= sum(weights[name] for name in calls)
    assert estimate.copied_in_bytes > sum(weights[name] for name in calls if name == "transformer")
    assert max(estimate.on_device) < max(weights.values())


def test_group_offloading_overlaps_copies_and_is_slower_from_pageable_memory(
    sd3: tuple[Graph, DryRun, dict[str, int]],
) -> None:
    by_block, by_leaf, pageable = (
        placed(sd3, "group"),
        placed(sd3, "leaf"),
        placed(sd3, "group", pinned=False),
    )
    assert max(by_leaf.on_device) < max(by_block.on_device) < sum(sd3[2].values())
    assert (
        sum(by_block.seconds.values())
        < sum(pageable.seconds.values())
        < sum(placed(sd3, "sequential").seconds.values())
    )
    estimate = placed(sd3, "group", ["text_encoder_3"])
    assert min(estimate.on_device) >= sd3[2]["text_encoder_3"]
    assert estimate.copied_in_bytes < by_block.copied_in_bytes


@pytest.mark.parametrize("mode", ["model", "sequential", "group", "leaf"])
def test_weights_that_the_ram_does_not_hold_are_read_from_disk_again(
    sd3: tuple[Graph, DryRun, dict[str, int]], mode: str
) -> None:
    graph, dry_run, weights = sd3
    total, calls = (
        sum(weights.values()),
        [call.component for _, call in dry_run.recording.entries()],
    )
    unlimited = placed(sd3, mode)
    ample = placed(sd3, mode, ram_bytes=total)
    assert (ample.read_bytes, ample.seconds) == (0, unlimited.seconds)
    none = placed(sd3, mode, ram_bytes=0)
    if mode == "model":  # a component is copied once for several calls
        assert total <= none.read_bytes < sum(weights[name] for name in calls)
    else:
        assert none.read_bytes == sum(weights[name] for name in calls)
    assert sum(none.seconds.values()) >= sum(unlimited.seconds.values())
    # RAM for the largest component alone: each is read once for consecutive calls
    single_ram = placed(sd3, mode, ram_bytes=max(weights.values()))
    changes = [
        name for name, previous in zip(calls, [None, *calls], strict=False) if name != previous
    ]
    if mode != "model":
        assert 0 < single_ram.read_bytes <= sum(weights[name] for name in changes)
    if mode == "sequential":
        waits = sum(none.seconds.values()) - sum(unlimited.seconds.values())
        assert waits == pytest.approx(none.read_bytes / CARD.disk_bytes_per_second)
    assert placed(sd3, "resident", ram_bytes=0).read_bytes == 0


def test_a_component_on_the_cpu_takes_no_device_memory(
    sd3: tuple[Graph, DryRun, dict[str, int]],
) -> None:
    estimate = placed(sd3, "resident", cpu=["text_encoder_3"])
    assert set(estimate.on_device) == {sum(sd3[2].values()) - sd3[2]["text_encoder_3"]}


def test_precisions_are_those_asked_for() -> None:
    graph = graphrun.load(GRAPHS / "flux-dev.yaml")
    with pytest.raises(InputError, match="fp8, int8wo, fp8wo, gguf, fp8dq") as error:
        with_precisions(graph, ["4bit"])
    assert str(error.value).count("int8wo") == 1
    quantized_graph, formats = with_precisions(graph, ["nf4", "vae=fp32"])
    assert {name: (c.dtype, c.precision[0]) for name, c in quantized_graph.components.items()} == {
        "text_encoder": ("bfloat16", "bfloat16"),
        "text_encoder_2": ("bfloat16", "nf4"),
        "transformer": ("bfloat16", "nf4"),
        "vae": ("float32", "float32"),
    }
    assert not formats
    assert with_precisions(graph, ["transformer=int8wo"])[1] == {"transformer": "int8wo"}
    sdxl = graphrun.load(GRAPHS / "sdxl.yaml")
    assert {
        c.dtype
        for name, c in with_precisions(sdxl, ["bf16"])[0].components.items()
        if name != "vae"
    } == {"bfloat16"}
    assert with_precisions(sdxl, ["bf16"])[0].components["vae"].dtype == "float32", (
        "the graph decodes in fp32"
    )
    assert pictures_input(sdxl) == "batch"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"precision": ["int9"]}, "precision 'int9' is not known"),
        ({"precision": ["unet=nf4"]}, "precision unet=nf4: no such component"),
        ({"mode": "modal"}, "mode 'modal' is not known; did you mean 'model'"),
        ({"keep": ["unet"]}, "keep unet: no such component"),
        ({"option": ["decode=tilling"]}, "option decode=tilling: decode has tiling, slicing"),
        ({"option": ["decod=tiling"]}, "option decod=tiling: no such stage"),
    ],
)
def test_what_means_nothing_is_refused(arguments: dict[str, Any], words: str) -> None:
    graph = graphrun.load(GRAPHS / "flux-tiny.yaml")
    with pytest.raises(InputError, match=words):
        graphrun.survey(graph, **arguments)


def test_a_graph_without_a_number_of_pictures_says_what_to_add() -> None:
    with pytest.raises(InputError, match="has no input for the number of pictures: add one"):
        graphrun.survey(graphrun.load(GRAPHS / "flux-tiny.yaml"), batch=4)


@pytest.mark.long
def test_all_resident_counts_the_graphs_own_precision() -> None:
    estimate = graphrun.survey(
        graphrun.load(GRAPHS / "sdxl-nf4.yaml"), hardware="rtx4090", inputs={"steps": "1"}
    )
    unet = next(row for row in estimate["components"] if row["name"] == "unet")
    assert estimate["all_resident"]["weights_bytes"] == sum(
        row["weights"]["nf4" if row is unet else row["dtype"]]["bytes"]
        for row in estimate["components"]
    )
    assert estimate["mode"]["weights_bytes"] == estimate["all_resident"]["weights_bytes"]


def test_formats_of_other_libraries_have_their_own_bytes() -> None:
    graph = graphrun.load(GRAPHS / "flux-tiny.yaml")
    with meta_modules(graph) as modules:
        module = modules["transformer"]
        sizes = [
            weight_bytes(graph, "transformer", module, Mode(formats={"transformer": name}))
            for name in ("quanto", "fp8wo", "int8wo")
        ]
        assert sizes == sorted(sizes)
        assert sizes[-1] < weight_bytes(graph, "transformer", module)
    assert Mode().name == "resident"


def test_transformers_4_kept_t5s_wo_in_fp32_where_bitsandbytes_quantized_the_rest() -> None:
    graph = with_precisions(graphrun.load(GRAPHS / "flux-tiny.yaml"), ["text_encoder_2=nf4"])[0]
    with meta_modules(graph) as modules:
        module = modules["text_encoder_2"]
        elements = sum(
            weight.numel() for name, weight in module.named_parameters() if ".wo." in name
        )
        sizes = {
            version: weight_bytes(
                graph, "text_encoder_2", module, Mode(libraries={"transformers": version})
            )
            for version in ("4.57", "5.0")
        }
    assert elements
    assert sizes["4.57"] - sizes["5.0"] == (4 - 2) * elements
    plain = graphrun.load(GRAPHS / "flux-tiny.yaml")
    assert weight_bytes(plain, "text_encoder_2", module, Mode(libraries={"transformers": "4"})) == (
        weight_bytes(plain, "text_encoder_2", module)
    )


def test_int8_of_an_old_bitsandbytes_stays_on_the_device(
    sd3: tuple[Graph, DryRun, dict[str, int]],
) -> None:
    graph, dry_run, weights = sd3
    quantized_graph = with_precisions(graph, ["transformer=int8"])[0]
    new, old = (
        estimate_mode(
            quantized_graph,
            dry_run,
            CARD,
            parse_mode("model", graph, {}, (), (), libraries=libraries),
            weights,
        )
        for libraries in ((), ("bitsandbytes=0.45",))
    )
    assert min(old.on_device) >= weights["transformer"] > min(new.on_device)
    assert new.copied_out_bytes - old.copied_out_bytes == weights["transformer"]


@pytest.mark.parametrize(
    ("text", "words"),
    [("bitandbytes=0.45", "did you mean 'bitsandbytes'"), ("transformers=four", "NAME=VERSION")],
)
def test_libraries_without_rules_or_versions_are_refused(text: str, words: str) -> None:
    graph = graphrun.load(GRAPHS / "flux-tiny.yaml")
    with pytest.raises(InputError, match=words):
        parse_mode("model", graph, {}, (), (), libraries=[text])


def test_layerwise_casting_skips_what_diffusers_skips() -> None:
    graph = graphrun.load(GRAPHS / "flux-tiny.yaml")
    with meta_modules(graph) as modules:
        module = modules["transformer"]
        nbytes = weight_bytes(
            graph, "transformer", module, Mode(formats={"transformer": "layerwise"})
        )
        patterns = (*module._skip_layerwise_casting_patterns, "^proj_out$")
        assert "norm" in patterns
        casts = {
            f"{path}.{name}"
            for path, layer in module.named_modules()
            if isinstance(layer, nn.Linear)
            and not any(re.search(pattern, path) for pattern in patterns)
            for name, _ in layer.named_parameters()
        }
        assert nbytes == sum(
            -(-tensor.numel() * (1 if name in casts else 2) // 512) * 512
            for name, tensor in module.named_parameters()
        )


@pytest.mark.sweep("more")
def test_attention_by_another_kernel_takes_its_share_of_the_time() -> None:
    graph = graphrun.load(GRAPHS / "flux-tiny.yaml")
    estimates = {
        (card, name): graphrun.survey(graph, hardware=card, attention=name)["mode"]["seconds"]
        for card, name in (("rtx4090", None), ("rtx4090", "sage"), ("h100", None), ("h100", "fa3"))
    }
    assert estimates["rtx4090", "sage"] <= estimates["rtx4090", None]
    assert estimates["h100", "fa3"] <= estimates["h100", None]
    rates: Any = CARD.kernels
    sage: Any = with_attention(CARD, "sage").kernels
    assert sage.attention_flops_per_second == 2.1 * rates.attention_flops_per_second
    for card, name in (("rtx4090", "fa3"), ("cpu", "sage"), ("rtx4090", "sagee")):
        with pytest.raises(InputError, match="attention"):
            graphrun.survey(graph, hardware=card, attention=name)
