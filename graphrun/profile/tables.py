"""Embedding tables of which calls read few rows: a CPU leaves them in their files.

    UMT5's table [256384 4096]    3.9 GiB in fp32; a prompt looks up at most 512 rows, 8 MiB

The rows are read when they are looked up (`graphrun.runtime.table_rows`). They take no memory that
a plan must count: at that moment a call has no activations but the result, of as many bytes, and
each layer of a transformer that follows has more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from graphrun.graph.parts import Component
from graphrun.graph.precisions import is_gguf
from graphrun.modules.compiled import is_compiled
from graphrun.modules.contents import content_of, read_as
from graphrun.modules.source_files import Stored
from graphrun.modules.stored import local_weights
from graphrun.modules.trees import modules_below
from graphrun.profile.recording import Call
from graphrun.units import MIB

MIN_TABLE_BYTES = 16 * MIB  # a smaller table is read whole in milliseconds
# Of a table of which a lookup may read a larger share, the whole is read: in one piece it takes
# less time.
MAX_ROW_SHARE = 1 / 4


def tables_of(module: nn.Module, calls: Sequence[Call]) -> tuple[str, ...]:
    """Return the names of the tables of ``module`` of which each of ``calls`` reads few rows."""
    if any(map(is_compiled, modules_below(module))):
        return ()
    tables = list[str]()
    for name in sorted({name for call in calls for name in call.table_rows}):
        weight = module.get_parameter(name)
        counts = [call.table_rows.get(name, 0) for call in calls if name in call.read_weights]
        if (
            weight.nbytes >= MIN_TABLE_BYTES
            and all(counts)  # no call reads all of it
            and max(counts) <= MAX_ROW_SHARE * weight.shape[0]
        ):
            tables.append(name)
    return tuple(tables)


def files_have_rows(
    component: Component, module: nn.Module, precision: str, tables: Collection[str]
) -> bool:
    """Return whether the files of ``component`` in ``precision`` have the rows of all ``tables``.

    ``module``: the component with its original layers. Not where a table is computed from others
    or quantized. Files that are not on this machine are assumed to have the module's tensors,
    except GGUF files, which quantize tables too.
    """
    place = local_weights(component, precision)
    if place is None:
        return not is_gguf(precision)
    content = content_of(component, module, place, precision)
    pieces = read_as(content, module, precision, getattr(torch, component.dtype))
    return all(isinstance(pieces.get(name), Stored) for name in tables)
