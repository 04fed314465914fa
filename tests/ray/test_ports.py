"""Ports: somebody has one, or wants the same one at the same moment."""

from __future__ import annotations

import socket
import time

import pytest

from tests.ray.site import Site

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def test_a_taken_http_port_is_named_within_ten_seconds(cluster: Site) -> None:
    second, before = cluster.beside("second"), cluster.actors()
    with socket.create_server(("127.0.0.1", second.port)):
        began = time.monotonic()
        refused = second.launch()
    assert refused.returncode != 0
    assert time.monotonic() - began < 10
    assert f"cannot listen on HTTP port 127.0.0.1:{second.port}" in refused.stderr
    assert cluster.actors() == before


@pytest.mark.full
def test_the_port_of_another_application_is_refused(cluster: Site) -> None:
    before = cluster.actors()
    second = Site(cluster.folder, cluster.head, cluster.port, "second")
    refused = second.launch()
    assert refused.returncode != 0
    assert f"HTTP port {cluster.port} belongs to another Tandem cluster" in refused.stderr
    assert cluster.actors() == before
    assert second.tandem("down").returncode != 0  # not even a key of it is left


@pytest.mark.full
def test_two_launches_at_the_same_moment_do_not_undo_each_other(cluster: Site) -> None:
    sites = [cluster.beside("left"), cluster.beside("right")]
    launches = [site.start(*site.launching()) for site in sites]
    for site, launch in zip(sites, launches, strict=True):
        _, said = launch.communicate(timeout=100)
        assert launch.returncode == 0, said
        assert site.complete()
    assert cluster.is_healthy()
    for site in sites:
        assert site.tandem("down").returncode == 0
