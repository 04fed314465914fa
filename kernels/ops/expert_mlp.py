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
    """Sum over the experts of each of the first `count` rows; zeros for the others. [T, D].

    The share multiplies before the down projection, which matters where that input is rounded.
    """
    rows, slots = experts_TA.shape
    places = _Places.of(experts_TA, len(gate_up_EDG), count)
    share_S = shares_TA.flatten().index_select(0, places.assignment_S)
    gate_up_SG = _grouped_product(x_TD.index_select(0, places.row_S), gate_up_EDG, places.spans)
    hidden_SF = _activation(gate_up_SG, limit, share_S, fp8)
    out_SD = _grouped_product(hidden_SF, down_EFD, places.spans)
    out_TAD = out_SD.new_zeros(
        rows * slots + 1, out_SD.shape[1]
    )  # the last takes what padding gives
    out_TAD.index_copy_(0, places.target_S, out_SD)
    return out_TAD[:-1].view(rows, slots, -1).sum(1)


def _activation(gate_up_SG: Tensor, limit: float, share_S: Tensor | None, fp8: bool) -> Tensor:
    gate_SF, up_SF = gate_up_SG.chunk(2, -1)
    hidden_SF = elementwise(torch.nn.functional.silu, gate_SF.clamp(max=limit))
    hidden_SF.mul_(up_SF.clamp(-limit, limit))
    if share_S is not None:
        hidden_SF.mul_(share_S.unsqueeze(1))
    return fake_quant(hidden_SF, "fp8") if fp8 else hidden_SF


class Span(NamedTuple):
    """An expert that has rows, its first place, and the place after its last."""

    expert: int
    first: int
    last: int


def _grouped_product(x_SI: Tensor, weights_EIO: Tensor, spans: list[Span]) -> Tensor:
    """Rows of each span times the matrix of its expert, [S, O]."""
    if torch.is_grad_enabled():
        return torch.cat([x_SI[first:last] @ weights_EIO[expert] for expert, first, last in spans])
    out_SO = x_SI.new_empty(x_SI.shape[0], weights_EIO.shape[2])
    for expert, first, last in spans:
        torch.mm(x_SI[first:last], weights_EIO[expert], out=out_SO[first:last])
    return out_SO


class _Places(NamedTuple):
    """Where each assignment of a row to an expert is computed; an assignment is t * A + slot.

    Padding places compute assignment 0 again, and nobody looks at what they give.
    """

    spans: list[Span]
    assignment_S: Tensor
    row_S: Tensor
    target_S: Tensor  # the assignment, or T * A for padding

    @classmethod
    def of(cls, experts_TA: Tensor, experts: int, count: int) -> _Places:
        chosen = experts_TA.numpy()[:count].ravel()
        counts = np.bincount(chosen, minlength=experts)
        rooms = -(-counts // ROW_MULTIPLE) * ROW_MULTIPLE
        ends = rooms.cumsum()
        by_expert = chosen.argsort(kind="stable")
        shifts = ends - rooms - (counts.cumsum() - counts)  # how far padding moves an expert's rows
        places = np.arange(len(chosen)) + shifts[chosen[by_expert]]
        assignment = np.zeros(ends[-1], np.int64)
        assignment[places] = by_expert
        target = np.full(ends[-1], experts_TA.numel())
        target[places] = by_expert
        busy = counts.nonzero()[0]
        first, last = (ends - rooms)[busy].tolist(), ends[busy].tolist()
        return cls(
            [Span(*span) for span in zip(busy.tolist(), first, last, strict=True)],
            torch.from_numpy(assignment),
            torch.from_numpy(assignment // experts_TA.shape[1]),
            torch.from_numpy(target),
        )
