"""Refuse modules whose weights another library moves or casts: two movers break each other.

    accelerate   ``_hf_hook`` on a module (enable_model_cpu_offload, cpu_offload, dispatch_model),
                 ``hf_device_map`` of several devices or the disk on the model
    diffusers    ``_diffusers_hook``, a registry of hooks by name (group offloading, layerwise
                 casting)
    peft         layers with ``lora_A`` around a ``base_layer``
    torch        a component that is compiled as a whole: hooks of its blocks would be compiled too

Only inspects these attributes; imports none of the libraries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from graphrun.errors import InputError
from graphrun.modules.compiled import is_compiled

# accelerate.hooks that move or cast weights; a user's own hook that does neither is allowed
MOVING_HOOKS = frozenset({"CpuOffload", "AlignDevicesHook", "LayerwiseCastingHook"})
# substrings of the names under which such hooks of diffusers.hooks are registered
MOVING_NAMES = ("offload", "layerwise_casting")


def refuse_movers(modules: Mapping[str, nn.Module], *, adapters: bool = False) -> None:
    """Raise InputError if another library moves or casts weights, or weights are not on the CPU.

    The error names the module, the mover, and how to remove it. ``adapters``: allow unfused LoRAs,
    because the caller plans with their bytes.
    """
    for name, module in modules.items():
        if is_compiled(module):
            raise InputError(
                f"{name} is compiled as a whole, and its blocks are moved one by one: pass in the "
                "uncompiled module (torch.compile(m)._orig_mod is m; m.compile() is undone by "
                "m._compiled_call_impl = None), and compile its blocks: "
                f"{name}.compile_repeated_blocks(fullgraph=True), or torch.compile of single blocks"
            )
        for path, child in module.named_modules():
            full_path = f"{name}.{path}" if path else name
            if (hook := _accelerate_hook(child)) is not None:
                raise InputError(
                    f"{full_path} carries accelerate's {hook}, which moves its weights too: call "
                    "pipeline.remove_all_hooks(), or "
                    f"accelerate.hooks.remove_hook_from_module({name}, recurse=True), and pass it "
                    "in on the CPU"
                )
            if (hook := _diffusers_hook(child)) is not None:
                raise InputError(
                    f"{full_path} carries diffusers' {hook} hook, which moves or casts its weights "
                    "too: load the component again without it, or leave modules= out"
                )
            if not adapters and (names := _adapters(child)):
                raise InputError(
                    f"{full_path} carries the LoRA {', '.join(names)}, which is not in the graph, "
                    "so the plan does not count its "
                    "bytes: call pipeline.unload_lora_weights(), or fuse it (pipeline.fuse_lora(), "
                    "then unload_lora_weights())"
                )
        _refuse_device_map(name, module)
        _refuse_off_cpu(name, module)


def _accelerate_hook(module: nn.Module) -> str | None:
    for hook in _nested(getattr(module, "_hf_hook", None)):
        if MOVING_HOOKS & {kind.__name__ for kind in type(hook).__mro__}:
            return type(hook).__name__
    return None


def _nested(hook: Any) -> Iterator[Any]:
    """Yield ``hook``, and the hooks inside it if it is accelerate's SequentialHook."""
    if hook is not None:
        yield hook
        for inner in getattr(hook, "hooks", ()):
            yield from _nested(inner)


def _diffusers_hook(module: nn.Module) -> str | None:
    registered = getattr(getattr(module, "_diffusers_hook", None), "hooks", {})
    return next((name for name in registered if any(part in name for part in MOVING_NAMES)), None)


def _adapters(module: nn.Module) -> list[str]:
    lora_layers = getattr(module, "lora_A", None)
    return (
        sorted(lora_layers)
        if isinstance(lora_layers, Mapping | nn.ModuleDict) and hasattr(module, "base_layer")
        else []
    )


def _refuse_device_map(name: str, module: nn.Module) -> None:
    # A map of one device tells where the weights were loaded, as bitsandbytes' loaders do. It moves
    # nothing, and stays after `module.to("cpu")`.
    places = {str(device) for device in (getattr(module, "hf_device_map", None) or {}).values()}
    if len(places) > 1 or "disk" in places:
        raise InputError(
            f"{name} was loaded with a device_map over {', '.join(sorted(places))}: load it "
            "without device_map"
        )


def _refuse_off_cpu(name: str, module: nn.Module) -> None:
    for path, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise InputError(
                f"{name}.{path} is on the meta device, so it has no weights here: pass {name} in "
                "on the CPU, with weights"
            )
        if tensor.device.type != "cpu":
            raise InputError(
                f"{name}.{path} is on {tensor.device}; pass {name} in on the CPU: call "
                f"{name}.to('cpu')"
            )
