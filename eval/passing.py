"""Pass@1 and how sure one can be of it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_Z = 1.959963985  # of a normal distribution, 95 % lie within so many deviations


@dataclass(frozen=True)
class Pass:
    """Shares, 0 to 1; the interval has 95 %."""

    share: float
    low: float
    high: float
    questions: int
    answers: int


def pass_at_1(right: Mapping[str, Sequence[bool]]) -> Pass:
    """Of the answers to each question: the mean over questions of the share that is right.

    With one answer each the interval is Wilson's. With several, answers to one question are not
    independent: the deviation is that of the questions' shares, and Wilson's where they are equal.
    ValueError without any answer.
    """
    shares = [sum(answers) / len(answers) for answers in right.values() if answers]
    if not shares:
        raise ValueError("there is no answer to score")
    count, mean = len(shares), sum(shares) / len(shares)
    answers = sum(map(len, right.values()))
    variance = sum((share - mean) ** 2 for share in shares) / max(1, count - 1)
    if answers == count or variance == 0.0:
        low, high = _wilson(mean, count)
    else:
        half = _Z * math.sqrt(variance / count)
        low, high = max(0.0, mean - half), min(1.0, mean + half)
    return Pass(mean, low, high, count, answers)


def _wilson(share: float, count: int) -> tuple[float, float]:
    """E. B. Wilson's score interval: right also near 0 and 1, and for small numbers."""
    square = _Z * _Z
    centre = (share + square / (2 * count)) / (1 + square / count)
    spread = share * (1 - share) / count + square / (4 * count * count)
    half = _Z * math.sqrt(spread) / (1 + square / count)
    return max(0.0, centre - half), min(1.0, centre + half)
