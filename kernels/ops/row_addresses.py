"""From row numbers to the bytes where the rows begin, through a table of records for each owner.

The one table of a ring or of a few rows is its own record; that of paged rows has a record for
every so many. Knows nothing of what rows hold.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (kernels are written in Triton's language, which has no annotations)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# T = rows that ask, K = rows each asks for, R = owners, P = records of the widest table


class Records(NamedTuple):
    """Sizes of records of `rows` rows; see model/packed/state.py."""

    rows: int
    record_bytes: int
    row_bytes: int


def reference(numbers_TK: Tensor, owners_T: Tensor, records_RP: Tensor, records: Records) -> Tensor:
    """int64 [T, K]: where row numbers[t, k] of owner owners[t] begins; -1 for negative numbers.

    Row n is row n % rows of the record in place n // rows of the table; past the table's end, of
    its last one, which makes a table of one record a ring. Records and owners are int64.
    """
    places_TK = (numbers_TK // records.rows).clamp(0, records_RP.shape[1] - 1).long()
    records_TK = records_RP[owners_T.unsqueeze(1), places_TK]
    at_TK = records_TK * records.record_bytes + numbers_TK % records.rows * records.row_bytes
    return at_TK.masked_fill(numbers_TK < 0, -1)


@triton.jit
def _row_addresses(
    numbers,
    owners,
    table,
    out,
    count,
    width,
    places,
    ROWS: tl.constexpr,
    RECORD_BYTES: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    number = tl.load(numbers + i, mask=inside, other=-1).to(tl.int64)
    live = number >= 0
    row = tl.maximum(number, 0)
    owner = tl.load(owners + i // width, mask=inside, other=0)
    place = tl.minimum(row // ROWS, places - 1)
    record = tl.load(table + owner * places + place, mask=live, other=0)
    at = record * RECORD_BYTES + row % ROWS * ROW_BYTES
    tl.store(out + i, tl.where(live, at, -1), mask=inside)


def row_addresses(
    numbers_TK: Tensor, owners_T: Tensor, records_RP: Tensor, records: Records
) -> Tensor:
    """As the reference. Numbers are int32 or int64."""
    if not numbers_TK.is_cuda:
        return reference(numbers_TK, owners_T, records_RP, records)
    out_TK = torch.empty(numbers_TK.shape, dtype=torch.int64, device=numbers_TK.device)
    count = out_TK.numel()
    if count:
        _row_addresses[(triton.cdiv(count, 1024),)](
            numbers_TK.contiguous(),
            owners_T.contiguous(),
            records_RP.contiguous(),
            out_TK,
            count,
            numbers_TK.shape[1],
            records_RP.shape[1],
            ROWS=records.rows,
            RECORD_BYTES=records.record_bytes,
            ROW_BYTES=records.row_bytes,
            BLOCK=1024,
            num_warps=4,
        )
    return out_TK
