"""What an answer must be: a loop over the model with no engine, no blocks, no ranks, no batch."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from cluster.messages import Request
from engine.choice import Choice
from engine.context import Context
from engine.sampler import sample
from model.batch import Chunk, build_batch
from model.dense_cache import DenseCache
from model.state import state_fields
from tests.tiny import load_tiny


@cache
def straight(request: Request, kept: int = 0) -> tuple[int, ...]:
    """All max_tokens of them, by the tiny model: the whole prompt at once, then row by row.

    With `kept`, the prompt's earlier rows end at the cut.
    """
    model = load_tiny("compact") if kept else load_tiny()
    window_start = max(0, request.prompt_length - kept) if kept else 0
    state = DenseCache(state_fields(model.spec), 1)
    ids, done = request.token_ids, 0
    for _ in range(request.sampling.max_tokens):
        shown = None if done else _shown(request)
        batch = build_batch(
            [Chunk(ids, done, len(ids) - done, window_start, embeddings=shown)],
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


def _shown(request: Request) -> Tensor | None:
    """[prompt, D] with what its images are, at their positions."""
    if not request.images:
        return None
    model = load_tiny()
    assert model.vision is not None
    shown = torch.zeros(request.prompt_length, model.spec.hidden_size)
    for image in request.images:
        pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8)
        with torch.no_grad():
            rows = model.vision(pixels.view(image.height, image.width, 3))
        shown[image.start : image.stop] = rows
    return shown
