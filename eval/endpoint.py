"""Answers of an OpenAI-compatible server, by completions or by chat. Knows nothing of questions.

Completions go through the project's own client; chat, which it does not speak, is one request.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import httpx

from cluster.closing import AsyncClosing
from cluster.errors import ClusterError, NoRoom, Unavailable, WorkerLost
from cluster.http_client import HttpClient

Api = Literal["completions", "chat"]

TRIES = 6  # of one answer; what is refused as wrong is not tried again
FIRST_WAIT_S = 1.0  # doubled for each further try, unless the server says how long


@dataclass(frozen=True)
class Said:
    text: str
    finish: str | None
    completion_tokens: int


class Speaker(Protocol):
    async def say(self, prompt: str, fields: dict[str, Any]) -> Said:
        """ClusterError if there is no answer."""
        ...

    async def close(self) -> None: ...


class Endpoint(AsyncClosing):
    """Tries again what may be better the next time: no room, nobody there, a lost connection."""

    def __init__(self, speaker: Speaker, *, first_wait_s: float = FIRST_WAIT_S) -> None:
        self._speaker = speaker
        self._first_wait_s = first_wait_s

    @classmethod
    def at(cls, url: str, api: Api, *, api_key: str | None, silence_s: float) -> Endpoint:
        """`url` with or without /v1; `silence_s` is the longest wait for one answer."""
        url = url.rstrip("/").removesuffix("/v1")
        kind = Completions if api == "completions" else Chat
        return cls(kind(url, api_key, silence_s))

    async def say(self, prompt: str, fields: dict[str, Any]) -> Said:
        wait_s = self._first_wait_s
        for left in reversed(range(TRIES)):
            try:
                return await self._speaker.say(prompt, fields)
            except (NoRoom, Unavailable, WorkerLost) as error:
                if not left:
                    raise
                await asyncio.sleep(error.retry_after_s or wait_s)
                wait_s *= 2
        raise AssertionError("the last try returns or raises")

    async def close(self) -> None:
        await self._speaker.close()


class Completions:
    def __init__(self, url: str, api_key: str | None, silence_s: float) -> None:
        self._client = HttpClient(url, api_key, silence_s=silence_s)

    async def say(self, prompt: str, fields: dict[str, Any]) -> Said:
        answer = await self._client.complete(prompt, **fields)
        return Said(answer.text, answer.choices[0].finish, answer.completion_tokens)

    async def close(self) -> None:
        await self._client.close()


class Chat:
    """One message of a user; what the model thought, if told apart, is left out."""

    def __init__(self, url: str, api_key: str | None, silence_s: float) -> None:
        self._url = f"{url}/v1/chat/completions"
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(headers=headers, timeout=httpx.Timeout(silence_s, connect=5))

    async def say(self, prompt: str, fields: dict[str, Any]) -> Said:
        body = {"messages": [{"role": "user", "content": prompt}], **fields}
        try:
            answer = await self._http.post(self._url, json=body)
        except httpx.HTTPError as error:
            raise WorkerLost(f"{self._url}: {type(error).__name__}: {error}") from error
        if answer.status_code != 200:
            raise _error(answer)
        try:
            told = answer.json()
            (choice,) = told["choices"]
            usage = told.get("usage") or {}
            return Said(
                choice["message"]["content"] or "",
                choice.get("finish_reason"),
                int(usage.get("completion_tokens", 0)),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ClusterError(f"{self._url}: not an answer of chat: {error!r}") from error

    async def close(self) -> None:
        await self._http.aclose()


def _error(answer: httpx.Response) -> ClusterError:
    after = answer.headers.get("retry-after", "")
    kinds: dict[int, type[ClusterError]] = {429: NoRoom, 502: WorkerLost, 503: Unavailable}
    kind = kinds.get(answer.status_code, ClusterError)
    return kind(
        f"HTTP {answer.status_code}: {answer.text[:300]}",
        retry_after_s=float(after) if after.isdigit() else None,
    )
