"""Which shapes decode steps have: few enough that each can be a graph. Pure.

Rows are padded to the next bucket, tables to the next power of two of blocks: kernels do not read
what of a table is unused.
"""

from __future__ import annotations

from dataclasses import dataclass

from model.packed.rows import Shape

_NARROWEST = 4  # blocks of a table


@dataclass(frozen=True)
class DecodeShapes:
    """Of steps of up to `max_rows` rows, with tables of up to `max_blocks` blocks."""

    max_rows: int
    max_blocks: int
    interval: int = 8  # between buckets

    @property
    def rows(self) -> tuple[int, ...]:
        """1, 2, 4 ... below the interval, its multiples, and at the end the most."""
        small = [2**power for power in range(self.interval.bit_length())]
        buckets = {rows for rows in small if rows < self.interval}
        buckets |= set(range(self.interval, self.max_rows, self.interval))
        return (*sorted(rows for rows in buckets if rows < self.max_rows), self.max_rows)

    @property
    def blocks(self) -> tuple[int, ...]:
        widths = []
        width = _NARROWEST
        while width < self.max_blocks:
            widths.append(width)
            width *= 2
        return (*widths, width)

    def of(self, rows: int, blocks: int) -> Shape:
        """The smallest one that holds so many. Raises ValueError beyond the most."""
        if rows > self.max_rows or blocks > self.blocks[-1]:
            raise ValueError(f"a step of {rows} rows, {blocks} blocks wide, exceeds {self}")
        return _shape(
            next(one for one in self.rows if one >= rows),
            next(one for one in self.blocks if one >= blocks),
        )

    def common(self, blocks: int) -> list[Shape]:
        """What a rank begins with, largest first, whose memory serves the others: every bucket at
        the width that holds `blocks`, and the widest, which can stand in for all."""
        widths = {self.of(1, min(blocks, self.max_blocks)).blocks, self.blocks[-1]}
        return [
            _shape(rows, width)
            for width in sorted(widths, reverse=True)
            for rows in reversed(self.rows)
        ]


def holds(shape: Shape, other: Shape) -> bool:
    """Whether a step of the other shape can be padded to this one."""
    return shape.rows >= other.rows and shape.blocks >= other.blocks


def _shape(rows: int, blocks: int) -> Shape:
    return Shape(rows, rows, blocks, in_place=True)
