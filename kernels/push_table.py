"""Pieces of rows by address, in the order in which a push kernel takes them. Pure numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Integers = npt.NDArray[np.int64]

TILE_BYTES = 36 << 10  # of one program under way: 64 rows of 528 bytes
PIECE_ROWS = 64  # of a piece at most
WIDE = 16  # bytes; the widest load and store of a lane
COLUMNS = 5


class Pieces(NamedTuple):
    """Runs of neighbouring rows, each int64 [n]."""

    source: Integers  # address of the first row
    target: Integers
    rows: Integers
    first: Integers  # number of the first row
    digest: Integers  # which digest the rows add to
    row_bytes: Integers


class RowFormat(NamedTuple):
    """What a kernel is made for: all pieces of one format go through the same tiles."""

    row_bytes: int
    unit_bytes: int  # of a lane's element
    wide: bool  # pieces begin at multiples of WIDE on both sides
    rows: int  # of a piece, at most
    pieces: int  # of a tile


@dataclass(frozen=True)
class PushTable:
    """`numbers` int64 [header + COLUMNS * pieces], on the host or a device.

    The header has two numbers for each format, its first tile and its first piece, and two at the
    end. Each format's pieces are filled up to whole tiles with pieces of no rows.
    """

    numbers: Tensor
    formats: tuple[RowFormat, ...]
    pieces: int
    nbytes: int  # of all rows

    @property
    def header(self) -> int:
        return 2 * len(self.formats) + 2

    def to(self, device: torch.device) -> PushTable:
        """Copied on the device's current stream."""
        pinned = self.numbers.pin_memory()  # torch keeps it until the stream has got past it
        numbers = pinned.to(device, non_blocking=True)
        return PushTable(numbers, self.formats, self.pieces, self.nbytes)

    def by_format(self) -> Iterator[tuple[RowFormat, Integers]]:
        """Each format with its pieces that have rows, int64 [COLUMNS, n]."""
        numbers = self.numbers.numpy()
        columns = numbers[self.header :].reshape(COLUMNS, self.pieces)
        for place, form in enumerate(self.formats):
            mine = columns[:, numbers[2 * place + 1] : numbers[2 * place + 3]]
            yield form, mine[:, mine[2] > 0]


def row_formats(row_bytes: Iterable[int], piece_rows: int = PIECE_ROWS) -> tuple[RowFormat, ...]:
    """What pushes of such rows can need, always the same: one compiled kernel."""
    found = []
    for size in sorted(set(row_bytes)):
        unit = min(4, size & -size)
        rows = min(piece_rows, _power_of_two(TILE_BYTES // size))
        pieces = min(PIECE_ROWS, _power_of_two(TILE_BYTES // (size * rows)))
        found.append(RowFormat(size, unit, True, rows, pieces))
        if size % WIDE:
            found.append(RowFormat(size, unit, False, rows, pieces))
    return tuple(found)


def tabulate(pieces: Pieces, formats: tuple[RowFormat, ...]) -> PushTable:
    """Raises ValueError for a piece that no format takes."""
    aligned = (pieces.source | pieces.target) % WIDE == 0
    kinds = pieces.row_bytes * 2 + aligned
    values = np.stack(pieces[:COLUMNS])
    columns, header, taken = [np.zeros((COLUMNS, 0), dtype=np.int64)], [0, 0], 0
    for form in formats:
        (found,) = np.nonzero(kinds == form.row_bytes * 2 + form.wide)
        tiles = -(-len(found) // form.pieces)
        padded = np.zeros((COLUMNS, tiles * form.pieces), dtype=np.int64)
        padded[:, : len(found)] = values[:, found]
        taken += int((padded[2] <= form.rows).sum()) - padded.shape[1] + len(found)
        columns.append(padded)
        header += [header[-2] + tiles, header[-1] + padded.shape[1]]
    if taken < len(pieces.rows):
        raise ValueError(
            f"{len(pieces.rows) - taken} pieces have another row size, more rows or odd addresses"
        )
    table = np.concatenate(columns, axis=1)
    numbers = np.concatenate([np.array(header, dtype=np.int64), table.reshape(-1)])
    nbytes = int((pieces.rows * pieces.row_bytes).sum())
    return PushTable(torch.from_numpy(numbers), formats, table.shape[1], nbytes)


def _power_of_two(value: int) -> int:
    """The largest that is not greater, and at least one."""
    return 1 << max(0, value.bit_length() - 1)
