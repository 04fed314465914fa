"""Field cases FC-14, 15, 17, 19, 21, 23 and 25: lengths, borders and options of single answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.errors import PromptTooLong
from cluster.generation import Timeline
from cluster.messages import unpack_ids
from tests.faults.field_cases import config_of, count, oracle, rounds, settles
from tests.tiny import TinyCluster, make_prompt, make_request

ROUTES = pytest.mark.parametrize("colocated", [False, True], ids=["disaggregated", "colocated"])


@ROUTES
async def test_fc14_at_the_limit_is_served_and_beyond_it_refused_with_both_numbers(
    colocated: bool,
) -> None:
    limits = {"max_length": 256}
    config = config_of(prefill=limits, decode=limits, router={"colocated": colocated})
    async with TinyCluster(config=config) as cluster:
        assert len(await cluster.answer(make_request(make_prompt(255), max_tokens=1))) == 1
        for prompt, max_tokens in ((256, 1), (257, 1), (255, 2), (300, 8)):
            with pytest.raises(PromptTooLong) as caught:
                await cluster.answer(make_request(make_prompt(prompt), max_tokens=max_tokens))
            assert str(prompt) in str(caught.value)
            assert "256" in str(caught.value)
        await settles(cluster)


@pytest.mark.parametrize("pool", ["prefill", "decode"])
async def test_fc14_of_limits_that_differ_the_smaller_one_rules(pool: str) -> None:
    small = {"prefill": {"max_length": 512}, "decode": {"max_length": 512}}
    small[pool] = {"max_length": 256}
    async with TinyCluster(config=config_of(small["prefill"], small["decode"])) as cluster:
        with pytest.raises(PromptTooLong, match="256"):
            await cluster.answer(make_request(make_prompt(300), max_tokens=8))
        assert all(ledger.blocks.leased == 0 for ledger in cluster.ledgers())
        assert len(await cluster.answer(make_request(make_prompt(240), max_tokens=8))) == 8
        await settles(cluster)


@pytest.mark.parametrize("block_tokens", [16, 256])
async def test_fc15_prompts_shorter_than_a_block_and_just_beyond_one(block_tokens: int) -> None:
    requests = [make_request(make_prompt(length), f"{length}") for length in (1, 15, 16, 17)]
    expected = await oracle(*requests)
    config = config_of(model={"block_tokens": block_tokens})
    async with TinyCluster(config=config) as cluster:
        for request, right in zip(requests, expected, strict=True):
            async with asyncio.timeout(5):
                assert await cluster.answer(request) == right
            await settles(cluster)


@ROUTES
async def test_fc17_blocks_are_matched_by_position_when_output_is_prefilled_again(
    colocated: bool,
) -> None:
    """Prompt and output end before, at and after the borders of blocks, chunks and pairs of rows.

    There is no prefix cache yet: prefix hits, partial ones and evicted first blocks await it.
    """
    request = make_request(make_prompt(44), "resumed", max_tokens=24)
    (expected,) = await oracle(request)
    async with TinyCluster(config=config_of(router={"colocated": colocated})) as cluster:
        for done in (1, 3, 4, 5, 19, 20, 21, 23):
            rest = await cluster.answer(request.resume_after(expected[:done]))
            assert expected[:done] + rest == expected, done
        await settles(cluster)


async def test_fc17_lengths_of_the_case_are_continued_from_what_prefill_has_pushed() -> None:
    first, second = make_prompt(48), make_prompt(17, 9)
    requests = [
        make_request([*first, *second[:more]], f"{48 + more}", max_tokens=20)
        for more in (0, 16, 17)
    ]
    expected = await oracle(*requests)
    async with TinyCluster(config=config_of()) as cluster:
        assert [await cluster.answer(request) for request in requests] == expected
        await settles(cluster)


@ROUTES
async def test_fc19_one_token_is_one_token_and_needs_no_handover(colocated: bool) -> None:
    prompt = make_prompt(40)
    (two,) = await oracle(make_request(prompt, max_tokens=2))
    async with TinyCluster(config=config_of(router={"colocated": colocated})) as cluster:
        timeline = Timeline()
        assert await cluster.answer(make_request(prompt, max_tokens=1), timeline) == two[:1]
        finished = timeline.last("finished")
        assert finished is not None
        assert finished.detail["outcome"] == "length"
        assert count([timeline], "reserved", "handed_over") == 0
        if not colocated:
            assert cluster.decode[0].health().steps == 0
        await settles(cluster)
        assert await cluster.answer(make_request(prompt, max_tokens=2)) == two


async def test_fc21_limits_of_the_answer_do_not_reach_the_prefill_leg() -> None:
    """The first token is a stop id, but min_tokens forbids to end before eight."""
    prompt = make_prompt(30)
    (plain,) = await oracle(make_request(prompt, max_tokens=32))
    options: dict[str, Any] = {"max_tokens": 32, "min_tokens": 8, "ignore_stop": False}
    options |= {"stop_token_ids": (plain[0], plain[9]), "logprobs": 5}
    request = make_request(prompt, **options)
    (expected,) = await oracle(request)
    assert len(expected) >= 8
    choices = [make_request(prompt, f"n {n}", seed=n, temperature=1.0, **options) for n in (1, 2)]
    right = await oracle(*choices)
    async with TinyCluster(config=config_of()) as cluster:
        assert await cluster.answer(request) == expected
        assert await asyncio.gather(*map(cluster.answer, choices)) == right
        await settles(cluster)


async def test_fc23_log_probabilities_begin_with_the_first_token_and_equal_the_colocated_ones() -> (
    None
):
    """Those of the prompt: e2e/test_prompt_logprobs; `echo`: cluster/test_api_completions."""
    request = make_request(make_prompt(20), max_tokens=4, logprobs=5)
    told = []
    for colocated in (False, True):
        async with TinyCluster(config=config_of(router={"colocated": colocated})) as cluster:
            deltas = [delta async for delta in cluster.deltas(request)]
            told.append([one for delta in deltas for one in delta.logprobs])
            assert sum(len(delta.token_ids) for delta in deltas) == 4
    assert len(told[0]) == len(told[1]) == 4
    for one, other in zip(*told, strict=True):
        assert len(one.top) == 5
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


@rounds(8, 20)
async def test_fc25_alone_and_in_a_crowd_the_same_answers_as_colocated(rounds: int) -> None:
    requests = [
        make_request(make_prompt(1 + 299 * n // (rounds - 1), n), f"{n}", max_tokens=12)
        for n in range(rounds)
    ]
    expected = await oracle(*requests)
    async with TinyCluster(decode=2, config=config_of()) as cluster:
        assert [await cluster.answer(request) for request in requests[::2]] == expected[::2]
        assert await asyncio.gather(*map(cluster.answer, requests)) == expected
        await settles(cluster)


async def test_fc25_a_seed_holds_whatever_the_neighbours_do() -> None:
    seeded = make_request(make_prompt(33), "seeded", max_tokens=12, temperature=0.8, seed=42)
    (expected,) = await oracle(seeded)
    assert len(set(expected)) > 3
    async with TinyCluster(config=config_of()) as cluster:
        for turn in range(5):
            others = [
                make_request(make_prompt(9 + n, turn), f"{n}", temperature=0.8, seed=100 * turn + n)
                for n in range(3)
            ]
            first, *_ = await asyncio.gather(*map(cluster.answer, [seeded, *others]))
            assert first == expected
        twins = [seeded.model_copy(update={"request_id": name}) for name in ("one", "two")]
        assert await asyncio.gather(*map(cluster.answer, twins)) == [expected] * 2


def test_a_resumed_request_keeps_its_prompt_apart() -> None:
    resumed = make_request([5, 6], max_tokens=4).resume_after([7])
    assert (unpack_ids(resumed.prompt), unpack_ids(resumed.output)) == ([5, 6], [7])
