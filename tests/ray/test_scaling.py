"""More groups and fewer, under traffic."""

from __future__ import annotations

import json

import pytest

from tests.ray.site import Site, ended, until
from tests.ray.streaming import LONG_STREAM

STREAM = 50  # tokens, so that they run while it happens

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def test_decode_grows_and_shrinks_under_traffic_and_no_stream_is_cut(
    cluster: Site, expected: list[int]
) -> None:
    before = cluster.ranks()
    scale = cluster.start_tandem("scale", "decode=2", "prefill=1", "--json")
    until(lambda: len(cluster.ranks("decode")) == 4, 60)  # its processes are there, not yet ready
    with cluster.streaming(STREAM, streams=2) as first:
        told = ended(scale)
        assert told.returncode == 0, told.stderr
        assert json.loads(told.stdout)["pools"]["decode"] == {"before": 1, "after": 2}
        assert "Decode: 1 -> 2" in told.stderr
        with cluster.streaming(STREAM, streams=4) as second:
            cluster.scale("Decode", 1)
            for stream in (*first, *second):
                assert stream.result() == expected[:STREAM]
    assert {len(stream.decoded_by) for stream in second} == {1}  # nobody was moved
    assert len({rank for stream in second for rank in stream.decoded_by}) == 2
    until(lambda: len(cluster.ranks()) == len(before), 30)
    assert len(cluster.ranks("decode").items() & before.items()) in (0, 2)  # a group, whole


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
    with cluster.streaming(LONG_STREAM, streams=12) as streams:
        until(lambda: cluster.sizes()["Decode"] == 2, 60)
        assert all(stream.result() == expected[:LONG_STREAM] for stream in streams)
    assert cluster.sizes()["Prefill"] == 1
    until(lambda: cluster.sizes()["Decode"] == 1, 120)
    told = cluster.launch()
    assert told.returncode == 0, told.stderr
    assert cluster.tandem("scale", "decode=1").returncode == 0
