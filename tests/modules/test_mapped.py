"""Which tensors are mapped from files, by what the kernel lists and by what it really maps."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from graphrun.errors import InputError
from graphrun.modules.blocks import lay_out
from graphrun.modules.mapped import FileMapping, MappedTensors, MappedWriter, file_mappings
from graphrun.runtime.files import file_block

FIELDS = "Rss: 8 kB\nAnonymous: {anonymous} kB\nAnonHugePages: 4 kB\nSwap: {swap} kB\nSwapPss: 0 kB"
PLAIN = FIELDS.format(anonymous=0, swap=0)
WRITTEN = FIELDS.format(anonymous=4, swap=0)
SWAPPED = FIELDS.format(anonymous=0, swap=4)


def of_tensors(**tensors: torch.Tensor) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        else:
            module.register_buffer(name, tensor)
    return module


def loaded(path: Path, **tensors: torch.Tensor) -> nn.Module:
    save_file(tensors, path)
    return of_tensors(**load_file(path))


def test_mappings_of_files_without_written_pages(tmp_path: Path) -> None:
    smaps = tmp_path / "smaps"
    smaps.write_text(
        f"1000-3000 rw-p 00002000 fe:00 7          /a b\n{PLAIN}\n"
        f"3000-4000 rw-p 00000000 00:00 0 \n{WRITTEN}\n"
        f"4000-5000 rw-p 00000000 fe:00 8          /written\n{WRITTEN}\n"
        f"5000-6000 rw-p 00000000 fe:00 9          /swapped\n{SWAPPED}\n"
        f"6000-7000 rw-s 00000000 fe:00 10         /shared\n{PLAIN}\n"
        f"7000-8000 r--s 00000000 fe:00 11         /read\n{PLAIN}\n"
        f"8000-9000 rw-p 00000000 00:00 0          [heap]\n{WRITTEN}\n"
        f"9000-a000 r--p 00000000 fe:00 12         /line\\012feed\n{PLAIN}\nVmFlags: rd mr\n"
    )
    assert file_mappings(smaps) == [
        FileMapping(0x1000, 0x3000, 0x2000, 7, "/a b"),
        FileMapping(0x7000, 0x8000, 0, 11, "/read"),
        FileMapping(0x9000, 0xA000, 0, 12, "/line\nfeed"),
    ]
    assert file_mappings(tmp_path / "absent") == []


def test_a_tensor_of_a_file_is_found_and_one_in_memory_is_not(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    module = loaded(file, a=torch.arange(5000.0), b=torch.arange(12.0).view(3, 4))
    module.register_buffer("c", torch.ones(3))
    module.register_parameter("strided", nn.Parameter(module.b.detach().t(), requires_grad=False))
    mapped_tensors = MappedTensors([module])
    for name in ("a", "b"):
        tensor, file_tensor = getattr(module, name), mapped_tensors.stored(getattr(module, name))
        assert file_tensor is not None
        assert (file_tensor.file, file_tensor.dtype, file_tensor.shape) == (
            str(file),
            "float32",
            tensor.shape,
        )
        content = file.read_bytes()[file_tensor.begin : file_tensor.begin + file_tensor.nbytes]
        assert content == bytes(tensor.detach().view(-1).view(torch.uint8).tolist())
    assert mapped_tensors.stored(module.c) is None
    assert mapped_tensors.stored(module.strided) is None
    assert mapped_tensors.unmapped_bytes(module) == module.strided.nbytes
    assert mapped_tensors == MappedTensors([module])


def test_one_written_number_makes_a_file_count_no_more(tmp_path: Path) -> None:
    module = loaded(tmp_path / "weights.safetensors", a=torch.zeros(5000), b=torch.zeros(5000))
    other = loaded(tmp_path / "other.safetensors", a=torch.zeros(5000))
    mapped_tensors = MappedTensors([module, other])
    module.a.data[17] = 1
    present_tensors = MappedTensors([module, other])
    assert present_tensors != mapped_tensors
    assert [present_tensors.stored(tensor) is None for tensor in (module.a, module.b, other.a)] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("change", ["replaced", "deleted", "written"])
def test_a_changed_file_is_refused_while_its_tensors_are_used(tmp_path: Path, change: str) -> None:
    file = tmp_path / "weights.safetensors"
    module = loaded(file, a=torch.zeros(5000))
    mapped_tensors = MappedTensors([module])
    mapped_tensors.refuse_changed_files({"unet": module})
    if change == "replaced":
        save_file({"a": torch.ones(5000)}, tmp_path / "new")
        os.replace(tmp_path / "new", file)
    elif change == "deleted":
        file.unlink()
    else:
        os.utime(file, ns=(0, 0))
    with pytest.raises(InputError, match=f"unet: {file} was changed or deleted after"):
        mapped_tensors.refuse_changed_files({"unet": module})
    assert MappedTensors([module]) != mapped_tensors
    if change != "written":
        assert MappedTensors([module]).stored(module.a) is None, "the mapped file is gone"
    mapped_tensors.refuse_changed_files({"unet": of_tensors(a=torch.zeros(5000))})


def test_tensors_at_odd_offsets_are_copied_from_their_mapping(tmp_path: Path) -> None:
    """safetensors writes none, but reads files of others."""
    header: dict[str, Any] = {
        "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
        "b": {"dtype": "U8", "shape": [1], "data_offsets": [16, 17]},
        "c": {"dtype": "F32", "shape": [1000], "data_offsets": [17, 4017]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    numbers = torch.arange(4.0), torch.arange(1000.0)
    data = [bytes(t.view(torch.uint8).tolist()) for t in numbers]
    file = tmp_path / "odd.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[0] + b"\x07" + data[1])
    module = of_tensors(**load_file(file))
    mapped_tensors = MappedTensors([module])
    writer, layout = MappedWriter(mapped_tensors), mapped_tensors.layouts(lay_out(module, []))[""]
    if mapped_tensors.stored(module.c) is None:
        pytest.skip("this version of safetensors copies it")
    block = file_block(layout, writer)
    assert block.writer_layout is not None
    assert [entry.names for entry in block.writer_layout.entries] == [("c",)]
    buffer = torch.zeros(block.layout.nbytes, dtype=torch.uint8)
    assert writer.write(block.writer_layout, buffer, lambda _: None) == 4000
    (entry,) = block.writer_layout.entries
    assert torch.equal(buffer[entry.offset : entry.offset + 4000].view(torch.float32), numbers[1])
