"""One answer for one prompt: offline, served on one rank, and served on two."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from offline import LLM, SamplingParams
from tests.e2e.front import front_of
from tests.offline.greedy_loop import MINI, greedy, load_mini
from tests.tiny import TinyCluster, make_prompt, tiny_config

LENGTHS = (1, 33, 129)
TOKENS = 4
PROMPTS = [make_prompt(length) for length in LENGTHS]
Answers = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def expected() -> Answers:
    """Of a plain loop over the model."""
    return [greedy(prompt, TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param({"disaggregated": True}, id="disaggregated"),
        pytest.param({"expert_parallel_size": 2, "context_parallel_size": 2}, id="ep 2, cp 2"),
        pytest.param({"data_parallel_size": 2}, id="dp 2", marks=pytest.mark.full),
        pytest.param(
            {"expert_parallel_size": 2, "disaggregated": True},
            id="ep 2, disaggregated",
            marks=pytest.mark.full,
        ),
    ],
)
def test_offline(ranks: dict[str, Any], expected: Answers) -> None:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(
        "tandem-mini",
        max_model_len=256,
        max_num_seqs=4,
        accelerator="cpu",
        **ranks,
    ) as llm:
        answers = llm.outputs(PROMPTS, params, use_tqdm=False)
    assert [tuple(one.token_id for one in outputs) for outputs in answers] == expected


@pytest.mark.parametrize("colocated", [True, False], ids=["colocated", "disaggregated"])
async def test_served_over_http(colocated: bool, expected: Answers) -> None:
    mini = {"path": str(MINI), "weights": "checkpoint"}
    config = tiny_config(model=mini, router={"colocated": colocated})
    async with TinyCluster(model=load_mini(), config=config) as cluster, front_of(cluster) as front:
        told = await asyncio.gather(
            *(
                front.whole(prompt=prompt, max_tokens=TOKENS, return_token_ids=True)
                for prompt in PROMPTS
            )
        )
        assert bool(cluster.prefill[0].health().steps) is not colocated
    assert [tuple(one["choices"][0]["token_ids"]) for one in told] == expected
