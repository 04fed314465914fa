"""The same tokens in any company, and from any index on: nothing is carried from token to token."""

from __future__ import annotations

from operator import ne
from typing import Any

import pytest
from torch import Tensor

from cluster.messages import Request
from engine import sampler
from engine.context import Context
from tests.engine.sampling import context, random_logits, tokens

V = 60
TOKENS = 24
PROMPT = (5, 17, 5, 40)
STOPS = frozenset({1, 2, 3})
MODEL = random_logits(V, 11, rows=V, spread=1.5)  # row i: the logits after token i

EVERYTHING: dict[str, Any] = {
    "temperature": 1.1,
    "seed": 77,
    "top_k": 15,
    "top_p": 0.97,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.4,
    "logit_bias": {7: 2.0, 8: -2.0},
    "bad_words": ((9,), (7, 10), (10, 11, 12)),
    "allowed_token_ids": tuple(range(50)),
    "min_tokens": 12,
    "logprobs": 3,
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"frequency_penalty": 1.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.0, "seed": 4, "top_p": 0.8},
    {"temperature": 0.7, "seed": 5, "top_k": 5, "min_p": 0.1},
    EVERYTHING,
    EVERYTHING | {"seed": 78},
    EVERYTHING | {"temperature": 0.0},
]


def go_on(request: Request) -> list[int]:
    """From where `request` stands to TOKENS output tokens; the answer as a whole."""
    ids = request.token_ids
    one = Context(request, ids, STOPS)
    while len(ids) < len(PROMPT) + TOKENS:
        ids.extend(tokens(MODEL[ids[-1]][None], one))
    return ids[len(PROMPT) :]


def wanted(options: dict[str, Any]) -> Request:
    return context(PROMPT, **options).request


@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_an_answer_resumed_at_any_index_goes_on_as_it_would_have(options: dict[str, Any]) -> None:
    request = wanted(options)
    whole = go_on(request)
    for index in range(TOKENS):
        assert go_on(request.resume_after(whole[:index])) == whole


def test_every_option_has_a_say_in_the_answer_so_that_equality_means_something() -> None:
    seeds = range(8)
    answers = [go_on(wanted(EVERYTHING | {"seed": seed})) for seed in seeds]
    for option in set(EVERYTHING) - {"logprobs", "seed"}:
        fewer = {name: value for name, value in EVERYTHING.items() if name != option}
        others = (go_on(wanted(fewer | {"seed": seed})) for seed in seeds)
        assert any(map(ne, others, answers)), option
    assert not any(STOPS.intersection(answer[:12]) for answer in answers)


@pytest.mark.parametrize("at_once", [1, 3 * V, 1 << 18])
def test_neither_batch_nor_order_nor_grouping_changes_a_token(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "_AT_ONCE_CPU", at_once)
    logits, contexts = many_rows()
    alone = [tokens(row[None], one)[0] for row, one in zip(logits, contexts, strict=True)]
    rows = [*range(len(contexts))]
    for order in (rows, rows[::-1], rows[::2] + rows[1::2]):
        together = tokens(logits[order], *(contexts[row] for row in order))
        assert together == [alone[row] for row in order]


@pytest.mark.gpu
def test_a_gpu_chooses_the_tokens_of_a_cpu() -> None:
    logits, contexts = many_rows()
    assert tokens(logits.cuda(), *contexts) == tokens(logits, *contexts)


def many_rows() -> tuple[Tensor, list[Context]]:
    """Every option, at several lengths of output."""
    contexts = [
        context(PROMPT, range(length), stop_ids=STOPS, **options)
        for length in range(5)
        for options in OPTIONS
    ]
    return MODEL[[7 * row % V for row in range(len(contexts))]], contexts
