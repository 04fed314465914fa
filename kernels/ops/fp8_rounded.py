"""What a linear layer with FP8 inputs reads: rows rounded as the row format "fp8" rounds."""

from __future__ import annotations

from torch import Tensor

from kernels.formats import fake_quant
from kernels.op import Op


# ... = any leading dimensions, D = width, a multiple of 32
def _fp8_rounded(x_D: Tensor) -> Tensor:
    """[..., D], contiguous, in the dtype of x."""
    return fake_quant(x_D, "fp8")


fp8_rounded = Op("fp8_rounded", _fp8_rounded, cuda="kernels.triton_quantise:fp8_rounded_rows")
