"""Launches that cannot work: they say why, and what ran before goes on as it was."""

from __future__ import annotations

import time

import pytest

from tests.ray.site import TOKENS, Site, until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def test_a_launch_that_cannot_be_placed_says_what_lacks_and_touches_nothing(cluster: Site) -> None:
    before, began = cluster.actors(), time.monotonic()
    refused = cluster.launch("decode.gpus=1")
    assert refused.returncode != 0
    assert time.monotonic() - began < 30
    assert "rank 0 of Decode group 0 cannot be placed: its bundle needs" in refused.stderr
    assert "GPU 0 free of 0" in refused.stderr
    assert cluster.actors() == before


def test_a_rank_that_cannot_start_says_why_and_the_old_ones_go_on(cluster: Site) -> None:
    before = cluster.ranks()
    cursed = "rank=tests.ray.cursed:CursedRank"
    failed = cluster.launch(f"prefill.{cursed}", f"decode.{cursed}")
    assert failed.returncode != 0
    assert "what ran before goes on" in failed.stdout
    assert "RuntimeError: the weights are cursed" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert len(cluster.complete()) == TOKENS
    until(lambda: cluster.ranks() == before, 30)


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
