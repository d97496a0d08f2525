"""Results share memory with each other and with arguments in the dry run as they do in the run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from graphrun import sim
from graphrun.modules.build import on_meta
from graphrun.modules.trees import replace_in, tensors_in
from graphrun.profile.dry_run import Prober
from graphrun.profile.recording import Call
from graphrun.profile.returned import capture_result

KIB = 1024


class Encoder(nn.Module):
    """1 KiB in; returns what ``select`` makes of that and of 4 KiB computed from it."""

    def __init__(self, select: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4), requires_grad=False)
        self.select = select

    def forward(self, x: torch.Tensor) -> Any:
        return self.select(x, x[:, None] * self.weight)


CASES: dict[str, tuple[Callable[..., Any], int]] = {
    "the first half of what was made": (lambda _, product: product[:128], 4 * KIB),
    "two halves": (lambda _, product: product.chunk(2), 4 * KIB),
    "a column, and all of it in other dtypes": (
        lambda _, product: (product[:, 0], product.view(torch.int32)),
        4 * KIB,
    ),
    "another order": (lambda _, product: product.T, 4 * KIB),
    "one number many times": (lambda _, product: product[:1, :1].clone().expand(256, 4), 512),
    "the argument itself": (lambda x, _: x, 0),
    "a part of that, and a sum": (lambda x, product: {"part": x[128:], "sum": product.sum(1)}, KIB),
}


@pytest.mark.parametrize("name", CASES)
def test_a_result_takes_the_same_memory_in_the_dry_run_as_on_the_device(name: str) -> None:
    select, expected_bytes = CASES[name]
    with sim.Machine() as machine:
        x = torch.ones(256, device="sim")
        baseline = machine.allocated_bytes
        real = Encoder(select)
        real.weight = nn.Parameter(torch.ones(4, device="sim"), requires_grad=False)
        want = real(x)
        del real
        assert machine.allocated_bytes - baseline == expected_bytes
    prober = Prober({"encoder": Encoder(select).to("meta")})
    with sim.DryMachine() as machine, prober.interceptor:
        x = torch.ones(256, device=sim.PLANNED)
        baseline = machine.allocated_bytes
        for _ in range(2):  # traced, then cached
            got = prober.meta_modules["encoder"](x)
            assert machine.allocated_bytes - baseline == expected_bytes
        assert shapes(got) == shapes(want)


def shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.storage_offset(), value.dtype
    return [shapes(item) for item in (value.values() if isinstance(value, dict) else value)]


def test_an_argument_with_other_strides_is_not_returned_as_a_view() -> None:
    """One trace is used for all strides."""
    x = torch.ones(4, 4, device="meta")
    result = capture_result(x[1:], (x,), {}, set())
    matrix = torch.ones(4, 4)
    assert result.materialize((matrix,), torch.device("cpu")).data_ptr() == matrix[1:].data_ptr()
    assert (
        result.materialize((matrix.T,), torch.device("cpu")).untyped_storage().data_ptr()
        != matrix.data_ptr()
    )
    assert result.nbytes == 0


class Brought(nn.Module):
    """Like Lumina's transformer: copies a table from the host to the device, and returns another
    one on the host."""

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + table.to(x.device), table.cpu()


def test_a_host_argument_takes_device_memory_only_when_it_is_copied_there() -> None:
    module = Brought()
    prober = Prober({"brought": module})
    with sim.DryMachine() as machine, prober.interceptor:
        x = torch.ones(256, device=sim.PLANNED)
        baseline = machine.allocated_bytes
        sums, table = prober.meta_modules["brought"](x, torch.ones(256))
        assert machine.allocated_bytes - baseline == KIB
        assert (sums.device.type, table.device.type) == (sim.PLANNED.type, "cpu")
        prober.meta_modules["brought"](x, torch.ones(256, device=sim.PLANNED))
    of_host, of_device = (item for item in prober.recording.items if isinstance(item, Call))
    assert (of_host.peak_bytes, of_host.input_bytes) == (2 * KIB, KIB)
    assert (of_device.peak_bytes, of_device.input_bytes) == (KIB, 2 * KIB)


@dataclass
class Tables:
    rows: torch.Tensor


class Positioned(nn.Module):
    """Like Qwen-Image 2.1: tables of positions outside of its weights, moved to the device at the
    first call. ``reads_numbers``: its code reads a number of its input, so it runs on the CPU."""

    def __init__(self, container: Callable[[torch.Tensor], Any], reads_numbers: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 256).requires_grad_(False)
        self.tables, self.reads_numbers = container(torch.arange(4096.0)), reads_numbers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reads_numbers and x[0, 0].numpy() > 5:
            x = x + 1
        self.tables = replace_in(self.tables, lambda table: table.to(x.device))
        (table,) = tensors_in(self.tables)
        return self.layer(x) + table[torch.arange(256, device=x.device)]


@pytest.mark.parametrize("reads_numbers", [False, True])
@pytest.mark.parametrize("is_built_on_meta", [False, True])
@pytest.mark.parametrize(
    "container",
    [lambda table: [table], lambda table: (table,), lambda table: {"rows": table}, Tables],
)
@pytest.mark.filterwarnings("ignore:positioned.forward needs tensor values")
def test_tables_in_any_container_take_memory_from_their_move_on(
    container: Callable[[torch.Tensor], Any], is_built_on_meta: bool, reads_numbers: bool
) -> None:
    with on_meta() if is_built_on_meta else nullcontext():
        module = Positioned(container, reads_numbers)
    module.layer.to("meta")
    prober = Prober({"positioned": module}, weights=lambda _: Positioned(container, reads_numbers))
    with sim.DryMachine(), prober.interceptor:
        prober.meta_modules["positioned"](torch.zeros(4, 8, device=sim.PLANNED))
    call = prober.recording.items[-1]
    assert isinstance(call, Call)
    sizes = {event.key: event.nbytes for event in call.events if event.nbytes}
    assert [sizes[key] for key in call.persistent_keys] == [16 * KIB]
    order = [*sizes.values()]
    assert order.index(16 * KIB) < order.index(4 * KIB), "before the layer computes"


class Renderer(nn.Module):
    """Like Shap-E's renderer: a method with a device argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4), requires_grad=False)

    def render(self, x: torch.Tensor, device: torch.device) -> torch.Tensor:
        return x[:, None] * self.weight + torch.ones(4, device=device)


def test_a_device_argument_is_replaced_by_the_traced_device() -> None:
    prober = Prober({"renderer": Renderer().to("meta")})
    with sim.DryMachine(), prober.interceptor:
        result = prober.meta_modules["renderer"].render(
            torch.ones(8, device=sim.PLANNED), sim.PLANNED
        )
    assert (result.shape, result.device.type) == ((8, 4), sim.PLANNED.type)


def test_a_view_of_a_weight_is_a_separate_tensor() -> None:
    weight = torch.ones(64, 4, device="meta")
    result = capture_result((weight[:2], weight[2:4]), (), {}, {weight.untyped_storage()._cdata})
    assert result.nbytes == 2 * 2 * 4 * 4


class Counted(nn.Module):
    """As many rows as the largest of its numbers, which their shape does not say."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.weight[None].expand(len(torch.bincount(numbers.long())), 4) * 2


def counted(
    numbers: torch.Tensor, weights: Callable[[str], nn.Module] | None = None
) -> torch.Tensor:
    prober = Prober({"counted": Counted().to("meta")}, weights=weights)
    with sim.DryMachine(), prober.interceptor:
        counts = prober.meta_modules["counted"](numbers.to(sim.PLANNED))
        assert all(weight.is_meta for weight in prober.meta_modules["counted"].parameters())
    return counts  # type: ignore[no-any-return]


def test_integers_among_the_arguments_are_read_without_weights() -> None:
    assert counted(torch.tensor([0, 1, 2, 2])).shape == (3, 4)


def test_an_entry_that_reads_numbers_is_traced_on_the_cpu_where_weights_can_be_had() -> None:
    def made(weights: Callable[[str], nn.Module] | None) -> torch.Tensor:
        return counted(torch.tensor([0.0, 1.0, 2.0, 2.0]), weights)

    with pytest.warns(
        RuntimeWarning,
        match=r"counted.forward needs tensor values \(NotImplementedError.*once on the CPU",
    ):
        result = made(lambda _: Counted())
    assert (result.shape, result.device.type) == ((3, 4), sim.PLANNED.type)
    with pytest.raises(NotImplementedError, match="bincount"):
        made(None)
    with pytest.raises(NotImplementedError, match="bincount"):
        made(lambda _: nn.Linear(1, 1))


def test_tokens_that_a_call_computed_keep_their_values() -> None:
    """Pipeline code decides by them: FLUX.3 refuses an empty caption."""
    tokens, cpu = torch.tensor([[5, 7]]), torch.device("cpu")
    returned = capture_result(tokens, [], {}, (), cpu)
    assert torch.equal(returned.materialize(((), {}), cpu), tokens)


class Writer(nn.Module):
    """Like a language model: some tokens after those of the prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Parameter(torch.ones(8, 4), requires_grad=False)

    def generate(self, input_ids: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            scores = self.embeddings[input_ids[:, -1]] @ self.embeddings.T
            input_ids = torch.cat([input_ids, scores.argmax(-1, keepdim=True)], dim=1)
        return input_ids


def test_generated_tokens_repeat_those_of_the_prompt() -> None:
    prober = Prober({"writer": Writer().to("meta")})
    with sim.DryMachine() as machine, prober.interceptor:
        prompt = torch.tensor([[5, 6, 7]], device=sim.PLANNED)
        baseline = machine.allocated_bytes
        tokens = prober.meta_modules["writer"].generate(input_ids=prompt)
        assert (machine.allocated_bytes - baseline, tokens.device) == (512, sim.PLANNED)
        assert tokens.tolist() == [[5, 6, 7, 6, 7, 5]]
