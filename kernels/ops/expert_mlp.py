"""Gated MLPs: one for all rows, or for each row those of its experts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.formats import fake_quant
from kernels.op import ROW_MULTIPLE, elementwise

# T = rows, A = experts of a row, E = experts, D = hidden size, F = intermediate size,
# G = 2 F: gate, then up; S = places: rows sorted by expert, each expert's padded (kernels/op.py)


def gated_mlp(
    x_TD: Tensor, gate_up_DG: Tensor, down_FD: Tensor, *, limit: float, fp8: bool
) -> Tensor:
    """The shared expert, [T, D]. `fp8` rounds the input of the down projection."""
    return _activation(x_TD @ gate_up_DG, limit, None, fp8) @ down_FD


def expert_mlp(
    x_TD: Tensor,
    experts_TA: Tensor,
    shares_TA: Tensor,
    gate_up_EDG: Tensor,
    down_EFD: Tensor,
    *,
    count: int,
    limit: float,
    fp8: bool,
) -> Tensor:
    """Sum over the experts of each of the first `count` rows, slot after slot, [T, D]; what the
    other rows get means nothing.

    The share multiplies before the down projection, which matters where that input is rounded.
    """
    if not count:
        return torch.zeros_like(x_TD)
    places = _Places.of(experts_TA, gate_up_EDG.shape[0], count)
    share_S1 = shares_TA.flatten().index_select(0, places.assignment_S).unsqueeze(1)
    x_SD = x_TD.index_select(0, places.row_S)
    hidden_SF = _activation(_grouped_product(x_SD, gate_up_EDG, places), limit, share_S1, fp8)
    out_SD = _grouped_product(hidden_SF, down_EFD, places)
    out_TAD = out_SD.index_select(0, places.place).view(*experts_TA.shape, -1)
    total_TD, *rest = out_TAD.unbind(1)
    for out_TD in rest:
        total_TD = total_TD + out_TD
    return total_TD


def _activation(gate_up_SG: Tensor, limit: float, share_S1: Tensor | None, fp8: bool) -> Tensor:
    gate_SF, up_SF = gate_up_SG.chunk(2, -1)
    hidden_SF = elementwise(torch.nn.functional.silu, gate_SF.clamp(max=limit))
    hidden_SF.mul_(up_SF.clamp(-limit, limit))
    if share_S1 is not None:
        hidden_SF.mul_(share_S1)
    return fake_quant(hidden_SF, "fp8") if fp8 else hidden_SF


def _grouped_product(x_SI: Tensor, weights_EIO: Tensor, places: _Places) -> Tensor:
    """Rows of each expert times its matrix, [S, O]."""
    if not x_SI.is_cpu:
        return torch.bmm(x_SI.view(len(weights_EIO), -1, x_SI.shape[1]), weights_EIO).flatten(0, 1)
    parts = torch.split_with_sizes(x_SI, places.sizes)
    if torch.is_grad_enabled():
        matrices = weights_EIO.unbind()
        pairs = zip(parts, places.experts, strict=True)
        return torch.cat([x @ matrices[expert] for x, expert in pairs])
    out_SO = x_SI.new_empty(x_SI.shape[0], weights_EIO.shape[2])
    outs = torch.split_with_sizes(out_SO, places.sizes)
    for expert, x, out in zip(places.experts, parts, outs, strict=True):
        torch.mm(x, weights_EIO[expert], out=out)
    return out_SO


class _Places(NamedTuple):
    """Where each assignment of a row to an expert is computed; an assignment is t * A + slot.

    Padding places compute assignment 0 again, and nobody looks at what they give.
    """

    experts: list[int]  # those with rows
    sizes: list[int]  # and how many places they have
    assignment_S: Tensor
    row_S: Tensor
    place: Tensor  # [T * A]; 0 for rows that are not routed

    @classmethod
    def of(cls, experts_TA: Tensor, experts: int, count: int) -> _Places:
        if not experts_TA.is_cpu:
            return cls._even(experts_TA, experts, count)
        chosen = experts_TA.numpy()[:count].ravel()
        counts = np.bincount(chosen, minlength=experts)
        rooms = -(-counts // ROW_MULTIPLE) * ROW_MULTIPLE
        # how far padding moves the rows of an expert
        shifts = rooms.cumsum() - rooms - (counts.cumsum() - counts)
        by_expert = chosen.argsort(kind="stable")
        places = np.arange(len(chosen)) + shifts[chosen[by_expert]]
        assignment = np.zeros(rooms.sum(), np.int64)
        assignment[places] = by_expert
        place = np.zeros(experts_TA.numel(), np.int64)
        place[by_expert] = places
        busy = counts.nonzero()[0]
        return cls(
            busy.tolist(),
            rooms[busy].tolist(),
            torch.from_numpy(assignment),
            torch.from_numpy(assignment // experts_TA.shape[1]),
            torch.from_numpy(place),
        )

    @classmethod
    def _even(cls, experts_TA: Tensor, experts: int, count: int) -> _Places:
        """Equally many places for each expert, for devices where few large products pay."""
        device, slots = experts_TA.device, experts_TA.shape[1]
        chosen = experts_TA[:count].flatten()
        counts_E = torch.zeros(experts, dtype=torch.int64, device=device)
        counts_E.index_add_(0, chosen, torch.ones_like(chosen))
        room = most(counts_E)
        by_expert = chosen.argsort(stable=True)
        before_E = counts_E.cumsum(0) - counts_E
        owner = chosen.index_select(0, by_expert)
        places = torch.arange(len(chosen), device=device) + (
            owner * room - before_E.index_select(0, owner)
        )
        assignment = torch.zeros(experts * room, dtype=torch.int64, device=device)
        assignment.index_copy_(0, places, by_expert)
        place = torch.zeros(experts_TA.numel(), dtype=torch.int64, device=device)
        place.index_copy_(0, by_expert, places)
        everyone = list(range(experts))
        return cls(everyone, [room] * experts, assignment, assignment // slots, place)


def most(counts_E: Tensor) -> int:
    """The largest; on a device the one thing in a forward that the host waits for."""
    return int(counts_E.max())
