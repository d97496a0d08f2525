"""Calibration, and hardware profiles found by name or by card; damaged ones are ignored. No card is
needed."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graphrun.errors import InputError
from graphrun.model.hardware import Hardware
from graphrun.profile import calibrate as measuring
from graphrun.profile import hardware as devices
from graphrun.profile import hardware_profiles as profiles
from graphrun.profile.costs import kernel_seconds


def test_calibrating_the_simulated_accelerator_gives_what_it_declares(tmp_path: Path) -> None:
    hardware, figures = measuring.calibrate("sim", tmp_path, allowed_seconds=0.1)
    simulated = devices.simulated()
    for name in ("h2d_bytes_per_second", "d2h_bytes_per_second", "flops_per_second"):
        assert getattr(hardware, name) == pytest.approx(getattr(simulated, name), rel=1e-6)
    assert hardware.bidirectional == pytest.approx(0.5), "one copy engine serves both ways"
    assert hardware.copy_start_seconds == pytest.approx(0.0, abs=1e-12)
    assert (hardware.basis, hardware.device, hardware.context_bytes) == ("measured", "sim", 0)
    assert figures["disk_bytes_per_second"] > 0
    assert not list(tmp_path.iterdir()), "the file that was read is deleted"


def test_the_compute_rate_weights_products_and_attention_as_flux_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Card(measuring.Processor):
        nbytes = 100
        clock = 0.0

        def __init__(self) -> None:
            pass

        def now(self) -> float:
            return self.clock

        def copy(self, kind: str) -> None:
            self.clock += {
                "h2d": 1.0,
                "d2h": 2.0,
                "pageable": 4.0,
                "fresh pages": 8.0,
                "both": 1.25,
                "small": 5.12 * 256 + 0.5 * 256,
            }[kind]

        def compute(self, kind: str) -> float:
            self.clock += {"matmul": 1.0, "attention": 2.0, "block": 3.0, "compiled block": 2.0}[
                kind
            ]
            return 744.0

    monkeypatch.setattr(measuring, "_open", lambda kind: (devices.simulated(), Card()))
    hardware, _ = measuring.calibrate("sim", tmp_path, allowed_seconds=0.05)
    rates = (
        hardware.h2d_bytes_per_second,
        hardware.d2h_bytes_per_second,
        hardware.pageable_bytes_per_second,
        hardware.bidirectional,
    )
    assert rates == pytest.approx((100.0, 50.0, 25.0, 0.8))
    assert hardware.d2h_pageable_bytes_per_second == pytest.approx(12.5)
    assert hardware.copy_start_seconds == pytest.approx(0.5), (
        "what 512 bytes take beyond their 5.12 s"
    )
    assert hardware.flops_per_second == pytest.approx(744 / (0.595 / 0.744 + 2 * 0.149 / 0.744))
    assert hardware.compiled_gain == 0, "nobody asked for it"
    with torch._dynamo.config.patch(disable=False):
        assert measuring.compiled_gain(Card(), 0.05) == pytest.approx(1.5)


@pytest.mark.sweep("warm")
def test_what_compiling_gains_is_measured_with_the_compiler_of_the_device() -> None:
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("Inductor needs a C++ compiler for the CPU: g++ or clang++")
    target = measuring.Processor()
    assert measuring.compiled_gain(target, 0.05) > 0
    for plain, compiled in zip(
        target.blocks["block"](), target.blocks["compiled block"](), strict=True
    ):
        assert plain.isfinite().all()
        assert (
            torch.nn.functional.cosine_similarity(
                plain.flatten().float(), compiled.flatten().float(), dim=0
            )
            > 0.999
        )
    torch.compiler.reset()


def test_what_compiling_gains_is_not_measured_where_nothing_can_be_compiled(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="no compiler for the simulated accelerator: leave out --compiled"
    ):
        measuring.calibrate("sim", tmp_path, compiled=True)

    class WithoutCompiler(measuring.Processor):
        def compute(self, kind: str) -> float:
            raise torch._inductor.exc.InvalidCxxCompiler

    message = (
        r"blocks cannot be compiled here \(No working C\+\+ compiler found.*leave out --compiled"
    )
    with torch._dynamo.config.patch(disable=False), pytest.raises(InputError, match=message):
        measuring.compiled_gain(WithoutCompiler(), 0.05)
    with (
        torch._dynamo.config.patch(disable=True),
        pytest.raises(InputError, match="switched off by TORCHDYNAMO_DISABLE=1"),
    ):
        measuring.compiled_gain(measuring.Processor(), 0.05)


GB = 10**9


@pytest.mark.parametrize(
    ("initial_bytes", "final_bytes", "uuid", "context"),
    [
        ({"GPU-a": GB}, {"GPU-a": 2 * GB}, "GPU-a", 700_000_000),
        # Hidden from torch, or in another order.
        ({"GPU-a": GB, "GPU-b": 0}, {"GPU-a": GB, "GPU-b": GB}, "GPU-b", 700_000_000),
        ({"GPU-a": GB}, {"GPU-a": 2 * GB}, "GPU-", 700_000_000),  # the only card
        ({"GPU-a": GB, "GPU-b": 0}, {"GPU-a": GB, "GPU-b": GB}, "GPU-", None),
        ({"GPU-a": GB}, {"GPU-a": GB}, "GPU-a", None),  # another process ended meanwhile
        ({"GPU-a": GB}, {"GPU-a": 9 * GB}, "GPU-a", None),  # or started
        ({"GPU-a": GB}, {}, "GPU-a", None),
        ({}, {}, "GPU-a", None),
    ],
)
def test_context_bytes_are_what_the_card_itself_lost(
    initial_bytes: dict[str, int], final_bytes: dict[str, int], uuid: str, context: int | None
) -> None:
    assert measuring.context_bytes_taken(initial_bytes, final_bytes, uuid, 300_000_000) == context


@pytest.mark.sweep("more")
@pytest.mark.parametrize(
    ("assumed", "context"), [(300_000_000, 790_000_000), (900_000_000, 900_000_000)]
)
def test_context_bytes_are_measured_after_every_kind_of_kernel_and_only_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, assumed: int, context: int
) -> None:
    # when a kernel first runs
    loads = {
        "matmul": 10_000_000,
        "attention": 30_000_000,
        "convolution": 200_000_000,
        "others": 50_000_000,
    }
    sources: set[str] = set()

    class Card(measuring.Processor):
        queued: set[str] = set()

        def now(self) -> float:
            sources.update(self.queued)
            return super().now()

        def compute(self, kind: str) -> float:
            self.queued = self.queued | {kind}
            return super().compute(kind)

        def load_kernels(self) -> None:
            self.queued = self.queued | {"others"}

    def awake(kind: str) -> tuple[Hardware, Card]:
        sources.add("driver")
        return card("mine", context_bytes=assumed, kernels=None), Card()

    bytes_by_source = {"driver": 500_000_000, **loads}
    monkeypatch.setattr(measuring, "_open", awake)
    monkeypatch.setattr(measuring, "_uuid", lambda: "GPU-a")
    monkeypatch.setattr(
        measuring,
        "cards_used_bytes",
        lambda: {"GPU-a": GB + sum(bytes_by_source[source] for source in sources)},
    )
    hardware, figures = measuring.calibrate("cuda", tmp_path, allowed_seconds=0.05)
    assert hardware.context_bytes == figures["context_bytes"] == context


def test_kernels_take_what_was_measured_after_calibration() -> None:
    """The rates that an H100 reached, beside an estimate that expects other ones."""
    flops = {
        "matmul": 763e12,
        "attention": 636e12,
        "convolution": 570e12,
        "fp32 matmul": 48e12,
        "fp32 convolution": 189e12,
    }
    processor = measuring._Cuda.__new__(measuring._Cuda)
    shapes = ((4608, 3072), (3072, 12288), (1, 24, 4608, 128), (1, 256, 512, 512), (256, 256, 3, 3))
    (
        processor._left_matrix,
        processor._right_matrix,
        processor._heads,
        processor._picture,
        processor._filters,
    ) = (torch.empty(shape, dtype=torch.float16, device="meta") for shape in shapes)
    kernels = processor.kernels()
    rates = flops | {"elementwise": 2.9e12, "launch": 1 / 15e-6}
    hardware = measuring.with_kernels(devices.hardware("h100"), kernels, rates)
    for kind, rate in flops.items():
        assert kernels[kind].flops / kernel_seconds(kernels[kind], hardware) == pytest.approx(rate)


def test_without_a_card_cuda_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "detect_card", lambda: None)
    with pytest.raises(InputError, match="no CUDA device here to calibrate"):
        measuring.calibrate("cuda", tmp_path)


def card(name: str = "card", **changes: object) -> Hardware:
    return replace(devices.hardware("rtx4090"), name=name, **changes)  # type: ignore[arg-type]


def test_a_profile_is_found_by_its_name(tmp_path: Path) -> None:
    profile = card("mine", basis="measured", h2d_bytes_per_second=12.5e9)
    profiles.keep(tmp_path, profile, "geforcertx4090", {})
    assert profiles.hardware("mine", tmp_path) == profile
    assert profiles.hardware("rtx4090", tmp_path) == devices.hardware("rtx4090")
    with pytest.raises(InputError, match="did you mean 'mine'"):
        profiles.hardware("mime", tmp_path)
    with pytest.raises(InputError, match="is not known"):
        profiles.hardware("mine", None)


def test_the_newest_profile_of_the_detected_card_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "detect_card", lambda: card("geforcertx4090"))
    assert profiles.detect_card(tmp_path) == card("geforcertx4090")
    profiles.keep(tmp_path, card("other-size", capacity_bytes=5), "geforcertx4090", {})
    profiles.keep(tmp_path, card("other-card"), "a100", {})
    assert profiles.detect_card(tmp_path) == card("geforcertx4090")
    profiles.keep(tmp_path, card("here", basis="measured"), "geforcertx4090", {})
    assert profiles.detect_card(tmp_path) == card("here", basis="measured")
    monkeypatch.setattr(devices, "detect_card", lambda: None)
    assert profiles.detect_card(tmp_path) is None


@pytest.mark.parametrize("name", ["rtx4090", "sim", "", "../escape", "a b"])
def test_taken_and_invalid_profile_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="name"):
        profiles.keep(tmp_path, card(name), "card", {})
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"hardware": {"name": "x"}, "device": "d"}',
        '{"hardware": 3, "device": ""}',
    ],
)
def test_a_damaged_profile_is_ignored(tmp_path: Path, text: str) -> None:
    profiles.keep(tmp_path, card("good"), "card", {})
    (tmp_path / "profiles/bad.json").write_text(text)
    assert list(profiles.stored_profiles(tmp_path)) == ["good"]
