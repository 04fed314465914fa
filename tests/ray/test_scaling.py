"""More groups and fewer, under traffic."""

from __future__ import annotations

import json

import pytest

from tests.ray.site import Site, until

STREAM = 400  # tokens, so that they run while it happens

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def test_decode_grows_and_shrinks_under_traffic_and_no_stream_is_cut(
    cluster: Site, expected: list[int]
) -> None:
    before = cluster.ranks()
    with cluster.streaming(STREAM, streams=2) as first:
        told = cluster.tandem("scale", "decode=2")
        assert told.returncode == 0, told.stderr
        assert "Decode: 1 -> 2" in told.stdout
        assert len(cluster.ranks("decode")) == 4
        with cluster.streaming(STREAM, streams=4) as second:
            told = cluster.tandem("scale", "decode=1", "prefill=1", "--json")
            assert told.returncode == 0, told.stderr
            assert json.loads(told.stdout)["pools"]["decode"] == {"before": 2, "after": 1}
            assert len(cluster.ranks("decode")) == 2
            for stream in (*first, *second):
                assert stream.result() == expected[:STREAM]
    assert len(cluster.ranks()) == len(before)


def test_a_scale_that_finds_no_room_says_what_lacks_and_changes_nothing(cluster: Site) -> None:
    before = cluster.actors()
    told = cluster.tandem("scale", "decode=40")
    assert told.returncode == 1
    assert "of Decode group" in told.stderr
    assert "cannot be placed: its bundle needs CPU 0.25" in told.stderr
    assert cluster.actors() == before
    assert cluster.sizes()["Decode"] == 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("decoder=2",), "unknown pool 'decoder': tandem has decode and prefill"),
        (("decode=2", "--name", "nosuch"), "no application 'nosuch' runs"),
    ],
)
def test_a_scale_of_what_is_not_there_says_so(
    cluster: Site, words: tuple[str, ...], said: str
) -> None:
    told = cluster.tandem("scale", *words)
    assert told.returncode == 1
    assert said in told.stderr


@pytest.mark.full
def test_serve_scales_by_itself_where_it_is_told_to(cluster: Site, expected: list[int]) -> None:
    switched_on = (
        "autoscale.enabled=true",
        "autoscale.decode.requests=4",
        "autoscale.decode.max_groups=2",
        "autoscale.up_delay_s=1",
        "autoscale.down_delay_s=5",
    )
    told = cluster.launch(*switched_on)
    assert told.returncode == 0, told.stderr
    refused = cluster.tandem("scale", "decode=2")
    assert refused.returncode == 1
    assert "Serve chooses the number of groups (decode 1 to 2)" in refused.stderr
    with cluster.streaming(STREAM, streams=12) as streams:
        until(lambda: cluster.sizes()["Decode"] == 2, 60)
        assert all(stream.result() == expected[:STREAM] for stream in streams)
    assert cluster.sizes()["Prefill"] == 1
    until(lambda: cluster.sizes()["Decode"] == 1, 120)
    told = cluster.launch()
    assert told.returncode == 0, told.stderr
    assert cluster.tandem("scale", "decode=1").returncode == 0
