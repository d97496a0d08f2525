"""Blocks that `torch.compile` compiled: how hooks run around them, and copies of them that run as
they were written.

    block.compile()                         the module; calls of it go to compiled code
    (`compile_repeated_blocks`) blocks[0] = torch.compile(block)        an `OptimizedModule` around
    the block, which it holds as ``_orig_mod``

Compiled code takes weights from the module's tables at each call, and has guards on their shapes
and dtypes but not on where they are. So weights are placed again without compiling again. Hooks of
a module, and modules inside it whose class is replaced, would be compiled too: hooks run around the
outermost compiled module, and classes in it stay (`CallInterceptor`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import nn


class Handle(Protocol):
    """What registering a hook returns."""

    def remove(self) -> None:
        """Removes the hook."""


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of ``module`` run code that `torch.compile` made for it."""
    return (
        "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
    )


def compile_blocks(module: nn.Module, paths: Iterable[str]) -> None:
    """Compiles the submodules ``paths`` of ``module``, each by itself, when it is first called.
    Those with equal code share it."""
    for path in paths:
        module.get_submodule(path).compile()


def outermost_compiled(module: nn.Module, path: str) -> nn.Module:
    """The outermost compiled module on the way from ``module`` to its submodule ``path``; that
    submodule where none is compiled."""
    for name in path.split(".") if path else ():
        if is_compiled(module):
            break
        module = getattr(module, name)
    return module


def hook_around(
    module: nn.Module, before: Callable[[], None], after: Callable[[], None] | None = None
) -> list[Handle]:
    """Calls ``before`` and ``after`` around each run of ``module``, and outside of its compiled
    code. Remove the last handle first."""
    if vars(module).get("_compiled_call_impl") is not None:
        return [_AroundCompiled(module, before, after)]
    handles: list[Handle] = [module.register_forward_pre_hook(lambda *_: before())]
    return (
        handles if after is None else [*handles, module.register_forward_hook(lambda *_: after())]
    )


class _AroundCompiled:
    """Stands for the compiled code of ``module`` until `remove`."""

    def __init__(
        self, module: Any, before: Callable[[], None], after: Callable[[], None] | None
    ) -> None:
        self._module, self._compiled, self._before, self._after = (
            module,
            module._compiled_call_impl,
            before,
            after,
        )
        module._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._before()
        result = self._compiled(*args, **kwargs)
        if self._after is not None:
            self._after()
        return result

    def remove(self) -> None:
        """Gives the module its compiled code again."""
        self._module._compiled_call_impl = self._compiled


def run_as_written(module: Any) -> None:
    """Makes ``module``, a copy of a compiled one, run without compiling. It counts as compiled all
    the same."""
    if hasattr(module, "_orig_mod"):
        module.forward = module._orig_mod.__call__
    else:
        module._compiled_call_impl = module._call_impl
