"""An engine that says what it is told to, and notices when it is left."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import cycle
from pathlib import Path

import httpx
from fastapi import FastAPI

from cluster.api.app import create_app
from cluster.api.completions import Engine
from cluster.api.server import Server
from cluster.api.text import Tokenizer, load_tokenizer
from cluster.config import ClusterConfig, parse_config
from cluster.errors import ClusterError
from cluster.generation import Answer, Delta, Timeline
from cluster.messages import (
    Address,
    Endpoint,
    FinishReason,
    Load,
    Member,
    Request,
    Role,
    TokenLogprobs,
    unpack_ids,
)
from tests.cluster.fakes import until

MODEL = Path(__file__).parents[2] / "deploy" / "models" / "tiny"
TOKENIZER: Tokenizer = load_tokenizer(MODEL)
CONFIG: ClusterConfig = parse_config({"http": {"max_body_bytes": 4096, "max_concurrent": 2}})
WITHIN_S = 2.0  # for what takes milliseconds


class FakeEngine:
    """Says `answer`, cut into deltas of `sizes` tokens in turn; waits before an index held.

    The log-probabilities of a prompt come first, cut likewise.
    """

    def __init__(
        self,
        answer: Sequence[int] = (),
        error: ClusterError | None = None,
        *,
        sizes: Sequence[int] = (1,),
        finish: FinishReason = "length",
    ) -> None:
        self.answer = answer
        self.answer_to: Callable[[Request], Sequence[int]] = lambda request: self.answer
        self.error = error  # raised after the answer
        self.sizes = sizes
        self.finish: FinishReason = finish
        self.requests: list[Request] = []
        self.colocated: list[bool] = []  # how each was asked for
        self.stopped: list[int] = []  # where readers found the end of an answer
        self.roles: Sequence[Role] = ("prefill", "decode")
        self.begun = asyncio.Event()
        self.left = asyncio.Event()  # a generation has ended, whichever way
        self.told = 0  # tokens, of all answers
        self.ruled_out = -1  # a token that the model cannot say
        self.hold_at: Callable[[int], bool] = lambda index: False
        self.go_on = asyncio.Event()

    def generate(
        self,
        request: Request,
        timeline: Timeline | None = None,
        *,
        colocated: bool = False,
    ) -> Answer:
        return Answer(self._deltas(request, timeline, colocated), self.stopped.append)

    async def _deltas(
        self, request: Request, timeline: Timeline | None, colocated: bool
    ) -> AsyncGenerator[Delta, None]:
        self.requests.append(request)
        self.colocated.append(colocated)
        if timeline is not None:
            timeline.record("routed", decode="decode-a/0")
        whole = self.answer_to(request)
        answer = tuple(whole[: request.sampling.max_tokens])
        finish = "length" if len(answer) < len(whole) else self.finish
        try:
            self.begun.set()
            for scored in self._scored(request):
                yield scored
            first = 0
            for size in cycle(self.sizes):
                if first >= len(answer):
                    break
                if self.hold_at(first):
                    await self.go_on.wait()
                tokens = answer[first : first + size]
                if timeline is not None:
                    timeline.tokens(len(tokens))
                last = self.error is None and first + size >= len(answer)
                self.told += len(tokens)
                yield Delta(
                    tokens,
                    first,
                    finish if last else None,
                    thoughts(tokens, request.sampling.logprobs),
                )
                first += size
            if self.error is not None:
                raise self.error
        finally:
            self.left.set()

    def _scored(self, request: Request) -> Iterator[Delta]:
        options = request.sampling
        prompt = unpack_ids(request.prompt)
        tokens = [prompt[position] for position in request.scored]
        told = [
            thought.model_copy(update={"logprob": -math.inf})
            if token == self.ruled_out
            else thought
            for token, thought in zip(
                tokens, thoughts(tokens, options.prompt_logprobs), strict=True
            )
        ]
        for size in cycle(self.sizes):
            if not told:
                return
            yield Delta((), 0, prompt_logprobs=tuple(told[:size]))
            del told[:size]

    def members(self) -> tuple[Member, ...]:
        return tuple(
            Member(
                endpoint=Endpoint(
                    name=f"{role}-a/0",
                    role=role,
                    incarnation=role,
                    address=Address(host="127.0.0.1", port=1),
                ),
                load=Load(),
            )
            for role in self.roles
        )


def app_over(engine: Engine, config: ClusterConfig = CONFIG) -> FastAPI:
    return create_app(engine, TOKENIZER, config)


def client_of(app: FastAPI) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def with_http(**settings: object) -> ClusterConfig:
    """CONFIG with other settings of its section http."""
    return CONFIG.model_copy(update={"http": CONFIG.http.model_copy(update=settings)})


def thoughts(tokens: Sequence[int], wanted: int | None) -> tuple[TokenLogprobs, ...]:
    """What a model that thinks little of itself says: a function of the token."""
    if wanted is None:
        return ()
    return tuple(
        TokenLogprobs(logprob=-1.0 - token, top=tuple((n, -0.5 - n) for n in range(wanted)))
        for token in tokens
    )


@asynccontextmanager
async def serving(
    engine: Engine, config: ClusterConfig = CONFIG, *, small_buffers: bool = False
) -> AsyncIterator[str]:
    """The URL of a uvicorn; at the end nothing runs in it any more."""
    app = app_over(engine, config)
    with socket.socket() as listener:
        if small_buffers:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = Server(app, drain_s=WITHIN_S, head_timeout_s=config.http.head_timeout_s)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            await until(lambda: app.state.completions.running == 0, WITHIN_S)
        finally:
            server.should_exit = True
            await running
