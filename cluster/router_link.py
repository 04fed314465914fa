"""A process's tie to whichever router there is: found, held, found again after each loss."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from cluster.config import WireSection
from cluster.errors import ClusterError
from cluster.messages import Address
from cluster.wire import Connection, Identity, connect

logger = logging.getLogger(__name__)

FindRouter = Callable[[], Awaitable[Address | None]]
"""Where the leading router listens now; None while there is none."""

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0  # all ranks and callers together are few; a router is back within seconds
LEADER_CHECK_S = 1.0  # how often to look whether another router leads by now


async def follow_router(
    find_router: FindRouter,
    identity: Identity,
    config: WireSection,
    converse: Callable[[Connection], Awaitable[None]],
    check_s: float = LEADER_CHECK_S,
) -> None:
    """Runs `converse` on a connection to the leading router, again after every loss.

    Until cancelled. A new leader counts as a loss of the old one.
    """
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            address = await find_router()
            if address is not None:
                connection = await connect(address, identity, config, label="the router")
                pause_s = FIRST_PAUSE_S
                looking = asyncio.create_task(
                    _leave_if_it_moves(connection, address, find_router, check_s)
                )
                try:
                    await converse(connection)
                finally:
                    looking.cancel()
                    await asyncio.gather(looking, return_exceptions=True)
                    await connection.close()
        except ClusterError as error:
            logger.info("%s: %s; looking for it again", identity.role, error)
        except Exception:  # whatever finding it met; a tie that ended here would be silent for ever
            logger.exception("%s: cannot find the router; trying again", identity.role)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


async def _leave_if_it_moves(
    connection: Connection, address: Address, find_router: FindRouter, check_s: float
) -> None:
    while True:
        await asyncio.sleep(check_s)
        try:
            leader = await find_router()
        except Exception as error:  # then the one that answers is the best that there is
            logger.info("cannot ask who leads: %s", error)
            continue
        if leader not in (None, address):
            await connection.close()
            return
