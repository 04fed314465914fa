"""Runs one step on the model: rows in, next tokens out. Knows not why these rows were chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from cluster.errors import ClusterError
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
        sampling = [one for one in work if one.grant.samples]
        tokens = sample(
            logits_RV,
            [one.running.request.sampling for one in sampling],
            [one.grant.start + one.grant.count for one in sampling],
        )
        drawn = iter(map(_outcome, sampling, tokens))
        return [next(drawn) if one.grant.samples else None for one in work]


def _outcome(work: Work, token: int | None) -> Outcome:
    if token is not None:
        return token
    position = work.grant.start + work.grant.count - 1
    return ClusterError(
        f"{work.running.request.request_id}: the logits at position {position} are no numbers"
    )
