"""From positions to the bytes where the rows begin that they complete, look back at, or leave open.

Each is a rule that gives a row number for a position, and then row_addresses.py; in one launch,
since in a decode step a launch costs as much as all that it does. Knows nothing of what rows hold.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (kernels are written in Triton's language, which has no annotations)

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import row_addresses
from kernels.ops.row_addresses import Records

# T = positions, R = owners, P = records of the widest table

Rule = Literal["completed", "before", "open"]
_RULES = {"completed": 0, "before": 1, "open": 2}


def reference(
    positions_T: Tensor,
    owners_T: Tensor,
    starts_R: Tensor,
    records_RP: Tensor,
    records: Records,
    rule: Rule,
    ratio: int = 2,
) -> Tensor:
    """int64 [T]; -1 where the rule names no row, and for negative positions.

    completed  the row of the group of `ratio` positions that this one is the last of
    before     the position before, if this one is its owner's first and no group begins with it
    open       the position itself, if a group begins with it and is not complete
    """
    match rule:
        case "completed":
            after_T = positions_T + 1
            numbers_T = torch.where(after_T % ratio == 0, after_T // ratio - 1, -1)
        case "before":
            waits_T = (positions_T == starts_R[owners_T]) & (positions_T % ratio != 0)
            numbers_T = torch.where(waits_T, positions_T - 1, -1)
        case "open":
            numbers_T = torch.where((positions_T + 1) % ratio != 0, positions_T, -1)
    numbers_T = numbers_T.masked_fill(positions_T < 0, -1)
    found = row_addresses.reference(numbers_T.unsqueeze(1), owners_T, records_RP, records)
    return found.squeeze(1)


@triton.jit
def _position_addresses(
    positions,
    owners,
    starts,
    table,
    out,
    count,
    places,
    RULE: tl.constexpr,
    RATIO: tl.constexpr,
    ROWS: tl.constexpr,
    RECORD_BYTES: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = t < count
    position = tl.load(positions + t, mask=inside, other=-1)
    owner = tl.load(owners + t, mask=inside, other=0)
    live = position >= 0
    if RULE == 0:
        live = live & ((position + 1) % RATIO == 0)
        number = (position + 1) // RATIO - 1
    elif RULE == 1:
        start = tl.load(starts + owner, mask=inside, other=-1)
        live = live & (position == start) & (position % RATIO != 0)
        number = position - 1
    else:
        live = live & ((position + 1) % RATIO != 0)
        number = position
    row = tl.maximum(number, 0)
    place = tl.minimum(row // ROWS, places - 1)
    record = tl.load(table + owner * places + place, mask=live, other=0)
    at = record * RECORD_BYTES + row % ROWS * ROW_BYTES
    tl.store(out + t, tl.where(live, at, -1), mask=inside)


def position_addresses(
    positions_T: Tensor,
    owners_T: Tensor,
    starts_R: Tensor,
    records_RP: Tensor,
    records: Records,
    rule: Rule,
    ratio: int = 2,
) -> Tensor:
    """As the reference; all integers are int64."""
    if not positions_T.is_cuda:
        return reference(positions_T, owners_T, starts_R, records_RP, records, rule, ratio)
    out_T = torch.empty_like(positions_T)
    _launch(positions_T, owners_T, starts_R, records_RP, records, rule, ratio, out_T)
    return out_T


def _launch(
    positions_T: Tensor,
    owners_T: Tensor,
    starts_R: Tensor,
    records_RP: Tensor,
    records: Records,
    rule: Rule,
    ratio: int,
    out_T: Tensor,
) -> None:
    count = len(positions_T)
    if count:
        block = 32 if count <= 32 else 256
        _position_addresses[(triton.cdiv(count, block),)](
            positions_T.contiguous(),
            owners_T.contiguous(),
            starts_R.contiguous(),
            records_RP.contiguous(),
            out_T,
            count,
            records_RP.shape[1],
            RULE=_RULES[rule],
            RATIO=ratio,
            ROWS=records.rows,
            RECORD_BYTES=records.record_bytes,
            ROW_BYTES=records.row_bytes,
            BLOCK=block,
            num_warps=1 if block == 32 else 4,
        )
