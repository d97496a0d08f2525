"""An embedding table that stays in its file: its rows are read when code looks them up.

    table [256384 4096] in a file    row 0 | row 1 | ... | row 256383
    indices [1 512]                  17 17 3 ...   -->   rows 3, 17 in memory   -->   result

The result has the bits of a lookup in the whole table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from graphrun.modules.source_files import Stored
from graphrun.modules.sources import FileSource

aten = torch.ops.aten


class TableRows(torch.Tensor):
    """A table on the CPU without memory of its own. An operator that is no lookup reads all of it.

    Operators raise InputError if the file cannot be read, or was changed.
    """

    _source: FileSource
    _file_tensor: Stored

    @staticmethod
    def of(file_tensor: Stored, template: torch.Tensor) -> torch.Tensor:
        """Return ``file_tensor`` as a table with the shape and dtype of ``template``; its rows are
        cast when they are read."""
        shell = torch.Tensor._make_wrapper_subclass(
            TableRows,
            template.shape,
            dtype=template.dtype,
            device=torch.device("cpu"),
            storage_size=0,
        )
        shell._source = FileSource({file_tensor.name: file_tensor})
        shell._file_tensor = file_tensor
        shell._is_param = isinstance(template, torch.nn.Parameter)
        return shell

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is aten.detach.default:
            return args[0]
        if func is aten.embedding.default and isinstance(args[0], TableRows):
            table, indices = args[:2]
            numbers, places = torch.unique(indices, return_inverse=True)
            return aten.embedding.default(table.rows(numbers.tolist()), places)
        return func(*_whole(args), **_whole(kwargs or {}))

    def rows(self, numbers: Sequence[int]) -> torch.Tensor:
        """Return the rows ``numbers``, read from the file. Raises IndexError for others."""
        count, width = self.shape
        if bad := [number for number in numbers if not 0 <= number < count]:
            raise IndexError(f"row {bad[0]} of a table of {count} rows")
        values = torch.empty(len(numbers), width, dtype=self.dtype, device="cpu")
        try:
            self._source.read_rows(self._file_tensor.name, numbers, values)
        finally:
            self._source.close()
        return values


def _whole(arguments: Any) -> Any:
    """Return ``arguments`` with all rows of the tables among them."""
    return tree_map(
        lambda leaf: leaf.rows(range(leaf.shape[0])) if isinstance(leaf, TableRows) else leaf,
        arguments,
    )
