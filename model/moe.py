"""The mixture of experts: a router, routed experts behind one seam, and a shared expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from kernels.formats import fake_quant
from kernels.ops.expert_mlp import expert_mlp, gated_mlp
from kernels.ops.route import Routed, route
from model.options import ModelOptions
from model.spec import ModelSpec
from model.weight_source import WeightSource

# T = padded rows, E = experts, D = hidden size


class Experts(Protocol):
    """The routed experts of one layer, wherever they are."""

    def __call__(self, x_TD: Tensor, routed: Routed, count: int) -> Tensor:
        """[T, D]: each of the first `count` rows' sum over its experts; the others mean nothing."""
        ...


MakeExperts = Callable[[WeightSource, str, int, ModelSpec, ModelOptions], Experts]
"""(weights, prefix of the names, number of experts, spec, options) -> Experts"""


class LocalExperts:
    """All experts in this process."""

    def __init__(
        self,
        weights: WeightSource,
        prefix: str,
        count: int,
        spec: ModelSpec,
        options: ModelOptions,
    ) -> None:
        mlps = [GatedWeights(weights, f"{prefix}{expert}.") for expert in range(count)]
        self._gate_up_EDG = torch.stack([mlp.gate_up_DG for mlp in mlps])
        self._down_EFD = torch.stack([mlp.down_FD for mlp in mlps])
        self._limit, self._fp8 = spec.swiglu_limit, options.activations == "fp8"

    def __call__(self, x_TD: Tensor, routed: Routed, count: int) -> Tensor:
        return expert_mlp(
            x_TD,
            *routed,
            self._gate_up_EDG,
            self._down_EFD,
            count=count,
            limit=self._limit,
            fp8=self._fp8,
        )


class GatedWeights:
    """Weights of one gated MLP, [in, out]; gate and up side by side."""

    def __init__(self, weights: WeightSource, prefix: str) -> None:
        self.gate_up_DG = torch.cat([weights[f"{prefix}w1"], weights[f"{prefix}w3"]]).t()
        self.gate_up_DG = self.gate_up_DG.contiguous()
        self.down_FD = weights[f"{prefix}w2"].t().contiguous()


class MixtureOfExperts:
    def __init__(
        self,
        weights: WeightSource,
        prefix: str,
        spec: ModelSpec,
        options: ModelOptions,
        *,
        count: int,
        chosen: int,
        make_experts: MakeExperts = LocalExperts,
    ) -> None:
        self._gate_DE = weights[f"{prefix}gate.weight"].t().contiguous()
        self._bias_E = weights[f"{prefix}gate.bias"]
        self._image_bias_E = weights[f"{prefix}gate.bias_vl"]
        self._chosen, self._scale = chosen, spec.routed_scaling_factor
        self._shared = GatedWeights(weights, f"{prefix}shared_experts.")
        self._experts = make_experts(weights, f"{prefix}experts.", count, spec, options)
        self._limit, self._fp8 = spec.swiglu_limit, options.activations == "fp8"

    def __call__(self, x_TD: Tensor, count: int, images_T: Tensor | None) -> Tensor:
        """[T, D]; only the first `count` rows are routed. `images_T`: rows with the image bias."""
        logits_TE = x_TD @ self._gate_DE
        bias_E = self._bias_E
        if images_T is not None:
            bias_E = torch.where(images_T.unsqueeze(1), self._image_bias_E, bias_E)
        routed = route(logits_TE, bias_E, self._chosen, self._scale)
        if self._fp8:
            x_TD = fake_quant(x_TD, "fp8")
        shared_TD = gated_mlp(
            x_TD,
            self._shared.gate_up_DG,
            self._shared.down_FD,
            limit=self._limit,
            fp8=self._fp8,
        )
        return shared_TD.add_(self._experts(x_TD, routed, count))
