"""Ports that another application has, or wants at the same moment."""

from __future__ import annotations

import pytest

from tests.ray.site import Site

pytestmark = [pytest.mark.ray, pytest.mark.full, pytest.mark.timeout(300)]


def test_the_port_of_another_application_is_refused(cluster: Site) -> None:
    before = cluster.actors()
    second = Site(cluster.folder, cluster.head, cluster.port, "second")
    refused = second.launch()
    assert refused.returncode != 0
    assert f"HTTP port {cluster.port} belongs to another Tandem cluster" in refused.stderr
    assert cluster.actors() == before
    assert second.tandem("down").returncode != 0  # not even a key of it is left


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
