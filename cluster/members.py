"""Asks a router once who is there; callers that go on asking watch it instead (routes.py)."""

from __future__ import annotations

from cluster.config import WireSection
from cluster.errors import ProtocolError
from cluster.messages import Address, Member, Membership, Watch
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
