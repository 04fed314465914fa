"""Pieces of rows by address, in the order in which a push kernel takes them. Pure numbers.

A piece is a run of neighbouring rows. A kernel's warps take parts of it, of a few rows; a tile is
what the warps of one program take at once, all of one row format.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.row_hash import (
    GROUP_BYTES,
    GROUP_ROWS,
    WORD_BYTES,
    group_rows,
    unit_factors,
    word_factors,
)

Integers = npt.NDArray[np.int64]

PIECE_ROWS = GROUP_ROWS  # of a piece, as planners cut them: whole groups
WIDE = 16  # bytes; the widest load and store of a lane
LANES = 32  # of a warp
TURNS = GROUP_BYTES // (WIDE * LANES)  # of a warp for one part
PARTS = 8  # of a tile: one for each warp
COLUMNS = 4
HEADER = 8  # numbers of each format


class Pieces(NamedTuple):
    """Runs of neighbouring rows, each int64 [n]."""

    source: Integers  # address of the first row
    target: Integers
    rows: Integers
    first: Integers  # number of the first row
    digest: Integers  # which digest the rows add to
    row_bytes: Integers


class RowFormat(NamedTuple):
    """How rows of one size are moved. All that a kernel needs to know of it is in the table."""

    row_bytes: int
    unit_bytes: int  # of what is multiplied for the hash
    wide: bool  # runs and their groups begin at multiples of WIDE on both sides, and end there

    @property
    def rows(self) -> int:
        """Of a group."""
        return group_rows(self.row_bytes)

    @property
    def units(self) -> int:
        """Of a row."""
        return self.row_bytes // self.unit_bytes

    @property
    def parts(self) -> int:
        """Of a group, a power of two: what a warp moves at once."""
        most = LANES * TURNS * (WIDE // self.unit_bytes if self.wide else 1)
        return 1 << (-(-self.rows * self.units // most) - 1).bit_length()


@dataclass(frozen=True)
class PushTable:
    """`numbers` int64 [HEADER * formats + kinds + 1 + COLUMNS * pieces], on the host or a device.

    The header has for each format: its first tile and where its tiles end, counted within its kind
    (formats of the same unit and width), its first piece, log2 of the parts of a piece, rows of a
    group, units of a row, log2 of the parts of a group, and where its factors
    begin (factor_table). Then come zeros that programs count in while they run: tiles claimed of
    each kind, and programs that have ended. The columns are where
    the piece's first group begins at the source and at the target, that group's number, and the
    rows of it that come before the piece + 2**8 * where the piece ends + 2**32 * its digest. Each
    format's pieces are filled up to whole tiles with pieces of no rows.
    """

    numbers: Tensor
    formats: tuple[RowFormat, ...]
    pieces: int
    nbytes: int  # of all rows

    def to(self, device: torch.device) -> PushTable:
        """Copied on the device's current stream."""
        pinned = self.numbers.pin_memory()  # torch keeps it until the stream has got past it
        numbers = pinned.to(device, non_blocking=True)
        return PushTable(numbers, self.formats, self.pieces, self.nbytes)

    def by_format(self) -> Iterator[tuple[RowFormat, Integers]]:
        """Each format with its pieces that have rows: int64 [source, target, rows, first, digest]
        of [n]."""
        numbers = self.numbers.numpy()
        header = numbers[: HEADER * len(self.formats)].reshape(-1, HEADER)
        columns = numbers[len(numbers) - COLUMNS * self.pieces :].reshape(COLUMNS, self.pieces)
        for form, (begin, stop, first, log, *_) in zip(self.formats, header.tolist(), strict=True):
            count = (stop - begin) * PARTS >> log
            source, target, group, what = columns[:, first : first + count]
            before, end, digest = what & 0xFF, what >> 8 & 0xFFFFFF, what >> 32
            skipped = before * form.row_bytes
            found = np.stack([
                source + skipped, target + skipped, end - before, group * form.rows + before, digest
            ])  # fmt: skip
            yield form, found[:, end > before]


def row_formats(row_bytes: Iterable[int]) -> tuple[RowFormat, ...]:
    """What pushes of such rows can need: in the order of their kinds, and of their sizes.

    Raises ValueError for rows that are larger than a group.
    """
    found = []
    for size in sorted(set(row_bytes)):
        if size > GROUP_BYTES:
            raise ValueError(f"rows of {size} bytes are too large to be pushed by kernel")
        unit = min(WORD_BYTES, size & -size)
        if size * group_rows(size) % WIDE == 0:
            found.append(RowFormat(size, unit, True))
        if size % WIDE:
            found.append(RowFormat(size, unit, False))
    return tuple(sorted(found, key=lambda form: (not form.wide, -form.unit_bytes, form.row_bytes)))


def tabulate(pieces: Pieces, formats: tuple[RowFormat, ...]) -> PushTable:
    """Raises ValueError for a piece that no format takes."""
    header = np.zeros((len(formats), HEADER), dtype=np.int64)
    columns: list[Integers] = []
    tiles: dict[tuple[int, bool], int] = {}
    left: dict[int, Integers] = {}  # of each row size, what no wide format took
    at, begin = _factors_at(formats), 0
    for form, numbers in zip(formats, header, strict=True):
        if form.row_bytes not in left:
            left[form.row_bytes] = _chosen(pieces, form)
        one = left[form.row_bytes]
        if form.wide:
            one, left[form.row_bytes] = _wide(one, form)
        else:
            left[form.row_bytes] = one[:, :0]
        most = int((one[3] >> 8 & 0xFFFFFF).max(initial=1))
        log = ((-(-most // form.rows)) * form.parts - 1).bit_length()
        fill = max(1, PARTS >> log)
        count = -(-one.shape[1] // fill) * fill
        padded = np.zeros((COLUMNS, count), dtype=np.int64)
        padded[:, : one.shape[1]] = one
        columns.append(padded)
        kind = form.unit_bytes, form.wide
        first = tiles.get(kind, 0)
        tiles[kind] = first + (count << log) // PARTS
        parts = form.parts.bit_length() - 1
        numbers[:] = (
            first,
            tiles[kind],
            begin,
            log,
            form.rows,
            form.units,
            parts,
            at[form.row_bytes],
        )
        begin += count
    known = sum(int((pieces.row_bytes == size).sum()) for size in left)
    lost = len(pieces.rows) - known + sum(one.shape[1] for one in left.values())
    if lost:
        raise ValueError(f"{lost} pieces have another row size or odd addresses")
    claims = np.zeros(len(tiles) + 1, dtype=np.int64)
    table = np.concatenate(
        [header.reshape(-1), claims, np.concatenate(columns, axis=1).reshape(-1)]
    )
    nbytes = int((pieces.rows * pieces.row_bytes).sum())
    return PushTable(torch.from_numpy(table), formats, begin, nbytes)


def _chosen(pieces: Pieces, form: RowFormat) -> Integers:
    """[COLUMNS, n]: pieces of the format's row size."""
    (which,) = np.nonzero(pieces.row_bytes == form.row_bytes)
    before = pieces.first[which] % form.rows
    skipped = before * form.row_bytes
    return np.stack([
        pieces.source[which] - skipped,
        pieces.target[which] - skipped,
        pieces.first[which] // form.rows,
        before + (before + pieces.rows[which] << 8) + (pieces.digest[which] << 32),
    ])  # fmt: skip


def _wide(some: Integers, form: RowFormat) -> tuple[Integers, Integers]:
    """[COLUMNS, n] twice: what can be moved WIDE bytes a lane, and the rest."""
    step = WIDE // gcd(WIDE, form.row_bytes)
    fits = ((some[0] | some[1]) % WIDE == 0) & ((some[3] & 0xFF) % step == 0)
    if step == 1 or (fits.all() and not (some[3] >> 8 & 0xFFFFFF % step).any()):
        return some[:, fits], some[:, ~fits]
    wide, rest = some[:, fits], some[:, ~fits]
    odd = (wide[3] >> 8 & 0xFFFFFF) % step  # rows at the end that do not fill WIDE bytes
    ends = wide[:, odd > 0]
    last = (ends[3] >> 8 & 0xFFFFFF) - odd[odd > 0]  # the row where the rest begins
    wide[3] -= odd << 8
    groups, before = np.divmod(last, form.rows)
    skipped = groups * form.rows * form.row_bytes
    end = before + odd[odd > 0]
    what = before + (end << 8) + (ends[3] >> 32 << 32)
    ends = np.stack([ends[0] + skipped, ends[1] + skipped, ends[2] + groups, what])
    return wide[:, (wide[3] & 0xFF) < (wide[3] >> 8 & 0xFFFFFF)], np.concatenate(
        [rest, ends], axis=1
    )


def factor_table(formats: tuple[RowFormat, ...]) -> Integers:
    """[n]: for each place of a unit in a group its factor. Words have the same whatever the row
    size, two in a number; of smaller units each row size has its own."""
    words = word_factors(GROUP_BYTES // WORD_BYTES).astype(np.uint32)
    found = [words.view(np.int64)]
    for form in {form.row_bytes: form for form in formats if form.unit_bytes < WORD_BYTES}.values():
        factors = np.zeros(GROUP_BYTES // form.unit_bytes, dtype=np.uint64)
        known = unit_factors(form.row_bytes, form.unit_bytes)
        factors[: len(known)] = known
        found.append(factors.view(np.int64))
    return np.concatenate(found)


def _factors_at(formats: tuple[RowFormat, ...]) -> dict[int, int]:
    """By row size: where its factors begin in factor_table."""
    found, end = {}, GROUP_BYTES // WORD_BYTES // 2
    for form in formats:
        if form.unit_bytes == WORD_BYTES:
            found[form.row_bytes] = 0
        elif form.row_bytes not in found:
            found[form.row_bytes] = end
            end += GROUP_BYTES // form.unit_bytes
    return found
