"""The backing store of unified memory: files. A copy of a block is its read into device memory.

file      |header|--a--|--b--|........|--c--|       tensors of a block, and of other blocks
spans     |----- span 0 -----|     |- span 1 -|     whole pages, read past the page cache
block     |----- span 0 -----|- span 1 -|- d -|     parameters are views; d is written: no file
                                                    has its bytes as they are, or its span would
                                                    need more room than the plan has
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from graphrun.modules.blocks import ALIGNMENT, BlockLayout
from graphrun.modules.source_files import Stored, file_stamp
from graphrun.runtime.backing import BackingStore, BlockWriter, Marks
from graphrun.runtime.devices.device import Device
from graphrun.runtime.direct_reads import Span, span_layout
from graphrun.units import PAGE_BYTES, round_up

# The bits of a product of a weight and one fp32 row depend on the weight's address modulo 16 bytes.
# So a tensor's address equals its offset in the file modulo 64 bytes, the width of a vector. Then
# outputs are bit-identical to diffusers with weights that safetensors maps from the file.
VECTOR_BYTES = 64


@dataclass(frozen=True, slots=True)
class FileBlock:
    """The place of a block's tensors in its memory of ``layout.nbytes``, in whole pages.

    ``spans``: file ranges with their offsets in the memory. ``writer_layout``: layout of the
    tensors that a writer fills, at offsets behind the spans.
    """

    layout: BlockLayout
    spans: tuple[tuple[Span, int], ...]
    writer_layout: BlockLayout | None

    @property
    def read_bytes(self) -> int:
        """Bytes that each copy reads directly."""
        return sum(span.nbytes for span, _ in self.spans)


def file_block(
    layout: BlockLayout, writer: BlockWriter, limit_bytes: float = math.inf
) -> FileBlock:
    """Return the places of the tensors of ``layout`` in at most ``limit_bytes``.

    Each span is rounded up to whole pages, so tensors scattered in their files may need more than
    ``limit_bytes``. The smallest spans are left to ``writer`` until the block fits. Without spans,
    a block needs ``layout.nbytes`` rounded up to pages.
    """
    file_tensors = {
        number: tensor
        for number, entry in enumerate(layout.entries)
        if entry.nbytes
        and (tensor := writer.stored(entry)) is not None
        # torch has no views at offsets that are no multiple of an element
        and tensor.nbytes == entry.nbytes
        and not tensor.begin % entry.tensor.element_size()
    }
    spans = sorted(span_layout(list(file_tensors.values())).spans, key=lambda span: span.nbytes)

    def without(count: int) -> FileBlock:
        return _placed(layout, file_tensors, spans[count:])

    count = bisect_left(
        range(len(spans)), True, key=lambda count: without(count).layout.nbytes <= limit_bytes
    )
    block = without(count)
    return block if block.layout.nbytes <= limit_bytes else _placed(layout, {}, ())


def _placed(
    layout: BlockLayout, file_tensors: Mapping[int, Stored], spans: Sequence[Span]
) -> FileBlock:
    """Return the block with only ``spans``; other tensors keep their vector alignment too."""
    in_spans = {
        number: tensor
        for number, tensor in file_tensors.items()
        if any(span.contains(tensor) for span in spans)
    }
    laid_out = span_layout(list(in_spans.values()))
    offsets = dict(zip(in_spans, laid_out.tensor_offsets, strict=True))
    end = laid_out.nbytes
    for number, entry in enumerate(layout.entries):
        if number not in offsets:
            tensor = file_tensors.get(number)
            end += -end % ALIGNMENT if tensor is None else (tensor.begin - end) % VECTOR_BYTES
            offsets[number] = end
            end += entry.nbytes
    stamps = {file: file_stamp(file) for file in {span.file for span in laid_out.spans}}
    stamped = [replace(span, stamp=stamps[span.file]) for span in laid_out.spans]
    entries = tuple(
        replace(entry, offset=offsets[number]) for number, entry in enumerate(layout.entries)
    )
    other_entries = tuple(entry for number, entry in enumerate(entries) if number not in in_spans)
    nbytes = round_up(end, PAGE_BYTES)
    return FileBlock(
        replace(layout, nbytes=nbytes, entries=entries),
        tuple(zip(stamped, laid_out.span_offsets, strict=True)),
        replace(layout, nbytes=nbytes, entries=other_entries) if other_entries else None,
    )


class FileStore(BackingStore):
    """A component's files, as ``blocks`` describe them. It takes no memory of its own."""

    def __init__(
        self, blocks: Mapping[str, FileBlock], device: Device, writer: BlockWriter
    ) -> None:
        layouts = {path: block.layout for path, block in blocks.items()}
        super().__init__(layouts, device, writer, nbytes=0, pinned=True)
        self._file_blocks = dict(blocks)

    def request(self, path: str) -> bool:
        """As `BackingStore.request`: every read can be queued at once."""
        return True

    def copy(self, path: str, target: torch.Tensor, device: Device) -> Marks:
        """Queue the read of block ``path`` into ``target``."""
        block, start = self._file_blocks[path], device.mark("copy")
        rest = block.writer_layout

        def write() -> None:
            self._writer.write(rest, target, lambda _: None)

        device.read_block(
            [(span, target[offset : offset + span.nbytes]) for span, offset in block.spans],
            (write, target[block.read_bytes :]) if rest is not None else None,
        )
        marks = start, device.mark("copy")
        self._finished.append((path, block.read_bytes, marks))
        return marks

    def drop(self) -> None:
        super().drop()
        self._writer.close()
