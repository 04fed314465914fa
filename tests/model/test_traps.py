"""Each known way to misread the model is noticed: planted, it breaks parity with the oracle.

The right model equals the oracle to 1e-9 in float64 on the same cases (test_oracle_parity.py). If
a trap went unnoticed, the cases would not test what it breaks.
"""

from __future__ import annotations

import pytest
import torch

from tests.model.cases import BY_NAME, Case
from tests.model.expectation import Expectation, expected, largest_gap
from tests.model.running import PackedRows, Request, build, float64
from tests.model.traps import attention, drafting, layers
from tests.model.traps.registry import TRAPS

assert attention, (drafting, layers)  # importing them fills TRAPS


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, plant = TRAPS[name]
    want = expected(case)
    plant(monkeypatch)
    assert deviation(BY_NAME[case], want) > 1e-7


def deviation(case: Case, want: Expectation) -> float:
    """The largest gap among logits, drafts and confidences; 1 if state bytes differ."""
    with float64():
        model = build(case)
        cache = PackedRows(model.spec)
        try:
            logits = Request.of(model, case, cache).feed(case.length)
        except KeyError:  # a row was read that nobody had written
            return 1.0
        anchor = int(torch.from_numpy(want.logits[-1]).argmax())
        starts = [case.window_start]
        draft = model.draft([anchor], [case.length], cache, window_starts=starts)
    if cache.pieces(case.length) != want.pieces:
        return 1.0
    return max(
        largest_gap(logits, want.logits),
        largest_gap(draft.logits[0], want.draft.logits),
        largest_gap(draft.confidence[0], want.draft.confidence),
    )
