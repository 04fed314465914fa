"""POST /v1/completions: what is asked for is generated, deltas become text, text goes out.

The engine is anything that generates; tests put a fake there. Knows nothing of workers.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from typing import Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cluster.api.answer_text import Piece
from cluster.api.ask import Ask, Choice, understand
from cluster.api.gathering import Gathering
from cluster.api.image_field import ImageField
from cluster.api.logprobs import logprobs_text
from cluster.api.merging import merge
from cluster.api.openai import choice_text, error_body
from cluster.api.output_format import BadField
from cluster.api.prompt_text import Echo
from cluster.api.request_body import read_body
from cluster.api.streaming import EventStream, while_connected
from cluster.api.text import Tokenizer
from cluster.config import ClusterConfig, HttpSection
from cluster.errors import BadRequest, NoRoom
from cluster.generation import Answer, Timeline
from cluster.grammars import Grammars
from cluster.held_bytes import HeldBytes
from cluster.image_rules import load_image_rules
from cluster.messages import Member, Request
from cluster.metrics import Metrics

logger = logging.getLogger(__name__)

LONG_BODY = 4096  # bytes; to understand more would hold up the loop for milliseconds
BESIDE = 2  # threads for that: with many the loop would wait for its turn among them


class Engine(Protocol):
    """What the HTTP side needs of whoever owns requests."""

    def generate(
        self, request: Request, timeline: Timeline | None = None, *, colocated: bool = False
    ) -> Answer: ...

    def members(self) -> tuple[Member, ...]:
        """Ranks heard of within the detection time, draining ones included."""
        ...


class Completions:
    """The endpoint, and how many answers are in it."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, config: ClusterConfig) -> None:
        self.running = 0
        self.metrics = Metrics(lambda: self.running)
        self._beside = ThreadPoolExecutor(BESIDE, thread_name_prefix="request-body")
        self._decoding = ThreadPoolExecutor(BESIDE, thread_name_prefix="images")
        self._image_field = ImageField(load_image_rules(config.model.path), config.images)
        self._pictures = HeldBytes(config.images.held_bytes)
        self._grammars = Grammars(config.model.path)
        self._engine = engine
        self._tokenizer = tokenizer
        self._http = config.http
        self._model = config.model.served_name
        self.max_length = min(config.prefill.engine.max_length, config.decode.engine.max_length)

    def reconfigure(self, http: HttpSection) -> None:
        """Limits of requests that come from now on."""
        self._http = http

    async def answer(self, http: HttpRequest) -> Response:
        raw = await read_body(http, self._http.max_body_bytes, self._http.body_timeout_s)
        completion_id = f"cmpl-{secrets.token_hex(12)}"
        if http.state.request_id is not None:
            logger.info("%s is the client's request %s", completion_id, http.state.request_id)
        loop = asyncio.get_running_loop()
        if _may_have_images(raw):  # threads of their own: decoding must not hold up other bodies
            ask = await loop.run_in_executor(self._decoding, self._understand, raw, completion_id)
        elif len(raw) > LONG_BODY:
            ask = await loop.run_in_executor(self._beside, self._understand, raw, completion_id)
        else:
            ask = self._understand(raw, completion_id)
        await self._check_grammar(ask)
        if ask.body.stream:
            events = self._events(ask)
            return EventStream(events, error_body=error_body, stall_s=self._http.stall_timeout_s)
        whole = await while_connected(http.receive, self._whole(ask))
        return Response(whole, media_type="application/json")

    def _understand(self, raw: bytes, completion_id: str) -> Ask:
        return understand(
            raw,
            completion_id,
            tokenizer=self._tokenizer,
            model=self._model,
            max_length=self.max_length,
            max_answers=self._http.max_concurrent,
            image_field=self._image_field,
        )

    async def _check_grammar(self, ask: Ask) -> None:
        """BadField for one that cannot be compiled: no rank hears of it."""
        demand = ask.body.demand()
        if demand is None:
            return
        try:
            await self._grammars.check(demand.grammar)
        except BadRequest as refusal:
            raise BadField(demand.field, str(refusal).removeprefix("grammar: ")) from refusal

    async def _events(self, ask: Ask) -> AsyncGenerator[bytes, None]:
        """The JSON of each event of a stream."""
        completion, wanted = ask.completion, ask.body.logprobs is not None
        tells_ids = ask.body.return_token_ids
        async with aclosing(self._pieces(ask)) as pieces:
            async for index, piece in pieces:
                told = (*piece.prompt, *piece.tokens) if wanted else ()
                yield completion.chunk(
                    choice_text(
                        index,
                        piece.text,
                        finish=piece.finish,
                        logprobs=logprobs_text(told, self._tokenizer) if wanted else "null",
                        token_ids=[str(one.token_id) for one in piece.tokens]
                        if tells_ids
                        else None,
                    )
                )
        if ask.body.include_usage or ask.timeline is not None:
            yield ask.completion.last_chunk(
                {
                    "usage": ask.usage.body() if ask.body.include_usage else None,
                    "timeline": ask.timeline.as_dict() if ask.timeline else None,
                }
            )

    async def _whole(self, ask: Ask) -> bytes:
        """The JSON of the whole answer."""
        body = ask.body
        answers = [
            Gathering(
                self._tokenizer,
                logprobs=body.logprobs is not None,
                token_ids=body.return_token_ids,
            )
            for _ in ask.choices
        ]
        async with aclosing(self._pieces(ask)) as pieces:
            async for index, piece in pieces:
                answers[index].add(piece)
        return ask.completion.whole(
            [answer.choice(index) for index, answer in enumerate(answers)],
            ask.usage,
            ask.timeline.as_dict() if ask.timeline else None,
        )

    # ------------------------------------------------------------ generation

    async def _pieces(self, ask: Ask) -> AsyncGenerator[tuple[int, Piece], None]:
        """(index of the choice, what is new of it), of all choices side by side."""
        with self._places(len(ask.choices)), self._pictures.hold(ask.image_bytes):
            sources = [self._answer(ask, choice) for choice in ask.choices]
            async with aclosing(merge(sources)) as pieces:
                async for item in pieces:
                    yield item

    async def _answer(self, ask: Ask, choice: Choice) -> AsyncGenerator[Piece, None]:
        """Ends with the piece that has a finish; a stop string ends the generation before it."""
        clock = self.metrics.answer(choice.request.prompt_length)
        echo: Echo | None = choice.echo
        timeline = ask.timeline or Timeline()
        answer = self._engine.generate(choice.request, timeline, colocated=ask.body.colocated)
        try:
            async with aclosing(answer) as deltas:
                async for delta in deltas:
                    if delta.prompt_logprobs:
                        yield choice.echo.feed(delta.prompt_logprobs)
                        continue
                    piece = choice.text.feed(delta)
                    clock.got(choice.text.count)
                    if echo is not None:
                        piece, echo = piece.after(echo.rest()), None
                    if piece.finish is not None and delta.finish is None:
                        await answer.stop(choice.text.count)
                    if piece.text or piece.tokens or piece.prompt or piece.finish:
                        yield piece
                    if piece.finish is not None:
                        return
        finally:
            clock.end(choice.text.count)
            self.metrics.happened(timeline)

    @contextmanager
    def _places(self, count: int) -> Iterator[None]:
        if self.running + count > self._http.max_concurrent:
            raise NoRoom(
                f"{self.running} answers are being made and {count} more asked for; one server "
                f"makes {self._http.max_concurrent} at a time",
                retry_after_s=1.0,
            )
        self.running += count
        try:
            yield
        finally:
            self.running -= count


def _may_have_images(raw: bytes) -> bool:
    """Whatever has the field says true; its name can be spelled with escapes."""
    return b'"images"' in raw or b"\\u00" in raw
