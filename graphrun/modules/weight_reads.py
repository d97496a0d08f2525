"""A weight that code outside its component reads: copied to the device when it is computed with.

Cosmos 3 looks at the dtype of every layer's weight before it denoises. Only reads of values cost a
copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

_METADATA = frozenset(
    {
        torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
        torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
        torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
        torch.Tensor.layout.__get__,  # type: ignore[attr-defined]
        torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
        torch.Tensor.nbytes.__get__,  # type: ignore[attr-defined]
        torch.Tensor.itemsize.__get__,  # type: ignore[attr-defined]
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.stride,
        torch.Tensor.numel,
        torch.Tensor.nelement,
        torch.Tensor.element_size,
        torch.Tensor.is_floating_point,
        torch.Tensor.is_complex,
        torch.Tensor.__len__,
    }
)
_DEVICE = torch.Tensor.device.__get__


class UnreadWeight(torch.Tensor):
    """The shape and dtype of ``weight``, as a tensor on ``device``; ``copy`` returns its values."""

    _device: torch.device
    _copy: Callable[[], torch.Tensor]
    _on_device: torch.Tensor | None

    @staticmethod
    def of(
        weight: torch.Tensor, device: torch.device, copy: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Return ``weight`` as an unread weight."""
        shell = torch.Tensor._make_wrapper_subclass(
            UnreadWeight,
            weight.shape,
            weight.stride(),
            dtype=weight.dtype,
            device=torch.device("meta"),
        )
        shell._device, shell._copy, shell._on_device = device, copy, None
        return shell

    @property
    def on_device(self) -> torch.Tensor:
        """The weight on the device, copied at the first use."""
        if self._on_device is None:
            self._on_device = self._copy()
        return self._on_device

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _METADATA:
                return func(*args, **(kwargs or {}))
            if func is _DEVICE:
                return args[0]._device
        return func(*with_values(args), **with_values(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return func(*with_values(args), **with_values(kwargs or {}))


def with_values(arguments: Any) -> Any:
    """Return ``arguments`` with the values of unread weights in them; without any, unchanged."""
    if not any(type(leaf) is UnreadWeight for leaf in tree_leaves(arguments)):
        return arguments
    return tree_map(lambda leaf: leaf.on_device if type(leaf) is UnreadWeight else leaf, arguments)
