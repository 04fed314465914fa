"""Gated MLPs of routed experts on FP4 weights as they are stored: 0.53 bytes a weight are read.

Assignments of rows to experts are sorted into blocks of one expert each; a program multiplies one
block by a tile of the expert's matrix. The matrix is the left operand, so that few rows still fill
the matrix units, and its values go from memory into registers as FP4. They are exact in bf16:
only activations are rounded. Sums run over the same tiles in the same order in any batch.
Two values of a pair of dims stand in one word, so dims are handled in two halves.
This kernel runs on any GPU; few rows on Hopper go to kernels/hopper_experts.py.
Knows nothing of routing or of which rank has which expert.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (kernels are written in Triton's language, which has no annotations)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import hopper_experts as hopper
from kernels.expert_blocks import blocks_of
from kernels.formats import decode_fp4_rows, fake_quant
from kernels.triton_formats import bf16, fp4_halves, power_of, spread
from kernels.triton_quantise import fp8_rounded_rows

# T = rows, A = experts of a row, E = experts, D = hidden size, F = intermediate size,
# M = assignments of a block


class Fp4Matrices(NamedTuple):
    """[E, out, in], as kernels/formats.py stores FP4 weights; scales are at most 2."""

    codes: Tensor  # uint8 [E, out, in / 2]
    scales: Tensor  # uint8 [E, out, in / 32], ue8m0

    def decoded(self) -> Tensor:
        """float32 [E, out, in]"""
        return decode_fp4_rows(self.codes, self.scales)


def reference(
    x_TD: Tensor,
    experts_TA: Tensor,
    shares_TA: Tensor,
    gate_up: Fp4Matrices,
    down: Fp4Matrices,
    *,
    limit: float,
    fp8: bool = False,
) -> Tensor:
    """float32 [T, D]: the sum over a row's experts of share * down(silu(gate(x)) * up(x)).

    The gate is clamped from above, the other factor from both sides, by `limit`. With `fp8` what
    goes into each product is rounded as the row format "fp8" rounds, as the model defines it.
    """
    if fp8:
        x_TD = fake_quant(x_TD.float(), "fp8")
    total_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    for expert in range(len(gate_up.codes)):
        row, slot = (experts_TA == expert).nonzero(as_tuple=True)
        wide, narrow = (
            Fp4Matrices(one.codes[expert], one.scales[expert]).decoded() for one in (gate_up, down)
        )
        gate, up = (x_TD[row].float() @ wide.T).chunk(2, -1)
        hidden = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        hidden = hidden * shares_TA[row, slot, None]
        if fp8:
            hidden = fake_quant(hidden.bfloat16().float(), "fp8")
        total_TD.index_add_(0, row, hidden @ narrow.T)
    return total_TD


# ------------------------------------------------------------------ kernel


@triton.jit
def _add_product(codes, scales, words_MP, total_OM):
    """One tile of a matrix times one tile of rows, whose words hold a pair of bf16 each."""
    powers = power_of(tl.minimum(scales.to(tl.int32) - 127 + 126, 127))
    even, odd = fp4_halves(codes, spread(powers, 16))
    total_OM = tl.dot(even, tl.trans(bf16(words_MP)), total_OM)
    return tl.dot(odd, tl.trans(bf16(words_MP >> 16)), total_OM)


@triton.jit
def _multiply(
    x,
    codes,
    scales,
    expert_B,
    assignment_BM,
    shares,
    out,
    limit,
    ROWS: tl.constexpr,  # of each expert's matrix
    DIMS: tl.constexpr,
    FAN: tl.constexpr,  # assignments that share a row of x
    GATED: tl.constexpr,
    OUT: tl.constexpr,
    M: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Block b times rows o * OUT onwards of its expert's matrix: into out[assignment]."""
    o, b = tl.program_id(0), tl.program_id(1)
    expert = tl.load(expert_B + b).to(tl.int64)
    if expert < 0:
        return
    assignment_M = tl.load(assignment_BM + b * M + tl.arange(0, M))
    live_M = assignment_M >= 0
    x_M = x + (tl.maximum(assignment_M, 0) // FAN).to(tl.int64) * (DIMS // 2)
    row_O = o * OUT + tl.arange(0, OUT)
    pair_P = tl.arange(0, PAIRS)
    group_P = tl.arange(0, PAIRS // 16)
    matrix = expert * ROWS
    codes_OP = codes + (matrix + row_O)[:, None] * (DIMS // 2) + pair_P[None, :]
    scales_OP = scales + (matrix + row_O)[:, None] * (DIMS // 32) + group_P[None, :]
    UP: tl.constexpr = ROWS // 2 if GATED else 0
    total_OM = tl.zeros((OUT, M), tl.float32)
    up_OM = tl.zeros((OUT, M), tl.float32)
    for first in range(0, DIMS // 2, PAIRS):
        inside = pair_P + first < DIMS // 2
        groups = group_P + first // 16 < DIMS // 32
        words_MP = tl.load(
            x_M[:, None] + (first + pair_P)[None, :],
            mask=live_M[:, None] & inside[None, :],
            other=0,
        )
        tile = tl.load(codes_OP + first, mask=inside[None, :], other=0)
        steps = tl.load(scales_OP + first // 16, mask=groups[None, :], other=0)
        total_OM = _add_product(tile, steps, words_MP, total_OM)
        if GATED:
            tile = tl.load(codes_OP + UP * (DIMS // 2) + first, mask=inside[None, :], other=0)
            steps = tl.load(
                scales_OP + UP * (DIMS // 32) + first // 16, mask=groups[None, :], other=0
            )
            up_OM = _add_product(tile, steps, words_MP, up_OM)
    WIDTH: tl.constexpr = ROWS // 2 if GATED else ROWS
    if GATED:
        share_M = tl.load(shares + assignment_M, mask=live_M, other=0.0)
        gate_OM = tl.minimum(total_OM, limit)
        up_OM = tl.minimum(tl.maximum(up_OM, -limit), limit)
        total_OM = gate_OM / (1 + tl.exp(-gate_OM)) * up_OM * share_M[None, :]
    at_MO = assignment_M.to(tl.int64)[:, None] * WIDTH + row_O[None, :]
    tl.store(out + at_MO, tl.trans(total_OM).to(out.dtype.element_ty), mask=live_M[:, None])


class Tiles(NamedTuple):
    """How the kernel for any GPU cuts the work; `rows` are assignments of a block."""

    rows: int = 16
    out: int = 64
    pairs: int = 128
    warps: int = 4
    stages: int = 4


DECODE = Tiles()  # few rows an expert: what counts is how fast weights come
PREFILL = Tiles(rows=64, out=128, pairs=64, warps=8, stages=3)


def packed_experts(
    x_TD: Tensor,
    experts_TA: Tensor,
    shares_TA: Tensor,
    gate_up: Fp4Matrices,
    down: Fp4Matrices,
    *,
    limit: float,
    fp8: bool = False,
    tiles: Tiles | None = None,
) -> Tensor:
    """float32 [T, D] as the reference, up to the rounding of what lies between the two products.

    On a CPU the reference runs. On a GPU x is bf16, shares are float32. With `tiles`, the kernel
    for any GPU; their `out` must divide F and D. A row gets the same from all forms that round
    alike, whatever the batch, up to the order of sums; the same bits from one form.
    """
    if not x_TD.is_cuda:
        return reference(x_TD, experts_TA, shares_TA, gate_up, down, limit=limit, fp8=fp8)
    rows, slots = experts_TA.shape
    count, dims, inner = len(gate_up.codes), x_TD.shape[1], gate_up.codes.shape[1] // 2
    assert x_TD.dtype == torch.bfloat16
    if not rows:
        return x_TD.new_zeros(0, dims, dtype=torch.float32)
    few = rows * slots <= 16 * count
    arguments = (x_TD, experts_TA, shares_TA, gate_up, down, limit, fp8)
    if tiles is None and few and _fits_hopper(x_TD, inner):
        each = _stream(*arguments)
    else:
        narrow = few or dims % PREFILL.out or inner % PREFILL.out
        each = _multiply_each(*arguments, tiles or (DECODE if narrow else PREFILL))
    return hopper.sum_parts(each, slots)


def _fits_hopper(x_TD: Tensor, inner: int) -> bool:
    if x_TD.shape[1] % hopper.STEP or inner % hopper.STEP:
        return False
    return torch.cuda.get_device_capability(x_TD.device)[0] == 9


def _stream(
    x_TD: Tensor,
    experts_TA: Tensor,
    shares_TA: Tensor,
    gate_up: Fp4Matrices,
    down: Fp4Matrices,
    limit: float,
    fp8: bool,
) -> Tensor:
    """float32 [T * A, D]: each assignment's part."""
    rows, slots = experts_TA.shape
    count, dims, inner = len(gate_up.codes), x_TD.shape[1], gate_up.codes.shape[1] // 2
    size = 8 if rows * slots <= 4 * count else 16
    ordered, blocks = hopper.prepare(x_TD, experts_TA, count, size, fp8=fp8)
    hidden = x_TD.new_empty(rows * slots, inner)
    each = x_TD.new_empty(rows * slots, dims, dtype=torch.float32)
    for source, matrices, target, gated in (
        (ordered, gate_up, hidden, True),
        (hidden, down, each, False),
    ):
        hopper.stream[(target.shape[1] // (64 if gated else 128), len(blocks.expert_B))](
            source,
            *matrices,
            *blocks,
            shares_TA,
            target,
            limit,
            ROWS=matrices.codes.shape[1],
            DIMS=source.shape[1],
            FAN=slots if gated else 1,
            GATED=gated,
            FP8=fp8,
            N=size,
            STAGES=2,
            num_warps=4,
            maxnreg=128,  # four programs a multiprocessor
        )
    return each


def _multiply_each(
    x_TD: Tensor,
    experts_TA: Tensor,
    shares_TA: Tensor,
    gate_up: Fp4Matrices,
    down: Fp4Matrices,
    limit: float,
    fp8: bool,
    tiles: Tiles,
) -> Tensor:
    """float32 [T * A, D]: each assignment's part."""
    rows, slots = experts_TA.shape
    count, dims, inner = len(gate_up.codes), x_TD.shape[1], gate_up.codes.shape[1] // 2
    assert inner % tiles.out == dims % tiles.out == 0
    blocks = blocks_of(experts_TA, count, tiles.rows)
    hidden = x_TD.new_empty(rows * slots, inner)
    each = x_TD.new_empty(rows * slots, dims, dtype=torch.float32)
    for source, matrices, target, gated in (
        (x_TD, gate_up, hidden, True),
        (hidden, down, each, False),
    ):
        rounded = fp8_rounded_rows(source) if fp8 else source
        _multiply[(target.shape[1] // tiles.out, len(blocks.expert_B))](
            rounded.contiguous().view(torch.int32),
            *matrices,
            *blocks,
            shares_TA,
            target,
            limit,
            ROWS=matrices.codes.shape[1],
            DIMS=source.shape[1],
            FAN=slots if gated else 1,
            GATED=gated,
            OUT=tiles.out,
            M=tiles.rows,
            PAIRS=tiles.pairs,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
    return each
