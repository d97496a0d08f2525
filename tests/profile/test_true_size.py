"""Every reference graph at its true size, without weights: FLOPs of a denoising step compared with
a formula from the published sizes, the number of calls, and no memory that fused attention would
not use."""

from __future__ import annotations

from typing import Any

import pytest
from campaign import sampled

from graphrun.profile.recording import Call


def linear(tokens: int, *weights: float) -> float:
    return 2.0 * tokens * sum(weights)


def attention(queries: int, keys: int, width: int) -> float:
    return 4.0 * queries * keys * width


def joint(width: int, image: int, text: int, layers: int) -> float:
    """Blocks in which images and texts attend to each other, with a feed-forward of four times the
    width: 12 width**2 for each token."""
    tokens = image + text
    return layers * (linear(tokens, 12 * width**2) + attention(tokens, tokens, width))


def crossed(width: int, inner: int, tokens: int, text: int, source: int, layers: int) -> float:
    """Blocks with self-attention of an image's tokens and cross-attention to a text of width
    ``source``."""
    self_attention = linear(tokens, 6 * width**2, 2 * width * inner) + attention(
        tokens, tokens, width
    )
    return layers * (
        self_attention + linear(text, 2 * width * source) + attention(tokens, text, width)
    )


def hidream() -> float:
    """A token passes the shared expert and two of four; texts are T5, Llama's last layer, and one
    more of its layers per block."""
    d, expert, shared, image, text = 2560, 6912, 3584, 4096, 3 * 128
    mixture = 3 * d * (2 * expert + shared)
    double = linear(image, 4 * d**2, mixture) + linear(text, 4 * d**2, 3 * d * expert)
    single = linear(image + text, 4 * d**2, mixture)
    return 16 * double + 32 * single + 48 * attention(image + text, image + text, d)


def auraflow() -> float:
    d, inner, tokens = 3072, 8192, 4096 + 256 + 8
    return 36 * (linear(tokens, 4 * d**2, 3 * d * inner) + attention(tokens, tokens, d))


# FLOPs of one call, the batch apart, and calls for each step: guidance in one batch of two, or in
# two calls.
STEPS = {
    "hidream": (2 * hidream(), 1),
    "cogview4": (joint(4096, 64 * 64, 1024, 28), 2),
    "wan-14b": (crossed(5120, 13824, 21 * 30 * 52, 512, 5120, 40), 2),
    "auraflow": (2 * auraflow(), 1),
    "sd3": (2 * joint(1536, 64 * 64, 77 + 256, 24), 1),
    "flux-schnell": (joint(3072, 64 * 64, 256, 19 + 38), 1),
    "qwen-image": (joint(3072, 83 * 83, 512, 60), 2),
    "hunyuan-video": (joint(3072, 33 * 45 * 80, 256, 20 + 40), 1),
    "cogvideox-5b": (2 * joint(3072, 13 * 30 * 45, 226, 42), 1),
    "ltx": (2 * crossed(2048, 8192, 21 * 16 * 22, 128, 2048, 28), 1),
    "pixart-sigma": (2 * crossed(1152, 4608, 64 * 64, 300, 1152, 28), 1),
    "hunyuan-dit": (
        2 * (crossed(1408, 6144, 64 * 64, 77 + 256, 1024, 40) + 20 * linear(64 * 64, 2 * 1408**2)),
        1,
    ),
}


@pytest.fixture(scope="module", params=sampled(STEPS, ["ltx", "sd3"], "graphs"))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def calls(dry: Any, name: str, component: str) -> list[Call]:
    return [call for _, call in dry(name)[1].recording.entries() if call.component == component]


@pytest.mark.sweep("more")
def test_flops_of_a_step_match_the_formula(dry: Any, name: str) -> None:
    expected, each_step = STEPS[name]
    traced_calls = calls(dry, name, "transformer")
    assert len(traced_calls) == each_step * dry(name)[2]["steps"]
    for call in traced_calls[:2]:
        assert call.flops == pytest.approx(expected, rel=0.03)


def test_every_component_is_entered_and_mostly_streamable(dry: Any, name: str) -> None:
    graph, dry_run, _ = dry(name)
    assert {call.component for _, call in dry_run.recording.entries()} == set(graph.components)
    for component in ("text_encoder", "transformer"):
        profile = dry_run.profiles[component]
        nbytes = [
            len(group.blocks) * size
            for group, size in zip(profile.groups, profile.block_bytes, strict=True)
        ]
        streamable = sum(
            total for group, total in zip(profile.groups, nbytes, strict=True) if group.streamable
        )
        assert streamable > 0.6 * sum(nbytes)


def test_the_activation_of_a_step_is_linear_in_tokens(dry: Any, name: str) -> None:
    """Ten to fifty vectors of the model's width are live per token, in its dtype: nothing is
    quadratic in the tokens."""
    call = calls(dry, name, "transformer")[0]
    graph, _, inputs = dry(name)
    config = graph.components["transformer"].config
    width = config["num_attention_heads"] * config["attention_head_dim"]
    pixels = inputs["height"] * inputs["width"] * inputs.get("frames", 1)
    assert call.peak_bytes < 100 * 2 * width * pixels / 256
