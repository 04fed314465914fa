"""What is written when: all that is there in one write, before there is something to wait for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, MutableMapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.api.before_waiting import before_waiting
from cluster.api.openai import Completion, choice_text
from cluster.api.streaming import MOST_TOGETHER, EventStream
from cluster.errors import ClusterError, WorkerLost

Message = MutableMapping[str, Any]


async def run(events: AsyncGenerator[bytes, None], writes: list[bytes]) -> None:
    async def send(message: Message) -> None:
        if message["type"] == "http.response.body" and message["body"]:
            writes.append(message["body"])

    async def receive() -> Message:
        await asyncio.Event().wait()
        return {}

    stream = EventStream(events, error_body=lambda error: {"error": str(error)}, stall_s=1.0)
    await stream({"type": "http", "state": {}}, receive, send)


async def test_events_that_are_there_together_go_out_in_one_write() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"1"
        yield b"2"
        await asyncio.sleep(0)
        assert writes == [b"data: 1\n\ndata: 2\n\n"], "written before the wait"
        yield b"3"
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for number in range(4, 8):
            yield b"%d" % number

    writes: list[bytes] = []
    await run(events(), writes)
    assert writes[1:] == [
        b"data: 3\n\n",
        b"data: 4\n\ndata: 5\n\ndata: 6\n\ndata: 7\n\ndata: [DONE]\n\n",
    ]


async def test_what_was_there_goes_out_before_an_error_and_with_it() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"1"
        raise WorkerLost("gone")

    writes: list[bytes] = []
    await run(events(), writes)
    assert writes == [b'data: 1\n\ndata: {"error": "gone"}\n\n']


async def test_a_source_that_never_waits_is_written_in_bounded_pieces() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        for _ in range(100):
            yield b"x" * 1000

    writes: list[bytes] = []
    await run(events(), writes)
    assert max(map(len, writes)) < 2 * MOST_TOGETHER
    assert b"".join(writes).count(b"x") == 100_000


async def test_an_act_comes_once_before_the_first_wait_and_never_without_one() -> None:
    done: list[str] = []

    async def act() -> None:
        await asyncio.sleep(0)
        done.append("act")

    async def work(waits: int) -> int:
        for _ in range(waits):
            await asyncio.sleep(0)
            done.append("waited")
        return waits

    assert await before_waiting(work(0), act) == 0
    assert done == []
    assert await before_waiting(work(2), act) == 2
    assert done == ["act", "waited", "waited"]


@pytest.mark.parametrize("acting", [False, True])
async def test_a_cancellation_reaches_the_work_wherever_it_waits(acting: bool) -> None:
    reached, forever = asyncio.Event(), asyncio.Event()
    heard: list[str] = []

    async def act() -> None:
        if acting:
            reached.set()
            await forever.wait()

    async def work() -> None:
        try:
            reached.set() if not acting else None
            await forever.wait()
        except asyncio.CancelledError:
            heard.append("cancelled")
            await asyncio.sleep(0)  # it may take its time to end
            heard.append("ended")
            raise

    async def waiting() -> None:
        await before_waiting(work(), act)

    task = asyncio.create_task(waiting())
    await reached.wait()
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert heard == ["cancelled", "ended"]


async def test_an_error_of_the_act_is_raised_in_the_work() -> None:
    async def act() -> None:
        raise ClusterError("no way")

    async def work() -> str:
        try:
            await asyncio.Event().wait()
        except ClusterError as error:
            return str(error)
        return "never"

    assert await before_waiting(work(), act) == "no way"


@given(
    text=st.text(),
    finish=st.sampled_from([None, "stop", "length"]),
    ids=st.none() | st.lists(st.integers(0, 1 << 20)),
    logprobs=st.none() | st.dictionaries(st.text(), st.lists(st.floats(allow_nan=False))),
    null_usage=st.booleans(),
)
def test_a_chunk_written_by_hand_says_what_an_encoder_says(
    text: str, finish: str | None, ids: list[int] | None, logprobs: Any, null_usage: bool
) -> None:
    completion = Completion("cmpl-1", 7, "the \u00e9 model", null_usage=null_usage)
    expected: dict[str, Any] = {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 7,
        "model": "the \u00e9 model",
        "choices": [{"index": 3, "text": text, "logprobs": logprobs, "finish_reason": finish}],
    }
    if ids is not None:
        expected["choices"][0]["token_ids"] = ids
    if null_usage:
        expected["usage"] = None
    choice = choice_text(
        3,
        text,
        finish=finish,
        logprobs=json.dumps(logprobs),
        token_ids=None if ids is None else [str(one) for one in ids],
    )
    written = completion.chunk(choice)
    assert json.loads(written) == expected
    assert written.isascii()
