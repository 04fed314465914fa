"""Runs the model under test over a case: chunk after chunk of one request, on a cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from kernels.formats import pack, unpack
from model.batch import Chunk, ForwardBatch, build_batch
from model.cache import Cache
from model.dense_cache import DenseCache
from model.spec import ModelSpec
from model.state import DRAFT_WINDOW, TAIL, WINDOW, StateField, state_fields
from model.transformer import Transformer
from model.weights import Weights, random_weights
from tests.model.cases import BY_NAME, Case


@contextmanager
def float64() -> Iterator[None]:
    """In float64 nothing but a mistake separates the model from the oracle."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class Precise:
    """Weights in float64."""

    weights: Weights

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[name].double()

    def table_rows(self, name: str, rows: Tensor) -> Tensor:
        return self.weights.table_rows(name, rows).double()


def build(case: Case) -> Transformer:
    """The model of a case, in the default dtype."""
    return _build(case.name, torch.get_default_dtype())


@lru_cache(maxsize=16)
def _build(name: str, dtype: torch.dtype) -> Transformer:
    case = BY_NAME[name]
    weights = random_weights(case.spec, case.seed)
    chosen = Precise(weights) if dtype == torch.float64 else weights
    return Transformer(case.spec, chosen, case.options)


@dataclass
class Request:
    """One request of a case: its token ids, how many are processed, and where its state is."""

    model: Transformer
    case: Case
    cache: Cache
    tokens: list[int]
    length: int = 0

    @classmethod
    def of(cls, model: Transformer, case: Case, cache: Cache | None = None) -> Request:
        fields = state_fields(model.spec)
        return cls(model, case, cache or DenseCache(fields, 1), list(case.prompt))

    def feed(self, *sizes: int) -> Tensor:
        """Process the next tokens in chunks; logits of all rows at or above the window start."""
        parts = []
        for size in sizes:
            with torch.no_grad():
                parts.append(self.model.forward(self._batch(size), self.cache))
            self.length += size
        return torch.cat(parts)

    def generate(self, logits: Tensor, steps: int) -> list[int]:
        """Greedy tokens; the last one is returned but not processed."""
        tokens = [int(logits[-1].argmax())]
        while len(tokens) < steps:
            self.tokens = [*self.tokens[: self.length], tokens[-1]]
            tokens.append(int(self.feed(1)[-1].argmax()))
        return tokens

    def _batch(self, size: int) -> ForwardBatch:
        batch = build_batch(
            [self.chunk(size)],
            image_token_id=self.model.spec.image_token_id,
            ngram=self.model.spec.engram_max_ngram_size,
        )
        kept = batch.positions_T[batch.logit_rows] >= self.case.window_start
        return replace(batch, logit_rows=batch.logit_rows[kept])

    def chunk(self, size: int) -> Chunk:
        images, given = self.case.images, self.case.embeddings
        if given is not None and self.length < self.case.length:
            part = given[self.length : self.length + size]
            embeddings = torch.from_numpy(part).to(torch.get_default_dtype())
        else:
            embeddings = None
        return Chunk(
            self.tokens,
            self.length,
            size,
            window_start=self.case.window_start,
            logits="all",
            images=frozenset(images) if given is not None else None,
            embeddings=embeddings,
        )


class PackedRows:
    """model.cache.Cache that keeps rows as bytes; of windows only the newest `ring`, if given."""

    def __init__(self, spec: ModelSpec, ring: int | None = None) -> None:
        self._spec, self._ring = spec, ring
        self.fields: dict[str, StateField] = {field.name: field for field in state_fields(spec)}
        self.rows: dict[tuple[str, int], dict[int, Tensor]] = {}

    def write(self, field: str, layer: int, requests: Tensor, rows: Tensor, values: Tensor) -> None:
        assert not requests.any(), "this cache holds one request"
        packed = pack(values, self.fields[field].row_format)
        held = self.rows.setdefault((field, layer), {})
        for row, data in zip(rows.tolist(), packed, strict=True):
            if row < 0:
                continue
            if self._ring and field in (WINDOW, DRAFT_WINDOW, TAIL):  # what is in its place goes
                for other in [old for old in held if (old - row) % self._ring == 0]:
                    del held[other]
            held[row] = data

    def read(self, field: str, layer: int, requests: Tensor, rows: Tensor) -> Tensor:
        """Raises KeyError for a row that nobody wrote."""
        spec, held = self.fields[field], self.rows.get((field, layer), {})
        zeros = torch.zeros(spec.row_bytes, dtype=torch.uint8)
        found = [zeros if row < 0 else held[row] for row in rows.flatten().tolist()]
        values = unpack(torch.stack(found), spec.row_format, spec.dim)
        return values.view(*rows.shape, spec.dim).to(torch.get_default_dtype())

    def rows_are_final(self, layer: int) -> None:
        """Nobody waits for them."""

    def handoff(self, length: int) -> PackedRows:
        """What the declared list of state says that a continuation after `length` needs."""
        received = PackedRows(self._spec, self._ring)
        for (name, layer), held in self.rows.items():
            wanted = self.fields[name].growth.rows(length)
            received.rows[name, layer] = {row: held[row] for row in wanted if row in held}
        return received

    def pieces(self, length: int) -> dict[str, bytes]:
        """The rows of handoff() by the oracle's names, in row order."""
        names = {"window": "window", "draft_window": "draft_ring", "tail": "pair"}
        pieces = {}
        for (name, layer), held in self.handoff(length).rows.items():
            kind = names.get(name, name.partition("_")[0])
            rows = [bytes(held[row].tolist()) for row in sorted(held)]
            pieces[f"{kind}.{layer}"] = b"".join(rows)
        return pieces
