"""Values on meta that a dry run may read: sizes that code writes out, and the worst case of experts that data picks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphrun import sim
from graphrun.profile.dry_run import Prober
from graphrun.profile.recorder import FusedAttention, Recorder
from graphrun.profile.recording import Mark


def record(module: nn.Module, *args: torch.Tensor) -> tuple[torch.Tensor, Recorder]:
    recorder = Recorder(module, [f"experts.{n}" for n in range(len(getattr(module, "experts", ())))])
    recorder.ignore(args)
    with torch.no_grad(), FusedAttention(recorder), recorder:
        out = module(*args)
    recorder.close()
    return out, recorder


class Crop(nn.Module):
    """As HiDream's unpatchify: a size goes to the device as a tensor, and comes back as a slice's end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = torch.tensor([3, 5], device=x.device).unsqueeze(0).repeat(len(x), 1)
        height, width = sizes[0]
        return x[:, : height * width].reshape(len(x), height, width)


class Experts(nn.Module):
    """As HiDream's mixture: two of four experts for each token, each called with the tokens that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(8, 8)) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        picked = torch.topk(x[:, :4], k=2, dim=-1).indices.view(-1)
        ends = picked.bincount().cpu().numpy().cumsum(0)
        found = torch.zeros_like(x)
        for expert, begin, end in zip(self.experts, [0, *ends], ends, strict=False):
            if begin != end:
                found[: end - begin] += expert(x[: end - begin])
        return found


def test_a_size_that_the_code_says_is_known_after_arithmetic() -> None:
    out, _ = record(Crop(), torch.empty(2, 64, device="meta"))
    assert out.shape == (2, 3, 5)


def test_a_changed_tensor_is_no_longer_known() -> None:
    class Overwritten(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            size = torch.tensor([7], device=x.device)
            size.copy_(x[:1].long())
            return x[: int(size)]

    out, _ = record(Overwritten(), torch.empty(64, device="meta"))
    assert out.shape == (1,), "what nobody can know answers 1"


def test_at_worst_all_tokens_take_the_same_two_experts() -> None:
    out, recorder = record(Experts().to("meta"), torch.empty(32, 8, device="meta"))
    assert out.shape == (32, 8)
    assert recorder.entered == ["experts.0", "experts.1"]
    assert sum(flops for _, flops in recorder.flops) == 2 * 32 * 2 * 8 * 8, "two experts for each token, whichever they are"


class Packed(nn.Module):
    """As Lumina 2's positions: how long each text is, its mask says."""

    def forward(self, mask: torch.Tensor) -> torch.Tensor:
        lengths = mask.sum(dim=1)
        longest = max(lengths.tolist())
        assert int(lengths.max()) == longest
        return torch.zeros(len(mask), longest + 4, device=mask.device)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_a_count_of_what_a_mask_lets_through_is_that_of_a_full_one(dtype: torch.dtype) -> None:
    out, _ = record(Packed(), torch.empty(2, 16, dtype=dtype, device="meta"))
    assert out.shape == (2, 20)


class Sorted(nn.Module):
    """As HunyuanVideo 1.5 and HunyuanImage: tokens that count first, then the padding."""

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        mask = mask.bool()
        return torch.stack([torch.cat([text[of], text[~of]]) for text, of in zip(tokens, mask, strict=True)])


def test_a_full_mask_picks_every_row_and_its_complement_none() -> None:
    out, recorder = record(Sorted(), torch.empty(2, 16, 64, device="meta"), torch.empty(2, 16, dtype=torch.int64, device="meta"))
    assert out.shape == (2, 16, 64)
    made = [nbytes for _, nbytes in recorder.events if nbytes > 0]
    assert made.count(16 * 64 * 4) == 4, "of each text, what was picked and what it was put together to"
    assert made.count(512) == 5, "the mask, and of each text its row's complement and the places that it picks"


class Positions(nn.Module):
    """As Ernie-Image's and Mochi's: they compute in fp32 whatever the caller has turned on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False), torch.autocast(x.device.type, torch.float32):
            return x.float() @ x.float().T


def test_what_turns_autocast_off_is_traced_without_numbers() -> None:
    positions = Positions()
    prober = Prober({"positions": positions})
    with sim.Machine(), prober.interceptor:
        assert positions(torch.zeros(4, 8, device="sim")).shape == (4, 4)
    mark = prober.recording.items[-1]
    assert isinstance(mark, Mark)
    assert mark.call is not None
    assert sum(flops for _, flops in mark.call.flops) == 2 * 4 * 8 * 4
    with pytest.raises(RuntimeError, match="unsupported"), torch.autocast("meta", enabled=False):
        pass


def test_nothing_is_known_of_what_lies_where_something_known_lay() -> None:
    """What the host computes with masks and choices of its own says nothing of what is made on the device after it."""

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
