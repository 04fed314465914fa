"""Are answers the same tokens? And where two differ, was it a tie? Pure.

On a CPU every rank computes the same bits whatever the batch, so answers are equal. On a GPU a
product of other shapes may round differently; where the reference's two likeliest tokens were
closer than that, either is right, and what follows is another answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Reference:
    """An answer, and for each of its tokens how far the next likeliest was behind it, in nats."""

    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]


@dataclass(frozen=True)
class Match:
    answers: int
    equal: int
    ties: int  # equal up to a token at which the reference had a tie
    wrong: tuple[str, ...]  # the others, a line each

    def __str__(self) -> str:
        parts = [f"{self.equal} of {self.answers} the same tokens"]
        if self.ties:
            parts.append(f"{self.ties} until a tie")
        return ", ".join([*parts, *self.wrong[:3]])


def gaps_of(top_logprobs: Sequence[Mapping[str, float]]) -> tuple[float, ...]:
    """Of the two likeliest at each token; infinite where only one was possible."""
    found = []
    for one in top_logprobs:
        best, *others = sorted(one.values(), reverse=True)
        found.append(best - others[0] if others else float("inf"))
    return tuple(found)


def match(
    references: Mapping[str, Reference], answers: Mapping[str, Sequence[int]], *, margin: float
) -> Match:
    """By name of the prompt. A difference is a tie where the reference's gap is within `margin`;
    with margin 0 only exact ties are."""
    equal, ties, wrong = 0, 0, []
    for name, answer in answers.items():
        reference = references[name]
        at = _first_difference(reference.token_ids, answer)
        if at is None:
            equal += 1
        elif at < len(reference.gaps) and at < len(answer) and reference.gaps[at] <= margin:
            ties += 1
        else:
            gap = f"{reference.gaps[at]:.3g}" if at < len(reference.gaps) else "no"
            wrong.append(f"{name} differs from token {at} on, with {gap} nats between the best two")
    return Match(len(answers), equal, ties, tuple(wrong))


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    for at, (ours, theirs) in enumerate(zip(one, other, strict=False)):
        if ours != theirs:
            return at
    return None if len(one) == len(other) else min(len(one), len(other))
