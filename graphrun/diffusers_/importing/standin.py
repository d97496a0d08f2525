"""A byte tokenizer in place of a tokenizer of which only the class is known. Sizes are right, since
pipelines pad texts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

STAND_IN = Path("tokenizers/bytes.json")  # next to the graph file
# names of its special tokens, and the default maximum length of a text
MARKS = {"model_max_length": 512, "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}


def stand_in(settings: Mapping[str, Any]) -> Any:
    """Return a byte tokenizer of class ``PreTrainedTokenizerFast`` with ``settings``."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(stand_in_words()), **settings
    )


def stand_in_words() -> str:
    """Return a byte tokenizer as JSON in the format of the tokenizers library: a token for each
    byte, between ``<s>`` and ``</s>``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {
        "<pad>": 0,
        **{letter: number + 1 for number, letter in enumerate(letters)},
        "<s>": 257,
        "</s>": 258,
    }
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 257), ("</s>", 258)]
    )
    tokenizer.add_special_tokens(
        [AddedToken(mark, special=True, normalized=False) for mark in ("<pad>", "<s>", "</s>")]
    )
    text: str = tokenizer.to_str()
    return text
