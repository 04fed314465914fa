"""Runs one prompt through a model, chunk by chunk, as one request; for commands and comparisons.

Knows nothing of scheduling: serving runs chunks of many requests, engine/step_loop.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from model.batch import Chunk, build_batch
from model.cache import Cache
from model.checkpoint import Progress
from model.transformer import Transformer


def run_prompt(
    model: Transformer,
    cache: Cache,
    ids: Sequence[int],
    *,
    chunks: Sequence[int] | None = None,
    keep: int | None = None,
    images: frozenset[int] | None = None,
    progress: Progress | None = None,
) -> Tensor:
    """Logits [kept positions, V] of the prompt `ids`, as request 0 of the cache.

    `chunks` are sizes that add up to the prompt (default: one chunk). Layers after the cut run
    for the last `keep` positions only, if the model's options truncate. `images` are positions
    of image features (default: those of the image id). Raises ValueError for what cannot be.
    """
    sizes = list(chunks or [len(ids)])
    check_prompt(model.spec.vocab_size, ids, sizes, keep=keep, images=images)
    first_kept = 0 if keep is None else max(0, len(ids) - keep)
    parts, start = [], 0
    for number, size in enumerate(sizes, 1):
        chunk = Chunk(ids, start, size, window_start=first_kept, logits="none", images=images)
        batch = build_batch(
            [chunk],
            image_token_id=model.spec.image_token_id,
            ngram=model.spec.engram_max_ngram_size,
        )
        kept = torch.arange(min(max(first_kept - start, 0), size), size)
        parts.append(model.forward(replace(batch, logit_rows=kept), cache))
        start += size
        if progress:
            progress(number, len(sizes), f"prompt to {start}")
    return torch.cat(parts)


def check_prompt(
    vocab_size: int,
    ids: Sequence[int],
    sizes: Sequence[int],
    *,
    keep: int | None = None,
    images: frozenset[int] | None = None,
) -> None:
    """Raises ValueError for what run_prompt cannot run; needs no weights."""
    if not ids:
        raise ValueError("a prompt needs at least one id")
    if wrong := sorted({token for token in ids if not 0 <= token < vocab_size}):
        raise ValueError(f"ids go from 0 to {vocab_size - 1}; found {wrong[:5]}")
    if min(sizes) < 1 or sum(sizes) != len(ids):
        raise ValueError(f"chunks {sizes} do not add up to the {len(ids)} ids of the prompt")
    if keep is not None and keep < 1:
        raise ValueError(f"the last position is always kept: keep is at least 1, not {keep}")
    if images and not all(0 <= position < len(ids) for position in images):
        raise ValueError(f"image positions go from 0 to {len(ids) - 1}; found {sorted(images)}")
