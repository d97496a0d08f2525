"""Whether the shapes of a call depend on how long its texts are.

    tokenizer(text, padding="max_length")     77 ids, whatever the text: calls with any text share a plan
    tokenizer(text, padding=True)             as many as the text has: each text is planned, before its call

Pipelines also count a text's ids to warn that it is cut. So only ids that enter a component matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from graphrun.modules.trees import tensors_in


class TextLengths:
    """The lengths of a dry run's texts in tokens: those ``fixed`` by padding to a maximum, and those ``own`` to the texts."""

    def __init__(self) -> None:
        self.fixed, self.own, self.entered = set[int](), set[int](), set[int]()

    @property
    def matter(self) -> bool:
        """Whether ids of a length that is that of a text have entered a component."""
        return bool(self.entered & (self.own - self.fixed))

    def enter(self, arguments: Any) -> None:
        """Notes the integer tensors [... length] among the arguments of an entry."""
        ids = (tensor for tensor in tensors_in(arguments) if not tensor.is_floating_point() and tensor.ndim > 1)
        self.entered.update(tensor.shape[-1] for tensor in ids)

    @contextmanager
    def watching(self, pipe: Any) -> Iterator[None]:
        """Within the context, notes what the tokenizers of ``pipe`` return. Its processors' own are among them."""
        from transformers import PreTrainedTokenizerBase

        parts = [*getattr(pipe, "__dict__", {}).values()]
        held = [*parts, *(getattr(part, "tokenizer", None) for part in parts)]
        tokenizers = {id(each): each for each in held if isinstance(each, PreTrainedTokenizerBase)}.values()
        before = [type(tokenizer) for tokenizer in tokenizers]
        for tokenizer, kind in zip(tokenizers, before, strict=True):
            tokenizer.__class__ = self._watched(kind)
        try:
            yield
        finally:
            for tokenizer, kind in zip(tokenizers, before, strict=True):
                tokenizer.__class__ = kind

    def _watched(self, kind: Any) -> Any:
        def call(tokenizer: Any, *args: Any, padding: Any = False, **settings: Any) -> Any:
            made = kind.__call__(tokenizer, *args, padding=padding, **settings)
            ids = made.get("input_ids", [])
            rows = ids if isinstance(ids, list) and ids and isinstance(ids[0], list) else [ids]
            lengths = {row.shape[-1] if hasattr(row, "shape") else len(row) for row in rows}
            (self.fixed if padding == "max_length" else self.own).update(lengths)
            return made

        return type(kind.__name__, (kind,), {"__module__": kind.__module__, "__call__": call})
