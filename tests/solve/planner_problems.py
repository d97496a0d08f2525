"""Short builders of problems, for tests of the planner."""

from __future__ import annotations

from graphrun.model.hardware import Hardware
from graphrun.model.problem import (
    BlockGroup,
    ComponentNumbers,
    PhaseNumbers,
    Problem,
    Use,
    ValueNumbers,
    Variant,
)

MIB, GIB = 2**20, 2**30


def hardware(
    capacity_bytes: int = 2**40, context_bytes: int = 0, workspace_bytes: int = 0
) -> Hardware:
    rates = 25e9, 6e9, 25e9, 0.8, 3e9, 1e14
    return Hardware(
        "test", "sim", capacity_bytes, context_bytes, workspace_bytes, *rates, basis="simulated"
    )


def component(
    name: str,
    *groups: tuple[str, int, int] | tuple[str, int, int, bool],
    seconds_per_byte: float = 1 / 25e9,
    movable: bool = True,
    streamable: bool = True,
    host_bytes: int | None = None,
) -> ComponentNumbers:
    """``groups``: (name, number of blocks, bytes of a block[, streamable; by default, if there is
    more than one block])."""
    full = tuple((c[0], c[1], c[2], c[3] if len(c) == 4 else c[1] > 1) for c in groups)
    total = sum(count * nbytes for _, count, nbytes, _ in full)
    variant = Variant(
        "bfloat16",
        "pinned",
        "device",
        tuple(nbytes for _, _, nbytes, _ in full),
        tuple(nbytes * seconds_per_byte for _, _, nbytes, _ in full),
        total if host_bytes is None else host_bytes,
        movable,
        streamable,
    )
    blocks = tuple(
        BlockGroup(k, tuple(f"{k}.{i}" for i in range(count)), streams)
        for k, count, _, streams in full
    )
    return ComponentNumbers(name, total // 2, blocks, (variant,))


def problem(
    budget_bytes: int,
    components: tuple[ComponentNumbers, ...],
    phases: tuple[PhaseNumbers, ...],
    values: tuple[ValueNumbers, ...] = (),
    ram_bytes: int = 2**40,
    card: Hardware | None = None,
) -> Problem:
    return Problem(
        "test",
        "0" * 16,
        (),
        card or hardware(),
        budget_bytes,
        ram_bytes,
        components,
        phases,
        values,
    )


def flux(budget_bytes: int, steps: int = 28) -> Problem:
    """Approximately FLUX.1-dev at 1024x1024 on an RTX 4090 with PCIe 4."""
    components = (
        component("text_encoder", ("unblocked", 1, 246 * MIB)),
        component("text_encoder_2", ("blocks", 24, 370 * MIB), ("unblocked", 1, 251 * MIB)),
        component(
            "transformer",
            ("double", 19, 340 * 10**6),
            ("single", 38, 142 * 10**6),
            ("unblocked", 1, 180 * MIB),
        ),
        component("vae", ("unblocked", 1, 160 * MIB)),
    )
    phases = (
        PhaseNumbers("encode", 0, (Use("text_encoder", 1, (1,), (0.003,)),), 0, 10 * MIB, 0),
        PhaseNumbers(
            "encode", 1, (Use("text_encoder_2", 1, (1, 1), (0.005, 0.001)),), MIB, 98 * MIB, 0
        ),
        PhaseNumbers(
            "denoise",
            0,
            (Use("transformer", steps, (steps,) * 3, (0.0125, 0.0105, 0.002)),),
            2 * MIB,
            468 * MIB,
            468 * MIB,
        ),
        PhaseNumbers("decode", 0, (Use("vae", 1, (1,), (0.3,)),), MIB, 1536 * MIB, 0),
    )
    values = (
        ValueNumbers("embeds", 4 * MIB, "encode", ("denoise",), 2, 2),
        ValueNumbers("latents", MIB, "denoise", ("decode",), 3, 3),
    )
    context = hardware(24 * GIB, 650 * MIB)
    return problem(budget_bytes, components, phases, values, card=context)
