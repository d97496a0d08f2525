"""Changes to an attached pipeline between or inside its calls: the plain pipeline's results, or an
error that says what to do."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from campaign import sampled
from diffusers import DDIMScheduler, DPMSolverMultistepScheduler, StableDiffusionImg2ImgPipeline
from test_attach import SD, Attached, seeded
from test_attach_pipelines import equal, weight_bytes
from tiny_pipelines import cases, picture, tiny

import graphrun
from graphrun.diffusers_.residence import Leftovers
from graphrun.errors import InputError
from graphrun.modules.memos import attributes_of
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.sim import Machine


@pytest.fixture
def sd() -> Iterator[Attached]:
    pipe, device = SD.build(), SimulatedDevice(Machine())
    with graphrun.attach(pipe, vram=int(0.95 * weight_bytes(pipe)), device=device) as attachment:
        yield Attached(pipe, device, attachment)


def other_unet() -> Any:
    torch.manual_seed(9)
    return tiny("UNet2DConditionModel", layers_per_block=2).eval().requires_grad_(False)


def other_vae(pipe: Any) -> None:
    torch.manual_seed(9)
    pipe.vae = tiny("AutoencoderKL").eval().requires_grad_(False)


def new_weights(pipe: Any) -> None:
    pipe.unet.load_state_dict({key: value * 1.25 for key, value in pipe.unet.state_dict().items()})


def new_data(pipe: Any) -> None:
    for parameter in pipe.unet.parameters():
        parameter.data = parameter.data * 1.25


def tiled(pipe: Any) -> None:
    pipe.vae.enable_tiling()


def sliced(pipe: Any) -> None:
    pipe.vae.enable_slicing()
    pipe.enable_attention_slicing()


def another_scheduler(pipe: Any) -> None:
    pipe.scheduler = DPMSolverMultistepScheduler.from_config(pipe.scheduler.config)


def same_scheduler_set_otherwise(pipe: Any) -> None:
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config, timestep_spacing="trailing")


def halved(pipe: Any) -> None:
    pipe.to(torch.float16)


def vae_halved(pipe: Any) -> None:
    pipe.unet.half()
    pipe.text_encoder.to(torch.float16)
    pipe.vae.to(dtype=torch.float16)


def registered(pipe: Any) -> None:
    pipe.register_modules(unet=other_unet())


def freeu(pipe: Any) -> None:
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)


def fused(pipe: Any) -> None:
    pipe.fuse_qkv_projections()


def channels_last(pipe: Any) -> None:
    pipe.unet.to(memory_format=torch.channels_last)


def inverted(pipe: Any) -> None:
    vector = torch.randn(32, generator=torch.Generator().manual_seed(4))
    pipe.load_textual_inversion({"<ship>": vector}, token="<ship>")


CHANGES: list[Callable[[Any], None]] = [
    lambda pipe: setattr(pipe, "unet", other_unet()),
    other_vae,
    new_weights,
    new_data,
    tiled,
    sliced,
    another_scheduler,
    same_scheduler_set_otherwise,
    halved,
    vae_halved,
    registered,
    freeu,
    fused,
    channels_last,
    inverted,
]
NAMES = ["another unet", *(change.__name__ for change in CHANGES[1:])]
# Another module, other numbers, another dtype, other modules in a module, another tokenizer.
ALWAYS = (other_vae, new_weights, vae_halved, fused, inverted)


@pytest.mark.parametrize("change", sampled(CHANGES, ALWAYS, "changes"), ids=NAMES)
def test_a_change_between_calls_has_its_effect_and_leaves_nothing(
    sd: Attached, change: Callable[[Any], None]
) -> None:
    plain = SD.build()
    first_output = seeded(plain)
    assert equal(sd.seeded(), first_output)
    for pipe in (plain, sd.pipe):
        change(pipe)
    prompt = "a <ship> at dusk"
    want = seeded(plain, prompt=prompt)
    for _ in range(2):
        assert equal(sd.seeded(prompt=prompt), want)
        assert sd.attachment.replans == ()
        assert sd.device.allocated_bytes == sd.attachment.held_bytes
    sd.attachment.detach()
    assert equal(seeded(sd.pipe, prompt=prompt), want)


def sharing(pipe: Any) -> Any:
    other = StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
    other.set_progress_bar_config(disable=True)
    return other


def image_to_image(pipe: Any, **arguments: Any) -> Any:
    return seeded(pipe, image=picture(), strength=0.9, height=None, width=None, **arguments)


@pytest.mark.sweep("more")
def test_pipelines_that_share_components_may_be_attached_beside_one_another(sd: Attached) -> None:
    plain = SD.build()
    other = sharing(sd.pipe)
    other_plain = sharing(plain)
    assert other.unet is sd.pipe.unet
    want, want_other = seeded(plain), image_to_image(other_plain)
    with graphrun.attach(other, vram="1G", device=sd.device) as other_attachment:
        for _ in range(2):
            assert equal(sd.seeded(), want)
            assert equal(image_to_image(other), want_other)
        sd.attachment.release()
        assert sd.device.allocated_bytes == other_attachment.held_bytes
    assert equal(sd.seeded(), want)
    with graphrun.attach(other, vram="1G", device=sd.device) as second:
        sd.attachment.detach()
        assert equal(image_to_image(other), want_other)
        assert second.solution is not None
    assert type(sd.pipe.unet) is type(plain.unet)
    assert equal(seeded(sd.pipe), want)
    assert sd.device.allocated_bytes == 0


def test_copies_are_plain_and_saving_works(sd: Attached, tmp_path: Any) -> None:
    want = seeded(SD.build())
    sd.seeded()
    twin = copy.deepcopy(sd.pipe)
    assert type(twin) is SD.kind
    assert type(twin.unet) is type(SD.build().unet)
    assert twin.unet.conv_in.weight.data_ptr() != sd.pipe.unet.conv_in.weight.data_ptr()
    assert equal(seeded(twin), want)
    unet = pickle.loads(pickle.dumps(copy.deepcopy(sd.pipe.unet)))
    assert all(
        torch.equal(tensor, twin.unet.state_dict()[key])
        for key, tensor in unet.state_dict().items()
    )
    sd.pipe.unet.save_pretrained(tmp_path / "unet")
    sd.pipe.save_pretrained(tmp_path / "pipe")
    saved_unet = type(twin.unet).from_pretrained(tmp_path / "pipe" / "unet")
    assert all(
        torch.equal(tensor, twin.unet.state_dict()[key])
        for key, tensor in saved_unet.state_dict().items()
    )
    assert equal(sd.seeded(), want)


def test_a_callback_that_interrupts_ends_the_call_and_the_next_one_is_whole(sd: Attached) -> None:
    plain = SD.build()

    def stop(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        pipe._interrupt = step == 1
        return values

    want = seeded(plain, num_inference_steps=4, callback_on_step_end=stop)
    assert equal(sd.seeded(num_inference_steps=4, callback_on_step_end=stop), want)
    assert equal(sd.seeded(), seeded(plain))
    assert sd.device.allocated_bytes == sd.attachment.held_bytes


@pytest.mark.parametrize(
    "error", sampled([KeyboardInterrupt, ValueError], [KeyboardInterrupt], "changes")
)
def test_an_error_in_a_callback_leaves_the_baseline(
    sd: Attached, error: type[BaseException]
) -> None:
    def fail(*_: Any) -> Any:
        raise error("stop")

    for _ in range(2):
        with pytest.raises(error):
            sd.seeded(callback_on_step_end=fail)
        assert sd.device.allocated_bytes == 0
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in sd.pipe.unet.modules())
    assert equal(sd.seeded(), seeded(SD.build()))


def test_an_error_between_a_cast_and_the_cast_back_leaves_the_cast_as_without_graphrun() -> None:
    case = cases()["StableDiffusionXLPipeline-float16"]
    pipe, device = case.build(), SimulatedDevice(Machine())
    want = case.call(pipe)

    def fail(*_: Any) -> None:
        raise ValueError("stop")

    with graphrun.attach(pipe, vram="1G", device=device) as attachment:
        assert equal(case.call(pipe), want)
        hook = pipe.vae.decoder.conv_out.register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="stop"):
            case.call(pipe)
        hook.remove()
        assert device.allocated_bytes == 0
        assert pipe.vae.dtype == torch.float32
        pipe.vae.to(torch.float16)
        assert equal(case.call(pipe), want)
        assert device.allocated_bytes == attachment.held_bytes


def test_calls_of_several_threads_run_one_at_a_time(sd: Attached) -> None:
    plain, got = SD.build(), {}

    def work(seed: int) -> None:
        got[seed] = sd.seeded(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(equal(got[seed], seeded(plain, seed)) for seed in range(3))
    assert sd.device.allocated_bytes == sd.attachment.held_bytes


def test_gradient_mode_makes_no_difference(sd: Attached) -> None:
    with torch.enable_grad():
        assert equal(sd.seeded(), seeded(SD.build()))
    sd.pipe.unet.requires_grad_(True)
    assert equal(sd.seeded(), seeded(SD.build()))
    sd.attachment.detach()
    assert all(p.requires_grad for p in sd.pipe.unet.parameters())


def test_a_compiled_component_is_refused(sd: Attached) -> None:
    compiled = torch.compile(sd.pipe.unet)
    if compiled is sd.pipe.unet:
        pytest.skip("compiling is switched off in this process")
    sd.pipe.unet = compiled
    with pytest.raises(InputError, match="unet is compiled"):
        sd.seeded()


def test_ip_adapters_may_be_loaded_and_unloaded(sd: Attached) -> None:
    plain = SD.build()
    for pipe in (plain, sd.pipe):
        torch.manual_seed(2)
        seeing = tiny("CLIPVisionModelWithProjection").eval().requires_grad_(False)
        pipe.register_modules(image_encoder=seeing, feature_extractor=tiny("CLIPImageProcessor"))
        pipe.load_ip_adapter(
            [ip_adapter(pipe.unet)], subfolder=[""], weight_name=[""], image_encoder_folder=None
        )
        pipe.set_ip_adapter_scale(0.7)
    want = seeded(plain, ip_adapter_image=picture(32))
    for _ in range(2):
        assert equal(sd.seeded(ip_adapter_image=picture(32)), want)
    sd.pipe.unload_ip_adapter()
    assert equal(sd.seeded(), seeded(SD.build()))
    assert sd.device.allocated_bytes == sd.attachment.held_bytes


def ip_adapter(unet: Any) -> dict[str, Any]:
    """Weights of an IP-Adapter for ``unet``, in the layout of its files."""
    generator = torch.Generator().manual_seed(6)
    names, number = {}, 1
    for name in unet.attn_processors:
        if name.endswith("attn1.processor") or "motion" in name:
            continue
        hidden = 32
        for key in ("to_k_ip", "to_v_ip"):
            names[f"{number}.{key}.weight"] = torch.randn(hidden, 32, generator=generator) * 0.1
        number += 2
    projection = {
        "proj.weight": torch.randn(4 * 32, 32, generator=generator),
        "proj.bias": torch.zeros(4 * 32),
        "norm.weight": torch.ones(32),
        "norm.bias": torch.zeros(32),
    }
    return {"image_proj": projection, "ip_adapter": names}


def test_a_leftover_at_the_address_of_an_object_from_before_the_call_goes_to_the_host() -> None:
    pipe, device = SD.build(), SimulatedDevice(Machine())
    with device.machine:
        pipe.scheduler.old_list, pipe.scheduler.stays = (
            [torch.zeros(8, device="sim")],
            [torch.ones(8, device="sim")],
        )
        tensor = torch.zeros(8, device="sim")
        modules = {"vae": pipe.vae}
        leftovers = Leftovers(pipe, modules, attributes_of(modules), device)
        address, lists = id(pipe.scheduler.__dict__.pop("old_list")), [[tensor]]
        while id(lists[-1]) != address and len(lists) < 1000:
            lists.append([tensor])
        pipe.scheduler.new_list = lists.pop()
        leftovers.clear()
    assert pipe.scheduler.new_list[0].device.type == "cpu"
    assert pipe.scheduler.stays[0].device.type == "sim"
