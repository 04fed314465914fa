"""Decode steps alone: what they are given, their shapes, and tokens that are chosen in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from cluster.messages import Request, Sampling
from engine.context import Context
from engine.decode_buffer import DecodeBuffer, Row
from engine.decode_shapes import DecodeShapes
from engine.decode_steps import DecodeSteps
from engine.request import Running
from engine.sampler import UNSOUND, sample
from engine.schedule import Grant
from engine.step_batch import StepBatches
from engine.step_loop import Work
from kv_transfer.blocks import BlockPool
from kv_transfer.layout import Layout
from kv_transfer.slab import Slab
from kv_transfer.state_view import view_of
from model.packed.place_rows import chunk_rows, decode_rows
from model.packed.rows import PackedRows, Shape
from model.state import state_fields
from tests.engine.packed_engine import BLOCK_TOKENS, CASE, Spoiled, a_request, small_model
from tests.model.cases import IMAGE
from tests.model.running import float64

CPU = torch.device("cpu")
KEEP = 6


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    with float64():
        yield


class Requests:
    """Some that have been prefilled up to their last token, over one slab."""

    def __init__(self, *requests: Request) -> None:
        self.model = small_model()
        self.slab = Slab(Layout(state_fields(self.model.spec), BLOCK_TOKENS), 64, 8)
        self.pool = BlockPool(64, 8, BLOCK_TOKENS)
        self.running = [
            Running(one, self.pool.lease(one.longest), [*one.token_ids, 5]) for one in requests
        ]
        work = [
            Work(one, Grant(n, 0, len(one.token_ids) - 1, samples=False))
            for n, one in enumerate(self.running)
        ]
        batch = StepBatches(self.model.spec).of(work)
        leases = [one.lease for one in self.running]
        chunks = chunk_rows(batch, leases, self.model.spec, self.model.options, CPU)
        self.model.forward(chunks.rows, chunks.shape, view_of(self.slab), chunks.extras)

    def steps(self, max_rows: int = 8, max_blocks: int = 16) -> DecodeSteps:
        return DecodeSteps(self.model, self.slab, DecodeShapes(max_rows, max_blocks), name="test")

    def rows(self, *numbers: int) -> list[Row]:
        return [
            Row(one, len(one.token_ids) - 1, token=one.token_ids[-1])
            for one in (self.running[number] for number in numbers)
        ]


LENGTHS = (1, 2, 7, 18)
PLAIN = [a_request(length, length) for length in LENGTHS]


def test_a_steps_integers_are_those_of_a_batch_of_the_same_rows() -> None:
    some = Requests(*PLAIN)
    for one in some.running:  # a picture's id in the middle of n-grams: what is before it is dead
        one.token_ids[len(one.token_ids) // 2] = IMAGE
    spec = some.model.spec
    shape = Shape(6, 6, 8, in_place=True)
    buffer = DecodeBuffer(shape, spec, CPU, KEEP)
    for numbers in ((0, 1, 2, 3), (0, 1, 2, 3), (3, 1), (1, 3, 0), ()):
        running = [some.running[number] for number in numbers]
        buffer.fill(some.rows(*numbers), shape)
        found = buffer.on_device(shape).rows
        if not running:
            assert not found.live_T.any()
            continue
        work = [
            Work(one, Grant(n, len(one.token_ids) - 1, 1, samples=True))
            for n, one in enumerate(running)
        ]
        batch = StepBatches(spec, keep=KEEP).of(work)
        expected = decode_rows(batch, [one.lease for one in running], shape, CPU)
        _check_same(found, expected, len(running))
        for one in running:
            one.token_ids.append(9)


def _check_same(found: PackedRows, expected: PackedRows, count: int) -> None:
    assert torch.equal(found.positions_T, expected.positions_T)  # also of padding
    for name in ("token_ids_T", "requests_T", "ngrams_TN", "slots_R", "starts_R", "first_R"):
        assert torch.equal(getattr(found, name)[:count], getattr(expected, name)[:count]), name
    for name in ("floors_R", "clips_R"):
        assert torch.equal(getattr(found, name)[:count], getattr(expected, name)[:count]), name
    own_RP = expected.tables_RP[:count] > 0
    assert torch.equal(found.tables_RP[:count][own_RP], expected.tables_RP[:count][own_RP])
    assert int(found.tables_RP.max()) < 64  # behind a request's own: some record that exists


def test_a_source_that_is_not_known_yet_stands_in_its_n_gram_too() -> None:
    some = Requests(*PLAIN)
    steps = some.steps()
    first = steps.launch(some.rows(2, 3))
    known = first.tokens()
    ahead = [
        row._replace(position=row.position + 1, token=0, source=1 - number)
        for number, row in enumerate(reversed(some.rows(2, 3)))
    ]
    found = steps.launch(ahead)
    again = Requests(*PLAIN)
    steps = again.steps()
    steps.launch(again.rows(2, 3))
    told = [
        row._replace(position=row.position + 1, token=token)
        for row, token in zip(again.rows(2, 3), known, strict=True)
    ]
    expected = steps.launch(told)
    assert torch.equal(found.logits_RV[[1, 0]], expected.logits_RV)


@pytest.mark.parametrize("fails", [False, True])
def test_a_rehearsal_between_two_steps_changes_nothing(fails: bool) -> None:
    """A graph may be captured while the step before is still on its way, and may fail."""
    logits, shape = [], Shape(8, 8, 16, in_place=True)
    for rehearsed in (False, True):
        some = Requests(*PLAIN)
        steps = some.steps()
        steps.launch(some.rows(1, 2))
        before = some.slab.blocks.clone(), some.slab.slots.clone()
        if rehearsed:
            with suppress(ZeroDivisionError), steps._rehearsal(shape):
                steps._step(shape)
                assert 1 / (not fails)
        assert torch.equal(some.slab.blocks, before[0])
        assert torch.equal(some.slab.slots, before[1])
        ahead = [
            row._replace(position=row.position + 1, token=0, source=number)
            for number, row in enumerate(some.rows(1, 2))
        ]
        logits.append(steps.launch(ahead).logits_RV)
    assert torch.equal(*logits)


@pytest.mark.parametrize(("max_rows", "max_blocks"), [(4, 5), (8, 16), (13, 64)])
def test_padding_changes_no_logits(max_rows: int, max_blocks: int) -> None:
    some = Requests(*PLAIN)
    steps = some.steps(max_rows, max_blocks)
    before = some.slab.blocks.clone(), some.slab.slots.clone()
    together = steps.launch(some.rows(0, 1, 2, 3)).logits_RV.clone()
    for number in range(4):
        some.slab.blocks.copy_(before[0])
        some.slab.slots.copy_(before[1])
        alone = steps.launch(some.rows(number)).logits_RV
        assert torch.allclose(alone[0], together[number], rtol=0, atol=1e-12)


def test_tokens_are_the_best_or_drawn_as_the_sampler_draws_them() -> None:
    options = [{}, {"temperature": 0.7, "seed": 3}, {"temperature": 2.0, "seed": 4, "top_k": 9}, {}]
    requests = [a_request(n, n, **one) for n, one in zip(LENGTHS, options, strict=True)]
    some = Requests(*requests)
    contexts = [Context(one.request, one.token_ids) for one in some.running]
    rows = [
        row._replace(draw=context.drawn)
        for row, context in zip(some.rows(0, 1, 2, 3), contexts, strict=True)
    ]
    flight = some.steps().launch(rows)
    choices = sample(flight.logits_RV, contexts)
    assert flight.tokens() == [getattr(choice, "token", None) for choice in choices]


def test_a_row_without_numbers_has_no_token() -> None:
    some = Requests(*PLAIN)
    steps = some.steps()
    number = torch.tensor([1])

    def spoil(rows: PackedRows, logits_TV: Tensor) -> Tensor:
        return logits_TV.index_fill(0, number, torch.nan)

    steps._model = Spoiled(some.model, spoil)  # type: ignore[assignment]
    best, nothing, drawn = steps.launch(
        [row._replace(draw=_drawn() if n else None) for n, row in enumerate(some.rows(0, 1, 2))]
    ).tokens()
    assert best >= 0
    assert nothing == UNSOUND
    assert drawn >= 0


def _drawn() -> Sampling:
    return a_request(1, 1, temperature=1.0, seed=1).sampling


def test_ids_that_only_pad_the_vocabulary_never_come() -> None:
    some = Requests(*PLAIN)
    size = CASE.spec.vocab_size
    free = some.steps().launch(some.rows(0, 1, 2, 3)).tokens()
    spelled = min(free)  # all of them are padding now
    shapes = DecodeShapes(8, 16)
    steps = DecodeSteps(some.model, some.slab, shapes, name="test", spelled_ids=spelled)
    found = steps.launch(some.rows(0, 1, 2, 3)).tokens()
    assert size > spelled > max(found) >= 0
