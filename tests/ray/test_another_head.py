"""Two Ray clusters on one machine, launched on at the same moment: they never meet."""

from __future__ import annotations

import json

import pytest

from tests.ray.site import Site, site_in

pytestmark = [pytest.mark.ray, pytest.mark.full, pytest.mark.timeout(400)]


def rank_pids(site: Site) -> set[int]:
    """Of every rank that the router of this cluster knows."""
    told = site.tandem("status", "--json")
    assert told.returncode == 0, told.stderr
    ranks = [rank for group in json.loads(told.stdout)["groups"] for rank in group["ranks"]]
    assert all(rank["load"] for rank in ranks)
    return {rank["pid"] for rank in ranks}


def test_two_clusters_launched_at_the_same_moment_never_meet(
    cluster: Site, expected: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    with site_in(tmp_path_factory.mktemp("other")) as other:
        sites = [cluster.beside("left"), other]
        launches = [site.start(*site.launching()) for site in sites]
        for launch in launches:
            _, said = launch.communicate(timeout=120)
            assert launch.returncode == 0, said
        pids = [rank_pids(site) for site in (cluster, *sites)]
        assert [len(one) for one in pids] == [2, 2, 2]
        assert len(set.union(*pids)) == 6
        for site in (cluster, *sites):
            assert site.complete(20) == expected[:20]
        thief = Site(other.folder, other.head, cluster.port, "thief")
        refused = thief.launch()
        assert refused.returncode != 0
        assert f"HTTP port {cluster.port} belongs to another Tandem cluster" in refused.stderr
        assert sites[0].tandem("down").returncode == 0
    assert cluster.is_healthy()
