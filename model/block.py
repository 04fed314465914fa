"""What layers and draft stages have in common: two sublayers inside hyper-connections.

The caller computes attention between `open` and `close`; the experts' sublayer is the same
everywhere. How a sublayer reads the streams was decided by the sublayer before it.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kernels.ops.hyper_connection import Mixes, collapse, spread
from model.attention import Attention
from model.hyper_connection import HyperConnection
from model.moe import MakeExperts, MixtureOfExperts
from model.norm import RMSNorm
from model.options import ModelOptions
from model.spec import ModelSpec
from model.weight_source import WeightSource

# T = rows, n = streams, D = hidden size


class Residual(NamedTuple):
    """What runs from layer to layer: the streams, and how the next sublayer reads them."""

    streams_TnD: Tensor
    pre_Tn: Tensor

    @classmethod
    def of(cls, hidden_TD: Tensor, streams: int) -> Residual:
        """At the start all streams are the embedding, and the first one is read."""
        pre_Tn = hidden_TD.new_zeros(len(hidden_TD), streams)
        pre_Tn[:, 0] = 1
        return cls(hidden_TD.unsqueeze(1).repeat(1, streams, 1), pre_Tn)

    def read(self) -> Tensor:
        """[T, D]"""
        return collapse(self.streams_TnD, self.pre_Tn)


class Opened(NamedTuple):
    """A block between its halves; `x_TD` is the input of attention."""

    streams_TnD: Tensor
    mixes: Mixes
    x_TD: Tensor

    def select(self, index_T: Tensor) -> Opened:
        return Opened(
            self.streams_TnD.index_select(0, index_T),
            Mixes(*(weights.index_select(0, index_T) for weights in self.mixes)),
            self.x_TD.index_select(0, index_T),
        )


class Block:
    def __init__(
        self,
        weights: WeightSource,
        prefix: str,
        spec: ModelSpec,
        options: ModelOptions,
        make_experts: MakeExperts,
        *,
        experts: int,
        chosen: int,
        index_prefix: str | None = None,
    ) -> None:
        self._attention_mixes = HyperConnection(weights, f"{prefix}hc_attn", spec)
        self._expert_mixes = HyperConnection(weights, f"{prefix}hc_ffn", spec)
        self._attention_norm = RMSNorm(weights, f"{prefix}attn_norm", spec)
        self._expert_norm = RMSNorm(weights, f"{prefix}ffn_norm", spec)
        self.attention = Attention(weights, f"{prefix}attn.", spec, options, index_prefix)
        self._experts = MixtureOfExperts(
            weights,
            f"{prefix}ffn.",
            spec,
            options,
            count=experts,
            chosen=chosen,
            make_experts=make_experts,
        )

    def open(self, residual: Residual) -> Opened:
        mixes = self._attention_mixes.mixes(residual.streams_TnD)
        return Opened(residual.streams_TnD, mixes, self._attention_norm(residual.read()))

    def close(
        self, opened: Opened, attended_TD: Tensor, count: int, images_T: Tensor | None
    ) -> Residual:
        """Only the first `count` rows go to routed experts; `images_T` are image rows, if any."""
        pre_Tn, post_Tn, mix_Tnn = opened.mixes
        streams_TnD = spread(attended_TD, opened.streams_TnD, post_Tn, mix_Tnn)
        mixes = self._expert_mixes.mixes(streams_TnD)
        x_TD = self._expert_norm(collapse(streams_TnD, pre_Tn))
        out_TD = self._experts(x_TD, count, images_T)
        streams_TnD = spread(out_TD, streams_TnD, mixes.post_Tn, mixes.mix_Tnn)
        return Residual(streams_TnD, mixes.pre_Tn)
