"""The soak, short by default and long in `make test-full`: nothing wrong, lost, or hanging."""

from __future__ import annotations

import pytest

from tests.soak import soak

pytestmark = pytest.mark.rank


@pytest.mark.parametrize(
    ("seconds", "faults"),
    [
        pytest.param(20, 5, id="short"),
        pytest.param(600, 200, id="long", marks=[pytest.mark.full, pytest.mark.timeout(900)]),
    ],
)
async def test_random_faults_under_random_load(seconds: int, faults: int) -> None:
    tally = await soak(seconds, seed=1, requests=8)
    print(tally.table(seconds))
    assert not tally.wrong
    assert not tally.leaked
    assert not tally.hung
    assert not tally.errors  # there was always a way to go on
    assert tally.finished > seconds // 4
    assert tally.faults.total() >= faults
