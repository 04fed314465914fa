"""Any one process is killed or stopped: no stream is cut, readiness tells the truth."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cluster.config import ClusterConfig
from cluster.processes import born
from tests.ray.site import NEW_REQUEST_WAIT_S, Site, until
from tests.ray.streaming import LONG_STREAM

STREAM = 40  # tokens; long enough to be in the middle of it
T_DETECT_S = ClusterConfig().wire.t_detect_s
NOTICED_S = T_DETECT_S + 2.0
REFUSED_S = NEW_REQUEST_WAIT_S + 2.0

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def kill(cluster: Site, *parts: str) -> set[str]:
    """One process for each part of a name, all at the same moment; returns their names."""
    alive = cluster.actors()
    names = {next(name for name in alive if part in name) for part in parts}
    for name in names:
        os.kill(alive[name], signal.SIGKILL)
    return names


def test_whoever_is_killed_no_stream_is_cut_and_all_are_replaced(
    cluster: Site, expected: list[int]
) -> None:
    """The router; a rank of one pool and the head of the other; last the ingress."""
    before = cluster.actors()
    with cluster.streaming(STREAM, streams=2) as streams:
        killed = kill(cluster, "#Router#")
        assert cluster.complete(4) == expected[:4]  # by the last membership
        killed |= kill(cluster, "prefill-", "#Decode#")
        until(lambda: cluster.ready().status_code == 503, NOTICED_S)
        began = time.monotonic()
        refused = cluster.ask()
        assert time.monotonic() - began < REFUSED_S  # and not recovery_wait_s
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert "worker" in refused.json()["error"]["message"]
        for stream in streams:
            assert stream.result() == expected[:STREAM]
    ranks = cluster.ranks()
    killed |= kill(cluster, "#Ingress#")
    until(cluster.answers, 60)
    assert cluster.complete(20) == expected[:20]
    assert cluster.ranks() == ranks
    until(cluster.is_healthy, 60)
    after = cluster.actors()
    assert not killed & after.keys()
    assert len(after) == len(before)


@pytest.mark.full
@pytest.mark.parametrize("process", ["decode-", "prefill-", "#Decode#", "#Router#"])
def test_a_killed_process_cuts_no_stream_and_is_replaced(
    cluster: Site, expected: list[int], process: str
) -> None:
    before = cluster.actors()
    with cluster.streaming(LONG_STREAM, streams=2) as streams:
        killed = kill(cluster, process)
        for stream in streams:
            assert stream.result() == expected[:LONG_STREAM]
    until(cluster.is_healthy, 60)
    after = cluster.actors()
    assert not killed & after.keys()
    assert any(process in name for name in after.keys() - before.keys())
    assert len(after) == len(before)


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


@pytest.mark.full
def test_a_rank_that_hangs_is_proven_dead_and_replaced_and_its_stream_goes_on(
    cluster: Site, expected: list[int]
) -> None:
    """Its peers suspect it, its head kills it, Serve replaces it; who is new hears so at once."""
    name, pid = next(one for one in cluster.ranks().items() if one[0].startswith("decode-"))
    with cluster.streaming(300) as (stream,):
        os.kill(pid, signal.SIGSTOP)
        stopped_at = time.monotonic()
        until(lambda: cluster.ready().status_code == 503, NOTICED_S)
        began = time.monotonic()
        refused = cluster.ask()
        assert refused.status_code == 503
        assert time.monotonic() - began < REFUSED_S
        until(lambda: born(pid) is None, 2 * T_DETECT_S + 5.0)
        print(f"stopped -> gone: {time.monotonic() - stopped_at:.1f} s")
        assert stream.result() == expected[:300]
    until(cluster.is_healthy, 60)
    assert name not in cluster.ranks()
