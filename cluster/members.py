"""Asks once who is there, and how; callers that go on asking watch a router (routes.py)."""

from __future__ import annotations

from typing import TypeVar

from cluster.config import WireSection
from cluster.errors import ProtocolError
from cluster.messages import (
    Address,
    AskPairs,
    Endpoint,
    Member,
    Membership,
    PairPath,
    Pairs,
    Watch,
    WireMessage,
)
from cluster.wire import Identity, connect

Answer = TypeVar("Answer")


async def ask_members(
    router: Address, identity: Identity, config: WireSection
) -> tuple[Member, ...]:
    """Ranks that the router has heard of. WorkerLost if it does not answer."""
    answer = await ask(router, Watch(), Membership, identity, config, label="the router")
    return answer.members


async def ask_pairs(
    prefill: Endpoint, identity: Identity, config: WireSection
) -> tuple[PairPath, ...]:
    """Decode ranks that a prefill rank is connected to. WorkerLost if it does not answer."""
    answer = await ask(prefill.address, AskPairs(), Pairs, identity, config, label=prefill.name)
    return answer.pairs


async def ask(
    address: Address,
    question: WireMessage,
    expected: type[Answer],
    identity: Identity,
    config: WireSection,
    *,
    label: str,
) -> Answer:
    """One question on a connection of its own. WorkerLost, or ProtocolError for another answer."""
    connection = await connect(address, identity, config, label=label)
    try:
        async with await connection.open(question) as stream:
            answer = await stream.receive()
    finally:
        await connection.close()
    if not isinstance(answer, expected):
        raise ProtocolError(f"{label} answered {question.kind} with {answer}")
    return answer
