"""Runs one step: rows in, next tokens out. Knows not why these rows were chosen.

With a decoder, answers' rows are a decode step of their own, and the next one of those that go on
is begun before this one's tokens are waited for (run_ahead.py). All other rows, and without a
decoder all rows, run together.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from cluster.errors import ClusterError
from engine.choice import Choice
from engine.context import Context
from engine.decode_steps import Decoder
from engine.device_copies import Milestone
from engine.expert_exchange import GroupLost
from engine.grammar import Compiler, Constraint, MaskThreads
from engine.logprobs import prompt_logprobs
from engine.request import Running
from engine.run_ahead import RunAhead
from engine.runner import Runner
from engine.sampler import Sampled
from engine.scored import Scored
from engine.step_batch import logit_rows
from engine.step_loop import Outcome, Work

logger = logging.getLogger(__name__)


class Executor:
    def __init__(
        self,
        runner: Runner,
        spelled_ids: int | None = None,
        grammars: Compiler | None = None,
        decoder: Decoder | None = None,
    ) -> None:
        """Ids from `spelled_ids` on are padding of the vocabulary, and never sampled.

        `grammars` compiles what requests demand; None: no request demands anything.
        """
        self._runner = runner
        self._grammars = grammars
        self._masks = MaskThreads()
        self._spelled_ids = spelled_ids
        self._contexts: WeakKeyDictionary[Running, Context] = WeakKeyDictionary()
        self._ahead = None if decoder is None else RunAhead(decoder, self._context, spelled_ids)
        self.steps_s = self.waited_s = 0.0  # in steps, and of that waiting for their outcomes

    @property
    def rows_ahead(self) -> tuple[int, int]:
        """Rows that were begun ahead: asked for later, and for nothing."""
        return (0, 0) if self._ahead is None else (self._ahead.hits, self._ahead.misses)

    @torch.inference_mode()
    def __call__(self, work: Sequence[Work]) -> Sequence[Outcome]:
        """One outcome for each part; raises whatever the forward raises."""
        began_at = time.perf_counter()
        try:
            self._begin_masks(work)
        except Exception:
            self._runner.abandon()
            raise
        try:
            return self._together(work) if self._ahead is None else self._overlap(work, self._ahead)
        except GroupLost:  # the device may wait for ranks that are gone
            raise
        except Exception:
            self._give_up()
            raise
        finally:
            self.steps_s += time.perf_counter() - began_at

    def settle(self, running: Sequence[Running]) -> None:
        """engine.request.Settle: all but a step ahead is over when it is told of."""
        if self._ahead is not None:
            self._ahead.settle(running)

    def _overlap(self, work: Sequence[Work], ahead: RunAhead) -> Sequence[Outcome]:
        """All is begun, the next step last, before anything is waited for."""
        decoding = ahead.take(work)
        others = [number for number in range(len(work)) if number not in decoding.parts]
        rest = self._begin([work[number] for number in others]) if others else None
        assume = ahead.begin_next(decoding)
        outcomes: dict[int, Outcome] = {}
        with self._waiting():
            outcomes |= decoding.outcomes()
            if rest is not None:
                outcomes |= zip(others, rest.outcomes(), strict=True)
        assume()
        return [outcomes[number] for number in range(len(work))]

    def _together(self, work: Sequence[Work]) -> Sequence[Outcome]:
        begun = self._begin(work)
        with self._waiting():
            return begun.outcomes()

    def _begin(self, work: Sequence[Work]) -> _Begun:
        logits_RV = self._runner(work)
        parts = torch.split(logits_RV, [logit_rows(one) for one in work])
        if any(one.scored for one in work):
            last = [part[-1:] for one, part in zip(work, parts, strict=True) if one.grant.samples]
            logits_RV = torch.cat([logits_RV[:0], *last])
        contexts = [self._context(one.running) for one in work if one.grant.samples]
        sampled = Sampled(logits_RV, contexts, self._spelled_ids)
        return _Begun(work, parts, sampled, Milestone(self._runner.device))

    def _give_up(self) -> None:
        """Of a step that has failed nothing goes on, nor of the one ahead."""
        try:
            Milestone(self._runner.device).wait()
        except Exception:  # of the device, which then writes nothing any more
            logger.exception("a step has failed on its device")
        if self._ahead is not None:
            self._ahead.forget()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began_at = time.perf_counter()
        yield
        self.waited_s += time.perf_counter() - began_at

    def _begin_masks(self, work: Sequence[Work]) -> None:
        """What grammars let come is found while the forward runs."""
        for one in work:
            if one.grant.samples and one.running.request.sampling.grammar is not None:
                grammar = self._context(one.running).grammar
                assert grammar is not None
                grammar.begin()

    def _context(self, running: Running) -> Context:
        """Made once a request: it sees the ids that are added later."""
        found = self._contexts.get(running)
        if found is None:
            found = self._contexts[running] = Context(
                running.request, running.token_ids, running.stop_ids, self._constraint(running)
            )
        return found

    def _constraint(self, running: Running) -> Constraint | None:
        grammar = running.request.sampling.grammar
        if grammar is None:
            return None
        assert self._grammars is not None, "a rank checks grammars before it takes a request"
        return Constraint(
            grammar, self._grammars, self._masks, running.token_ids, running.request.prompt_length
        )


@dataclass(frozen=True)
class _Begun:
    """Parts that run together; `sampled` has a token for each that samples."""

    work: Sequence[Work]
    parts: Sequence[Tensor]  # logits of each part
    sampled: Sampled
    over: Milestone

    def outcomes(self) -> Sequence[Outcome]:
        """Waits until all rows are in the blocks: who hears of them may send them off."""
        self.over.wait()
        choices = iter(self.sampled.choices())
        return [
            _with_prompt(one, logits_RV, next(choices) if one.grant.samples else None)
            for one, logits_RV in zip(self.work, self.parts, strict=True)
        ]


def _with_prompt(one: Work, logits_RV: Tensor, outcome: Choice | ClusterError | None) -> Outcome:
    positions, alternatives = one.scored, one.running.request.sampling.prompt_logprobs
    if not positions or alternatives is None:
        return outcome
    tokens = [one.running.token_ids[position] for position in positions]
    scored_RV = logits_RV[: len(tokens)].cpu()
    return Scored(prompt_logprobs(scored_RV, positions.start, tokens, alternatives), outcome)
