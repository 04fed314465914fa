"""Plain sequences that can only be continued by looking back: the shortest way to learn copying."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from examples.mini.tasks.words import code_word, identifier


def pairs(random: Random, count: int) -> str:
    """A list of keys and values, then some of them again, in another order."""
    known = [(identifier(random), code_word(random)) for _ in range(count)]
    again = random.sample(known, max(1, count // 2))
    return "\n".join(f"{key}: {value}" for key, value in [*known, *again]) + "\n"


def repeated_ids(random: Random, vocabulary: Sequence[int], length: int) -> list[int]:
    """Random token ids, then the same again."""
    ids = [random.choice(vocabulary) for _ in range(length)]
    return ids + ids
