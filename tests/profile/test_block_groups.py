"""How components are split into blocks and block groups."""

from __future__ import annotations

import torch
from torch import nn

from graphrun.model.problem import BlockGroup, ComponentNumbers, Variant
from graphrun.profile.block_groups import UNBLOCKED, block_paths, group_blocks, routed_lists
from graphrun.profile.hardware import simulated
from graphrun.profile.recording import Call, Kernel
from graphrun.profile.uses import use_of


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)


class Net(nn.Module):
    def __init__(self, first: int, second: int, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.double = nn.ModuleList(Block(2 * width) for _ in range(first))
        self.single = nn.ModuleList(Block(width) for _ in range(second))


class Unet(nn.Module):
    """Lists of unequal elements that contain lists of equal ones, as a UNet's attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.down_blocks = nn.ModuleList([nn.Linear(4, 4), Net(0, 3), Net(0, 3)])


def paths(name: str, count: int) -> list[str]:
    return [f"{name}.{n}" for n in range(count)]


def test_elements_of_lists_of_equal_modules_are_the_blocks() -> None:
    assert block_paths(Net(2, 3)) == [*paths("double", 2), *paths("single", 3)]


def test_inner_list_elements_are_the_blocks_if_they_make_up_most_of_an_element() -> None:
    assert block_paths(Unet()) == [f"down_blocks.{n}.single.{m}" for n in (1, 2) for m in range(3)]


def test_groups_are_in_call_order_not_in_creation_order() -> None:
    entered_blocks = [*paths("single", 3), "double.1", "double.0"]
    unblocked, first, second = group_blocks(Net(2, 3), [Call(entered_blocks=entered_blocks)])
    assert (unblocked.blocks, unblocked.streamable) == (("",), False)
    assert (first.name, first.blocks) == ("single", tuple(paths("single", 3)))
    assert (second.name, second.blocks) == ("double", ("double.1", "double.0"))


def test_blocks_that_no_call_entered_are_in_the_unblocked() -> None:
    assert [
        group.name for group in group_blocks(Net(2, 3), [Call(entered_blocks=paths("double", 2))])
    ] == ["unblocked", "double"]


def test_blocks_of_almost_equal_bytes_are_one_group() -> None:
    net = Net(0, 4, 256)
    net.single[0].bias_table = nn.Parameter(torch.zeros(64))
    assert [
        len(group.blocks) for group in group_blocks(net, [Call(entered_blocks=paths("single", 4))])
    ] == [1, 4]


def test_a_group_too_small_to_stream_is_in_the_unblocked() -> None:
    net = Net(2, 2, 64)
    net.embed = nn.Linear(2048, 2048)
    assert [
        group.name
        for group in group_blocks(
            net, [Call(entered_blocks=[*paths("double", 2), *paths("single", 2)])]
        )
    ] == ["unblocked"]


def test_a_child_that_other_calls_read_is_a_separate_group() -> None:
    net = nn.ModuleDict({"encoder": nn.Linear(16, 16), "decoder": nn.Linear(64, 64)})
    groups = group_blocks(net, [Call(read_weights={"decoder.weight", "decoder.bias"})])
    assert [(group.name, group.blocks, group.streamable) for group in groups] == [
        ("unblocked", ("",), False),
        ("encoder", ("encoder",), False),
    ]


def test_a_group_is_split_where_blocks_of_another_group_are_called() -> None:
    entered_blocks = ["single.0", "single.1", "double.0", "double.1", "single.2"]
    groups = group_blocks(Net(2, 3, 64), [Call(entered_blocks=entered_blocks)])
    assert [(group.name, group.blocks) for group in groups[1:]] == [
        ("single", ("single.0", "single.1")),
        ("double", ("double.0", "double.1")),
        ("single_2", ("single.2",)),
    ]


class Mixture(nn.Module):
    """A block that consists mostly of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.Linear(4, 4))
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(8, 8)) for _ in range(4)])


def test_routed_experts_are_streamed_with_their_block() -> None:
    net = nn.Module()
    net.blocks = nn.ModuleList([Mixture() for _ in range(3)])
    units = block_paths(net)
    assert units[:4] == [f"blocks.0.experts.{n}" for n in range(4)]
    routed_paths = routed_lists(
        units, {f"blocks.{block}.experts.{n}" for block in range(3) for n in (0, 1)}
    )
    assert routed_paths == {f"blocks.{n}.experts" for n in range(3)}
    assert block_paths(net, routed_paths) == paths("blocks", 3)


def test_a_block_that_an_argument_skips_is_not_streamed_and_the_others_are() -> None:
    net = nn.Module()
    net.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8)) for _ in range(4)])
    called_blocks = ["blocks.0", "blocks.1", "blocks.3"]
    skipped = routed_lists(block_paths(net), called_blocks, by_data=False)
    assert skipped == {"blocks.2"}
    assert block_paths(net, skipped) == called_blocks


def test_a_list_may_have_one_block_of_another_size() -> None:
    net = nn.Module()
    net.blocks = nn.ModuleList(
        [*(nn.Sequential(nn.Linear(32, 32)) for _ in range(4)), nn.Sequential(nn.Linear(32, 16))]
    )
    assert [
        group.blocks for group in group_blocks(net, [Call(entered_blocks=paths("blocks", 5))])
    ] == [
        ("",),
        tuple(paths("blocks", 4)),
    ]
    net.blocks.append(nn.Sequential(nn.Linear(32, 8)))
    assert block_paths(net) == []


class Modulated(nn.Module):
    """A block with its own embedding and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.ModuleDict({"time": nn.Linear(8, 8), "label": nn.Embedding(4, 8)})
        self.linear = nn.Linear(64, 64)
        self.table = nn.Parameter(torch.zeros(8))


def modulated(loose: set[str]) -> list[tuple[str, tuple[str, ...], bool]]:
    net = nn.Module()
    net.blocks = nn.ModuleList(Modulated() for _ in range(3))
    groups = group_blocks(
        net,
        [
            Call(
                entered_blocks=paths("blocks", 3),
                loose_modules={f"blocks.0{path}" for path in loose},
            )
        ],
    )
    return [(group.name, group.blocks, group.streamable) for group in groups[1:]]


def test_loose_modules_of_a_block_are_separate_groups() -> None:
    blocks = ("blocks", tuple(paths("blocks", 3)), True)
    assert modulated(set()) == [blocks]
    assert modulated({".embed.time"}) == [("time", ("blocks.0.embed.time",), False), blocks]
    assert modulated({".embed.time", ".embed.label"}) == [
        ("embed", ("blocks.0.embed",), False),
        blocks,
    ]


def test_a_block_with_loose_tensors_is_in_the_unblocked() -> None:
    assert modulated({""}) == [("blocks", ("blocks.1", "blocks.2"), True)]
    assert modulated({"", ".embed.time", ".embed.label", ".linear"}) == [
        ("blocks", ("blocks.1", "blocks.2"), True)
    ]


def test_blocks_inside_a_separate_child_compute_in_the_order_of_the_call() -> None:
    """The decoder of a VAE that is encoded with, too, is a group of its own. Its blocks were taken
    for a part of it."""
    groups = (
        UNBLOCKED,
        BlockGroup("decoder", ("decoder",), False),
        BlockGroup("decoder_2", ("decoder.up.0", "decoder.up.1"), True),
    )
    vae = ComponentNumbers(
        "vae", 0, groups, (Variant("float32", "pinned", "device", (512,) * 3, (1.0,) * 3, 2048),)
    )
    paths = ["decoder.in", "decoder.up.0.conv", "decoder.up.1.conv", "decoder.out"]
    work = [(path, [0]) for path in paths]
    call = Call(
        kernels=[Kernel("matmul", "float32", 1.0, 1)],
        work=work,
        read_weights={f"{path}.weight" for path in paths},
    )
    use = use_of(vae, [call], simulated())
    assert use.group_calls == (0, 1, 1)
    assert [step[:2] for step in use.order] == [(1, 0), (2, 0), (2, 1), (1, 0)]
