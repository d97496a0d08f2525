"""Limits the length that tokenizers pad texts to, names their files in errors, and pads unpadded
texts while planning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from graphrun.errors import GraphError
from graphrun.reading import LibraryPanic, panics_as_errors

# Far longer than what the text encoders of diffusion pipelines take (77 to 1024 tokens); its ids
# take 8 MiB. The tokenizers library ends the process where it cannot allocate the padding of a
# text.
MOST_TOKENS = 1 << 20


def measured(
    made: Any, place: str, said: str, where: str, file: Path, *, longest: bool = False
) -> Any:
    """``made`` changed to refuse padding a text to more than `MOST_TOKENS`, if it is a tokenizer or
    has one.

    The GraphError is raised at ``where``, about ``place``; ``said`` is where its
    ``model_max_length`` comes from. ``file``: the tokenizer's file or folder, for errors of the
    tokenizers library. ``longest``: unpadded texts get their maximum length.
    """
    from transformers import PreTrainedTokenizerBase

    inner = getattr(made, "tokenizer", None)
    if isinstance(inner, PreTrainedTokenizerBase):
        made.tokenizer = measured(inner, place, said, where, file, longest=longest)
    if not isinstance(made, PreTrainedTokenizerBase):
        return made
    own = type(made)

    def call(self: Any, text: Any = None, *args: Any, padding: Any = False, **settings: Any) -> Any:
        length = settings.get("max_length")
        stretched = (
            longest
            and padding in (True, "longest")
            and text is not None
            and settings.get("truncation")
        )
        if padding == "max_length" or (stretched and length):
            _refuse_long(self, length, place, said, where)
        if stretched and length:
            more = " a" * length  # at least one token each in any vocabulary
            text = (
                [one + more if isinstance(one, str) else one for one in text]
                if isinstance(text, list)
                else text + more
            )
        with _library_errors(place, file, where):
            return own.__call__(self, text, *args, padding=padding, **settings)

    def typed(name: str) -> Any:
        """The method ``name`` with errors that name the file."""
        method = getattr(own, name)

        @wraps(method)
        def run(*args: Any, **settings: Any) -> Any:
            with _library_errors(place, file, where):
                return method(*args, **settings)

        return run

    methods = {
        "__call__": call,
        **{name: typed(name) for name in ("tokenize", "encode", "decode", "batch_decode")},
    }
    made.__class__ = type(own.__name__, (own,), {"__module__": own.__module__, **methods})
    return made


@contextmanager
def _library_errors(place: str, file: Path, where: str) -> Iterator[None]:
    """Turn an error of the tokenizers library, a panic or a bare Exception, into a GraphError that
    names ``file``."""
    try:
        with panics_as_errors():
            yield
    except Exception as error:
        if type(error) not in (
            LibraryPanic,
            Exception,
        ):  # the caller's error, such as a number in place of a text
            raise
        text = " ".join(str(error).split())[:400]
        raise GraphError(
            f"{place}: {file} cannot encode a text: {text}; download it again", where
        ) from error


def _refuse_long(tokenizer: Any, asked: Any, place: str, said: str, where: str) -> None:
    from transformers.tokenization_utils_base import LARGE_INTEGER

    own = tokenizer.model_max_length
    if (
        asked is None and isinstance(own, (int, float)) and own > LARGE_INTEGER
    ):  # not set: transformers does not pad then
        return
    length = own if asked is None else asked
    if not isinstance(length, int) or not 0 < length <= MOST_TOKENS:
        source = (
            f"model_max_length in {said}"
            if length == own
            else "max_length of its call: an input such as max_sequence_length"
        )
        raise GraphError(
            f"{place}: a text cannot be padded to {length!r} tokens ({source}); give 1 to {MOST_TOKENS}",
            where,
        )
