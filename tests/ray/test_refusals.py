"""Launches that cannot work: they say why, and what ran before goes on as it was."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from subprocess import Popen
from typing import NamedTuple

import pytest

from tests.ray.site import TOKENS, Site, Told, ended, until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

CURSED = "prefill.rank=tests.ray.cursed:CursedRank"


class Refusal(NamedTuple):
    told: Told
    after_s: float


@dataclass(frozen=True)
class Refusals:
    """What has been refused, by name, and what there was before it was asked for."""

    by_name: dict[str, Future[Refusal]]
    actors: dict[str, int]
    places: set[str]
    sizes: dict[str, int]
    taken_port: int

    def of(self, name: str) -> Refusal:
        return self.by_name[name].result()


def waited(process: Popen[str], began: float) -> Refusal:
    return Refusal(ended(process), time.monotonic() - began)


@pytest.fixture(scope="module")
def refused(site: Site, job: Told) -> Iterator[Refusals]:
    """Commands that cannot work, beside the one of them that takes long."""
    site.settle()
    second, actors, places, sizes = (
        site.beside("second"),
        site.actors(),
        site.places(),
        site.sizes(),
    )

    with ExitStack() as held:
        held.enter_context(socket.create_server(("127.0.0.1", second.port)))
        waiting = held.enter_context(ThreadPoolExecutor(4))

        def refusal(process: Popen[str]) -> Future[Refusal]:
            return waiting.submit(waited, process, time.monotonic())

        by_name = {
            "cursed": refusal(site.start(*site.launching(CURSED))),
            "port": refusal(second.start(*second.launching())),
        }
        by_name["port"].result()  # which has ten seconds
        by_name |= {
            "gpus": refusal(site.start(*site.launching("decode.gpus=1"))),
            "scale": refusal(site.start_tandem("scale", "decode=40")),
        }
        yield Refusals(by_name, actors, places, sizes, second.port)


def test_a_taken_http_port_is_named_within_ten_seconds(refused: Refusals) -> None:
    told, after_s = refused.of("port")
    assert told.returncode != 0
    assert after_s < 10
    assert f"cannot listen on HTTP port 127.0.0.1:{refused.taken_port}" in told.stderr


def test_a_launch_that_cannot_be_placed_says_what_lacks(refused: Refusals) -> None:
    told, after_s = refused.of("gpus")
    assert told.returncode != 0
    assert after_s < 30
    assert "rank 0 of Decode group 0 cannot be placed: its bundle needs" in told.stderr
    assert "GPU 0 free of 0" in told.stderr


def test_a_scale_that_finds_no_room_says_what_lacks(refused: Refusals) -> None:
    told, _ = refused.of("scale")
    assert told.returncode == 1
    assert "of Decode group" in told.stderr
    assert "cannot be placed: its bundle needs CPU 0.25" in told.stderr


def test_a_rank_that_cannot_start_says_why(refused: Refusals) -> None:
    told, _ = refused.of("cursed")
    assert told.returncode != 0
    assert "what ran before goes on" in told.stdout
    assert "RuntimeError: the weights are cursed" in told.stderr
    assert "Traceback" not in told.stderr


def test_what_ran_before_goes_on_as_it_was(site: Site, refused: Refusals) -> None:
    for name in refused.by_name:
        assert refused.of(name).told.returncode != 0
    assert len(site.complete()) == TOKENS
    assert site.sizes() == refused.sizes
    until(lambda: site.actors() == refused.actors, 30)
    until(lambda: site.places() == refused.places, 30)


@pytest.mark.full
def test_a_job_of_such_a_launch_has_failed_within_a_minute(cluster: Site) -> None:
    before, began = cluster.ranks(), time.monotonic()
    hanging = "decode.rank=tests.ray.cursed:HangingRank"
    failed = cluster.submit(hanging, "life.start_timeout_s=10")
    assert time.monotonic() - began < 60
    assert failed.returncode != 0
    said = failed.stdout + failed.stderr
    assert "did not start within 10.0 s" in said
    assert "failed" in said.lower()
    until(lambda: cluster.ranks() == before, 30)
