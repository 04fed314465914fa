"""Asks once who is there, and how; callers that go on asking watch a router (routes.py)."""

from __future__ import annotations

from cluster.config import WireSection
from cluster.errors import ProtocolError
from cluster.messages import Address, AskPairs, Endpoint, Member, Membership, PairPath, Pairs, Watch
from cluster.wire import Identity, connect


async def ask_members(
    router: Address, identity: Identity, config: WireSection
) -> tuple[Member, ...]:
    """Ranks that the router has heard of. WorkerLost if it does not answer."""
    connection = await connect(router, identity, config, label="the router")
    try:
        async with await connection.open(Watch()) as stream:
            answer = await stream.receive()
    finally:
        await connection.close()
    if not isinstance(answer, Membership):
        raise ProtocolError(f"the router answered a watch with {answer}")
    return answer.members


async def ask_pairs(
    prefill: Endpoint, identity: Identity, config: WireSection
) -> tuple[PairPath, ...]:
    """Decode ranks that a prefill rank is connected to. WorkerLost if it does not answer."""
    connection = await connect(prefill.address, identity, config, label=prefill.name)
    try:
        async with await connection.open(AskPairs()) as stream:
            answer = await stream.receive()
    finally:
        await connection.close()
    if not isinstance(answer, Pairs):
        raise ProtocolError(f"{prefill.name} answered a question for its pairs with {answer}")
    return answer.pairs
