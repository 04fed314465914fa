"""Requests made up from our own OpenAPI document, right ones and wrong ones: never a 5xx.

The default form is short and always the same; the long one draws anew each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.core.result import Ok

from tests.cluster.fake_engine import TOKENIZER, FakeEngine, app_over, with_http

SCHEMA = schemathesis.openapi.from_asgi(
    "/openapi.json",
    app_over(FakeEngine(TOKENIZER.encode("some \U0001fae0 text")), with_http(max_concurrent=256)),
)
OPERATIONS = [one.ok() for one in SCHEMA.get_all_operations() if isinstance(one, Ok)]
Operation = schemathesis.APIOperation[Any, Any, Any, Any]
Form = Callable[[Callable[..., None]], Callable[..., None]]
SHORT: Form = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
LONG: Form = settings(SHORT, max_examples=1000, derandomize=False)  # type: ignore[arg-type]


def fuzz(operation: Operation, form: Form) -> None:
    cases = st.one_of(
        operation.as_strategy(generation_mode=GenerationMode.POSITIVE),
        operation.as_strategy(generation_mode=GenerationMode.NEGATIVE),
    )

    @form
    @given(cases)
    def never_a_5xx(case: schemathesis.Case[Any]) -> None:
        answer = case.call()
        assert answer.status_code < 500, (case.as_curl_command(), answer.text)
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"]

    never_a_5xx()


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.label)
def test_no_request_makes_a_5xx(operation: Operation) -> None:
    fuzz(operation, SHORT)


@pytest.mark.full
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.label)
def test_no_request_of_a_great_many_makes_a_5xx(operation: Operation) -> None:
    fuzz(operation, LONG)
