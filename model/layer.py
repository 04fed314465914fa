"""One layer of the target model: which keys its rows see, and when rows leave the forward.

A layer always has its own window rows. Compressed rows come from its KV source; which of them it
sees is chosen by its index source. Layers after a source reuse both.
"""

from __future__ import annotations

from torch import Tensor

from kernels.formats import fake_quant
from kernels.ops.sparse_attention import sparse_attention
from model.block import Block, Residual
from model.compressor import Compressor
from model.indexer import Indexer
from model.moe import MakeExperts
from model.options import ModelOptions
from model.spec import ModelSpec
from model.state import WINDOW
from model.step import Step
from model.weight_source import WeightSource
from model.window import Window

# T = padded rows, L = query rank, W = window size, d = head size


class Layer:
    def __init__(
        self,
        weights: WeightSource,
        layer: int,
        spec: ModelSpec,
        options: ModelOptions,
        make_experts: MakeExperts,
    ) -> None:
        prefix = f"layers.{layer}."
        self._layer, self._window = layer, spec.sliding_window
        self._ratio = spec.compress_ratios[layer]
        is_cut = layer == spec.cut_layer
        at_cut = options.truncation != "off" and options.cut_window == "clip"
        self._clipped = layer > spec.cut_layer or (is_cut and at_cut)
        self._is_cut = is_cut
        chooses = self._ratio > 0 and layer in spec.index_source_layer_ids
        self._indexer = Indexer(weights, layer, spec) if chooses else None
        is_source = layer in spec.kv_source_layer_ids
        self._compressor = Compressor(weights, layer, spec) if is_source else None
        self._block = Block(
            weights,
            prefix,
            spec,
            options,
            make_experts,
            experts=spec.n_routed_experts,
            chosen=spec.num_experts_per_tok,
            index_prefix=f"{prefix}attn.indexer." if chooses else None,
        )

    def __call__(self, residual: Residual, step: Step) -> Residual:
        """The compressor must see every row before those that do not go on leave."""
        attention = self._block.attention
        opened = self._block.open(residual)
        if self._compressor:
            self._compressor(opened.x_TD, step.rows, step.cache)
        leaving = self._is_cut and len(step.going_on) < step.rows.whole.count
        if leaving and self._clipped:
            opened = opened.select(step.drop_others())
        low_TL, window_TWd, mask_T1W = self._look_back(opened.x_TD, step)
        if leaving and not self._clipped:
            index_T = step.drop_others()
            opened = opened.select(index_T)
            low_TL, window_TWd, mask_T1W = low_TL[index_T], window_TWd[index_T], mask_T1W[index_T]
        if not step.rows.whole.count:
            return residual
        turns_T1P = step.rows.turns(self._ratio)
        q_THd, index_queries = attention.queries(low_TL, turns_T1P)
        if self._indexer and index_queries is not None:
            self._indexer(index_queries, opened.x_TD, step)
        selected = step.selected if self._ratio else ()
        heads_THd = sparse_attention(
            q_THd, window_TWd, mask_T1W, attention.sink_1H1, *(selected or ())
        )
        attended_TD = attention.output(heads_THd, turns_T1P)
        return self._block.close(opened, attended_TD, step.rows.count, step.rows.image_rows)

    def _look_back(self, x_TD: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """What queries are made of, and the window keys of each row with their mask."""
        low_TL, kv_Td = self._block.attention.project(x_TD, step.rows.turns(self._ratio))
        kv_Td = step.rows.collect(kv_Td)
        window = step.rows.plan(Window.of, self._window, self._clipped and step.rows.any_clip)
        keys_TWd = window.exchange(step.cache, WINDOW, self._layer, kv_Td, fake_quant(kv_Td, "fp8"))
        return low_TL, keys_TWd, window.mask_T1W
