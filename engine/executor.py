"""Runs one step on the model: rows in, next tokens out. Knows not why these rows were chosen.

A prompt whose log-probabilities are wanted has the logits of all its rows made, others one row's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from cluster.errors import ClusterError
from engine.choice import Choice
from engine.context import Context
from engine.grammar import Compiler, Constraint, MaskThreads
from engine.logprobs import prompt_logprobs
from engine.request import Running
from engine.sampler import sample
from engine.scored import Scored
from engine.step_loop import Outcome, Work
from kv_transfer.device_slab import DeviceSlab
from kv_transfer.slab import Slab
from kv_transfer.state_memory import cache_over
from model.batch import Chunk, ForwardBatch, build_batch
from model.cache import Cache
from model.spec import ModelSpec


class Model(Protocol):
    """What an engine needs of a model; model.transformer.Transformer is one."""

    @property
    def spec(self) -> ModelSpec: ...

    def forward(self, batch: ForwardBatch, cache: Cache) -> Tensor:
        """Logits [len(batch.logit_rows), V] float32; every row's state goes into the cache."""
        ...


class Executor:
    def __init__(
        self,
        model: Model,
        slab: Slab | DeviceSlab,
        spelled_ids: int | None = None,
        grammars: Compiler | None = None,
    ) -> None:
        """Ids from `spelled_ids` on are padding of the vocabulary, and never sampled.

        `grammars` compiles what requests demand; None: no request demands anything.
        """
        self._model = model
        self._grammars = grammars
        self._masks = MaskThreads()
        self._spelled_ids = spelled_ids
        self._slab = slab
        self._contexts: WeakKeyDictionary[Running, Context] = WeakKeyDictionary()

    @torch.inference_mode()
    def __call__(self, work: Sequence[Work]) -> Sequence[Outcome]:
        """One outcome for each part; raises whatever the forward raises."""
        spec = self._model.spec
        self._begin_masks(work)
        batch = build_batch(
            [
                Chunk(
                    one.running.token_ids,
                    one.grant.start,
                    one.grant.count,
                    logits=_wanted(one),
                )
                for one in work
            ],
            image_token_id=spec.image_token_id,
            ngram=spec.engram_max_ngram_size,
        )
        cache = cache_over(self._slab, [one.running.lease for one in work])
        logits_RV = self._model.forward(batch, cache).cpu()
        if not any(one.scored for one in work):
            return self._next_tokens(work, logits_RV)
        parts = torch.split(logits_RV, [_rows(one) for one in work])
        last_rows = [part[-1:] for one, part in zip(work, parts, strict=True) if one.grant.samples]
        outcomes = self._next_tokens(work, torch.cat([logits_RV[:0], *last_rows]))
        return [_with_prompt(*part) for part in zip(work, parts, outcomes, strict=True)]

    def _next_tokens(
        self, work: Sequence[Work], logits_RV: Tensor
    ) -> Sequence[Choice | ClusterError | None]:
        """`logits_RV` has one row for each part that samples."""
        contexts = [self._context(one.running) for one in work if one.grant.samples]
        drawn = iter(sample(logits_RV, contexts, self._spelled_ids))
        return [next(drawn) if one.grant.samples else None for one in work]

    def _begin_masks(self, work: Sequence[Work]) -> None:
        """What grammars let come is found while the forward runs."""
        for one in work:
            if one.grant.samples and one.running.request.sampling.grammar is not None:
                grammar = self._context(one.running).grammar
                assert grammar is not None
                grammar.begin()

    def _context(self, running: Running) -> Context:
        """Made once a request: it sees the ids that are added later."""
        if running not in self._contexts:
            self._contexts[running] = Context(
                running.request, running.token_ids, running.stop_ids, self._constraint(running)
            )
        return self._contexts[running]

    def _constraint(self, running: Running) -> Constraint | None:
        grammar = running.request.sampling.grammar
        if grammar is None:
            return None
        assert self._grammars is not None, "a rank checks grammars before it takes a request"
        return Constraint(
            grammar, self._grammars, self._masks, running.token_ids, running.request.prompt_length
        )


def _wanted(one: Work) -> Literal["all", "last", "none"]:
    if one.scored:
        return "all"
    return "last" if one.grant.samples else "none"


def _rows(one: Work) -> int:
    """How many rows of logits the model makes for it."""
    return {"all": one.grant.count, "last": 1, "none": 0}[_wanted(one)]


def _with_prompt(one: Work, logits_RV: Tensor, outcome: Choice | ClusterError | None) -> Outcome:
    positions, alternatives = one.scored, one.running.request.sampling.prompt_logprobs
    if not positions or alternatives is None:
        return outcome
    tokens = [one.running.token_ids[position] for position in positions]
    scored = prompt_logprobs(logits_RV[: len(tokens)], positions.start, tokens, alternatives)
    return Scored(scored, outcome)
