"""Rows of bytes and of Engram tables on a GPU.

The forms that kernels/ops/put_rows.py and engram_gather.py run on CUDA tensors; these say what each
computes. Tables may lie in pinned memory of the host: a GPU reads that at its own address.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (kernels are written in Triton's language, which has no annotations)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_quantise import power

# N = rows, b = bytes of a row


@triton.jit
def _copy_rows(
    memory,
    at_N,
    rows,
    NBYTES: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGN: tl.constexpr,
    TAKE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row, or a piece of it, in units of 4 bytes or one."""
    n = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(at_N + n)
    kind: tl.constexpr = tl.int32 if UNIT == 4 else tl.uint8
    there = (memory + tl.multiple_of(at, ALIGN)).to(tl.pointer_type(kind)) + i
    here = (rows + tl.multiple_of(n * NBYTES, ALIGN)).to(tl.pointer_type(kind)) + i
    inside = i < NBYTES // UNIT
    if TAKE:
        tl.store(here, tl.load(there, mask=inside & (at >= 0), other=0), mask=inside)
    else:
        tl.store(there, tl.load(here, mask=inside, other=0), mask=inside & (at >= 0))


def put_rows(memory: Tensor, at_N: Tensor, rows_Nb: Tensor) -> None:
    """As the reference. Rows begin at multiples of the largest power of two, at most 16, in a
    row's size.
    """
    _launch(memory, at_N, rows_Nb.contiguous(), take=False)


def take_rows(memory: Tensor, at_N: Tensor, nbytes: int) -> Tensor:
    """As the reference; rows begin as in put_rows."""
    rows_Nb = torch.empty(len(at_N), nbytes, dtype=torch.uint8, device=memory.device)
    _launch(memory, at_N, rows_Nb, take=True)
    return rows_Nb


def _launch(memory: Tensor, at_N: Tensor, rows_Nb: Tensor, *, take: bool) -> None:
    count, nbytes = rows_Nb.shape
    if not count or not nbytes:
        return
    odd = nbytes | memory.data_ptr() | rows_Nb.data_ptr()
    align = min(16, odd & -odd)
    unit = 4 if align >= 4 else 1
    block = min(2048, triton.next_power_of_2(nbytes // unit))
    _copy_rows[(count, triton.cdiv(nbytes // unit, block))](
        memory,
        at_N.contiguous(),
        rows_Nb,
        NBYTES=nbytes,
        UNIT=unit,
        ALIGN=align,
        TAKE=take,
        BLOCK=block,
        num_warps=max(1, min(4, block // 128)),
    )


# ------------------------------------------------------------------ Engram


@triton.jit
def _gather(
    codes, scales, numbers, out, count, DIM: tl.constexpr, B: tl.constexpr, R: tl.constexpr
):
    """R rows of the table; all of their bytes are asked for at once."""
    n = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    live = (n < count)[:, None]
    row = tl.load(numbers + n, mask=n < count, other=0)[:, None]
    d, g = tl.arange(0, B)[None, :], tl.arange(0, B // 32)[None, :]
    found = tl.load(codes + row * DIM + d, mask=live & (d < DIM), other=0)
    scale = tl.load(scales + row * (DIM // 32) + g, mask=live & (g < DIM // 32), other=127)
    values = tl.reshape(found.to(tl.float8e4nv, bitcast=True).to(tl.float32), (R, B // 32, 32))
    values = tl.reshape(values * power(scale.to(tl.int32) - 127)[:, :, None], (R, B))
    tl.store(out + n[:, None] * DIM + d, values.to(out.dtype.element_ty), mask=live & (d < DIM))


def engram_gather(
    rows_TX: Tensor, codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """As the reference; values that `dtype` holds exactly in bf16 and wider."""
    tokens, each = rows_TX.shape
    size = codes.shape[1]
    out = torch.empty(tokens, each * size, dtype=dtype, device=rows_TX.device)
    count = tokens * each
    if count:
        block = max(32, triton.next_power_of_2(size))
        _gather[(triton.cdiv(count, 4),)](
            codes, scales, rows_TX.contiguous(), out, count, DIM=size, B=block, R=4, num_warps=4
        )
    return out
