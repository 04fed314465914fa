"""Weights as the packed forward computes with them: on its device, FP8 and FP4 as they are stored.

On a GPU in bf16 an FP8 matrix stays codes and scales, half the bytes of its values; everywhere
else, where there is no kernel for it, its values in the dtype. Both are exact. Knows no layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.formats import decode_fp8_blocks
from kernels.ops.block_matmul import block_matmul
from kernels.ops.packed_experts import Fp4Matrices
from model.catalogue import TensorSpec
from model.packed.weight_source import Linear
from model.stored import Stored, decode
from model.weights import Weights

logger = logging.getLogger(__name__)

MOST_PINNED = 8 << 30
"""Bytes of one Engram table that are kept in pinned memory, for a GPU to read them by itself. Each
rank has a copy of its own, so a larger one would take a host's memory once a rank."""

_BLOCK = 32  # rows and columns of an FP8 block

# T = rows, N = outputs, K = inputs, g = groups


class BlockLinear:
    """FP8 blocks as they are stored."""

    def __init__(self, codes_NK: Tensor, scales: Tensor) -> None:
        self._codes_NK, self._scales = codes_NK, scales

    def __call__(self, x_TK: Tensor) -> Tensor:
        return block_matmul(x_TK, self._codes_NK, self._scales)


class PlainLinear:
    """Values in the dtype of what they are multiplied with."""

    def __init__(self, weight_NK: Tensor) -> None:
        self._weight_KN = weight_NK.t()

    def __call__(self, x_TK: Tensor) -> Tensor:
        return x_TK @ self._weight_KN


class SideBySide:
    """Outputs of matrices that have no common form."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self._parts = tuple(parts)

    def __call__(self, x_TK: Tensor) -> Tensor:
        return torch.cat([part(x_TK) for part in self._parts], 1)


class EngramTable(NamedTuple):
    """uint8 codes [rows, dim] and scales [rows, dim / 32], where they are: on a host, pinned if a
    GPU may read them, or on the device itself.
    """

    codes: Tensor
    scales: Tensor


ReadStored = Callable[[str], Stored]
"""A tensor as a checkpoint has it, by its logical name; KeyError if it is not there."""


class PackedWeights:
    """Read-only, by logical name; each tensor is read when it is asked for, and not kept here."""

    def __init__(
        self,
        read: ReadStored,
        tensors: Mapping[str, TensorSpec],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.device, self.dtype = device, dtype
        self._read, self._tensors = read, tensors
        self._keeps_codes = device.type == "cuda" and dtype == torch.bfloat16

    @property
    def keeps_codes(self) -> bool:
        """Whether quantised matrices stay as they are stored; else their values are kept."""
        return self._keeps_codes

    def linear(self, *names: str) -> Linear:
        """These matrices side by side, in this order."""
        runs: list[list[str]] = []  # neighbours that one product can take
        for name in names:
            if runs and self._joins(runs[-1][-1], name):
                runs[-1].append(name)
            else:
                runs.append([name])
        parts = [self._product(run) for run in runs]
        return parts[0] if len(parts) == 1 else SideBySide(parts)

    def vector(self, name: str) -> Tensor:
        """Float32, or the dtype if that is wider: norms, sinks, biases, scales."""
        return self._values(name).to(torch.promote_types(torch.float32, self.dtype))

    fp32 = vector  # matrices that the model multiplies in float32

    def matrix(self, name: str) -> Tensor:
        """[out, in] in the dtype."""
        return self._values(name).to(self.dtype)

    def grouped(self, name: str, groups: int) -> Tensor:
        """[g, in, out of a group] in the dtype, of a matrix whose rows belong to groups."""
        weight_NK = self.matrix(name)
        return weight_NK.view(groups, len(weight_NK) // groups, -1).transpose(1, 2).contiguous()

    def experts(self, prefix: str, experts: Sequence[int]) -> tuple[Fp4Matrices, Fp4Matrices]:
        """Gate and up side by side, and down, of these experts, as they are stored."""
        return (
            self._stacked([[f"{prefix}{one}.w1", f"{prefix}{one}.w3"] for one in experts]),
            self._stacked([[f"{prefix}{one}.w2"] for one in experts]),
        )

    def expert(self, name: str) -> tuple[Fp4Matrices, Fp4Matrices]:
        """The same of one expert, by its name without the last part; without the first axis."""
        gate_up = self._stacked([[f"{name}w1", f"{name}w3"]])
        down = self._stacked([[f"{name}w2"]])
        return Fp4Matrices(*(part[0] for part in gate_up)), Fp4Matrices(*(part[0] for part in down))

    def expert_values(self, prefix: str, expert: int) -> tuple[Tensor, Tensor]:
        """The same of one expert as values in the dtype, [in, out]."""
        gate_up = torch.cat([self.matrix(f"{prefix}{expert}.{part}") for part in ("w1", "w3")])
        return gate_up.t().contiguous(), self.matrix(f"{prefix}{expert}.w2").t().contiguous()

    def table(self, name: str) -> EngramTable:
        codes, scales = _bytes_of(self._read(name))
        if self.device.type == "cuda" and codes.device.type == "cpu":
            if codes.nbytes + scales.nbytes <= MOST_PINNED:
                return EngramTable(codes.pin_memory(), scales.pin_memory())
            logger.warning(
                "%s has %.0f GB and is not pinned: the host looks its rows up before each step",
                name,
                codes.nbytes / 1e9,
            )
        return EngramTable(codes, scales)

    # ---------------------------------------------------------------- forms

    def _joins(self, last: str, following: str) -> bool:
        """Whether one product can take both: scales belong to blocks of 32 rows."""
        kinds = {self._tensors[one].kind for one in (last, following)}
        if "fp8" not in kinds or not self._keeps_codes:
            return True
        return kinds == {"fp8"} and self._tensors[last].shape[0] % _BLOCK == 0

    def _product(self, names: Sequence[str]) -> Linear:
        if not self._keeps_codes or self._tensors[names[0]].kind != "fp8":
            return PlainLinear(torch.cat([self.matrix(name) for name in names]))
        stored = [_bytes_of(self._read(name)) for name in names]
        codes_NK = torch.cat([codes.to(self.device) for codes, _ in stored])
        return BlockLinear(codes_NK, torch.cat([scales.to(self.device) for _, scales in stored]))

    def _values(self, name: str) -> Tensor:
        """Float32, decoded on the device: codes are a quarter of the bytes on the way there."""
        kind, stored = self._tensors[name].kind, self._read(name)
        if stored.scale is None:
            return stored.tensor.to(self.device).float()
        codes, scales = _bytes_of(stored)
        if kind == "fp8":
            return decode_fp8_blocks(codes.to(self.device), scales.to(self.device))
        return decode(Stored(codes.to(self.device), scales.to(self.device)), kind)

    def _stacked(self, names: Sequence[Sequence[str]]) -> Fp4Matrices:
        """Of each list the matrices side by side; no second copy of them all is ever made."""
        made: Fp4Matrices | None = None
        for place, parts in enumerate(names):
            stored = [_bytes_of(self._read(part)) for part in parts]
            if made is None:
                rows = sum(len(codes) for codes, _ in stored)
                made = Fp4Matrices(
                    *(
                        torch.empty(
                            len(names), rows, one.shape[1], dtype=torch.uint8, device=self.device
                        )
                        for one in stored[0]
                    )
                )
            first = 0
            for codes, scales in stored:
                stop = first + len(codes)
                made.codes[place, first:stop].copy_(codes)
                made.scales[place, first:stop].copy_(scales)
                first = stop
        assert made is not None, "a layer has experts"
        return made


def from_weights(weights: Weights, device: torch.device, dtype: torch.dtype) -> PackedWeights:
    """Of a checkpoint or of made-up weights that are one."""
    return PackedWeights(weights.stored, weights.specs, device, dtype)


def _bytes_of(stored: Stored) -> tuple[Tensor, Tensor]:
    assert stored.scale is not None
    return stored.tensor.view(torch.uint8), stored.scale.view(torch.uint8)
