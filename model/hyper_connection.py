"""The weights by which a sublayer adds to the streams, and by which the next one reads them."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ops.hyper_connection import Mixes, mixes, mixing_logits
from model.spec import ModelSpec
from model.weight_source import WeightSource

# T = rows, n = streams, D = hidden size


class HyperConnection:
    def __init__(self, weights: WeightSource, name: str, spec: ModelSpec) -> None:
        n = self._streams = spec.hc_mult
        pre, post, mix = weights[f"{name}_scale"]
        scale_m = torch.cat([pre.expand(n), post.expand(n), mix.expand(n * n)])
        self._project_Em = (weights[f"{name}_fn"] * scale_m.unsqueeze(1)).t().contiguous()
        self._base_m = weights[f"{name}_base"]
        self._iterations, self._eps = spec.hc_sinkhorn_iters, spec.hc_eps
        self._norm_eps = torch.tensor(spec.rms_norm_eps, device=scale_m.device)

    def mixes(self, streams_TnD: Tensor) -> Mixes:
        logits_Tm = mixing_logits(streams_TnD, self._project_Em, self._base_m, self._norm_eps)
        return mixes(logits_Tm, self._streams, self._iterations, self._eps)
