"""The result of a traced call: tensors, shared storages, and storages of the arguments.

encode(x) -> mean, logvar = moments.chunk(2)    one storage of the size of `moments`, two views:
                                                keeping `mean` keeps all of it
forward(x) -> x[:, 1:]                          a view of the first tensor argument: takes no
                                                memory, and keeps all of x
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from graphrun.modules.trees import holders_in, put_content, tensors_in, walk
from graphrun.profile.meta_ops import META
from graphrun.sim.tensor import SimTensor

MOST_INTEGERS = 1 << 16  # of a result whose values are kept


class Alias(NamedTuple):
    """A storage of the tensor argument number ``argument``, which has these ``strides``."""

    argument: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Returned:
    """The result of a traced call.

    ``template``: the result with device tensors on meta, which share storages as the returned ones
    do. ``aliases``: address of a meta storage -> the argument with this storage.
    ``argument_contents``: number of a list, dict or object among the arguments (`holders_in`) ->
    its contents after the call, if the call put other tensors into it, such as into a cache of keys
    and values. ``integers``: address of a meta storage -> the integers in it, such as generated
    tokens, if the call was computed; code often decides by them.
    """

    template: Any
    aliases: Mapping[int, Alias]
    argument_contents: Mapping[int, Any] = field(default_factory=dict)
    integers: Mapping[int, torch.Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the storages that the call created on the device."""
        created_storages = (
            tensor.untyped_storage()
            for tensor in tensors_in((self.template, self.argument_contents))
            if tensor.is_meta
        )
        storages = {storage._cdata: storage.nbytes() for storage in created_storages}
        return sum(nbytes for cdata, nbytes in storages.items() if cdata not in self.aliases)

    def materialize(self, args: Any, device: torch.device, *, generates: bool = False) -> Any:
        """Return zeros, integers or views of ``args`` (args, kwargs); change these as the call
        does. Unknown tokens of a call that ``generates`` repeat the prompt's: pipelines decode them
        to a text, and zeros may stand for none."""
        arguments, created_tensors = tensors_in(args), dict[int, torch.Tensor]()

        def tensor(example: torch.Tensor) -> torch.Tensor:
            if not example.is_meta:
                return example.clone()
            storage = example.untyped_storage()
            if (alias := self.aliases.get(storage._cdata)) is not None and alias.argument < len(
                arguments
            ):
                argument_tensor = arguments[alias.argument]
                if (
                    argument_tensor.stride() == alias.strides
                    and argument_tensor.dtype == example.dtype
                ):
                    return argument_tensor.as_strided(
                        example.shape,
                        example.stride(),
                        argument_tensor.storage_offset() + example.storage_offset(),
                    )
            if (
                example.is_contiguous()
                and storage.nbytes() == example.nbytes
                and uses[storage._cdata] == 1
            ):
                values = self.integers.get(storage._cdata)
                if values is None and generates:
                    values = continued_prompt(arguments, example)
                if values is not None:
                    return values.to(device)
                return torch.zeros(example.shape, dtype=example.dtype, device=device)
            if storage._cdata not in created_tensors:
                created_tensors[storage._cdata] = torch.zeros(
                    storage.nbytes(), dtype=torch.uint8, device=device
                )
            storage_tensor = created_tensors[storage._cdata][
                : storage.nbytes() // example.itemsize * example.itemsize
            ]
            return storage_tensor.view(example.dtype).as_strided(
                example.shape, example.stride(), example.storage_offset()
            )

        uses = Counter(
            tensor.untyped_storage()._cdata
            for tensor in tensors_in((self.template, self.argument_contents))
        )
        result, argument_contents = walk((self.template, self.argument_contents), tensor)
        if argument_contents:  # caches note where their tensors are
            result, argument_contents = walk(
                (result, argument_contents),
                lambda place: device if place.type == "meta" else place,
                torch.device,
            )
            holders = holders_in(args)
            for number, content in argument_contents.items():
                put_content(holders[number], content)
        return result


def continued_prompt(
    arguments: Sequence[torch.Tensor], example: torch.Tensor
) -> torch.Tensor | None:
    """Return tokens like ``example``: those of the prompt among ``arguments``, and again."""
    for argument in arguments:
        values = argument.raw if isinstance(argument, SimTensor) else argument
        if (
            values.dtype == example.dtype == torch.int64
            and values.ndim == example.ndim == 2
            and len(values) == len(example)
            and 0 < values.shape[1] <= example.shape[1]
        ):
            # from its middle: at its ends are marks of the template, which decode to no text
            text = values.roll(-(values.shape[1] // 2), 1)
            text = text.repeat(1, example.shape[1] // values.shape[1])
            return torch.cat([values, text], dim=1)[:, : example.shape[1]]
    return None


def capture_result(
    output: Any,
    arguments: Sequence[torch.Tensor],
    argument_contents: Mapping[int, Any],
    weights: Collection[int],
    device: torch.device = META,
) -> Returned:
    """Return ``output``, the result of a call on ``device``, without its values but few integers.

    ``arguments``: the tensors in the call's arguments. ``argument_contents``: as in `Returned`.
    ``weights``: addresses of storages whose views are returned as separate tensors. Tensors on
    other devices are on the host, and are cloned.
    """
    argument_of = {
        tensor.untyped_storage()._cdata: number
        for number, tensor in reversed(list(enumerate(arguments)))
    }
    storages, aliases = dict[int, torch.UntypedStorage](), dict[int, Alias]()
    integers = dict[int, torch.Tensor]()

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
            elif device != META and tensor.dtype == torch.int64 and tensor.numel() <= MOST_INTEGERS:
                integers[storages[cdata]._cdata] = tensor.clone()
        blank = torch.empty(0, dtype=tensor.dtype, device=META)
        return blank.set_(storages[cdata], tensor.storage_offset(), tensor.shape, tensor.stride())

    template, contents = walk((output, dict(argument_contents)), to_meta)
    return Returned(template, aliases, contents, integers)
