"""POST /v1/completions: a body becomes requests, deltas become text, one choice a request.

The engine is anything that generates; tests put a fake there. Knows nothing of workers.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from cluster.api.answer_text import AnswerText, Piece, ShownToken
from cluster.api.completion_body import BadField, CompletionBody, parse_completion
from cluster.api.completion_requests import build_requests
from cluster.api.logprobs import logprobs_body
from cluster.api.merging import merge
from cluster.api.metrics import Metrics
from cluster.api.openai import Completion, UnknownModel, Usage, choice_body, error_body
from cluster.api.prompt_text import Echo, PlainEcho, ScoredEcho
from cluster.api.stop_strings import StopStrings
from cluster.api.streaming import EventStream, read_body, while_connected
from cluster.api.text import Tokenizer
from cluster.config import ClusterConfig
from cluster.errors import NoRoom
from cluster.generation import Delta, Timeline
from cluster.messages import FinishReason, Member, Request, unpack_ids

logger = logging.getLogger(__name__)
Json = dict[str, Any]

LONG_STOPS = 1024  # characters; an automaton of more is built beside the loop


class Engine(Protocol):
    """What the HTTP side needs of whoever owns requests."""

    def generate(
        self, request: Request, timeline: Timeline | None = None, *, colocated: bool = False
    ) -> AsyncGenerator[Delta, None]: ...

    def members(self) -> tuple[Member, ...]:
        """Ranks heard of within the detection time, draining ones included."""
        ...


@dataclass
class Choice:
    """One answer that is being made."""

    request: Request
    text: AnswerText
    echo: Echo  # shown before everything else


@dataclass(frozen=True)
class Ask:
    """One HTTP request, understood."""

    body: CompletionBody
    choices: list[Choice]
    completion: Completion
    timeline: Timeline | None

    @property
    def usage(self) -> Usage:
        """A prompt counts once, however many answers it gets."""
        prompts = self.choices[:: self.body.n]
        return Usage(
            prompt_tokens=sum(choice.request.prompt_length for choice in prompts),
            completion_tokens=sum(choice.text.count for choice in self.choices),
        )

    @property
    def tells_tokens(self) -> bool:
        return self.body.logprobs is not None or self.body.return_token_ids


class Completions:
    """The endpoint, and how many answers are in it."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, config: ClusterConfig) -> None:
        self.running = 0
        self.metrics = Metrics(lambda: self.running)
        self._engine = engine
        self._tokenizer = tokenizer
        self._http = config.http
        self._model = config.model.served_name
        self.max_length = min(config.prefill.engine.max_length, config.decode.engine.max_length)

    async def answer(self, http: HttpRequest) -> Response:
        raw = await read_body(http, self._http.max_body_bytes, self._http.body_timeout_s)
        completion_id = f"cmpl-{secrets.token_hex(12)}"
        if http.state.request_id is not None:
            logger.info("%s is the client's request %s", completion_id, http.state.request_id)
        ask = await self._understand(parse_completion(raw), completion_id)
        if ask.body.stream:
            events = self._events(ask)
            return EventStream(events, error_body=error_body, stall_s=self._http.stall_timeout_s)
        return JSONResponse(await while_connected(http.receive, self._whole(ask)))

    async def _understand(self, body: CompletionBody, completion_id: str) -> Ask:
        if body.model not in (None, self._model):
            raise UnknownModel(f"model {body.model[:64]!r} is not served here; {self._model!r} is")
        if len(body.prompt) * body.n > self._http.max_concurrent:
            raise BadField(
                "prompt" if len(body.prompt) > 1 else "n",
                f"{len(body.prompt) * body.n} answers are asked for; this server makes "
                f"{self._http.max_concurrent} at a time",
            )
        requests = await build_requests(body, completion_id, self._tokenizer, self.max_length)
        stops = await _stop_strings(body.stop)
        ask = Ask(
            body=body,
            choices=[],
            completion=Completion(
                completion_id, int(time.time()), self._model, null_usage=body.include_usage
            ),
            timeline=Timeline() if body.timeline else None,
        )
        for index, request in enumerate(requests):
            echo = self._echo(body, body.prompt[index // body.n], request)
            text = AnswerText(
                self._tokenizer,
                stops,
                offset=echo.length,
                min_tokens=body.min_tokens,
                show_stop=body.include_stop_str_in_output,
                tell_tokens=ask.tells_tokens,
            )
            ask.choices.append(Choice(request, text, echo))
        return ask

    def _echo(self, body: CompletionBody, prompt: str | list[int], request: Request) -> Echo:
        if not body.echo:
            return PlainEcho("")
        if body.logprobs is not None:
            return ScoredEcho(unpack_ids(request.prompt), self._tokenizer)
        return PlainEcho(prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt))

    async def _events(self, ask: Ask) -> AsyncGenerator[bytes, None]:
        """The JSON of each event of a stream."""
        tells_all = ask.tells_tokens
        async with aclosing(self._pieces(ask)) as pieces:
            async for index, piece in pieces:
                if piece.finish is None and not tells_all:
                    yield ask.completion.text_chunk(index, piece.text)
                else:
                    yield ask.completion.chunk(self._choice(ask.body, index, piece))
        if ask.body.include_usage or ask.timeline is not None:
            yield ask.completion.last_chunk(
                {
                    "usage": ask.usage.body() if ask.body.include_usage else None,
                    "timeline": ask.timeline.as_dict() if ask.timeline else None,
                }
            )

    async def _whole(self, ask: Ask) -> Json:
        answers = [_Gathered() for _ in ask.choices]
        async with aclosing(self._pieces(ask)) as pieces:
            async for index, piece in pieces:
                answers[index].add(piece)
        return ask.completion.whole(
            [self._choice(ask.body, *one) for one in enumerate(map(_Gathered.piece, answers))],
            ask.usage,
            {"timeline": ask.timeline.as_dict() if ask.timeline else None},
        )

    def _choice(self, body: CompletionBody, index: int, piece: Piece) -> Json:
        wanted, told = body.logprobs is not None, body.return_token_ids
        return choice_body(
            index,
            piece.text,
            finish=piece.finish,
            logprobs=(
                logprobs_body((*piece.prompt, *piece.tokens), self._tokenizer) if wanted else None
            ),
            token_ids=[token.token_id for token in piece.tokens] if told else None,
        )

    # ------------------------------------------------------------ generation

    async def _pieces(self, ask: Ask) -> AsyncGenerator[tuple[int, Piece], None]:
        """(index of the choice, what is new of it), of all choices side by side."""
        with self._places(len(ask.choices)):
            sources = [self._answer(ask, choice) for choice in ask.choices]
            async with aclosing(merge(sources)) as pieces:
                async for item in pieces:
                    yield item

    async def _answer(self, ask: Ask, choice: Choice) -> AsyncGenerator[Piece, None]:
        """Ends with the piece that has a finish; a stop string ends the generation with it."""
        clock = self.metrics.answer(choice.request.prompt_length)
        echo: Echo | None = choice.echo
        answer = self._engine.generate(choice.request, ask.timeline, colocated=ask.body.colocated)
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
                    if piece.text or piece.tokens or piece.prompt or piece.finish:
                        yield piece
                    if piece.finish is not None:
                        return
        finally:
            clock.end(choice.text.count)

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


@dataclass
class _Gathered:
    """The pieces of one answer, for those who do not stream."""

    texts: list[str] = field(default_factory=list)
    tokens: list[ShownToken] = field(default_factory=list)
    prompt: list[ShownToken] = field(default_factory=list)
    finish: FinishReason | None = None

    def add(self, piece: Piece) -> None:
        self.texts.append(piece.text)
        self.tokens += piece.tokens
        self.prompt += piece.prompt
        self.finish = piece.finish

    def piece(self) -> Piece:
        return Piece("".join(self.texts), self.tokens, self.finish, self.prompt)


async def _stop_strings(strings: tuple[str, ...]) -> StopStrings:
    if sum(map(len, strings)) < LONG_STOPS:
        return StopStrings(strings)
    return await asyncio.to_thread(StopStrings, strings)
