"""What greedy answers of tandem-mini must be: a loop over the model, no engine, no batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from model.batch import Chunk, build_batch
from model.dense_cache import DenseCache
from model.load import load_model
from model.state import state_fields
from model.transformer import Transformer
from offline.model_folder import SHIPPED

MINI = SHIPPED["tandem-mini"]


@cache
def load_mini() -> Transformer:
    torch.set_num_threads(1)
    return load_model(MINI, weights="checkpoint")


def greedy(prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """`count` tokens after the prompt; the end of an answer is a token like others."""
    model = load_mini()
    spec, cache = model.spec, DenseCache(state_fields(model.spec), 1)
    ids, done = list(prompt), 0
    while len(ids) < len(prompt) + count:
        batch = build_batch(
            [Chunk(ids, done, len(ids) - done)],
            image_token_id=spec.image_token_id,
            ngram=spec.engram_max_ngram_size,
        )
        with torch.no_grad():
            logits_1V = model.forward(batch, cache)
        done = len(ids)
        ids.append(int(logits_1V.argmax()))
    return tuple(ids[len(prompt) :])
