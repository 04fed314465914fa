"""The model equals an independent float64 oracle: logits, tokens, state bytes and drafts."""

from __future__ import annotations

import numpy as np
import pytest

from tests.model.cases import BY_NAME, CASES
from tests.model.expectation import STEPS, expected, largest_gap
from tests.model.running import PackedRows, Request, build, float64

NAMES = [case.name for case in CASES]


@pytest.mark.parametrize("name", NAMES)
def test_in_float64_everything_is_the_oracles(name: str) -> None:
    want, case = expected(name), BY_NAME[name]
    with float64():
        model = build(case)
        packed = PackedRows(model.spec)
        request = Request.of(model, case)
        logits = request.feed(case.length)
        Request.of(model, case, packed).feed(case.length)
        anchor = int(logits[-1].argmax())
        draft = model.draft(
            [anchor], [case.length], request.cache, window_starts=[case.window_start]
        )
        tokens = request.generate(logits, STEPS)
    assert largest_gap(logits, want.logits) < 1e-9
    assert packed.pieces(case.length) == want.pieces
    assert draft.tokens[0].tolist() == want.draft.tokens.tolist()
    assert largest_gap(draft.logits[0], want.draft.logits) < 1e-9
    assert largest_gap(draft.confidence[0], want.draft.confidence) < 1e-9
    assert tokens == want.tokens


@pytest.mark.parametrize("name", ["narrow", "other_sizes", "images", "fp8_wo_a", "compact"])
def test_in_float32_only_rounding_separates_them(name: str) -> None:
    want, case = expected(name), BY_NAME[name]
    model = build(case)
    packed = PackedRows(model.spec)
    request = Request.of(model, case, packed)
    logits = request.feed(case.length)
    pieces = packed.pieces(case.length)
    gaps = np.abs(logits.numpy() - want.logits).max(1)
    assert pieces.keys() == want.pieces.keys()
    stored = {name: bytes_that_differ(pieces[name], want.pieces[name]) for name in pieces}
    differing = sum(count for name, count in stored.items() if not name.startswith("pair"))
    assert differing < 10  # of 20,000: cached values at the edge of a rounding step
    assert np.median(gaps) < 2e-5
    assert gaps.max() < (1e-4 if not differing and case.options.activations == "exact" else 1e-2)
    assert request.generate(logits, STEPS) == want.tokens


def bytes_that_differ(one: bytes, other: bytes) -> int:
    assert len(one) == len(other)
    return sum(a != b for a, b in zip(one, other, strict=True))
