"""Upgrades: the next version in place of this one, or beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ray.site import Site, ended, until
from tests.ray.streaming import STREAM

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def test_changed_code_replaces_every_rank_and_running_streams_finish(
    cluster: Site, expected: list[int]
) -> None:
    before = cluster.ranks()
    Path(cluster.folder / "engine" / "the_next_version.py").write_text("")
    launch = cluster.start(*cluster.launching())
    # the next rank's process is there, and takes seconds before it can be asked
    until(lambda: any("/" in name for name in cluster.ranks("decode").keys() - before.keys()), 60)
    with cluster.streaming(STREAM, streams=2) as streams:
        told = ended(launch)
        assert told.returncode == 0, told.stdout + told.stderr
        assert "changed: the code: restarts everything" in told.stdout
        assert all(stream.result() == expected[:STREAM] for stream in streams)
    assert {rank for stream in streams for rank in stream.decoded_by} <= before.keys()
    until(cluster.is_healthy, 60)
    assert not cluster.ranks().keys() & before.keys()
    assert cluster.complete(20) == expected[:20]


@pytest.mark.full
def test_a_second_application_comes_and_goes_beside_the_first(
    cluster: Site, expected: list[int]
) -> None:
    blue, before = cluster, cluster.actors()
    green = cluster.beside("green")
    told = green.launch()
    assert told.returncode == 0, told.stderr
    until(lambda: green.ready().status_code == 200, 30)
    assert green.complete(20) == blue.complete(20) == expected[:20]
    assert len(green.actors()) > len(before)
    down = green.tandem("down")
    assert down.returncode == 0, down.stderr
    assert blue.actors() == before
    assert blue.complete(20) == expected[:20]
