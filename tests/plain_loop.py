"""What an answer must be: a loop over the model with no engine, no blocks, no ranks, no batch."""

from __future__ import annotations

from functools import cache

import torch

from cluster.messages import Request
from engine.choice import Choice
from engine.context import Context
from engine.sampler import sample
from model.batch import Chunk, build_batch
from model.dense_cache import DenseCache
from model.state import state_fields
from tests.tiny import load_tiny


@cache
def straight(request: Request) -> tuple[int, ...]:
    """All max_tokens of them, by the tiny model: the whole prompt at once, then row by row."""
    model = load_tiny()
    state = DenseCache(state_fields(model.spec), 1)
    ids, done = request.token_ids, 0
    for _ in range(request.sampling.max_tokens):
        batch = build_batch(
            [Chunk(ids, done, len(ids) - done)],
            image_token_id=model.spec.image_token_id,
            ngram=model.spec.engram_max_ngram_size,
        )
        with torch.no_grad():
            logits = model.forward(batch, state)
        done = len(ids)
        (choice,) = sample(logits, [Context(request, ids)])
        assert isinstance(choice, Choice)
        ids = [*ids, choice.token]
    return tuple(ids[request.prompt_length :])
