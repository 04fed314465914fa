"""Packed values into bf16 within Triton kernels, two at a time in one register.

Every e4m3 and e2m1 value is a bf16 number with other leading exponent bits: put its bits in the
right places and it is too small by a fixed power of two, which its scale makes good. Pairs of dims
stand in one word, so both halves, even and odd dims, come out of one load.
Source: the number formats of kernels/formats.py.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (kernels are written in Triton's language, which has no annotations)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bf16(bits):
    """The number that 16 bits stand for; whole numbers are 32 bits wide after some sums."""
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def power_of(exponents):
    """2 ** exponents for integers from -126 to 127."""
    return bf16((exponents + 127) << 7)


@triton.jit
def spread(scales, PER: tl.constexpr):
    """[N, G] to [N, G * PER]: each scale for the PER pairs of its group."""
    N: tl.constexpr = scales.shape[0]
    G: tl.constexpr = scales.shape[1]
    return tl.reshape(tl.broadcast_to(scales[:, :, None], (N, G, PER)), (N, G * PER))


@triton.jit
def fp8_halves(words, factors):
    """Two e4m3 in each int16 word, times 2 ** -120 and their factors: even dims, odd dims."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 s, m, o, p;
        shl.b32 s, $2, 8;
        shl.b32 m, $2, 4;
        and.b32 m, m, 0x07F007F0;
        lop3.b32 m, s, 0x80008000, m, 0xEA;
        shr.b32 p, $2, 4;
        and.b32 p, p, 0x07F007F0;
        lop3.b32 o, $2, 0x80008000, p, 0xEA;
        mul.rn.bf16x2 $0, m, $3;
        mul.rn.bf16x2 $1, o, $3;
        }""",
        "=r,=r,r,r",
        [words, factors],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def fp4_halves(codes, factors):
    """Two e2m1 in each byte, times 2 ** -126 and their factors: even dims, odd dims."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 t, u, s, m;
        prmt.b32 t, $4, 0, 0x4140;
        prmt.b32 u, $4, 0, 0x4342;
        shl.b32 s, t, 12;
        shl.b32 m, t, 6;
        and.b32 m, m, 0x01C001C0;
        lop3.b32 m, s, 0x80008000, m, 0xEA;
        mul.rn.bf16x2 $0, m, $5;
        shl.b32 s, u, 12;
        shl.b32 m, u, 6;
        and.b32 m, m, 0x01C001C0;
        lop3.b32 m, s, 0x80008000, m, 0xEA;
        mul.rn.bf16x2 $1, m, $6;
        shl.b32 s, t, 8;
        shl.b32 m, t, 2;
        and.b32 m, m, 0x01C001C0;
        lop3.b32 m, s, 0x80008000, m, 0xEA;
        mul.rn.bf16x2 $2, m, $5;
        shl.b32 s, u, 8;
        shl.b32 m, u, 2;
        and.b32 m, m, 0x01C001C0;
        lop3.b32 m, s, 0x80008000, m, 0xEA;
        mul.rn.bf16x2 $3, m, $6;
        }""",
        "=r,=r,=r,=r,r,r,r",
        [codes, factors],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )
