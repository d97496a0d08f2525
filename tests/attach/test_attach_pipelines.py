"""`attach` on pipelines of many classes under a cap below their weights: three calls, each with
equal results, within its plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers as d
import numpy as np
import pytest
import torch
from tiny_pipelines import Case, cases, checked_peak_bytes, each, picture

import graphrun
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.sim import Machine
from graphrun.solve.infeasible import Infeasible

CASES = cases()
SHARE = 0.95  # cap as a share of the weights' bytes, so that not all fit at once


def weight_bytes(pipe: Any) -> int:
    """Bytes of all distinct weights that ``pipe`` holds."""
    modules = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    tensors = {id(t): t for module in modules for t in (*module.parameters(), *module.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def arrays(value: Any) -> list[np.ndarray[Any, Any]]:
    """Every array in a pipeline's output."""
    if isinstance(value, torch.Tensor):
        return [value.detach().cpu().numpy()]
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, dict):
        return [array for item in value.values() for array in arrays(item)]
    if isinstance(value, (list, tuple)):
        return [array for item in value for array in arrays(item)]
    return [np.asarray(value)] if hasattr(value, "mode") else []


def equal(output: Any, other: Any) -> bool:
    """Whether two outputs hold the same arrays bit for bit, and at least one array."""
    pairs = list(zip(arrays(output), arrays(other), strict=True))
    return bool(pairs) and all(
        a.shape == b.shape and a.size and np.array_equal(a, b) for a, b in pairs
    )


def put_on(device: SimulatedDevice) -> Callable[[torch.Tensor], torch.Tensor]:
    """Copies a tensor among a call's arguments to ``device``, where a caller has it."""

    def put(tensor: torch.Tensor) -> torch.Tensor:
        with device.machine:
            return tensor.to("sim")

    return put


@pytest.mark.sweep("more", sample=1)
@pytest.mark.parametrize("name", each())
def test_output_peak_and_baseline(name: str) -> None:
    case: Case = CASES[name]
    pipe = case.build()
    want = case.call(pipe)
    assert all(np.isfinite(array).all() for array in arrays(want))
    device = SimulatedDevice(Machine())

    cap_bytes = int(SHARE * weight_bytes(pipe))
    with graphrun.attach(pipe, vram=cap_bytes, device=device) as attachment:
        peaks = []
        for _ in range(3):
            got = case.call(pipe, put_on(device))
            assert equal(got, want)
            del got
            peaks.append(checked_peak_bytes(attachment, device))
        assert peaks[2] == peaks[1], "steady"
        assert 0 < max(peaks) <= cap_bytes
    assert type(pipe) is case.kind
    assert equal(case.call(pipe), want)


def test_equal_calls_are_equal_problems() -> None:
    case = CASES["StableDiffusionXLAdapterPipeline"]
    pipe, inputs = case.build(), {**case.arguments(), "num_inference_steps": case.steps}
    calls = [graphrun.from_pipeline(pipe) for _ in range(3)]
    digests = [
        graphrun.estimate(call, vram="1G", ram="1G", hardware="sim", inputs=inputs).digest
        for call in calls
    ]
    assert digests == [digests[0]] * 3


@pytest.mark.sweep("more")
@pytest.mark.long
def test_a_pipeline_that_keeps_state_from_one_method_for_the_next() -> None:
    """LEdits++ inverts a picture, and its call edits that."""

    def built() -> Any:
        torch.manual_seed(0)
        scheduler = d.DPMSolverMultistepScheduler(
            beta_schedule="scaled_linear", algorithm_type="sde-dpmsolver++"
        )
        parts = {**CASES["StableDiffusionPipeline"].parts(), "scheduler": scheduler}
        return Case(d.LEditsPPPipelineStableDiffusion, "", lambda: parts, dict).build()

    def edited(pipe: Any, size: int = 32) -> Any:
        pipe.invert(
            picture(size),
            num_inversion_steps=4,
            skip=0.2,
            generator=torch.Generator().manual_seed(3),
        )
        return pipe(editing_prompt=["a cat"], use_intersect_mask=False, output_type="np").images

    pipe, want, device = built(), edited(built()), SimulatedDevice(Machine())
    cap_bytes = int(SHARE * weight_bytes(pipe))
    with graphrun.attach(pipe, vram=cap_bytes, device=device) as attachment:
        peaks = []
        for _ in range(3):
            assert equal(edited(pipe), want)
            peaks.append(checked_peak_bytes(attachment, device))
        assert peaks[2] == peaks[1], "steady"
        assert 0 < max(peaks) <= cap_bytes
    with graphrun.attach(pipe, vram="8M", device=device) as attachment:
        small = [edited(pipe), checked_peak_bytes(attachment, device)][1]
        large = [edited(pipe, 64), checked_peak_bytes(attachment, device)][1]
        assert large > small, (
            "the call has no size of its own: it is planned for the picture that was inverted last"
        )


@pytest.mark.sweep("more")
@pytest.mark.long
def test_calls_after_one_that_keeps_a_tensor_are_planned_without_the_work_it_saves() -> None:
    """Marigold's first call computes the embedding of an empty text and keeps it."""
    case, messages = CASES["MarigoldDepthPipeline"], list[str]()
    pipe, device = case.build(), SimulatedDevice(Machine())
    want = case.call(pipe)
    assert pipe.empty_text_embedding is not None
    pipe.empty_text_embedding = None
    with graphrun.attach(pipe, vram="1K", device=device), pytest.raises(Infeasible) as error_info:
        case.call(pipe)
    least_bytes = int(error_info.value.smallest_budget_bytes)
    with graphrun.attach(pipe, vram=least_bytes, device=device, tell=messages.append) as attachment:
        component_names = []
        for keeps in (False, True, True, False):
            pipe.empty_text_embedding = pipe.empty_text_embedding if keeps else None
            assert equal(case.call(pipe), want)
            assert 0 < checked_peak_bytes(attachment, device) <= least_bytes
            assert attachment.solution is not None
            component_names.append(
                {component.name for component in attachment.solution.problem.components}
            )
    assert component_names == [
        {"text_encoder", "unet", "vae"},
        {"unet", "vae"},
        {"unet", "vae"},
        {"text_encoder", "unet", "vae"},
    ]
    assert len(messages) == 2, "one dry run with the embedding, one without"


def test_a_dry_run_leaves_nothing_for_the_next_one() -> None:
    pipe = CASES["MarigoldDepthPipeline"].build()
    described, arguments = (
        graphrun.from_pipeline(pipe),
        {**CASES["MarigoldDepthPipeline"].arguments(), "num_inference_steps": 1},
    )
    first, second = (
        graphrun.estimate(described, vram="1G", ram="1G", hardware="sim", inputs=arguments)
        for _ in range(2)
    )
    assert second.digest == first.digest
    pipe.empty_text_embedding = torch.zeros(1, 2, pipe.unet.config.cross_attention_dim)
    problem = graphrun.estimate(described, vram="1G", ram="1G", hardware="sim", inputs=arguments)
    assert {part.name for part in first.components} - {
        part.name for part in problem.components
    } == {"text_encoder"}
