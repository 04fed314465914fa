"""The packed forward and its reference over slabs of their own, step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from kv_transfer.blocks import BlockPool, Lease
from kv_transfer.layout import Layout
from kv_transfer.packed_cache import PackedCache
from kv_transfer.slab import Slab
from kv_transfer.state_view import view_of
from model.batch import Chunk, ForwardBatch, build_batch
from model.packed.forward import PackedTransformer
from model.packed.place_rows import chunk_rows, decode_rows
from model.packed.rows import OnLayer, Shape
from model.spec import ModelSpec
from model.state import state_fields
from model.transformer import Transformer
from model.weights import random_weights
from tests.model.cases import BY_NAME, Case
from tests.model.packed.plain_weights import PlainExperts, PlainWeights
from tests.model.running import Precise

CPU = torch.device("cpu")
BLOCK_TOKENS = 16
NUM_BLOCKS, NUM_SLOTS = 16, 4


class WideCache:
    """A packed cache whose values come in float64."""

    def __init__(self, cache: PackedCache) -> None:
        self._cache = cache

    def write(self, field: str, layer: int, requests: Tensor, rows: Tensor, values: Tensor) -> None:
        self._cache.write(field, layer, requests, rows, values)

    def read(self, field: str, layer: int, requests: Tensor, rows: Tensor) -> Tensor:
        return self._cache.read(field, layer, requests, rows).double()

    def rows_are_final(self, layer: int) -> None:
        """Nobody waits for them."""


@dataclass
class Ongoing:
    """A request: its ids, how many are processed, and where its state lies, in every slab."""

    case: Case
    tokens: list[int]
    lease: Lease
    length: int = 0

    def chunk(self, size: int) -> Chunk:
        given, images = self.case.embeddings, None
        shown = None
        if given is not None:
            images = frozenset(self.case.images)
            if self.length < len(given):
                shown = torch.from_numpy(given[self.length : self.length + size])
        return Chunk(
            self.tokens,
            self.length,
            size,
            window_start=self.case.window_start,
            logits="all",
            images=images,
            embeddings=shown,
        )


@lru_cache(maxsize=8)
def models(name: str) -> tuple[Transformer, PackedTransformer]:
    """Of a case, in float64."""
    case = BY_NAME[name]
    weights = random_weights(case.spec, case.seed)
    plain = PlainWeights(weights, torch.float64)
    return (
        Transformer(case.spec, Precise(weights), case.options),
        PackedTransformer(case.spec, plain, case.options, make_experts=PlainExperts),
    )


@dataclass
class Pair:
    """Both models of a case, and the requests that they both process."""

    case: Case
    requests: list[Ongoing] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reference, self.packed = models(self.case.name)
        self.slack = self.spec.dspark_block_size
        layout = Layout(state_fields(self.spec), BLOCK_TOKENS, self.slack)
        self.pool = BlockPool(NUM_BLOCKS, NUM_SLOTS, BLOCK_TOKENS)
        self.slabs = [Slab(layout, NUM_BLOCKS, NUM_SLOTS) for _ in range(2)]
        self.view = view_of(self.slabs[1])

    @property
    def spec(self) -> ModelSpec:
        return self.case.spec

    def request(self, *, shift: int = 0, room: int = 16) -> Ongoing:
        """One with the case's prompt, turned by `shift`, and `room` tokens after it."""
        tokens = [*self.case.prompt[shift:], *self.case.prompt[:shift]]
        tokens += [3 + 7 * position % 240 for position in range(room)]
        made = Ongoing(self.case, tokens, self.pool.lease(len(tokens)))
        self.requests.append(made)
        return made

    # ---------------------------------------------------------------- one forward of each

    def batch(self, sizes: Sequence[int]) -> tuple[ForwardBatch, list[Lease]]:
        """The next rows of each request, of some none."""
        taking = [(one, size) for one, size in zip(self.requests, sizes, strict=True) if size]
        batch = build_batch(
            [one.chunk(size) for one, size in taking],
            image_token_id=self.spec.image_token_id,
            ngram=self.spec.engram_max_ngram_size,
        )
        stands_T = batch.positions_T >= batch.window_starts_R[batch.requests_T]
        wanted = batch.logit_rows[stands_T[batch.logit_rows]]
        return replace(batch, logit_rows=wanted), [one.lease for one, _ in taking]

    def refer(self, batch: ForwardBatch, leases: Sequence[Lease], slab: int = 0) -> Tensor:
        with torch.no_grad():
            cache = WideCache(PackedCache(self.slabs[slab], leases))
            return self.reference.forward(batch, cache)

    def pack(
        self,
        batch: ForwardBatch,
        leases: Sequence[Lease],
        *,
        on_layer: OnLayer | None = None,
        engram: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        chunks = chunk_rows(batch, leases, self.spec, self.case.options, CPU)
        rows = replace(chunks.rows, engram=engram)
        return self.packed.forward(rows, chunks.shape, self.view, chunks.extras, on_layer=on_layer)

    def pack_in_place(
        self, batch: ForwardBatch, leases: Sequence[Lease], shape: Shape | None = None
    ) -> Tensor:
        """As a graph would be replayed: a padded shape, and logits of all rows."""
        shape = shape or Shape(batch.num_rows + 3, batch.num_requests + 1, 8, in_place=True)
        rows = decode_rows(batch, leases, shape, CPU)
        return self.packed.forward(rows, shape, self.view)[batch.logit_rows]

    def went_on(self, sizes: Sequence[int]) -> None:
        """So many rows of each request are processed."""
        for one, size in zip(self.requests, sizes, strict=True):
            one.length += size

    def same_state(self) -> bool:
        """To the byte, in all of both slabs."""
        one, other = self.slabs
        return torch.equal(one.blocks, other.blocks) and torch.equal(one.slots, other.slots)
