"""Whether the shapes of a call depend on how long its texts are.

    tokenizer(text, padding="max_length")     77 ids, whatever the text: calls with any text share a
    plan tokenizer(text, padding=True)             as many as the text has: each text is planned,
    before its call embeddings[mask]                          padded, then cut to as many as the
    text has (Z-Image): likewise

Pipelines also count a text's ids to warn that it is cut. So only what enters a component matters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from graphrun.modules.trees import tensors_in


class TextLengths:
    """The lengths of a dry run's texts in tokens: those ``fixed`` by padding to a maximum, those
    ``own`` to the texts, and those that masks of texts ``left`` of embeddings."""

    def __init__(self) -> None:
        self.fixed, self.own, self.left = set[int](), set[int](), set[int]()
        self.entered, self.entered_cut = set[int](), set[int]()

    @property
    def matter(self) -> bool:
        """Whether ids of a length that is that of a text, or embeddings that were cut to that, have
        entered a component."""
        return bool(self.entered & (self.own - self.fixed) or self.entered_cut)

    def enter(self, arguments: Any) -> None:
        """Notes the integer tensors [... length] and the floating-point ones [... length ...] among
        the arguments of an entry."""
        for tensor in tensors_in(arguments):
            if tensor.is_floating_point():
                self.entered_cut |= self.left.intersection(tensor.shape)
            elif tensor.ndim > 1:
                self.entered.add(tensor.shape[-1])

    def cut(self, operands: Iterable[torch.Tensor]) -> None:
        """Notes how much the boolean masks among ``operands``, of an operator that cuts by them,
        leave, where they are as long as a text."""
        masks = [mask for mask in operands if mask.dtype is torch.bool and mask.ndim]
        self.left.update(
            int(mask.sum()) for mask in masks if mask.shape[-1] in self.fixed | self.own
        )

    def tokenized(self, lengths: set[int], padded: bool) -> None:
        """Notes the ``lengths`` of texts that a tokenizer returned, and whether it ``padded`` them
        to a maximum. A maximum that is the own length of an earlier text (Lumina pads the negative
        text to that of the text) is no fixed one."""
        if padded:
            self.fixed |= lengths - self.own
        else:
            self.own |= lengths

    @contextmanager
    def watching(self, pipe: Any) -> Iterator[None]:
        """Within the context, notes what the tokenizers of ``pipe`` return. Its processors' own are
        among them."""
        from transformers import PreTrainedTokenizerBase

        parts = [*getattr(pipe, "__dict__", {}).values()]
        held = [*parts, *(getattr(part, "tokenizer", None) for part in parts)]
        tokenizers = {
            id(each): each for each in held if isinstance(each, PreTrainedTokenizerBase)
        }.values()
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
            self.tokenized(lengths, padding == "max_length")
            return made

        return type(kind.__name__, (kind,), {"__module__": kind.__module__, "__call__": call})
