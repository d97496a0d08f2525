"""Pipelines that `from_pretrained` maps from files, attached to the CPU: the bits of the unattached
pipeline, few reads, and nothing left."""

from __future__ import annotations

import copy
import gc
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign import sampled
from saved_pipelines import FileReads, as_passed, load, places, save
from stored_component import nothing_left, open_files
from test_attach_pipelines import equal, weight_bytes
from tiny_pipelines import Case, cases
from tqdm import tqdm

import graphrun
from graphrun.diffusers_.attach import Attachment
from graphrun.errors import GraphrunError, InputError
from graphrun.kernel_memory import process_bytes
from graphrun.modules.mapped import file_mappings
from graphrun.profile import hardware, hardware_profiles
from graphrun.runtime.devices import cpu
from graphrun.runtime.devices.cpu import CpuDevice
from graphrun.solve.infeasible import Infeasible
from graphrun.units import GIB, MIB, round_up

pytestmark = pytest.mark.long
FLUX: Case = cases()["FluxPipeline"]
SDXL: Case = cases()["StableDiffusionXLPipeline"]
# what denoises
DENOISERS = {
    "FluxPipeline": "transformer",
    "StableDiffusionXLPipeline": "unet",
    "StableDiffusionXLPipeline-float16": "unet",
    "StableDiffusion3Pipeline": "transformer",
    "CogView4Pipeline": "transformer",
    "WanPipeline": "transformer",
}


def attach(pipe: Any, **options: Any) -> Attachment:
    return graphrun.attach(pipe, **{"device": "cpu", "memory": "8G", **options})


def call(case: Case, pipe: Any) -> Any:
    return case.call(pipe, as_passed)


def device_bytes() -> int:
    """Of weights and ring buffers of all attachments."""
    gc.collect()
    return cpu._arenas().nbytes("device")


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # of the loaders' bars, which start a thread
    with nothing_left():
        yield
    assert device_bytes() == 0


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> FileReads:
    return FileReads(monkeypatch)


@pytest.fixture
def flux(tmp_path: Path) -> Any:
    return load(FLUX, save(FLUX, tmp_path / "flux"))


@pytest.mark.parametrize(
    "name",
    sampled(DENOISERS, ["FluxPipeline", "StableDiffusionXLPipeline-float16"], "pipelines"),
)
def test_a_saved_pipeline_gives_the_same_bits_and_reads_only_what_did_not_stay(
    name: str, tmp_path: Path, reads: FileReads
) -> None:
    case, denoiser = cases()[name], DENOISERS[name]
    dtype = getattr(torch, name.partition("-")[2] or "float32")
    save(case, tmp_path)
    pipe, plain = (load(case, tmp_path, dtype=dtype) for _ in range(2))
    want, previous_places, mappings = call(case, plain), places(pipe), file_mappings()
    streamed_bytes = 0
    # SDXL casts its VAE from fp16 to fp32 and back in each call, so the VAE is in no file any more
    is_cast = dtype == torch.float16
    for exclude in ([], [denoiser]):
        with attach(pipe, exclude=exclude) as attachment:
            for number in range(3):
                assert equal(call(case, pipe), want)
                assert attachment.replans == ()
                assert attachment.trace is not None
                assert attachment.trace.overruns == ()
                assert device_bytes() == attachment.held_bytes > 0
                assert is_cast or places(pipe) == previous_places, "the mapped ones"
                nbytes = reads.taken()
                if number == 0:
                    assert sum(nbytes.values()) > 0.9 * _stored_bytes(tmp_path)
                elif not exclude:
                    assert sum(nbytes.values()) == 0
                else:
                    assert nbytes.keys() == {denoiser}
                    assert nbytes[denoiser] == (streamed_bytes or nbytes[denoiser])
                    streamed_bytes = nbytes[denoiser]
        assert device_bytes() == 0
        assert is_cast or (places(pipe), file_mappings()) == (previous_places, mappings)
        assert type(pipe) is case.kind
        assert equal(call(case, pipe), want)


def _stored_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def test_an_encoders_large_table_stays_mapped(tmp_path: Path, reads: FileReads) -> None:
    """Its rows are looked up in the mapping, as without graphrun; the other weights are read."""
    case = cases()["WanPipeline"]
    pipe = case.build()
    config = copy.deepcopy(pipe.text_encoder.config)
    config.vocab_size = 40 * MIB // (4 * config.d_model)
    pipe.register_modules(text_encoder=type(pipe.text_encoder)(config).eval())
    pipe.save_pretrained(tmp_path)
    pipe = load(case, tmp_path)
    want, places_before = call(case, pipe), places(pipe)
    with attach(pipe) as attachment:
        for _ in range(2):
            assert equal(call(case, pipe), want)
        encoder_bytes = sum(tensor.nbytes for tensor in pipe.text_encoder.parameters())
        assert encoder_bytes > 40 * MIB
        assert 0 < reads.taken()["text_encoder"] < encoder_bytes - 39 * MIB
        assert attachment.trace is not None
        assert attachment.trace.overruns == ()
        assert places(pipe) == places_before
    assert equal(call(case, pipe), want)


@pytest.mark.parametrize("memory", [None, "auto"])
def test_without_a_size_the_budget_is_what_the_process_takes_and_what_is_left(
    flux: Any, monkeypatch: pytest.MonkeyPatch, memory: str | None
) -> None:
    monkeypatch.setattr(hardware, "host_ram_bytes", lambda: GIB)
    taken_bytes = process_bytes().nbytes
    with attach(flux, memory=memory) as attachment:
        whole_bytes = attachment._limits.budget_bytes / 0.95
    assert whole_bytes == pytest.approx(GIB + taken_bytes, abs=64 * MIB)


@pytest.mark.parametrize(
    "name", sampled(["FluxPipeline", "StableDiffusionXLPipeline"], ["FluxPipeline"], "pipelines")
)
def test_at_the_minimum_the_bits_are_the_same_and_below_it_the_minimum_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # equal for both attachments: it is measured in steps, and the test's own process grows
    context_bytes = round_up(process_bytes().nbytes, MIB) + 128 * MIB
    monkeypatch.setattr(CpuDevice, "measured_context", lambda _: context_bytes)
    case = cases()[name]
    pipe = load(case, save(case, tmp_path))
    want = call(case, pipe)
    with attach(pipe, memory=context_bytes), pytest.raises(Infeasible) as error_info:
        call(case, pipe)
    text = str(error_info.value)
    assert text.startswith("nothing fits: the process itself takes ")
    assert re.search(r'Do one of: memory="[\d.]+M": raise the memory budget from [\d.]+M', text)
    minimum_bytes = error_info.value.smallest_budget_bytes
    assert context_bytes < minimum_bytes
    with attach(pipe, memory=minimum_bytes) as attachment:
        for _ in range(2):
            assert equal(call(case, pipe), want)
            assert attachment.held_bytes < weight_bytes(pipe)
    with attach(pipe, memory=minimum_bytes - 4096), pytest.raises(Infeasible):
        call(case, pipe)


def test_sharded_files(tmp_path: Path, reads: FileReads) -> None:
    save(FLUX, tmp_path, max_shard_size="100KB")
    assert len(list((tmp_path / "transformer").glob("*.safetensors"))) > 2
    pipe = load(FLUX, tmp_path)
    want = call(FLUX, pipe)
    with attach(pipe, exclude=["transformer"]) as attachment:
        assert equal(call(FLUX, pipe), want)
        assert sum(reads.taken().values()) > 0.9 * _stored_bytes(tmp_path)
        assert equal(call(FLUX, pipe), want)
        assert reads.taken().keys() == {"transformer"}
        assert attachment.replans == ()


def test_shared_parameters_stay_shared(flux: Any) -> None:
    encoder = flux.text_encoder_2
    assert encoder.shared.weight is encoder.encoder.embed_tokens.weight
    addresses = set[int]()

    def look(*_: Any) -> None:
        assert encoder.shared.weight is encoder.encoder.embed_tokens.weight
        addresses.add(encoder.shared.weight.data_ptr())

    hook = encoder.register_forward_hook(look)
    want = call(FLUX, flux)
    with attach(flux):
        assert equal(call(FLUX, flux), want)
    hook.remove()
    assert len(addresses - {0}) == 2, "mapped, and loaded; the dry run's are nowhere"
    assert encoder.shared.weight is encoder.encoder.embed_tokens.weight


@pytest.mark.sweep("more")
@pytest.mark.parametrize("is_shared", [False, True], ids=["budgets apart", "one budget"])
def test_two_pipelines_of_the_same_files(tmp_path: Path, reads: FileReads, is_shared: bool) -> None:
    save(FLUX, tmp_path)
    pipes = [load(FLUX, tmp_path) for _ in range(2)]
    want = call(FLUX, pipes[0])
    budget: dict[str, Any] = (
        {"memory": None, "budget": graphrun.Budget(memory="8G")} if is_shared else {}
    )
    attachments = [attach(pipe, **budget) for pipe in pipes]
    for number in range(4):
        assert equal(call(FLUX, pipes[number % 2]), want)
        assert (sum(reads.taken().values()) > 0) == (number < 2)
    attachments[0].detach()
    assert attachments[0].held_bytes == 0
    assert equal(call(FLUX, pipes[0]), want)
    assert equal(call(FLUX, pipes[1]), want)
    assert sum(reads.taken().values()) == 0
    attachments[1].detach()


def test_components_that_two_pipelines_share(flux: Any, reads: FileReads) -> None:
    import diffusers

    twin = diffusers.FluxPipeline(**flux.components)
    twin.set_progress_bar_config(disable=True)
    want = call(FLUX, flux)
    with attach(flux), attach(twin):
        for number, pipe in enumerate((flux, twin, flux)):
            assert equal(call(FLUX, pipe), want)
            assert (sum(reads.taken().values()) > 0) == (number == 0)


@pytest.mark.parametrize(
    "error", sampled([KeyboardInterrupt, ValueError], [KeyboardInterrupt], "pipelines")
)
def test_an_error_in_a_call_leaves_nothing_and_the_next_call_works(
    flux: Any, error: type[BaseException]
) -> None:
    want, previous_places = call(FLUX, flux), places(flux)

    def fail(*_: Any) -> Any:
        raise error("stop")

    with attach(flux, exclude=["transformer"]):
        for _ in range(2):
            with pytest.raises(error):
                flux("a ship", height=16, width=16, callback_on_step_end=fail)
            assert device_bytes() == 0
            assert places(flux) == previous_places
            assert all(thread.name != "process-peak" for thread in threading.enumerate())
            assert equal(call(FLUX, flux), want)


def test_an_error_of_a_read_leaves_nothing_and_the_next_call_works(
    flux: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    want, previous_places, files = call(FLUX, flux), places(flux), open_files()
    with attach(flux, exclude=["transformer"]):
        assert equal(call(FLUX, flux), want)
        with monkeypatch.context() as patch:
            count = [0]

            def failing(file: Any, view: memoryview, offset: int) -> int:
                count[0] += 1
                if count[0] == 5:
                    raise OSError(5, "Input/output error")
                return read_at(file, view, offset)

            from graphrun.runtime import direct_reads

            read_at = direct_reads.read_at
            patch.setattr(direct_reads, "read_at", failing)
            with pytest.raises(GraphrunError, match="Input/output error"):
                call(FLUX, flux)
        assert count[0] >= 5
        assert device_bytes() == 0
        assert places(flux) == previous_places
        assert open_files() == files
        assert equal(call(FLUX, flux), want)


@pytest.mark.filterwarnings("error::RuntimeWarning")  # the dry run computes nothing
def test_a_callers_tensors_generators_and_callbacks(flux: Any) -> None:
    """All on the CPU, where the weights are too: a caller's tensors stay the caller's."""
    generator = torch.Generator().manual_seed(5)
    latents = torch.randn(1, 16, 16, generator=generator)
    values = {
        "prompt_embeds": torch.randn(1, 16, 32, generator=generator),
        "pooled_prompt_embeds": torch.randn(1, 32, generator=generator),
    }
    steps: list[torch.Tensor] = []

    def halve(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        steps.append(kwargs["latents"])
        return {"latents": kwargs["latents"] / 2}

    def output(seed: int, latents: torch.Tensor | None) -> Any:
        return flux(
            **values,
            latents=latents,
            height=16,
            width=16,
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(seed),
            callback_on_step_end=halve,
            output_type="pt",
        ).images

    copies = {name: tensor.clone() for name, tensor in values.items()}
    latents_copy = latents.clone()
    want = [output(3, None), output(4, latents), [step.clone() for step in steps]]
    steps.clear()
    with attach(flux, exclude=["transformer"]) as attachment:
        got = [output(3, None), output(4, latents)]
        assert attachment.replans == ()
    # after `detach`, outputs and steps are still the caller's
    assert equal([*got, steps], want)
    assert torch.equal(latents, latents_copy)
    assert all(torch.equal(values[name], copies[name]) for name in copies)


def test_methods_and_components_called_by_themselves(flux: Any) -> None:
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    latents = latents[:, : flux.vae.config.latent_channels]

    @torch.no_grad()
    def outputs() -> Any:
        embeds = flux.encode_prompt("a ship", "two ships", max_sequence_length=16)
        table = flux.text_encoder_2.get_input_embeddings()(torch.tensor([[1, 2]]))
        return [*embeds, table, flux.vae.decode(latents).sample]

    want = outputs()
    with attach(flux):
        assert equal(outputs(), want)
        got = outputs()
    assert equal(got, want)


def test_after_another_file_is_in_its_place_a_call_is_refused(flux: Any, tmp_path: Path) -> None:
    file = tmp_path / "flux" / "transformer" / "diffusion_pytorch_model.safetensors"
    want = call(FLUX, flux)
    with attach(flux, exclude=["transformer"]):
        assert equal(call(FLUX, flux), want)
        content = file.read_bytes()
        file.unlink()
        file.write_bytes(content)
        with pytest.raises(InputError, match="changed or deleted after the pipeline was attached"):
            call(FLUX, flux)
        assert device_bytes() == 0
    assert equal(call(FLUX, flux), want), "its own mapping is that of the old file"


def test_the_report_has_the_words_of_one_memory(flux: Any) -> None:
    with attach(flux, exclude=["transformer"]) as attachment:
        call(FLUX, flux)
        text = attachment.report()
    for words in ("memory 8.00 GiB, ", "not all weights are resident: "):
        assert words in text
    for words in ("card", "VRAM", "RAM ", "device"):
        assert words not in text


def test_without_a_card_the_error_says_what_to_type(
    flux: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware_profiles, "detect_card", lambda *_: None)
    for options in ({}, {"vram": "8G"}, {"device": "cuda"}):
        with pytest.raises(InputError, match="in Python device='cpu', memory='8G'"):
            graphrun.attach(flux, **options)
