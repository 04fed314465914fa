"""What the drafter's stages remember of each position; as model/drafter.py's taps and context.

Drafting itself is not done here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ops.fp8_rounded import fp8_rounded
from kernels.ops.joined.norm_rope_pack import norm_rope_pack
from kernels.ops.norm_rows import norm_rows
from model.options import ModelOptions
from model.packed.ranges import named
from model.packed.step import Step
from model.packed.weight_source import PackedWeightSource
from model.spec import ModelSpec
from model.state import DRAFT_WINDOW

# T = rows, D = hidden size, d = head size


class Observer:
    def __init__(self, weights: PackedWeightSource, spec: ModelSpec, options: ModelOptions) -> None:
        self._eps, self._fp8 = spec.rms_norm_eps, options.activations == "fp8"
        self._main = weights.linear("mtp.0.main_proj")
        self._main_norm = weights.vector("mtp.0.main_norm.weight")
        self._stages = spec.draft_stages
        self._clipped = options.truncation != "off"
        self._window_rows = weights.linear(*(f"mtp.{one}.attn.wkv" for one in self._stages))
        self._norms = [weights.vector(f"mtp.{one}.attn.kv_norm.weight") for one in self._stages]

    def __call__(self, taps: list[Tensor], step: Step) -> None:
        """Write context rows; `taps` are [T, D] of each layer tapped."""
        with named("observe"):
            taps_TX = torch.cat(taps, 1)
            main_TD = self._main(fp8_rounded(taps_TX) if self._fp8 else taps_TX)
            main_TD = norm_rows(main_TD, self._main_norm, self._eps, fp8=self._fp8)
            joint = self._window_rows(main_TD)
            parts = joint.chunk(len(self._stages), 1)
            for stage, norm, part in zip(self._stages, self._norms, parts, strict=True):
                ring = step.state.field(DRAFT_WINDOW, stage)
                at_T = step.geometry.sight(ring, clipped=self._clipped).written_at_T
                turns_TP = step.geometry.turns.plain_TP
                norm_rope_pack(part, norm, self._eps, turns_TP, ring.part, at_T)
