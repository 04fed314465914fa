"""Greedy answers of a server, each with its token ids and what happened to it. Over HTTP alone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.http_client import Answer, HttpClient
from tests.token_match import Reference, gaps_of

ANSWER_S = 120.0  # for all answers of one round
Prompts = Mapping[str, Sequence[int]]
References = dict[str, Reference]


async def ask(
    url: str, prompts: Prompts, output: int, *, together: bool, **fields: Any
) -> dict[str, Answer]:
    """Greedy answers, by name; all at once or one after another."""
    asked = {"max_tokens": output, "temperature": 0.0, "ignore_eos": True}
    asked |= {"return_token_ids": True, "timeline": True, **fields}
    gate = asyncio.Semaphore(len(prompts) if together else 1)

    async def one(client: HttpClient, prompt: Sequence[int]) -> Answer:
        async with gate:
            return await client.complete(list(prompt), **asked)

    async with asyncio.timeout(ANSWER_S), HttpClient(url, silence_s=ANSWER_S) as client:
        asking = [one(client, prompt) for prompt in prompts.values()]
        ended = await asyncio.gather(*asking, return_exceptions=True)  # none is left behind
    answers = {}
    for name, answer in zip(prompts, ended, strict=True):
        if isinstance(answer, BaseException):
            raise answer
        answers[name] = answer
    return answers


async def refer(url: str, prompts: Prompts, output: int, *, together: bool) -> References:
    """The answers of decode ranks that run the prompts themselves, and how clear each token was."""
    answers = await ask(url, prompts, output, together=together, colocated=True, logprobs=2)
    found = {}
    for name, answer in answers.items():
        (choice,) = answer.choices
        assert choice.logprobs is not None
        found[name] = Reference(choice.token_ids, gaps_of(choice.logprobs["top_logprobs"]))
    return found
