"""Packed rows into bf16 by four warps, in Gluon: into tiles in shared memory, or left operands.

Values are unpacked a word of eight at a time: dims k and k + 4 of every eight come out as one pair
(k = 0 .. 3). So dims stand in the order 0 4 1 5 2 6 3 7 in a tile of rows of 512, and in
`word_order` in a left operand: what it is multiplied by must stand so too. Gluon is Triton's lower
level, which names the register and the place in shared memory of every value.
Source: the number formats of kernels/formats.py.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (kernels are written in Triton's language, which has no annotations)

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# N = 32 rows, C = 16 chunks of 32 dims

# a thread has 32 dims of a row; neighbours have neighbouring rows, so that no two of the eight
# that write at a time meet in one bank of the swizzled tile
WORDS4 = gl.constexpr(gl.BlockedLayout([1, 1, 4], [8, 4, 1], [1, 4, 1], [2, 0, 1]))
WORDS8 = gl.constexpr(gl.BlockedLayout([1, 1, 8], [8, 4, 1], [1, 4, 1], [2, 0, 1]))
ROWS = gl.constexpr(32)
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # its name since Triton 3.7


# ------------------------------------------------------------------ unpacking a word


def _pairs_of_fp4() -> str:
    """PTX: four words of e2m1 ($16-$19), two e4m3 scales ($20) -> 16 pairs, word by word in k.

    A value's bits, put in their bf16 places, are 2 ** -126 of it; steps of up to 448 would
    overflow with all of 2 ** 126, so 2 ** 118 is made good here.
    """
    lines = [
        ".reg .b32 f, low, high, s, m;",
        "prmt.b32 f, $20, 0, 0x4140;",
        "shl.b32 f, f, 4;",
        "mov.b32 s, 0x7B007B00;",  # 2 ** 119, twice
        "mul.rn.bf16x2 f, f, s;",
        "mul.rn.bf16x2 f, f, s;",
        "prmt.b32 low, f, 0, 0x1010;",
        "prmt.b32 high, f, 0, 0x3232;",
    ]
    for word in range(4):
        code, scale = f"${16 + word}", "low" if word < 2 else "high"
        for k, (sign, magnitude) in enumerate(((12, 6), (8, 2), (4, -2), (0, -6))):
            direction = "shl" if magnitude > 0 else "shr"
            lines += [
                f"shl.b32 s, {code}, {sign};",
                f"{direction}.b32 m, {code}, {abs(magnitude)};",
                "and.b32 m, m, 0x01C001C0;",
                "lop3.b32 m, s, 0x80008000, m, 0xEA;",
                f"mul.rn.bf16x2 ${4 * k + word}, m, {scale};",
            ]
    return "\n".join(["{", *lines, "}"])


def _pairs_of_fp8() -> str:
    """PTX: two words of e4m3 ($4, $5), a power of two twice ($6) -> pairs k = 0, 2 ($0, $1) and
    k = 1, 3 ($2, $3). Bits in their bf16 places are 2 ** -120 of a value.
    """
    lines = [".reg .b32 x, s, m;"]
    for bytes_, even, odd in (("0x5410", "$0", "$2"), ("0x7632", "$1", "$3")):
        lines += [
            f"prmt.b32 x, $4, $5, {bytes_};",
            "shl.b32 s, x, 8;",
            "shl.b32 m, x, 4;",
            "and.b32 m, m, 0x07F007F0;",
            "lop3.b32 m, s, 0x80008000, m, 0xEA;",
            f"mul.rn.bf16x2 {even}, m, $6;",
            "shr.b32 m, x, 4;",
            "and.b32 m, m, 0x07F007F0;",
            "lop3.b32 m, x, 0x80008000, m, 0xEA;",
            f"mul.rn.bf16x2 {odd}, m, $6;",
        ]
    return "\n".join(["{", *lines, "}"])


_FP4 = gl.constexpr(_pairs_of_fp4())
_FP4_REGISTERS = gl.constexpr(",".join(["=r"] * 16 + ["r"] * 8))
_FP8 = gl.constexpr(_pairs_of_fp8())
_FP8_REGISTERS = gl.constexpr("=r,=r,=r,=r,r,r,r,r")


# ------------------------------------------------------------------ reading and writing


@gluon.jit
def read(memory, at_N, WORDS: gl.constexpr, LAYOUT: gl.constexpr):
    """Codes [N, C, WORDS] of 4 bytes and scales [N, C] of the rows at those bytes of `memory`.

    4 words of FP4 or 8 of FP8; zeros where a row is -1. An FP4 chunk has two scales of a byte.
    """
    live_N1 = gl.expand_dims(at_N >= 0, 1)
    row_N1 = gl.expand_dims(memory + gl.multiple_of(gl.maximum(at_N, 0), 16), 1)
    chunk = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    chunk_1C = gl.expand_dims(chunk, 0)
    within = gl.expand_dims(chunk_1C * WORDS, 2) + gl.expand_dims(gl.expand_dims(word, 0), 1)
    words = gl.expand_dims(row_N1.to(gl.pointer_type(gl.int32)), 2) + within
    codes = gl.load(words, mask=gl.expand_dims(live_N1, 2), other=0)
    if WORDS == 4:
        scales_at = (row_N1 + 64 * WORDS).to(gl.pointer_type(gl.uint16)) + chunk_1C
    else:
        scales_at = row_N1 + 64 * WORDS + chunk_1C
    return codes, gl.load(scales_at, mask=live_N1, other=0).to(gl.int32)


@gluon.jit
def write_fp4(tile, codes, scales):
    """FP4 rows with an e4m3 scale per 16 dims, all times 2 ** -8."""
    codes, scales = gl.broadcast(codes, gl.expand_dims(scales, 2))
    k0, k1, k2, k3 = gl.inline_asm_elementwise(
        _FP4,
        _FP4_REGISTERS,
        [codes, scales],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=4,
    )
    pairs = gl.join(gl.join(k0, k2), gl.join(k1, k3))
    tile.store(gl.reshape(pairs, [ROWS, 256]))


@gluon.jit
def write_fp8(tile, codes, scales):
    """FP8 rows with a power of two per 32 dims."""
    powers = gl.minimum(scales - 127 + 120 + 127, 254) << 7
    codes, powers = gl.broadcast(codes, gl.expand_dims(powers | (powers << 16), 2))
    k02, k13 = gl.inline_asm_elementwise(
        _FP8, _FP8_REGISTERS, [codes, powers], dtype=(gl.int32, gl.int32), is_pure=True, pack=2
    )
    tile.store(gl.reshape(gl.join(k02, k13), [ROWS, 256]))


# ------------------------------------------------------------------ left operands


@triton.jit
def word_order(d):
    """Where dim d of every 32 stands: the word of dims 8t .. 8t + 7 gives pairs (8t + q, 8t + q +
    4), and each product of 16 dims takes two pairs from each of four threads.
    """
    q = d % 4
    return d // 32 * 32 + q // 2 * 16 + q % 2 * 8 + d % 32 // 8 * 2 + d % 8 // 4


@triton.jit
def dim_in_word_order(k):
    """Which dim stands at place k."""
    return k // 32 * 32 + k % 8 // 2 * 8 + k % 32 // 16 * 2 + k % 16 // 8 + k % 2 * 4


def _pairs_of_word() -> str:
    """PTX: a word of e2m1 ($4) times a power of two, twice ($5) -> its pairs q = 0 .. 3.

    One multiplication moves a sign and a magnitude to their places in bf16, 2 ** -126 of a value.
    """
    lines = [".reg .b32 w, t;", "shr.b32 w, $4, 8;"]
    for q in range(4):
        word, (mask, shifts) = (
            ("$4", "w")[q // 2],
            (("0x000F000F", "0x1040"), ("0x00F000F0", "0x104"))[q % 2],
        )
        lines += [
            f"and.b32 t, {word}, {mask};",
            f"mul.lo.u32 t, t, {shifts};",
            "and.b32 t, t, 0x81C081C0;",
            f"mul.rn.bf16x2 ${q}, t, $5;",
        ]
    return "\n".join(["{", *lines, "}"])


_WORD = gl.constexpr(_pairs_of_word())


@gluon.constexpr_function
def left_bytes(groups):
    """Of codes [64, 16 * groups] as threads have them in a left operand: four bytes at a time.

    There are 1, 2, 4 or 8 groups.
    """
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], *([0, 16 * bit] for bit in (1, 2, 4) if bit < groups)],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 16 * groups],
    )


@gluon.constexpr_function
def left_scales(groups):
    """Of scales [64, groups], where the codes of their groups are."""
    return gl.DistributedLinearLayout(
        [*([0, bit] for bit in (1, 2, 4) if bit < groups), [8, 0]],
        [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, groups],
    )


@gluon.constexpr_function
def _left_groups(groups):
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [8, 0, 0], *([0, bit, 0] for bit in (1, 2, 4) if bit < groups)],
        [[0, 0, 4], [0, 0, 8], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, groups, 16],
    )


@gluon.jit
def unpack_left(codes, scales, GROUPS: gl.constexpr, PRODUCT: gl.constexpr):
    """The left operand [64, 32 * GROUPS] of FP4 codes and the ue8m0 scales of their groups, which
    are at most 2: their powers times 2 ** 126 must fit bf16.
    """
    layout: gl.constexpr = _left_groups(GROUPS)
    codes = gl.convert_layout(gl.reshape(codes, [64, GROUPS, 16]), layout, assert_trivial=True)
    powers = (scales.to(gl.int32) - 127 + 126 + 127) * 0x00800080
    powers = gl.convert_layout(powers, gl.SliceLayout(2, layout), assert_trivial=True)
    codes, powers = gl.broadcast(codes, gl.expand_dims(powers, 2))
    low, high = gl.inline_asm_elementwise(
        _WORD,
        "=r,=r,=r,=r,r,r,r,r,r",
        [codes, powers],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )
    # group, thread, q % 2, which of a pair, q // 2 -> group, q // 2, q % 2, thread, which
    pairs = gl.reshape(gl.join(low, high), [64, GROUPS, 4, 2, 2, 2])
    pairs = gl.reshape(gl.permute(pairs, [0, 1, 5, 3, 2, 4]), [64, 32 * GROUPS])
    return gl.convert_layout(pairs, gl.DotOperandLayout(0, PRODUCT, 2), assert_trivial=True)
