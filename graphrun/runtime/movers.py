"""Whether something else moves or changes a module's weights. Found before a run: two movers on one module break each other.

Decides nothing about placement. Must not know plans. Looks at what other libraries leave on modules; imports none of them.

    accelerate   ``_hf_hook`` on a module (enable_model_cpu_offload, cpu_offload, dispatch_model), ``hf_device_map`` on the model
    diffusers    ``_diffusers_hook``, a registry of hooks by name (group offloading, layerwise casting)
    peft         layers that hold ``lora_A`` around a ``base_layer``
    torch        a module that is compiled: its guards hold its parameters
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from graphrun.errors import InputError

# accelerate.hooks: the hooks that move weights or cast them. A hook of one's own that does neither may stay.
MOVING_HOOKS = frozenset({"CpuOffload", "AlignDevicesHook", "LayerwiseCastingHook"})
# diffusers.hooks: parts of the names under which hooks that do so are registered.
MOVING_NAMES = ("offload", "layerwise_casting")


def refuse_movers(modules: Mapping[str, nn.Module], *, adapters: bool = False) -> None:
    """Raises InputError naming the component, who else moves it and how to stop that; also for weights that are not on the CPU.

    ``adapters``: LoRAs may be there, because whoever plans counts them.
    """
    for name, module in modules.items():
        for path, child in module.named_modules():
            place = f"{name}.{path}" if path else name
            if hasattr(child, "_orig_mod") or getattr(child, "_compiled_call_impl", None) is not None:
                raise InputError(
                    f"{place.removesuffix('._orig_mod')} is compiled: what torch.compile made of it holds on to weights where they "
                    "were, and they move: hand it in as it was (torch.compile(m)._orig_mod is m; m.compile() is undone by "
                    "m._compiled_call_impl = None)"
                )
            if (hook := _accelerate_hook(child)) is not None:
                raise InputError(
                    f"{place} carries accelerate's {hook}, which moves its weights too: call pipeline.remove_all_hooks(), or "
                    f"accelerate.hooks.remove_hook_from_module({name}, recurse=True), and hand it in on the CPU"
                )
            if (hook := _diffusers_hook(child)) is not None:
                raise InputError(
                    f"{place} carries diffusers' {hook} hook, which moves or casts its weights too: load the component again "
                    "without it, or leave modules= out"
                )
            if not adapters and (names := _adapters(child)):
                raise InputError(
                    f"{place} carries the LoRA {', '.join(names)}, which the graph does not have, so that the plan does not "
                    "count it: call pipeline.unload_lora_weights(), or fuse it (pipeline.fuse_lora(), then unload_lora_weights())"
                )
        _refuse_device_map(name, module)
        _refuse_elsewhere(name, module)


def _accelerate_hook(module: nn.Module) -> str | None:
    for hook in _flat(getattr(module, "_hf_hook", None)):
        if MOVING_HOOKS & {kind.__name__ for kind in type(hook).__mro__}:
            return type(hook).__name__
    return None


def _flat(hook: Any) -> Iterator[Any]:
    """``hook``, or those that accelerate's SequentialHook holds."""
    if hook is not None:
        yield hook
        for inner in getattr(hook, "hooks", ()):
            yield from _flat(inner)


def _diffusers_hook(module: nn.Module) -> str | None:
    registered = getattr(getattr(module, "_diffusers_hook", None), "hooks", {})
    return next((name for name in registered if any(part in name for part in MOVING_NAMES)), None)


def _adapters(module: nn.Module) -> list[str]:
    held = getattr(module, "lora_A", None)
    return sorted(held) if isinstance(held, Mapping | nn.ModuleDict) and hasattr(module, "base_layer") else []


def _refuse_device_map(name: str, module: nn.Module) -> None:
    placed = getattr(module, "hf_device_map", None) or {}
    if elsewhere := sorted({str(place) for place in placed.values()} - {"cpu"}):
        raise InputError(
            f"{name} was loaded with a device_map that places parts of it on {', '.join(elsewhere)}: load it without device_map"
        )


def _refuse_elsewhere(name: str, module: nn.Module) -> None:
    for path, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise InputError(
                f"{name}.{path} is on meta, so that its weights are elsewhere or were never read: "
                f"hand {name} in on the CPU, with weights"
            )
        if tensor.device.type != "cpu":
            raise InputError(f"{name}.{path} is on {tensor.device}; hand {name} in on the CPU: call {name}.to('cpu')")
