"""The indexer of an index source: which compressed rows each row attends to.

As model/indexer.py, over index keys as they lie in memory. The candidate source also keeps the best
blocks of rows, and index sources after it look only there. Where a table is so small that all
is chosen, nothing is scored: this follows from shapes, never from values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.ops.block_maxima import block_maxima
from kernels.ops.candidate_rows import candidate_rows
from kernels.ops.index_topk import Paged, index_scores, index_topk, select
from kernels.ops.packed_attention import Located
from kernels.ops.row_addresses import row_addresses
from kernels.ops.turn_fp4 import turn_fp4
from model.packed.geometry import records_of
from model.packed.product import float32_product
from model.packed.ranges import named
from model.packed.rows import PackedRows
from model.packed.state import FieldView
from model.packed.step import Candidates, Step
from model.packed.weight_source import PackedWeightSource
from model.spec import ModelSpec
from model.state import compressed, index_keys

_SCORES = 1 << 27  # that are in memory at once: long chunks against long contexts go by pieces

# T = rows, J = index keys of the widest table, K = rows chosen, C = candidate blocks,
# h = index heads, d = index head size


class Queries(NamedTuple):
    """Of some rows, with what they look at."""

    q_Thd: Tensor
    weights_Th: Tensor
    seen_T: Tensor  # int32 compressed rows that are complete
    owners_T: Tensor  # the requests' tables

    def pieces(self, size: int) -> Iterator[Queries]:
        """Of at most `size` rows."""
        for parts in zip(*(torch.split(one, size) for one in self), strict=True):
            yield Queries(*parts)


class Indexer:
    def __init__(self, weights: PackedWeightSource, layer: int, spec: ModelSpec) -> None:
        self._source, self._ratio = spec.kv_source(layer), spec.compress_ratios[layer]
        self._heads, self._size = spec.index_n_heads, spec.index_head_dim
        self._top_rows, self._top_blocks = spec.index_topk, spec.candidate_topk_blocks
        self._block = spec.candidate_block_size
        self._chooses_candidates = layer == spec.candidate_source_layer_id
        self._narrowed = layer > spec.candidate_source_layer_id
        project = f"layers.{layer}.attn.indexer.weights_proj.weight"
        self._weights_Dh = weights.matrix(project).t()

    def __call__(self, queries: Tensor, x_TD: Tensor, step: Step) -> None:
        """Choose rows for this layer and those after it. `queries` [T, h * d], not rotated."""
        rows = step.state.field(compressed(self._ratio), self._source)
        with named("index"):
            numbers_TK = self._choose(queries, x_TD, step)
            step.selected = Located(rows.part, step.geometry.at(numbers_TK, rows))

    def _choose(self, queries: Tensor, x_TD: Tensor, step: Step) -> Tensor:
        """Row numbers [T, K], ascending, -1 where there are no more."""
        keys = step.state.field(index_keys(self._ratio), self._source)
        length = step.geometry.shape.blocks * keys.rows
        seen_T = step.geometry.visible(self._ratio)
        narrow = self._chooses_candidates and length > self._top_blocks * self._block
        if length <= self._top_rows and not narrow and step.candidates is None:
            rows_K = torch.arange(self._top_rows, device=seen_T.device, dtype=torch.int32)
            return torch.where(rows_K < seen_T.unsqueeze(1), rows_K, -1)
        q_Thd = turn_fp4(queries.reshape(-1, self._heads, self._size), step.geometry.turns.rows_TP)
        # times a constant in the model: it does not change which are the best
        weights_Th = float32_product(x_TD, self._weights_Dh)
        whole = Queries(q_Thd, weights_Th, seen_T, step.rows.requests_T)
        if self._narrowed and step.candidates is not None:
            return self._among(whole, step.candidates, keys)
        chosen, blocks = [], []
        for some in whole.pieces(max(1, _SCORES // length)):
            pages = self._pages(some, keys, step.rows)
            if narrow:
                scores_TJ = index_scores(*some[:2], pages, some.seen_T)
                chosen.append(select(scores_TJ, some.seen_T, self._top_rows))
                blocks.append(self._best_blocks(scores_TJ, some.seen_T))
            else:
                chosen.append(index_topk(*some[:2], pages, some.seen_T, self._top_rows))
        if narrow:
            step.candidates = self._candidates(_joined(blocks), whole, keys, step.rows)
        return _joined(chosen)

    def _pages(self, queries: Queries, keys: FieldView, rows: PackedRows) -> Paged:
        at_TP = rows.tables_RP.index_select(0, queries.owners_T) * keys.record_bytes
        return Paged(keys.part, at_TP, keys.rows)

    def _best_blocks(self, scores_TJ: Tensor, seen_T: Tensor) -> Tensor:
        """int32 [T, C], ascending, then -1; the block of the newest row is always among them."""
        maxima_TB = block_maxima(scores_TJ, seen_T, self._block)
        return select(maxima_TB, self._blocks_of(seen_T), self._top_blocks)

    def _candidates(
        self, blocks_TC: Tensor, queries: Queries, keys: FieldView, rows: PackedRows
    ) -> Candidates:
        page = math.gcd(self._block, keys.rows)
        within = torch.arange(0, self._block, page, device=blocks_TC.device)
        first_TX = (blocks_TC.unsqueeze(2) * self._block + within).flatten(1)
        pages_TX = row_addresses(first_TX, queries.owners_T, rows.tables_RP, records_of(keys))
        left_out_T = (self._blocks_of(queries.seen_T) - self._top_blocks).clamp_(min=0)
        seen_T = queries.seen_T - left_out_T * self._block  # only the last block is not whole
        return Candidates(blocks_TC, pages_TX.clamp_(min=0), seen_T, page)

    def _among(self, queries: Queries, candidates: Candidates, keys: FieldView) -> Tensor:
        """The best rows [T, K] of candidate blocks; few scores, whatever the context."""
        pages = Paged(keys.part, candidates.pages_TX, candidates.page)
        found_TK = index_topk(*queries[:2], pages, candidates.seen_T, self._top_rows)
        return candidate_rows(found_TK, candidates.blocks_TC, self._block)

    def _blocks_of(self, seen_T: Tensor) -> Tensor:
        return (seen_T + (self._block - 1)) // self._block


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
