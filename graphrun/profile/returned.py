"""What a traced call returns: its tensors, which storages they share, and which of these belong to the arguments.

Works on tensors only; knows no components.

    encode(x) -> mean, logvar = made.chunk(2)     one storage of the size of `made`, two views: keeping `mean` keeps all of it
    forward(x) -> x[:, 1:]                        a view of the first tensor argument: takes no memory, and keeps all of x
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphrun.modules.trees import tensors_in, walk

META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Returned:
    """The result of a traced call.

    ``template``: the result with device tensors on meta, which share storages as the returned ones do. ``aliases``: address of
    a meta storage -> (number of the tensor argument that has this storage, its strides).
    """

    template: Any
    aliases: Mapping[int, tuple[int, tuple[int, ...]]]

    @property
    def nbytes(self) -> int:
        """Bytes of the storages that the call created on the device."""
        created = (tensor.untyped_storage() for tensor in tensors_in(self.template) if tensor.is_meta)
        storages = {storage._cdata: storage.nbytes() for storage in created}
        return sum(nbytes for cdata, nbytes in storages.items() if cdata not in self.aliases)

    def materialize(self, args: Any, device: torch.device) -> Any:
        """The result of a call with ``args``: zeros on ``device``, or views of tensors in ``args``."""
        arguments, created = tensors_in(args), dict[int, torch.Tensor]()

        def tensor(example: torch.Tensor) -> torch.Tensor:
            if not example.is_meta:
                return example.clone()
            storage = example.untyped_storage()
            number, strides = self.aliases.get(storage._cdata, (-1, ()))
            if 0 <= number < len(arguments) and arguments[number].stride() == strides and arguments[number].dtype == example.dtype:
                offset = arguments[number].storage_offset() + example.storage_offset()
                return arguments[number].as_strided(example.shape, example.stride(), offset)
            if example.is_contiguous() and storage.nbytes() == example.nbytes and storage._cdata not in shared:
                return torch.zeros(example.shape, dtype=example.dtype, device=device)
            if storage._cdata not in created:
                created[storage._cdata] = torch.zeros(storage.nbytes(), dtype=torch.uint8, device=device)
            whole = created[storage._cdata][: storage.nbytes() // example.itemsize * example.itemsize]
            return whole.view(example.dtype).as_strided(example.shape, example.stride(), example.storage_offset())

        shared = _shared(tensors_in(self.template))
        return walk(self.template, tensor)


def _shared(tensors: Sequence[torch.Tensor]) -> set[int]:
    """Addresses of the storages of more than one of ``tensors``."""
    found, repeated = set[int](), set[int]()
    for tensor in tensors:
        cdata = tensor.untyped_storage()._cdata
        (repeated if cdata in found else found).add(cdata)
    return repeated


def returned(out: Any, args: Any, weights: Collection[int], device: torch.device = META) -> Returned:
    """``out``, the result of a call with ``args`` on ``device``, without its values.

    ``weights``: addresses of storages whose views are returned as separate tensors. Tensors on other devices than ``device``
    are on the host, and are cloned.
    """
    arguments = tensors_in(args)
    argument_of = {tensor.untyped_storage()._cdata: number for number, tensor in reversed(list(enumerate(arguments)))}
    storages, aliases = dict[int, torch.UntypedStorage](), dict[int, tuple[int, tuple[int, ...]]]()

    def to_meta(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.device.type != device.type:
            return tensor.clone()
        if (cdata := storage._cdata) in weights:
            return torch.empty_like(tensor, device=META)
        if cdata not in storages:
            storages[cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=META).untyped_storage()
            if (number := argument_of.get(cdata)) is not None:
                aliases[storages[cdata]._cdata] = number, arguments[number].stride()
        blank = torch.empty(0, dtype=tensor.dtype, device=META)
        return blank.set_(storages[cdata], tensor.storage_offset(), tensor.shape, tensor.stride())

    return Returned(walk(out, to_meta), aliases)
