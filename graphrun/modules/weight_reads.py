"""Tensors that are copied to the device when code computes with them.

- A weight that code outside its component reads. Cosmos 3 looks at the dtype of every layer's
  weight before it denoises. Only reads of values cost a copy.
- A prediction of a component's copy on a secondary device (`graphrun.model.copies`). The device
  computes the next call before it waits for that prediction.
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


class DeferredTensor(torch.Tensor):
    """The shape and dtype of ``source``, as a tensor on ``device``; ``copy`` returns its values."""

    _device: torch.device
    _copy: Callable[[], torch.Tensor] | None
    _on_device: torch.Tensor | None

    @staticmethod
    def of(
        source: torch.Tensor, device: torch.device, copy: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Return ``source`` as a deferred tensor."""
        shell = torch.Tensor._make_wrapper_subclass(
            DeferredTensor,
            source.shape,
            source.stride(),
            dtype=source.dtype,
            device=torch.device("meta"),
        )
        shell._device, shell._copy, shell._on_device = device, copy, None
        return shell

    @property
    def on_device(self) -> torch.Tensor:
        """The tensor on the device, copied at the first use."""
        if self._on_device is None:
            assert self._copy is not None
            self._on_device, self._copy = self._copy(), None  # frees the source
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
            if func == _DEVICE:  # a new object at each access
                return args[0]._device
            if func is torch.Tensor.__getitem__ and not _has_tensor(args[1]):
                source, index = args
                meta = torch.empty_strided(
                    source.shape, source.stride(), dtype=source.dtype, device="meta"
                )
                return DeferredTensor.of(
                    meta[index], source._device, lambda: source.on_device[index]
                )
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


def _has_tensor(index: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(index))


def with_values(arguments: Any) -> Any:
    """Return ``arguments`` with the values of deferred tensors; without any, unchanged."""
    if not any(type(leaf) is DeferredTensor for leaf in tree_leaves(arguments)):
        return arguments
    return tree_map(
        lambda leaf: leaf.on_device if type(leaf) is DeferredTensor else leaf, arguments
    )
