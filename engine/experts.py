"""The routed experts of one layer that this rank holds: one weight matrix pair for each slot.

A slot knows under which name its weights were read, and nothing is computed for an expert but by
weights of its own name. Knows nothing of other ranks, of routing, or of when slots change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cluster.replica_dispatch import Ints
from kernels.ops.expert_mlp import expert_mlp
from model.moe import GatedWeights
from model.options import ModelOptions
from model.spec import ModelSpec
from model.weight_source import WeightSource

# N = rows, each for one slot, S = slots, D = hidden size, F = intermediate size, G = 2 F


class SlotWeights(NamedTuple):
    """One expert's weights and their name in the checkpoint, without its last part."""

    name: str
    gate_up_DG: Tensor
    down_FD: Tensor

    @property
    def nbytes(self) -> int:
        return self.gate_up_DG.nbytes + self.down_FD.nbytes


class LayerSlots:
    """Only the engine's thread may `put`; others may read what no `put` can meet."""

    def __init__(
        self,
        weights: WeightSource,
        prefix: str,
        experts: Sequence[int],
        spec: ModelSpec,
        options: ModelOptions,
    ) -> None:
        """`experts` are what the slots hold at first, one after another."""
        self._weights, self._prefix = weights, prefix
        first = [self.read(expert) for expert in dict.fromkeys(experts)]
        by_name = {one.name: one for one in first}
        self._names = [self.name(expert) for expert in experts]
        self._gate_up_SDG = torch.stack([by_name[name].gate_up_DG for name in self._names])
        self._down_SFD = torch.stack([by_name[name].down_FD for name in self._names])
        self._limit, self._fp8 = spec.swiglu_limit, options.activations == "fp8"

    def __call__(self, x_ND: Tensor, slots_N: Ints, shares_N: Tensor) -> Tensor:
        """[N, D]: each row through the expert of its slot, times its share."""
        if not len(slots_N):
            return self.no_rows()
        slots_N1 = torch.from_numpy(np.ascontiguousarray(slots_N)).to(x_ND.device).unsqueeze(1)
        return expert_mlp(
            x_ND,
            slots_N1,
            shares_N.unsqueeze(1),
            self._gate_up_SDG,
            self._down_SFD,
            count=len(slots_N),
            limit=self._limit,
            fp8=self._fp8,
        )

    def no_rows(self) -> Tensor:
        """[0, D]"""
        return self._gate_up_SDG.new_empty(0, self._gate_up_SDG.shape[1])

    def name(self, expert: int) -> str:
        return f"{self._prefix}{expert}."

    def read(self, expert: int) -> SlotWeights:
        """From the checkpoint. Raises KeyError or OSError where it is not to be had."""
        found = GatedWeights(self._weights, self.name(expert))
        return SlotWeights(self.name(expert), found.gate_up_DG, found.down_FD)

    def holds(self, slot: int, expert: int) -> bool:
        return self._names[slot] == self.name(expert)

    def copy_of(self, expert: int) -> SlotWeights | None:
        """A copy of what a slot of this rank holds; None if none holds this expert."""
        name = self.name(expert)
        if name not in self._names:
            return None
        slot = self._names.index(name)
        return SlotWeights(name, self._gate_up_SDG[slot].clone(), self._down_SFD[slot].clone())

    def fits(self, expert: int, given: SlotWeights) -> bool:
        """Whether these are weights of that expert, by their name and shapes."""
        shapes = (given.gate_up_DG.shape, given.down_FD.shape)
        ours = (self._gate_up_SDG.shape[1:], self._down_SFD.shape[1:])
        return given.name == self.name(expert) and shapes == ours

    def put(self, slot: int, given: SlotWeights) -> None:
        self._names[slot] = given.name
        self._gate_up_SDG[slot].copy_(given.gate_up_DG)
        self._down_SFD[slot].copy_(given.down_FD)
