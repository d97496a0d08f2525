"""Every tiny reference pipeline under the smallest budget: the plain pipeline's bits, planned
bytes, nothing left behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from campaign import sampled
from whole_pipelines import TinyPipeline, pixels, planned, streamed

from graphrun.verify.simulate import simulate

NAMES = (
    "hidream-tiny",
    "cogview4-tiny",
    "wan-tiny",
    "auraflow-tiny",
    "sd3-tiny",
    "flux-schnell-tiny",
    "qwen-image-tiny",
    "hunyuan-video-tiny",
    "cogvideox-5b-tiny",
    "ltx-tiny",
    "pixart-sigma-tiny",
    "hunyuan-dit-tiny",
    "wan22-t2v-tiny",
    "sd35-large-tiny",
    "chroma-tiny",
    "sana-tiny",
)

# CogView4 and Qwen-Image pad no further than a text goes, and a plan is for the longest.
LONG = "a lighthouse at dusk, " * 64
TEXTS = {
    name: {"prompt": LONG, "negative_prompt": LONG} for name in ("cogview4-tiny", "qwen-image-tiny")
}

# A dry run counts a mask of S x S that Qwen2.5-VL makes where some text is padded; a single prompt
# has none.
MASKED = {"qwen-image-tiny": "encode/"}

# Two blocks of its decoder form one group, in which the smaller one counts as much as the larger.
UNEQUAL = {"qwen-image-tiny": 1024}


@pytest.mark.parametrize(
    "name",
    sampled(NAMES, ["wan22-t2v-tiny", "qwen-image-tiny"], "reference"),
)
def test_the_output_is_the_plain_pipelines_in_exactly_the_planned_bytes(name: str) -> None:
    whole = TinyPipeline(name, {"steps": 2, **TEXTS.get(name, {})})
    problem = whole.smallest()
    plan = planned(problem)
    assert streamed(plan)
    trace = whole.run(problem, plan)
    assert np.array_equal(pixels(trace.outputs["image"]), whole.image)
    slots = simulate(problem, plan).slots
    assert all(
        actual.peak_bytes <= slot.peak_bytes
        for actual, slot in zip(trace.slots, slots, strict=True)
    )
    highest = max(
        slot.peak_bytes for slot in slots if not slot.phase.startswith(MASKED.get(name, "-"))
    )
    assert 0 <= highest - trace.peak_bytes <= UNEQUAL.get(name, 0)
    assert trace.left_bytes == whole.device.allocated_bytes == 0


def test_a_short_prompt_takes_no_more_than_was_planned_for_the_longest() -> None:
    whole = TinyPipeline("qwen-image-tiny", {"steps": 2, "height": 32, "width": 32})
    problem = whole.smallest()
    plan = planned(problem)
    trace = whole.run(problem, plan)
    assert np.array_equal(pixels(trace.outputs["image"]), whole.image)
    slots = simulate(problem, plan).slots
    assert all(
        actual.peak_bytes <= slot.peak_bytes
        for actual, slot in zip(trace.slots, slots, strict=True)
    )


@pytest.mark.sweep("more")
def test_several_pictures_of_one_prompt_are_the_plain_pipelines() -> None:
    whole = TinyPipeline("hidream-tiny", {"steps": 1, "batch": 2, "prompt": "a"})
    problem = whole.smallest()
    images = whole.run(problem, planned(problem)).outputs["image"]
    assert len(images) == 2
    assert np.array_equal(pixels(images), whole.image)


def test_rotary_tables_come_to_the_device_once_in_a_call() -> None:
    """CogView4's are made on the host, and its code copies them there in every attention."""
    whole, call_records = TinyPipeline("cogview4-tiny", {"steps": 1}), list[tuple[str, int]]()

    def note(_: object, __: object, arguments: dict[str, Any]) -> None:
        call_records.extend(
            (table.device.type, table.allocation.key) for table in arguments["image_rotary_emb"]
        )

    blocks = list(whole.modules["transformer"].transformer_blocks)
    hooks = [block.attn1.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
    trace = whole.run(whole.problem, planned(whole.problem))
    for hook in hooks:
        hook.remove()
    assert np.array_equal(pixels(trace.outputs["image"]), whole.image)
    calls = sum(slot.calls for slot in trace.slots if slot.phase.startswith("denoise/"))
    assert (len(call_records), len(set(call_records))) == (2 * calls * len(blocks), 2 * calls)
    assert {place for place, _ in call_records} == {"sim"}
