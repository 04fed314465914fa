"""Groups of two ranks that share their experts: two for decode, one for prefill; one rank dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.ray.site import Site, until

pytestmark = [pytest.mark.ray, pytest.mark.full, pytest.mark.timeout(900)]

SIZES = (
    "prefill.ranks=2",
    "decode.ranks=2",
    "decode.groups=2",
    "decode.extra_experts=2",
    "life.start_timeout_s=120",
)
STREAM = 60  # tokens; long enough to be in the middle of it


@contextmanager
def launched(site: Site) -> Iterator[Site]:
    grouped = site.beside("grouped")
    told = grouped.launch(*SIZES)
    assert told.returncode == 0, told.stdout + told.stderr
    try:
        grouped.settle()
        yield grouped
    finally:
        assert grouped.tandem("down").returncode == 0


def test_groups_answer_as_single_ranks_do_and_outlive_the_death_of_a_rank(cluster: Site) -> None:
    """Streams of the group that is lost go on in the other; a new one takes its place."""
    expected = cluster.complete(STREAM)
    with launched(cluster) as grouped:
        ranks = grouped.ranks_of()
        assert len(ranks) == 6
        assert grouped.complete(STREAM) == expected
        with grouped.streaming(STREAM, streams=4) as streams:
            name = next(one for one in ranks if one.startswith("decode-"))
            os.kill(ranks[name], signal.SIGKILL)
            for stream in streams:
                stream.end.result(timeout=240)
                assert stream.told == expected
        group = name.partition("/")[0]
        until(lambda: len(grouped.ranks_of()) == 6 and grouped.is_healthy(), 120)
        assert not any(one.startswith(f"{group}/") for one in grouped.ranks_of())
        assert grouped.complete(STREAM) == expected
