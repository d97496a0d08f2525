"""Tiny pipelines saved to a folder and loaded from there, as a user's are, and the bytes that are
read from their files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_pipelines import Case

from graphrun.diffusers_.live import components_of
from graphrun.runtime import direct_reads


def as_passed(tensor: torch.Tensor) -> torch.Tensor:
    """The argument itself: a caller's tensors are on the CPU already."""
    return tensor


def save(case: Case, folder: Path, **options: Any) -> Path:
    case.build().save_pretrained(folder, **options)
    return folder


def load(case: Case, folder: Path, **options: Any) -> Any:
    """The pipeline of ``folder``, whose parameters are mapped from its files."""
    pipe = case.kind.from_pretrained(folder, **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


class FileReads:
    """Bytes that devices read directly from files, by the name of the component's folder."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.nbytes = Counter[str]()
        read_at = direct_reads.read_at

        def counted(file: Any, view: memoryview, offset: int) -> int:
            read_bytes = read_at(file, view, offset)
            self.nbytes[Path(str(file.name)).parent.name] += read_bytes
            return read_bytes

        patch.setattr(direct_reads, "read_at", counted)

    def taken(self) -> Counter[str]:
        """The bytes since the last time."""
        nbytes, self.nbytes = self.nbytes, Counter()
        return nbytes


def places(pipe: Any) -> list[tuple[str, int, int, int]]:
    """Each parameter and buffer of ``pipe``: its name, its object, its address and its version."""
    return [
        (f"{component}.{name}", id(tensor), tensor.data_ptr(), tensor._version)
        for component, module in components_of(pipe).items()
        for tensors in (module.named_parameters, module.named_buffers)
        for name, tensor in tensors(remove_duplicate=False)
    ]
