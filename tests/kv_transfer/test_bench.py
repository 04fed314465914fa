"""The benchmark runs; its figures are for reading, not for asserting."""

from __future__ import annotations

import pytest

from kv_transfer.bench import measure
from tests.kv_transfer.stores import TINY


@pytest.mark.rank
def test_the_benchmark_moves_state_and_compares_it_with_memcpy() -> None:
    title, header, *lines = measure(TINY, length=1024, rounds=1).splitlines()
    assert title.startswith("1024 positions, 0.2 MiB, 1 pushes, nixl/UCX")
    assert header.split() == ["median", "ms", "best", "ms", "GB/s", "of", "memcpy", "bar"]
    names = [line[:16].strip() for line in lines]
    ways = ["packed handoff", "direct handoff"]
    assert names == ["memcpy", "write", *ways, "pack alone", "digest alone"]
    assert [line.split()[-1] for line in lines[1:4]] == ["0.35", "0.10", "0.10"]
