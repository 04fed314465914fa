"""Ranks whose model works on state in place: prompts pushed as ever, answers' steps run ahead."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.messages import Request
from tests.engine.packed_engine import SmallPacked, packed_model, straight
from tests.model.cases import TINY_CASE
from tests.model.running import float64
from tests.tiny import TinyCluster, make_prompt, make_request, tiny_config


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    with float64():
        yield


def model() -> SmallPacked:
    return packed_model(TINY_CASE.name)


REQUESTS = (
    make_request(make_prompt(45), "greedy", max_tokens=10),
    make_request(make_prompt(70, seed=1), "drawn", max_tokens=7, temperature=0.8, seed=9),
)


def expected(request: Request) -> list[int]:
    return list(straight(request, TINY_CASE.name))


async def test_a_handed_over_request_is_continued_by_steps_that_run_ahead() -> None:
    async with TinyCluster(model=model()) as cluster:
        for request in REQUESTS:
            assert await cluster.answer(request) == expected(request)
        assert await cluster.settled()
        steps = cluster.decode[0].status()["steps"]
        assert isinstance(steps, dict)
        assert steps["launched"] == 9 + 6  # the first token came with the state
        assert steps["rows_ahead_used"] == 8 + 5
        assert steps["graphs"] == steps["rows_ahead_unused"] == 0


@pytest.mark.parametrize("run_ahead", [True, False])
async def test_a_colocated_rank_answers_the_same(run_ahead: bool) -> None:
    engine = tiny_config().decode.engine.model_dump() | {"run_ahead": run_ahead}
    config = tiny_config(router={"colocated": True}, decode={"engine": engine})
    async with TinyCluster(prefill=0, model=model(), config=config) as cluster:
        for request in REQUESTS:
            assert await cluster.answer(request) == expected(request)
        steps = cluster.decode[0].status()["steps"]
        assert isinstance(steps, dict)
        assert bool(steps["rows_ahead_used"]) == run_ahead
