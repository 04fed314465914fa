"""One layer of the target model over packed state: which keys its rows see, when rows leave.

As model/layer.py; window and compressed rows are read where they lie.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ops.joined.norm_rope_pack import norm_rope_pack
from kernels.ops.packed_attention import Located, packed_attention
from kernels.ops.put_rows import put_rows, take_rows
from model.options import ModelOptions
from model.packed.block import Block, Residual
from model.packed.compressor import Compressor
from model.packed.geometry import Pool
from model.packed.indexer import Indexer
from model.packed.ranges import named
from model.packed.state import FieldView
from model.packed.step import Step
from model.packed.weight_source import MakeExperts, Source
from model.spec import ModelSpec
from model.state import WINDOW

# T = rows, L = query rank, W = window size, d = head size, P = rotated pairs


class Layer:
    def __init__(
        self,
        weights: Source,
        layer: int,
        spec: ModelSpec,
        options: ModelOptions,
        make_experts: MakeExperts[Source],
    ) -> None:
        prefix = f"layers.{layer}."
        self._eps = spec.rms_norm_eps
        self._layer, self._ratio = layer, spec.compress_ratios[layer]
        self._is_cut = layer == spec.cut_layer
        truncated = options.truncation != "off"
        at_cut = truncated and options.cut_window == "clip"
        # without truncation nothing is below a clip
        self._clipped = at_cut if self._is_cut else truncated and layer > spec.cut_layer
        chooses = self._ratio > 0 and layer in spec.index_source_layer_ids
        self._indexer = Indexer(weights, layer, spec) if chooses else None
        is_source = layer in spec.kv_source_layer_ids
        self._compressor = Compressor(weights, layer, spec) if is_source else None
        index_prefix = f"{prefix}attn.indexer." if chooses else None
        self._block = Block(weights, prefix, spec, options, make_experts, index_prefix)

    def __call__(self, residual: Residual, step: Step) -> Residual:
        """The compressor must see every row before those that do not go on leave."""
        with named(f"layer {self._layer}"):
            attention = self._block.attention
            opened = self._block.open(residual)
            if self._compressor:
                self._compressor(opened.x.plain_TD, step)
            leaving = self._is_cut and step.leaving is not None
            if leaving and self._clipped:
                opened = opened.select(step.leave())
            low_TL, window = self._look_back(opened.x.rounded_TD, step)
            if leaving and not self._clipped:
                index_T = step.leave()
                opened, low_TL = opened.select(index_T), low_TL[index_T]
                window = window._replace(at_TN=window.at_TN[index_T])
            if not len(low_TL):
                return Residual(opened.streams_TnD, opened.mixes.pre_Tn)
            turns_TP = self._turns(step)
            q_THd, index_queries = attention.queries(low_TL, turns_TP)
            if self._indexer and index_queries is not None:
                self._indexer(index_queries, opened.x.plain_TD, step)
            selected = step.selected if self._ratio else None
            with named("attention"):
                # many rows fill a GPU without having their lists cut
                parts = 2 if step.geometry.shape.in_place else 1
                heads_THd = packed_attention(q_THd, window, selected, attention.sink_H, parts=parts)
            return self._block.close(opened, attention.output(heads_THd, turns_TP), step.images_T)

    def _look_back(self, x_TD: Tensor, step: Step) -> tuple[Tensor, Located]:
        """What queries are made of, and where each row's window rows are."""
        low_TL, kv_Td = self._block.attention.project(x_TD)
        with named("window"):
            ring = step.state.field(WINDOW, self._layer)
            sight = step.geometry.sight(ring, clipped=self._clipped)
            own_at_T = sight.written_at_T if sight.pool is None else sight.pool.own_at_T
            memory = ring.part if sight.pool is None else _with_history(ring, sight.pool)
            attention, turns_TP = self._block.attention, self._turns(step)
            norm_rope_pack(kv_Td, attention.kv_norm_d, self._eps, turns_TP, memory, own_at_T)
            if sight.pool is not None:
                own = memory.view(-1, ring.row_bytes)[len(sight.pool.history_at_N) :]
                put_rows(ring.part, sight.written_at_T, own)
            return low_TL, Located(memory, sight.seen_at_TW)

    def _turns(self, step: Step) -> Tensor:
        turns = step.geometry.turns
        return turns.rows_TP if self._ratio else turns.plain_TP


def _with_history(ring: FieldView, pool: Pool) -> Tensor:
    """Memory of a pool, uint8 [bytes]: history is there, the forward's own rows are not yet."""
    history = take_rows(ring.part, pool.history_at_N, ring.row_bytes)
    own = history.new_empty(len(pool.own_at_T), ring.row_bytes)
    return torch.cat([history, own]).view(-1)
