"""Limit the padding of tokenizers, name their files in errors, and pad texts for planning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from graphrun.errors import GraphError
from graphrun.reading import LibraryPanic, panics_as_errors

# Far more than the text encoders of diffusion pipelines accept (77 to 1024 tokens); the ids take 8
# MiB. The tokenizers library ends the process if it cannot allocate the padding of a text.
MAX_TOKENS = 1 << 20


def with_length_limit(
    tokenizer: Any,
    place: str,
    length_source: str,
    file_line: str,
    file: Path,
    *,
    longest: bool = False,
) -> Any:
    """Return ``tokenizer`` changed to refuse padding a text to more than `MAX_TOKENS`.

    An object that contains a tokenizer is changed too; any other object is returned unchanged. The
    GraphError is raised at ``file_line``, about ``place``. ``length_source``: where
    ``model_max_length`` comes from. ``file``: the tokenizer's file or folder, for errors of the
    tokenizers library. ``longest``: unpadded texts get their maximum length.
    """
    from transformers import PreTrainedTokenizerBase

    inner = getattr(tokenizer, "tokenizer", None)
    if isinstance(inner, PreTrainedTokenizerBase):
        tokenizer.tokenizer = with_length_limit(
            inner, place, length_source, file_line, file, longest=longest
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    tokenizer_class = type(tokenizer)

    def call(self: Any, text: Any = None, *args: Any, padding: Any = False, **settings: Any) -> Any:
        length = settings.get("max_length")
        stretched = (
            longest
            and padding in (True, "longest")
            and text is not None
            and settings.get("truncation")
        )
        if padding == "max_length" or (stretched and length):
            _refuse_long(self, length, place, length_source, file_line)
        if stretched and length:
            filler = " a" * length  # at least one token each in any vocabulary
            text = (
                [item + filler if isinstance(item, str) else item for item in text]
                if isinstance(text, list)
                else text + filler
            )
        with _library_errors(place, file, file_line):
            return tokenizer_class.__call__(self, text, *args, padding=padding, **settings)

    def with_file_errors(name: str) -> Any:
        method = getattr(tokenizer_class, name)

        @wraps(method)
        def run(*args: Any, **settings: Any) -> Any:
            with _library_errors(place, file, file_line):
                return method(*args, **settings)

        return run

    methods = {
        "__call__": call,
        **{
            name: with_file_errors(name)
            for name in ("tokenize", "encode", "decode", "batch_decode")
        },
    }
    tokenizer.__class__ = type(
        tokenizer_class.__name__,
        (tokenizer_class,),
        {"__module__": tokenizer_class.__module__, **methods},
    )
    return tokenizer


@contextmanager
def restored_limits(parts: Iterable[Any], *, lifted: bool = False) -> Iterator[None]:
    """Restore truncation and padding of the tokenizers among ``parts`` and in processors.

    Every call of a tokenizer sets them, and its `save_pretrained` writes them. ``lifted``: inside,
    there are none.
    """
    backends = [
        backend
        for part in parts
        if (backend := getattr(getattr(part, "tokenizer", part), "backend_tokenizer", None))
        is not None
        and hasattr(backend, "no_truncation")
    ]
    limits = [(backend.truncation, backend.padding) for backend in backends]
    if lifted:
        for backend in backends:
            backend.no_truncation()
            backend.no_padding()
    try:
        yield
    finally:
        for backend, (truncation, padding) in zip(backends, limits, strict=True):
            backend.no_truncation()
            backend.no_padding()
            if truncation is not None:
                backend.enable_truncation(**truncation)
            if padding is not None:
                backend.enable_padding(**padding)


@contextmanager
def _library_errors(place: str, file: Path, file_line: str) -> Iterator[None]:
    """Turn errors of the tokenizers library, panics and bare Exceptions, into a GraphError."""
    try:
        with panics_as_errors():
            yield
    except Exception as error:
        # the caller's error, such as a number in place of a text
        if type(error) not in (
            LibraryPanic,
            Exception,
        ):
            raise
        text = " ".join(str(error).split())[:400]
        raise GraphError(
            f"{place}: {file} cannot encode a text: {text}; download it again", file_line
        ) from error


def _refuse_long(
    tokenizer: Any, max_length: Any, place: str, length_source: str, file_line: str
) -> None:
    from transformers.tokenization_utils_base import LARGE_INTEGER

    model_length = tokenizer.model_max_length
    # model_max_length is not set: transformers does not pad
    if (
        max_length is None
        and isinstance(model_length, (int, float))
        and model_length > LARGE_INTEGER
    ):
        return
    length = model_length if max_length is None else max_length
    if not isinstance(length, int) or not 0 < length <= MAX_TOKENS:
        source = (
            f"model_max_length in {length_source}"
            if length == model_length
            else "max_length of its call: an input such as max_sequence_length"
        )
        raise GraphError(
            f"{place}: a text cannot be padded to {length!r} tokens ({source}); give 1 to "
            f"{MAX_TOKENS}",
            file_line,
        )
