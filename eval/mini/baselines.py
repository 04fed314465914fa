"""What a text costs without a model: gzip, and 5-grams of bytes learned from training text."""

from __future__ import annotations

import gzip
import math
from collections import Counter

_ORDER = 5


def gzip_bits(text: bytes) -> float:
    """Bits a byte."""
    return 8 * len(gzip.compress(text, 9)) / len(text)


def ngram_bits(known: bytes, text: bytes) -> float:
    """Bits a byte of a 5-gram model: each order backs off to the one below (Witten-Bell)."""
    seen: list[Counter[bytes]] = [Counter() for _ in range(_ORDER + 1)]
    for size in range(1, _ORDER + 1):
        seen[size].update(known[i : i + size] for i in range(len(known) - size + 1))
    followed: list[Counter[bytes]] = [Counter() for _ in range(_ORDER)]  # occurrences of a context
    kinds: list[Counter[bytes]] = [Counter() for _ in range(_ORDER)]  # different bytes after it
    for size in range(1, _ORDER + 1):
        for gram, count in seen[size].items():
            followed[size - 1][gram[:-1]] += count
            kinds[size - 1][gram[:-1]] += 1
    total = 0.0
    for place, byte in enumerate(text):
        chance = 1 / 256
        for size in range(_ORDER):
            if size > place:
                break
            context = text[place - size : place]
            count = followed[size][context]
            if not count:
                break
            different = kinds[size][context]
            found = seen[size + 1][context + bytes([byte])]
            chance = (found + different * chance) / (count + different)
        total -= math.log2(chance)
    return total / len(text)
