"""What every attention sublayer projects: queries, window rows, and the grouped output.

Which keys a row sees is decided elsewhere. Layers without compressed rows rotate by another base.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.formats import fake_quant
from kernels.ops.rope import rope
from model.norm import RMSNorm
from model.options import ModelOptions
from model.spec import ModelSpec
from model.weight_source import WeightSource

# T = rows, D = hidden size, L = query rank, H = heads, d = head size, g = output groups


class Projected(NamedTuple):
    """`low` is what queries are made of, rounded as linear layers take it."""

    low_TL: Tensor
    kv_Td: Tensor  # rotated, not rounded yet


class Attention:
    def __init__(
        self,
        weights: WeightSource,
        prefix: str,
        spec: ModelSpec,
        options: ModelOptions,
        index_prefix: str | None = None,
    ) -> None:
        """`index_prefix`: names of the indexer whose queries are made along with the others."""
        self._spec = spec
        self._fp8 = options.activations == "fp8"
        self._fp8_groups = self._fp8 and options.wo_a == "fp8"
        down = torch.cat([weights[f"{prefix}wq_a"], weights[f"{prefix}wkv"]])
        self._down_DX = down.t().contiguous()
        self._q_norm = RMSNorm(weights, f"{prefix}q_norm", spec)
        self._kv_norm = RMSNorm(weights, f"{prefix}kv_norm", spec)
        up = [weights[f"{prefix}wq_b"]]
        if index_prefix:
            up.append(weights[f"{index_prefix}wq_b"])
        self._up_LX = torch.cat(up).t().contiguous()
        groups = weights[f"{prefix}wo_a"].view(spec.o_groups, spec.o_lora_rank, -1)
        self._groups_gio = groups.transpose(1, 2).contiguous()
        self._out_XD = weights[f"{prefix}wo_b"].t().contiguous()
        self.sink_1H1 = weights[f"{prefix}attn_sink"].view(1, -1, 1)

    def project(self, x_TD: Tensor, turns_T1P: Tensor) -> Projected:
        rank = self._spec.q_lora_rank
        joint = self.rounded(x_TD) @ self._down_DX
        low_TL = self.rounded(self._q_norm(joint[:, :rank]))
        return Projected(low_TL, self._rotated_kv(joint[:, rank:], turns_T1P))

    def window_kv(self, x_TD: Tensor, turns_T1P: Tensor) -> Tensor:
        """The window rows alone, not rounded yet."""
        joint = self.rounded(x_TD) @ self._down_DX[:, self._spec.q_lora_rank :]
        return self._rotated_kv(joint, turns_T1P)

    def _rotated_kv(self, projected_Td: Tensor, turns_T1P: Tensor) -> Tensor:
        return rope(self._kv_norm(projected_Td).unsqueeze(1), turns_T1P).squeeze(1)

    def queries(self, low_TL: Tensor, turns_T1P: Tensor) -> tuple[Tensor, Tensor | None]:
        """Queries [T, H, d], rotated, and those of the indexer, not rotated yet, [T, ...]."""
        heads, size = self._spec.num_attention_heads, self._spec.head_dim
        joint = low_TL @ self._up_LX
        if joint.shape[1] == heads * size:
            return rope(joint.view(-1, heads, size), turns_T1P), None
        q_THd = joint[:, : heads * size].view(-1, heads, size)
        return rope(q_THd, turns_T1P), joint[:, heads * size :]

    def output(self, heads_THd: Tensor, turns_T1P: Tensor) -> Tensor:
        """Undo the rotation that the values carry, then two projections, the first by groups."""
        groups = self._spec.o_groups
        grouped_Tgi = rope(heads_THd, turns_T1P.conj()).view(heads_THd.shape[0], groups, -1)
        if self._fp8_groups:
            grouped_Tgi = fake_quant(grouped_Tgi, "fp8")
        low_gTo = torch.bmm(grouped_Tgi.transpose(0, 1), self._groups_gio)
        return self.rounded(low_gTo.transpose(0, 1).flatten(1)) @ self._out_XD

    def rounded(self, x: Tensor) -> Tensor:
        """The input of an FP8 linear layer."""
        return fake_quant(x, "fp8") if self._fp8 else x
