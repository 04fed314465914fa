"""A layer's two sublayers inside hyper-connections, and its experts; as model/block.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.ops.gated_rows import gated_rows
from kernels.ops.hyper_connection import Mixes, spread
from kernels.ops.norm_rows import Normed
from kernels.ops.route import route_top
from model.options import ModelOptions
from model.packed.attention import Attention
from model.packed.hyper_connection import HyperConnection
from model.packed.product import float32_product
from model.packed.ranges import named
from model.packed.weight_source import MakeExperts, Source
from model.spec import ModelSpec

# T = rows, n = streams, D = hidden size, E = experts


class Residual(NamedTuple):
    """What runs from layer to layer: the streams, and how the next sublayer reads them."""

    streams_TnD: Tensor
    pre_Tn: Tensor

    @classmethod
    def of(cls, hidden_TD: Tensor, streams: int) -> Residual:
        """At the start all streams are the embedding, and the first one is read."""
        exact = torch.promote_types(hidden_TD.dtype, torch.float32)
        pre_Tn = torch.zeros(len(hidden_TD), streams, dtype=exact, device=hidden_TD.device)
        pre_Tn[:, 0] = 1
        return cls(hidden_TD.unsqueeze(1).repeat(1, streams, 1), pre_Tn)

    def select(self, index_T: Tensor) -> Residual:
        return Residual(*(part.index_select(0, index_T) for part in self))


class Opened(NamedTuple):
    """A block between its halves; `x` is the input of attention."""

    streams_TnD: Tensor
    mixes: Mixes
    x: Normed

    def select(self, index_T: Tensor) -> Opened:
        plain_TD = self.x.plain_TD.index_select(0, index_T)
        rounded_TD = plain_TD
        if self.x.rounded_TD is not self.x.plain_TD:
            rounded_TD = self.x.rounded_TD.index_select(0, index_T)
        return Opened(
            self.streams_TnD.index_select(0, index_T),
            Mixes(*(weights.index_select(0, index_T) for weights in self.mixes)),
            Normed(plain_TD, rounded_TD),
        )


class Block:
    def __init__(
        self,
        weights: Source,
        prefix: str,
        spec: ModelSpec,
        options: ModelOptions,
        make_experts: MakeExperts[Source],
        index_prefix: str | None = None,
    ) -> None:
        self._attention_streams = HyperConnection(
            weights, f"{prefix}hc_attn", f"{prefix}attn_norm.weight", spec
        )
        self._expert_streams = HyperConnection(
            weights, f"{prefix}hc_ffn", f"{prefix}ffn_norm.weight", spec
        )
        self._fp8 = options.activations == "fp8"
        self.attention = Attention(weights, f"{prefix}attn.", spec, options, index_prefix)
        self._experts = MixtureOfExperts(weights, f"{prefix}ffn.", spec, options, make_experts)

    def open(self, residual: Residual) -> Opened:
        begun = self._attention_streams.begin(*residual, fp8=self._fp8)
        return Opened(residual.streams_TnD, *begun)

    def close(self, opened: Opened, attended_TD: Tensor, images_T: Tensor) -> Residual:
        """`images_T` are image rows."""
        pre_Tn, post_Tn, mix_Tnn = opened.mixes
        with named("spread"):
            streams_TnD = spread(attended_TD, opened.streams_TnD, post_Tn, mix_Tnn)
        mixes, x = self._expert_streams.begin(streams_TnD, pre_Tn, fp8=self._fp8)
        out_TD, shared_TD = self._experts(x, images_T)
        with named("spread"):
            streams_TnD = spread(out_TD, streams_TnD, *mixes[1:], shared_TD)
        return Residual(streams_TnD, mixes.pre_Tn)


class MixtureOfExperts:
    """A router in float32, routed experts behind the seam of model/moe.py, and a shared expert."""

    def __init__(
        self,
        weights: Source,
        prefix: str,
        spec: ModelSpec,
        options: ModelOptions,
        make_experts: MakeExperts[Source],
    ) -> None:
        self._gate_DE = weights.matrix(f"{prefix}gate.weight").t()
        self._bias_E = weights.vector(f"{prefix}gate.bias")
        self._image_bias_E = weights.vector(f"{prefix}gate.bias_vl")
        self._chosen, self._scale = spec.num_experts_per_tok, spec.routed_scaling_factor
        self._limit, self._fp8 = spec.swiglu_limit, options.activations == "fp8"
        shared = f"{prefix}shared_experts."
        self._gate_up = weights.linear(f"{shared}w1", f"{shared}w3")
        self._down = weights.linear(f"{shared}w2")
        count = spec.n_routed_experts
        self._experts = make_experts(weights, f"{prefix}experts.", count, spec, options)

    def __call__(self, x: Normed, images_T: Tensor) -> tuple[Tensor, Tensor]:
        """[T, D] twice: of the routed experts and of the shared one, to be added up."""
        with named("route"):
            bias_TE = torch.where(images_T.unsqueeze(1), self._image_bias_E, self._bias_E)
            logits_TE = float32_product(x.plain_TD, self._gate_DE)
            routed = route_top(logits_TE, bias_TE, self._chosen, self._scale)
        with named("experts"):
            out_TD = self._experts(x.rounded_TD, routed, len(x.rounded_TD))
        with named("shared expert"):
            hidden_TF = gated_rows(self._gate_up(x.rounded_TD), self._limit, fp8=self._fp8)
            return out_TD, self._down(hidden_TF)
