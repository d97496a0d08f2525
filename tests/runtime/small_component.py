"""A small test component: a remainder with tied weights, buffers and mixed dtypes, and two block
groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from graphrun.model.hardware import Hardware
from graphrun.model.plan import Plan, parse
from graphrun.model.problem import (
    ALLOCATION_BYTES,
    BlockGroup,
    ComponentNumbers,
    PhaseNumbers,
    Problem,
    Use,
    Variant,
)
from graphrun.modules.blocks import lay_out
from graphrun.runtime.devices.open import open_device
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.runtime.executor import follow
from graphrun.runtime.host import Host
from graphrun.trace import Trace
from graphrun.units import round_up
from graphrun.verify.solution import solution_of

WIDTH, ROWS = 64, 16
GROUPS = (
    BlockGroup("unblocked", ("",), False),
    BlockGroup("wide", tuple(f"wide.{i}" for i in range(4)), True),
    BlockGroup("thin", tuple(f"thin.{i}" for i in range(6)), True),
)
ACTIVATION_BYTES = 256 * 1024


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.expand = nn.Linear(WIDTH, hidden)
        self.project = nn.Linear(hidden, WIDTH, bias=False)
        self.register_buffer("gain", torch.rand(WIDTH).to(torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.project(torch.relu(self.expand(x))) * self.gain


class Small(nn.Module):
    """``skip``: blocks that a call leaves out. ``inside`` runs after the third block; ``reverse``:
    reverse block order."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Linear(WIDTH, WIDTH)
            self.head = nn.Linear(WIDTH, WIDTH, bias=False)
            self.head.weight = self.embed.weight
            self.wide = nn.ModuleList(Block(3 * WIDTH) for _ in range(4))
            self.thin = nn.ModuleList(Block(WIDTH) for _ in range(6))
            self.register_buffer("scale", torch.tensor(0.5, dtype=torch.float64))
            self.register_buffer("order", torch.arange(WIDTH - 1, -1, -1), persistent=False)
        self.requires_grad_(False)
        self.skip: frozenset[str] = frozenset()
        self.reverse = False
        self.callback: Callable[[torch.Tensor], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)[:, self.order] * self.scale
        blocks = [
            *((f"wide.{i}", b) for i, b in enumerate(self.wide)),
            *((f"thin.{i}", b) for i, b in enumerate(self.thin)),
        ]
        for path, block in reversed(blocks) if self.reverse else blocks:
            if path not in self.skip:
                x = block(x)
            if self.callback is not None and path == "wide.2":
                self.callback(x)
        return self.head(x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.wide:
            x = block(x)
        return x

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.thin:
            x = block(x)
        return x

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.forward(x)
        return x


def small_hardware(h2d: float = 1e9, flops: float = 1e11) -> Hardware:
    return Hardware("sim", "sim", 1 << 40, 0, 0, h2d, h2d, h2d, 1.0, h2d, flops, False, False)


def numbers(name: str, module: nn.Module, hardware: Hardware) -> ComponentNumbers:
    layouts = lay_out(module, [path for k in GROUPS for path in k.blocks])
    sizes = tuple(round_up(layouts[k.blocks[0]].nbytes, ALLOCATION_BYTES) for k in GROUPS)
    loads = tuple(
        hardware.copy_start_seconds + size / hardware.h2d_bytes_per_second for size in sizes
    )
    host_bytes = sum(size * len(k.blocks) for size, k in zip(sizes, GROUPS, strict=True))
    return ComponentNumbers(
        name, 0, GROUPS, (Variant("float32", "pinned", "device", sizes, loads, host_bytes),)
    )


def in_layers(component: ComponentNumbers) -> ComponentNumbers:
    """The small component with each of its layers as a block."""
    groups = tuple(
        BlockGroup(f"{group.name}.{layer}", tuple(f"{path}.{layer}" for path in group.blocks), True)
        for group in GROUPS[1:]
        for layer in ("expand", "project")
    )
    groups = (GROUPS[0], *groups)
    paths = [path for group in groups for path in group.blocks]
    layouts = lay_out(Small(), paths, split_layers=True)
    sizes = tuple(round_up(layouts[group.blocks[0]].nbytes, ALLOCATION_BYTES) for group in groups)
    variant = replace(component.variants[0], block_bytes=sizes, load_seconds=(0.0,) * len(sizes))
    return replace(component, groups=groups, variants=(variant,), granularity="layers")


def use(
    name: str, calls: int, hardware: Hardware, group_calls: tuple[int, ...] | None = None
) -> Use:
    flops = [4 * ROWS * WIDTH * WIDTH, 4 * ROWS * WIDTH * 3 * WIDTH, 4 * ROWS * WIDTH * WIDTH]
    return Use(
        name,
        calls,
        group_calls or (calls, calls, calls),
        tuple(f / hardware.flops_per_second for f in flops),
    )


def small_problem(
    modules: Mapping[str, nn.Module],
    phases: Sequence[Sequence[Use]],
    hardware: Hardware | None = None,
    budget: int = 1 << 30,
) -> Problem:
    hardware = hardware or small_hardware()
    return Problem(
        graph="small",
        graph_digest="0",
        settings=(),
        hardware=hardware,
        budget_bytes=budget,
        ram_bytes=1 << 40,
        components=tuple(numbers(name, module, hardware) for name, module in modules.items()),
        phases=tuple(
            PhaseNumbers(f"s{i}", 0, tuple(uses), 8192, ACTIVATION_BYTES, ACTIVATION_BYTES)
            for i, uses in enumerate(phases)
        ),
    )


def plan_of(problem: Problem, text: str) -> Plan:
    return parse(f"plan {problem.digest}\n{text}")


def device_of(problem: Problem) -> SimulatedDevice:
    """With all of the problem's rates."""
    device = open_device(problem)
    assert isinstance(device, SimulatedDevice)
    return device


def calls_to(
    modules: Mapping[str, Any], calls: Sequence[str], device: torch.device | None
) -> dict[str, torch.Tensor]:
    """Calls ``a``, ``a.encode`` and the like one after another, each on what the last returned."""
    x = torch.linspace(-1, 1, ROWS * WIDTH, device="cpu").reshape(ROWS, WIDTH)
    if device is not None:
        x = x.to(device)
    for call in calls:
        name, _, entry = call.partition(".")
        x = (getattr(modules[name], entry) if entry else modules[name])(x)
    return {"x": x.cpu()}


def run(
    problem: Problem,
    plan: Plan,
    host: Host,
    device: SimulatedDevice,
    calls: Sequence[str],
    **options: Any,
) -> Trace:
    return follow(
        solution_of(problem, plan),
        host,
        device,
        lambda: calls_to(host.modules, calls, device.torch_device),
        **options,
    )


def plain(modules: Mapping[str, nn.Module], calls: Sequence[str]) -> torch.Tensor:
    with torch.no_grad():
        return calls_to(modules, calls, None)["x"]


def tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def untouched(module: nn.Module) -> bool:
    """No hook, no wrapped class, every tensor on the CPU."""
    hooks = any(m._forward_pre_hooks or m._forward_hooks for m in module.modules())
    return (
        not hooks
        and type(module) is Small
        and "forward" not in vars(module)
        and all(t.device.type == "cpu" for t in tensors(module))
    )


ON = small_hardware()
WIDE, THIN = numbers("a", Small(), ON).variants[0].block_bytes[1:]

# ``a`` is called four times, then ``b`` once: a streams all its blocks, and b is loaded during a's
# last three calls.
PREFETCH = """
    slot s0/0:a load
      load a unblocked[0] from pinned
    slot s0/0:a first
      stream a keep unblocked[0] ring buffer {ring_buffer} B
      run
    slot s0/0:a steady x3
      stream a keep unblocked[0] ring buffer {ring_buffer} B
      load b all from pinned
      run
    slot s1/0:b load
      evict a unblocked[0]
    slot s1/0:b first
      run
    slot end
      evict b all
"""
