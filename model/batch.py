"""One step's rows: chunks of prompts and decode rows of several requests, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# T = rows of the step, R = requests, n = Engram's longest n-gram, D = hidden size


@dataclass(frozen=True)
class Chunk:
    """What one request contributes: positions start .. start + count - 1.

    `token_ids` are all ids of the request from position 0 up to at least start + count: Engram
    looks back at ids before `start`. `window_start`: layers after the cut see no window rows
    below this position (prefill truncation; 0 when off). `logits`: which rows' logits are wanted.
    `images` are positions of images; default: where the id is the image id. What an image shows
    is in `embeddings`; an image position without any is a token like others, with its own.
    """

    token_ids: Sequence[int]
    start: int
    count: int
    window_start: int = 0
    logits: Literal["last", "all", "none"] = "last"
    images: frozenset[int] | None = None
    embeddings: Tensor | None = None  # [count, D]; used at image positions ...
    embedded: frozenset[int] | None = None  # ... of these; None: at all of them


@dataclass(frozen=True)
class ForwardBatch:
    """Row t belongs to request requests_T[t] and stands at positions_T[t]. All on the host;
    embeddings may be anywhere.
    """

    token_ids_T: Tensor  # int64
    positions_T: Tensor  # int64
    requests_T: Tensor  # int64, ascending
    images_T: Tensor  # bool
    ngrams_Tn: Tensor  # int64 token ids at t, t-1, ...; -1 from the first dead position on
    starts_R: Tensor  # int64 first position of each request's rows
    counts_R: Tensor  # int64 rows of each request
    window_starts_R: Tensor  # int64
    logit_rows: Tensor  # int64 rows whose logits are wanted, ascending
    embeddings_TD: Tensor | None = None
    embedded_T: Tensor | None = None  # bool: rows that embeddings were brought for

    @property
    def num_rows(self) -> int:
        return len(self.token_ids_T)

    @property
    def num_requests(self) -> int:
        return len(self.starts_R)

    def take(self, rows: npt.NDArray[np.int64]) -> ForwardBatch:
        """Only these rows; what is said of requests, and of logits, stays as it was."""
        index = torch.from_numpy(rows)
        embeddings_TD, embedded_T = self.embeddings_TD, self.embedded_T
        return replace(
            self,
            token_ids_T=self.token_ids_T[index],
            positions_T=self.positions_T[index],
            requests_T=self.requests_T[index],
            images_T=self.images_T[index],
            ngrams_Tn=self.ngrams_Tn[index],
            embeddings_TD=None if embeddings_TD is None else embeddings_TD[index],
            embedded_T=None if embedded_T is None else embedded_T[index],
        )


def build_batch(
    chunks: Sequence[Chunk],
    *,
    image_token_id: int,
    ngram: int,
) -> ForwardBatch:
    """Rows of all chunks in their order. Raises ValueError for an empty chunk."""
    ids: list[int] = []
    positions: list[int] = []
    requests: list[int] = []
    images: list[bool] = []
    embedded: list[bool] = []
    ngrams: list[list[int]] = []
    logit_rows: list[int] = []
    for number, chunk in enumerate(chunks):
        if chunk.count < 1 or chunk.start + chunk.count > len(chunk.token_ids):
            raise ValueError(f"chunk {number} has no rows or lacks token ids: {chunk.count=}")
        first = len(ids)
        for position in range(chunk.start, chunk.start + chunk.count):
            ids.append(chunk.token_ids[position])
            positions.append(position)
            requests.append(number)
            images.append(_is_image(chunk, position, image_token_id))
            ngrams.append(_ngram(chunk, position, image_token_id, ngram))
            embedded.append(_is_embedded(chunk, position))
        if chunk.logits == "all":
            logit_rows.extend(range(first, len(ids)))
        elif chunk.logits == "last":
            logit_rows.append(len(ids) - 1)

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64)

    return ForwardBatch(
        token_ids_T=ints(ids),
        positions_T=ints(positions),
        requests_T=ints(requests),
        images_T=torch.tensor(images, dtype=torch.bool),
        ngrams_Tn=torch.tensor(ngrams, dtype=torch.int64),
        starts_R=ints([chunk.start for chunk in chunks]),
        counts_R=ints([chunk.count for chunk in chunks]),
        window_starts_R=ints([chunk.window_start for chunk in chunks]),
        logit_rows=ints(logit_rows),
        embeddings_TD=_embeddings(chunks),
        embedded_T=torch.tensor(embedded, dtype=torch.bool),
    )


def _is_image(chunk: Chunk, position: int, image_token_id: int) -> bool:
    if chunk.images is not None:
        return position in chunk.images
    return chunk.token_ids[position] == image_token_id


def _is_embedded(chunk: Chunk, position: int) -> bool:
    if chunk.embeddings is None:
        return False
    return chunk.embedded is None or position in chunk.embedded


def _ngram(chunk: Chunk, position: int, image_token_id: int, size: int) -> list[int]:
    """Ids at position, position - 1, ...: from the first dead one on (start, image) all -1."""
    found = [chunk.token_ids[position]]
    for back in range(position - 1, max(position - size, -1), -1):
        if _is_image(chunk, back, image_token_id):
            break
        found.append(chunk.token_ids[back])
    return found + [-1] * (size - len(found))


def _embeddings(chunks: Sequence[Chunk]) -> Tensor | None:
    given = [chunk.embeddings for chunk in chunks if chunk.embeddings is not None]
    if not given:
        return None
    width = given[0].shape[1]
    parts = [
        given[0].new_zeros(chunk.count, width) if chunk.embeddings is None else chunk.embeddings
        for chunk in chunks
    ]
    return torch.cat(parts)
