"""Runs one step on the model: rows in, next tokens out. Knows not why these rows were chosen.

A prompt whose log-probabilities are wanted has the logits of all its rows made, others one row's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from cluster.errors import ClusterError
from engine.choice import Choice
from engine.context import Context
from engine.context_team import ContextTeam
from engine.grammar import Compiler, Constraint, MaskThreads
from engine.images import Encode, ImageRows
from engine.logprobs import prompt_logprobs
from engine.request import Running
from engine.sampler import sample
from engine.scored import Scored
from engine.step_loop import Outcome, Work
from kv_transfer.device_slab import DeviceSlab
from kv_transfer.slab import Slab
from kv_transfer.state_memory import cache_over
from kv_transfer.watched_cache import WatchedCache
from model.batch import Chunk, ForwardBatch, build_batch
from model.cache import Cache
from model.spec import ModelSpec
from model.vision import VisionEncoder


class Model(Protocol):
    """What an engine needs of a model; model.transformer.Transformer is one."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def vision(self) -> VisionEncoder | None:
        """What images are to it; None: it takes none."""
        ...

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
        keep: int = 0,
        encode: Encode | None = None,
        team: ContextTeam | None = None,
    ) -> None:
        """Ids from `spelled_ids` on are padding of the vocabulary, and never sampled.

        `grammars` compiles what requests demand; None: no request demands anything. `keep`: rows
        at a prompt's end that a truncated prefill takes through all layers; 0: it takes all.
        `encode` computes what images show; None: no request brings any. `team`: the ranks that
        run each forward together; the first calls this, the others `follow`.
        """
        self._model = model
        self._keep = keep
        self._grammars = grammars
        self._masks = MaskThreads()
        self._image_rows = ImageRows(encode)
        self._team = team
        self._spelled_ids = spelled_ids
        self._slab = slab
        self._contexts: WeakKeyDictionary[Running, Context] = WeakKeyDictionary()

    @torch.inference_mode()
    def __call__(self, work: Sequence[Work]) -> Sequence[Outcome]:
        """One outcome for each part; raises whatever the forward raises."""
        leases = [one.running.lease for one in work]
        try:
            batch = self._batch(work)
        except Exception:
            if self._team is not None:
                self._team.tell_nothing()
            raise
        if self._team is not None:
            self._team.tell(batch, leases)
        cache = self._watched(cache_over(self._slab, leases), work)
        logits_RV = self._model.forward(batch, cache).cpu()
        if not any(one.scored for one in work):
            return self._next_tokens(work, logits_RV)
        parts = torch.split(logits_RV, [_rows(one) for one in work])
        last_rows = [part[-1:] for one, part in zip(work, parts, strict=True) if one.grant.samples]
        outcomes = self._next_tokens(work, torch.cat([logits_RV[:0], *last_rows]))
        return [_with_prompt(*part) for part in zip(work, parts, outcomes, strict=True)]

    @torch.inference_mode()
    def follow(self) -> None:
        """This rank's part of a step that another one leads."""
        assert self._team is not None
        if (step := self._team.hear()) is not None:
            self._model.forward(step.batch, cache_over(self._slab, step.leases))

    def _batch(self, work: Sequence[Work]) -> ForwardBatch:
        self._begin_masks(work)
        return build_batch(
            [self._chunk(one) for one in work],
            image_token_id=self._model.spec.image_token_id,
            ngram=self._model.spec.engram_max_ngram_size,
        )

    def _watched(self, cache: Cache, work: Sequence[Work]) -> Cache:
        """Those who want to know hear of a layer's rows when they are there, not after the step."""
        told = [
            (on_rows, one.grant.start + one.grant.count)
            for one in work
            if (on_rows := one.running.on_rows) is not None
        ]
        if not told:
            return cache

        def final(layer: int) -> None:
            event = self._event()
            for on_rows, positions in told:
                on_rows(layer, positions, event)

        return WatchedCache(cache, final)

    def _event(self) -> Any:
        """Happens when the device has done what it was asked for so far; None on a CPU."""
        if isinstance(self._slab, Slab):
            return None
        event = torch.get_device_module(self._slab.device).Event()
        event.record()
        return event

    def _chunk(self, one: Work) -> Chunk:
        shown = self._image_rows.of(one.running, one.grant)
        return Chunk(
            one.running.token_ids,
            one.grant.start,
            one.grant.count,
            self._window_start(one.running),
            logits=_wanted(one),
            embeddings=shown.embeddings,
            embedded=shown.positions,
        )

    def _window_start(self, running: Running) -> int:
        """Counted from the prompt alone: a prompt with output behind it is cut at the same row."""
        return max(0, running.request.prompt_length - self._keep) if self._keep else 0

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
