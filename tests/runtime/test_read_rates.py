"""Direct reads that `graphrun calibrate --device cpu` measures."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphrun.errors import InputError
from graphrun.runtime import read_rates
from graphrun.runtime.read_rates import SPAN_BYTES, measure_reads


def test_reads_are_measured_alone_and_while_computing(tmp_path: Path) -> None:
    rates = measure_reads(tmp_path, 0.0, file_bytes=SPAN_BYTES)
    assert min(rates.alone_rate, rates.computing_rate, rates.cpu_seconds) > 0
    assert 0 < rates.start_seconds < SPAN_BYTES / rates.computing_rate
    assert not list(tmp_path.iterdir()), "the file that was read is deleted"


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
