"""S2.2 and S4.4: modules that another library moves are refused before a run; moving a component
during a run is an error."""

from __future__ import annotations

from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import CpuOffload, ModelHook, add_hook_to_module
from diffusers.hooks import HookRegistry, apply_group_offloading, apply_layerwise_casting
from diffusers.hooks import ModelHook as DiffusersHook
from small_component import (
    PREFETCH,
    WIDE,
    Small,
    device_of,
    plan_of,
    run,
    small_hardware,
    small_problem,
    untouched,
    use,
)
from torch import nn

from graphrun.errors import BrokenPlan, InputError
from graphrun.modules.interceptor import CallInterceptor
from graphrun.runtime.host import Host
from graphrun.runtime.movers import refuse_movers
from graphrun.sim import Machine


def model_offloaded() -> Small:
    module, _ = accelerate.cpu_offload_with_hook(Small(), "cpu")
    return module


def offloaded_by_a_second_hook() -> Small:
    module = add_hook_to_module(Small(), ModelHook())
    return add_hook_to_module(module, CpuOffload(), append=True)


def sequentially_offloaded() -> Small:
    return accelerate.cpu_offload(Small(), "cpu")


def dispatched() -> Small:
    return accelerate.dispatch_model(Small(), {"": "cpu"}, main_device="cpu", force_hooks=True)


def group_offloaded() -> Small:
    module = Small()
    apply_group_offloading(
        module, torch.device("cpu"), torch.device("cpu"), offload_type="leaf_level"
    )
    return module


def cast_by_layer() -> Small:
    module = Small()
    apply_layerwise_casting(module, storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
    return module


def mapped() -> Small:
    module = Small()
    module.hf_device_map = {"embed": "cpu", "wide": 0}
    return module


def on_disk() -> Small:
    module = Small()
    module.hf_device_map = {"": "disk"}
    return module


def with_lora() -> Small:
    class LoraLinear(nn.Module):  # as peft lays its layers out
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base_layer, self.lora_A = (
                base,
                nn.ModuleDict({"cozy": nn.Linear(64, 4, bias=False)}),
            )

    module = Small()
    module.wide[1].expand = LoraLinear(module.wide[1].expand)
    return module


def unread() -> Small:
    return Small().to("meta")


def with_unread_buffer() -> Small:
    module = Small()
    module.scale = module.scale.to("meta")
    return module


def on_device() -> Small:
    with Machine() as machine:
        return Small().to(machine.device)


def compiled() -> Any:
    return torch.compile(Small())


@pytest.mark.parametrize(
    ("make_module", "message"),
    [
        (model_offloaded, "a carries accelerate's CpuOffload.*remove_all_hooks"),
        (offloaded_by_a_second_hook, "a carries accelerate's CpuOffload"),
        (sequentially_offloaded, "carries accelerate's AlignDevicesHook.*remove_hook_from_module"),
        (dispatched, "carries accelerate's AlignDevicesHook"),
        (group_offloaded, "carries diffusers' group_offloading hook"),
        (cast_by_layer, "carries diffusers' layerwise_casting hook"),
        (mapped, "device_map over 0, cpu: load it without device_map"),
        (on_disk, "device_map over disk: load it without device_map"),
        (with_lora, r"a\.wide\.1\.expand carries the LoRA cozy.*unload_lora_weights"),
        (unread, "is on the meta device.*pass a in on the CPU"),
        (with_unread_buffer, "a.scale is on the meta device"),
        (on_device, r"a.embed.weight is on sim:\d+; pass a in on the CPU"),
        (compiled, "a is compiled as a whole"),
    ],
)
def test_s2_2_a_second_mover_is_found_before_anything_moves(make_module: Any, message: str) -> None:
    problem = small_problem(
        {"a": Small(), "b": Small()},
        [[use("a", 1, small_hardware())], [use("b", 1, small_hardware())]],
    )
    first = Small()
    weight = first.embed.weight
    with pytest.raises(InputError, match=message):
        Host({"b": first, "a": make_module()}, problem, device_of(problem))
    assert first.embed.weight is weight


@pytest.mark.parametrize("place", ["cpu", "cuda:0", 0, torch.device("cuda", 0)])
def test_hooks_that_move_nothing_and_a_map_of_one_device_may_stay(place: Any) -> None:
    module = add_hook_to_module(Small(), ModelHook())
    module.hf_device_map = {"": place}
    HookRegistry.check_if_exists_or_initialize(module).register_hook(DiffusersHook(), "cache")
    refuse_movers({"a": module})


def test_loras_that_are_planned_for_and_tensors_named_like_them_may_stay() -> None:
    refuse_movers({"a": with_lora()}, adapters=True)
    module = Small()
    module.lora_A = nn.ModuleDict({"cozy": nn.Linear(64, 4)})
    refuse_movers({"a": module})


def test_taking_the_hooks_off_makes_the_module_good_again() -> None:
    module = sequentially_offloaded()
    accelerate.hooks.remove_hook_from_module(module, recurse=True)
    refuse_movers({"a": module})


@pytest.mark.parametrize(
    "move",
    [lambda m: m.to("cpu"), lambda m: m.cpu(), lambda m: m.half(), lambda m: m.to(torch.float64)],
)
def test_s4_4_moving_a_component_during_a_run_is_refused_and_the_next_run_works(move: Any) -> None:
    modules = {"a": Small(), "b": Small(1)}
    problem = small_problem(
        modules, [[use("a", 4, small_hardware())], [use("b", 1, small_hardware())]]
    )
    device, plan = device_of(problem), plan_of(problem, PREFETCH.format(ring_buffer=2 * WIDE))
    host = Host(modules, problem, device)
    modules["a"].callback = lambda _: move(modules["a"])
    with pytest.raises(BrokenPlan, match=r"moves or casts a\b.*remove the call"):
        run(problem, plan, host, device, ["a"] * 4 + ["b"])
    assert device.allocated_bytes == 0
    modules["a"].callback = None
    assert all(untouched(module) for module in modules.values())
    run(problem, plan, host, device, ["a"] * 4 + ["b"])


@pytest.mark.parametrize("place", ["meta", torch.device("meta", 0)])
def test_to_the_device_of_the_plan_is_nothing(place: Any) -> None:
    module = Small()
    with CallInterceptor({"a": module}, torch.device("meta", 0), lambda *_: None):
        assert module.to(place) is module
        assert module.to(device=place, non_blocking=True) is module
        assert module.to("cpu") is module, "put away from outside"
        assert module.embed.weight.device.type == "cpu"
        with pytest.raises(BrokenPlan):
            module.to("cuda")
    assert module.to("cpu").embed.weight.device.type == "cpu"
