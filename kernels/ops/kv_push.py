"""Rows from where they stand to where they shall stand, by raw address, hashed on the way.

One launch moves any number of ragged pieces between any two memories that the device can reach,
its own or a peer's over NVLink, where a copy engine needs a descriptor for each. A few programs
are enough, because what counts is bytes under way: a program reads its next tile of 36 KiB while
it writes and hashes this one out of its registers. A table is for one launch at a time. Knows
nothing of fields, peers or who owns the memory.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (kernels are written in Triton's language, which has no annotations)

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.push_table import (
    HEADER,
    LANES,
    PARTS,
    TURNS,
    WIDE,
    PushTable,
    RowFormat,
    factor_table,
)
from kernels.row_hash import GOLDEN, MIXER, hash_sum


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
            totals[digest : digest + 1] += np.uint64(hash_sum(found.reshape(rows, -1), first))
    done += programs


# P = lanes of a program, a warp for each part of a tile; W = units of a lane
@triton.jit(do_not_specialize=["pieces"])  # it differs from push to push
def _kv_push(
    table,
    pieces,
    factors,
    digests,
    done,
    FORMATS: tl.constexpr,
    KINDS: tl.constexpr,
    COPY: tl.constexpr,
    HASH: tl.constexpr,
):
    """Kind of formats by kind of formats: tiles to be copied as fast as each program can, because
    programs that share a way out to the wire, as on an H200 eight to eleven of 32 do, are slower
    than the others by a third; tiles that are only read by turns, which costs less."""
    COUNT: tl.constexpr = len(KINDS)
    claims = table + FORMATS * HEADER_
    for number in tl.static_range(COUNT):
        _tiles(
            table, claims + COUNT + 1, pieces, claims + number, factors, digests,
            number, KINDS, COPY, HASH,
        )  # fmt: skip
    tl.debug_barrier()  # the program's stores come before its word that it is done
    tl.atomic_add(done, 1, sem="release", scope="sys")
    if COPY:
        ended = tl.atomic_add(claims + COUNT, 1, sem="relaxed")
        if ended == tl.num_programs(0) - 1:
            for number in tl.static_range(COUNT + 1):  # the last one leaves the table as it was
                tl.store(claims + number, 0)


@triton.jit
def _tiles(
    table,
    columns,
    pieces,
    claims,
    factors,
    digests,
    NUMBER: tl.constexpr,
    KINDS: tl.constexpr,
    COPY: tl.constexpr,
    HASH: tl.constexpr,
):
    """The next tile's bytes are under way while this one's are stored and hashed, and where the
    one after it stands is read meanwhile. Of tiles to be copied a program has three for certain,
    and claims others one by one, three ahead: twice its share at most, and none that it could not
    move, so that all are moved however late the other programs come.

    A loop that ends when the tiles do would be a `while`, in which Triton 3.6 loses tuples."""
    KIND: tl.constexpr = KINDS[NUMBER]
    LAST: tl.constexpr = KIND[2] + KIND[3] - 1
    programs = tl.num_programs(0)
    own = tl.program_id(0)
    if not KIND[1]:  # few tiles: they are for the programs that have one tile less of the others
        own = programs - 1 - own
    stop = tl.load(table + LAST * HEADER_ + 1).to(tl.int32)
    most = tl.cdiv(stop, programs)
    if COPY:
        most = 2 * most
    tile, second, third = own, own + programs, own + 2 * programs
    this = _part(table, columns, pieces, tile, stop, KIND)
    following = _part(table, columns, pieces, second, stop, KIND)
    units = _read(this, KIND)
    by_place = _factors_of(this, factors, KIND)
    for turn in range(most):
        if tile < stop:
            later = _part(table, columns, pieces, third, stop, KIND)
            following_units = _read(following, KIND)
            if COPY:
                _write(this, units, KIND)
            if HASH:
                if KIND[0] == 4 and KIND[1]:  # they are the same for all parts
                    _hash(this, units, by_place, digests, KIND)
                else:
                    _hash(this, units, _factors_of(this, factors, KIND), digests, KIND)
            tile, second = second, third
            if not COPY:
                third += programs
            elif turn + 3 < most:
                third = 3 * programs + tl.atomic_add(claims, 1, sem="relaxed").to(tl.int32)
            else:
                third = stop
            this = following
            following = later
            units = following_units


@triton.jit
def _part(table, columns, pieces, tile, stop, KIND: tl.constexpr):
    """Each lane's part of a tile, [P] each: source and target of its group, where the piece's lanes
    begin and end in it, the part's first lane, the group's number and the rows it has for the hash,
    the digest, and where the format's factors are."""
    UNIT: tl.constexpr = KIND[0]
    FIRST: tl.constexpr = KIND[2]
    COUNT: tl.constexpr = KIND[3]
    LANE: tl.constexpr = KIND[5]
    form = table + FIRST * HEADER_
    for other in tl.static_range(1, COUNT):
        begin = tl.load(table + (FIRST + other) * HEADER_)
        form += tl.where(tile >= begin, HEADER_, 0)
    log = tl.load(form + 3).to(tl.int32)
    most = tl.load(form + 4).to(tl.int32)
    units = tl.load(form + 5).to(tl.int32)
    warp_P = tl.arange(0, PARTS_ * LANES_) // LANES_
    part_P = (tile - tl.load(form).to(tl.int32)) * PARTS_ + warp_P
    at_P = columns + tl.load(form + 2) + (part_P >> log)
    live = tile < stop
    source_P = tl.load(at_P, mask=live)
    target_P = tl.load(at_P + pieces, mask=live)
    number_P = tl.load(at_P + 2 * pieces, mask=live)
    what_P = tl.load(at_P + 3 * pieces, mask=live, other=0)
    group_P = part_P & ((1 << log) - 1)
    first_P = tl.zeros_like(group_P)
    if not KIND[1]:  # a group has several parts
        parts = tl.load(form + 6).to(tl.int32)
        first_P = (group_P & ((1 << parts) - 1)) * (KIND[4] * LANES_)
        group_P = group_P >> parts
    skipped_P = group_P * most
    begin_P = tl.maximum((what_P & 0xFF).to(tl.int32) - skipped_P, 0)
    end_P = (what_P.to(tl.int32) >> 8) & 0xFFFFFF
    end_P = tl.minimum(tl.maximum(end_P - skipped_P, begin_P), most)
    begin_P = tl.minimum(begin_P, end_P)
    rows_P = tl.where(first_P == 0, end_P - begin_P, 0)
    bytes_P = skipped_P * (units * UNIT)
    return (
        source_P + bytes_P, target_P + bytes_P, begin_P * units // LANE, end_P * units // LANE,
        first_P, number_P + group_P, rows_P, what_P >> 32, tl.load(form + 7),
    )  # fmt: skip


@triton.jit
def _lanes(first_P, TURN: tl.constexpr):
    """[P, 1]: numbers of the lanes along a group."""
    lane_P = tl.arange(0, PARTS_ * LANES_) & (LANES_ - 1)
    return (first_P + (lane_P + TURN * LANES_))[:, None]


@triton.jit
def _units(address_P, lane, KIND: tl.constexpr):
    """[P, W] pointers. That they are wide is said of what they are made by, or gets lost."""
    LANE: tl.constexpr = KIND[5]
    start = address_P[:, None]
    if KIND[0] == 4:
        found = start.to(tl.pointer_type(tl.uint32))
    elif KIND[0] == 2:
        found = start.to(tl.pointer_type(tl.uint16))
    else:
        found = start.to(tl.pointer_type(tl.uint8))
    if KIND[1]:
        found = tl.multiple_of(found, [16, 16])
    return found + (lane * LANE + tl.arange(0, LANE)[None, :])


@triton.jit
def _read(part, KIND: tl.constexpr):
    """[P, W] for each turn."""
    TURNS: tl.constexpr = KIND[4]
    found = ()
    for turn in tl.static_range(TURNS):
        lane = _lanes(part[4], turn)
        live = (lane >= part[2][:, None]) & (lane < part[3][:, None])
        units = tl.load(_units(part[0], lane, KIND), mask=live, other=0)
        found = found + (units,)  # type: ignore[assignment]
    return found


@triton.jit
def _write(part, units, KIND: tl.constexpr):
    TURNS: tl.constexpr = KIND[4]
    for turn in tl.static_range(TURNS):
        lane = _lanes(part[4], turn)
        live = (lane >= part[2][:, None]) & (lane < part[3][:, None])
        tl.store(_units(part[1], lane, KIND), units[turn], mask=live)


@triton.jit
def _factors_of(part, factors, KIND: tl.constexpr):
    """[P, W] for each turn: by the place of a unit in its group."""
    LANE: tl.constexpr = KIND[5]
    TURNS: tl.constexpr = KIND[4]
    begin = tl.multiple_of(factors + part[8], 2)
    if KIND[0] == 4:
        found_at = tl.multiple_of(begin.to(tl.pointer_type(tl.uint32)), 4)
    else:
        found_at = begin.to(tl.pointer_type(tl.uint64))
    found = ()
    for turn in tl.static_range(TURNS):
        unit = _lanes(part[4], turn) * LANE + tl.arange(0, LANE)[None, :]
        found = found + (tl.load(found_at + unit),)  # type: ignore[assignment]
    return found


@triton.jit
def _hash(part, units, by_place, digests, KIND: tl.constexpr):
    """Of the rows of each part: each lane adds up what it has."""
    TURNS: tl.constexpr = KIND[4]
    hash_P = tl.zeros((PARTS_ * LANES_,), dtype=tl.uint64)
    for turn in tl.static_range(TURNS):
        hash_P += tl.sum(units[turn].to(tl.uint64) * by_place[turn].to(tl.uint64), axis=1)
    lane_P = tl.arange(0, PARTS_ * LANES_) & (LANES_ - 1)
    hash_P += tl.where(lane_P == 0, part[6], 0).to(tl.uint64)
    hash_T1 = tl.sum(tl.reshape(hash_P, (PARTS_, LANES_)), axis=1, keep_dims=True)
    hash_P = tl.reshape(tl.broadcast_to(hash_T1, (PARTS_, LANES_)), (PARTS_ * LANES_,))
    key_P = part[5].to(tl.uint64) * tl.full((), GOLDEN_, tl.uint64)
    key_P = (key_P ^ (key_P >> 32)) * tl.full((), MIXER_, tl.uint64)
    hash_P = (hash_P * (key_P | tl.full((), 1, tl.uint64))).to(tl.int64, bitcast=True)
    once_P = (lane_P == 0) & (part[2] < part[3])
    tl.atomic_add(digests + part[7], hash_P, mask=once_P, sem="relaxed")


HEADER_ = tl.constexpr(HEADER)
LANES_ = tl.constexpr(LANES)
PARTS_ = tl.constexpr(PARTS)
GOLDEN_ = tl.constexpr(GOLDEN)
MIXER_ = tl.constexpr(MIXER)


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
    """The kernel itself, compiled or interpreted.

    Looking for what was compiled takes Triton 20 to 30 us, more than a small push takes the
    device, so that is remembered here.
    """
    device, numbers = table.numbers.device, (table.numbers, digests, done)
    aligned = tuple(memory.data_ptr() % 16 == 0 for memory in numbers)  # Triton compiles apart
    key = device, table.formats, aligned, copy, hashed
    arguments = (
        table.numbers, table.pieces, _factors(table.formats, device), digests, done,
        len(table.formats), kinds(table.formats), copy, hashed,
    )  # fmt: skip
    if compiled := _COMPILED.get(key):
        compiled[(programs, 1, 1)](*arguments)
    else:
        _COMPILED[key] = _kv_push[(programs,)](*arguments, num_warps=PARTS)


_COMPILED: dict[object, Any] = {}  # what is interpreted leaves None here


@lru_cache
def kinds(formats: tuple[RowFormat, ...]) -> tuple[tuple[int, ...], ...]:
    """Formats that go through the same loop: their unit, whether wide, the first of them, how many,
    turns of a lane, and units of a lane."""
    same = [(form.unit_bytes, form.wide) for form in formats]
    return tuple(
        (unit, int(wide), same.index((unit, wide)), same.count((unit, wide)))
        + (TURNS, WIDE // unit if wide else 1)
        for unit, wide in dict.fromkeys(same)
    )


@lru_cache
def _factors(formats: tuple[RowFormat, ...], device: torch.device) -> Tensor:
    """int64 [n]: of each format, a factor for each unit of a part: 32 bits each if units are."""
    return torch.from_numpy(factor_table(formats)).to(device)
