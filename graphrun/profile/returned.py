"""What a traced entry returns: its tensors, which storages they are views of, and which of these it was handed.

Decides nothing. It must not know components: tensors go in, tensors come out.

    encode(x) -> mean, logvar = made.chunk(2)     one storage of the size of `made`, two views: keeping `mean` keeps all of it
    forward(x) -> x[:, 1:]                        a view of the first tensor handed: it takes nothing, and keeps all of x
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
    """``template``: what was returned; tensors of the device are on meta, and share storages as the returned ones do. ``handed``:
    which tensor handed (its number and strides) has the storage that one on meta stands for."""

    template: Any
    handed: Mapping[int, tuple[int, tuple[int, ...]]]

    @property
    def nbytes(self) -> int:
        """Bytes of the storages that the entry made on the device."""
        made = (tensor.untyped_storage() for tensor in tensors_in(self.template) if tensor.is_meta)
        storages = {storage._cdata: storage.nbytes() for storage in made}
        return sum(nbytes for cdata, nbytes in storages.items() if cdata not in self.handed)

    def made(self, args: Any, device: torch.device) -> Any:
        """What an entry that is handed ``args`` returns: zeros on ``device``, or views of what is in ``args``."""
        given, made = tensors_in(args), dict[int, torch.Tensor]()

        def tensor(like: torch.Tensor) -> torch.Tensor:
            if not like.is_meta:
                return like.clone()
            storage = like.untyped_storage()
            number, strides = self.handed.get(storage._cdata, (-1, ()))
            if 0 <= number < len(given) and given[number].stride() == strides and given[number].dtype == like.dtype:
                offset = given[number].storage_offset() + like.storage_offset()
                return given[number].as_strided(like.shape, like.stride(), offset)
            if like.is_contiguous() and storage.nbytes() == like.nbytes and storage._cdata not in shared:
                return torch.zeros(like.shape, dtype=like.dtype, device=device)
            if storage._cdata not in made:
                made[storage._cdata] = torch.zeros(storage.nbytes(), dtype=torch.uint8, device=device)
            whole = made[storage._cdata][: storage.nbytes() // like.itemsize * like.itemsize]
            return whole.view(like.dtype).as_strided(like.shape, like.stride(), like.storage_offset())

        shared = _shared(tensors_in(self.template))
        return walk(self.template, tensor)


def _shared(tensors: Sequence[torch.Tensor]) -> set[int]:
    """Storages of more than one of ``tensors``."""
    found, several = set[int](), set[int]()
    for tensor in tensors:
        cdata = tensor.untyped_storage()._cdata
        (several if cdata in found else found).add(cdata)
    return several


def returned(out: Any, args: Any, weights: Collection[int], place: torch.device = META) -> Returned:
    """``out``, which an entry that ran on ``place`` and was handed ``args`` returned, without its numbers.

    ``weights``: storages of which a view is a tensor of its own. What is elsewhere than on ``place`` is on the host, and stays.
    """
    given = tensors_in(args)
    numbers = {tensor.untyped_storage()._cdata: number for number, tensor in reversed(list(enumerate(given)))}
    storages, handed = dict[int, torch.UntypedStorage](), dict[int, tuple[int, tuple[int, ...]]]()

    def twin(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.device.type != place.type:
            return tensor.clone()
        if (cdata := storage._cdata) in weights:
            return torch.empty_like(tensor, device=META)
        if cdata not in storages:
            storages[cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=META).untyped_storage()
            if (number := numbers.get(cdata)) is not None:
                handed[storages[cdata]._cdata] = number, given[number].stride()
        blank = torch.empty(0, dtype=tensor.dtype, device=META)
        return blank.set_(storages[cdata], tensor.storage_offset(), tensor.shape, tensor.stride())

    return Returned(walk(out, twin), handed)
