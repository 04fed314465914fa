"""The weights by which a sublayer adds to the streams, and by which the next one reads them."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ops.joined.begin_sublayer import Begun, Mixing, begin_sublayer
from model.packed.ranges import named
from model.packed.weight_source import PackedWeightSource
from model.spec import ModelSpec

# T = rows, n = streams, D = hidden size


class HyperConnection:
    """With the sublayer's norm; mixing weights are float32 over streams of any dtype."""

    def __init__(self, weights: PackedWeightSource, name: str, norm: str, spec: ModelSpec) -> None:
        n = spec.hc_mult
        pre, post, mix = weights.vector(f"{name}_scale")
        scale_m = torch.cat([pre.expand(n), post.expand(n), mix.expand(n * n)])
        project_Em = (weights.fp32(f"{name}_fn") * scale_m.unsqueeze(1)).t().contiguous()
        base_m = weights.vector(f"{name}_base")
        self._mixing = Mixing(project_Em, base_m, spec.hc_sinkhorn_iters, spec.hc_eps)
        self._norm_D = weights.vector(norm)
        self._eps = spec.rms_norm_eps

    def begin(self, streams_TnD: Tensor, pre_Tn: Tensor, *, fp8: bool) -> Begun:
        """The sublayer's mixing weights, and its input, read from the streams by `pre`."""
        with named("begin"):
            return begin_sublayer(
                streams_TnD, pre_Tn, self._mixing, self._norm_D, self._eps, fp8=fp8
            )
