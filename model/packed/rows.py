"""The rows of a packed forward: device tensors of a fixed shape, and what only prefill adds.

All integers of a forward lie in one int64 buffer, so that one copy brings them to the device, and
a captured graph finds them where they always are. Knows no weights and no memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# T = rows, R = requests, P = blocks of the widest table, N = longest n-gram, D = hidden size


OnLayer = Callable[[int], None]
"""Told a KV source's layer once its rows have been written, in the order of the device's work."""


@dataclass(frozen=True)
class Shape:
    """What a forward is compiled, or a graph captured, for.

    `in_place`: no request has more than ring_slack + 1 rows, so new window rows go into the ring
    before anybody looks; such a forward needs no Extras and is fit for a graph.
    """

    rows: int
    requests: int
    blocks: int
    in_place: bool


@dataclass(frozen=True)
class PackedRows:
    """`rows` of `requests`, each request's one after another at neighbouring positions."""

    token_ids_T: Tensor  # int64
    positions_T: Tensor  # int64; -1: padding, sees nothing and writes nothing
    requests_T: Tensor  # int64 into the R below; of padding 0
    ngrams_TN: Tensor  # int64 token ids at t, t - 1, ...; -1 from the first dead position on
    slots_R: Tensor  # int64 slot record
    tables_RP: Tensor  # int64 block records; behind a request's own any that exists
    starts_R: Tensor  # int64 position of the request's first row here
    first_R: Tensor  # int64 that row's number
    floors_R: Tensor  # int64: no row below this position has window rows: it has left the forward
    clips_R: Tensor  # int64, no smaller: the same for layers from the cut on (truncation)
    engram: Mapping[int, Tensor] | None = None
    """Table values [T, orders * heads * dim] by layer, looked up by the host; None: the forward
    looks them up itself."""

    @property
    def live_T(self) -> Tensor:
        return self.positions_T >= 0


@dataclass(frozen=True)
class Embedded:
    """Rows that do not take their token's embedding, because a picture is there."""

    rows_N: Tensor  # int64
    values_ND: Tensor


@dataclass(frozen=True)
class Leaving:
    """At the cut layer only rows `going_on` stay, as `rows`; there may be none."""

    going_on_T: Tensor  # int64 numbers of rows before, ascending
    rows: PackedRows
    shape: Shape


@dataclass(frozen=True)
class Extras:
    """What a forward has beyond decode rows."""

    ends_R: Tensor  # int64 position behind the request's last row
    logit_rows: Tensor  # int64 [L] of the rows that are left at the end
    images_T: Tensor | None = None  # bool; None: where the token is the image token
    embedded: Embedded | None = None
    leaving: Leaving | None = None


# ------------------------------------------------------------------ one buffer


def buffer_size(shape: Shape, ngram: int) -> int:
    """How many int64 a forward's rows are."""
    return sum(math.prod(lengths) for lengths in _fields(shape, ngram).values())


def rows_in(buffer: Tensor, shape: Shape, ngram: int) -> PackedRows:
    """The rows whose integers lie in `buffer` [buffer_size], on any device, without a copy.

    `ngram`: ids of a row in ngrams_TN (spec.engram_max_ngram_size).
    """
    lengths = _fields(shape, ngram)
    parts = torch.split(buffer, [math.prod(one) for one in lengths.values()])
    named: dict[str, Any] = {
        name: part.view(one) for (name, one), part in zip(lengths.items(), parts, strict=True)
    }
    return PackedRows(**named)


def _fields(shape: Shape, ngram: int) -> dict[str, tuple[int, ...]]:
    rows, requests = (shape.rows,), (shape.requests,)
    return {
        "token_ids_T": rows,
        "positions_T": rows,
        "requests_T": rows,
        "ngrams_TN": (shape.rows, ngram),
        "slots_R": requests,
        "starts_R": requests,
        "first_R": requests,
        "floors_R": requests,
        "clips_R": requests,
        # last: who knows that the tables are there already copies only what is before them
        "tables_RP": (shape.requests, shape.blocks),
    }
