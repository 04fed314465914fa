"""Messages a second through one connection: `python -m cluster.bench_wire [messages]`.

Both ends run in this process and share its one core, codec included: what two processes do
together on two cores is about twice as much. Seconds are processor time, so that a busy machine
does not count.
"""

from __future__ import annotations

import asyncio
import sys
import time

from cluster.config import WireSection
from cluster.messages import Address, Hello, Tokens, Watch, WireMessage
from cluster.wire import Identity, Stream, connect, new_incarnation, serve

STREAMS = 32  # as many answers at once


async def tokens_a_second(messages: int) -> float:
    """One-token messages from a server to its caller, over STREAMS streams of one connection."""

    async def answer(stream: Stream, first: WireMessage, peer: Hello) -> None:
        for index in range(messages // STREAMS):
            await stream.send(Tokens(first=index, token_ids=(index,)))
            if index % 64 == 0:
                await asyncio.sleep(0)  # as if the next step of an engine were awaited

    secret = bytes(32)
    config = WireSection()
    server = await serve(answer, Identity("decode", new_incarnation(), secret), config)
    connection = await connect(
        Address(host=server.address.host, port=server.address.port),
        Identity("caller", new_incarnation(), secret),
        config,
    )

    async def read() -> int:
        stream = await connection.open(Watch())
        return sum([1 async for _ in stream])

    begun = time.process_time()
    read_messages = sum(await asyncio.gather(*(read() for _ in range(STREAMS))))
    seconds = time.process_time() - begun
    await connection.close()
    await server.close()
    return read_messages / seconds


def main() -> None:
    messages = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    rate = asyncio.run(tokens_a_second(messages))
    print(f"wire: {rate:,.0f} one-token messages/s, both ends and codec on one core")


if __name__ == "__main__":
    main()
