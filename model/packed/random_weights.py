"""Made-up weights of any size in seconds, drawn on the device in their stored form.

For measurements and comparisons of kernels: magnitudes are those of model/random_tensors.py, so
that no mechanism saturates, but the values are other ones, and depend on the kind of device. Codes
are drawn as they are, not as roundings of normal values.
"""

from __future__ import annotations

import hashlib
import math
from functools import partial

import torch
from torch import Tensor

from model.catalogue import TensorSpec, catalogue
from model.packed.weights import PackedWeights
from model.random_tensors import mean_and_std
from model.spec import ModelSpec
from model.stored import Stored

_FP8_RMS = 0.78  # of e4m3 codes with exponents from 2 ** -3 to 2 ** 0
_FP4_RMS = 2.93  # of all sixteen e2m1 codes
_BIAS = 127  # of ue8m0


def random_packed(
    spec: ModelSpec, device: torch.device, seed: int = 0, dtype: torch.dtype | None = None
) -> PackedWeights:
    """All tensors of a text model, each made again when it is asked for. The default dtype is what
    a rank computes in on such a device.
    """
    tensors = catalogue(spec, vision=False)
    if dtype is None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return PackedWeights(partial(_stored, tensors, device, seed), tensors, device, dtype)


def _stored(tensors: dict[str, TensorSpec], device: torch.device, seed: int, name: str) -> Stored:
    tensor = tensors[name]
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    draw = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))
    mean, std = mean_and_std(name, tensor)
    if tensor.kind in ("bf16", "f32"):
        values = torch.randn(tensor.shape, generator=draw, device=device) * std + mean
        return Stored(values.bfloat16() if tensor.kind == "bf16" else values)
    out, size = tensor.shape
    rms = _FP4_RMS if tensor.kind == "fp4" else _FP8_RMS
    exponent = round(math.log2(std / rms)) + _BIAS
    groups = -(-size // 32)
    rows = -(-out // 32) if tensor.kind == "fp8" else out
    scales = torch.full((rows, groups), exponent, dtype=torch.uint8, device=device)
    scales += _bytes((rows, groups), 2, draw)  # neighbouring scales differ
    if tensor.kind == "fp4":
        return _as_stored(_bytes((out, size // 2), 256, draw), torch.int8, scales)
    codes = _bytes((out, size), 32, draw) + 32  # sign and exponents follow
    codes |= _bytes((out, size), 2, draw) << 7
    if tensor.kind == "fp8_rows":  # tables stay on the host, whatever the device
        codes, scales = codes.cpu(), scales.cpu()
    return _as_stored(codes, torch.float8_e4m3fn, scales)


def _as_stored(codes: Tensor, kind: torch.dtype, scales: Tensor) -> Stored:
    return Stored(codes.view(kind), scales.view(torch.float8_e8m0fnu))


def _bytes(shape: tuple[int, int], below: int, draw: torch.Generator) -> Tensor:
    return torch.randint(below, shape, generator=draw, device=draw.device, dtype=torch.uint8)
