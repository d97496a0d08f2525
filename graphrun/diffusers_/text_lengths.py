"""Detect whether the shapes of a call depend on the lengths of its texts.

    tokenizer(text, padding="max_length")   77 ids for every text: calls with any text share a plan
    tokenizer(text, padding=True)           as many ids as the text has: each text needs a plan
    embeddings[mask]                        padded, then cut to the length of the text (Z-Image):
                                            likewise
    [*label, *ids, end]                     with further ids around the text's (Cosmos 3,
                                            MiniMax-H3): likewise

Pipelines also count a text's ids to warn about truncation. So only arguments of calls into
components matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from graphrun.modules.trees import tensors_in
from graphrun.sim.tensor import SimTensor


class TextLengths:
    """The lengths of a dry run's texts, in tokens.

    ``padded_lengths``: fixed by padding to a maximum. ``text_lengths``: the texts' own lengths.
    ``text_ids``: the ids of texts of their own length. ``are_extended``: whether a component
    received such ids with further ids around them.
    ``mask_lengths``: lengths of embeddings after masks of texts cut them. ``input_lengths`` and
    ``cut_input_lengths``: lengths of integer and of cut floating-point arguments of components.
    """

    def __init__(self) -> None:
        self.padded_lengths, self.text_lengths, self.mask_lengths = (
            set[int](),
            set[int](),
            set[int](),
        )
        self.input_lengths, self.cut_input_lengths = set[int](), set[int]()
        self.text_ids, self.are_extended = set[tuple[int, ...]](), False

    @property
    def matter(self) -> bool:
        """Whether a component received ids, or cut embeddings, of a text's own length."""
        return bool(
            self.input_lengths & (self.text_lengths - self.padded_lengths)
            or self.cut_input_lengths
            or self.are_extended
        )

    def add_inputs(self, arguments: Any) -> None:
        """Add the lengths of the tensors among the arguments of a call into a component: integer
        tensors are [... length], floating-point tensors [... length ...]."""
        for tensor in tensors_in(arguments):
            if tensor.is_floating_point():
                self.cut_input_lengths |= self.mask_lengths.intersection(tensor.shape)
                continue
            if tensor.ndim > 1:
                self.input_lengths.add(tensor.shape[-1])
            if (
                tensor.dtype == torch.int64
                and tensor.ndim in (1, 2)
                and tensor.shape[-1] not in self.padded_lengths
            ):
                raw = tensor.raw if isinstance(tensor, SimTensor) else tensor
                rows = raw.tolist() if raw.ndim == 2 else [raw.tolist()]
                self.are_extended = self.are_extended or any(
                    _contains(row, text) for row in rows for text in self.text_ids
                )

    def add_masks(self, operands: Iterable[torch.Tensor]) -> None:
        """Add the lengths that boolean masks among ``operands`` leave, if as long as a text.
        ``operands``: of an operator that cuts tensors by masks."""
        masks = [mask for mask in operands if mask.dtype is torch.bool and mask.ndim]
        self.mask_lengths.update(
            int(mask.sum())
            for mask in masks
            if mask.shape[-1] in self.padded_lengths | self.text_lengths
        )

    def add_lengths(self, lengths: set[int], is_padded: bool) -> None:
        """Add the ``lengths`` of texts from a tokenizer. ``is_padded``: padded to a maximum.

        A maximum equal to the own length of an earlier text is not fixed: Lumina pads the negative
        text to the length of the text.
        """
        if is_padded:
            self.padded_lengths |= lengths - self.text_lengths
        else:
            self.text_lengths |= lengths

    @contextmanager
    def watch(self, pipe: Any) -> Iterator[None]:
        """Record, in the context, the results of all tokenizers of ``pipe`` and its processors."""
        from transformers import PreTrainedTokenizerBase

        parts = [*getattr(pipe, "__dict__", {}).values()]
        candidates = [*parts, *(getattr(part, "tokenizer", None) for part in parts)]
        tokenizers = {
            id(candidate): candidate
            for candidate in candidates
            if isinstance(candidate, PreTrainedTokenizerBase)
        }.values()
        kinds = [type(tokenizer) for tokenizer in tokenizers]
        for tokenizer, kind in zip(tokenizers, kinds, strict=True):
            tokenizer.__class__ = self._watched_class(kind)
        try:
            yield
        finally:
            for tokenizer, kind in zip(tokenizers, kinds, strict=True):
                tokenizer.__class__ = kind

    def _watched_class(self, kind: Any) -> Any:
        def call(tokenizer: Any, *args: Any, padding: Any = False, **settings: Any) -> Any:
            encoding = kind.__call__(tokenizer, *args, padding=padding, **settings)
            ids = encoding.get("input_ids", [])
            rows = ids if isinstance(ids, list) and ids and isinstance(ids[0], list) else [ids]
            lengths = {row.shape[-1] if hasattr(row, "shape") else len(row) for row in rows}
            is_padded = padding == "max_length"
            self.add_lengths(lengths, is_padded)
            self.text_ids |= {
                tuple(row) for row in rows if isinstance(row, list) and row and not is_padded
            }
            return encoding

        return type(kind.__name__, (kind,), {"__module__": kind.__module__, "__call__": call})


def _contains(row: list[int], ids: tuple[int, ...]) -> bool:
    """Return whether ``ids`` stand in ``row`` one after the other."""
    start = -1
    for _ in range(row.count(ids[0])):
        start = row.index(ids[0], start + 1)
        if tuple(row[start : start + len(ids)]) == ids:
            return True
    return False
