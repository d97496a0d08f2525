"""Files of converted weights: what a run reads from them, and what is kept for later runs."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small_component import GROUPS, ON, Small, in_layers, numbers
from stored_component import meta_module_and_writer, open_files, saved

from graphrun.errors import InputError
from graphrun.model.problem import ComponentNumbers, Variant
from graphrun.modules.blocks import BlockLayout, lay_out
from graphrun.modules.source_files import stored_tensors
from graphrun.modules.sources import RandomSource, Writer
from graphrun.runtime import spool as spool_module
from graphrun.runtime.spool import MARGIN_BYTES, PREFIX, Spool
from graphrun.units import PAGE_BYTES

COMPONENT = numbers("a", Small(), ON)


def layouts_of(component: ComponentNumbers) -> dict[str, BlockLayout]:
    paths = [path for group in component.groups for path in group.blocks]
    return lay_out(Small(), paths, split_layers=component.granularity == "layers")


TOTAL_BYTES = sum(layout.nbytes for layout in layouts_of(COMPONENT).values())


def source() -> Writer:
    """Weights that no file has."""
    module = Small()
    return Writer(RandomSource(module, "seed"), buffers=dict(module.named_buffers()))


def kept(spool: Spool, key: str) -> Path:
    """Write the small component's file ``key``, and return it."""
    spool.writer_for(Small(), COMPONENT, source(), key).close()
    return next(file for file in spool.files if file.stem == key)


def read_bytes(writer: Any, layout: BlockLayout) -> int:
    """Read a block, compare it with the source, and return how many bytes were read."""
    buffer, expected = (torch.zeros(layout.nbytes, dtype=torch.uint8) for _ in range(2))
    nbytes: int = writer.write(layout, buffer)
    source().write(layout, expected)
    assert torch.equal(buffer, expected)
    return nbytes


def test_a_block_is_read_by_one_read_with_the_padding_of_its_tensors(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    writer = spool.writer_for(Small(), COMPONENT, source())
    for layout in layouts_of(COMPONENT).values():
        assert layout.nbytes > sum(entry.nbytes for entry in layout.entries)
        assert read_bytes(writer, layout) == layout.nbytes
    (file,) = tmp_path.glob(f"{PREFIX}*/a.safetensors")
    assert min(tensor.begin for tensor in stored_tensors(file, "")) % PAGE_BYTES == 0
    writer.close()
    spool.close()
    assert not list(tmp_path.iterdir())
    assert spool.files == []


def test_a_kept_file_is_read_in_blocks_and_in_layers(tmp_path: Path) -> None:
    lines = list[str]()
    spool = Spool(tmp_path / "unused", tmp_path / "kept", lines.append)
    file = kept(spool, "key")
    assert len(lines) == 1
    assert "a in float32: weights are quantized once" in lines[0]
    stamp = file.stat().st_mtime_ns
    for component in (COMPONENT, in_layers(COMPONENT)):
        os.utime(file, ns=(1, stamp))
        writer = spool.writer_for(Small(), component, source(), "key")
        assert file.stat().st_atime_ns > 1, "the file is not the least recently used"
        for path, layout in layouts_of(component).items():
            is_whole = bool(path) or component is COMPONENT
            tensor_bytes = sum(entry.nbytes for entry in layout.entries)
            assert read_bytes(writer, layout) == (layout.nbytes if is_whole else tensor_bytes)
        writer.close()
    assert len(lines) == 1, "nothing is written again"
    assert file.stat().st_mtime_ns == stamp
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


WEIGHT = "weight "  # of the module below, as its kept file names it
LINEAR = ComponentNumbers(
    "linear", 0, GROUPS[:1], (Variant("int8", "disk", "device", (512,), (0.0,), 512),)
)


def read_linear(folder: Path, content: bytes | Mapping[str, torch.Tensor]) -> tuple[int, list[str]]:
    """Return the bytes read for a module with one tensor of 36 bytes, where ``content`` is kept,
    and what the spool told."""
    file, lines = folder / "key.safetensors", list[str]()
    file.write_bytes(content) if isinstance(content, bytes) else save_file({**content}, file)
    module = torch.nn.Linear(3, 3, bias=False)
    layout = lay_out(module, [])[""]
    random_source = Writer(RandomSource(module, "seed"))
    writer = Spool(keep=folder, tell=lines.append).writer_for(module, LINEAR, random_source, "key")
    nbytes: int = writer.write(layout, torch.zeros(layout.nbytes, dtype=torch.uint8))
    writer.close()
    return nbytes, lines


def test_a_tensor_at_the_end_of_its_file_is_read_without_padding(tmp_path: Path) -> None:
    assert read_linear(tmp_path, {WEIGHT: torch.zeros(36, dtype=torch.uint8)}) == (36, [])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        {WEIGHT: torch.zeros(35, dtype=torch.uint8)},
        {WEIGHT: torch.zeros(37, dtype=torch.uint8)},
        {"other ": torch.zeros(36, dtype=torch.uint8)},
    ],
    ids=["damaged", "shorter tensor", "longer tensor", "other tensor"],
)
def test_a_kept_file_with_other_tensors_is_written_again(tmp_path: Path, content: Any) -> None:
    nbytes, lines = read_linear(tmp_path, content)
    assert nbytes == 256, "the padded block"
    assert len(lines) == 1


def test_the_least_recently_used_files_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(keep=tmp_path)
    for number, key in enumerate("bcad"):
        os.utime(kept(spool, key), ns=(number, 0))
    file_bytes = (tmp_path / "a.safetensors").stat().st_size
    monkeypatch.setattr(spool_module, "KEPT_BYTES", TOTAL_BYTES + 2 * file_bytes)
    kept(spool, "new")
    assert [file.stem for file in spool.files] == ["a", "d", "new"]


@pytest.mark.parametrize("missing_bytes", [0, 1])
def test_files_leave_a_margin_of_the_disk_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing_bytes: int
) -> None:
    free_bytes = TOTAL_BYTES + MARGIN_BYTES - missing_bytes
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free_bytes))
    spool = Spool(keep=tmp_path)
    if missing_bytes:
        with pytest.raises(InputError, match=r"a: .* of weights have to be written to .*make room"):
            kept(spool, "key")
    else:
        kept(spool, "key")
    assert len(spool.files) == 1 - missing_bytes


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "key.safetensors").mkdir()
    with pytest.raises(InputError, match=r"a cannot be written to .*/key.safetensors: Is a dir"):
        kept(Spool(keep=tmp_path), "key")


@pytest.mark.parametrize("key", ["", "key"])
def test_weights_are_written_unless_files_have_them_as_needed(tmp_path: Path, key: str) -> None:
    """A key without a folder for kept files changes nothing."""
    module, writer = meta_module_and_writer(saved(tmp_path / "weights"))
    spool = Spool(tmp_path / "spool")
    (tmp_path / "spool").mkdir()
    assert spool.writer_for(module, COMPONENT, writer, key) is writer
    assert not list((tmp_path / "spool").iterdir())
    adapted_writer = replace(writer, adapters={"wide.0.expand.bias": torch.ones(192)})
    spooled_writer = spool.writer_for(module, COMPONENT, adapted_writer, key)
    assert len(list((tmp_path / "spool").glob("*/a.safetensors"))) == 1
    assert not any(file.endswith(".safetensors") for file in open_files())
    layout = layouts_of(COMPONENT)["wide.0"]
    buffer, expected = (torch.zeros(layout.nbytes, dtype=torch.uint8) for _ in range(2))
    spooled_writer.write(layout, buffer)
    adapted_writer.write(layout, expected)
    assert torch.equal(buffer, expected)
    adapted_writer.close()
    spooled_writer.close()
    spool.close()


def test_a_file_whose_data_have_another_digest_is_damaged(tmp_path: Path) -> None:
    spool = Spool(keep=tmp_path)
    intact, damaged = (kept(spool, key) for key in ("intact", "damaged"))
    assert intact.read_bytes() == damaged.read_bytes()
    data = damaged.read_bytes()
    other_digests = (re.sub(rb"[0-9a-f]{64}", digit * 64, data) for digit in (b"0", b"f"))
    for changed_data in (data[:-1] + bytes([data[-1] ^ 1]), *other_digests):
        damaged.write_bytes(changed_data)
        assert spool.damaged() == [damaged]


def test_a_kept_file_without_a_digest_is_damaged(tmp_path: Path) -> None:
    headers = dict[str, Any](list=[], no_digest={"__metadata__": {}}, no_metadata={}, none=None)
    for name, header in headers.items():
        text = b"" if header is None else json.dumps(header).encode()
        data = len(text).to_bytes(8, "little") + text
        (tmp_path / f"{name}.safetensors").write_bytes(data)
    assert [file.stem for file in Spool(keep=tmp_path).damaged()] == list(headers)
