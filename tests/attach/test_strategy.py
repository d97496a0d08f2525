"""`graphrun.strategy` in diffusers' ComponentsManager: the order of uses, and the bytes that it
moves, next to diffusers' default strategy."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from typing import Any

import diffusers as d
import pytest
import torch
from test_attach_pipelines import equal, weight_bytes
from tiny_pipelines import Case, cases
from torch import nn

import graphrun
from graphrun.diffusers_.strategy import COMPARED, next_uses
from graphrun.errors import InputError

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from peers_machine import Sim  # noqa: E402

KIB = 1024


class Component:
    """A component of a manager without a device: a hook, and a module of ``size`` KiB."""

    def __init__(self, name: str, size: int) -> None:
        self.model_id, self.model = name, nn.Linear(size * KIB // 4, 1, bias=False)
        self.hook: Any = type("Hook", (), {})()
        self.hook.pre_forward = lambda *_: None
        self.model._hf_hook = self.hook  # type: ignore[assignment]


class Manager:
    """What `ComponentsManager` does with a strategy, counted in KiB."""

    def __init__(self, sizes: dict[str, int], strategy: Any) -> None:
        self.components = {name: Component(name, size) for name, size in sizes.items()}
        for component in self.components.values():
            component.hook.other_hooks = [
                other for other in self.components.values() if other is not component
            ]
        self.sizes, self.strategy = sizes, strategy
        self.present, self.moved_kib = list[str](), 0

    def use(self, name: str) -> None:
        component = self.components[name]
        component.hook.pre_forward(component.model)
        if name in self.present:
            return
        hooks = [self.components[other] for other in self.components if other in self.present]
        leaving = self.strategy(
            hooks=hooks, model_id=name, model=component.model, execution_device="cpu"
        )
        for hook in leaving:
            self.present.remove(hook.model_id)
            self.moved_kib += self.sizes[hook.model_id]
        self.present.append(name)
        self.moved_kib += self.sizes[name]

    def uses(self, names: Sequence[str]) -> int:
        """The KiB moved for ``names``."""
        before_use = self.moved_kib
        for name in names:
            self.use(name)
        return self.moved_kib - before_use


def fewest(sizes: dict[str, int], names: Sequence[str], budget: int, rounds: int) -> float:
    """The fewest KiB per round of ``names``, over many rounds: every policy is tried."""
    states = {frozenset[str](): 0}
    for name in list(names) * rounds:
        next_states = dict[frozenset[str], int]()
        for residents, cost in states.items():
            options = (
                [residents]
                if name in residents
                else [
                    frozenset(choice) | {name}
                    for count in range(len(residents) + 1)
                    for choice in combinations(sorted(residents), count)
                ]
            )
            for option in options:
                if sum(sizes[other] for other in option) > budget and len(option) > 1:
                    continue
                option_cost = cost + sum(sizes[other] for other in residents - option)
                option_cost += sum(sizes[other] for other in option - residents)
                next_states[option] = min(option_cost, next_states.get(option, option_cost))
        states = next_states
    return min(states.values()) / rounds


def test_the_next_uses_follow_the_longest_match() -> None:
    assert next_uses([]) == next_uses(["a", "b"]) == []
    assert next_uses(["a", "b", "c", "a"]) == [], "one use does not tell the order"
    assert next_uses(["a", "b", "c", "a", "b"]) == ["c", "a", "b"] * 2
    # after b and c comes d, although a followed the last c
    assert next_uses(["b", "c", "d", "x", "c", "a", "b", "c"])[:2] == ["d", "x"]


@pytest.mark.parametrize("seed", range(8))
def test_once_the_order_was_seen_the_fewest_bytes_move(seed: int) -> None:
    draw = random.Random(seed)
    names = "abcd"[: draw.randint(3, 4)]
    sizes = {name: draw.choice([1, 2, 3, 5, 8]) for name in names}
    budget = max(max(sizes.values()), int(sum(sizes.values()) * draw.uniform(0.5, 0.95)))
    order = [*names, *draw.sample(names, len(names) - 1)]
    manager = Manager(sizes, graphrun.strategy(budget * KIB, reserve=0))
    manager.uses(order * 3)
    round_kib = manager.uses(order * 6) / 6
    assert round_kib <= fewest(sizes, order, budget, 12) + max(sizes.values()) / 3
    assert sum(sizes[name] for name in manager.present) <= budget


def test_an_order_that_only_begins_as_before_does_not_evict_more() -> None:
    sizes = {"a": 1, "b": 8, "c": 5, "d": 3}
    manager = Manager(sizes, graphrun.strategy(11 * KIB, reserve=0))
    # the first b is followed by c, the second by a
    assert manager.uses("abcdbad" * 2) <= 47 + 42, "the smallest sufficient combination moves"


def test_before_an_order_is_known_the_fewest_bytes_leave_and_then_the_least_recently_used() -> None:
    sizes = {"a": 3, "b": 3, "c": 1, "d": 3}
    manager = Manager(sizes, graphrun.strategy(8 * KIB, reserve=0))
    manager.uses("abcd")
    assert manager.present == ["b", "c", "d"], "c is too small, a was used before b"
    manager = Manager({**sizes, "d": 2}, graphrun.strategy(8 * KIB, reserve=0))
    manager.uses("abcd")
    assert manager.present == ["a", "b", "d"]


def test_more_components_than_are_compared_leave_by_beladys_rule() -> None:
    names = [f"component_{number}" for number in range(COMPARED + 2)]
    manager = Manager(dict.fromkeys(names, 1), graphrun.strategy((COMPARED + 1) * KIB, reserve=0))
    manager.uses(names * 3)
    # all but one fit: one use in as many as fit copies a component in, and one out
    rounds = COMPARED + 1
    assert manager.uses(names * rounds) == pytest.approx(2 * len(names), abs=4)


def test_room_is_a_quarter_until_the_devices_peak_shows_more_or_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peak = [0]
    monkeypatch.setattr(torch.cpu, "max_memory_allocated", lambda device: peak[0], raising=False)
    manager = Manager({"a": 4, "b": 4}, graphrun.strategy(16 * KIB))
    manager.use("a")
    assert "4.00 KiB of 16.00 KiB for activations" in manager.strategy.report()
    peak[0] = 18 * KIB  # both are on this device, the host: the use of a took 10
    manager.use("b")
    peak[0] = 30 * KIB
    manager.use("a")
    assert "22.00 KiB of 16.00 KiB" in manager.strategy.report()
    fixed = Manager({"a": 4, "b": 4}, graphrun.strategy(16 * KIB, reserve=2 * KIB))
    fixed.uses("abab")
    assert "2.00 KiB of 16.00 KiB for activations" in fixed.strategy.report()


def test_what_cannot_fit_is_let_in_alone_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    manager = Manager({"a": 1, "b": 9}, graphrun.strategy(4 * KIB, reserve=0))
    with caplog.at_level(logging.WARNING):
        manager.uses("ab")
    assert manager.present == ["b"]
    assert "b takes 9.00 KiB, more than the budget of 4.00 KiB: graphrun.attach" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("8",), "'8' has no unit"),
        (("50%",), "no device is known here"),
        (("8G", "8G"), "reserve 8G: .* vram 8G"),
    ],
)
def test_wrong_sizes_are_refused(arguments: tuple[str, ...], message: str) -> None:
    vram, *reserve = arguments
    with pytest.raises(InputError, match=message):
        graphrun.strategy(vram, reserve=reserve[0] if reserve else None)


def test_a_module_of_no_manager_is_refused() -> None:
    with pytest.raises(InputError, match="is no component of a ComponentsManager"):
        graphrun.strategy("8G")([], "net", nn.Linear(1, 1), torch.device("cpu"))


# -- in the manager of diffusers, on the simulated accelerator


def pipelines(first: str, second: str) -> list[tuple[Case, Any]]:
    """Two pipelines that share all components that both have."""
    second_pipe = cases()[second].build()
    parts = {name: part for name, part in second_pipe.components.items() if name != "controlnet"}
    first_pipe = cases()[first].kind(**parts)
    first_pipe.set_progress_bar_config(disable=True)
    return [(cases()[first], first_pipe), (cases()[second], second_pipe)]


def moved(
    build: Callable[[], list[tuple[Case, Any]]], share: float, order: str, *, is_default: bool
) -> tuple[int, float, list[Any]]:
    """Bytes copied in both directions, virtual seconds, and the pictures."""
    pairs = build()
    modules = {
        name: part
        for _, pipe in pairs
        for name, part in pipe.components.items()
        if isinstance(part, nn.Module)
    }
    weights = sum(map(module_bytes, modules.values()))
    activation_bytes = peak_beyond_weights(build)
    cap_bytes = int(share * weights) + activation_bytes
    simulator, manager = Sim(cap_bytes), d.ComponentsManager()
    with simulator.open(), torch.no_grad():
        for name, module in modules.items():
            manager.add(name, module)
        options: dict[str, Any] = {"memory_reserve_margin": activation_bytes}
        if not is_default:
            options["offload_strategy"] = graphrun.strategy(cap_bytes, reserve=activation_bytes)
        manager.enable_auto_cpu_offload(simulator.device, **options)
        start_bytes, start = dict(simulator.moved()), simulator.seconds()
        pictures = [
            pairs[int(number)][0].call(
                pairs[int(number)][1], lambda tensor: tensor.to(simulator.device)
            )
            for number in order
        ]
        seconds, end_bytes = simulator.seconds() - start, simulator.moved()
    assert simulator.peak_bytes() <= cap_bytes
    nbytes = sum(end_bytes[way] - start_bytes[way] for way in ("in", "out"))
    return nbytes, seconds, pictures


def module_bytes(module: nn.Module) -> int:
    return sum(
        t.nbytes for t in {id(t): t for t in (*module.parameters(), *module.buffers())}.values()
    )


@cache
def peak_beyond_weights(build: Callable[[], list[tuple[Case, Any]]]) -> int:
    """Bytes of the largest call beyond weights."""
    largest_bytes = 0
    for number in range(2):
        (case, pipe), simulator = build()[number], Sim(None)
        with simulator.open(), torch.no_grad():
            pipe.to(simulator.device)
            case.call(pipe, lambda tensor: tensor.to(simulator.device))  # noqa: B023
        largest_bytes = max(largest_bytes, simulator.peak_bytes() - weight_bytes(pipe))
    return largest_bytes


PAIRS = {
    "sdxl": ("StableDiffusionXLPipeline", "StableDiffusionXLControlNetPipeline"),
    "flux": ("FluxPipeline", "FluxImg2ImgPipeline"),
}
FEWER = ("sdxl", 0.5)


@pytest.mark.sweep("more", sample=1)
@pytest.mark.long
@pytest.mark.parametrize(("name", "share"), [FEWER, ("flux", 0.5), ("flux", 0.7), ("flux", 0.9)])
def test_shared_components_move_no_more_bytes_than_with_diffusers_default(
    name: str, share: float
) -> None:
    order, build = "010101", partial(pipelines, *PAIRS[name])
    expected = [case.call(pipe) for case, pipe in build()]
    nbytes, seconds, pictures = moved(build, share, order, is_default=False)
    default_bytes, default_seconds, default_pictures = moved(build, share, order, is_default=True)
    for number, (picture, default_picture) in enumerate(
        zip(pictures, default_pictures, strict=True)
    ):
        assert equal(picture, expected[number % 2])
        assert equal(default_picture, expected[number % 2])
    assert nbytes <= default_bytes
    assert seconds <= 1.001 * default_seconds
    if (name, share) == FEWER:
        assert nbytes < 0.9 * default_bytes
        assert seconds < default_seconds
