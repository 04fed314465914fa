"""Puts the tokens of two ranks into one row: each index once, none missing. Pure.

The token of the first index comes from the prefill rank, all later ones from the decode rank,
and the decode rank may well be faster. Knows nothing of streams.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.errors import ProtocolError
from cluster.messages import FinishReason, TokenLogprobs, Tokens


@dataclass(frozen=True)
class Delta:
    """Tokens that the caller has not seen yet: output indices first .. first + len - 1.

    `logprobs` has one entry a token if the request asks for them, else none at all. If it asks for
    `prompt_logprobs`, they come before all tokens, some at a time, in deltas without a token: of
    the prompt's positions from 1 on, in order, each once.
    """

    token_ids: tuple[int, ...]
    first: int
    finish: FinishReason | None = None  # with the last of them
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class TokenOrder:
    """For one attempt, whose output goes on at index `first` and ends before index `limit`."""

    def __init__(self, first: int, limit: int, *, colocated: bool) -> None:
        self._limit = limit
        self._next_from_prefill = first
        self._next_from_decode = first if colocated else first + 1
        self._first_is_here = colocated
        self._early: list[Tokens] = []  # of the decode rank, while the first token is missing

    @property
    def first_is_here(self) -> bool:
        """The prefill rank owes no token any more."""
        return self._first_is_here

    def from_prefill(self, tokens: Tokens) -> list[Delta]:
        """The first token, with whatever waited for it. ProtocolError for any other."""
        if self._first_is_here or len(tokens.token_ids) > 1:
            raise ProtocolError(f"prefill sent {_range(tokens)} where one first token is expected")
        self._check(tokens, self._next_from_prefill)
        self._first_is_here = True
        deltas = [_delta(tokens)]
        if tokens.finish is None:
            deltas += [_delta(early) for early in self._early]
        elif self._early:
            raise ProtocolError("prefill ended an answer that decode went on with")
        self._early = []
        return deltas

    def from_decode(self, tokens: Tokens) -> list[Delta]:
        """The next tokens, as soon as they are next. ProtocolError for a double or a gap."""
        self._check(tokens, self._next_from_decode)
        self._next_from_decode += len(tokens.token_ids)
        if self._first_is_here:
            return [_delta(tokens)]
        self._early.append(tokens)
        return []

    def _check(self, tokens: Tokens, expected: int) -> None:
        if tokens.first != expected or expected + len(tokens.token_ids) > self._limit:
            raise ProtocolError(
                f"got {_range(tokens)} where index {expected} is next and {self._limit} the limit"
            )
        if tokens.logprobs and len(tokens.logprobs) != len(tokens.token_ids):
            raise ProtocolError(f"got {_range(tokens)} with {len(tokens.logprobs)} logprobs")


def _delta(tokens: Tokens) -> Delta:
    return Delta(tokens.token_ids, tokens.first, tokens.finish, tokens.logprobs)


def _range(tokens: Tokens) -> str:
    return f"{len(tokens.token_ids)} tokens from index {tokens.first}"
