"""A Python program's handle on a server's URL: text in, text out, as it comes.

    async with HttpClient("http://localhost:8100") as client:
        async for chunk in client.stream("Hello", max_tokens=64): print(chunk.text, end="")

    with SyncHttpClient("http://localhost:8100") as client:
        print(client.complete("Hello", max_tokens=64).text)

Fields are those of docs/http.md. Leaving a stream early cancels it on the server. For token ids
without HTTP, from inside the Ray cluster, there is cluster.client.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from cluster.api.openai import CODES
from cluster.closing import AsyncClosing, Closing
from cluster.errors import (
    ERRORS,
    BadRequest,
    ClusterError,
    NoRoom,
    Unauthorized,
    Unavailable,
    WorkerLost,
    revive,
)

Prompt = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
Json = dict[str, Any]

_PATH = "/v1/completions"
_KINDS = {code: kind for kind, code in CODES.items()}
_STATUSES: dict[int, type[ClusterError]] = {
    401: Unauthorized,
    429: NoRoom,
    502: WorkerLost,
    503: Unavailable,
}


@dataclass(frozen=True)
class Chunk:
    """What is new of one answer, or a whole one; `logprobs` in the shape of OpenAI's API."""

    text: str
    index: int = 0  # which answer, if several are asked for
    finish: str | None = None  # "stop", "length", with the last chunk
    token_ids: tuple[int, ...] = ()  # with return_token_ids
    logprobs: Json | None = None


@dataclass(frozen=True)
class Answer:
    completion_id: str
    choices: tuple[Chunk, ...]
    prompt_tokens: int
    completion_tokens: int
    timeline: Json | None = None  # with timeline=True: what happened to the request, and when

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text


class HttpClient(AsyncClosing):
    """For asyncio programs. Every failure is one ClusterError, of the kind that the server told."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        silence_s: float | None = 600.0,
        connect_s: float = 5.0,
    ) -> None:
        """`silence_s` is the longest wait for the next byte; None: for ever."""
        self._url = url.rstrip("/")
        self._http = httpx.AsyncClient(
            headers=_headers(api_key),
            timeout=httpx.Timeout(silence_s, connect=connect_s),
            verify=self._url.startswith("https:"),  # else reading certificates takes 0.1 s
        )

    async def complete(self, prompt: Prompt, **fields: Any) -> Answer:
        """The whole answer."""
        with _translated(self._url):
            answer = await self._http.post(self._url + _PATH, content=_body(prompt, fields))
        return _answer(_checked(answer))

    async def stream(self, prompt: Prompt, **fields: Any) -> AsyncGenerator[Chunk, None]:
        """The answer as it comes. An error after some of it is raised in its place."""
        asked = _body(prompt, fields, stream=True)
        with _translated(self._url):
            async with self._http.stream("POST", self._url + _PATH, content=asked) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                _checked(answer)
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]":
                        return
                    for chunk in _chunks(line):
                        yield chunk
        raise WorkerLost(f"{self._url}: the stream ended before the answer did")

    async def models(self) -> tuple[str, ...]:
        with _translated(self._url):
            answer = await self._http.get(f"{self._url}/v1/models")
        return tuple(model["id"] for model in _checked(answer).json()["data"])

    async def ready(self) -> bool:
        """Whether a request would find live ranks now."""
        with _translated(self._url):
            return (await self._http.get(f"{self._url}/ready")).status_code == 200

    async def close(self) -> None:
        await self._http.aclose()


class SyncHttpClient(Closing):
    """The same for programs without an event loop; usable from several threads."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        silence_s: float | None = 600.0,
        connect_s: float = 5.0,
    ) -> None:
        self._url = url.rstrip("/")
        self._http = httpx.Client(
            headers=_headers(api_key),
            timeout=httpx.Timeout(silence_s, connect=connect_s),
            verify=self._url.startswith("https:"),
        )

    def complete(self, prompt: Prompt, **fields: Any) -> Answer:
        """As HttpClient.complete()."""
        with _translated(self._url):
            answer = self._http.post(self._url + _PATH, content=_body(prompt, fields))
        return _answer(_checked(answer))

    def stream(self, prompt: Prompt, **fields: Any) -> Generator[Chunk, None, None]:
        """As HttpClient.stream(), for a plain for loop."""
        asked = _body(prompt, fields, stream=True)
        with (
            _translated(self._url),
            self._http.stream("POST", self._url + _PATH, content=asked) as answer,
        ):
            if answer.status_code != 200:
                answer.read()
            _checked(answer)
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    return
                yield from _chunks(line)
        raise WorkerLost(f"{self._url}: the stream ended before the answer did")

    def models(self) -> tuple[str, ...]:
        with _translated(self._url):
            answer = self._http.get(f"{self._url}/v1/models")
        return tuple(model["id"] for model in _checked(answer).json()["data"])

    def ready(self) -> bool:
        """As HttpClient.ready()."""
        with _translated(self._url):
            return self._http.get(f"{self._url}/ready").status_code == 200

    def close(self) -> None:
        self._http.close()


# ------------------------------------------------------------------ what goes over the wire


def _headers(api_key: str | None) -> dict[str, str]:
    key = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return {"content-type": "application/json", **key}


def _body(prompt: Prompt, fields: Mapping[str, Any], *, stream: bool = False) -> bytes:
    """BadRequest for what JSON cannot say, a NaN above all: it is refused before it is sent."""
    if "stream" in fields:
        raise BadRequest("stream: call stream() or complete() instead")
    listed = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    asked = {"prompt": list(prompt) if listed else prompt, **fields}
    if stream:
        asked["stream"] = True
    return b"{%b}" % b",".join(_member(*field) for field in asked.items())


def _member(name: str, value: Any) -> bytes:
    try:
        return f"{json.dumps(name)}:{json.dumps(value, allow_nan=False)}".encode()
    except (ValueError, TypeError) as error:
        raise BadRequest(f"{name}: {error}") from error


def _chunks(line: str) -> list[Chunk]:
    """Of one line of a stream; raises the error that it may hold instead."""
    if not line.startswith("data: "):
        return []
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        raise _error(event["error"], 500)
    return [_chunk(choice) for choice in event["choices"]]


def _chunk(choice: Mapping[str, Any]) -> Chunk:
    return Chunk(
        text=choice["text"],
        index=choice["index"],
        finish=choice["finish_reason"],
        token_ids=tuple(choice.get("token_ids") or ()),
        logprobs=choice["logprobs"],
    )


def _answer(response: httpx.Response) -> Answer:
    body = response.json()
    return Answer(
        completion_id=body["id"],
        choices=tuple(map(_chunk, body["choices"])),
        prompt_tokens=body["usage"]["prompt_tokens"],
        completion_tokens=body["usage"]["completion_tokens"],
        timeline=body.get("timeline"),
    )


def _checked(response: httpx.Response) -> httpx.Response:
    """Raises the error that an answer other than 200 tells of."""
    if response.status_code == 200:
        return response
    try:
        told = response.json()["error"]
        assert isinstance(told["message"], str)
    except (ValueError, KeyError, TypeError, AssertionError):
        told = {"message": f"HTTP {response.status_code}: {response.text[:200]}", "code": ""}
    retry_after = response.headers.get("retry-after", "")
    raise _error(told, response.status_code, float(retry_after) if retry_after.isdigit() else None)


def _error(
    told: Mapping[str, Any], status: int, retry_after_s: float | None = None
) -> ClusterError:
    """By the code that the server told, else by the status."""
    code = str(told.get("code"))
    kind = _KINDS.get(code, code)
    if kind not in ERRORS:
        plain = BadRequest if 400 <= status < 500 else ClusterError
        kind = _STATUSES.get(status, plain).__name__
    return revive(kind, told["message"], retry_after_s)


@contextmanager
def _translated(url: str) -> Iterator[None]:
    """httpx's errors as ours."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise Unavailable(f"nobody answers at {url}: {error}") from error
    except httpx.TimeoutException as error:
        raise WorkerLost(f"{url} said nothing for too long ({type(error).__name__})") from error
    except httpx.HTTPError as error:
        raise WorkerLost(f"{url}: the connection broke: {error}") from error
    except httpx.InvalidURL as error:
        raise BadRequest(f"{url!r} is not a URL: {error}") from error
