"""Texts of the Python standard library as words, and a tokenizer of them made in code."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

VOCABULARY = 4000
WORDS = re.compile(r"[A-Za-z]+")


def texts_of(rows: Tensor) -> list[str]:
    """Return bytes [n, length] as the words of n texts: `read_pairs` gives "read pairs"."""
    decoded = [bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in rows]
    return [" ".join(WORDS.findall(text)).lower() for text in decoded]


def make_tokenizer(texts: list[str], length: int) -> Any:
    """Return a tokenizer of the commonest words of `texts`, which cuts them at `length` tokens."""
    words = Counter(word for text in texts for word in text.split())
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    ranked = sorted(words, key=lambda word: (-words[word], word))[: VOCABULARY - len(special)]
    vocabulary = {word: i for i, word in enumerate(special + ranked)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(zip(["pad_token", "unk_token", "cls_token", "sep_token"], special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=length, **names)
