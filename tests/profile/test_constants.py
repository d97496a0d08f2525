"""Constant values of meta tensors that a dry run may read: literal sizes, masks, and the worst case
of expert routing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from graphrun import sim
from graphrun.profile.dry_run import Prober
from graphrun.profile.fused_kernels import FusedKernels
from graphrun.profile.recorder import Recorder
from graphrun.profile.recording import Call


def record(module: nn.Module, *args: torch.Tensor) -> tuple[torch.Tensor, Recorder]:
    recorder = Recorder(
        module, [f"experts.{n}" for n in range(len(getattr(module, "experts", ())))]
    )
    recorder.ignore(args)
    with torch.no_grad(), FusedKernels(recorder), recorder:
        result = module(*args)
    recorder.close()
    return result, recorder


class Crop(nn.Module):
    """Like HiDream's unpatchify: a size is moved to the device as a tensor and used as the end of a
    slice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = torch.tensor([3, 5], device=x.device).unsqueeze(0).repeat(len(x), 1)
        height, width = sizes[0]
        return x[:, : height * width].reshape(len(x), height, width)


class Experts(nn.Module):
    """Like HiDream's mixture of experts: two of four experts for each token, each called with the
    tokens that selected it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(8, 8)) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        indices = torch.topk(x[:, :4], k=2, dim=-1).indices.view(-1)
        ends = indices.bincount().cpu().numpy().cumsum(0)
        result = torch.zeros_like(x)
        for expert, begin, end in zip(self.experts, [0, *ends], ends, strict=False):
            if begin != end:
                result[: end - begin] += expert(x[: end - begin])
        return result


def test_a_literal_size_is_constant_after_arithmetic() -> None:
    result, _ = record(Crop(), torch.empty(2, 64, device="meta"))
    assert result.shape == (2, 3, 5)


def test_an_overwritten_tensor_is_no_longer_constant() -> None:
    class Overwritten(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            size = torch.tensor([7], device=x.device)
            size.copy_(x[:1].long())
            return x[: int(size)]

    result, _ = record(Overwritten(), torch.empty(64, device="meta"))
    assert result.shape == (1,), "an unknown size is taken to be 1"


def test_in_the_worst_case_all_tokens_select_the_same_two_experts() -> None:
    result, recorder = record(Experts().to("meta"), torch.empty(32, 8, device="meta"))
    assert result.shape == (32, 8)
    assert recorder.record.entered_blocks == ["experts.0", "experts.1"]
    assert recorder.record.flops == 2 * 32 * 2 * 8 * 8, "two experts for each token"


class Slots(nn.Module):
    """Like Qwen-Image 2.1: each image slot of a text becomes four tokens, numbered on the host, and
    the picture's tokens are put there."""

    def forward(self, text: torch.Tensor, mask: torch.Tensor, picture: torch.Tensor) -> Any:
        counts = torch.where(mask, 4, 1)
        slots = torch.repeat_interleave(mask, counts)
        numbers = [n for n, is_slot in enumerate(slots.tolist()) if is_slot]
        tokens = text.repeat_interleave(counts, dim=0)
        tokens[slots] = picture
        tokens[slots.nonzero(as_tuple=True)[0]] += picture
        return tokens, torch.tensor(numbers, device=text.device)


def test_masks_among_the_arguments_are_read_where_code_needs_them() -> None:
    prober = Prober({"slots": Slots()})
    mask = torch.arange(100) % 4 == 0
    with sim.DryMachine(), prober.interceptor:
        tokens, numbers = prober.interceptor.modules["slots"](
            torch.zeros(100, 8, device=sim.PLANNED),
            mask.to(sim.PLANNED),
            torch.zeros(100, 8, device=sim.PLANNED),
        )
    assert (tokens.shape, numbers.shape) == ((175, 8), (100,))


class Repeated(nn.Module):
    """Equal blocks that get masks of one shape with other values."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Repeating() for _ in range(3)])

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> list[torch.Tensor]:
        return [
            block(x, counts * factor) for block, factor in zip(self.blocks, (1, 3, 1), strict=True)
        ]


class Repeating(nn.Module):
    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(counts, dim=0) * 2


def test_equal_blocks_with_other_masks_are_traced_apart() -> None:
    prober = Prober({"repeated": Repeated()})
    with sim.DryMachine(), prober.interceptor:
        results = prober.interceptor.modules["repeated"](
            torch.zeros(2, 8, device=sim.PLANNED), torch.tensor([1, 2]).to(sim.PLANNED)
        )
    assert [len(result) for result in results] == [3, 9, 3]


def test_a_view_of_an_overwritten_mask_is_no_longer_constant() -> None:
    class Overwritten(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sizes = torch.tensor([7, 7], device=x.device)
            first = sizes[:1]
            sizes.copy_(x[:2].long())
            return x[: int(first)]

    result, _ = record(Overwritten(), torch.empty(64, device="meta"))
    assert result.shape == (1,), "an unknown size is taken to be 1"


class Packed(nn.Module):
    """Like Lumina 2's positions: the length of each text is the sum of its mask."""

    def forward(self, mask: torch.Tensor) -> torch.Tensor:
        lengths = mask.sum(dim=1)
        longest = max(lengths.tolist())
        assert int(lengths.max()) == longest
        return torch.zeros(len(mask), longest + 4, device=mask.device)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_the_sum_of_a_mask_is_that_of_a_mask_of_ones(dtype: torch.dtype) -> None:
    result, _ = record(Packed(), torch.empty(2, 16, dtype=dtype, device="meta"))
    assert result.shape == (2, 20)


class Sorted(nn.Module):
    """Like HunyuanVideo 1.5 and HunyuanImage: valid tokens first, then the padding."""

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        mask = mask.bool()
        return torch.stack(
            [torch.cat([text[row], text[~row]]) for text, row in zip(tokens, mask, strict=True)]
        )


def test_a_mask_selects_every_row_and_its_complement_none() -> None:
    result, recorder = record(
        Sorted(),
        torch.empty(2, 16, 64, device="meta"),
        torch.empty(2, 16, dtype=torch.int64, device="meta"),
    )
    assert result.shape == (2, 16, 64)
    sizes = [event.nbytes for event in recorder.record.events if event.nbytes]
    assert sizes.count(16 * 64 * 4) == 4, "for each text, the selected rows and their concatenation"
    assert sizes.count(512) == 5, (
        "the mask, and for each text the complement of its row and two index columns"
    )


class Positions(nn.Module):
    """Like Ernie-Image's and Mochi's positions: computed in fp32 whatever autocast the caller has
    enabled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with (
            torch.autocast(x.device.type, enabled=False),
            torch.autocast(x.device.type, torch.float32),
        ):
            return x.float() @ x.float().T


def test_code_that_disables_autocast_is_traced_on_meta() -> None:
    positions = Positions()
    prober = Prober({"positions": positions})
    with sim.DryMachine(), prober.interceptor:
        assert positions(torch.zeros(4, 8, device=sim.PLANNED)).shape == (4, 4)
    call = prober.recording.items[-1]
    assert isinstance(call, Call)
    assert call.flops == 2 * 4 * 8 * 4
    with pytest.raises(RuntimeError, match="unsupported"), torch.autocast("meta", enabled=False):
        pass


def test_code_that_enables_autocast_is_traced_in_the_lower_precision() -> None:
    class Half(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast(x.device.type, torch.bfloat16):
                return (x @ x.T).softmax(-1) @ x

    prober = Prober({"half": Half()})
    with sim.DryMachine(), prober.interceptor:
        result = prober.interceptor.modules["half"](torch.zeros(4, 8, device=sim.PLANNED))
        assert result.dtype == torch.bfloat16
    call = prober.recording.items[-1]
    assert isinstance(call, Call)
    assert call.events


def test_a_new_tensor_at_the_address_of_a_constant_one_is_not_constant() -> None:
    """Masks and selections computed on the host must not affect later device tensors."""

    class Gone(nn.Module):
        def forward(self, mask: torch.Tensor) -> list[int]:
            rows = []
            for _ in range(64):
                (~torch.ones(8, dtype=torch.bool)).sum()
                (~mask[:0]).clone()
                rows.append(len(mask[mask.clone()]))
                torch.ones(8, dtype=torch.bool).all()
                torch.ones(8, dtype=torch.bool).sum()
                rows.append(8 * bool(mask.any().item()))
            return rows

    rows, _ = record(Gone(), torch.ones(8, dtype=torch.bool, device="meta"))
    assert rows == [8] * len(rows)
