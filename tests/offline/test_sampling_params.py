"""DeepInfer's SamplingParams: its ranges, and what its fields are in a request of ours."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.client import build_request
from cluster.request import Grammar
from offline import SamplingParams

DIGITS = {"schema_type": "regex", "schema": "[0-9]+"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temperature": -0.1}, "^temperature must be 0 or more"),
        ({"temperature": float("nan")}, "^temperature"),
        ({"temperature": float("inf")}, "^temperature must be 0 or more, and finite, not inf"),
        ({"top_p": 0.0}, "^top_p"),
        ({"top_p": 1.1}, "^top_p"),
        ({"top_k": 0}, "^top_k must be -1"),
        ({"max_tokens": -1}, "^max_tokens"),
        ({"top_logprobs": 21}, "^top_logprobs must be in 0 to 20"),
        ({"first_n_token_no_eos": 2}, "^first_n_token_no_eos"),
        ({"golden_token_ids": [1]}, "^golden_token_ids is not available: .*prompt_logprobs"),
        ({"so_args": DIGITS, "ignore_eos": True}, "^so_args ends the answer"),
        ({"so_args": {"schema_type": "xml", "schema": "a"}}, "'schema_type' is 'xml'"),
        ({"so_args": {"schema_type": "json"}}, "'schema' must be a text"),
        ({"so_args": {**DIGITS, "bound_token_ids": [1]}}, "did you mean 'bound_token_id'"),
        ({"so_args": {**DIGITS, "serialized": 1}}, "'serialized' is no key"),
        ({"so_args": {**DIGITS, "trigger_token_ids": [7]}}, "'trigger_token_ids' is not available"),
    ],
)
def test_a_value_that_cannot_be_names_its_field(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SamplingParams(**fields)


@pytest.mark.parametrize("seed", [1.5, "1", True])
def test_a_seed_of_another_type_is_a_type_error(seed: Any) -> None:
    with pytest.raises(TypeError, match="seq_seed"):
        SamplingParams(seq_seed=seed)


def test_almost_zero_is_greedy_and_then_nothing_narrows_the_choice() -> None:
    greedy = SamplingParams(temperature=1e-6, top_p=0.5, top_k=3).fields()
    assert (greedy["temperature"], greedy["top_p"], greedy["top_k"]) == (0.0, 1.0, 0)
    warm = SamplingParams(temperature=1e-4, top_p=0.5, top_k=3).fields()
    assert (warm["temperature"], warm["top_p"], warm["top_k"]) == (1e-4, 0.5, 3)


def test_the_fields_make_a_request() -> None:
    params = SamplingParams(
        max_tokens=0, first_n_token_no_eos=1, top_logprobs=4, so_args=DIGITS, seq_seed=-1
    )
    sampling = build_request([5], **params.fields()).sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.logprobs) == (1, 1, 4)
    assert sampling.grammar == Grammar(kind="regex", text="[0-9]+")
    assert sampling.seed == 2**63 - 1
    assert sampling.prompt_logprobs is None
    quiet = build_request([5], **SamplingParams().fields(tell_logprobs=False)).sampling
    assert (quiet.temperature, quiet.max_tokens, quiet.logprobs) == (1.0, 16, None)


def test_a_missing_seed_is_another_one_each_time() -> None:
    seeds = {build_request([5], **SamplingParams().fields()).sampling.seed for _ in range(3)}
    assert len(seeds) == 3
