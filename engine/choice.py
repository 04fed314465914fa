"""One token as it was chosen, and how chosen tokens are said. Knows not how they are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.messages import FinishReason, TokenLogprobs, Tokens


@dataclass(frozen=True)
class Choice:
    token: int
    logprobs: TokenLogprobs | None = None  # if the request asks for them


def as_message(first: int, choices: Sequence[Choice], finish: FinishReason | None = None) -> Tokens:
    """The tokens of output indices `first` and following."""
    return Tokens(
        first=first,
        token_ids=tuple(choice.token for choice in choices),
        finish=finish,
        logprobs=tuple(choice.logprobs for choice in choices if choice.logprobs is not None),
    )
