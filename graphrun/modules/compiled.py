"""Blocks compiled by `torch.compile`: hooks around them, and copies that run without compiling.

    block.compile()                      the module; its calls go to compiled code
                                         (`compile_repeated_blocks`)
    blocks[0] = torch.compile(block)     an `OptimizedModule` around the block, with the block as
                                         ``_orig_mod``

Compiled code takes weights from the module's tables at each call. Its guards check their shapes and
dtypes but not where they are, so weights can move without compiling again. Hooks of a module, and
modules inside it whose class is replaced, would be compiled too. So hooks run around the outermost
compiled module, and classes inside it stay (`CallInterceptor`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import nn


class HookHandle(Protocol):
    """A registered hook."""

    def remove(self) -> None:
        """Remove the hook."""


def is_compiled(module: nn.Module) -> bool:
    """Return whether calls of ``module`` run code that `torch.compile` made for it."""
    return (
        "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
    )


def compile_blocks(module: nn.Module, paths: Iterable[str]) -> None:
    """Compile the submodules ``paths`` of ``module``, each by itself, at their first call.
    Submodules with equal code share the compiled code."""
    for path in paths:
        module.get_submodule(path).compile()


def outermost_compiled(module: nn.Module, path: str) -> nn.Module:
    """Return the outermost compiled module on the way from ``module`` to its submodule ``path``;
    that submodule if none is compiled."""
    for name in path.split(".") if path else ():
        if is_compiled(module):
            break
        module = getattr(module, name)
    return module


def hook_around(
    module: nn.Module, on_enter: Callable[[], None], on_exit: Callable[[], None] | None = None
) -> list[HookHandle]:
    """Call ``on_enter`` and ``on_exit`` around each run of ``module``, outside compiled code.
    Remove the last handle first."""
    if vars(module).get("_compiled_call_impl") is not None:
        return [_AroundCompiled(module, on_enter, on_exit)]
    handles: list[HookHandle] = [module.register_forward_pre_hook(lambda *_: on_enter())]
    return (
        handles
        if on_exit is None
        else [*handles, module.register_forward_hook(lambda *_: on_exit())]
    )


class _AroundCompiled:
    """Replaces the compiled code of ``module`` until `remove`."""

    def __init__(
        self, module: Any, on_enter: Callable[[], None], on_exit: Callable[[], None] | None
    ) -> None:
        self._module, self._compiled, self._on_enter, self._on_exit = (
            module,
            module._compiled_call_impl,
            on_enter,
            on_exit,
        )
        module._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._on_enter()
        result = self._compiled(*args, **kwargs)
        if self._on_exit is not None:
            self._on_exit()
        return result

    def remove(self) -> None:
        """Give the module its compiled code back."""
        self._module._compiled_call_impl = self._compiled


def run_as_written(module: Any) -> None:
    """Make ``module``, a copy of a compiled one, run without compiling. It still counts as
    compiled."""
    if hasattr(module, "_orig_mod"):
        module.forward = module._orig_mod.__call__
    else:
        module._compiled_call_impl = module._call_impl
