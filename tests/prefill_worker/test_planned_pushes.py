"""Packed pushes planned for a whole prompt, as ranks on GPUs make them; here the host moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from cluster.config import ClusterConfig
from cluster.generation import Timeline
from tests.faults.gates import GatedCluster, Verdict
from tests.planned_paths import open_planned_paths
from tests.tiny import load_tiny, make_prompt, make_request, tiny_config

pytestmark = pytest.mark.timeout(120)

LONG = make_request(make_prompt(150), "long", max_tokens=6)


def config_of(transport: str) -> ClusterConfig:
    return tiny_config(transfer={"transport": transport, "cell_bytes": 8192, "cells": 2})


@pytest.fixture(params=["local", pytest.param("nixl", marks=pytest.mark.rank)])
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[GatedCluster]:
    config = config_of(request.param)
    made = GatedCluster(
        prefill=1, decode=2, model=load_tiny(), config=config, transport=open_planned_paths
    )
    async with made as cluster:
        yield cluster


async def test_answers_are_those_of_pushes_by_the_host(cluster: GatedCluster) -> None:
    requests = [
        make_request(make_prompt(length), str(length), max_tokens=6) for length in (1, 33, 64, 150)
    ]
    found = [await cluster.answer(request) for request in requests]
    config = config_of("local")
    async with GatedCluster(prefill=1, decode=1, model=load_tiny(), config=config) as by_the_host:
        assert found == [await by_the_host.answer(request) for request in requests]
    assert await cluster.settled()


async def test_pushes_go_while_the_prompt_still_runs(cluster: GatedCluster) -> None:
    timeline = Timeline()
    await cluster.answer(LONG, timeline)
    handed_over = timeline.last("handed_over")
    assert handed_over is not None
    assert int(str(handed_over.detail["pushes"])) >= 5  # a chunk each, at least
    assert float(str(handed_over.detail["hidden_s"])) > 0


@pytest.mark.parametrize("what", ["corrupt", "drop", "fail"])
async def test_a_push_that_does_not_arrive_as_packed_is_no_wrong_answer(
    cluster: GatedCluster, what: Verdict
) -> None:
    expected = await cluster.answer(LONG)
    gate = cluster.gates.arm("write 2", what)
    assert await cluster.answer(LONG) == expected
    await gate.reached()
    assert await cluster.settled()


async def test_decode_dies_in_mid_push_and_another_takes_over(cluster: GatedCluster) -> None:
    expected = await cluster.answer(LONG)
    gate, timeline = cluster.gates.arm("write 2"), Timeline()
    answer = asyncio.create_task(cluster.answer(LONG, timeline))
    await gate.reached()
    reserved = timeline.last("reserved")
    assert reserved is not None
    cluster.cut(str(reserved.detail["decode"]))
    gate.open()
    async with asyncio.timeout(20):
        assert await answer == expected
    assert await cluster.settled()
