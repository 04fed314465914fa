"""What the field cases share: an oracle, how often a case runs, and what must be so after it.

The cases are faults that users of other systems reported; docs/failures.md lists them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from cluster.config import ClusterConfig
from cluster.generation import Timeline
from cluster.messages import Request
from tests.tiny import TinyCluster, tiny_config

GONE_S = 2.0  # from a client's leaving to the last sign of work for it
LEDGER_S = 5.0  # to all memory back
ANSWER_S = 8.0  # a plain request on a busy machine


def rounds(few: int, written: int) -> pytest.MarkDecorator:
    """`few` by default, as often as the case says in the long form."""
    return pytest.mark.parametrize("rounds", [few, pytest.param(written, marks=pytest.mark.full)])


def engine(**sizes: Any) -> dict[str, Any]:
    return {"num_blocks": 64, "num_slots": 8, "chunk_tokens": 32, "max_length": 512} | sizes


def config_of(
    prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **sections: Any
) -> ClusterConfig:
    return tiny_config(
        prefill={"engine": engine(**(prefill or {}))},
        decode={"engine": engine(**(decode or {}))},
        **sections,
    )


async def oracle(*requests: Request) -> list[list[int]]:
    """What one colocated rank with room for everything answers, one request after another."""
    config = config_of(decode={"num_blocks": 256, "max_length": 2048}, router={"colocated": True})
    async with TinyCluster(prefill=0, config=config) as cluster:
        return [await cluster.answer(request) for request in requests]


async def settles(cluster: TinyCluster, within_s: float = LEDGER_S) -> None:
    """All memory of all ranks is back in time."""
    async with asyncio.timeout(within_s):
        assert await cluster.settled()


async def answers(cluster: TinyCluster, request: Request, expected: Sequence[int]) -> None:
    """Probe: a plain request is served rightly at once."""
    async with asyncio.timeout(ANSWER_S):
        assert await cluster.answer(request) == expected


def count(timelines: Sequence[Timeline], *names: str) -> int:
    """Events of these names, in all."""
    return sum(event.name in names for timeline in timelines for event in timeline.events)
