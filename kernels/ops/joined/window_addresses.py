"""Where the rows that each position sees lie in its owner's ring, and where its own goes."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (kernels are written in Triton's language, which has no annotations)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import row_addresses
from kernels.ops.row_addresses import Records

# T = positions, R = owners, W = window


class WindowAddresses(NamedTuple):
    """int64 bytes; -1: nowhere."""

    own_T: Tensor
    seen_TW: Tensor  # oldest first, the position's own last


def reference(
    positions_T: Tensor,
    owners_T: Tensor,
    floors_R: Tensor,
    rings_R: Tensor,
    records: Records,
    window: int,
    *,
    keeps_all: bool,
) -> WindowAddresses:
    """A position sees the last W, itself among them, but none below its owner's floor.

    Position p is row p % rows of record rings[owner]. Unless `keeps_all`, a position below the
    floor has no row of its own; a negative one never has.
    """
    back_W = torch.arange(1 - window, 1, device=positions_T.device)
    seen_TW = positions_T.unsqueeze(1) + back_W
    floors_T1 = floors_R[owners_T].unsqueeze(1)
    seen_TW = seen_TW.masked_fill((seen_TW < floors_T1) | (positions_T < 0).unsqueeze(1), -1)
    own_T1 = positions_T.unsqueeze(1)
    if not keeps_all:
        own_T1 = own_T1.masked_fill(own_T1 < floors_T1, -1)
    rings_R1 = rings_R.unsqueeze(1)
    own_T1 = row_addresses.reference(own_T1, owners_T, rings_R1, records)
    seen_TW = row_addresses.reference(seen_TW, owners_T, rings_R1, records)
    return WindowAddresses(own_T1.squeeze(1), seen_TW)


@triton.jit
def _window_addresses(
    positions,
    owners,
    floors,
    rings,
    own,
    seen,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    RECORD_BYTES: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    KEEPS_ALL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + t)
    owner = tl.load(owners + t)
    floor = tl.load(floors + owner)
    ring = tl.load(rings + owner) * RECORD_BYTES
    w = tl.arange(0, BLOCK)
    row = position - (W - 1) + w
    live = (row >= floor) & (row >= 0) & (position >= 0)
    at = ring + tl.maximum(row, 0) % ROWS * ROW_BYTES
    tl.store(seen + t * W + w, tl.where(live, at, -1), mask=w < W)
    kept = position >= 0
    if not KEEPS_ALL:
        kept = kept & (position >= floor)
    at = ring + tl.maximum(position, 0) % ROWS * ROW_BYTES
    tl.store(own + t, tl.where(kept, at, -1))


def window_addresses(
    positions_T: Tensor,
    owners_T: Tensor,
    floors_R: Tensor,
    rings_R: Tensor,
    records: Records,
    window: int,
    *,
    keeps_all: bool,
) -> WindowAddresses:
    """As the reference; all integers are int64."""
    given = (positions_T, owners_T, floors_R, rings_R)
    if not positions_T.is_cuda:
        return reference(*given, records, window, keeps_all=keeps_all)
    found = WindowAddresses(
        torch.empty_like(positions_T), positions_T.new_empty(len(positions_T), window)
    )
    _launch(*given, records, window, keeps_all, found)
    return found


def _launch(
    positions_T: Tensor,
    owners_T: Tensor,
    floors_R: Tensor,
    rings_R: Tensor,
    records: Records,
    window: int,
    keeps_all: bool,
    found: WindowAddresses,
) -> None:
    if len(positions_T):
        _window_addresses[(len(positions_T),)](
            positions_T.contiguous(),
            owners_T.contiguous(),
            floors_R.contiguous(),
            rings_R.contiguous(),
            *found,
            W=window,
            ROWS=records.rows,
            RECORD_BYTES=records.record_bytes,
            ROW_BYTES=records.row_bytes,
            KEEPS_ALL=keeps_all,
            BLOCK=triton.next_power_of_2(window),
            num_warps=1,
        )
