"""Reading a body: the same values whichever parser reads it, and the loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.api import json_body
from cluster.api.json_body import MOST_PARTS, parse_json
from cluster.config import parse_config
from cluster.errors import BadRequest
from tests.cluster.fake_engine import FakeEngine, app_over, client_of

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
LONG = 4 << 20  # bytes, as many as a body may have


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes is read by the patient parser."""
    monkeypatch.setattr(json_body, "LONGEST_CALL_US", -1.0)


@given(value=VALUES)
def test_the_patient_parser_reads_what_the_quick_one_reads(value: Any) -> None:
    text = json.dumps(value).encode()
    quick = parse_json(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "LONGEST_CALL_US", -1.0)
        assert parse_json(text) == quick == value


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    "text",
    ["", "{", "[1,]", '{"a": NaN}', "[Infinity]", "[-Infinity]", "\x00", "[" * 2000, "{}x", "01"],
)
def test_the_patient_parser_refuses_what_is_no_json(text: str) -> None:
    with pytest.raises(BadRequest, match="not JSON"):
        parse_json(text.encode())


def filled(before: str, unit: str, after: str) -> bytes:
    return (before + unit * ((LONG - len(before) - len(after)) // len(unit)) + after).encode()


HOSTILE = {
    "ids": filled('{"prompt": [', "1,", "1]}"),
    "lists": filled('{"prompt": [', "[],", "[]]}"),
    "objects": filled('{"prompt": [', "{},", "{}]}"),
    "texts": filled('{"prompt": [', '"a",', '"a"]}'),
    "text": filled('{"prompt": "', "hello world ", '"}'),
    "escapes": filled('{"prompt": "', "\\u0041", '"}'),
    "members": json.dumps({str(n): 1 for n in range(300_000)}).encode(),
    "biases": json.dumps({"prompt": [1], "logit_bias": dict.fromkeys(range(300_000), 1)}).encode(),
}


@pytest.mark.full
@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE.keys())
async def test_no_body_holds_up_the_loop(body: bytes) -> None:
    """The longest that this process worked without giving the loop a turn: processor time, so a
    busy machine does not count."""
    engine = {"engine": {"max_length": 1 << 20}}
    config = parse_config({"prefill": engine, "decode": engine})
    gaps: list[float] = []

    async def tick() -> None:
        last = time.process_time()
        while True:
            await asyncio.sleep(0.001)
            now = time.process_time()
            gaps.append(now - last)
            last = now

    async with client_of(app_over(FakeEngine(), config)) as client:
        ticking = asyncio.create_task(tick())
        answer = await client.post("/v1/completions", content=body)
        ticking.cancel()
    assert answer.status_code in (200, 400)
    assert max(gaps) < 0.25, "a tenth of what the quick parser takes; 0.05 s on a quiet machine"


def test_parts_are_counted_wherever_they_are() -> None:
    for unit in ("[],", "{},", '{"a":1},'):
        with pytest.raises(BadRequest, match=str(MOST_PARTS)):
            parse_json(f"[{unit * 100_000}1]".encode())
    assert parse_json(("[" + "1," * 300_000 + "1]").encode()) == [1] * 300_001
