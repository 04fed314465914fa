"""A prompt's log-probabilities are the model's own, however the prompt is cut into chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache, partial

import numpy as np
import pytest
import torch

from cluster.messages import Request, TokenLogprobs
from engine.engine import Engine
from engine.executor import Executor
from engine.request import Finished
from engine.runner import DenseRunner
from engine.step_loop import Outcome, Work
from kv_transfer.blocks import BlockPool
from kv_transfer.layout import Layout
from kv_transfer.slab import Slab
from model.batch import Chunk, build_batch
from model.dense_cache import DenseCache
from model.state import state_fields
from prefill_worker.scheduler import schedule
from tests.tiny import load_tiny, make_prompt, make_request

PROMPT = make_prompt(24)
Scored = tuple[list[TokenLogprobs], list[TokenLogprobs]]  # of the prompt, of the answer


class Failing:
    """An executor whose step number `at` fails before anything of it is told."""

    def __init__(self, execute: Executor, at: int) -> None:
        self._execute = execute
        self._left = at

    def __call__(self, work: Sequence[Work]) -> Sequence[Outcome]:
        self._left -= 1
        outcomes = self._execute(work)
        if self._left == 0:
            raise RuntimeError("this step fails, because the test says so")
        return outcomes


async def run(
    *requests: Request, chunk_tokens: int, fails_at: int = 0, once: bool = False
) -> list[Scored]:
    """By an engine that computes all of them side by side."""
    model = load_tiny()
    slab = Slab(Layout(state_fields(model.spec), 16), 64, 8)
    pool = BlockPool(64, 8, 16)

    async def one(engine: Engine, request: Request) -> Scored:
        with pool.lease(request.longest) as lease:
            async with engine.run(request, lease, once=once) as made:
                prompt, first = list[TokenLogprobs](), 1
                async for scored in made.prompt_logprobs():
                    assert scored.first == first
                    prompt += scored.logprobs
                    first += len(scored.logprobs)
                told = [choice async for choices in made.tokens() for choice in choices]
                assert once or isinstance(made.end, Finished)
                return prompt, [choice.logprobs for choice in told if choice.logprobs is not None]

    async with Engine(
        schedule=partial(schedule, chunk_tokens=chunk_tokens),
        execute=Failing(Executor(DenseRunner(model, slab)), fails_at),
        eos_token_id=model.spec.eos_token_id,
        name="test",
    ) as engine:
        return await asyncio.gather(*(one(engine, request) for request in requests))


@cache
def reference() -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """[positions, V]: the whole prompt at once in a dense cache; the softmax by numpy."""
    model = load_tiny()
    batch = build_batch(
        [Chunk(PROMPT, 0, len(PROMPT), logits="all")],
        image_token_id=model.spec.image_token_id,
        ngram=model.spec.engram_max_ngram_size,
    )
    with torch.no_grad():
        logits = model.forward(batch, DenseCache(state_fields(model.spec), 1)).double().numpy()
    logits = logits - logits.max(1, keepdims=True)
    exact: np.ndarray[tuple[int, int], np.dtype[np.float64]] = logits - np.log(
        np.exp(logits).sum(1, keepdims=True)
    )
    return exact


@pytest.mark.parametrize("chunk_tokens", [7, 23, 64])
async def test_they_are_those_of_the_row_before_over_every_border(chunk_tokens: int) -> None:
    request = make_request(
        PROMPT, max_tokens=1, prompt_logprobs=3, temperature=0.7, logit_bias={5: 9}
    )
    ((scored, answer),) = await run(request, chunk_tokens=chunk_tokens)
    assert answer == []
    assert len(scored) == len(PROMPT) - 1
    for row, (token, own) in enumerate(zip(PROMPT[1:], scored, strict=True)):
        exact = reference()[row]
        assert own.logprob == pytest.approx(exact[token], abs=1e-5)
        best = np.sort(exact)[::-1][:3]
        assert [value for _, value in own.top] == pytest.approx(best, abs=1e-5)
        assert [exact[id] for id, _ in own.top] == pytest.approx(best, abs=1e-5)


async def test_neighbours_that_ask_for_other_things_change_nothing() -> None:
    asked = make_request(PROMPT, "asked", max_tokens=2, prompt_logprobs=2, logprobs=1)
    plain = make_request(make_prompt(20), "plain", max_tokens=2, logprobs=1)
    brief = make_request(PROMPT[:9], "brief", max_tokens=2, prompt_logprobs=0)
    alone = [(await run(one, chunk_tokens=16))[0] for one in (asked, plain, brief)]
    together = await run(asked, plain, brief, chunk_tokens=64)
    for (prompt, answer), (prompt_alone, answer_alone) in zip(together, alone, strict=True):
        for here, there in ((prompt, prompt_alone), (answer, answer_alone)):
            assert [one.logprob for one in here] == pytest.approx([one.logprob for one in there])
    assert [len(prompt) for prompt, _ in together] == [23, 0, 8]
    assert [len(answer) for _, answer in together] == [2, 2, 0]
    assert all(one.top == () for one in together[2][0])


async def test_a_prompt_that_is_computed_again_is_told_once() -> None:
    asked = make_request(PROMPT, "asked", max_tokens=1, prompt_logprobs=1)
    other = make_request(PROMPT[:20], "other", max_tokens=1, prompt_logprobs=1)
    calm = await run(asked, other, chunk_tokens=16)
    failed = await run(asked, other, chunk_tokens=16, fails_at=2)  # a step with rows of both
    for here, there in zip(failed, calm, strict=True):
        assert [one.logprob for one in here[0]] == pytest.approx([one.logprob for one in there[0]])


async def test_once_there_is_output_nothing_is_owed() -> None:
    resumed = make_request(PROMPT, output=[7, 8], max_tokens=3, prompt_logprobs=1, logprobs=0)
    ((scored, answer),) = await run(resumed, chunk_tokens=16)
    assert (scored, len(answer)) == ([], 1)
    ((scored, answer),) = await run(
        make_request(PROMPT[:1], prompt_logprobs=1, logprobs=0), chunk_tokens=16, once=True
    )
    assert (scored, len(answer)) == ([], 1)
