"""The one declared list of request state.

The slab allocates from it, packing gathers from it, the transfer plans from it, the digest
checks it, and the tests poison and drop each field in turn. State that is not in this list does
not exist: the last token ids that Engram looks back at are not state, because every rank has
the request's token ids; sampling noise is a function of seed and position.

A row is named by (field, layer, row number). Row numbers are absolute, so that they mean the
same on every rank: row j of a PerToken field covers positions j * ratio .. j * ratio + ratio - 1;
rows of Ring and Tail fields are numbered by position.
Source: request state for an exact continuation, DeepSeek-V4.1-Flash model code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from model.spec import ModelSpec

RowFormat = Literal["fp8", "fp4_e4m3", "fp4", "f32"]
"""fp8: e4m3 with a ue8m0 scale per 32 values. fp4_e4m3: e2m1, e4m3 scale per 16.
fp4: e2m1, ue8m0 scale per 32. f32: as it is. Data first, then scales (kernels/formats.py)."""


@dataclass(frozen=True)
class PerToken:
    """One row for every `ratio` positions, from the first position on; final once written."""

    ratio: int

    def rows(self, length: int) -> range:
        return range(length // self.ratio)


@dataclass(frozen=True)
class Ring:
    """One row a position, of which only the last `rows` positions matter."""

    window: int

    def rows(self, length: int) -> range:
        return range(max(0, length - self.window), length)


@dataclass(frozen=True)
class Tail:
    """One row, that of the last position, and only while a group of `ratio` is incomplete."""

    ratio: int

    def rows(self, length: int) -> range:
        return range(length - (length % self.ratio > 0), length)


Growth = PerToken | Ring | Tail


@dataclass(frozen=True)
class StateField:
    """One kind of row, in each of `layers`; `dim` values a row in format `row_format`.

    `growth.rows(length)` are the rows that a continuation after `length` positions needs.
    """

    name: str
    layers: tuple[int, ...]
    dim: int
    row_format: RowFormat
    growth: Growth

    @property
    def row_bytes(self) -> int:
        match self.row_format:
            case "fp8":
                return self.dim + self.dim // 32
            case "fp4_e4m3":
                return self.dim // 2 + self.dim // 16
            case "fp4":
                return self.dim // 2 + self.dim // 32
            case "f32":
                return 4 * self.dim


def compressed(ratio: int) -> str:
    """Name of the field of compressed KV rows with this ratio."""
    return f"compressed_r{ratio}"


def index_keys(ratio: int) -> str:
    """Name of the field of index keys with this ratio."""
    return f"index_r{ratio}"


WINDOW = "window"
DRAFT_WINDOW = "draft_window"
TAIL = "tail"


def state_fields(spec: ModelSpec) -> tuple[StateField, ...]:
    """Everything that a request carries from one forward to the next, in slab order."""
    fields: list[StateField] = []
    sources = spec.kv_source_layer_ids
    for ratio in (2, 1):
        layers = tuple(layer for layer in sources if spec.compress_ratios[layer] == ratio)
        if not layers:
            continue
        growth = PerToken(ratio)
        key = index_keys(ratio)
        fields.append(StateField(compressed(ratio), layers, spec.head_dim, "fp4_e4m3", growth))
        fields.append(StateField(key, layers, spec.index_head_dim, "fp4", growth))
        if ratio > 1:  # the open pair: kv and gate of the last position, [2, head_dim]
            fields.append(StateField(TAIL, layers, 2 * spec.head_dim, "f32", Tail(ratio)))
    window = Ring(spec.sliding_window)
    every = tuple(range(spec.num_hidden_layers))
    stages = tuple(spec.draft_stages)
    fields.append(StateField(WINDOW, every, spec.head_dim, "fp8", window))
    fields.append(StateField(DRAFT_WINDOW, stages, spec.head_dim, "fp8", window))
    return tuple(fields)
