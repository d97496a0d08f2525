"""Pipelines on the CPU whose weights are in no file, or changed after they were loaded: these
weights stay in memory, the plan counts them, and results are those of the unattached pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign import sampled
from saved_pipelines import FileReads, as_passed, load, places, save
from stored_component import nothing_left
from test_attach import SD, seeded
from test_attach_changes import CHANGES, NAMES, inverted, new_weights, other_vae
from test_attach_lora import lora
from test_attach_pipelines import equal
from tqdm import tqdm

import graphrun
from graphrun.diffusers_.attach import Attachment
from graphrun.kernel_memory import process_bytes
from graphrun.units import MIB

pytestmark = pytest.mark.long


def attach(pipe: Any, **options: Any) -> Attachment:
    return graphrun.attach(pipe, device="cpu", memory="8G", **options)


def planned_bytes(attachment: Attachment) -> int:
    """What the last call's plan has for the whole process."""
    assert attachment.solution is not None
    problem = attachment.solution.problem
    return problem.overhead_bytes + attachment.solution.simulation.peak_bytes


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # of the loaders' bars, which start a thread
    with nothing_left():
        yield


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> FileReads:
    return FileReads(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(SD, tmp_path / "sd")


def heavy(module: torch.nn.Module) -> torch.nn.Module:
    """``module`` with 64 MiB more, which no file has."""
    module.register_buffer("ballast", torch.ones(64 * MIB, dtype=torch.uint8))
    return module


def test_a_pipeline_built_in_memory_stays_there_and_the_plan_counts_it(reads: FileReads) -> None:
    pipe, lines = SD.build(), list[str]()
    heavy(pipe.unet)
    want, previous_places = seeded(pipe), places(pipe)
    with attach(pipe, tell=lines.append) as attachment:
        for _ in range(2):
            assert equal(seeded(pipe), want)
            assert attachment.held_bytes == 0
            assert places(pipe) == previous_places
            assert planned_bytes(attachment) >= process_bytes().nbytes
    assert sum(reads.taken().values()) == 0
    assert "of vae, text_encoder, unet stay in memory" in lines[0]
    assert equal(seeded(pipe), want)


def test_a_cast_pipeline_stays_in_memory(folder: Path, reads: FileReads) -> None:
    pipe, plain = load(SD, folder), load(SD, folder).to(torch.bfloat16)
    want = seeded(plain)
    pipe.to(torch.bfloat16)
    with attach(pipe) as attachment:
        for _ in range(2):
            assert equal(seeded(pipe), want)
        assert attachment.held_bytes == 0
    assert sum(reads.taken().values()) == 0


@pytest.mark.sweep("more")
@pytest.mark.parametrize("precision", ["int8", "nf4"])
def test_a_pipeline_that_bitsandbytes_quantized_stays_in_memory(precision: str) -> None:
    pytest.importorskip("bitsandbytes")
    from test_attach_quantized import SDXL, built

    pipe, plain = built(precision), built(precision)
    want, previous_places = SDXL.call(plain, as_passed), places(pipe)
    with attach(pipe) as attachment:
        for _ in range(2):
            assert equal(SDXL.call(pipe, as_passed), want)
            assert attachment.replans == ()
            assert attachment.held_bytes == 0
            assert planned_bytes(attachment) >= process_bytes().nbytes
    assert places(pipe) == previous_places
    assert equal(SDXL.call(pipe, as_passed), want)


def test_a_component_in_memory_is_counted_from_its_first_call_on(
    folder: Path, reads: FileReads
) -> None:
    pipe, plain = load(SD, folder), load(SD, folder)
    with attach(pipe) as attachment:
        seeded(pipe)
        assert reads.taken().keys() == {"text_encoder", "unet", "vae"}
        previous_bytes = planned_bytes(attachment)
        for target in (pipe, plain):
            torch.manual_seed(9)
            target.vae = heavy(type(target.vae).from_config(target.vae.config).eval())
        want = seeded(plain)
        for number in range(2):
            assert equal(seeded(pipe), want)
            expected = {"text_encoder", "unet"} if number == 0 else set()
            assert {name for name, nbytes in reads.taken().items() if nbytes} == expected
            assert planned_bytes(attachment) >= process_bytes().nbytes
        assert planned_bytes(attachment) - previous_bytes > 64 * MIB


# Another module, which is not in the files; other numbers; another tokenizer.
ALWAYS = (other_vae, new_weights, inverted)


@pytest.mark.parametrize("change", sampled(CHANGES, ALWAYS, "changes"), ids=NAMES)
def test_a_change_between_calls_has_its_effect(folder: Path, change: Callable[[Any], None]) -> None:
    pipe, plain, prompt = load(SD, folder), load(SD, folder), "a <ship> at dusk"
    with attach(pipe, exclude=["unet"]) as attachment:
        assert equal(seeded(pipe), seeded(plain))
        for target in (plain, pipe):
            change(target)
        want = seeded(plain, prompt=prompt)
        for _ in range(2):
            assert equal(seeded(pipe, prompt=prompt), want)
            assert attachment.replans == ()
    assert attachment.held_bytes == 0
    assert equal(seeded(pipe, prompt=prompt), want)


@pytest.mark.parametrize(
    "is_attached", sampled([False, True], [True], "changes"), ids=["before", "while attached"]
)
def test_loras_are_loaded_fused_and_unloaded(folder: Path, is_attached: bool) -> None:
    pytest.importorskip("peft")
    pipe, plain = load(SD, folder), load(SD, folder)
    factors = lora(pipe, 1, 4)
    first_output = seeded(plain)

    def fuse(target: Any) -> None:
        target.load_lora_weights(dict(factors), adapter_name="first")
        target.fuse_lora(lora_scale=0.8)

    if not is_attached:
        fuse(pipe)
    fuse(plain)
    want = seeded(plain)
    with attach(pipe) as attachment:
        if is_attached:
            assert equal(seeded(pipe), first_output)
            fuse(pipe)
        for _ in range(2):
            assert equal(seeded(pipe), want)
            assert attachment.replans == ()
        for target in (plain, pipe):
            target.unfuse_lora()
            target.unload_lora_weights()
        assert equal(seeded(pipe), seeded(plain))
    assert not equal(want, first_output)


def test_a_number_written_between_calls_counts(folder: Path) -> None:
    pipe, plain = load(SD, folder), load(SD, folder)
    with attach(pipe) as attachment:
        first_output = seeded(pipe)
        for target in (plain, pipe):
            target.unet.conv_in.weight.data[0, 0, 0, 0] += 1
        want = seeded(plain)
        assert equal(seeded(pipe), want)
        assert not equal(want, first_output)
        assert attachment.solution is not None
        unet = attachment.solution.problem.component("unet")
        assert max(map(max, (v.block_bytes for v in unet.variants))) == 0
    assert equal(seeded(pipe), want)


def test_a_pipeline_is_saved_while_attached(folder: Path, tmp_path: Path) -> None:
    pipe = load(SD, folder)
    want = seeded(pipe)
    with attach(pipe, exclude=["unet"]):
        assert equal(seeded(pipe), want)
        pipe.save_pretrained(tmp_path / "twin")
        assert equal(seeded(pipe), want)
    assert equal(seeded(load(SD, tmp_path / "twin")), want)
