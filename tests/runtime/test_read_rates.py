"""Direct reads that `graphrun calibrate --device cpu` measures."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import pytest

from graphrun.errors import InputError
from graphrun.runtime import direct_reads, read_rates
from graphrun.runtime.read_rates import SPAN_BYTES, measure_reads
from graphrun.units import MIB, PAGE_BYTES


def test_reads_are_measured_alone_and_while_computing(tmp_path: Path) -> None:
    rates = measure_reads(tmp_path, 0.0, file_bytes=SPAN_BYTES)
    assert min(rates.alone_rate, rates.computing_rate, rates.cpu_seconds) > 0
    assert 0 < rates.start_seconds < SPAN_BYTES / rates.computing_rate
    assert not list(tmp_path.iterdir()), "the file that was read is deleted"


def test_rates_of_a_disk_are_bytes_by_seconds_and_the_start_is_the_usual_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two threads reads a MiB in 50 ms, and a page in 10 ms, but the first in 500 ms."""
    page_seconds = itertools.chain([0.5], itertools.repeat(0.01))

    def read_at(file: Any, view: memoryview, offset: int) -> int:
        time.sleep(0.05 if len(view) > PAGE_BYTES else next(page_seconds))
        return min(len(view), os.fstat(file.fileno()).st_size - offset)

    monkeypatch.setattr(direct_reads, "read_at", read_at)
    monkeypatch.setattr(read_rates, "SPAN_BYTES", MIB)
    rates = measure_reads(tmp_path, 0.3, file_bytes=2 * MIB)
    disk_rate = 2 * MIB / 0.05
    # the threads of a busy machine wake late
    assert disk_rate / 10 < rates.alone_rate <= disk_rate
    assert disk_rate / 10 < rates.computing_rate <= disk_rate
    assert rates.cpu_seconds * rates.alone_rate < 0.7, "the threads sleep"
    assert 0.01 <= rates.start_seconds < 0.4


def test_a_read_whose_buffer_is_needed_again_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_rates, "RING_SPANS", 1)
    rates = measure_reads(tmp_path, 0.0, file_bytes=SPAN_BYTES)
    assert min(rates.alone_rate, rates.computing_rate) > 0


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file: cannot measure the disk"):
        measure_reads(tmp_path / "file", 0.0, file_bytes=SPAN_BYTES)
