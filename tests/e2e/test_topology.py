"""4 prefill and 64 decode ranks in their groups: they exchange, change placement and hand over."""

from __future__ import annotations

import pytest

from tests.topology import run


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_the_whole_domain_answers_like_one_rank_and_every_pool_changes_placement() -> None:
    found = await run(64)
    assert found.same
    assert found.handed_over == 2 * found.requests
    assert found.given >= found.arrived > 0
    assert found.after < found.before
    print(found.table())
