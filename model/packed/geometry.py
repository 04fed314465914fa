"""Where the rows of a forward stand and look: rotations, and byte addresses of what they see.

All of it is made on the device from the rows' positions, with no wait for the host, and once a
forward: layers with equal records share it. Knows no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from kernels.ops.joined.position_addresses import Rule, position_addresses
from kernels.ops.joined.position_turns import position_turns
from kernels.ops.joined.window_addresses import window_addresses
from kernels.ops.row_addresses import Records, row_addresses
from model.packed.rows import PackedRows, Shape
from model.packed.state import FieldView

# T = rows, R = requests, P = rotated pairs, W = window size, h = W - 1 rows of history

X = TypeVar("X")


class Turns(NamedTuple):
    """Rotations, complex [T, P]."""

    plain_TP: Tensor  # of each row's position, in layers without compressed rows
    rows_TP: Tensor  # in layers with them
    pairs_TP: Tensor  # of the position before, where the row's group of two begins


class Pool(NamedTuple):
    """Window rows that chunks see: h of history for each request, then the forward's own.

    They are copied together, because new rows take the place of old ones in the ring.
    """

    history_at_N: Tensor  # [R * h] in the ring, -1: none
    own_at_T: Tensor  # in the pool, -1: padding


class Sight(NamedTuple):
    """Where window rows are written, and where each row finds those that it sees."""

    written_at_T: Tensor  # in the ring; -1: not kept
    seen_at_TW: Tensor  # in the ring, or in the pool if there is one; oldest first
    pool: Pool | None


class Geometry:
    def __init__(
        self,
        rows: PackedRows,
        shape: Shape,
        ends_R: Tensor | None,
        frequencies_3P: Tensor,
        window: int,
        rollback: int,
    ) -> None:
        """`ends`: positions behind each request's last row; needed unless the shape is in place.
        `frequencies` are float64, of each kind of Turns; `rollback` positions may be taken back
        after the forward.
        """
        self.rows, self.shape = rows, shape
        self._ends_R, self._window, self._rollback = ends_R, window, rollback
        self._frequencies_3P = frequencies_3P
        self._made: dict[Hashable, Any] = {}

    @property
    def turns(self) -> Turns:
        return self._once("turns", self._turns)

    def visible(self, ratio: int) -> Tensor:
        """int32 [T]: compressed rows of this ratio that are complete at each row's position."""
        return self._once(
            ("visible", ratio), lambda: ((self.rows.positions_T + 1) // ratio).to(torch.int32)
        )

    def at(self, numbers_TK: Tensor, view: FieldView) -> Tensor:
        """int64 [T, K]: where per-token rows of each row's request begin in a field's part."""
        rows = self.rows
        return row_addresses(numbers_TK, rows.requests_T, rows.tables_RP, records_of(view))

    # ---------------------------------------------------------------- windows

    def sight(self, ring: FieldView, *, clipped: bool) -> Sight:
        """Of any layer whose window rows lie in such a ring; `clipped`: none below the clip."""
        return self._once(("sight", records_of(ring), clipped), lambda: self._sight(ring, clipped))

    def _sight(self, ring: FieldView, clipped: bool) -> Sight:
        rows = self.rows
        floor_R = rows.clips_R if clipped else rows.floors_R
        if self.shape.in_place and self._ends_R is None:
            found = window_addresses(
                rows.positions_T,
                rows.requests_T,
                floor_R,
                rows.slots_R,
                records_of(ring),
                self._window,
                keeps_all=not clipped,
            )
            return Sight(found.own_T, found.seen_TW, None)
        requests_T1 = rows.requests_T.unsqueeze(1)
        back_W = torch.arange(1 - self._window, 1, device=floor_R.device)
        seen_TW = rows.positions_T.unsqueeze(1) + back_W
        hidden_TW = seen_TW < floor_R[requests_T1]
        written_at_T = self._ring_at(self._kept_T(ring, floor_R, clipped), ring)
        if self.shape.in_place:
            seen_at_TW = self._ring_at(seen_TW.masked_fill(hidden_TW, -1), ring)
            return Sight(written_at_T, seen_at_TW, None)
        history = self._window - 1
        history_Rh = rows.starts_R.unsqueeze(1) + back_W[:-1]
        history_Rh = history_Rh.masked_fill(history_Rh < floor_R.unsqueeze(1), -1)
        everyone_R = torch.arange(len(floor_R), device=floor_R.device)
        history_at_Rh = row_addresses(
            history_Rh, everyone_R, rows.slots_R.unsqueeze(1), records_of(ring)
        )
        since_TW = seen_TW - rows.starts_R[requests_T1]  # negative: before the chunk
        before_TW = requests_T1 * history + history
        within_TW = len(floor_R) * history + rows.first_R[requests_T1]
        index_TW = since_TW + torch.where(since_TW < 0, before_TW, within_TW)
        seen_at_TW = (index_TW * ring.row_bytes).masked_fill(hidden_TW, -1)
        own_T = torch.arange(len(rows.positions_T), device=floor_R.device)
        own_at_T = (own_T + len(floor_R) * history) * ring.row_bytes
        own_at_T = own_at_T.masked_fill(~rows.live_T, -1)
        pool = Pool(history_at_Rh.flatten(), own_at_T)
        return Sight(written_at_T, seen_at_TW, pool)

    def _kept_T(self, ring: FieldView, floor_R: Tensor, clipped: bool) -> Tensor:
        """Positions of rows that the ring keeps, else -1."""
        rows = self.rows
        least_R = floor_R if clipped else None
        if self._ends_R is not None:  # else they are so few that all are kept
            kept = min(self._window + self._rollback, ring.rows)
            newest_R = self._ends_R - kept
            least_R = newest_R if least_R is None else torch.maximum(newest_R, least_R)
        if least_R is None:
            return rows.positions_T
        return rows.positions_T.masked_fill(rows.positions_T < least_R[rows.requests_T], -1)

    def _ring_at(self, numbers: Tensor, ring: FieldView) -> Tensor:
        """Addresses of rows [T] or [T, K] in the ring of each row's request."""
        numbers_TK = numbers if numbers.dim() == 2 else numbers.unsqueeze(1)
        slots_R1 = self.rows.slots_R.unsqueeze(1)
        at_TK = row_addresses(numbers_TK, self.rows.requests_T, slots_R1, records_of(ring))
        return at_TK.view(numbers.shape)

    # ---------------------------------------------------------------- compressed rows

    def completed(self, ratio: int, view: FieldView) -> Tensor:
        """int64 [T]: where the compressed row that each row completes begins; -1: none."""

        def make() -> Tensor:
            return self._by_rule("completed", self.rows.tables_RP, view, ratio)

        return self._once(("completed", ratio, records_of(view)), make)

    @property
    def begins_T1(self) -> Tensor:
        """bool: the first row here of its request; the position before is in the state."""
        return self._once(
            "begins",
            lambda: (self.rows.positions_T == self.rows.starts_R[self.rows.requests_T]).unsqueeze(
                1
            ),
        )

    def tail_read_at(self, tail: FieldView) -> Tensor:
        """int64 [T]: where a row of an odd position finds the one before; -1: not in the state."""

        def make() -> Tensor:
            return self._by_rule("before", self.rows.slots_R.unsqueeze(1), tail)

        return self._once(("tail_read", records_of(tail)), make)

    def tail_write_at(self, tail: FieldView) -> Tensor:
        """int64 [T]: where the row of an even position waits for the next one; -1: nowhere."""

        def make() -> Tensor:
            at_T = self._by_rule("open", self.rows.slots_R.unsqueeze(1), tail)
            if self._ends_R is None:  # they are so few that all have room
                return at_T
            last_R = self._ends_R - 1
            least_R = torch.maximum(last_R - self._rollback, last_R - last_R % 2 - tail.rows + 1)
            return at_T.masked_fill(self.rows.positions_T < least_R[self.rows.requests_T], -1)

        return self._once(("tail_write", records_of(tail)), make)

    def _turns(self) -> Turns:
        return Turns(*position_turns(self.rows.positions_T, self._frequencies_3P, (0, 0, 1)))

    def _by_rule(self, rule: Rule, table_RP: Tensor, view: FieldView, ratio: int = 2) -> Tensor:
        rows = self.rows
        owners, records = (rows.requests_T, rows.starts_R), records_of(view)
        return position_addresses(rows.positions_T, *owners, table_RP, records, rule, ratio)

    def _once(self, key: Hashable, make: Callable[[], X]) -> X:
        if key not in self._made:
            self._made[key] = make()
        found: X = self._made[key]
        return found


def records_of(view: FieldView) -> Records:
    return Records(view.rows, view.record_bytes, view.row_bytes)
