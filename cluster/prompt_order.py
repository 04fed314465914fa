"""Puts a prompt's log-probabilities into one row: each position once, none missing. Pure.

Each attempt's rank says all of them from position 1 on; what an earlier attempt has passed on is
dropped. Knows nothing of streams and of the answer's tokens.
"""

from __future__ import annotations

from cluster.errors import ProtocolError
from cluster.messages import PromptLogprobs
from cluster.token_order import Delta


class PromptOrder:
    """For one attempt, which owes the positions `owed`; `passed_on` of them are with the caller."""

    def __init__(self, owed: range, passed_on: int) -> None:
        self._owed = owed
        self._next = owed.start
        self._fresh = owed.start + passed_on  # positions below it are with the caller

    def take(self, scored: PromptLogprobs) -> list[Delta]:
        """What is new in it. ProtocolError for a double, a gap, or what nobody owes."""
        stop = scored.first + len(scored.logprobs)
        if scored.first != self._next or stop > self._owed.stop:
            raise ProtocolError(
                f"got log-probabilities of positions {scored.first} .. {stop - 1} where "
                f"{self._next} is next and the prompt has {self._owed.stop}"
            )
        self._next = stop
        fresh = scored.logprobs[max(0, self._fresh - scored.first) :]
        return [Delta((), 0, prompt_logprobs=fresh)] if fresh else []

    def check_complete(self) -> None:
        """Before a token is passed on. ProtocolError if a position is missing."""
        if self._next < self._owed.stop:
            raise ProtocolError(
                f"a token came before the log-probabilities of the prompt from position "
                f"{self._next} on; {self._owed.stop - 1} is the last"
            )
