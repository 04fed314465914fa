"""Engram's compressed token ids: tokens that differ only in case, accents or spacing share one.

The map is no part of a checkpoint; it follows from the tokenizer.
"""

from __future__ import annotations

import torch
from tokenizers import Regex
from tokenizers.normalizers import (
    NFD,
    NFKC,
    Lowercase,
    Replace,
    Sequence,
    Strip,
    StripAccents,
)
from torch import Tensor

from model.tokenizer import Tokenizer

_ONLY_SPACE = "\ue000"  # stands for a text that is one space, which stripping would empty
_NORMALISE = Sequence(
    [
        NFKC(),
        NFD(),
        StripAccents(),
        Lowercase(),
        Replace(Regex(r"[ \t\r\n]+"), " "),
        Replace(Regex(r"^ $"), _ONLY_SPACE),
        Strip(),
        Replace(_ONLY_SPACE, " "),
    ]
)


def compress_vocabulary(tokenizer: Tokenizer) -> Tensor:
    """Compressed id of each token id, int64 [V]; numbered in order of first appearance."""
    numbers: dict[str, int] = {}
    return torch.tensor(
        [
            numbers.setdefault(_key(tokenizer, token_id), len(numbers))
            for token_id in range(tokenizer.vocab_size)
        ]
    )


def _key(tokenizer: Tokenizer, token_id: int) -> str:
    """What tokens of one compressed id have in common."""
    text = tokenizer.decode([token_id])
    if "\ufffd" in text:  # a part of a character
        return tokenizer.piece(token_id)
    return _NORMALISE.normalize_str(text) or text
