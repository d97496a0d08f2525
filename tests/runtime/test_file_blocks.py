"""Where tensors of files lie in a block's memory: within the planned bytes, at addresses for which
kernels compute the same bits as with tensors that safetensors maps."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_component import ON, Small, numbers
from stored_component import cpu_hardware, meta_module_and_writer, open_files, saved
from torch import nn

from graphrun.modules.blocks import ALIGNMENT, BlockLayout, lay_out
from graphrun.modules.source_files import Stored, stored_tensors
from graphrun.modules.sources import FileSource, RandomSource, Writer
from graphrun.runtime import files
from graphrun.runtime.devices.cpu import CpuDevice
from graphrun.runtime.direct_reads import DirectReads, MappedArena
from graphrun.runtime.files import FileBlock, FileStore, file_block
from graphrun.runtime.spool import Spool
from graphrun.units import GIB, PAGE_BYTES, round_up

VECTOR_BYTES = 64


def read(block: FileBlock, writer: Writer) -> torch.Tensor:
    """The memory of ``block``, filled as on the CPU device."""
    memory = MappedArena(block.layout.nbytes).view(0, block.layout.nbytes)
    with DirectReads() as reads:
        for span, offset in block.spans:
            reads.submit(span, memory[offset : offset + span.nbytes]).wait()
    if block.writer_layout is not None:
        assert all(entry.offset >= block.read_bytes for entry in block.writer_layout.entries)
        writer.write(block.writer_layout, memory)
    return memory


def tensors(block: FileBlock, memory: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        entry.names[0]: memory[entry.offset : entry.offset + entry.nbytes]
        .view(entry.tensor.dtype)
        .view(entry.tensor.shape)
        for entry in block.layout.entries
    }


def scattered(folder: Path, count: int, elements: int = 33) -> tuple[BlockLayout, Writer, Any]:
    """A block whose tensors lie far apart in a file, and the file's tensors."""
    values: dict[str, torch.Tensor] = {}
    for number in range(count):
        values[f"{number}.weight"] = torch.randn(elements + number % 5)
        values[f"{number}.weight other"] = torch.randn(3 * PAGE_BYTES)
    save_file(values, folder / "model.safetensors")
    module = nn.Module()
    with torch.device("meta"):
        for number in range(count):
            child = nn.Module()
            child.weight = nn.Parameter(torch.empty(values[f"{number}.weight"].shape))
            module.add_module(str(number), child)
    pieces = {tensor.name: tensor for tensor in stored_tensors(folder, "")}
    return lay_out(module, [])[""], Writer(FileSource(pieces)), values


@pytest.mark.parametrize("pages", [0, 1, 5, 24, 10_000])
def test_spans_are_left_out_until_the_block_fits(tmp_path: Path, pages: int) -> None:
    layout, writer, values = scattered(tmp_path, 12)
    limit_bytes = round_up(layout.nbytes, PAGE_BYTES) + pages * PAGE_BYTES
    block = file_block(layout, writer, limit_bytes)
    assert block.layout.nbytes <= limit_bytes
    span_count = len(block.spans)
    assert span_count == (12 if pages >= 24 else pages), "each span takes a page"
    for name, tensor in tensors(block, read(block, writer)).items():
        assert torch.equal(tensor, values[name])
    writer.close()


def test_many_scattered_tensors_are_placed_in_few_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, writer, _ = scattered(tmp_path, 300)
    attempts, original = itertools.count(), files._placed

    def counted(*arguments: Any) -> FileBlock:
        next(attempts)
        return original(*arguments)

    monkeypatch.setattr(files, "_placed", counted)
    limit_bytes = round_up(layout.nbytes, PAGE_BYTES) + 4 * PAGE_BYTES
    assert 0 < len(file_block(layout, writer, limit_bytes).spans) < 20
    assert next(attempts) < 12


def test_a_tensor_that_is_left_out_keeps_its_alignment_to_vectors(tmp_path: Path) -> None:
    layout, writer, _ = scattered(tmp_path, 12)
    begins = {tensor.name: tensor.begin for tensor in stored_tensors(tmp_path, "")}
    assert any(begin % VECTOR_BYTES for begin in begins.values())
    block = file_block(layout, writer, round_up(layout.nbytes, PAGE_BYTES) + 4 * PAGE_BYTES)
    for entry in block.layout.entries:
        assert (entry.offset - begins[entry.names[0]]) % VECTOR_BYTES == 0


@pytest.mark.parametrize("limited", [False, True])
def test_one_row_has_the_bits_that_it_has_with_mapped_weights(
    tmp_path: Path, limited: bool
) -> None:
    """Products of one row in fp32 depend on the weights' address, modulo 16 at least."""
    module, alignments = nn.Module(), set[int]()
    with torch.device("meta"):
        module.add_module("w", nn.Linear(64, 64))
    layout, path = lay_out(module, [])[""], tmp_path / "model.safetensors"
    for length in range(16):
        values = {"w.weight": torch.randn(64, 64), "w.bias": torch.randn(64)}
        save_file(values, path, {"padding": " " * (3800 + length)})
        pieces = {tensor.name: tensor for tensor in stored_tensors(tmp_path, "")}
        alignments.add(pieces["w.weight"].begin % 16)
        writer = Writer(FileSource(pieces))
        block = file_block(
            layout, writer, round_up(layout.nbytes, PAGE_BYTES) + PAGE_BYTES * (not limited)
        )
        assert bool(block.spans) is not limited
        actual, mapped_values = tensors(block, read(block, writer)), load_file(path)
        for _ in range(4):
            x = torch.randn(1, 64)
            outputs = [
                nn.functional.linear(x, weights["w.weight"], weights["w.bias"])
                for weights in (actual, mapped_values)
            ]
            assert torch.equal(*outputs)
        writer.close()
    assert alignments == {0, 8}


@pytest.mark.parametrize("room", ["for a span", "for none"])
@pytest.mark.parametrize("blocks", range(4))
def test_spooled_weights_are_aligned_as_in_an_arena(tmp_path: Path, blocks: int, room: str) -> None:
    module, component = Small(), numbers("a", Small(), ON)
    groups = tuple(replace(group, blocks=group.blocks[: blocks + 1]) for group in component.groups)
    paths = [path for group in groups for path in group.blocks]
    spool = Spool(tmp_path)
    source = Writer(RandomSource(module, "seed"), buffers=dict(module.named_buffers()))
    writer = spool.writer_for(module, replace(component, groups=groups), source)
    for layout in lay_out(module, paths).values():
        limit_bytes = round_up(layout.nbytes, PAGE_BYTES) + (PAGE_BYTES if "a" in room else 0)
        block = file_block(layout, writer, limit_bytes if room == "for a span" else 0)
        assert bool(block.spans) == (room == "for a span")
        expected = torch.zeros(layout.nbytes, dtype=torch.uint8)
        source.write(layout, expected)
        memory = read(block, writer)
        for entry, place in zip(layout.entries, block.layout.entries, strict=True):
            assert (place.offset - entry.offset) % VECTOR_BYTES == 0
            assert torch.equal(
                memory[place.offset : place.offset + entry.nbytes],
                expected[entry.offset : entry.offset + entry.nbytes],
            )
    writer.close()
    spool.close()


def partly_in_a_file(folder: Path) -> tuple[BlockLayout, Writer]:
    """A block of which two tensors are in memory, and the others in a file."""
    module, writer = meta_module_and_writer(saved(folder))
    values = {"wide.0.gain": torch.ones(64), "wide.0.expand.bias": torch.ones(192)}
    return lay_out(module, ["wide.0"])["wide.0"], replace(writer, adapters=values)


def test_tensors_that_no_file_has_are_aligned_as_in_an_arena(tmp_path: Path) -> None:
    layout, writer = partly_in_a_file(tmp_path)
    block = file_block(layout, writer)
    assert block.writer_layout is not None
    entries = block.writer_layout.entries
    assert {entry.names[0] for entry in entries} == writer.adapters.keys()
    assert [entry.offset % ALIGNMENT for entry in entries] == [0, 0]
    assert block.layout.nbytes % PAGE_BYTES == 0
    values = tensors(block, read(block, writer))
    assert values["wide.0.gain"].eq(1).all()
    assert values["wide.0.expand.bias"].eq(1).all()
    assert torch.equal(values["wide.0.project.weight"], Small().wide[0].project.weight)
    writer.close()


def test_a_tensor_at_an_offset_that_torch_has_no_views_of_is_written(tmp_path: Path) -> None:
    values, begins = {"weight": torch.randn(2, 2), "bias": torch.randn(2)}, (101, 404)
    data = bytearray(600)
    pieces = dict[str, Stored]()
    for (name, value), begin in zip(values.items(), begins, strict=True):
        data[begin : begin + value.nbytes] = value.numpy().tobytes()
        file = str(tmp_path / "file")
        pieces[name] = Stored(name, "float32", tuple(value.shape), value.nbytes, file, begin)
    (tmp_path / "file").write_bytes(data)
    writer = Writer(FileSource(pieces))
    with torch.device("meta"):
        block = file_block(lay_out(nn.Linear(2, 2), [])[""], writer)
    assert block.writer_layout is not None
    assert [entry.names for entry in block.writer_layout.entries] == [("weight",)]
    for name, value in tensors(block, read(block, writer)).items():
        assert torch.equal(value, values[name])
    writer.close()


@pytest.mark.parametrize("nbytes", [12, 20])
def test_a_tensor_with_other_bytes_than_the_modules_is_left_to_the_writer(
    tmp_path: Path, nbytes: int
) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(nbytes))
    piece = Stored("weight", "float32", (nbytes // 4,), nbytes, str(file), 0)
    layout = lay_out(nn.Linear(2, 2, bias=False), [])[""]
    block = file_block(layout, Writer(FileSource({"weight": piece})))
    assert block.spans == ()
    assert block.writer_layout is not None


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_store_of_files_takes_no_memory_and_closes_its_files(
    tmp_path: Path, is_whole: bool
) -> None:
    layout, writer = partly_in_a_file(tmp_path)
    writer = replace(writer, adapters={}) if is_whole else writer
    block, device = file_block(layout, writer), CpuDevice(cpu_hardware())
    store = FileStore({"wide.0": block}, device, writer)
    assert store.nbytes == 0
    assert not store.pageable
    assert store.request("wide.0")
    with device.capped(GIB):
        memory = device.allocate(block.layout.nbytes)
        start, end = store.copy("wide.0", memory, device)
        device.wait("compute", end)
        assert device.seconds_at(start) < device.seconds_at(end)
    values = tensors(block, memory)
    assert torch.equal(values["wide.0.project.weight"], Small().wide[0].project.weight)
    assert values["wide.0.gain"].eq(1).all() != is_whole
    assert store.finish_reads() == [("wide.0", block.read_bytes, (start, end))]
    assert store.finish_reads() == []
    writer.read_into("wide.0.project.weight", values["wide.0.project.weight"])
    assert any(file.endswith(".safetensors") for file in open_files())
    store.drop()
    assert not any(file.endswith(".safetensors") for file in open_files())
