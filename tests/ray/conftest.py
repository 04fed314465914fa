"""One Ray head and one application for all files here, which run in the order of their names.

Each test finds the application healthy, and may leave it busy with becoming so again.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ray.site import Site, Told, site_in, until
from tests.ray.streaming import LONG_STREAM, STREAM


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site_in(tmp_path_factory.mktemp("site")) as site:
        yield site


@pytest.fixture(scope="session")
def job(site: Site) -> Told:
    """The one that launched the application."""
    job = site.submit()
    assert job.returncode == 0, job.stdout + job.stderr
    return job


@pytest.fixture
def cluster(site: Site, job: Told) -> Site:
    """Healthy, and ready for requests."""
    site.settle()
    return site


@pytest.fixture(scope="session")
def expected(site: Site, job: Told, request: pytest.FixtureRequest) -> list[int]:
    """A long greedy answer, from when nothing had happened to the cluster yet."""
    full = any(item.get_closest_marker("full") for item in request.session.items)
    until(lambda: site.ready().status_code == 200, 30)
    return site.complete(LONG_STREAM if full else STREAM)
