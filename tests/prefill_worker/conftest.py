"""One prefill rank whose link is gated, two decode ranks, and the test as their caller."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from cluster.wire import Identity, Peers, new_incarnation
from prefill_worker.worker import PrefillRank
from tests.prefill_worker.calls import Gated, gated
from tests.tiny import (
    SECRET,
    TinyCluster,
)


@pytest.fixture
async def cluster() -> AsyncIterator[TinyCluster]:
    async with TinyCluster(prefill=1, decode=2, open_transport=gated) as cluster:
        yield cluster
        assert await cluster.settled()


@pytest.fixture
def prefill(cluster: TinyCluster) -> PrefillRank:
    return cluster.prefill[0]


@pytest.fixture
def link(prefill: PrefillRank) -> Gated:
    assert isinstance(prefill.transport, Gated)
    return prefill.transport


@pytest.fixture
async def caller(cluster: TinyCluster) -> AsyncIterator[Peers]:
    peers = Peers(Identity("caller", new_incarnation(), SECRET), cluster.config.wire)
    yield peers
    await peers.close()
