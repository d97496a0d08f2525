"""What stays on the device between calls of attached pipelines: what plans keep; nothing that was
changed, failed or released."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign import sampled
from diffusers import StableDiffusionImg2ImgPipeline
from test_attach_changes import CHANGES, NAMES, image_to_image, new_data, sharing
from test_attach_pipelines import equal, weight_bytes
from tiny_pipelines import PROMPT, Case, cases
from torch.utils._python_dispatch import TorchDispatchMode

import graphrun
from graphrun.diffusers_.attach import Attachment
from graphrun.errors import InputError
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.sim import Machine
from graphrun.solve.infeasible import Infeasible
from graphrun.verify.solution import broken_rules

CASES = cases()
SD: Case = CASES["StableDiffusionPipeline"]
# Architectures to measure at three budgets.
TABLE = (
    "FluxPipeline",
    "StableDiffusionXLPipeline",
    "StableDiffusion3Pipeline",
    "WanPipeline",
    "CogView4Pipeline",
    "QwenImagePipeline",
    "LTXConditionPipeline",
    "PixArtSigmaPipeline",
    "HiDreamImagePipeline",
    "HunyuanVideoPipeline",
)


class Warm:
    """A pipeline attached within ``share`` times the bytes of its weights, beside the same pipeline
    on the CPU."""

    def __init__(self, case: Case, share: float, **options: Any) -> None:
        self.plain, self.pipe, self.case = case.build(), case.build(), case
        self.device = options.pop("device", None) or SimulatedDevice(Machine())
        budgets = (
            {}
            if {"budget", "vram"} & set(options)
            else {"vram": int(share * weight_bytes(self.pipe))}
        )
        self.attachment: Attachment = graphrun.attach(
            self.pipe, device=self.device, **budgets, **options
        )

    def call(self, **arguments: Any) -> int:
        """Calls both and returns the bytes moved to the device. Asserts equal results, the caps
        kept, weights alone left."""
        case = replace(self.case, arguments=lambda: {**self.case.arguments(), **arguments})
        assert equal(case.call(self.pipe), case.call(self.plain))
        return self.checked_moved_bytes()

    def checked_moved_bytes(self) -> int:
        assert self.attachment.solution is not None
        assert self.attachment.trace is not None
        assert self.attachment.trace.overruns == ()
        # each block rounded up to an allocation
        planned_bytes = self.attachment.solution.simulation.moved_bytes
        assert 0.98 * planned_bytes <= self.attachment.trace.moved_bytes <= planned_bytes
        assert self.device.allocated_bytes >= self.attachment.held_bytes
        return self.attachment.trace.moved_bytes


@pytest.fixture
def roomy() -> Iterator[Warm]:
    warm = Warm(SD, 10.0)
    with warm.attachment:
        yield warm
    assert warm.device.allocated_bytes == 0


def test_what_fits_is_moved_once_and_the_report_says_what_a_call_finds_and_leaves(
    roomy: Warm,
) -> None:
    first = roomy.call()
    assert first > 0
    assert [roomy.call() for _ in range(2)] == [0, 0]
    assert roomy.attachment.held_bytes == roomy.device.allocated_bytes > 0
    report = roomy.attachment.report()
    assert "finds " in report
    assert "leaves " in report
    assert {p.device.type for p in roomy.pipe.unet.parameters()} == {"cpu"}, (
        "between calls the pipeline may be changed"
    )


def test_a_plan_is_checked_once_for_all_calls(roomy: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first call: its own, and that of the calls that find what it left. Those check and
    plan nothing."""
    checked: list[Any] = []
    monkeypatch.setattr(
        "graphrun.runtime.executor.broken_rules",
        lambda problem, plan: checked.append(plan) or broken_rules(problem, plan),
    )
    counts = []
    for _ in range(4):
        roomy.call()
        counts.append(len(checked))
    assert counts == [2, 2, 2, 2]
    assert checked[0] != checked[1] == roomy.attachment.solution.plan  # type: ignore[union-attr]


QWEN = "QwenImagePipeline"  # caches its tables of positions on the device, by `functools.lru_cache`


def copied_bytes(warm: Warm) -> int:
    """Bytes that a call copies to the device, whoever copies them."""
    copied_before = warm.device.machine.bytes_in
    warm.call(num_inference_steps=1)
    return warm.device.machine.bytes_in - copied_before


@pytest.mark.long
def test_tables_that_a_module_cached_on_the_device_stay_where_all_fits() -> None:
    """Further calls copy their arguments alone, as after ``.to(device)``. What is on another device
    is not taken for theirs."""
    warm = Warm(CASES[QWEN], 10.0)
    with Machine():
        table = warm.plain.transformer.pos_embed._get_device_freqs(torch.device("sim"))
    rope = warm.pipe.transformer.pos_embed
    tables_bytes = rope.pos_freqs.nbytes + rope.neg_freqs.nbytes
    with warm.attachment:
        assert table[0].device.type == "sim"
        assert warm.attachment.held_bytes == 0
        copied_counts = [copied_bytes(warm) for _ in range(3)]
        assert copied_counts[0] > tables_bytes > 20 * copied_counts[1]
        assert copied_counts[1] == copied_counts[2]
        assert warm.device.allocated_bytes == warm.attachment.held_bytes
        assert warm.attachment._host.cached_bytes > tables_bytes
        assert len(warm.attachment._plans) == 1, "they are not taken for the caller's"
        warm.attachment.release()
        assert warm.device.allocated_bytes == warm.attachment.held_bytes == 0
        copied_bytes(warm)
        assert warm.device.allocated_bytes > 0
    assert warm.device.allocated_bytes == 0


@pytest.mark.sweep("warm")
def test_cached_tables_give_way_where_there_is_no_room_for_them() -> None:
    budget_bytes = int(0.9 * weight_bytes(CASES[QWEN].build()))
    for _ in range(2):
        tight = Warm(CASES[QWEN], 0, vram=budget_bytes)
        with tight.attachment:
            copied_bytes(tight)
            assert tight.attachment.trace is not None
            room_bytes = budget_bytes - tight.attachment.trace.peak_bytes
            assert (tight.attachment._host.cached_bytes > 0) == (room_bytes > 2**19)
            budget_bytes -= room_bytes
    assert room_bytes < 2**19
    machine = Machine()
    warm, other_warm = (
        Warm(CASES[name], 10.0, device=SimulatedDevice(machine))
        for name in (QWEN, "StableDiffusionPipeline")
    )
    with warm.attachment, other_warm.attachment:
        copied_bytes(warm)
        assert (kept_bytes := warm.attachment._host.cached_bytes) > 0
        other_warm.call()
        assert warm.attachment._host.cached_bytes == kept_bytes, "there is room for both"
        machine.capacity_bytes = machine.allocated_bytes + 1
        other_warm.call()
        assert warm.attachment._host.cached_bytes == 0, "before any weights"
        assert (
            machine.allocated_bytes == warm.attachment.held_bytes + other_warm.attachment.held_bytes
        )


class Operators(TorchDispatchMode):
    """Counts operators."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_where_all_fits_a_further_call_runs_hardly_more_operators_than_the_plain_pipeline(
    roomy: Warm,
) -> None:
    """None for each weight: what stays loaded is bound again as it was."""
    roomy.call()
    with Operators() as warm_operators:
        SD.call(roomy.pipe)
    with Operators() as plain:
        SD.call(roomy.plain)
    assert (
        warm_operators.count
        <= plain.count + 30
        < plain.count + len(list(roomy.pipe.unet.parameters()))
    )


@pytest.mark.sweep("more")
def test_what_does_not_fit_moves_what_the_plan_says_and_less_than_from_an_empty_device() -> None:
    warm, empty = Warm(SD, 0.8), Warm(SD, 0.8, between_calls="empty")
    with warm.attachment, empty.attachment:
        copied_counts = [warm.call() for _ in range(4)]
        assert (
            copied_counts[1] == copied_counts[2] == copied_counts[3] < empty.call() == empty.call()
        )
        assert empty.attachment.held_bytes == empty.device.allocated_bytes == 0
        assert warm.attachment.held_bytes > 0


def test_other_calls_move_nothing_that_the_calls_before_left_where_all_fits(roomy: Warm) -> None:
    roomy.call()
    roomy.call(height=24)
    assert roomy.call() == roomy.call(height=24) == 0
    roomy.pipe.encode_prompt(PROMPT, roomy.pipe.device, 1, True)
    assert roomy.checked_moved_bytes() == 0
    assert roomy.call() == 0


@pytest.mark.sweep("more")
def test_two_sizes_in_turn_keep_the_blocks_that_both_plans_keep() -> None:
    warm = Warm(SD, 0.8)
    with warm.attachment:
        for size in (16, 32, 16, 32):
            loaded_blocks = warm.attachment._host.loaded()
            warm.call(height=size, width=size)
            solution = warm.attachment.solution
            assert solution is not None
            kept_blocks = dict(solution.plan.leaves)
            loads = {
                (e.component, e.detail) for e in warm.attachment.trace.events if e.kind == "load"
            }  # type: ignore[union-attr]
            for name, paths in loaded_blocks.items():
                stays = {
                    path
                    for path in warm.attachment._host.loaded().get(name, ())
                    if path in paths and name in kept_blocks
                }
                assert not {(name, path) for path in stays} & loads


def test_a_pipeline_with_the_same_components_finds_what_the_other_left(roomy: Warm) -> None:
    plain = sharing(roomy.plain)
    other = sharing(roomy.pipe)
    assert type(other) is StableDiffusionImg2ImgPipeline
    roomy.call()
    with graphrun.attach(other, vram="1G", device=roomy.device) as other_attachment:
        want = image_to_image(plain)
        assert equal(image_to_image(other), want)
        loaded_names = {
            event.component for event in other_attachment.trace.events if event.kind == "load"
        }  # type: ignore[union-attr]
        assert loaded_names == {"vae"}, "its encoder, too, so that it has other blocks"
        assert equal(image_to_image(other), want)
        assert other_attachment.trace.moved_bytes == 0  # type: ignore[union-attr]
    assert equal(SD.call(roomy.pipe), SD.call(roomy.plain))


@pytest.mark.parametrize("change", sampled(CHANGES, [new_data], "warm"), ids=NAMES)
def test_a_change_has_its_effect_on_what_stayed(roomy: Warm, change: Callable[[Any], None]) -> None:
    roomy.call()
    for pipe in (roomy.plain, roomy.pipe):
        change(pipe)
    roomy.call()
    assert roomy.call() == 0


def in_place(pipe: Any) -> None:
    with torch.no_grad():
        pipe.unet.conv_in.weight[0, 0, 0, 0] += 1.0


def through_data(pipe: Any) -> None:
    pipe.unet.conv_in.weight.data += 0.5
    pipe.unet.conv_out.bias.data.mul_(2)


@pytest.mark.sweep("more")
@pytest.mark.parametrize("change", [in_place, through_data])
def test_weights_written_to_between_calls_are_loaded_again(
    roomy: Warm, change: Callable[[Any], None]
) -> None:
    roomy.call()
    for pipe in (roomy.plain, roomy.pipe):
        change(pipe)
    assert roomy.call() > 0
    assert roomy.call() == 0


def test_errors_and_release_empty_the_device(roomy: Warm) -> None:
    def fail(*_: Any) -> Any:
        raise KeyboardInterrupt

    roomy.call()
    with pytest.raises(KeyboardInterrupt):
        roomy.pipe(PROMPT, height=16, width=16, num_inference_steps=2, callback_on_step_end=fail)
    assert roomy.device.allocated_bytes == roomy.attachment.held_bytes == 0
    roomy.call()
    with pytest.raises(ValueError, match="has to be of type"):
        roomy.pipe(5)
    assert roomy.device.allocated_bytes == 0
    assert roomy.call() > 0
    roomy.attachment.release()
    assert roomy.device.allocated_bytes == 0
    roomy.call(
        callback_on_step_end=lambda pipe, step, timestep, values: (
            roomy.attachment.release(),
            values,
        )[1]
    )
    assert roomy.device.allocated_bytes == 0, "released when the call ended"


@pytest.mark.sweep("more")
def test_pipelines_with_one_budget_give_way_to_the_one_that_is_called() -> None:
    bytes_of = weight_bytes(SD.build())
    device, budget = SimulatedDevice(Machine()), graphrun.Budget(int(2.5 * bytes_of))
    first, second, third = (Warm(SD, 0, device=device, budget=budget) for _ in range(3))
    with first.attachment, second.attachment, third.attachment:
        assert first.call() > 0
        assert second.call() > 0
        assert first.call() == second.call() == 0, "both fit"
        assert third.call() > 0
        assert device.allocated_bytes <= 2.5 * bytes_of
        assert second.call() == 0, "the one called longest ago gave way"
        assert first.attachment.held_bytes < second.attachment.held_bytes
        assert first.call() > 0


def test_budgets_of_their_own_are_kept_beside_each_other_until_the_device_is_full() -> None:
    bytes_of = weight_bytes(SD.build())
    device = SimulatedDevice(Machine(capacity_bytes=int(1.6 * bytes_of)))
    first, second = (Warm(SD, 1.3, device=device) for _ in range(2))
    with first.attachment, second.attachment:
        first.call()
        second.call()
        assert device.allocated_bytes <= 1.6 * bytes_of
        assert 0 < first.attachment.held_bytes < second.attachment.held_bytes
        first.call()


def test_a_call_inside_the_call_of_another_pipeline_leaves_nothing(roomy: Warm) -> None:
    """The other one's plan knows nothing of its weights. On `sim` a call inside a call is not
    possible, so one is feigned."""
    inner = Warm(SD, 10.0, device=roomy.device)
    with inner.attachment:
        roomy.call()
        roomy.attachment._host.awake = True
        inner.call()
        roomy.attachment._host.awake = False
        assert inner.attachment.held_bytes == 0 < roomy.attachment.held_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vram": 8}, r"vram: 8 has no unit: did you mean 8G\?"),
        ({"vram": "8"}, r"vram: '8' has no unit: did you mean 8G\?"),
        ({"vram": 8.0}, r"vram: 8\.0 has no unit: did you mean 8G\?"),
        ({"vram": True}, "vram: True is not a size; write it as 8G"),
        ({"vram": float("nan")}, "vram: nan is not a size; write it as 8G"),
        (
            {"vram": "1G", "between_calls": "cold"},
            "between_calls 'cold' is not known; use warm or empty",
        ),
        ({"vram": "1G", "budget": graphrun.Budget("1G")}, "leave those out"),
        ({}, "no memory of its own: give vram"),
        ({"vram": "1G", "pin": ["unett"]}, "pin unett: no such component; did you mean 'unet'"),
        ({"vram": "1G", "allow": ["nf4"]}, "allow nf4: this graph knows cpu"),
    ],
)
def test_arguments_that_mean_nothing_are_refused_at_once(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        graphrun.attach(SD.build(), device="sim", **options)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((8,), r"vram: 8 has no unit: did you mean 8G\?"), (("8G", "many"), "ram: 'many'")],
)
def test_a_budget_of_what_is_no_size_is_refused_when_it_is_made(sizes: Any, message: str) -> None:
    for whole in ("24G,12G", ["24G", "12G"], "50%", 8e9, None, "auto"):
        graphrun.Budget(whole, "auto", 0)
    with pytest.raises(InputError, match=message):
        graphrun.Budget(*sizes)


def test_choices_of_plan_are_those_of_attach() -> None:
    warm = Warm(SD, 10.0, pinned="1K", allow=["cpu"])
    with warm.attachment:
        warm.call()
        assert warm.attachment.solution is not None
        stores = {c.variants[0].backing_store for c in warm.attachment.solution.chosen.components}
        assert stores == {"pageable"}
        assert "cpu" in warm.attachment.solution.problem.allow
    warm = Warm(
        SD,
        0,
        budget=graphrun.Budget(None),
        device=SimulatedDevice(Machine(capacity_bytes=1 << 30)),
        pin=["unet"],
    )
    with warm.attachment:
        warm.call()
        assert warm.attachment.solution is not None
        assert warm.attachment.solution.problem.budget_bytes == int(0.95 * (1 << 30))
        assert warm.attachment.solution.problem.demanded("unet") == {"pin"}


@pytest.mark.sweep("warm")
@pytest.mark.parametrize("share", [0.5, 0.9, 10.0])
@pytest.mark.parametrize("name", TABLE)
def test_table_of_pipelines_at_three_budgets(name: str, share: float) -> None:
    """Calls 2 to 5 move no more than one from an empty device, and nothing where all fits; two
    lengths in turn; detached clean.

    Where half of the weights is less than the largest layer and its activation take, the budget is
    the least there is."""
    case = CASES[name]
    warm = Warm(case, share)
    lengths = [{}, {"num_inference_steps": 3}]
    try:
        first = warm.call()
    except Infeasible as error:
        assert share < 0.9
        warm.attachment.detach()
        warm = Warm(case, share, vram=error.smallest_budget_bytes)
        first = warm.call()
    with warm.attachment:
        steady = [warm.call() for _ in range(4)]
        assert steady == [steady[0]] * 4
        assert steady[0] <= first
        assert share < 10 or steady[0] == 0
        turns = [warm.call(**lengths[number % 2]) for number in range(1, 6)]
        assert share < 10 or turns == [0] * 5
    assert warm.device.allocated_bytes == 0
    assert type(warm.pipe) is case.kind
    assert equal(case.call(warm.pipe), case.call(warm.plain))


def test_the_registry_of_hooks_that_the_first_call_makes_is_no_change_of_the_pipeline() -> None:
    warm = Warm(CASES["FluxPipeline"], 10.0)
    with warm.attachment:
        warm.call()
        assert warm.pipe.transformer._diffusers_hook.hooks == {}
        first = warm.attachment._meta_pipeline
        assert warm.call() == 0
        assert warm.attachment._meta_pipeline is first, "no second dry run"


def test_planning_says_one_line_and_notebooks_show_the_report(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines: list[str] = []
    warm = Warm(SD, 10.0, tell=lines.append)
    with warm.attachment, caplog.at_level("INFO", "graphrun"):
        assert "StableDiffusionPipeline within" in repr(warm.attachment)
        assert "not called yet" in warm.attachment._repr_html_()
        warm.call()
        warm.call(prompt="another text")
        assert lines == [record.message for record in caplog.records] == [lines[0]]
        assert lines[0].startswith(
            "StableDiffusionPipeline call: planning, once for calls of this kind"
        )
        assert "whole call" in warm.attachment._repr_html_()


@pytest.mark.parametrize(
    "name",
    sampled(
        ["StableDiffusionPipeline", "StableDiffusionXLPipeline-float16"],
        ["StableDiffusionPipeline"],
        "warm",
    ),
)
def test_a_call_of_a_kind_that_is_known_on_disk_is_not_planned_again(
    name: str, tmp_path: Path
) -> None:
    lines: list[str] = []
    warm = Warm(CASES[name], 0.9, ram="8G", cache=tmp_path, tell=lines.append)
    with warm.attachment:
        copied_count = warm.call()
        plan = warm.attachment.solution.plan  # type: ignore[union-attr]
    second = Warm(CASES[name], 0.9, ram="8G", cache=tmp_path, tell=lines.append)
    with second.attachment:
        assert second.call() == copied_count
        assert second.attachment.solution.plan == plan  # type: ignore[union-attr]
        assert second.attachment._meta_pipeline.prober.traces == 0
        assert len(lines) == 1
        second.call(num_inference_steps=4)
        assert len(lines) == 2, "another kind"
        assert second.call() >= 0

    class Mine(type(second.pipe.unet)):  # type: ignore[misc]
        """Of a package whose version nobody knows."""

    second.pipe.unet.__class__ = Mine
    with graphrun.attach(second.pipe, vram="1G", device="sim", cache=tmp_path, tell=lines.append):
        CASES[name].call(second.pipe)
    assert len(lines) == 3
