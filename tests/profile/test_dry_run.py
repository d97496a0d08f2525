"""Dry runs of FLUX.1-dev and SDXL through diffusers' own code without weights: recorded calls, and
the phases they form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import graphrun
from graphrun.modules.build import meta_module
from graphrun.profile.fused_kernels import FusedKernels
from graphrun.profile.problems import phase_spans
from graphrun.profile.recorder import Recorder
from graphrun.profile.recording import Call, MemoryEvent
from graphrun.units import MIB

GRAPHS = Path(__file__).parents[2] / "graphs"


@pytest.fixture(scope="module")
def flux(dry: Any) -> list[tuple[str, Call]]:
    return dry("flux-dev")[1].recording.entries()


def traced_mib(call: Call) -> float:
    return (call.peak_bytes + call.input_bytes) / MIB


@pytest.mark.parametrize(
    ("component", "expected"), [("text_encoder_2", 92.0), ("transformer", 468.0), ("vae", 1536.5)]
)
def test_traced_activation_at_1024(
    flux: list[tuple[str, Call]], component: str, expected: float
) -> None:
    """With inputs, without convolution scratch. T5 takes 98 MiB in training mode (see below), but
    pipelines run it in eval mode."""
    call = next(call for _, call in flux if call.component == component)
    assert traced_mib(call) == pytest.approx(expected, rel=0.002)


def test_t5_takes_98_mib_in_training_mode_where_dropout_makes_a_copy(dry: Any) -> None:
    graph, _, _ = dry("flux-dev")
    t5 = meta_module(graph.components["text_encoder_2"], graph.trust)
    ids = torch.zeros(1, 512, dtype=torch.long, device="meta")
    peaks = {}
    for training in (False, True):
        recorder = Recorder(t5.train(training), ())
        recorder.ignore([ids])
        with torch.no_grad(), FusedKernels(recorder), recorder:
            output = t5(ids, output_hidden_states=False)
        del output
        recorder.close()
        peaks[training] = recorder.record.peak_bytes / MIB
    t5.eval()
    assert peaks == {False: 92.0, True: 98.0}


def test_flops_of_the_transformer_are_59_5_linear_and_14_9_attention(
    flux: list[tuple[str, Call]],
) -> None:
    call = next(call for _, call in flux if call.component == "transformer")
    assert call.flops == pytest.approx(59.5e12 + 14.9e12, rel=0.01)


def test_a_denoising_step_is_traced_once_and_counted_28_times(flux: list[tuple[str, Call]]) -> None:
    calls = [call for _, call in flux if call.component == "transformer"]
    assert len(calls) == 28
    assert len({id(call) for call in calls}) == 1


def test_no_square_tensor_where_attention_is_fused(flux: list[tuple[str, Call]]) -> None:
    for _, call in flux:
        if call.component == "transformer":
            assert max(event.nbytes for event in call.events) < 24 * 4608 * 4608


@pytest.mark.sweep("more")
def test_consecutive_encoders_are_separate_phases(make_problem: Any) -> None:
    flux = make_problem("flux-dev", 8 * 2**30, hardware="rtx4090")
    assert [phase.name for phase in flux.phases] == [
        "encode/0:text_encoder",
        "encode/1:text_encoder_2",
        "denoise/0:transformer",
        "decode/0:vae",
    ]
    graph = graphrun.load(GRAPHS / "sdxl-tiny.yaml")
    sdxl = graphrun.estimate(graph, vram="1G", hardware="sim", inputs={"negative_prompt": "dark"})
    assert [phase.name for phase in sdxl.phases][:4] == [
        "encode/0:text_encoder",
        "encode/1:text_encoder_2",
        "encode/2:text_encoder",
        "encode/3:text_encoder_2",
    ]


def call(component: str) -> Call:
    return Call(component)


def spans(text: str) -> list[tuple[int, int]]:
    return phase_spans([("stage", call(letter)) for letter in text])


def test_a_loop_that_alternates_components_is_one_phase() -> None:
    assert spans("ab" * 10) == [(0, 20)]
    assert spans("x" + "aab" * 5 + "v") == [(0, 1), (1, 16), (16, 17)]


def test_few_alternations_are_separate_phases() -> None:
    assert spans("lgtlgt") == [(n, n + 1) for n in range(6)]


def test_consecutive_calls_are_one_phase_within_a_stage() -> None:
    assert spans("aaaa") == [(0, 4)]
    assert phase_spans([("one", call("a")), ("two", call("a"))]) == [(0, 1), (1, 2)]


def test_every_number_has_a_basis(make_problem: Any) -> None:
    problem = make_problem("flux-dev", 8 * 2**30, hardware="rtx4090")
    assert {phase.basis for phase in problem.phases} == {"traced"}
    assert {component.basis for component in problem.components} == {"graph file"}
    assert problem.hardware.basis == "data sheet"


def test_a_vae_that_only_decodes_does_not_use_its_encoder(make_problem: Any) -> None:
    problem = make_problem("flux-dev", 8 * 2**30, hardware="rtx4090")
    vae, use = problem.component("vae"), problem.phases[-1].uses[0]
    idle = [
        group.name for group, calls in zip(vae.groups, use.group_calls, strict=True) if calls == 0
    ]
    assert idle == ["encoder"]


def test_every_recorded_allocation_is_released(dry: Any) -> None:
    _, dry_run, _ = dry("flux-tiny")
    live: set[int] = set()
    for item in dry_run.recording.items:
        if not isinstance(item, MemoryEvent):
            continue
        if item.nbytes:
            assert item.key not in live
            live.add(item.key)
        else:
            live.remove(item.key)
    assert not live


def test_first_and_last_phase_of_values(make_problem: Any) -> None:
    values = {value.name: value for value in make_problem("flux-tiny", 2**30).values}
    assert (values["encode.embeds"].first_phase, values["encode.embeds"].last_phase) == (2, 2)
    assert (values["denoise.latents"].first_phase, values["denoise.latents"].last_phase) == (3, 3)
    assert values["encode.embeds"].nbytes == 64 * 96 * 2 + 512, (
        "64 tokens of 96 in bfloat16, and a pooled vector rounded up"
    )
