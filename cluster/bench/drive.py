"""Asks a server what a load says and records what comes. Knows nothing of who serves."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from cluster.bench.event_client import post_events
from cluster.bench.load import Load
from cluster.bench.record import Record
from cluster.errors import ClusterError, revive

Json = dict[str, Any]
Post = Callable[[Mapping[str, Any]], AsyncGenerator[bytes, None]]
"""Sends a body, yields the data of each event."""


def poster(url: str, api_key: str | None) -> Post:
    def post(body: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        return post_events(url.rstrip("/") + "/v1/completions", body, api_key)

    return post


async def drive(
    load: Load,
    post: Post,
    *,
    more: Mapping[str, Any],
    progress: Callable[[list[Record]], None] = lambda records: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Record]:
    """One record a request, in order of arrival. `more` are fields of every body; `progress` is
    told of all records so far when one has ended. Errors are recorded, not raised."""
    begun = clock()
    records: list[Record] = []
    waiting = zip(load.arrivals(), load.bodies(), strict=True)

    async def ask(due_s: float, body: Json) -> None:
        record = Record(due_s)
        records.append(record)
        try:
            async with aclosing(post({**body, **more})) as events:
                async for event in events:
                    _take(record, event, clock() - begun)
            if record.error is None and record.output_tokens == 0:
                record.error = "the answer came without usage"
        except ClusterError as error:
            record.error = f"{error.kind}: {error}"
        record.ended_s = clock() - begun
        progress(records)

    async def client() -> None:
        for _, body in waiting:
            await ask(clock() - begun, body)

    async with asyncio.TaskGroup() as tasks:
        if load.rate is None:
            for _ in range(min(load.concurrency, load.requests)):
                tasks.create_task(client())
        else:
            for due_s, body in waiting:
                await asyncio.sleep(max(0.0, due_s - (clock() - begun)))
                tasks.create_task(ask(due_s, body))
    return records


def _take(record: Record, event: bytes, now_s: float) -> None:
    if event == b"[DONE]":
        return
    chunk = json.loads(event)
    if "error" in chunk:
        told = chunk["error"]
        raise revive(str(told.get("code")), str(told.get("message")))
    if chunk["choices"]:
        record.event_s.append(now_s)
    if chunk.get("usage"):
        record.prompt_tokens = chunk["usage"]["prompt_tokens"]
        record.output_tokens = chunk["usage"]["completion_tokens"]
