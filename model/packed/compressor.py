"""The compressor of a KV source: compressed rows and index keys, written where they belong.

As model/compressor.py, but with one shape for any positions: every row computes the compressed row
that it would complete, and only those that complete one write it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ops.compress import compress
from kernels.ops.norm_rows import norm_rows
from kernels.ops.pack_index_keys import pack_index_keys
from kernels.ops.put_rows import put_rows, take_rows
from kernels.ops.rope_pack import rope_pack
from model.packed.geometry import Geometry
from model.packed.product import float32_product
from model.packed.ranges import named
from model.packed.state import FieldView
from model.packed.step import Step
from model.packed.weight_source import PackedWeightSource
from model.spec import ModelSpec
from model.state import TAIL, compressed, index_keys

# T = rows, D = hidden size, d = head size


class Compressor:
    def __init__(self, weights: PackedWeightSource, layer: int, spec: ModelSpec) -> None:
        prefix = f"layers.{layer}.attn."
        self._layer, self._ratio = layer, spec.compress_ratios[layer]
        self._eps = spec.rms_norm_eps
        self._dtype = weights.dtype
        value = f"{prefix}compressor.wkv.weight"
        if self._ratio == 2:  # pooled, and kept for the next step, in float32
            gate = f"{prefix}compressor.wgate.weight"
            self._pooled_DX = torch.cat([weights.matrix(value), weights.matrix(gate)]).t()
        else:
            self._project = weights.linear(value)
        self._norm = weights.vector(f"{prefix}compressor.norm.weight")
        self._key = weights.linear(f"{prefix}indexer.wk.weight")
        self._key_norm = weights.vector(f"{prefix}indexer.k_norm.weight")

    def __call__(self, x_TD: Tensor, step: Step) -> None:
        """Write the compressed rows and index keys of the groups that these rows complete."""
        geometry, ratio = step.geometry, self._ratio
        rows = step.state.field(compressed(ratio), self._layer)
        keys = step.state.field(index_keys(ratio), self._layer)
        with named("compress"):
            if ratio == 2:
                tail = step.state.field(TAIL, self._layer)
                latents_Td = self._pool(x_TD, tail, geometry)
            else:
                latents_Td = self._project(x_TD)
            latents_Td = norm_rows(latents_Td.to(self._dtype), self._norm, self._eps)
            keys_Td = norm_rows(self._key(latents_Td), self._key_norm, self._eps)
            turns_TP = geometry.turns.pairs_TP if ratio == 2 else geometry.turns.rows_TP
            # keys are made of the latents as they are before their rotation
            pack_index_keys(keys_Td, turns_TP, keys.part, geometry.completed(ratio, keys))
            at_T = geometry.completed(ratio, rows)
            rope_pack(latents_Td, turns_TP, rows.part, at_T, "fp4_e4m3")
        if step.on_layer is not None:
            step.on_layer(self._layer)

    def _pool(self, x_TD: Tensor, tail: FieldView, geometry: Geometry) -> Tensor:
        """Latents of each row and the one before, which is here or waits in the state."""
        projected_TX = float32_product(x_TD, self._pooled_DX)
        waiting = take_rows(tail.part, geometry.tail_read_at(tail), tail.row_bytes)
        before_TX = torch.where(
            geometry.begins_T1,
            waiting.view(torch.float32).to(projected_TX.dtype),
            projected_TX.roll(1, 0),
        )
        kept = projected_TX.to(torch.float32).view(torch.uint8)
        put_rows(tail.part, geometry.tail_write_at(tail), kept)
        return compress(*before_TX.chunk(2, 1), *projected_TX.chunk(2, 1))
