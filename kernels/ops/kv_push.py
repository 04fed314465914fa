"""Rows from where they stand to where they shall stand, by raw address, hashed on the way.

One launch moves any number of ragged pieces between any two memories that the device can reach,
its own or a peer's over NVLink, where a copy engine needs a descriptor for each. A few programs
are enough, because what counts is bytes under way: a program has a tile of about 32 KiB in flight.
Knows nothing of fields, peers or who owns the memory.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (kernels are written in Triton's language, which has no annotations)

from __future__ import annotations

import ctypes
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.push_table import PushTable, RowFormat
from kernels.row_hash import GOLDEN, MIXER, Hashes, row_hashes, unit_factors

_WARPS = 8


def reference(
    table: PushTable, digests: Tensor, done: Tensor, programs: int = 1, copy: bool = True
) -> None:
    """Copies each piece's bytes, unless `copy` is off, and adds the hashes of the rows at its
    source to digests[its digest], int64 [n], modulo 2**64; one for each program to `done` [1].

    All addresses are the host's.
    """
    totals = digests.numpy().view(np.uint64)
    for form, columns in table.by_format():
        for source, target, rows, first, digest in columns.T.tolist():
            nbytes = rows * form.row_bytes
            if copy:
                ctypes.memmove(target, source, nbytes)
            found = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(source), dtype=np.uint8)
            numbers = np.arange(first, first + rows, dtype=np.uint64)
            totals[digest : digest + 1] += row_hashes(found.reshape(rows, -1), numbers).sum()
    done += programs


# T = a tile's pieces, B, C = lanes along a piece, R = rows of all pieces, U = units of a row
@triton.jit(do_not_specialize=["columns", "pieces"])  # they differ from push to push
def _kv_push(
    table,
    columns,  # where they begin in the table
    pieces,
    factors,
    digests,
    done,
    FORMATS: tl.constexpr,
    COPY: tl.constexpr,
    HASH: tl.constexpr,
):
    """A program takes every num_programs-th tile; which format a tile has follows from borders."""
    for number in tl.static_range(len(FORMATS)):
        _tiles_of(table, columns, pieces, factors, digests, number, FORMATS, COPY, HASH)
    tl.debug_barrier()  # the program's stores come before its word that it is done
    tl.atomic_add(done, 1, sem="release", scope="sys")


@triton.jit
def _tiles_of(
    table,
    columns,
    pieces,
    factors,
    digests,
    NUMBER: tl.constexpr,
    FORMATS: tl.constexpr,
    COPY: tl.constexpr,
    HASH: tl.constexpr,
):
    """The next tile's pieces are read while this one's bytes are under way."""
    FORM: tl.constexpr = FORMATS[NUMBER]
    begin = tl.load(table + 2 * NUMBER)
    stop = tl.load(table + 2 * NUMBER + 2)
    programs = tl.num_programs(0)
    own = begin + (tl.program_id(0) + programs - begin % programs) % programs
    own_T = table + columns + tl.load(table + 2 * NUMBER + 1) + tl.arange(0, FORM[4])
    most_U = _factors_of(factors + FORM[5], FORM[6], FORM[6])
    rest_V = _factors_of(factors + FORM[5] + FORM[6], FORM[8], FORM[7])
    at_T = own_T + (own - begin) * FORM[4]
    source_T = tl.load(at_T, mask=own < stop)
    target_T = tl.load(at_T + pieces, mask=own < stop)
    rows_T = tl.load(at_T + 2 * pieces, mask=own < stop)
    number_T = tl.load(at_T + 3 * pieces, mask=own < stop)
    digest_T = tl.load(at_T + 4 * pieces, mask=own < stop)
    for tile in range(own, stop, programs):
        next_T = own_T + (tile + programs - begin) * FORM[4]
        more = tile + programs < stop
        next_source_T = tl.load(next_T, mask=more)
        next_target_T = tl.load(next_T + pieces, mask=more)
        next_rows_T = tl.load(next_T + 2 * pieces, mask=more)
        next_number_T = tl.load(next_T + 3 * pieces, mask=more)
        next_digest_T = tl.load(next_T + 4 * pieces, mask=more)
        _tile(source_T, target_T, rows_T, number_T, digests + digest_T, most_U, rest_V,
              FORM, COPY, HASH)  # fmt: skip
        source_T = next_source_T
        target_T = next_target_T
        rows_T = next_rows_T
        number_T = next_number_T
        digest_T = next_digest_T


@triton.jit
def _tile(
    source_T,
    target_T,
    rows_T,
    number_T,
    digests_T,
    most_U,
    rest_V,
    FORM: tl.constexpr,
    COPY: tl.constexpr,
    HASH: tl.constexpr,
):
    """All loads go out before the first store: the compiler must not move them past it.

    To be copied, a piece is one run of units; to be hashed, its rows. What is read a second time
    comes from the cache. Runs and rows are a power of two of lanes, and what is left, apart.
    """
    ROWS: tl.constexpr = FORM[3]
    MOST: tl.constexpr = FORM[6]
    REST: tl.constexpr = FORM[7]
    LANE: tl.constexpr = 16 // FORM[1]
    if COPY:
        from_T1 = _pointers(source_T[:, None], FORM, FORM[2])
        into_T1 = _pointers(target_T[:, None], FORM, FORM[2])
        count_T1 = (rows_T * (FORM[0] // FORM[1]))[:, None]
        whole_T1 = count_T1
        if FORM[2]:
            whole_T1 = tl.multiple_of(count_T1 // LANE * LANE, [LANE, LANE])
        lane_B = tl.arange(0, ROWS * MOST)[None, :]
        most_TB = tl.load(from_T1 + lane_B, mask=lane_B < whole_T1)
        if REST:
            lane_C = ROWS * MOST + tl.arange(0, ROWS * REST)[None, :]
            rest_TC = tl.load(from_T1 + lane_C, mask=lane_C < whole_T1)
        if FORM[2] and FORM[0] % 16:
            lane_TD = whole_T1 + tl.arange(0, LANE)[None, :]
            tail_TD = tl.load(from_T1 + lane_TD, mask=lane_TD < count_T1)
    if HASH:
        r = tl.arange(0, ROWS)
        live_TR = r[None, :] < rows_T[:, None]
        start_TR = source_T[:, None] + (r * FORM[0])[None, :]
        start_TR1 = _pointers(start_TR[:, :, None], FORM, FORM[2] * (FORM[0] % 16 == 0))
        u = tl.arange(0, MOST)[None, None, :]
        most_TRU = tl.load(start_TR1 + u, mask=live_TR[:, :, None], other=0)
        if REST:
            v = tl.arange(0, REST)[None, None, :]
            within = live_TR[:, :, None] & (v < FORM[8])
            rest_TRV = tl.load(start_TR1 + (MOST + v), mask=within, other=0)
    if COPY:
        tl.store(into_T1 + lane_B, most_TB, mask=lane_B < whole_T1)
        if REST:
            tl.store(into_T1 + lane_C, rest_TC, mask=lane_C < whole_T1)
        if FORM[2] and FORM[0] % 16:
            tl.store(into_T1 + lane_TD, tail_TD, mask=lane_TD < count_T1)
    if HASH:
        hash_TR = _sum_of_products(most_TRU, most_U)
        if REST:
            hash_TR += _sum_of_products(rest_TRV, rest_V)
        hash_TR += (number_T[:, None] + r[None, :]).to(tl.uint64) * tl.full((), _GOLDEN, tl.uint64)
        hash_TR = (hash_TR ^ (hash_TR >> 32)) * tl.full((), _MIXER, tl.uint64)
        hash_TR = tl.where(live_TR, hash_TR ^ (hash_TR >> 29), tl.zeros_like(hash_TR))
        hash_T = tl.sum(hash_TR, axis=1).to(tl.int64, bitcast=True)
        tl.atomic_add(digests_T, hash_T, mask=rows_T > 0, sem="relaxed")


@triton.jit
def _pointers(addresses, FORM: tl.constexpr, WIDE: tl.constexpr):
    """To a format's units. That they are wide is said of what they are made by, or gets lost."""
    if FORM[1] == 4:
        found = addresses.to(tl.pointer_type(tl.uint32))
    elif FORM[1] == 2:
        found = addresses.to(tl.pointer_type(tl.uint16))
    else:
        found = addresses.to(tl.pointer_type(tl.uint8))
    if WIDE:
        found = tl.multiple_of(found, [16] * len(found.shape))
    return found


@triton.jit
def _factors_of(begin, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """[PADDED] uint64: COUNT factors, then zeros."""
    u = tl.arange(0, PADDED if PADDED else 1)
    return tl.load(begin + u, mask=u < COUNT, other=0).to(tl.uint64, bitcast=True)


@triton.jit
def _sum_of_products(units_TRU, factor_U):
    return tl.sum(units_TRU.to(tl.uint64) * factor_U[None, None, :], axis=2)


_GOLDEN = tl.constexpr(GOLDEN)
_MIXER = tl.constexpr(MIXER)


def kv_push(
    table: PushTable,
    digests: Tensor,
    done: Tensor,
    programs: int = 32,
    copy: bool = True,
    hashed: bool = True,
) -> None:
    """See reference(). On a device: on its current stream, of `programs` programs.

    When `done` has grown by `programs`, all stores are visible to every device and to the host;
    each program adds its one with release at system scope. `hashed` off leaves digests alone.
    """
    if not table.numbers.is_cuda:
        reference(table, digests, done, programs, copy)
        return
    launch(table, digests, done, programs, copy, hashed)


def launch(
    table: PushTable, digests: Tensor, done: Tensor, programs: int, copy: bool, hashed: bool
) -> None:
    """The kernel itself, compiled or interpreted."""
    factors, forms = _factors(table.formats, table.numbers.device)
    _kv_push[(programs,)](
        table.numbers,
        table.header,
        table.pieces,
        factors,
        digests,
        done,
        FORMATS=forms,
        COPY=copy,
        HASH=hashed,
        num_warps=_WARPS,
    )


@lru_cache
def _factors(
    formats: tuple[RowFormat, ...], device: torch.device
) -> tuple[Tensor, tuple[tuple[int, ...], ...]]:
    """Factors of all formats, int64 [n], and what the kernel has to know of each format: its five
    values, where its factors begin, the most units of a row that are a power of two, the power of
    two that holds the rest, and how many the rest are."""
    factors: list[Hashes] = []
    forms = []
    for form in formats:
        units = form.row_bytes // form.unit_bytes
        most = 1 << (units.bit_length() - 1)
        rest = 1 << (units - most - 1).bit_length() if units > most else 0
        begin = sum(len(some) for some in factors)
        forms.append((*(int(value) for value in form), begin, most, rest, units - most))
        factors.append(unit_factors(form.row_bytes, form.unit_bytes))
    values = torch.from_numpy(np.concatenate(factors).view(np.int64))
    return values.to(device), tuple(forms)
