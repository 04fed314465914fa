"""Random weights that exercise the whole architecture, for tests and demonstrations.

A tensor depends on the seed and its own name only, so every rank makes the same ones in any
order. The spreads make each mechanism count - attention picks, biases decide, clamps are reached,
norm weights differ from 1 - while a sublayer adds to the streams gently: otherwise a random
network amplifies every rounding into noise. They say nothing about trained weights.
"""

from __future__ import annotations

import hashlib
import math
from fnmatch import fnmatchcase
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from model.catalogue import TensorSpec
from model.stored import Stored, encode


class Spread(NamedTuple):
    """Normal values; with `fan_in`, `std` is that of the product with a vector of unit values."""

    std: float
    mean: float = 0.0
    fan_in: bool = False


# The first pattern that fits a name holds.
_SPREADS: tuple[tuple[str, Spread], ...] = (
    ("*norm*.weight", Spread(0.1, mean=1.0)),
    ("*.engram.[qk]_weight", Spread(0.1, mean=1.0)),
    ("*.hc_*_scale", Spread(0.1, mean=0.8)),
    ("*.hc_*_base", Spread(0.3)),
    ("*.attn_sink", Spread(1.0)),
    ("*.bias*", Spread(0.1)),
    ("image_*", Spread(1.0)),
    ("*embed.weight", Spread(1.0)),
    ("*.engram.embed", Spread(1.0)),
    ("head.weight", Spread(4.0, fan_in=True)),  # answers that top-p and top-k can narrow
    ("*.wq_b", Spread(1.5, fan_in=True)),
    ("*.wgate.weight", Spread(1.5, fan_in=True)),
    ("*.wo_b", Spread(0.25, fan_in=True)),
    ("*.w2", Spread(0.25, fan_in=True)),
    ("*.engram.wkv", Spread(0.25, fan_in=True)),
    ("*", Spread(1.0, fan_in=True)),
)
_LOUD = 16  # each 16th neuron of an expert is loud enough to reach the activation's clamps ...
_LOUDNESS = 8.0
_HUSH = 0.1  # ... and is turned down after them, so that the others count as well


def random_stored(name: str, tensor: TensorSpec, seed: int) -> Stored:
    """One tensor in its stored form, so that rounding to the format has already happened."""
    return encode(_values(name, tensor, seed), tensor.kind)


def _values(name: str, tensor: TensorSpec, seed: int) -> Tensor:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    # NumPy, not torch: its normal values do not depend on the CPU's vector instructions.
    noise = np.random.default_rng(int.from_bytes(digest[:16], "big")).standard_normal(
        tensor.shape, dtype=np.float32
    )
    mean, std = mean_and_std(name, tensor)
    values = torch.from_numpy(noise).mul_(std).add_(mean)
    if name.endswith((".w1", ".w3")):
        values[::_LOUD] *= _LOUDNESS
    elif name.endswith(".w2"):
        values[:, ::_LOUD] *= _HUSH
    return values


def mean_and_std(name: str, tensor: TensorSpec) -> tuple[float, float]:
    """Of a tensor's values, by its name."""
    spread = next(spread for pattern, spread in _SPREADS if fnmatchcase(name, pattern))
    std = spread.std / math.sqrt(tensor.shape[-1]) if spread.fan_in else spread.std
    return spread.mean, std
