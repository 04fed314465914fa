"""The vision encoder: pixels of one image in, what its positions are to the language model out.

Images are computed one by one, so one has the same bits whatever others come with it. Knows
nothing of requests and positions in a prompt.
Source: model code of DeepSeek-V4.1-Flash.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, pad, silu

from kernels.ops.grid_rope import grid_rope, grid_turns
from kernels.ops.patch_attention import patch_attention
from kernels.ops.rms_norm import rms_norm
from model.vision_spec import Grid, VisionSpec
from model.weight_source import WeightSource

# N = patches, F = width of the encoder, H = heads, d = head size, C = cells, D = hidden size of
# the language model, S = positions of the image

_EPS = 1e-6  # of the encoder's norms; the language model's differs


class VisionEncoder:
    def __init__(self, weights: WeightSource, spec: VisionSpec) -> None:
        """All is computed on the device that the weights are on, and in their precision."""
        self.spec = spec
        self._patch = _Linear(weights, "vision.patch_embed.proj", bias=True)
        self._blocks = [
            _Block(weights, f"vision.blocks.{block}.", spec)
            for block in range(spec.num_hidden_layers)
        ]
        self._norm = _Norm(weights, "vision.norm")
        self._aligner = _Aligner(weights, spec)
        self._frequencies = torch.tensor(spec.rope_frequencies(), dtype=torch.float64)
        parts = (weights[f"image_{part}"] for part in ("start", "newline", "end"))
        self._start_D, self._newline_D, self._end_D = parts
        # Pixels are -1 .. 1 in bfloat16, which is part of the model.
        levels = (torch.arange(256, dtype=torch.float32) / 255 - 0.5) / 0.5
        self._levels = levels.bfloat16().to(self._start_D)

    @property
    def device(self) -> torch.device:
        return self._start_D.device

    def __call__(self, pixels_hw3: Tensor) -> Tensor:
        """[S, D] of an image [height, width, 3], uint8: start, cells and newlines, end.

        Raises ValueError for a size that VisionSpec.grid() refuses.
        """
        grid = self.spec.grid(*pixels_hw3.shape[:2])
        x_NF = self._patch(self._patches(pixels_hw3, grid))
        cos_N1P, sin_N1P = grid_turns(grid.patch_rows, grid.patch_columns, self._frequencies)
        turns = cos_N1P.to(x_NF), sin_N1P.to(x_NF)
        for block in self._blocks:
            x_NF = block(x_NF, turns)
        return self._in_order(self._aligner(self._norm(x_NF), grid), grid)

    def _patches(self, pixels_hw3: Tensor, grid: Grid) -> Tensor:
        """[N, 3 * patch * patch]: the values of one colour after those of another."""
        size = self.spec.patch_size
        values = self._levels[pixels_hw3.to(self.device).long()]
        cut = values.view(grid.patch_rows, size, grid.patch_columns, size, 3)
        return cut.permute(0, 2, 4, 1, 3).reshape(grid.patch_rows * grid.patch_columns, -1)

    def _in_order(self, cells_CD: Tensor, grid: Grid) -> Tensor:
        width = cells_CD.shape[1]
        newlines = self._newline_D.expand(grid.rows, 1, width)
        lines = torch.cat([cells_CD.view(grid.rows, grid.columns, width), newlines], 1)
        return torch.cat([self._start_D[None], lines.flatten(0, 1), self._end_D[None]])


class _Block:
    """Attention among all patches, then a gated MLP, each added to its normed input's origin."""

    def __init__(self, weights: WeightSource, prefix: str, spec: VisionSpec) -> None:
        self._heads = spec.num_attention_heads
        self._attention_norm = _Norm(weights, f"{prefix}norm1")
        self._qkv = _Linear(weights, f"{prefix}attn.wqkv", bias=True)
        self._out = _Linear(weights, f"{prefix}attn.wo", bias=True)
        self._mlp_norm = _Norm(weights, f"{prefix}norm2")
        self._gate_up = _Linear(weights, f"{prefix}mlp.w1", bias=False)
        self._down = _Linear(weights, f"{prefix}mlp.w2", bias=False)

    def __call__(self, x_NF: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        qkv = self._qkv(self._attention_norm(x_NF)).view(len(x_NF), 3, self._heads, -1)
        q_NHd, k_NHd, v_NHd = qkv.unbind(1)
        attended_NHd = patch_attention(grid_rope(q_NHd, *turns), grid_rope(k_NHd, *turns), v_NHd)
        x_NF = x_NF + self._out(attended_NHd.flatten(1))
        gate, up = self._gate_up(self._mlp_norm(x_NF)).chunk(2, 1)
        return x_NF + self._down(silu(gate).mul_(up))


class _Aligner:
    """Joins the patches of each cell, and brings them to the width of the language model."""

    def __init__(self, weights: WeightSource, spec: VisionSpec) -> None:
        self._ratio = spec.downsample_ratio
        self._in = _Linear(weights, "aligner.w1", bias=True)
        self._out = _Linear(weights, "aligner.w2", bias=True)

    def __call__(self, x_NF: Tensor, grid: Grid) -> Tensor:
        """[C, D], row by row; cells at the lower and right border may lack patches: zeros."""
        ratio = self._ratio
        x = x_NF.view(grid.patch_rows, grid.patch_columns, -1)
        below, beside = -grid.patch_rows % ratio, -grid.patch_columns % ratio
        x = pad(x, (0, 0, 0, beside, 0, below))
        cut = x.view(grid.rows, ratio, grid.columns, ratio, -1)
        cells = cut.permute(0, 2, 4, 1, 3).reshape(grid.rows * grid.columns, -1)
        return self._out(gelu(self._in(cells)))


class _Linear:
    def __init__(self, weights: WeightSource, name: str, *, bias: bool) -> None:
        self._weight = weights[f"{name}.weight"].t().contiguous()
        self._bias = weights[f"{name}.bias"] if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        if self._bias is None:
            return x @ self._weight
        return torch.addmm(self._bias, x, self._weight)


class _Norm:
    def __init__(self, weights: WeightSource, name: str) -> None:
        self._weight = weights[f"{name}.weight"]
        self._eps = torch.tensor(_EPS).to(self._weight)

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self._weight, self._eps)
