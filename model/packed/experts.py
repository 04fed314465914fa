"""The routed experts of one layer, all in this process, over FP4 weights as they are stored.

The seam is that of model/moe.py; a group that shares its experts has its own behind it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ops.expert_mlp import expert_mlp
from kernels.ops.packed_experts import packed_experts
from kernels.ops.route import Routed
from model.options import ModelOptions
from model.packed.weights import PackedWeights
from model.spec import ModelSpec

# T = rows, D = hidden size


class PackedLocalExperts:
    """Where there is no kernel for FP4 the values in the dtype, and the op of model/moe.py."""

    def __init__(
        self,
        weights: PackedWeights,
        prefix: str,
        count: int,
        spec: ModelSpec,
        options: ModelOptions,
    ) -> None:
        self._limit, self._fp8 = spec.swiglu_limit, options.activations == "fp8"
        self._packed = weights.experts(prefix, range(count)) if weights.keeps_codes else None
        if self._packed is None:
            each = [weights.expert_values(prefix, expert) for expert in range(count)]
            self._gate_up_EDG, self._down_EFD = (
                torch.stack(part) for part in zip(*each, strict=True)
            )

    def __call__(self, x_TD: Tensor, routed: Routed, count: int) -> Tensor:
        """[T, D]; float32 where the kernel sums in it. All rows are computed: none is a request's
        only by its place, so that the launch depends on nothing but shapes.
        """
        if self._packed is None:
            return expert_mlp(
                x_TD,
                routed.experts,
                routed.shares.to(x_TD.dtype),
                self._gate_up_EDG,
                self._down_EFD,
                count=count,
                limit=self._limit,
                fp8=self._fp8,
            )
        return packed_experts(x_TD, *routed, *self._packed, limit=self._limit, fp8=self._fp8)
