"""Runs one step on the model: rows in, next tokens out. Knows not why these rows were chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from engine.context import Context
from engine.request import Running
from engine.sampler import sample
from engine.step_loop import Outcome, Work
from kv_transfer.packed_cache import PackedCache
from kv_transfer.slab import Slab
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
    def __init__(self, model: Model, slab: Slab) -> None:
        self._model = model
        self._slab = slab
        self._contexts: WeakKeyDictionary[Running, Context] = WeakKeyDictionary()

    def __call__(self, work: Sequence[Work]) -> list[Outcome]:
        """One outcome for each part; raises whatever the forward raises."""
        spec = self._model.spec
        batch = build_batch(
            [
                Chunk(
                    one.running.token_ids,
                    one.grant.start,
                    one.grant.count,
                    logits="last" if one.grant.samples else "none",
                )
                for one in work
            ],
            image_token_id=spec.image_token_id,
            ngram=spec.engram_max_ngram_size,
        )
        cache = PackedCache(self._slab, [one.running.lease for one in work])
        with torch.no_grad():
            logits_RV = self._model.forward(batch, cache)
        contexts = [self._context(one.running) for one in work if one.grant.samples]
        drawn = iter(sample(logits_RV, contexts))
        return [next(drawn) if one.grant.samples else None for one in work]

    def _context(self, running: Running) -> Context:
        """Made once a request: it sees the ids that are added later."""
        if running not in self._contexts:
            self._contexts[running] = Context(running.request, running.token_ids, running.stop_ids)
        return self._contexts[running]
