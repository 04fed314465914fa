"""Request state is exactly what is declared: handed over it suffices, and each field is needed.

A request goes on from rows that went through bytes, on another rank or after a draft was taken
back, and nothing may show.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model.state import TAIL
from model.transformer import Drafts, Transformer
from tests.model.cases import BY_NAME
from tests.model.running import PackedRows, Request, build

MICRO = BY_NAME["micro"]
WINDOW, BLOCK = MICRO.spec.sliding_window, MICRO.spec.dspark_block_size
LENGTHS = (1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 33, 46, 47)


def prefilled(length: int, *, ring: int | None = None) -> tuple[Request, Tensor]:
    """A request after a prompt of `length`, and its logits."""
    model = build(MICRO)
    request = Request.of(model, MICRO, PackedRows(model.spec, ring))
    return request, request.feed(length)


def continued(request: Request, cache: PackedRows, tokens: list[int]) -> Tensor:
    """Logits of further tokens, one a step, from the state in `cache`."""
    length = request.length
    ids = [*request.tokens[:length], *tokens]
    other = Request(request.model, request.case, cache, ids, length)
    return other.feed(*[1] * len(tokens))


def drafted(request: Request, cache: PackedRows) -> Drafts:
    with torch.no_grad():
        return request.model.draft([77], [request.length], cache)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_continuation_from_the_declared_rows_is_the_same_to_the_bit(length: int) -> None:
    request, _ = prefilled(length)
    assert isinstance(request.cache, PackedRows)
    received = request.cache.handoff(length)
    theirs, ours = drafted(request, request.cache), drafted(request, received)
    assert torch.equal(ours.logits, theirs.logits)
    tokens = [9, 8, 7, 250, 6, 5]
    assert torch.equal(
        continued(request, received, tokens), continued(request, request.cache, tokens)
    )


@pytest.mark.parametrize("field", PackedRows(MICRO.spec).fields)
def test_a_field_that_is_not_sent_is_missed(field: str) -> None:
    request, _ = prefilled(47)  # odd: the open pair is state
    assert isinstance(request.cache, PackedRows)
    received = request.cache.handoff(47)
    for (name, _), held in received.rows.items():
        if name == field:
            held.clear()
    with pytest.raises(KeyError):
        _ = continued(request, received, [9]), drafted(request, received)


@pytest.mark.parametrize("field", PackedRows(MICRO.spec).fields)
def test_a_field_that_arrives_wrong_shows(field: str) -> None:
    request, _ = prefilled(47)
    assert isinstance(request.cache, PackedRows)
    received = request.cache.handoff(47)
    right = continued(request, request.cache.handoff(47), [9]), drafted(request, received).logits
    for (name, _), held in received.rows.items():
        if name == field:  # in the wrong order; a lone row: zeros
            turned = [held[row] for row in reversed(held)] if len(held) > 1 else [0 * held[46]]
            held.update(zip(list(held), turned, strict=True))
    wrong = continued(request, received, [9]), drafted(request, received).logits
    assert not (torch.equal(right[0], wrong[0]) and torch.equal(right[1], wrong[1]))


@pytest.mark.parametrize("accepted", range(BLOCK + 1))
@pytest.mark.parametrize("length", [33, 42])
def test_a_partly_accepted_draft_leaves_no_trace(length: int, accepted: int) -> None:
    """Verify an anchor and a whole block, keep some of it, go on with another token."""
    request, _ = prefilled(length, ring=WINDOW + BLOCK)
    verified = [100 + i for i in range(BLOCK + 1)]
    request.tokens = [*request.tokens[:length], *verified]
    request.feed(BLOCK + 1)
    request.length = length + 1 + accepted
    request.tokens = [*request.tokens[: request.length], 200, 201, 202]

    fresh, _ = prefilled(length)
    fresh.tokens = list(request.tokens)
    fresh.feed(1 + accepted)
    assert torch.equal(
        request.model.draft([200], [request.length], request.cache).logits,
        fresh.model.draft([200], [fresh.length], fresh.cache).logits,
    )
    assert torch.equal(request.feed(1, 1, 1), fresh.feed(3))


def test_a_ring_of_just_the_window_loses_rows_that_a_rejected_draft_needs() -> None:
    request, _ = prefilled(46, ring=WINDOW)
    request.tokens = [*request.tokens[:46], *range(100, 101 + BLOCK)]
    request.feed(BLOCK + 1)
    request.length = 47
    with pytest.raises(KeyError):
        request.feed(1)


@pytest.mark.parametrize("name", ["narrow", "images", "image_ids", "fp8_wo_a", "compact_full"])
def test_whole_equals_chunked(name: str) -> None:
    """Chunk borders fall on odd positions, before, in and after images, and around the cut."""
    case = BY_NAME[name]
    model = build(case)
    whole, chunked = PackedRows(model.spec), PackedRows(model.spec)
    sizes = [1, 2, 18, 1, 9, 3, 1, case.length - 35]
    at_once = Request.of(model, case, whole).feed(case.length)
    assert torch.equal(Request.of(model, case, chunked).feed(*sizes), at_once)
    assert chunked.pieces(case.length) == whole.pieces(case.length)


def test_the_open_pair_of_an_odd_length_is_the_only_tail() -> None:
    request, _ = prefilled(47)
    assert isinstance(request.cache, PackedRows)
    for (name, _), held in request.cache.handoff(47).rows.items():
        assert name != TAIL or list(held) == [46]
    for (name, _), held in request.cache.handoff(46).rows.items():
        assert name != TAIL or not held


def test_a_chosen_draft_token_shifts_the_next_logits() -> None:
    request, _ = prefilled(33)
    model: Transformer = request.model
    forced = torch.tensor([11])
    with torch.no_grad():
        greedy = model.draft([77], [33], request.cache)
        chosen = model.draft([77], [33], request.cache, choose=lambda logits, place: forced)
    assert chosen.tokens.tolist() == [[11] * BLOCK]
    assert torch.equal(chosen.logits[:, 0], greedy.logits[:, 0])
    assert not torch.equal(chosen.logits[:, 1], greedy.logits[:, 1])
