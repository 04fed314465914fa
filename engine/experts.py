"""The routed experts of one layer that this rank holds: one set of weights for each slot.

A slot knows under which name its weights were read, and nothing is computed for an expert but by
weights of its own name. How weights are kept, as values or as they are stored, is a form's affair.
Knows nothing of other ranks, of routing, or of when slots change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

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
    """One expert's weights in their form, and their checkpoint name without its last part."""

    name: str
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class ExpertForm(Protocol):
    """How experts' weights are kept: a few tensors each, and of all slots the same stacked."""

    def read(self, name: str) -> tuple[Tensor, ...]:
        """From the checkpoint. Raises KeyError or OSError where it is not to be had."""
        ...

    def compute(
        self, x_ND: Tensor, slots_N1: Tensor, shares_N1: Tensor, stacked: tuple[Tensor, ...]
    ) -> Tensor:
        """[N, D]: each row through the expert of its slot, times its share."""
        ...

    def no_rows(self, stacked: tuple[Tensor, ...]) -> Tensor:
        """[0, D] of what `compute` takes."""
        ...


class ValueForm:
    """Gate and up [S, D, G] and down [S, F, D] as values, in the dtype of the source."""

    def __init__(self, weights: WeightSource, spec: ModelSpec, options: ModelOptions) -> None:
        self._weights = weights
        self._limit, self._fp8 = spec.swiglu_limit, options.activations == "fp8"

    def read(self, name: str) -> tuple[Tensor, ...]:
        found = GatedWeights(self._weights, name)
        return found.gate_up_DG, found.down_FD

    def compute(
        self, x_ND: Tensor, slots_N1: Tensor, shares_N1: Tensor, stacked: tuple[Tensor, ...]
    ) -> Tensor:
        count = len(x_ND)
        given = (x_ND, slots_N1, shares_N1, *stacked)
        return expert_mlp(*given, count=count, limit=self._limit, fp8=self._fp8)

    def no_rows(self, stacked: tuple[Tensor, ...]) -> Tensor:
        return stacked[0].new_empty(0, stacked[0].shape[1])


class LayerSlots:
    """Only the engine's thread may `put`; others may read what no `put` can meet."""

    def __init__(self, form: ExpertForm, prefix: str, experts: Sequence[int]) -> None:
        """`experts` are what the slots hold at first, one after another."""
        self._form, self._prefix = form, prefix
        first = {expert: self.read(expert) for expert in dict.fromkeys(experts)}
        self._names = [self.name(expert) for expert in experts]
        held = [first[expert].tensors for expert in experts]
        self._stacked = tuple(torch.stack(part) for part in zip(*held, strict=True))

    def __call__(self, x_ND: Tensor, slots_N: Ints, shares_N: Tensor) -> Tensor:
        """[N, D]: each row through the expert of its slot, times its share."""
        if not len(slots_N):
            return self.no_rows()
        slots_N1 = torch.from_numpy(np.ascontiguousarray(slots_N)).to(x_ND.device).unsqueeze(1)
        return self._form.compute(x_ND, slots_N1, shares_N.unsqueeze(1), self._stacked)

    def no_rows(self) -> Tensor:
        """[0, D]"""
        return self._form.no_rows(self._stacked)

    def name(self, expert: int) -> str:
        return f"{self._prefix}{expert}."

    def read(self, expert: int) -> SlotWeights:
        """From the checkpoint. Raises KeyError or OSError where it is not to be had."""
        return SlotWeights(self.name(expert), self._form.read(self.name(expert)))

    def holds(self, slot: int, expert: int) -> bool:
        return self._names[slot] == self.name(expert)

    def copy_of(self, expert: int) -> SlotWeights | None:
        """A copy of what a slot of this rank holds; None if none holds this expert."""
        name = self.name(expert)
        if name not in self._names:
            return None
        slot = self._names.index(name)
        return SlotWeights(name, tuple(part[slot].clone() for part in self._stacked))

    def fits(self, expert: int, given: SlotWeights) -> bool:
        """Whether these are weights of that expert, by their name and shapes."""
        shapes = [tensor.shape for tensor in given.tensors]
        ours = [part.shape[1:] for part in self._stacked]
        return given.name == self.name(expert) and shapes == ours

    def put(self, slot: int, given: SlotWeights) -> None:
        self._names[slot] = given.name
        for part, tensor in zip(self._stacked, given.tensors, strict=True):
            part[slot].copy_(tensor)
