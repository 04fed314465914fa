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
        cache = PackedRows(model.spec)
        request = Request.of(model, case, cache)
        logits = request.feed(case.length)
        pieces = cache.pieces(case.length)
        anchor, starts = int(logits[-1].argmax()), [case.window_start]
        draft = model.draft([anchor], [case.length], cache, window_starts=starts)
        tokens = request.generate(logits, STEPS)
    assert largest_gap(logits, want.logits) < 1e-9
    assert pieces == want.pieces
    assert draft.tokens[0].tolist() == want.draft.tokens.tolist()
    assert largest_gap(draft.logits[0], want.draft.logits) < 1e-9
    assert largest_gap(draft.confidence[0], want.draft.confidence) < 1e-9
    assert tokens == want.tokens


def test_in_float32_only_rounding_separates_them() -> None:
    """A cached value on the edge of a rounding step may fall on its other side, and what follows
    from it differs more. Which do depends on the processor, so at most one case here may."""
    on_an_edge = []
    for name in ("narrow", "other_sizes", "images", "fp8_wo_a", "compact"):
        want, case = expected(name), BY_NAME[name]
        model = build(case)
        packed = PackedRows(model.spec)
        request = Request.of(model, case, packed)
        logits = request.feed(case.length)
        pieces = packed.pieces(case.length)
        gaps = np.abs(logits.numpy() - want.logits).max(1)
        assert pieces.keys() == want.pieces.keys()
        stored = {key: bytes_that_differ(pieces[key], want.pieces[key]) for key in pieces}
        differing = sum(count for key, count in stored.items() if not key.startswith("pair"))
        if differing:
            on_an_edge.append((name, differing))
            continue
        assert np.median(gaps) < 2e-5
        assert gaps.max() < 1e-4
        assert request.generate(logits, STEPS) == want.tokens
    assert len(on_an_edge) <= 1, on_an_edge


def bytes_that_differ(one: bytes, other: bytes) -> int:
    assert len(one) == len(other)
    return sum(a != b for a, b in zip(one, other, strict=True))
