"""Which assignments of rows to experts are worked on together: blocks of one expert each."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (kernels are written in Triton's language, which has no annotations)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# T = rows, A = experts of a row, B = blocks, M = assignments of a block


class Blocks(NamedTuple):
    """Assignments (t * A + slot) by expert, each expert's padded with -1 to whole blocks.

    There are as many blocks as there can be at most; those without work have expert -1, and what
    their assignments are says nothing.
    """

    expert_B: Tensor  # int32
    assignment_BM: Tensor  # int32

    @classmethod
    def empty(cls, experts_TA: Tensor, experts: int, size: int) -> Blocks:
        """Room for the blocks of these assignments, whichever they are."""
        most = _most(experts_TA.numel(), experts, size)
        return cls(
            experts_TA.new_empty(most, dtype=torch.int32),
            experts_TA.new_empty(most, size, dtype=torch.int32),
        )


def reference(experts_TA: Tensor, experts: int, size: int) -> Blocks:
    """Nothing here waits for the device: shapes follow from T and A alone."""
    chosen = experts_TA.flatten()
    device, count = chosen.device, len(chosen)
    most = _most(count, experts, size)
    counts_E = torch.zeros(experts, dtype=torch.int64, device=device)
    counts_E.index_add_(0, chosen, torch.ones_like(chosen))
    rooms_E = (counts_E + size - 1) // size
    ends_E = rooms_E.cumsum(0)
    by_expert = chosen.argsort(stable=True)
    owner = chosen[by_expert]
    before_E = counts_E.cumsum(0) - counts_E
    within = torch.arange(count, device=device) - before_E[owner]
    assignment = torch.full((most * size,), -1, dtype=torch.int32, device=device)
    assignment[(ends_E - rooms_E)[owner] * size + within] = by_expert.to(torch.int32)
    expert_B = torch.searchsorted(ends_E, torch.arange(most, device=device), right=True)
    expert_B = torch.where(expert_B < experts, expert_B, -1).to(torch.int32)
    return Blocks(expert_B, assignment.view(most, size))


def blocks_of(experts_TA: Tensor, experts: int, size: int) -> Blocks:
    """As the reference; on a GPU in one launch."""
    count = experts_TA.numel()
    if not experts_TA.is_cuda or not count:
        return reference(experts_TA, experts, size)
    blocks = Blocks.empty(experts_TA, experts, size)
    _blocks[(experts,)](
        experts_TA.contiguous(),
        *blocks,
        count,
        len(blocks.expert_B),
        **shape_of(experts_TA, experts, size),
        num_warps=4,
    )
    return blocks


def shape_of(experts_TA: Tensor, experts: int, size: int) -> dict[str, int]:
    """The constants of `write_blocks`."""
    return {
        "BINS": triton.next_power_of_2(experts),
        "SIZE": size,
        "CHUNK": min(1024, max(32, triton.next_power_of_2(experts_TA.numel()))),
    }


def _most(assignments: int, experts: int, size: int) -> int:
    return min(assignments, -(-assignments // size) + experts)


@triton.jit
def write_blocks(
    expert,
    chosen,
    expert_B,
    assignment,
    count,
    most,
    BINS: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The blocks of one expert; that of expert 0 also writes those without work."""
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    i = tl.arange(0, CHUNK)
    for first in range(0, count, CHUNK):
        inside = first + i < count
        own = tl.load(chosen + first + i, mask=inside, other=0).to(tl.int32)
        counts += tl.histogram(own, BINS, mask=inside)
    rooms = (counts + SIZE - 1) // SIZE
    begin = tl.sum(tl.where(bins < expert, rooms, 0))
    stop = begin + tl.sum(tl.where(bins == expert, rooms, 0))
    place = begin * SIZE
    for first in range(0, count, CHUNK):
        own = tl.load(chosen + first + i, mask=first + i < count, other=-1).to(tl.int32) == expert
        tl.store(assignment + place + tl.cumsum(own.to(tl.int32), 0) - 1, first + i, mask=own)
        place += tl.sum(own.to(tl.int32))
    padding = place + tl.arange(0, SIZE)
    tl.store(assignment + padding, tl.full((SIZE,), -1, tl.int32), mask=padding < stop * SIZE)
    for block in range(begin, stop):
        tl.store(expert_B + block, expert)
    if expert == 0:
        for block in range(tl.sum(rooms), most):
            tl.store(expert_B + block, -1)


@triton.jit
def _blocks(
    chosen,
    expert_B,
    assignment,
    count,
    most,
    BINS: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    write_blocks(tl.program_id(0), chosen, expert_B, assignment, count, most, BINS, SIZE, CHUNK)
