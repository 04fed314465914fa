"""Any one process is killed or stopped: no stream is cut, readiness tells the truth."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cluster.config import ClusterConfig
from tests.ray.site import Site, until

STREAM = 300  # tokens; long enough to be in the middle of it
NOTICED_S = ClusterConfig().wire.t_detect_s + 2.0

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    "process",
    [
        "decode-",
        pytest.param("prefill-", marks=pytest.mark.full),
        pytest.param("#Decode#", marks=pytest.mark.full),
        pytest.param("#Router#", marks=pytest.mark.full),
    ],
)
def test_a_killed_process_cuts_no_stream_and_is_replaced(
    cluster: Site, expected: list[int], process: str
) -> None:
    before = cluster.actors()
    victim = next(name for name in before if process in name)
    with cluster.streaming(STREAM, streams=2) as streams:
        os.kill(before[victim], signal.SIGKILL)
        assert cluster.complete(20) == expected[:20]  # held until there is somebody to do it
        for stream in streams:
            assert stream.result() == expected[:STREAM]
    until(cluster.is_healthy, 60)
    after = cluster.actors()
    assert victim not in after
    assert any(process in name for name in after.keys() - before.keys())
    assert len(after) == len(before)


def test_a_killed_ingress_is_replaced_and_ranks_go_on(cluster: Site, expected: list[int]) -> None:
    before, ranks = cluster.actors(), cluster.ranks()
    victim = next(name for name in before if "#Ingress#" in name)
    os.kill(before[victim], signal.SIGKILL)
    until(lambda: victim not in cluster.actors(), 10)
    until(lambda: cluster.answers(), 60)
    assert cluster.complete(20) == expected[:20]
    assert cluster.ranks() == ranks


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_readiness_tells_of_a_stopped_decode_rank_and_of_its_return(
    cluster: Site, expected: list[int]
) -> None:
    """Nobody waits for it, so nobody suspects it, and it may wake up again."""
    before = cluster.ranks()
    decode = next(pid for name, pid in before.items() if name.startswith("decode-"))
    with stopped(decode):
        until(lambda: cluster.ready().status_code == 503, NOTICED_S)
        assert "no live decode rank" in cluster.ready().json()["error"]["message"]
    until(lambda: cluster.ready().status_code == 200, NOTICED_S)
    assert cluster.complete(20) == expected[:20]
    assert cluster.ranks() == before


@pytest.mark.full
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_readiness_tells_of_a_pool_whose_ranks_are_dead(cluster: Site, role: str) -> None:
    name, pid = next(one for one in cluster.ranks().items() if one[0].startswith(f"{role}-"))
    os.kill(pid, signal.SIGKILL)
    until(lambda: cluster.ready().status_code == 503, NOTICED_S)
    assert f"no live {role} rank" in cluster.ready().json()["error"]["message"]
    until(lambda: cluster.ready().status_code == 200, 60)
    assert name not in cluster.ranks()


@pytest.mark.full
def test_readiness_stays_while_everything_is_busy_but_moves(
    cluster: Site, expected: list[int]
) -> None:
    """More streams than a decode rank has slots for."""
    slots = ClusterConfig().decode.engine.num_slots
    with cluster.streaming(60, streams=slots) as streams:
        while not all(stream.end.done() for stream in streams):
            began = time.monotonic()
            assert cluster.ready().status_code == 200
            assert time.monotonic() - began < 2.0
        assert all(stream.result() == expected[:60] for stream in streams)
