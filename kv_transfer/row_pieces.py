"""Spans of two sequences as pieces by address: what a push kernel has to move. Pure.

Each side has its own block size, ring slack and block numbers; pieces end where a record of
either ends. Knows nothing of devices, peers or transports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import numpy as np

from cluster.messages import Span
from kernels.push_table import PIECE_ROWS, Integers, Pieces
from kv_transfer.layout import SPAN_ALIGNMENT, Layout, Place, aligned


@dataclass(frozen=True)
class Standing:
    """Where one sequence's records are: addresses of a rank's memory, and its lease's numbers."""

    layout: Layout
    blocks: int
    slots: int
    block_table: Integers  # [num_blocks]
    slot: int

    def addresses(self, place: Place, rows: Integers) -> Integers:
        """[n]: of the rows numbered [n], of a field as `place` has it."""
        records = rows // place.rows
        within = (rows - records * place.rows) * place.row_bytes
        if place.in_blocks:
            within += self.block_table[records] * self.layout.block_bytes
            within += self.blocks + place.offset
        else:
            within += self.slots + self.slot * self.layout.slot_bytes + place.offset
        return within


def between(spans: Sequence[Span], source: Standing, target: Standing) -> Pieces:
    """The spans' rows from one sequence's memory to another's; span k adds to digest k.

    IndexError if a lease has not that many blocks.
    """
    return _pieces(spans, source, target)


def standing(spans: Sequence[Span], at: Standing) -> Pieces:
    """The spans' rows where they are, to be hashed only: no target."""
    return _pieces(spans, at, None)


def landed(pieces: Pieces) -> Pieces:
    """The same rows where they have gone, to be hashed only."""
    return pieces._replace(source=pieces.target, target=np.zeros_like(pieces.target))


def packed(spans: Sequence[Span], at: Standing, address: int, *, out: bool) -> Pieces:
    """The spans' rows to (`out`) or from a push that begins at `address`, as staging.py packs."""
    found = _pieces(spans, at, None)
    starts, end = [], address
    for span in spans:
        starts.append(end)
        end = aligned(end + at.layout.span_bytes(span), SPAN_ALIGNMENT)
    first = np.array([span.start for span in spans])
    there = np.array(starts)[found.digest]
    there += (found.first - first[found.digest]) * found.row_bytes
    if out:
        return found._replace(target=there)
    return found._replace(source=there, target=found.source)


def _pieces(spans: Sequence[Span], source: Standing, target: Standing | None) -> Pieces:
    """A field's layers mostly have the same rows: those are cut together, in one go."""
    runs = [_Run.of(list(group), source, target) for _, group in groupby(spans, key=_SAME_ROWS)]
    total = sum(len(run.rows) * len(run.ours) for run in runs)
    found = np.zeros((len(Pieces._fields), total), dtype=np.int64)
    begin = number = 0
    for run in runs:
        end = begin + len(run.rows) * len(run.ours)
        shape = len(found), len(run.ours), len(run.rows)
        run.fill(found[:, begin:end].reshape(shape), number, source, target)
        begin, number = end, number + len(run.ours)
    return Pieces(*found)


_SAME_ROWS = attrgetter("field", "start", "stop")


@dataclass(frozen=True)
class _Run:
    """Spans of one field with the same rows, and where each piece begins: `rows` [n]."""

    rows: Integers
    stop: int
    ours: list[Place]
    theirs: list[Place]

    @classmethod
    def of(cls, spans: Sequence[Span], source: Standing, target: Standing | None) -> _Run:
        field, start, stop = _SAME_ROWS(spans[0])
        ours = [source.layout.place(field, span.layer) for span in spans]
        theirs = [target.layout.place(field, span.layer) for span in spans] if target else ours
        rows = _borders(start, stop, {PIECE_ROWS, ours[0].rows, theirs[0].rows})
        return cls(rows, stop, ours, theirs)

    def fill(self, part: Integers, number: int, source: Standing, target: Standing | None) -> None:
        """`part` [fields of Pieces, spans, n]; layers differ by where they begin in a record."""
        for column, side, places in ((0, source, self.ours), (1, target, self.theirs)):
            if side is not None:
                begins = np.array([place.offset - places[0].offset for place in places])
                np.add.outer(begins, side.addresses(places[0], self.rows), out=part[column])
        part[2, :, :-1] = self.rows[1:] - self.rows[:-1]
        part[2, :, -1] = self.stop - self.rows[-1]
        part[3] = self.rows
        part[4] = np.arange(number, number + len(self.ours))[:, None]
        part[5] = self.ours[0].row_bytes


def _borders(start: int, stop: int, steps: set[int]) -> Integers:
    """Where pieces of the rows begin: at the first, and at every multiple of each step."""
    least = min(steps)
    if all(step % least == 0 for step in steps):
        rows = np.arange(start - start % least, stop, least)
        rows[0] = start
        return rows
    multiples = [np.arange(start - start % step + step, stop, step) for step in steps]
    return np.unique(np.concatenate([np.array([start]), *multiples]))
