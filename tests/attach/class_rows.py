"""The tables of classes in `docs/pipelines.md`: their cells from what was seen. `make pipelines`
writes them, tests compare."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_attach_features import (
    FEATURES,
    forward_chunking,
    fused_qkv_projections,
    output,
    vae_slicing,
)
from test_attach_pipelines import equal, put_on
from tiny_pipelines import PROMPT, Case, cases

import graphrun
from graphrun.errors import GraphrunError
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.sim import Machine
from graphrun.solve.infeasible import Infeasible

CASES = cases()
OTHER = "two ships"
AMPLE_BYTES = 1 << 40
CLASSES = (
    "FluxPipeline",
    "StableDiffusion3Pipeline",
    "WanPipeline",
    "CogVideoXPipeline",
    "StableDiffusionXLPipeline",
)
HEADS = {
    "attached": "| result | family | classes |\n|---|---|---|\n",
    "features": (
        f"| feature | {' | '.join(name.removesuffix('Pipeline') for name in CLASSES)} "
        f"|\n|---|{'---|' * len(CLASSES)}\n"
    ),
}


def another(case: Case) -> Case | None:
    """``case`` with another text; None where it takes none."""
    if not isinstance(case.arguments().get("prompt"), str):
        return None
    return replace(case, arguments=lambda: {**case.arguments(), "prompt": OTHER})


def least_bytes(case: Case) -> int:
    """The least budget of ``case``, as the refusal of a smaller one says it."""
    device = SimulatedDevice(Machine())
    with (
        graphrun.attach(pipe := case.build(), vram="1K", device=device),
        pytest.raises(Infeasible) as error_info,
    ):
        case.call(pipe, put_on(device))
    return int(error_info.value.smallest_budget_bytes)


def attached_cells(name: str) -> tuple[str, str]:
    """The result and the family of a class. Its result: three calls, another text and the first
    again, attached with a generous budget and with exactly the least one."""
    case, other = CASES[name], another(CASES[name])
    plain = case.build()
    want = case.call(plain)
    texts = [] if other is None else [(other, other.call(plain))]
    replanned, failed = [False, False], [False, False]
    cells = {"calls": [True, True], "texts": [True, True], "detached": [True, True]}
    for number, budget_bytes in enumerate((AMPLE_BYTES, least_bytes(case))):
        pipe, device = case.build(), SimulatedDevice(Machine())
        with (
            suppress(GraphrunError),
            graphrun.attach(pipe, vram=budget_bytes, device=device) as attachment,
        ):
            failed[number] = True
            for current_case, expected in [(case, want)] * 3 + texts + [(case, want)]:
                is_equal = equal(current_case.call(pipe, put_on(device)), expected)
                cells["texts" if current_case is other else "calls"][number] &= is_equal
                assert attachment.solution is not None
                assert attachment.trace is not None
                assert device.allocated_bytes == attachment.held_bytes
                assert attachment.trace.overruns == ()
                assert attachment.trace.peak_bytes <= budget_bytes
                replanned[number] |= attachment.replans != ()
            failed[number] = False
        cells["detached"][number] = (
            device.allocated_bytes == 0 and type(pipe) is case.kind and equal(case.call(pipe), want)
        )
    calls = ["equal" if is_same else "differs" for is_same in cells["calls"]]
    calls = [
        f"{cell}, replanned" if new_cell else cell
        for cell, new_cell in zip(calls, replanned, strict=True)
    ]
    calls = ["fails" if ended else cell for cell, ended in zip(calls, failed, strict=True)]
    parts = {"ample VRAM": calls[0], "minimum VRAM": calls[1]}
    parts["another text"] = "equal" if all(cells["texts"]) else "differs"
    parts["detached"] = "equal" if all(cells["detached"]) else "differs"
    exceptions = [f"{part}: {cell}" for part, cell in parts.items() if cell != "equal"]
    result = "; ".join(exceptions) or "equal"
    return f"{result}{', takes no text' if other is None else ''}", case.family


def lora(pipe: Any) -> None:
    part = "unet" if hasattr(pipe, "unet") else "transformer"
    generator, factors = torch.Generator().manual_seed(1), dict[str, torch.Tensor]()
    for path, layer in getattr(pipe, part).named_modules():
        if isinstance(layer, torch.nn.Linear) and re.search(r"attn\d?\.to_(q|v)$", path):
            factors[f"{part}.{path}.lora_A.weight"] = torch.randn(
                4, layer.in_features, generator=generator
            )
            factors[f"{part}.{path}.lora_B.weight"] = torch.randn(
                layer.out_features, 4, generator=generator
            )
    pipe.load_lora_weights(factors)


def compiled_blocks(pipe: Any) -> None:
    getattr(pipe, "transformer", getattr(pipe, "unet", None)).compile_repeated_blocks(
        backend="eager"
    )


SWITCHES: tuple[Callable[[Any], object], ...] = (lora, *FEATURES, compiled_blocks)
SAME_PICTURE = (forward_chunking, fused_qkv_projections, vae_slicing, compiled_blocks)


def feature_seen(switch: Callable[[Any], object], name: str) -> str:
    """What comes of a feature that is switched on after the first call of an attached pipeline:
    right, or graphrun's refusal; ``-`` if diffusers refuses the setting; ``no effect`` if the
    setting leaves the plain pipeline as it was, and there is nothing to compare."""
    plain = CASES[name].build()
    previous = output(name, plain)
    try:
        switch(plain)
        want = [output(name, plain, prompt) for prompt in (PROMPT, OTHER)]
    except Exception:  # noqa: BLE001 - whatever diffusers refuses it with
        return "-"
    if switch not in SAME_PICTURE and not hooked(plain) and equal(want[0], previous):
        return "no effect"
    pipe, device = CASES[name].build(), SimulatedDevice(Machine())
    weights = sum(
        part.numel() * part.element_size()
        for module in modules(pipe)
        for part in module.parameters()
    )
    with graphrun.attach(pipe, vram=int(0.95 * weights), device=device):
        output(name, pipe)
        try:
            switch(pipe)
            equalities = [
                equal(output(name, pipe, prompt), expected_output)
                for prompt, expected_output in (
                    (PROMPT, want[0]),
                    (OTHER, want[1]),
                    (PROMPT, want[0]),
                )
            ]
        except GraphrunError as error:
            return f"refused: {str(error).splitlines()[0][:200]}"
    with suppress(AttributeError):
        torch.compiler.reset()
    return "right" if all(equalities) else "differs"


def modules(pipe: Any) -> list[torch.nn.Module]:
    return [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]


def hooked(pipe: Any) -> int:
    """The number of modules that a cache of diffusers has hooked."""
    return sum(
        bool(getattr(layer, "_diffusers_hook", None) and layer._diffusers_hook.hooks)
        for module in modules(pipe)
        for layer in module.modules()
    )


def feature_row(switch: Callable[[Any], object]) -> str:
    """A feature on each of `CLASSES`."""
    return (
        f"| {switch.__name__.replace('_', ' ')} | "
        f"{' | '.join(feature_seen(switch, name) for name in CLASSES)} |"
    )
