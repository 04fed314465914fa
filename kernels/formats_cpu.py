"""The row formats in NumPy: what kernels/formats.py computes, for CPU tensors, and faster.

Rows of a decode step are small, and there a NumPy call costs a fifth of a torch call. Works on the
bits of float32; equal to the torch form byte for byte, which a test holds it to.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]

_EXPONENT = 0x7F800000
_SIGN = np.int32(-(2**31))


class _PowerScaled(NamedTuple):
    """A format whose scale is the smallest power of two that fits a group's largest magnitude."""

    carry: int  # added to the bits of amax, carries where its mantissa exceeds the largest code's
    top: int  # exponent of the largest code
    smallest: int  # exponent below which steps no longer shrink, with scale 1
    mantissa: int  # bits of a code
    floor: int  # bits of the smallest amax


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


_FP8 = _PowerScaled(0x1FFFFF, 8, -6, 3, _bits(1e-4))  # 448 = 1.75 * 2**8
_FP4 = _PowerScaled(0x3FFFFF, 2, 0, 1, _bits(6 * 2.0**-126))  # 6 = 1.5 * 2**2


def fake_quant(values: Tensor, row_format: str) -> Tensor:
    """float32 [..., dim] on the CPU -> the same, rounded."""
    bits = _grouped(values, row_format)
    if row_format == "fp4_e4m3":
        scales = _e4m3_scales(bits)
        rounded = _saturated_e2m1(bits.view(np.float32) / scales) * scales
    else:
        form = _FP8 if row_format == "fp8" else _FP4
        scale_bits = _scale_bits(bits, form)
        rounded = _round(bits, scale_bits + (form.smallest << 23), form.mantissa)
    return torch.from_numpy(rounded.reshape(values.shape))


def pack(values: Tensor, row_format: str) -> Tensor:
    """float32 [..., dim] on the CPU -> uint8 [..., row_bytes]."""
    bits = _grouped(values, row_format)
    if row_format == "fp4_e4m3":
        steps = _e4m3_scales(bits)
        scales = _e4m3_codes(steps)
        codes = _e2m1_codes(_saturated_e2m1(bits.view(np.float32) / steps))
    else:
        form = _FP8 if row_format == "fp8" else _FP4
        scale_bits = _scale_bits(bits, form)
        scales = (scale_bits >> 23).astype(np.uint8)
        inverse = (np.int32(254 << 23) - scale_bits).view(np.float32)
        smallest = np.int32((form.smallest + 127) << 23)
        scaled = _round((bits.view(np.float32) * inverse).view(np.int32), smallest, form.mantissa)
        codes = _e4m3_codes(scaled) if row_format == "fp8" else _e2m1_codes(scaled)
    rows, groups = values.shape[:-1], bits.shape[-2]
    data = codes.reshape(*rows, groups * codes.shape[-1])
    return torch.from_numpy(np.concatenate([data, scales.reshape(*rows, groups)], -1))


def unpack(packed: Tensor, row_format: str, dim: int) -> Tensor:
    """uint8 [..., row_bytes] on the CPU -> float32 [..., dim]."""
    data = packed.numpy()
    shape = data.shape[:-1]
    if row_format == "fp8":
        values, group = _E4M3.take(data[..., :dim]), 32
    else:
        pairs = _E2M1_PAIRS.take(data[..., : dim // 2])
        values, group = pairs.view(np.float32), 32 if row_format == "fp4" else 16
    table = _E4M3 if row_format == "fp4_e4m3" else _UE8M0
    scales = table.take(data[..., -(dim // group) :])
    grouped = values.reshape(*shape, dim // group, group)
    return torch.from_numpy((grouped * scales[..., None]).reshape(*shape, dim))


def _grouped(values: Tensor, row_format: str) -> Ints:
    """Bits [..., dim / group, group]."""
    group = 16 if row_format == "fp4_e4m3" else 32
    if values.shape[-1] % group:
        raise ValueError(f"{values.shape[-1]} values are not whole groups of {group}")
    array = np.ascontiguousarray(values.numpy())
    return array.view(np.int32).reshape(*array.shape[:-1], array.shape[-1] // group, group)


def _amax_bits(bits: Ints) -> Ints:
    """Bits of the largest magnitude of each group [..., 1]; over so short an axis torch reduces
    several times as fast as NumPy.
    """
    largest: Ints = torch.from_numpy(bits.view(np.float32)).abs().amax(-1, keepdim=True).numpy()
    return largest.view(np.int32)


def _scale_bits(bits: Ints, form: _PowerScaled) -> Ints:
    """Bits of the power of two that is each group's scale [..., 1]."""
    amax = np.maximum(_amax_bits(bits), np.int32(form.floor))
    return ((amax + form.carry) & _EXPONENT) - (form.top << 23)


def _e4m3_scales(bits: Ints) -> Floats:
    amax = np.maximum(_amax_bits(bits).view(np.float32), np.float32(6 * 2.0**-9))
    scales = np.minimum(amax / np.float32(6), np.float32(448))
    return _round(scales.view(np.int32), np.int32((-6 + 127) << 23), 3)


def _saturated_e2m1(values: Floats) -> Floats:
    rounded = _round(values.view(np.int32), np.int32(127 << 23), 1)
    return np.clip(rounded, np.float32(-6), np.float32(6))


def _round(bits: Ints, smallest: Ints | np.int32, mantissa: int) -> Floats:
    """To the nearest multiple of each value's own step, ties to even; see kernels/formats.py.

    `smallest`: bits of the power of two below which steps no longer shrink.
    """
    work = bits & _EXPONENT
    np.maximum(work, smallest, out=work)
    work += (23 - mantissa) << 23 | 0x400000
    rounded: Floats = bits.view(np.float32) + work.view(np.float32)
    rounded -= work.view(np.float32)
    signed = rounded.view(np.int32)
    signed |= np.bitwise_and(bits, _SIGN, out=work)  # zeros keep theirs
    return rounded


def _e4m3_codes(values: Floats) -> Bytes:
    """Codes of values that e4m3 has: its bits are the top of a float32's, in another range."""
    bits = (values * np.float32(2.0**-120)).view(np.int32)
    codes: Bytes = (bits >> 20 & 0x7F | bits >> 24 & 0x80).astype(np.uint8)
    return codes


def _e2m1_codes(values: Floats) -> Bytes:
    """Packed codes of values that e2m1 has."""
    bits = (values * np.float32(2.0**-126)).view(np.int32)
    nibbles: Bytes = (bits >> 22 & 0x7 | bits >> 28 & 0x8).astype(np.uint8)
    packed: Bytes = np.bitwise_or(nibbles[..., 0::2], nibbles[..., 1::2] << 4)
    return packed


def _tables() -> tuple[Floats, Floats, npt.NDArray[np.int64]]:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.concatenate([magnitudes, -magnitudes])
    pairs = np.stack([np.tile(values, 16), values.repeat(16)], -1)
    return (
        codes.view(torch.float8_e4m3fn).float().numpy(),
        codes.view(torch.float8_e8m0fnu).float().numpy(),
        pairs.view(np.int64).ravel(),
    )


_E4M3, _UE8M0, _E2M1_PAIRS = _tables()
