"""A rank that is stopped for good: its peers suspect it, its head kills it, Serve replaces it."""

from __future__ import annotations

import os
import signal
import time

import pytest

from cluster.config import ClusterConfig
from cluster.processes import born
from tests.ray.site import Site, until

T_DETECT_S = ClusterConfig().wire.t_detect_s

pytestmark = [pytest.mark.ray, pytest.mark.full, pytest.mark.timeout(300)]


def test_a_rank_that_hangs_is_proven_dead_and_replaced_and_its_stream_goes_on(
    cluster: Site, expected: list[int]
) -> None:
    name, pid = next(one for one in cluster.ranks().items() if one[0].startswith("decode-"))
    with cluster.streaming(300) as (stream,):
        os.kill(pid, signal.SIGSTOP)
        stopped_at = time.monotonic()
        until(lambda: born(pid) is None, 2 * T_DETECT_S + 5.0)
        print(f"stopped -> gone: {time.monotonic() - stopped_at:.1f} s")
        assert stream.result() == expected[:300]
    until(cluster.is_healthy, 60)
    assert name not in cluster.ranks()
