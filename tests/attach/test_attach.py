"""`attach` beyond a single call: other calls and arguments, calls that leave their plan, bad input,
detaching."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, EulerDiscreteScheduler
from test_attach_pipelines import equal, weight_bytes
from tiny_pipelines import PROMPT, Case, cases
from torch import nn

import graphrun
from graphrun.diffusers_.attach import Attachment
from graphrun.diffusers_.dry_call import ProbeError
from graphrun.errors import InputError
from graphrun.host_ram import host_ram_bytes
from graphrun.model.plan import Load, Stream
from graphrun.model.problem import Problem
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.sim import Machine
from graphrun.solve.infeasible import Infeasible
from graphrun.trace import SlotTrace
from graphrun.units import round_up

SD: Case = cases()["StableDiffusionPipeline"]
FLUX: Case = cases()["FluxPipeline"]


@dataclass
class Attached:
    pipe: Any
    device: SimulatedDevice
    attachment: Attachment

    def seeded(self, seed: int = 3, **arguments: Any) -> Any:
        return seeded(self.pipe, seed, **arguments)


def seeded(pipe: Any, seed: int = 3, **arguments: Any) -> Any:
    usual = {"height": 16, "width": 16, "num_inference_steps": 2, "output_type": "np"}
    generator = torch.Generator().manual_seed(seed)
    return pipe(**{"prompt": PROMPT, **usual, **arguments}, generator=generator).images


def problem_of(attachment: Attachment) -> Problem:
    """That of the last call, whose plan depends on what the call found on the device, too."""
    assert attachment.solution is not None
    return attachment.solution.problem


@pytest.fixture
def sd() -> Iterator[Attached]:
    pipe, device = SD.build(), SimulatedDevice(Machine())
    with graphrun.attach(pipe, vram=int(0.95 * weight_bytes(pipe)), device=device) as attachment:
        yield Attached(pipe, device, attachment)


@pytest.mark.sweep("more")
def test_one_plan_serves_all_texts_and_seeds_and_another_size_gets_its_own(sd: Attached) -> None:
    plain = SD.build()
    assert equal(sd.seeded(), seeded(plain))
    first = problem_of(sd.attachment)
    assert equal(
        sd.seeded(7, prompt="two ships in a storm"), seeded(plain, 7, prompt="two ships in a storm")
    )
    assert problem_of(sd.attachment) is first
    assert equal(sd.seeded(guidance_scale=5.0), seeded(plain, guidance_scale=5.0))
    assert problem_of(sd.attachment) is first, (
        "it has a dry run of its own, which gives the same problem"
    )
    assert equal(sd.seeded(height=24), seeded(plain, height=24))
    assert problem_of(sd.attachment) is not first
    assert equal(sd.seeded(guidance_scale=1.0), seeded(plain, guidance_scale=1.0))
    assert equal(sd.seeded(num_images_per_prompt=2), seeded(plain, num_images_per_prompt=2))
    assert sd.attachment.replans == ()
    assert sd.device.allocated_bytes == sd.attachment.held_bytes


def test_encoding_alone_uses_the_encoder_alone_and_its_results_serve_as_arguments(
    sd: Attached,
) -> None:
    peaks = []
    for _ in range(2):
        embeds, negative = sd.pipe.encode_prompt(PROMPT, sd.pipe.device, 1, True)
        assert embeds.device.type == "sim"
        assert sd.attachment.trace is not None
        peaks.append(sd.attachment.trace.peak_bytes)
        assert {event.component for event in sd.attachment.trace.events} == {"text_encoder"}
        held_bytes = sd.device.allocated_bytes - sd.attachment.held_bytes
        assert held_bytes == sum(
            round_up(t.numel() * t.element_size(), 512) for t in (embeds, negative)
        )
        if len(peaks) == 1:
            del embeds, negative
            assert sd.device.allocated_bytes == sd.attachment.held_bytes
    assert peaks[0] == peaks[1]
    image = sd.seeded(prompt=None, prompt_embeds=embeds, negative_prompt_embeds=negative)
    assert equal(image, seeded(SD.build()))
    assert sd.device.allocated_bytes == held_bytes + sd.attachment.held_bytes


def test_a_component_called_directly_is_planned_too(sd: Attached) -> None:
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    want = SD.build().vae.decode(latents).sample
    with sd.device.machine:
        device_latents = latents.to("sim")
    got = sd.pipe.vae.decode(device_latents).sample
    assert torch.equal(got.cpu(), want)
    del got, device_latents
    assert sd.device.allocated_bytes == sd.attachment.held_bytes


def test_an_entry_that_the_dry_run_lacked_is_planned_when_it_comes(sd: Attached) -> None:
    """The dry run has no callback; in the run it decodes, which the plan does not have."""
    plain = SD.build()

    def look(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        step_latents.append(pipe.vae.decode(values["latents"]).sample.cpu())
        return values

    step_latents: list[torch.Tensor] = []
    want = seeded(plain, callback_on_step_end=look), list(step_latents)
    step_latents.clear()
    got = sd.seeded(callback_on_step_end=look)
    assert equal((got, step_latents), want)
    assert sd.attachment.replans[0] == "vae.decode"
    assert sd.device.allocated_bytes == sd.attachment.held_bytes
    report = sd.attachment.report()
    assert "planned again at vae.decode" in report
    assert report.endswith("\nthe run stayed within the planned memory; left on the device: 0 B")
    assert sd.attachment.summary()["verdict"] == "the run stayed within the planned memory"


def test_a_call_that_takes_more_than_planned_warns_and_the_report_says_it(
    sd: Attached, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem_for = Attachment.problem

    def lowered(*args: Any, **kwargs: Any) -> Problem:
        problem = problem_for(*args, **kwargs)
        phases = (replace(phase, first_bytes=phase.first_bytes // 2) for phase in problem.phases)
        return replace(problem, phases=tuple(phases))

    monkeypatch.setattr(Attachment, "problem", lowered)
    for _ in range(2):  # a first call, and one that finds weights on the device
        with pytest.warns(
            RuntimeWarning, match="the run took more memory than planned: .* instead of"
        ):
            sd.seeded()
    assert "the run took more memory than planned: " in sd.attachment.report()
    assert "the run took more memory than planned: " in sd.attachment.summary()["verdict"]
    assert not sd.attachment.summary()["measured"]["kept_plan"]


def test_another_scheduler_and_tiling_get_plans_of_their_own(sd: Attached) -> None:
    sd.seeded()
    first = problem_of(sd.attachment)
    plain = SD.build()
    for pipe in (plain, sd.pipe):
        pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)
        pipe.vae.enable_tiling()
    assert equal(sd.seeded(), seeded(plain))
    assert problem_of(sd.attachment) is not first
    assert sd.attachment.replans == ()


def test_the_random_state_of_the_process_and_of_generators_is_the_calls_own(sd: Attached) -> None:
    torch.manual_seed(5)
    plain = SD.build()
    torch.manual_seed(5)
    want = (
        plain(PROMPT, height=16, width=16, num_inference_steps=2, output_type="np").images,
        torch.rand(1),
    )
    torch.manual_seed(5)
    got = (
        sd.pipe(PROMPT, height=16, width=16, num_inference_steps=2, output_type="np").images,
        torch.rand(1),
    )
    assert equal(got, want)


@pytest.mark.sweep("more")
def test_a_small_budget_streams_and_a_smaller_one_is_refused_with_the_minimum() -> None:
    pipe = FLUX.build()
    want = FLUX.call(pipe)
    with graphrun.attach(pipe, vram="1K", device="sim"), pytest.raises(Infeasible) as error_info:
        FLUX.call(pipe)
    with graphrun.attach(
        pipe, vram=error_info.value.smallest_budget_bytes, device="sim"
    ) as attachment:
        assert equal(FLUX.call(pipe), want)
        assert attachment.solution is not None
        streamed = {
            a.component
            for slot in attachment.solution.plan.slots
            for a in slot.actions
            if isinstance(a, Stream)
        }
        assert streamed
        assert attachment.summary()["measured"]["kept_plan"]
        assert pipe.graphrun is attachment
        assert "the run stayed within the planned memory" in attachment.report()
        lines = attachment.report().splitlines()
        assert len(lines) < 24
        assert max(map(len, lines)) <= 80
        assert all(
            phase.name in attachment.report() for phase in attachment.solution.problem.phases
        )
        assert "stored as" in attachment.report(full=True)


def test_the_least_budget_works_for_what_the_caller_has_on_the_device() -> None:
    case = cases()["KandinskyV22Pipeline"]
    pipe, device = case.build(), SimulatedDevice(Machine())
    want = case.call(pipe)
    with device.machine:
        arguments = {
            name: value.to("sim") if isinstance(value, torch.Tensor) else value
            for name, value in case.arguments().items()
        }
    device_case = replace(case, arguments=lambda: arguments)
    held_bytes = device.allocated_bytes
    with graphrun.attach(pipe, vram="1K", device=device), pytest.raises(Infeasible) as error_info:
        device_case.call(pipe, lambda tensor: tensor)
    least_bytes = error_info.value.smallest_budget_bytes
    with graphrun.attach(pipe, vram=least_bytes, device=device) as attachment:
        assert equal(device_case.call(pipe, lambda tensor: tensor), want)
        assert attachment.trace is not None
        assert attachment.trace.peak_bytes == least_bytes - held_bytes < least_bytes


def test_components_that_are_in_ram_stay_there_though_little_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pipe = SD.build()
    want = SD.call(pipe)
    left_bytes = weight_bytes(pipe) // 4
    (tmp_path / "meminfo").write_text(
        f"MemTotal: 1 kB\nMemAvailable: {left_bytes // 1024} kB\nSwapFree: 99999999 kB\n"
    )
    monkeypatch.setattr(
        host_ram_bytes, "__defaults__", (tmp_path, tmp_path / "own", tmp_path / "meminfo")
    )
    with graphrun.attach(pipe, vram="1G", device="sim") as attachment:
        assert equal(SD.call(pipe), want)
        assert attachment.solution is not None
        problem, plan = attachment.solution.problem, attachment.solution.plan
        assert weight_bytes(pipe) < problem.ram_bytes <= weight_bytes(pipe) + left_bytes
        backing_stores = {
            action.backing_store
            for slot in plan.slots
            for action in slot.actions
            if isinstance(action, Load)
        }
        assert backing_stores <= {"pinned", "pageable"}


def test_detaching_restores_the_pipeline() -> None:
    pipe = SD.build()
    kinds = {name: type(part) for name, part in pipe.components.items()}
    pipe.vae.requires_grad_(False)
    state = {name: tensor.clone() for name, tensor in pipe.unet.state_dict().items()}
    attachment = graphrun.attach(pipe, vram="1G", device="sim")
    SD.call(pipe)
    attachment.detach()
    attachment.detach()
    assert type(pipe) is SD.kind
    assert pipe.device.type == "cpu"
    assert {name: type(part) for name, part in pipe.components.items()} == kinds
    assert not any(p.requires_grad for p in pipe.vae.parameters())
    assert all(p.requires_grad for p in pipe.unet.parameters())
    assert all(torch.equal(tensor, state[name]) for name, tensor in pipe.unet.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in pipe.unet.modules())


def test_the_pipeline_reports_the_plans_device(sd: Attached) -> None:
    assert sd.pipe.device.type == sd.pipe._execution_device.type == "sim"
    assert sd.pipe.to("sim") is sd.pipe
    assert isinstance(sd.pipe, SD.kind)


def test_offloading_while_attached_is_refused(sd: Attached) -> None:
    with pytest.raises(InputError, match=r"detach\(\) before enable_model_cpu_offload"):
        sd.pipe.enable_model_cpu_offload()
    with pytest.raises(InputError, match=r"detach\(\) before to\(cpu\)"):
        sd.pipe.to("cpu")
    with pytest.raises(InputError, match="attached to StableDiffusionPipeline already"):
        graphrun.attach(sd.pipe, vram="1G", device="sim")


def test_an_offloaded_pipeline_is_refused() -> None:
    pipe = SD.build()
    pipe.enable_sequential_cpu_offload(device="cpu")
    with pytest.raises(InputError, match="remove_all_hooks"):
        graphrun.attach(pipe, vram="1G", device="sim")
    with pytest.raises(InputError, match="Linear has no module with weights"):
        graphrun.attach(nn.Linear(1, 1), vram="1G", device="sim")
    with pytest.raises(InputError, match="device 'tpu' is not known"):
        graphrun.attach(SD.build(), vram="1G", device="tpu")


def test_a_wrong_argument_is_the_pipelines_own_error(sd: Attached) -> None:
    with pytest.raises(ValueError, match="has to be of type"):
        sd.pipe(5)
    assert equal(sd.seeded(), seeded(SD.build()))


def test_a_probe_that_fails_says_which_call_failed() -> None:
    pipe, device = SD.build(), SimulatedDevice(Machine())

    class Odd(type(pipe.vae)):  # type: ignore[misc]
        def decode(self, *args: Any, **kwargs: Any) -> Any:
            raise OSError("no such codec")

    pipe.vae.__class__ = Odd
    with graphrun.attach(pipe, vram="1G", device=device):
        with pytest.raises(
            ProbeError, match=r"vae\.decode\(float32\[1, 4, 8, 8\].*no such codec.*graph file"
        ):
            seeded(pipe)
        assert device.allocated_bytes == 0


def test_a_component_that_needs_tensor_values_is_run_once_on_the_cpu() -> None:
    """Counting needs values: bincount has no meta kernel."""

    class Counting(AutoencoderKL):
        def decode(self, z: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            assert torch.bincount((z > 0).long().flatten()).sum() == z.numel()
            return super().decode(z, *args, **kwargs)

    pipe = SD.build()
    pipe.vae.__class__ = Counting
    with graphrun.attach(pipe, vram="1G", device="sim") as attachment:
        assert equal(seeded(pipe), seeded(SD.build()))
        assert attachment.replans == ()


def test_an_error_in_the_run_leaves_nothing_on_the_device_and_the_next_call_works(
    sd: Attached,
) -> None:
    sd.seeded()
    sd.device.machine.fail_copy = 5
    with pytest.raises(graphrun.TransferFailed):
        sd.seeded()
    assert sd.device.allocated_bytes == 0
    assert equal(sd.seeded(), seeded(SD.build()))


def test_a_pipeline_on_meta_is_planned_as_the_live_one_is() -> None:
    pipe = SD.build()
    live = graphrun.from_pipeline(pipe)
    inputs = {"prompt": PROMPT, "height": 16, "width": 16, "num_inference_steps": 2}
    problem = graphrun.estimate(live, vram="1G", ram="8G", hardware="sim", inputs=inputs)
    assert dict(problem.settings)["height"] == "16"
    assert [use.component for phase in problem.phases for use in phase.uses] == [
        "text_encoder",
        "unet",
        "vae",
    ]
    for part in (pipe.text_encoder, pipe.unet, pipe.vae):
        part.to("meta")
    bare = graphrun.estimate(
        graphrun.from_pipeline(pipe), vram="1G", ram="8G", hardware="sim", inputs=inputs
    )
    assert bare == problem
    assert graphrun.plan(bare).plan == graphrun.plan(problem).plan
    with pytest.raises(InputError, match="until"):
        graphrun.estimate(live, vram="1G", hardware="sim", inputs=inputs, until="decode")


def _refusals(attachment: Attached, answers: Any) -> None:
    """What a forked process is told, put into ``answers`` as text."""
    pipe = attachment.pipe
    uses = (
        attachment.seeded,
        lambda: pipe.vae.decode(torch.zeros(1)),
        lambda: pipe.to(torch.float32),
        attachment.attachment.release,
    )
    for use in uses:
        try:
            use()
        except InputError as error:
            answers.put(str(error))
    attachment.attachment.detach()
    answers.put("detached")


def test_a_forked_process_is_refused_at_once_also_while_a_call_runs(sd: Attached) -> None:
    """A thread that holds the device's lock stands for a call of the parent: in the child nobody
    gives it back."""
    fork, (taken_event, done_event) = (
        multiprocessing.get_context("fork"),
        (threading.Event(), threading.Event()),
    )

    def hold() -> None:
        with sd.attachment._lock:
            taken_event.set()
            done_event.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    taken_event.wait()
    answers = fork.SimpleQueue()
    child = fork.Process(target=_refusals, args=(sd, answers))
    child.start()
    child.join(20)
    hung = child.is_alive()
    child.kill()
    done_event.set()
    holder.join()
    assert not hung
    for _ in range(4):
        assert (
            f"the attached pipeline belongs to process {multiprocessing.current_process().pid}"
            in answers.get()
        )
    assert answers.get() == "detached"


def test_a_hook_sees_the_calls_and_slots_of_each_run() -> None:
    class Notes(graphrun.Hook):
        calls: list[tuple[str, str]] = []
        slots: list[SlotTrace] = []

        def call_begins(self, component: str, entry: str, args: Any, kwargs: Any) -> None:
            self.calls.append((component, entry))

        def slot_closes(self, index: int, slot_trace: SlotTrace) -> None:
            self.slots.append(slot_trace)

    pipe, device, notes = SD.build(), SimulatedDevice(Machine()), Notes()
    with graphrun.attach(pipe, vram=weight_bytes(pipe), device=device, hook=notes) as attachment:
        seeded(pipe)
        trace = attachment.trace
    assert trace is not None
    runs = [(event.component, event.detail) for event in trace.events if event.kind == "run"]
    assert notes.calls == runs
    assert [slot.name for slot in notes.slots] == [slot.name for slot in trace.slots]
