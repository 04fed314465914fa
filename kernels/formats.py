"""Number formats on tensors: cached rows, activations and weights in FP8 and FP4.

Everything rounds to nearest even and is exact bit arithmetic on float32, so a row gives the same
bytes alone and in any batch. Knows nothing of caches or checkpoint files.

Row formats (the names in model/state.py), data bytes first, then scale bytes:
  fp8       e4m3, one ue8m0 scale per 32 values     window rows, activations
  fp4       e2m1, one ue8m0 scale per 32 values     index keys and queries, expert weights
  fp4_e4m3  e2m1, one e4m3 scale per 16 values      compressed rows
  f32       the four bytes of each value            the compressor's open pair

A ue8m0 byte c stands for 2 ** (c - 127). Of two e2m1 codes in a byte the low nibble comes first.
Source: number formats of the DeepSeek-V4.1-Flash checkpoint and of its official kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels import formats_cpu

E4M3_MAX = 448.0
E2M1_MAX = 6.0
_SMALLEST_FP8_AMAX = 1e-4  # floors of a group's largest magnitude, part of each format
_SMALLEST_FP4_AMAX = 6.0 * 2.0**-126
_SMALLEST_FP4_E4M3_AMAX = 6.0 * 2.0**-9
_EXPONENT = 0x7F800000


class Encoded(NamedTuple):
    """A quantised matrix as stored: data bytes and scale bytes."""

    codes: Tensor  # uint8
    scales: Tensor  # uint8


# ------------------------------------------------------------------ rows


def fake_quant(values: Tensor, row_format: str) -> Tensor:
    """Quantise [..., dim] and come back; the gradient passes straight through."""
    if row_format == "f32":
        return values
    exact = values.detach()
    if exact.is_cpu and exact.dtype == torch.float32:
        rounded = formats_cpu.fake_quant(exact, row_format)
    else:
        rounded = _rounded(exact, row_format)
    if torch.is_grad_enabled() and values.requires_grad:
        return values + (rounded - exact)
    return rounded


def pack(values: Tensor, row_format: str) -> Tensor:
    """[..., dim] -> uint8 [..., row_bytes]. dim is a multiple of the format's group."""
    values = values.detach().float().contiguous()
    if row_format == "f32":
        return values.view(torch.uint8)
    if values.is_cpu:
        return formats_cpu.pack(values, row_format)
    encoded = _encode_rows(values, row_format)
    return torch.cat([encoded.codes, encoded.scales], -1)


def unpack(packed: Tensor, row_format: str, dim: int) -> Tensor:
    """uint8 [..., row_bytes] -> float32 [..., dim]: the values that fake_quant gave."""
    if row_format == "f32":
        return packed.contiguous().view(torch.float32)
    if packed.is_cpu:
        return formats_cpu.unpack(packed, row_format, dim)
    data = dim if row_format == "fp8" else dim // 2
    codes, scales = packed[..., :data], packed[..., data:]
    if row_format == "fp8":
        return _scaled(decode_e4m3(codes), decode_ue8m0(scales), 32)
    if row_format == "fp4":
        return _scaled(decode_e2m1(codes), decode_ue8m0(scales), 32)
    if row_format == "fp4_e4m3":
        return _scaled(decode_e2m1(codes), decode_e4m3(scales), 16)
    raise ValueError(f"unknown row format {row_format!r}")


def _rounded(values: Tensor, row_format: str) -> Tensor:
    exact = values.float()
    match row_format:
        case "fp8":
            grouped = _grouped(exact, 32)
            scale = _fp8_exponents(_amax(grouped))
            rounded = _round_to_step(grouped, scale - 6, 3)
        case "fp4":
            grouped = _grouped(exact, 32)
            scale = _fp4_exponents(_amax(grouped))
            rounded = _round_to_step(grouped, scale, 1)
        case "fp4_e4m3":
            grouped = _grouped(exact, 16)
            scales = _fp4_e4m3_scales(_amax(grouped))
            rounded = _round_e2m1(grouped / scales) * scales
        case _:
            raise ValueError(f"unknown row format {row_format!r}")
    return rounded.view(values.shape).to(values.dtype)


def _encode_rows(values: Tensor, row_format: str) -> Encoded:
    match row_format:
        case "fp8":
            grouped = _grouped(values, 32)
            exponents = _fp8_exponents(_amax(grouped))
            codes = encode_e4m3(grouped * _power_of_two(-exponents))
            scales = _exponent_bytes(exponents)
        case "fp4":
            grouped = _grouped(values, 32)
            exponents = _fp4_exponents(_amax(grouped))
            codes = encode_e2m1(grouped * _power_of_two(-exponents))
            scales = _exponent_bytes(exponents)
        case "fp4_e4m3":
            grouped = _grouped(values, 16)
            steps = _fp4_e4m3_scales(_amax(grouped))
            codes, scales = encode_e2m1(grouped / steps), encode_e4m3(steps)
        case _:
            raise ValueError(f"unknown row format {row_format!r}")
    return Encoded(codes.flatten(-2), scales.squeeze(-1))


# ------------------------------------------------------------------ weights


def encode_fp8_blocks(weight: Tensor) -> Encoded:
    """[out, in] -> e4m3 codes [out, in], ue8m0 scales [ceil(out/32), ceil(in/32)]."""
    out, width = weight.shape
    weight = weight.float()
    whole = torch.nn.functional.pad(weight, (0, -width % 32, 0, -out % 32))
    blocks = whole.abs().view(whole.shape[0] // 32, 32, whole.shape[1] // 32, 32)
    exponents = _fp8_exponents(blocks.amax((1, 3)))
    scaled = weight * _spread_blocks(_power_of_two(-exponents), out, width)
    return Encoded(encode_e4m3(scaled), _exponent_bytes(exponents))


def decode_fp8_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """The float32 matrix [out, in] of encode_fp8_blocks."""
    return decode_e4m3(codes) * _spread_blocks(decode_ue8m0(scales), *codes.shape)


def encode_fp8_rows(table: Tensor) -> Encoded:
    """[rows, dim] -> e4m3 codes [rows, dim], ue8m0 scales [rows, dim/32]: Engram tables."""
    return _encode_rows(table.float(), "fp8")


def decode_fp8_rows(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes [..., dim] and scales [..., dim/32] -> float32 [..., dim]."""
    return _scaled(decode_e4m3(codes), decode_ue8m0(scales), 32)


def encode_fp4_rows(weight: Tensor) -> Encoded:
    """[out, in] -> packed e2m1 codes [out, in/2], ue8m0 scales [out, in/32]: expert weights."""
    return _encode_rows(weight.float(), "fp4")


def decode_fp4_rows(codes: Tensor, scales: Tensor) -> Tensor:
    """Packed codes [..., in/2] and scales [..., in/32] -> float32 [..., in]."""
    return _scaled(decode_e2m1(codes), decode_ue8m0(scales), 32)


# ------------------------------------------------------------------ codes


def encode_e4m3(values: Tensor) -> Tensor:
    """float32 -> one e4m3 byte each, saturating at 448."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e4m3(codes: Tensor) -> Tensor:
    return _look_up(_E4M3, codes)


def encode_e2m1(values: Tensor) -> Tensor:
    """float32 [..., n] -> packed bytes [..., n/2], saturating at 6."""
    doubled = (_round_e2m1(values).abs() * 2).to(torch.uint8)  # 0 1 2 3 4 6 8 12
    magnitudes = _look_up(_E2M1_CODE, doubled)
    nibbles = magnitudes | (torch.signbit(values).to(torch.uint8) << 3)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def decode_e2m1(codes: Tensor) -> Tensor:
    """Packed bytes [..., n] -> float32 [..., 2n]."""
    return _look_up(_E2M1_PAIR, codes).view(torch.float32)


def decode_ue8m0(codes: Tensor) -> Tensor:
    """Byte c -> 2 ** (c - 127); 255 is NaN."""
    return _look_up(_UE8M0, codes)


def _look_up(table: Tensor, codes: Tensor) -> Tensor:
    """table[codes], by what is several times faster on a CPU."""
    index = codes.reshape(-1).to(torch.int32)
    return table.to(codes.device).index_select(0, index).view(codes.shape)


def _pair_table() -> Tensor:
    """Both float32 values of each byte of two e2m1 codes, side by side in one 8-byte item."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([magnitudes, -magnitudes])
    low, high = values.repeat(16), values.repeat_interleave(16)
    return torch.stack([low, high], -1).view(torch.int64).flatten()


_BYTES = torch.arange(256, dtype=torch.int16).to(torch.uint8)
_E4M3 = _BYTES.view(torch.float8_e4m3fn).float()
_UE8M0 = _BYTES.view(torch.float8_e8m0fnu).float()
_E2M1_PAIR = _pair_table()
_E2M1_CODE = torch.tensor([0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7], dtype=torch.uint8)


# ------------------------------------------------------------------ rounding and scales


def _round_to_step(values: Tensor, smallest: Tensor | int, mantissa_bits: int) -> Tensor:
    """Nearest multiple, ties to even, of each value's own step; zeros keep their sign.

    Below the exponent `smallest` the step no longer shrinks. Adding and subtracting 1.5 * 2**23
    steps makes the rounding of the addition do the work.
    """
    exponents = values.view(torch.int32) & _EXPONENT
    shift = exponents.clamp(min=(smallest + 127) << 23).view(torch.float32)
    shift = shift * (1.5 * 2.0 ** (23 - mantissa_bits))
    return torch.copysign((values + shift) - shift, values)


def _round_e2m1(values: Tensor) -> Tensor:
    return _round_to_step(values, 0, 1).clamp(-E2M1_MAX, E2M1_MAX)


def _grouped(values: Tensor, size: int) -> Tensor:
    """[..., dim] -> [..., dim / size, size]"""
    if values.shape[-1] % size:
        raise ValueError(f"{values.shape[-1]} values are not whole groups of {size}")
    return values.reshape(*values.shape[:-1], values.shape[-1] // size, size)


def _amax(grouped: Tensor) -> Tensor:
    return grouped.abs().amax(-1, keepdim=True)


def _fp8_exponents(amax: Tensor) -> Tensor:
    """ceil(log2(amax / 448)), int32. 448 = 1.75 * 2**8: a larger mantissa carries over."""
    bits = amax.clamp(min=_SMALLEST_FP8_AMAX).view(torch.int32)
    return ((bits + 0x1FFFFF) >> 23) - (127 + 8)


def _fp4_exponents(amax: Tensor) -> Tensor:
    """ceil(log2(amax / 6)), int32. 6 = 1.5 * 2**2."""
    bits = amax.clamp(min=_SMALLEST_FP4_AMAX).view(torch.int32)
    return ((bits + 0x3FFFFF) >> 23) - (127 + 2)


def _fp4_e4m3_scales(amax: Tensor) -> Tensor:
    """e4m3(amax / 6), as float32."""
    scales = amax.clamp(min=_SMALLEST_FP4_E4M3_AMAX) / E2M1_MAX
    return _round_to_step(scales.clamp(max=E4M3_MAX), -6, 3)


def _power_of_two(exponents: Tensor) -> Tensor:
    """2 ** exponents for exponents in -126 .. 127."""
    return ((exponents + 127) << 23).view(torch.float32)


def _exponent_bytes(exponents: Tensor) -> Tensor:
    return (exponents + 127).to(torch.uint8)


def _scaled(values: Tensor, scales: Tensor, group: int) -> Tensor:
    """[..., dim] times the scale [..., dim / group] of its group."""
    return (_grouped(values, group) * scales.unsqueeze(-1)).view(values.shape)


def _spread_blocks(scales: Tensor, out: int, width: int) -> Tensor:
    return scales.repeat_interleave(32, 0).repeat_interleave(32, 1)[:out, :width]
