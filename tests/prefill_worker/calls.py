"""What a caller of a prefill rank says, and a link that the test holds or breaks."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, TypeVar

from torch import Tensor

from cluster.errors import TransferError
from cluster.messages import (
    Prefill,
    PushTo,
    Request,
    Reserve,
    Reserved,
    Started,
    Tokens,
    WireMessage,
)
from cluster.wire import Peers, Stream
from decode_worker.worker import DecodeRank
from kv_transfer.chosen_transport import ChosenTransport
from kv_transfer.open_transport import open_paths
from prefill_worker.worker import PrefillRank

M = TypeVar("M", bound=WireMessage)


class Gated:
    """A transport whose writes wait at a gate, and may be told to fail there."""

    def __init__(self, transport: ChosenTransport) -> None:
        self._transport = transport
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()
        self.fail_next = False
        self.writes = 0

    def write(self, peer: str, source: Tensor, remote_offset: int) -> None:
        self.waiting.set()
        assert self.gate.wait(20)
        if self.fail_next:
            self.fail_next = False
            raise TransferError("the link is down")
        self.writes += 1
        self._transport.write(peer, source, remote_offset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def gated(*args: Any, **options: Any) -> Any:
    return Gated(open_paths(*args, **options))


async def expect(stream: Stream, kind: type[M]) -> M:
    async with asyncio.timeout(10):
        message = await stream.receive()
    assert isinstance(message, kind), message
    return message


async def start(caller: Peers, rank: PrefillRank, request: Request) -> tuple[Stream, int]:
    """The prompt has run; its stream, and its first token."""
    stream = await caller.open(rank.endpoint, Prefill(request=request, attempt=1))
    await expect(stream, Started)
    tokens = await expect(stream, Tokens)
    assert tokens.first == request.output_length
    return stream, tokens.token_ids[0]


async def place(
    caller: Peers, prefill: Stream, rank: DecodeRank, request: Request
) -> tuple[Stream, Reserved]:
    stream = await caller.open(rank.endpoint, Reserve(request=request, attempt=1))
    reserved = await expect(stream, Reserved)
    await prefill.send(
        PushTo(reservation=reserved.reservation, segment=reserved.segment, decode=rank.endpoint)
    )
    return stream, reserved


async def rest_of(stream: Stream) -> list[int]:
    return [t async for m in stream if isinstance(m, Tokens) for t in m.token_ids]
