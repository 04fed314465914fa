"""A prompt's log-probabilities on their way to the caller, over losses and past ranks that err."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from cluster.errors import ProtocolError
from cluster.generation import Caller
from cluster.messages import (
    Generate,
    Prefill,
    PromptLogprobs,
    Request,
    Started,
    TokenLogprobs,
    WireMessage,
)
from cluster.wire import Stream
from tests.cluster.fakes import (
    Cluster,
    FakeDecode,
    FakePrefill,
    FakeRank,
    Places,
    answer,
    pool,
    request,
    running,
)

PROMPT = tuple(range(1, 12))
SCORED = [-float(place) for place in range(1, len(PROMPT))]


def asking() -> Request:
    plain = request(prompt=PROMPT)
    sampling = plain.sampling.model_copy(update={"prompt_logprobs": 0})
    return plain.model_copy(update={"sampling": sampling})


def scored(first: int, stop: int) -> PromptLogprobs:
    return PromptLogprobs(
        first=first,
        logprobs=tuple(TokenLogprobs(logprob=-float(place)) for place in range(first, stop)),
    )


class Scores(FakePrefill):
    """Says `said`, then what every fake prefill rank says."""

    said: tuple[PromptLogprobs, ...] = (scored(1, 5), scored(5, 9), scored(9, 11))

    async def serve(self, stream: Stream, first: WireMessage, places: Places) -> None:
        assert isinstance(first, Prefill)
        if not first.request.output:
            for message in self.said:
                await stream.send(message)
        await super().serve(stream, first, places)


def ranks(**options: Any) -> tuple[Cluster, list[FakeRank]]:
    """Two that score and one that decodes."""
    cluster, (*_, decode) = pool()
    prefills: list[FakeRank] = [Scores(cluster, f"prefill-{n}/0") for n in range(2)]
    for rank in prefills:
        vars(rank).update(options)
    return cluster, [*prefills, decode]


def first_to_die(*ranks: FakeRank, at_index: int) -> list[FakeRank]:
    """Whichever of them is the first to get to that token; it is in the list from then on."""
    died: list[FakeRank] = []

    async def before_token(rank: FakeRank, index: int) -> None:
        if index == at_index and not died:
            died.append(rank)
            await rank.die()

    for rank in ranks:
        rank.before_token = partial(before_token, rank)
    return died


async def read(caller: Caller) -> tuple[list[float], list[int]]:
    got, tokens = list[float](), list[int]()
    async for delta in caller.generate(asking()):
        assert not (delta.prompt_logprobs and tokens)
        got += [one.logprob for one in delta.prompt_logprobs]
        tokens += delta.token_ids
    return got, tokens


async def test_each_comes_once_when_the_rank_dies_with_the_prompt_scored() -> None:
    cluster, (first, second, decode) = ranks()
    died = first_to_die(first, second, at_index=0)
    async with running(cluster, first, second, decode) as caller:
        assert await read(caller) == (SCORED, answer())
    assert len(died) == 1


async def test_each_comes_once_when_decode_is_lost_and_the_prompt_runs_again() -> None:
    cluster, (first, second, decode) = ranks()
    other = FakeDecode(cluster, "decode-1/0")
    died = first_to_die(decode, other, at_index=3)
    async with running(cluster, first, second, decode, other) as caller:
        assert await read(caller) == (SCORED, answer())
    assert len(died) == 1


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ((scored(1, 5),), "from position 5 on"),
        ((), "from position 1 on"),
        ((scored(1, 5), scored(6, 11)), "where 5 is next"),
        ((scored(1, 11), scored(10, 11)), "where 11 is next"),
    ],
    ids=["too-few", "none", "gap", "double"],
)
async def test_what_cannot_be_right_ends_the_request(
    said: tuple[PromptLogprobs, ...], complaint: str
) -> None:
    cluster, all_of_them = ranks(said=said)
    async with running(cluster, *all_of_them) as caller:
        with pytest.raises(ProtocolError, match=complaint):
            await read(caller)


async def test_a_decode_rank_scores_nothing_that_prefill_runs() -> None:
    class Confused(FakeDecode):
        async def send_tokens(self, stream: Stream, wanted: Request, start: int) -> None:
            await stream.send(scored(11, 12))

    cluster, (first, second, _) = ranks()
    async with running(cluster, first, second, Confused(cluster, "decode-0/0")) as caller:
        with pytest.raises(ProtocolError, match="decode-0/0 scored a prompt that it does not run"):
            await read(caller)


async def test_alone_a_decode_rank_says_both() -> None:
    class Both(FakeDecode):
        async def serve(self, stream: Stream, first: WireMessage, places: Places) -> None:
            assert isinstance(first, Generate)
            await stream.send(Started(queued_s=0.0))
            await stream.send(scored(1, 11))
            await self.send_tokens(stream, first.request, 0)

    cluster, _ = pool()
    async with running(cluster, Both(cluster, "decode-0/0")) as caller:
        deltas = [one async for one in caller.generate(asking(), colocated=True)]
    assert [one.logprob for delta in deltas for one in delta.prompt_logprobs] == SCORED
    assert [token for delta in deltas for token in delta.token_ids] == answer()
