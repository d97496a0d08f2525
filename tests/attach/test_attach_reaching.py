"""Access into a component: a last layer that calls into the first block (DiT), a pipeline that
reads a weight (ACE-Step)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
import transformers
from diffusers.models.modeling_utils import get_parameter_device
from test_attach_pipelines import equal, weight_bytes
from tiny_pipelines import cases, checked_peak_bytes, tiny

import graphrun
from graphrun import Infeasible
from graphrun.diffusers_.text_lengths import TextLengths
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.sim import Machine


def parts() -> dict[str, Any]:
    """DiT whose blocks are large compared with its embeddings, as at its real size."""
    return {
        **cases()["DiTPipeline"].parts(),
        "transformer": tiny("DiTTransformer2DModel", attention_head_dim=64),
    }


def test_a_part_of_the_first_block_that_the_last_layer_calls_stays_on_the_device() -> None:
    case = replace(cases()["DiTPipeline"], parts=parts)
    pipe, device = case.build(), SimulatedDevice(Machine())
    want = case.call(pipe)

    def put(tensor: torch.Tensor) -> torch.Tensor:
        with device.machine:
            return tensor.to("sim")

    with graphrun.attach(
        pipe, vram=int(0.9 * weight_bytes(pipe)), device=device, exclude=["transformer"]
    ) as attachment:
        assert equal(case.call(pipe, put), want)
        assert attachment.solution is not None
        assert attachment.trace is not None
        transformer = attachment.solution.problem.component("transformer")
        assert transformer.granularity == "blocks"
        assert [k.blocks for k in transformer.groups if not k.streamable] == [
            ("",),
            ("transformer_blocks.0.norm1.emb",),
        ]
        assert attachment.trace.overruns == ()


class Counting(transformers.CLIPTextModel):
    """Counts the positive numbers of its embeddings, which needs their values."""

    def forward(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        embeddings = self.get_input_embeddings()(input_ids)
        counts = torch.bincount((embeddings > 0).long().flatten())
        assert counts.sum() == embeddings.numel()
        return super().forward(input_ids, *args, **kwargs)


def test_a_component_that_needs_tensor_values_is_traced_on_the_cpu_with_a_warning() -> None:
    pipe, device = cases()["StableDiffusionPipeline"].build(), SimulatedDevice(Machine())
    pipe.text_encoder.__class__ = Counting
    want = cases()["StableDiffusionPipeline"].call(pipe)
    with graphrun.attach(pipe, vram=int(0.9 * weight_bytes(pipe)), device=device):
        with pytest.warns(
            RuntimeWarning,
            match=(
                r"text_encoder\S* needs tensor values.*on the CPU, with all \S+ \S+ of its "
                r"weights"
            ),
        ):
            got = cases()["StableDiffusionPipeline"].call(pipe)
        assert equal(got, want)


class Looking(diffusers.StableDiffusionPipeline):
    """Keeps a view of a weight of its encoder, taken while that is on the device, until the end of
    the call."""

    def encode_prompt(self, *args: Any, **kwargs: Any) -> Any:
        embeds = super().encode_prompt(*args, **kwargs)
        self.bias_view = self.text_encoder.encoder.layers[0].mlp.fc1.bias[:1]
        return embeds


def test_a_weight_that_the_pipeline_reads_is_a_copy_that_keeps_no_block_on_the_device() -> None:
    case = replace(cases()["StableDiffusionPipeline"], kind=Looking)
    pipe, device = case.build(), SimulatedDevice(Machine())
    want = case.call(pipe)
    with graphrun.attach(pipe, vram=2 * weight_bytes(pipe), device=device) as attachment:
        assert equal(case.call(pipe), want)
        assert checked_peak_bytes(attachment, device)


class Following(diffusers.StableDiffusionPipeline):
    """Computes on the device of a component's first weight, as Cosmos 3 does."""

    def encode_prompt(self, prompt: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        return super().encode_prompt(prompt, get_parameter_device(self.unet), *args, **kwargs)


def test_a_pipeline_may_compute_where_the_first_weight_of_a_component_says() -> None:
    case = replace(cases()["StableDiffusionPipeline"], kind=Following)
    pipe, device = case.build(), SimulatedDevice(Machine())
    want = case.call(pipe)
    with graphrun.attach(pipe, vram=int(0.9 * weight_bytes(pipe)), device=device) as attachment:
        assert equal(case.call(pipe), want)
        assert checked_peak_bytes(attachment, device)


@pytest.mark.long
def test_a_longer_text_is_planned_before_its_call_where_texts_are_not_padded_to_one_length() -> (
    None
):
    case, inputs = cases()["QwenImagePipeline"], list[Any]()
    pipe, device = case.build(), SimulatedDevice(Machine())
    pipe.text_encoder.register_forward_pre_hook(lambda module, *_: inputs.append(module))
    arguments = {**case.arguments(), "num_inference_steps": 1}
    with graphrun.attach(pipe, vram="6M", device=device) as attachment:
        pipe(**arguments)
        assert attachment.replans == ()
        pipe(**{**arguments, "prompt": "many ships at sea at dusk"})
        assert attachment.replans == ()
        inputs.clear()
        with pytest.raises(
            Infeasible,
            match=r'call/0:text_encoder .* vram="[0-9.]+M": raise the VRAM budget from 6M',
        ):
            pipe(**{**arguments, "prompt": "a very long text of many words " * 20})
        assert pipe.text_encoder not in inputs, "the dry run has a copy on meta"


def test_ids_that_enter_a_component_at_a_texts_own_length_make_texts_matter() -> None:
    pipe = SimpleNamespace(tokenizer=tiny("tokenizer"))
    fixed_lengths, variable_lengths = TextLengths(), TextLengths()
    with fixed_lengths.watch(pipe):
        padded = pipe.tokenizer(
            "a ship", padding="max_length", max_length=12, truncation=True, return_tensors="pt"
        )
        # counted, to warn of a text that is cut
        pipe.tokenizer(["a ship"], padding="longest", return_tensors="pt")
        fixed_lengths.add_inputs((padded["input_ids"],))
    with variable_lengths.watch(SimpleNamespace(processor=pipe)):
        variable_lengths.add_inputs(
            {"input_ids": pipe.tokenizer("a ship", padding=True, return_tensors="pt")["input_ids"]}
        )
    assert (fixed_lengths.matter, variable_lengths.matter) == (False, True)
    assert type(pipe.tokenizer) is type(tiny("tokenizer"))


def test_embeddings_that_a_mask_cuts_to_a_texts_length_make_texts_matter() -> None:
    with Machine() as machine:
        cut, whole, scheduled = TextLengths(), TextLengths(), TextLengths()
        for lengths in (cut, whole, scheduled):
            with lengths.watch(pipe := SimpleNamespace(tokenizer=tiny("tokenizer"))):
                encoding = pipe.tokenizer(
                    "a ship",
                    padding="max_length",
                    max_length=12,
                    truncation=True,
                    return_tensors="pt",
                )
            mask, embeddings = (
                encoding["attention_mask"][0].bool().to("sim"),
                torch.ones(12, 7).to("sim"),
            )
            machine.on_cut = lengths.add_masks
            cut_embeddings = embeddings[mask]
            # no mask of a text
            torch.ones(5, 7).to("sim")[torch.ones(5, dtype=torch.bool).to("sim")]
            lengths.add_inputs(
                ([{cut: cut_embeddings, whole: embeddings, scheduled: torch.ones(5, 7)}[lengths]],)
            )
    assert 0 < len(cut_embeddings) < 12
    assert len(cut_embeddings) != 5
    assert (cut.matter, whole.matter, scheduled.matter) == (True, False, False)


def test_a_length_that_is_an_earlier_texts_own_is_no_fixed_one() -> None:
    lengths, pipe = TextLengths(), SimpleNamespace(tokenizer=tiny("tokenizer"))
    with lengths.watch(pipe):
        ids = pipe.tokenizer("a ship", padding=True, return_tensors="pt")["input_ids"]
        pipe.tokenizer("", padding="max_length", max_length=ids.shape[-1], return_tensors="pt")
        lengths.add_inputs((ids,))
    assert lengths.matter


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("prefix", "suffix"), [((), (1, 2)), ((3, 4), ()), ((3,), (1, 2))])
def test_ids_with_further_ids_around_them_make_texts_matter(
    prefix: tuple[int, ...], suffix: tuple[int, ...], rows: int
) -> None:
    pipe = SimpleNamespace(tokenizer=tiny("tokenizer"))
    extended, unrelated, padded = TextLengths(), TextLengths(), TextLengths()
    for lengths in (extended, unrelated, padded):
        with lengths.watch(pipe):
            ids = pipe.tokenizer("a ship")["input_ids"]
        unrelated_ids = [id_ + 1 for id_ in ids]
        row = [*prefix, *(unrelated_ids if lengths is unrelated else ids), *suffix]
        if lengths is padded:
            lengths.add_lengths({len(row)}, is_padded=True)
        lengths.add_inputs((torch.tensor(row if rows == 1 else [row, row]),))
    assert (extended.matter, unrelated.matter, padded.matter) == (True, False, False)


class Inspecting(diffusers.StableDiffusionPipeline):
    """Looks at the dtypes of all weights of its UNet, as Cosmos 3 does."""

    def encode_prompt(self, *args: Any, **kwargs: Any) -> Any:
        weights = [getattr(layer, "weight", None) for layer in self.unet.modules()]
        self.dtypes = {weight.dtype for weight in weights if isinstance(weight, torch.Tensor)}
        return super().encode_prompt(*args, **kwargs)


def test_weights_whose_dtypes_are_read_are_not_copied() -> None:
    peaks = []
    for kind in (diffusers.StableDiffusionPipeline, Inspecting):
        case = replace(cases()["StableDiffusionPipeline"], kind=kind)
        pipe, device = case.build(), SimulatedDevice(Machine())
        want = case.call(pipe)
        with graphrun.attach(pipe, vram=2 * weight_bytes(pipe), device=device) as attachment:
            assert equal(case.call(pipe), want)
            peaks.append(attachment.solution.simulation.slots)
    assert pipe.dtypes == {torch.float32}
    assert [slot.peak_bytes for slot in peaks[0]] == [slot.peak_bytes for slot in peaks[1]]
