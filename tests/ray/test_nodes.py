"""A second node is lost with a group on it, and comes back: a second raylet plays it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from cluster.processes import Family, family_of, send, wait_gone
from tests.ray.site import Site, until
from tests.ray.streaming import LONG_STREAM

NODE_ADDRESS = "127.0.0.3"
LOST_S = 60.0  # Ray believes a node dead after 15 s; the rest is a busy machine's

pytestmark = [pytest.mark.ray, pytest.mark.full, pytest.mark.timeout(400)]


def nodes(site: Site) -> list[str]:
    """Addresses of those that Ray believes alive."""
    url = f"{site.head.dashboard}/api/v0/nodes"
    told = httpx.get(url).json()["data"]["result"]["result"]
    return [node["node_ip"] for node in told if node["state"] == "ALIVE"]


@contextmanager
def second_node(site: Site) -> Iterator[Family]:
    """Its processes, ended at the latest with the block."""
    options = {
        "--address": site.head.address,
        "--node-ip-address": NODE_ADDRESS,
        "--num-cpus": 3,
        "--object-store-memory": 100 << 20,
        "--min-worker-port": 0,
        "--max-worker-port": 0,
    }
    words = [f"{name}={value}" for name, value in options.items()]
    process = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *words],
        cwd=site.head.folder,
        env=os.environ | site.head.settings(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    family: Family = {}
    try:
        until(lambda: NODE_ADDRESS in nodes(site), 60)
        family |= family_of(process.pid)
        yield family
    finally:
        family |= family_of(process.pid)
        send(family, signal.SIGKILL)
        process.wait(10)
        assert wait_gone(family, 10)


def groups_up(site: Site) -> int:
    replicas = site.application()["deployments"]["Decode"]["replicas"]
    return sum(one["state"] == "RUNNING" for one in replicas)


def test_streams_outlive_a_lost_node_and_its_group_comes_back_with_it(
    cluster: Site, expected: list[int]
) -> None:
    large = ("decode.cpus=2.5", "decode.groups=2")  # one fits the first node
    refused = cluster.launch(*large)
    assert "cannot be placed: its bundle needs CPU 2.5" in refused.stderr
    with ExitStack() as first_life:
        family = first_life.enter_context(second_node(cluster))
        told = cluster.launch(*large)
        assert told.returncode == 0, told.stderr
        until(cluster.is_healthy, 60)
        before = cluster.ranks("decode")
        with cluster.streaming(LONG_STREAM, streams=4) as streams:
            send(family_of(next(iter(family))) | family, signal.SIGKILL)
            assert all(stream.result() == expected[:LONG_STREAM] for stream in streams)
        assert cluster.ready().status_code == 200
        until(lambda: NODE_ADDRESS not in nodes(cluster), LOST_S)
        until(lambda: groups_up(cluster) == 1, LOST_S)
    kept = cluster.ranks("decode").items() & before.items()
    assert len(kept) == 2  # the head and the rank of the other group
    with second_node(cluster):
        until(cluster.is_healthy, 60)
        assert groups_up(cluster) == 2
        assert cluster.ranks("decode").items() >= kept
        assert cluster.complete(20) == expected[:20]
        assert cluster.tandem("scale", "decode=1").returncode == 0
    assert cluster.launch("decode.groups=1").returncode == 0
