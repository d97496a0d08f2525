"""Limits the length that tokenizers pad texts to, and pads unpadded texts to the maximum length while planning."""

from __future__ import annotations

from typing import Any

from graphrun.errors import GraphError

# Far longer than what the text encoders of diffusion pipelines take (77 to 1024 tokens); its ids take 8 MiB. The tokenizers library
# ends the process where it cannot allocate the padding of a text.
MOST_TOKENS = 1 << 20


def measured(made: Any, place: str, said: str, where: str, *, longest: bool = False) -> Any:
    """``made`` changed to refuse padding a text to more than `MOST_TOKENS`, if it is a tokenizer or has one.

    The GraphError is raised at ``where``, about ``place``; ``said`` is where its ``model_max_length`` comes from. ``longest``:
    unpadded texts get their maximum length.
    """
    from transformers import PreTrainedTokenizerBase

    inner = getattr(made, "tokenizer", None)
    if isinstance(inner, PreTrainedTokenizerBase):
        made.tokenizer = measured(inner, place, said, where, longest=longest)
    if not isinstance(made, PreTrainedTokenizerBase):
        return made
    own = type(made)

    def call(self: Any, text: Any = None, *args: Any, padding: Any = False, **settings: Any) -> Any:
        length = settings.get("max_length")
        stretched = longest and padding in (True, "longest") and text is not None and settings.get("truncation")
        if padding == "max_length" or (stretched and length):
            _refuse_long(self, length, place, said, where)
        if stretched and length:
            more = " a" * length  # at least one token each in any vocabulary
            text = [one + more if isinstance(one, str) else one for one in text] if isinstance(text, list) else text + more
        return own.__call__(self, text, *args, padding=padding, **settings)

    made.__class__ = type(own.__name__, (own,), {"__module__": own.__module__, "__call__": call})
    return made


def _refuse_long(tokenizer: Any, asked: Any, place: str, said: str, where: str) -> None:
    from transformers.tokenization_utils_base import LARGE_INTEGER

    own = tokenizer.model_max_length
    if asked is None and isinstance(own, (int, float)) and own > LARGE_INTEGER:  # not set: transformers does not pad then
        return
    length = own if asked is None else asked
    if not isinstance(length, int) or not 0 < length <= MOST_TOKENS:
        source = f"model_max_length in {said}" if length == own else "max_length of its call: an input such as max_sequence_length"
        raise GraphError(f"{place}: a text cannot be padded to {length!r} tokens ({source}); give 1 to {MOST_TOKENS}", where)
