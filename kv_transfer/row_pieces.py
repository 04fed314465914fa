"""Spans of two sequences as pieces by address: what a push kernel has to move. Pure.

Each side has its own block size, ring slack and block numbers; pieces end where a record of
either ends. Knows nothing of devices, peers or transports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

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
        within = place.offset + rows % place.rows * place.row_bytes
        if place.in_blocks:
            records = self.block_table[rows // place.rows]
            return self.blocks + records * self.layout.block_bytes + within
        return self.slots + self.slot * self.layout.slot_bytes + within


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
    parts = list(_parts(spans, source, target))
    if not parts:
        return Pieces(*np.zeros((len(Pieces._fields), 0), dtype=np.int64))
    return Pieces(*np.concatenate(parts, axis=1))


def _parts(spans: Sequence[Span], source: Standing, target: Standing | None) -> Iterator[Integers]:
    """A field's layers mostly have the same rows: those are cut together, in one go.

    Each int64 [fields of Pieces, layers * pieces of a layer].
    """
    for (field, start, stop), group in groupby(
        enumerate(spans), key=lambda item: (item[1].field, item[1].start, item[1].stop)
    ):
        members = list(group)
        ours = [source.layout.place(field, span.layer) for _, span in members]
        theirs = [target.layout.place(field, span.layer) for _, span in members] if target else ours
        rows = _borders(start, stop, (PIECE_ROWS, ours[0].rows, theirs[0].rows))
        part = np.zeros((len(Pieces._fields), len(members), len(rows)), dtype=np.int64)
        part[0] = _of_layers(source, ours, rows)
        if target is not None:
            part[1] = _of_layers(target, theirs, rows)
        part[2, :, :-1] = rows[1:] - rows[:-1]
        part[2, :, -1] = stop - rows[-1]
        part[3] = rows
        part[4] = np.array([number for number, _ in members])[:, None]
        part[5] = ours[0].row_bytes
        yield part.reshape(len(part), -1)


def _of_layers(at: Standing, places: Sequence[Place], rows: Integers) -> Integers:
    """[layers, n]: layers of a field differ by where they begin in a record only."""
    first = at.addresses(places[0], rows)
    return np.array([[place.offset - places[0].offset] for place in places]) + first


def _borders(start: int, stop: int, steps: tuple[int, ...]) -> Integers:
    """Where pieces of the rows begin: at the first, and at every multiple of each step."""
    least = min(steps)
    if all(step % least == 0 for step in steps):
        return np.array([start, *range(start - start % least + least, stop, least)])
    multiples = [np.arange(start - start % step + step, stop, step) for step in steps]
    return np.unique(np.concatenate([np.array([start]), *multiples]))
