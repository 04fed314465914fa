"""All that the choice of a request's next token depends on, besides its logits.

A function of the request's own ids: on whichever rank and after whichever failover it is built,
it says the same. What never changes is made into tensors once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from cluster.messages import Request, Sampling, unpack_ids
from engine.grammar import Constraint


class Context:
    """`token_ids` are prompt and output so far, of all attempts; the list may go on growing.

    `stop_ids` are those that would end the answer; `grammar` is there if the request has one.
    """

    def __init__(
        self,
        request: Request,
        token_ids: Sequence[int],
        stop_ids: frozenset[int] = frozenset(),
        grammar: Constraint | None = None,
    ) -> None:
        self.request = request
        self.grammar = grammar
        self.sampling = request.sampling
        self._token_ids = token_ids
        self._stop_ids = tuple(sorted(stop_ids))
        self._counts: Tensor | None = None
        self._counted = request.prompt_length  # ids that are in it already

    @property
    def position(self) -> int:
        """The one that the next token will take."""
        return len(self._token_ids)

    # ---------------------------------------------------------------- what has to be done

    @cached_property
    def changes_logits(self) -> bool:
        """Whether logits.change() has anything to do, for this token or a later one."""
        sampling = self.sampling
        return self.penalises or bool(
            sampling.logit_bias
            or sampling.bad_words
            or sampling.allowed_token_ids is not None
            or sampling.min_tokens
            or sampling.grammar is not None
        )

    @cached_property
    def penalises(self) -> bool:
        sampling = self.sampling
        return (
            sampling.repetition_penalty != 1.0
            or sampling.presence_penalty != 0.0
            or sampling.frequency_penalty != 0.0
        )

    @cached_property
    def takes_the_best(self) -> bool:
        """Greedy, and nothing changes the logits: the fast path."""
        return self.sampling.temperature == 0.0 and not self.changes_logits

    @cached_property
    def is_plain(self) -> bool:
        """Its next token depends on the logits and its position alone, and nothing else is asked
        for: it can be chosen before the token before it is known."""
        return not self.changes_logits and self.sampling.logprobs is None

    @cached_property
    def drawn(self) -> Sampling | None:
        """How its tokens are drawn; None: they are the best, or not plain."""
        return self.sampling if self.is_plain and self.sampling.temperature > 0.0 else None

    # ---------------------------------------------------------------- token ids in the options

    @cached_property
    def prompt_ids(self) -> Tensor:
        """[distinct ids of the prompt]"""
        return _ids(sorted(set(unpack_ids(self.request.prompt))))

    @cached_property
    def bias(self) -> tuple[Tensor, Tensor]:
        """Ids, and what is added to the logit of each, float64."""
        ids = _ids([token for token, _ in self.sampling.logit_bias])
        added = [bias for _, bias in self.sampling.logit_bias]
        return ids, torch.tensor(added, dtype=torch.float64)

    @cached_property
    def allowed(self) -> Tensor | None:
        allowed = self.sampling.allowed_token_ids
        return None if allowed is None else _ids(allowed)

    def output_counts(self, size: int) -> Tensor:
        """[size] How often each id is in the output, int64; only what is new is counted."""
        if self._counts is None:
            self._counts = torch.zeros(size, dtype=torch.int64)
        fresh = _ids(self._token_ids[self._counted :])
        self._counted += len(fresh)
        self._counts += torch.bincount(fresh, minlength=size)
        return self._counts

    def forbidden(self) -> list[int]:
        """Ids that must not come next: they would complete a bad word, or stop too early."""
        length = len(self._token_ids) - self.request.prompt_length
        longest = max((len(word) - 1 for word in self.sampling.bad_words), default=0)
        end = list(self._token_ids[-min(longest, length) :]) if min(longest, length) else []
        ids = [
            last
            for *others, last in self.sampling.bad_words
            if not others or end[-len(others) :] == others
        ]
        return ids if self.may_stop else [*ids, *self._stop_ids]

    @property
    def may_stop(self) -> bool:
        """The output has min_tokens tokens."""
        length = len(self._token_ids) - self.request.prompt_length
        return length >= self.sampling.min_tokens

    @cached_property
    def stop_ids(self) -> Tensor:
        return _ids(self._stop_ids)


def _ids(ids: Sequence[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64)
