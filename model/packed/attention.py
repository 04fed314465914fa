"""What every attention sublayer projects, on weights as they are stored.

As model/attention.py, in any dtype: norms and rotations are computed in float32 and rounded once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.ops.fp8_rounded import fp8_rounded
from kernels.ops.norm_rows import norm_rows
from kernels.ops.turn_heads import turn_heads
from model.options import ModelOptions
from model.packed.ranges import named
from model.packed.weight_source import PackedWeightSource
from model.spec import ModelSpec

# T = rows, D = hidden size, L = query rank, H = heads, d = head size, g = output groups,
# P = rotated pairs


class Projected(NamedTuple):
    low_TL: Tensor  # what queries are made of, rounded as linear layers take it
    kv_Td: Tensor  # neither normed nor rotated yet; parts of wider rows


class Attention:
    def __init__(
        self,
        weights: PackedWeightSource,
        prefix: str,
        spec: ModelSpec,
        options: ModelOptions,
        index_prefix: str | None = None,
    ) -> None:
        """`index_prefix`: names of the indexer whose queries are made along with the others."""
        self._rank, self._eps = spec.q_lora_rank, spec.rms_norm_eps
        self._heads, self._size = spec.num_attention_heads, spec.head_dim
        self._groups = spec.o_groups
        self._fp8 = options.activations == "fp8"
        self._fp8_groups = self._fp8 and options.wo_a == "fp8"
        self._down = weights.linear(f"{prefix}wq_a", f"{prefix}wkv")
        self._q_norm = weights.vector(f"{prefix}q_norm.weight")
        self.kv_norm_d = weights.vector(f"{prefix}kv_norm.weight")
        up = [f"{prefix}wq_b"]
        if index_prefix:
            up.append(f"{index_prefix}wq_b")
        self._up = weights.linear(*up)
        self._groups_gio = weights.grouped(f"{prefix}wo_a", spec.o_groups)
        self._out = weights.linear(f"{prefix}wo_b")
        self.sink_H = weights.vector(f"{prefix}attn_sink")

    def project(self, x_TD: Tensor) -> Projected:
        """`x`: the layer's input, rounded as linear layers take it."""
        with named("project"):
            joint = self._down(x_TD)
            low_TL = norm_rows(joint[:, : self._rank], self._q_norm, self._eps, fp8=self._fp8)
            return Projected(low_TL, joint[:, self._rank :])

    def queries(self, low_TL: Tensor, turns_TP: Tensor) -> tuple[Tensor, Tensor | None]:
        """Queries [T, H, d], rotated, and those of the indexer, not rotated yet, [T, ...]."""
        with named("queries"):
            joint = self._up(low_TL)
            width = self._heads * self._size
            index = joint[:, width:] if joint.shape[1] > width else None
            return turn_heads(joint[:, :width].view(-1, self._heads, self._size), turns_TP), index

    def output(self, heads_THd: Tensor, turns_TP: Tensor) -> Tensor:
        """Undo the rotation that the values carry, then two projections, the first by groups."""
        with named("output"):
            turned_THd = turn_heads(heads_THd, turns_TP, inverse=True, fp8=self._fp8_groups)
            grouped_Tgi = turned_THd.view(len(turned_THd), self._groups, -1)
            low_Tgo = grouped_Tgi.new_empty(*grouped_Tgi.shape[:2], self._groups_gio.shape[2])
            torch.bmm(grouped_Tgi.transpose(0, 1), self._groups_gio, out=low_Tgo.transpose(0, 1))
            low_TX = low_Tgo.flatten(1)
            return self._out(fp8_rounded(low_TX) if self._fp8 else low_TX)
