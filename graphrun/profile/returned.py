"""What a traced call returns: its tensors, which storages they share, and which of these belong to
the arguments.

Works on tensors only; knows no components.

    encode(x) -> mean, logvar = made.chunk(2)     one storage of the size of `made`, two views:
    keeping `mean` keeps all of it forward(x) -> x[:, 1:]                        a view of the first
    tensor argument: takes no memory, and keeps all of x
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from graphrun.modules.trees import holders_in, put_content, tensors_in, walk
from graphrun.profile.meta_ops import META


class Alias(NamedTuple):
    """A storage that belongs to the tensor argument number ``argument``, which has these
    ``strides``."""

    argument: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Returned:
    """The result of a traced call.

    ``template``: the result with device tensors on meta, which share storages as the returned ones
    do. ``aliases``: address of a meta storage -> the argument that has this storage. ``put``:
    number of a list, dict or object among the arguments (`holders_in`) -> what it holds after the
    call, where the call put other tensors in it, as into a cache of keys and values.
    """

    template: Any
    aliases: Mapping[int, Alias]
    put: Mapping[int, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the storages that the call created on the device."""
        created = (
            tensor.untyped_storage()
            for tensor in tensors_in((self.template, self.put))
            if tensor.is_meta
        )
        storages = {storage._cdata: storage.nbytes() for storage in created}
        return sum(nbytes for cdata, nbytes in storages.items() if cdata not in self.aliases)

    def materialize(self, args: Any, device: torch.device) -> Any:
        """The result of a call with ``args``, its (args, kwargs): zeros on ``device``, or views of
        tensors in ``args``. Puts into ``args`` what the call did."""
        arguments, created = tensors_in(args), dict[int, torch.Tensor]()

        def tensor(example: torch.Tensor) -> torch.Tensor:
            if not example.is_meta:
                return example.clone()
            storage = example.untyped_storage()
            if (alias := self.aliases.get(storage._cdata)) is not None and alias.argument < len(
                arguments
            ):
                own = arguments[alias.argument]
                if own.stride() == alias.strides and own.dtype == example.dtype:
                    return own.as_strided(
                        example.shape,
                        example.stride(),
                        own.storage_offset() + example.storage_offset(),
                    )
            if (
                example.is_contiguous()
                and storage.nbytes() == example.nbytes
                and uses[storage._cdata] == 1
            ):
                return torch.zeros(example.shape, dtype=example.dtype, device=device)
            if storage._cdata not in created:
                created[storage._cdata] = torch.zeros(
                    storage.nbytes(), dtype=torch.uint8, device=device
                )
            whole = created[storage._cdata][
                : storage.nbytes() // example.itemsize * example.itemsize
            ]
            return whole.view(example.dtype).as_strided(
                example.shape, example.stride(), example.storage_offset()
            )

        uses = Counter(
            tensor.untyped_storage()._cdata for tensor in tensors_in((self.template, self.put))
        )
        result, put = walk((self.template, self.put), tensor)
        if put:  # caches note where their tensors are
            result, put = walk(
                (result, put), lambda own: device if own.type == "meta" else own, torch.device
            )
            holders = holders_in(args)
            for number, content in put.items():
                put_content(holders[number], content)
        return result


def returned(
    out: Any,
    arguments: Sequence[torch.Tensor],
    put: Mapping[int, Any],
    weights: Collection[int],
    device: torch.device = META,
) -> Returned:
    """``out``, the result of a call on ``device`` whose arguments held the tensors ``arguments``,
    without its values. ``put``: as in `Returned`.

    ``weights``: addresses of storages whose views are returned as separate tensors. Tensors on
    other devices than ``device`` are on the host, and are cloned.
    """
    argument_of = {
        tensor.untyped_storage()._cdata: number
        for number, tensor in reversed(list(enumerate(arguments)))
    }
    storages, aliases = dict[int, torch.UntypedStorage](), dict[int, Alias]()

    def to_meta(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.device.type != device.type:
            return tensor.clone()
        if (cdata := storage._cdata) in weights:
            return torch.empty_like(tensor, device=META)
        if cdata not in storages:
            storages[cdata] = torch.empty(
                storage.nbytes(), dtype=torch.uint8, device=META
            ).untyped_storage()
            if (number := argument_of.get(cdata)) is not None:
                aliases[storages[cdata]._cdata] = Alias(number, arguments[number].stride())
        blank = torch.empty(0, dtype=tensor.dtype, device=META)
        return blank.set_(storages[cdata], tensor.storage_offset(), tensor.shape, tensor.stride())

    template, holds = walk((out, dict(put)), to_meta)
    return Returned(template, aliases, holds)
