"""One tensor as a checkpoint stores it, and the values it stands for.

Knows number formats by their kind (model/catalogue.py) and nothing of files or names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.formats import (
    Encoded,
    decode_fp4_rows,
    decode_fp8_blocks,
    decode_fp8_rows,
    encode_fp4_rows,
    encode_fp8_blocks,
    encode_fp8_rows,
)
from model.catalogue import Kind

TORCH_TYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
}
"""By safetensors type."""

_ENCODE: dict[Kind, Callable[[Tensor], Encoded]] = {
    "fp8": encode_fp8_blocks,
    "fp8_rows": encode_fp8_rows,
    "fp4": encode_fp4_rows,
}
_DECODE: dict[Kind, Callable[[Tensor, Tensor], Tensor]] = {
    "fp8": decode_fp8_blocks,
    "fp8_rows": decode_fp8_rows,
    "fp4": decode_fp4_rows,
}


class Stored(NamedTuple):
    """The tensor as it is, or the codes and scales of a quantised one, in their stored types."""

    tensor: Tensor
    scale: Tensor | None = None

    def rows(self, rows: Tensor) -> Stored:
        """Some rows of a matrix whose scales belong to single rows."""
        assert self.scale is not None
        return Stored(self.tensor[rows], self.scale[rows])


def encode(values: Tensor, kind: Kind) -> Stored:
    """Float values to their stored form, rounded to nearest."""
    if kind == "f32":
        return Stored(values.float())
    if kind == "bf16":
        return Stored(values.bfloat16())
    codes, scales = _ENCODE[kind](values)
    data_type = torch.int8 if kind == "fp4" else torch.float8_e4m3fn
    return Stored(codes.view(data_type), scales.view(torch.float8_e8m0fnu))


def decode(stored: Stored, kind: Kind) -> Tensor:
    """The float32 values that a stored tensor stands for; exact."""
    if stored.scale is None:
        return stored.tensor.float()
    return _DECODE[kind](stored.tensor.view(torch.uint8), stored.scale.view(torch.uint8))
