"""Ids that no tokenizer spells: padding of the vocabulary, which is never sampled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.errors import BadRequest
from engine.choice import Choice
from engine.sampler import sample
from model.vocabulary import spelled_ids
from tests.engine.sampling import context, random_logits
from tests.tiny import MODEL

V, SPELLED = 64, 50


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 100.0, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.5, "min_p": 0.1},
        {"repetition_penalty": 3.0, "presence_penalty": 1.0},
        {"logit_bias": {V - 1: 100.0}},
        {"temperature": 1.0, "logit_bias": {V - 1: 100.0, 3: 1.0}},
    ],
)
def test_padding_never_comes_and_the_rest_comes_as_if_it_were_ruled_out(
    options: dict[str, Any],
) -> None:
    rows = 200
    logits = random_logits(V, seed=1, rows=rows)
    logits[:, SPELLED:] += 10.0  # the likeliest by far
    contexts = [context((0, V - 2), range(row % 20), seed=row, **options) for row in range(rows)]
    ruled_out = logits.clone()
    ruled_out[:, SPELLED:] = -torch.inf
    got = sample(logits, contexts, SPELLED)
    assert got == sample(ruled_out, contexts)
    assert max(one.token for one in got if isinstance(one, Choice)) < SPELLED


def test_allowing_nothing_but_padding_is_the_requests_own_error() -> None:
    logits = random_logits(V, seed=2, rows=2)
    (error, choice) = sample(logits, [context(allowed_token_ids=(V - 1,)), context()], SPELLED)
    assert isinstance(error, BadRequest)
    assert isinstance(choice, Choice)


def test_logprobs_are_the_models_own_padding_included() -> None:
    logits = random_logits(V, seed=3)
    (choice,) = sample(logits, [context(logprobs=2)], SPELLED)
    assert isinstance(choice, Choice)
    assert choice.logprobs is not None
    whole = torch.log_softmax(logits[0].double(), dim=0)
    assert choice.logprobs.logprob == pytest.approx(float(whole[choice.token]))


def test_the_border_is_the_tokenizers(tmp_path: Path) -> None:
    assert spelled_ids(tmp_path) is None
    file = tmp_path / "tokenizer.json"
    tree = {"model": {"vocab": {"a": 0, "b": 7}}, "added_tokens": [{"id": 9, "content": "x"}]}
    file.write_text(json.dumps(tree))
    assert spelled_ids(tmp_path) == 10
    file.write_text(json.dumps(tree | {"added_tokens": None}))
    assert spelled_ids(tmp_path) == 8
    assert spelled_ids(MODEL) == 2048
    for wrong in ("{", "{}", '{"model": 3}'):
        file.write_text(wrong)
        with pytest.raises(ValueError, match=r"tokenizer\.json"):
            spelled_ids(tmp_path)
