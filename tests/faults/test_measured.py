"""The promises that have a number of seconds, measured on real processes."""

from __future__ import annotations

import pytest

from tests.bench_recovery import PROMISES, measure
from tests.faults.field_cases import rounds

pytestmark = [pytest.mark.rank, pytest.mark.timeout(400)]


@rounds(1, 10)
async def test_faults_are_felt_for_no_longer_than_promised(rounds: int) -> None:
    bench = await measure(rounds)
    print(bench.table())
    for what, limit_s in PROMISES.items():
        assert len(bench.times[what]) == rounds
        assert max(bench.times[what]) <= limit_s, what
