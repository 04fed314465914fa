"""Byte figures, against those of the published model (model card: 890 bytes a token)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.messages import Span
from kv_transfer.layout import ALIGNMENT, Layout
from model.state import DRAFT_WINDOW, TAIL, WINDOW, PerToken, Ring, StateField, Tail
from tests.kv_transfer.stores import FIELDS, REAL, TINY

RING_BYTES = 128 * 528


def test_a_block_of_128_tokens_has_890_bytes_a_token() -> None:
    layout = Layout(REAL, 128)
    rows = [place.rows * place.row_bytes for place in layout.places.values() if place.in_blocks]
    assert sum(rows) == 113_920 == 128 * 890
    assert layout.block_bytes == 113_920  # all its parts are aligned as they are


def test_a_slot_has_43_rings_and_three_tails() -> None:
    layout = Layout(REAL, 128)
    assert layout.slot_bytes == 528 * 128 * 40 + 528 * 128 * 3 + 12_288
    sizes = {key: place.rows * place.row_bytes for key, place in layout.places.items()}
    assert [sizes[WINDOW, layer] for layer in range(40)] == [RING_BYTES] * 40
    assert [sizes[DRAFT_WINDOW, stage] for stage in range(3)] == [RING_BYTES] * 3
    assert [sizes[TAIL, layer] for layer in (2, 8, 14)] == [4096] * 3


def test_slack_lengthens_rings_and_tails() -> None:
    layout = Layout(REAL, 128, ring_slack=6)
    assert layout.place(WINDOW, 0).rows == 134
    assert layout.place(TAIL, 2).rows == 7
    assert layout.block_bytes == 113_920


@pytest.mark.parametrize(
    ("length", "nbytes"),
    [
        (1_024, 3_817_472),
        (8_192, 10_196_992),
        (32_768, 32_069_632),
        (131_072, 119_560_192),
        (1_048_576, 936_138_752),
        (8_193, 10_196_992 + 288 + 68 + 12_288),  # odd: tails, and no further row of ratio 2
    ],
)
def test_a_sequence_moves_as_many_bytes_as_published(length: int, nbytes: int) -> None:
    assert Layout(REAL, 128).state_bytes(length) == nbytes


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("slack", [0, 1, 6])
def test_every_field_has_a_place_of_its_own(fields: tuple[StateField, ...], slack: int) -> None:
    layout = Layout(fields, 16, slack)
    assert list(layout.places) == [
        (field.name, layer) for field in fields for layer in field.layers
    ]
    for in_blocks, record in ((True, layout.block_bytes), (False, layout.slot_bytes)):
        places = [place for place in layout.places.values() if place.in_blocks == in_blocks]
        ends = [place.offset + place.rows * place.row_bytes for place in places]
        starts = [place.offset for place in places[1:]] + [record]
        assert all(end <= start for end, start in zip(ends, starts, strict=True))
        assert record % ALIGNMENT == 0
    assert all(place.offset % ALIGNMENT == 0 for place in layout.places.values())
    assert all(place.row_bytes % place.word_bytes == 0 for place in layout.places.values())


def test_the_wire_form_shows_what_ranks_must_agree_on_and_nothing_else() -> None:
    form = Layout(TINY, 16).wire_form()
    assert form == Layout(TINY, 64, ring_slack=6).wire_form()
    first, *others = TINY
    changes: list[dict[str, Any]] = [
        {"name": "other"},
        {"layers": first.layers + (9,)},
        {"dim": 2 * first.dim},
        {"row_format": "fp8"},
        {"growth": PerToken(1)},
        {"growth": Ring(16)},
    ]
    for change in changes:
        changed = replace(first, **change)
        assert Layout((changed, *others), 16).wire_form() != form, change
    assert Layout((*others, first), 16).wire_form() != form
    assert Layout(tuple(others), 16).wire_form() != form


def test_a_block_holds_whole_rows() -> None:
    with pytest.raises(ValueError, match="block_tokens 15 is not a multiple of 2"):
        Layout(TINY, 15)


def test_field_names_are_unique() -> None:
    field = StateField("twice", (0,), 32, "fp8", Tail(2))
    with pytest.raises(ValueError, match="same name"):
        Layout((field, field), 16)


@pytest.mark.parametrize(
    ("span", "why"),
    [
        (("window", 0, 90, 101), "not among the 100 rows"),
        (("window", 0, -1, 10), "not among"),
        (("window", 0, 10, 10), "not among"),
        (("window", 0, 12, 10), "not among"),
        (("window", 0, 10, 31), "exceed its ring of 20"),
        (("compressed_r2", 2, 0, 51), "not among the 50 rows"),
        (("compressed_r2", 3, 0, 1), "no field 'compressed_r2' in layer 3"),
        (("unheard", 0, 0, 1), "no field 'unheard'"),
    ],
)
def test_spans_beyond_the_sequence_are_refused(span: tuple[str, int, int, int], why: str) -> None:
    field, layer, start, stop = span
    layout = Layout(TINY, 16, ring_slack=4)
    with pytest.raises(ValueError, match=why):
        layout.check_span(Span(field=field, layer=layer, start=start, stop=stop), 100)
