"""What HTTP adds to a stream of tokens: `python -m cluster.bench_http [tokens]`.

The server and an engine that costs nothing run in a thread, the client in another. What a token
costs is processor time of the server's thread, over that of the same stream read directly; so a
busy machine and the client's own work do not count. The first byte is wall time, in turns with
the direct reading.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import sys
import threading
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from cluster.api.app import create_app
from cluster.api.server import Server
from cluster.api.text import load_tokenizer
from cluster.bench.event_client import post_events
from cluster.config import ClusterConfig, parse_config
from cluster.generation import Answer, Delta, Timeline
from cluster.launch import ROOT
from cluster.messages import Member, Request, pack_ids

T = TypeVar("T")
Json = dict[str, Any]
ROUNDS = 50  # requests for the first byte
PROMPT = list(range(100, 164))
FIRST_WORD, WORDS = 1000, 512  # ids of the shipped model that are words, as most text is
CONFIG: ClusterConfig = parse_config(
    {pool: {"engine": {"max_length": 1 << 20}} for pool in ("prefill", "decode")}
)


@dataclass(frozen=True)
class Cost:
    """What HTTP adds to the same stream read directly."""

    first_byte_ms: float  # median, wall time, both ends
    request_ms: float  # processor time of the server's thread, for a request of one token
    token_us: float  # processor time of the server's thread


class Instant:
    """An engine whose tokens are there at once, one a delta, `together` of them in a turn of the
    loop: 1 for a loop that keeps up, more for one that is late."""

    def __init__(self, together: int = 1) -> None:
        self._together = together

    def generate(
        self, request: Request, timeline: Timeline | None = None, *, colocated: bool = False
    ) -> Answer:
        return Answer(self._deltas(request), lambda index: None)

    async def _deltas(self, request: Request) -> AsyncGenerator[Delta, None]:
        last = request.sampling.max_tokens - 1
        for index in range(last + 1):
            if index % self._together == 0:
                await asyncio.sleep(0)
            token = FIRST_WORD + index % WORDS
            yield Delta((token,), index, "length" if index == last else None)

    def members(self) -> tuple[Member, ...]:
        return ()


def measure(
    tokens: int,
    *,
    rounds: int = ROUNDS,
    body: Mapping[str, Any] | None = None,
    together: int = 1,
) -> Cost:
    """`body`: further fields of the streamed request; `together` as in Instant."""
    engine = Instant(together)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            app = create_app(engine, load_tokenizer(ROOT / CONFIG.model.path), CONFIG)
            server = Server(app, drain_s=1.0)
            serving = asyncio.run_coroutine_threadsafe(server.serve(sockets=[listener]), loop)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/completions"
            try:
                return _measure(loop, engine, url, tokens, rounds, dict(body or {}))
            finally:
                server.should_exit = True
                serving.result(10.0)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _measure(
    loop: asyncio.AbstractEventLoop,
    engine: Instant,
    url: str,
    tokens: int,
    rounds: int,
    body: dict[str, Any],
) -> Cost:
    def over_there(work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    async def processor_s() -> float:
        return time.thread_time()

    async def direct(count: int) -> float:
        """Seconds to the first token."""
        begun, first = time.perf_counter(), 0.0
        request = Request(request_id="direct", prompt=pack_ids(PROMPT))
        sampling = request.sampling.model_copy(update={"max_tokens": count})
        request = request.model_copy(update={"sampling": sampling})
        async for _ in engine.generate(request):
            first = first or time.perf_counter() - begun
        return first

    async def over_http(count: int) -> float:
        begun, first = time.perf_counter(), 0.0
        asked = {"prompt": PROMPT, "max_tokens": count, "stream": True, **body}
        async for _ in post_events(url, asked):
            first = first or time.perf_counter() - begun
        return first

    def processor_time_of(streams: Any) -> float:
        before = over_there(processor_s())
        streams()
        return over_there(processor_s()) - before

    asyncio.run(over_http(8))  # whatever is only made once
    firsts = [asyncio.run(over_http(1)) - over_there(direct(1)) for _ in range(rounds)]
    request_s = processor_time_of(lambda: [asyncio.run(over_http(1)) for _ in range(rounds)])
    raw_s = processor_time_of(lambda: over_there(direct(tokens)))
    http_s = processor_time_of(lambda: asyncio.run(over_http(tokens)))
    return Cost(
        first_byte_ms=statistics.median(firsts) * 1e3,
        request_ms=request_s / rounds * 1e3,
        token_us=(http_s - raw_s) / tokens * 1e6,
    )


def main() -> None:
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    cases: tuple[tuple[str, Json, int], ...] = (
        ("text", {}, 1),
        ("with token ids", {"return_token_ids": True}, 1),
        ("with a stop string", {"stop": ["never"]}, 1),
        ("with 1000 stop strings", {"stop": [f"never {n}" for n in range(1000)]}, 1),
        ("text, eight tokens a turn", {}, 8),
    )
    for name, body, together in cases:
        cost = measure(tokens, body=body, together=together)
        print(
            f"http, {name}: {cost.first_byte_ms:.2f} ms to the first byte "
            f"({cost.request_ms:.2f} ms of processor time), "
            f"{cost.token_us:.1f} us a token over the raw stream"
        )


if __name__ == "__main__":
    main()
