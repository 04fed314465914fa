"""Ranks that note when a commit is sent and heard, and when decode's first step after it begins.

Times are of time.monotonic(), which on Linux is one clock for all processes of a machine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

from cluster.messages import Commit, Hello, OpenPush, WireMessage
from cluster.wire import Peers, Stream
from decode_worker.worker import DecodeRank
from engine.packed_runner import PackedModel
from engine.runner import Model
from engine.schedule import Grant, Progress
from prefill_worker.worker import PrefillRank


class _NotingStream:
    """Notes each Commit that goes through it, either way."""

    def __init__(self, stream: Any, times: list[float]) -> None:
        self._stream = stream
        self._times = times

    async def send(self, message: WireMessage) -> None:
        if isinstance(message, Commit):
            self._times.append(time.monotonic())
        await self._stream.send(message)

    def __aiter__(self) -> _NotingStream:
        return self

    async def __anext__(self) -> WireMessage:
        message: WireMessage = await self._stream.__anext__()
        if isinstance(message, Commit):
            self._times.append(time.monotonic())
        return message

    async def __aenter__(self) -> _NotingStream:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stream.__aexit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _NotingPeers:
    def __init__(self, peers: Peers, times: list[float]) -> None:
        self._peers = peers
        self._times = times

    async def open(self, endpoint: Any, first: WireMessage) -> Any:
        stream = await self._peers.open(endpoint, first)
        return _NotingStream(stream, self._times) if isinstance(first, OpenPush) else stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._peers, name)


class TimedPrefill(PrefillRank):
    """`times`: when each commit was sent."""

    times: list[float]

    def _build(self, model: Model | PackedModel) -> None:
        super()._build(model)
        self.times = []
        self.peers = cast(Peers, _NotingPeers(self.peers, self.times))


class TimedDecode(DecodeRank):
    """`times`: of each commit when it was heard, then when the next step was scheduled."""

    times: list[float]

    def _build(self, model: Model | PackedModel) -> None:
        super()._build(model)
        self.times = []

    async def answer(self, stream: Stream, first: WireMessage, peer: Hello) -> None:
        if isinstance(first, OpenPush):
            stream = cast(Stream, _NotingStream(stream, self.times))
        await super().answer(stream, first, peer)

    def _schedule(self, requests: Sequence[Progress]) -> list[Grant]:
        granted = super()._schedule(requests)
        if granted and len(self.times) % 2:
            self.times.append(time.monotonic())
        return granted
