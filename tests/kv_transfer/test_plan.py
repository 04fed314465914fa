"""Which rows go when: every needed row once, whatever the chunks; pushes fit their cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.messages import Span
from kv_transfer.layout import Layout
from kv_transfer.plan import pack_into_pushes, spans_final_at, spans_of_layer, token_layers
from kv_transfer.staging import push_bytes
from model.state import DRAFT_WINDOW, TAIL, WINDOW, StateField
from tests.kv_transfer.stores import FIELDS, REAL, TINY, needed

AT_THE_END = {WINDOW, DRAFT_WINDOW, TAIL}


def rows_of(spans: Iterable[Span]) -> Counter[tuple[str, int, int]]:
    return Counter(
        (span.field, span.layer, row) for span in spans for row in range(span.start, span.stop)
    )


def planned(fields: tuple[StateField, ...], ends: list[int]) -> list[Span]:
    """Spans of a sequence that grows chunk by chunk to `ends`."""
    spans: list[Span] = []
    for done, length in zip([0, *ends], ends, strict=False):
        spans += spans_final_at(fields, done, length, last=length == ends[-1])
    return spans


chunkings = st.lists(st.integers(1, 90), min_size=1, max_size=8).map(
    lambda sizes: [sum(sizes[: n + 1]) for n in range(len(sizes))]
)


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@settings(max_examples=40, deadline=None)
@given(ends=chunkings)
def test_every_needed_row_is_named_once(fields: tuple[StateField, ...], ends: list[int]) -> None:
    assert rows_of(planned(fields, ends)) == rows_of(needed(fields, ends[-1]))


def test_rings_and_tails_wait_for_the_end() -> None:
    early = spans_final_at(TINY, 0, 33, last=False)
    assert {span.field for span in early}.isdisjoint(AT_THE_END)
    late = spans_final_at(TINY, 33, 33, last=True)
    assert {span.field for span in late} == AT_THE_END


def test_a_pair_is_final_with_its_second_position() -> None:
    fields = tuple(field for field in TINY if field.name == "compressed_r2")
    first, second = TINY[0].layers
    assert spans_final_at(fields, 0, 1, last=False) == []
    assert spans_final_at(fields, 1, 2, last=False) == [
        Span(field="compressed_r2", layer=first, start=0, stop=1),
        Span(field="compressed_r2", layer=second, start=0, stop=1),
    ]
    assert spans_final_at(fields, 2, 3, last=False) == []


def test_a_sequence_does_not_shrink() -> None:
    with pytest.raises(ValueError, match="cannot grow from 5 to 4"):
        spans_final_at(TINY, 5, 4, last=False)


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@settings(max_examples=40, deadline=None)
@given(ends=chunkings, cell_bytes=st.integers(4096, 70_000))
def test_pushes_fit_cells_and_keep_every_row_and_the_order(
    fields: tuple[StateField, ...], ends: list[int], cell_bytes: int
) -> None:
    layout = Layout(fields, 16)
    spans = planned(fields, ends)
    pushes = pack_into_pushes(spans, layout, cell_bytes)
    assert all(0 < push_bytes(layout, push) <= cell_bytes for push in pushes)
    flat = [span for push in pushes for span in push]
    in_order = [(s.field, s.layer, row) for s in spans for row in range(s.start, s.stop)]
    assert [(s.field, s.layer, row) for s in flat for row in range(s.start, s.stop)] == in_order
    assert pushes == pack_into_pushes(spans, layout, cell_bytes)


def test_pushes_are_as_few_as_can_be() -> None:
    layout = Layout(REAL, 128)
    pushes = pack_into_pushes(spans_final_at(REAL, 0, 1024, last=True), layout, 512 << 10)
    assert len(pushes) == -(-layout.state_bytes(1024) // (512 << 10))


def test_a_cell_smaller_than_a_row_is_an_error() -> None:
    with pytest.raises(ValueError, match="a row of tail, 4096 bytes, exceeds a cell"):
        pack_into_pushes(spans_final_at(REAL, 0, 1, last=True), Layout(REAL, 128), 4095)


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@settings(max_examples=40, deadline=None)
@given(ends=chunkings, data=st.data())
def test_layer_by_layer_the_same_rows_are_named_as_chunk_by_chunk(
    fields: tuple[StateField, ...], ends: list[int], data: st.DataObject
) -> None:
    """However far each layer's rows run ahead of the others."""
    spans: list[Span] = []
    for layer in token_layers(fields):
        done = 0
        for length in sorted(data.draw(st.lists(st.sampled_from(ends)))) + ends[-1:]:
            spans += spans_of_layer(fields, layer, done, length)
            done = length
    spans += spans_final_at(fields, ends[-1], ends[-1], last=True)
    assert rows_of(spans) == rows_of(planned(fields, ends))


def test_layers_with_rows_of_tokens_are_the_kv_sources() -> None:
    assert token_layers(REAL) == [2, 8, 14, 20]
