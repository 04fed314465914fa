"""Digests notice whatever can happen to rows, and nothing that does not matter."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cluster.errors import Rejected
from kernels.row_hash import hash_sum
from kv_transfer.digest import (
    RunningDigest,
    check_pieces,
    digest_rows,
    digest_span,
    piece_digests,
)
from kv_transfer.plan import pack_into_pushes
from kv_transfer.staging import pack_push
from model.state import StateField
from tests.kv_transfer.stores import FIELDS, TINY, Store, needed, random_rows

WIDTHS = (34, 68, 72, 132, 288, 528, 1024)


def some_rows(count: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count, width), generator=generator).byte()


def reference(rows: Tensor, numbers: list[int]) -> int:
    """The definition, in Python integers."""
    mask = 2**64 - 1

    def mixed(value: int) -> int:
        return (value ^ value >> 32) * 0xBF58476D1CE4E5B9 & mask

    golden = 0x9E3779B97F4A7C15
    group = 1
    while group < 64 and 2 * group * rows.shape[1] <= 4608:
        group *= 2
    digest = 0
    for row, number in zip(rows, numbers, strict=True):
        data = bytes(row.tolist())
        data += b"\0" * (-len(data) % 4)
        before = number % group * len(data) // 4
        total = 1
        for at in range(0, len(data), 4):
            constant = mixed(mixed((before + at // 4 + 1) * golden & mask)) >> 32 | 1
            total += int.from_bytes(data[at : at + 4], "little") * constant
        digest += total * (mixed(number // group * golden & mask) | 1)
    return digest & mask


@pytest.mark.parametrize("width", WIDTHS)
def test_equals_its_definition(width: int) -> None:
    rows, numbers = some_rows(7, width), [0, 1, 5, 1000, 2**20, 3, 77]
    assert digest_rows(rows, torch.tensor(numbers)) == reference(rows, numbers)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("start", [0, 5, 61, 1000])
def test_rows_in_order_are_summed_to_the_same(width: int, start: int) -> None:
    rows = some_rows(150, width, seed=start)
    for count in (0, 1, 3, 64, 150):
        numbers = list(range(start, start + count))
        assert hash_sum(rows[:count].numpy(), start) == reference(rows[:count], numbers)


@pytest.mark.parametrize("width", [34, 68, 132])
def test_every_single_bit_counts(width: int) -> None:
    row, number = some_rows(1, width), torch.tensor([3])
    digests = {digest_rows(row, number)}
    for bit in range(8 * width):
        flipped = row.clone()
        flipped[0, bit // 8] ^= 1 << bit % 8
        digests.add(digest_rows(flipped, number))
    assert len(digests) == 8 * width + 1


def test_two_flipped_sign_bits_do_not_cancel_out() -> None:
    row, number = some_rows(1, 128), torch.tensor([3])
    found = {digest_rows(row, number)}
    pairs = [(one, other) for one in range(128) for other in range(one)]
    for one, other in pairs:
        flipped = row.clone()
        flipped[0, [one, other]] ^= 0x80
        found.add(digest_rows(flipped, number))
    assert len(found) == len(pairs) + 1


@pytest.mark.parametrize("apart", [1, 8, 64, 640])
def test_the_same_bit_flipped_in_two_rows_does_not_cancel_out(apart: int) -> None:
    rows, numbers = some_rows(apart + 1, 68), torch.arange(apart + 1)
    found = {digest_rows(rows, numbers)}
    for byte in range(68):
        flipped = rows.clone()
        flipped[0, byte] ^= 0x80
        flipped[apart, byte] ^= 0x80
        found.add(digest_rows(flipped, numbers))
    assert len(found) == 69


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(2, 40),
    width=st.sampled_from(WIDTHS),
    seed=st.integers(0, 2**32),
    choice=st.randoms(use_true_random=False),
)
def test_rows_that_go_astray_are_noticed(count: int, width: int, seed: int, choice: Random) -> None:
    rows, numbers = some_rows(count, width, seed), torch.arange(count) + 5
    right = digest_rows(rows, numbers)
    one, other = choice.sample(range(count), 2)
    swapped, doubled, zeroed = rows.clone(), rows.clone(), rows.clone()
    swapped[[one, other]] = rows[[other, one]]
    doubled[one] = rows[other]
    zeroed[one] = 0
    half = width // 2
    torn = rows.clone()
    torn[one, half:], torn[other, half:] = rows[other, half:], rows[one, half:]
    keep = torch.arange(count) != one
    moved = numbers.clone()
    moved[one] = 5 + count
    wrong = [digest_rows(changed, numbers) for changed in (swapped, doubled, zeroed, torn)]
    wrong.append(digest_rows(rows[keep], numbers[keep]))
    wrong.append(digest_rows(torch.cat([rows, rows[[one]]]), torch.cat([numbers, numbers[[one]]])))
    wrong.append(digest_rows(rows, moved))
    wrong.append(digest_rows(rows, numbers + 1))
    assert right not in wrong


@settings(max_examples=30, deadline=None)
@given(count=st.integers(0, 50), cut=st.integers(0, 50), seed=st.integers(0, 2**32))
def test_order_and_parts_do_not_matter(count: int, cut: int, seed: int) -> None:
    rows, numbers = some_rows(count, 68, seed), torch.arange(count)
    right = digest_rows(rows, numbers)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    assert digest_rows(rows[order], numbers[order]) == right
    parts = digest_rows(rows[:cut], numbers[:cut]) + digest_rows(rows[cut:], numbers[cut:])
    assert parts % 2**64 == right


# ------------------------------------------------------------------ of stored state


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("length", [1, 2, 129, 257])
def test_depends_on_rows_alone_not_on_where_they_are(
    fields: tuple[StateField, ...], length: int
) -> None:
    rows = random_rows(fields, length, seed=length)
    found = []
    for shape in ({"block_tokens": 16}, {"block_tokens": 64, "ring_slack": 5}):
        store = Store(fields, **shape)
        store.lease(20)  # so that the second one's places differ
        lease = store.lease(length + shape.get("ring_slack", 0))
        store.fill(lease, rows, length)
        found.append(piece_digests(store.slab, lease, fields, length))
    assert found[0] == found[1]
    pieces = {(piece.field, piece.layer): piece for piece in found[0]}
    assert list(pieces) == [(field.name, layer) for field in fields for layer in field.layers]
    for span in needed(fields, length):
        piece = pieces[span.field, span.layer]
        assert (piece.start, piece.stop) == (span.start, span.stop)
        numbers = torch.arange(span.start, span.stop)
        assert piece.digest == digest_rows(rows[span.field, span.layer], numbers)


def test_long_spans_are_hashed_in_parts_to_the_same_digest() -> None:
    store = Store(TINY, length=16384, sequences=1)
    lease = store.lease(16384)
    (span,) = (s for s in needed(TINY, 16384) if (s.field, s.layer) == ("compressed_r1", 5))
    rows = some_rows(16384, 72)
    store.slab.write_rows(span, lease, rows)
    assert digest_span(store.slab, lease, span) == digest_rows(rows, torch.arange(16384))


def test_a_running_digest_ends_where_the_whole_does() -> None:
    store = Store(TINY)
    lease = store.lease(77)
    store.fill(lease, random_rows(TINY, 77, seed=7), 77)
    running = RunningDigest(store.slab, lease)
    pushes = pack_into_pushes(needed(TINY, 77), store.layout, 2048)
    for push in reversed(pushes):
        running.add(push)
    assert running.pieces(TINY, 77) == piece_digests(store.slab, lease, TINY, 77)
    packed = RunningDigest(store.slab, lease)
    cell = torch.empty(2048, dtype=torch.uint8)
    for push in pushes:
        packed.add_packed(push, cell[: pack_push(store.slab, lease, push, cell)])
    assert packed.pieces(TINY, 77) == running.pieces(TINY, 77)
    running.add(pushes[0][:1])
    with pytest.raises(Rejected):
        check_pieces(running.pieces(TINY, 77), piece_digests(store.slab, lease, TINY, 77))


def test_a_rejection_names_the_piece() -> None:
    store = Store(TINY)
    lease = store.lease(77)
    pieces = piece_digests(store.slab, lease, TINY, 77)
    check_pieces(pieces, pieces)
    check_pieces(pieces, pieces[::-1])
    wrong = pieces[3].model_copy(update={"digest": pieces[3].digest ^ 1})
    with pytest.raises(Rejected, match=r"index_r2 of layer 4, rows 0 to 38, does not match"):
        check_pieces(pieces, [*pieces[:3], wrong, *pieces[4:]])
    with pytest.raises(
        Rejected, match=r"draft_window of layer 2, rows 61 to 77, was not announced"
    ):
        check_pieces(pieces, pieces[:-1])
    with pytest.raises(Rejected, match="does not have, or twice"):
        check_pieces(pieces, [*pieces, pieces[0]])
    with pytest.raises(Rejected, match="does not have, or twice"):
        check_pieces(pieces, [*pieces, pieces[0].model_copy(update={"field": "other"})])
