"""`attach` on programs that are no pipelines of diffusers: an object with modules of its own, a
model of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from programs import Film, Told, captioner
from test_attach_pipelines import equal
from tiny_pipelines import checked_peak_bytes

import graphrun
from graphrun.diffusers_.dry_call import ProbeError
from graphrun.errors import BrokenPlan, InputError
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.sim import Machine

TEXT = "a lighthouse"


def parts_of(film: Film) -> dict[str, Any]:
    return {"text_encoder": film.models["text"], "transformer": film.dit, "vae": film.vae}


def seeded(film: Film, text: str = TEXT, **arguments: Any) -> Any:
    return film.generate(text, generator=torch.Generator().manual_seed(3), **arguments)


@pytest.fixture
def attached_film() -> Iterator[tuple[Film, Any, SimulatedDevice]]:
    film, device = Film(), SimulatedDevice(Machine())
    vram = int(0.8 * film.bytes())
    with graphrun.attach(
        film, components=parts_of(film), entries=["generate"], vram=vram, device=device
    ) as attachment:
        yield film, attachment, device


def test_an_object_with_modules_of_its_own_streams_with_equal_results(attached_film: Any) -> None:
    film, attachment, device = attached_film
    with device.machine:
        program = Film().to("sim")
        want = [
            seeded(program).cpu(),
            seeded(program, "two ships").cpu(),
            seeded(program, units=5).cpu(),
        ]
        del program
    for text, units, expected in [
        (TEXT, 3, want[0]),
        (TEXT, 3, want[0]),
        ("two ships", 3, want[1]),
        (TEXT, 5, want[2]),
    ]:
        got = seeded(film, text, units=units)
        assert got.device.type == "sim"
        assert equal(got, expected)
        del got
        checked_peak_bytes(attachment, device)
        assert {event.component for event in attachment.trace.events} == {
            "text_encoder",
            "transformer",
            "vae",
        }
    assert {t.device.type for t in film.last} == {"cpu"}, "what the program keeps"
    assert film.to("sim") is film
    attachment.detach()
    assert type(film) is Film
    assert film.device == torch.device("cpu")
    assert equal(seeded(film), seeded(Film()))


def test_what_a_call_leaves_in_the_program_is_no_change_and_a_setting_is(
    attached_film: Any,
) -> None:
    film, attachment, _ = attached_film
    messages: list[str] = []
    attachment._tell = messages.append
    seeded(film)
    seeded(film)
    assert len(messages) == 1
    film.steps = 3
    assert equal(seeded(film), seeded_with(Film(), steps=3))
    assert len(messages) == 2


def seeded_with(film: Film, **settings: Any) -> Any:
    vars(film).update(settings)
    return seeded(film)


def test_autocast_around_the_call_is_seen_by_its_dry_run_and_gets_a_plan_of_its_own(
    attached_film: Any,
) -> None:
    film, attachment, device = attached_film
    with device.machine, torch.autocast("sim", torch.bfloat16):
        want = seeded(Film().to("sim")).float().cpu()
    assert not equal(seeded(film), want)
    plain = attachment.solution.problem
    for _ in range(2):
        with torch.autocast("sim", torch.bfloat16):
            assert equal(seeded(film).float(), want)
        checked_peak_bytes(attachment, device)
    assert attachment.solution.problem.digest != plain.digest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {},
            r"Film is not a pipeline of diffusers.*components=\{'models_text': ..., 'dit': ..., "
            r"'vae': ...\}, entries=.*generate",
        ),
        (
            {"components": {"dit": Film().dit}, "entries": ["generate"]},
            "Film does not own the module dit",
        ),
        (
            {"components": "all but vae", "entries": ["generate"]},
            "the weights of vae.layers.0.mix are in no component",
        ),
        (
            {"components": "all", "entries": ["generates"]},
            "Film has no method generates; its own methods are .*generate",
        ),
        ({"components": "all", "entries": []}, "Film is not a pipeline of diffusers"),
        (
            {"components": {"the dit": Film().dit}, "entries": ["generate"]},
            "'the dit' must be a name",
        ),
    ],
)
def test_what_attach_cannot_take_is_refused_with_what_to_type(
    arguments: dict[str, Any], message: str
) -> None:
    film = Film()
    parts = parts_of(film)
    if arguments.get("components") == "all but vae":
        parts.pop("vae")
    if isinstance(arguments.get("components"), str):
        arguments = {**arguments, "components": parts}
    with pytest.raises(InputError, match=message):
        graphrun.attach(film, vram="1G", device="sim", **arguments)


def test_methods_that_move_modules_are_refused_with_what_to_leave_out(attached_film: Any) -> None:
    film, _, device = attached_film
    with pytest.raises(
        BrokenPlan,
        match="moves or casts transformer to cuda.*leave out the argument that asks for it",
    ):
        seeded(film, cpu_offloading=True)
    with pytest.raises(InputError, match="detach"):
        film.enable_sequential_cpu_offload()
    with pytest.raises(InputError, match="detach"):
        film.to("cpu")
    assert device.allocated_bytes == 0
    assert equal(seeded(film), seeded(Film()))


def test_another_text_for_a_module_that_pads_it_is_in_the_plan_and_a_longer_one_is_not() -> None:
    program, plain, device = Told(), Told(), SimulatedDevice(Machine())
    vram = int(0.8 * sum(tensor.nbytes for tensor in program.reader.parameters()))
    messages = list[str]()
    attaching = {
        "components": {"reader": program.reader},
        "entries": ["read"],
        "vram": vram,
        "device": device,
        "tell": messages.append,
    }
    with graphrun.attach(program, **attaching) as attachment:
        for text in ("a ship", "two ships", "a ship", "a storm"):
            assert equal(program.read(text), plain.read(text))
            assert attachment.replans == ()
        assert len(messages) == 1
        for text in ("a lighthouse in a storm", "a ship"):
            assert equal(program.read(text), plain.read(text))
        assert len(messages) > 1


def test_a_model_of_transformers_generates_a_text_for_a_picture() -> None:
    """Its cache of keys and values grows from token to token; a text that ends early is within the
    plan for the longest."""
    model, device = captioner(), SimulatedDevice(Machine())
    picture = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    long = model.generate(picture, do_sample=False)
    end = long[0, 1].item()
    short = model.generate(picture, do_sample=False, eos_token_id=end)
    assert (short.shape[1], long.shape[1]) == (2, 10)
    components = {"encoder": model.encoder, "decoder": model.decoder}
    vram = int(0.9 * sum(tensor.nbytes for tensor in model.parameters()))
    with graphrun.attach(
        model, components=components, entries=["generate"], vram=vram, device=device
    ) as attachment:
        with device.machine:
            device_picture = picture.to("sim")
        for arguments, want in [
            ({"eos_token_id": end}, short),
            ({}, long),
            ({"eos_token_id": end}, short),
        ]:
            assert torch.equal(
                model.generate(device_picture, do_sample=False, **arguments).cpu(), want
            )
            assert attachment.replans == ()
            assert attachment.solution is not None
            assert attachment.trace is not None
            assert attachment.trace.overruns == ()
    assert torch.equal(model.generate(picture, do_sample=False), long)


class Stack(torch.nn.Module):
    """Blocks in a row, and a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([self.block() for _ in range(6)])

    @staticmethod
    def block() -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Caller:
    def __init__(self, net: torch.nn.Module) -> None:
        self.net, self.device = net, torch.device("cpu")

    def call(self, x: torch.Tensor) -> Any:
        x = x.to(self.device)
        for _ in range(3):
            x = self.net(x)
        return x


@pytest.mark.parametrize("traced", ["whole", "blocks"])
def test_modules_that_fx_traced_run_by_their_plan(traced: str) -> None:
    torch.manual_seed(0)
    net, device = Stack().eval(), SimulatedDevice(Machine())
    x = torch.randn(5, 32)
    want = Caller(net).call(x)
    if traced == "whole":
        net = torch.fx.symbolic_trace(net)
    else:
        net.blocks = torch.nn.ModuleList(map(torch.fx.symbolic_trace, net.blocks))
    caller = Caller(net)
    options = {"components": {"net": net}, "entries": ["call"], "device": device}
    for vram in (1 << 30, 100_000):
        with graphrun.attach(caller, vram=vram, **options) as attachment:
            assert all(equal(caller.call(x), want) for _ in range(2))
            assert (attachment.replans, attachment.trace.overruns) == ((), ())
            assert attachment.trace.peak_bytes <= vram
    assert device.allocated_bytes == 0


class Noisy(Caller):
    def noisy_call(self, x: torch.Tensor, generator: torch.Generator) -> Any:
        x = self.call(x)
        return x + torch.rand(1, device=self.device, generator=generator)


def test_a_generator_of_the_host_is_refused_where_the_program_draws_on_the_device() -> None:
    """As on a card. HeliosModularPipeline does so with an image."""
    net = Stack().eval()
    program, x = Noisy(net), torch.randn(5, 32)
    options = {"components": {"net": net}, "entries": ["noisy_call"], "device": "sim"}
    with (
        graphrun.attach(program, vram="1G", **options),
        pytest.raises(
            ProbeError, match=r"found 'cpu'. Its code draws .* pass a generator of the device"
        ),
    ):
        program.noisy_call(x, torch.Generator())
