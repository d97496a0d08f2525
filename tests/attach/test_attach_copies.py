"""Guidance in parallel in attached pipelines: a copy of the denoiser on a second device makes every
other call. Outputs are diffusers', bytes are as planned."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from campaign import sampled
from test_attach_devices import two_devices
from test_attach_pipelines import equal
from tiny_pipelines import cases
from torch import nn

import graphrun
from graphrun.solve import copying

CASES = cases()
# pipelines whose guidance calls the denoiser twice a step
NAMES = ("WanPipeline", "WanImageToVideoPipeline", "SkyReelsV2Pipeline", "ChromaPipeline")
BUDGETS: dict[str, Any] = {"vram": ["64M", "64M"]}


@pytest.fixture(autouse=True)
def always_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose a copy however little it gains, where all is tiny."""
    monkeypatch.setattr(copying, "CLEARLY", 0.0)


def assert_copied(attachment: Any) -> None:
    assert attachment.solution.plan.copies == (("transformer", 1),)
    assert attachment.replans == ()
    assert attachment.trace.overruns == ()
    for report, actual in attachment.trace.pairs_with(attachment.solution.simulation.slots):
        assert actual.secondary_peaks[0] <= report.secondary_peaks[0]
    callers = [event.component for event in attachment.trace.events if event.kind == "run"]
    denoiser_calls = [name for name in callers if name.startswith("transformer")]
    assert denoiser_calls == ["transformer@1", "transformer"] * (len(denoiser_calls) // 2)


@pytest.mark.long
@pytest.mark.parametrize("name", sampled(NAMES, NAMES[:1], "secondaries"))
def test_a_copy_makes_every_other_call(name: str) -> None:
    case, device = CASES[name], two_devices()
    plain, pipe = case.build(), case.build()
    with graphrun.attach(pipe, device=device, **BUDGETS) as attachment:
        moved_bytes = []
        for _ in range(3):
            assert equal(case.call(pipe), case.call(plain))
            assert_copied(attachment)
            moved_bytes.append(attachment.trace.moved_bytes)
            assert attachment.held_bytes == sum(
                single.allocated_bytes for single in device.all_devices
            )
        assert moved_bytes[1] == moved_bytes[2] < moved_bytes[0], "the copy stays"
        attachment.release()
        assert [single.allocated_bytes for single in device.all_devices] == [0, 0]
        assert equal(case.call(pipe), case.call(plain))
    assert [single.allocated_bytes for single in device.all_devices] == [0, 0]
    assert equal(case.call(pipe), case.call(plain))


def lora(transformer: nn.Module) -> dict[str, torch.Tensor]:
    """A LoRA of rank 2 for the values of all attentions, as diffusers saves it."""
    generator, factors = torch.Generator().manual_seed(4), dict[str, torch.Tensor]()
    for path, layer in transformer.named_modules():
        if isinstance(layer, nn.Linear) and path.endswith("to_v"):
            name = f"transformer.{path}"
            for key, shape in (("A", (2, layer.in_features)), ("B", (layer.out_features, 2))):
                factors[f"{name}.lora_{key}.weight"] = torch.randn(shape, generator=generator)
    return factors


class Doubling:
    """An attention processor that doubles the result of diffusers' own."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * self.inner(*args, **kwargs)


def double_attention(pipe: Any) -> None:
    for block in pipe.transformer.blocks:
        block.attn1.processor = Doubling(block.attn1.processor)


def halve_weights(pipe: Any) -> None:
    with torch.no_grad():
        for weight in pipe.transformer.parameters():
            weight.mul_(0.5)


def replace_transformer(pipe: Any) -> None:
    torch.manual_seed(7)
    pipe.transformer = type(pipe.transformer)(**pipe.transformer.config).eval()


def halved(block: Any, *args: Any, **kwargs: Any) -> Any:
    return type(block).forward(block, *args, **kwargs) / 2


def patch_forward(pipe: Any) -> None:
    block = pipe.transformer.blocks[0]
    block.forward = functools.partial(halved, block)


@pytest.mark.sweep("secondaries")
def test_the_copy_computes_with_what_changes_between_calls() -> None:
    pytest.importorskip("peft")
    case, device = CASES["WanPipeline"], two_devices()
    plain, pipe = case.build(), case.build()
    factors = lora(plain.transformer)
    changes: list[Callable[[Any], Any]] = [
        double_attention,
        halve_weights,
        lambda pipe: pipe.load_lora_weights(dict(factors), adapter_name="a"),
        lambda pipe: pipe.set_adapters(["a"], [0.3]),
        lambda pipe: pipe.unload_lora_weights(),
        replace_transformer,
    ]
    with graphrun.attach(pipe, device=device, **BUDGETS) as attachment:
        outputs = [case.call(plain)]
        for change in changes:
            change(plain)
            change(pipe)
            outputs.append(case.call(plain))
            assert not equal(outputs[-1], outputs[-2]), "the change changes outputs"
            for _ in range(2):
                assert equal(case.call(pipe), outputs[-1])
                assert_copied(attachment)
        # a replica would call the original's code, with the original's weights
        patch_forward(plain)
        patch_forward(pipe)
        assert equal(case.call(pipe), case.call(plain))
        assert attachment.solution is not None
        assert attachment.solution.plan.copies == ()
    assert [single.allocated_bytes for single in device.all_devices] == [0, 0]


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


class Program:
    """Calls a denoiser twice a step, in ways that a dry run does not see."""

    def __init__(self) -> None:
        self.denoiser = Denoiser()
        self.device = torch.device("cpu")

    @torch.no_grad()
    def chained(self, x: torch.Tensor) -> torch.Tensor:
        """The second call needs the first, which is not larger than what other code allocates."""
        x = x.to(self.device)
        for _ in range(3):
            x = x + self.denoiser(self.denoiser(x))
        return x

    @torch.no_grad()
    def surprising(self, x: torch.Tensor) -> torch.Tensor:
        """The size of the calls depends on the last prediction."""
        x = x.to(self.device)
        second = torch.zeros(1)
        for _ in range(3):
            half, shifted = x / 2, x + 1
            if bool((second > 0).any()):  # a dry run puts zeros in place of outputs
                half, shifted = half[:5], shifted[:5]
            first, second = self.denoiser(half), self.denoiser(shifted)
            x = x + (second + 3 * (first - second)).sum(dim=0)
        return x


def test_outputs_are_right_where_the_dry_run_guessed_wrong() -> None:
    device, x = two_devices(), torch.linspace(-1, 1, 32 * 64).reshape(32, 64)
    program = Program()
    expected = {name: getattr(Program(), name)(x) for name in ("chained", "surprising")}
    with graphrun.attach(
        program,
        components={"denoiser": program.denoiser},
        entries=list(expected),
        device=device,
        **BUDGETS,
    ) as attachment:
        for name, output in expected.items():
            for _ in range(2):
                assert torch.equal(getattr(program, name)(x).cpu(), output)
                assert attachment.solution is not None
                assert attachment.solution.plan.copies == (("denoiser", 1),)
                assert bool(attachment.replans) == (name == "surprising")
    assert [single.allocated_bytes for single in device.all_devices] == [0, 0]
