"""Greedy answers of a running server, over HTTP completions with prompts of token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True)
class Completion:
    token_ids: list[int]
    finish_reason: str


class Client:
    def __init__(self, base_url: str, model: str, timeout_s: float, concurrency: int) -> None:
        self._http = httpx.AsyncClient(base_url=base_url, timeout=timeout_s)
        self._model, self._slots = model, asyncio.Semaphore(concurrency)

    async def close(self) -> None:
        await self._http.aclose()

    async def longest(self) -> int:
        """Tokens of prompt and answer together that the server takes."""
        answer = await self._http.get("/v1/models")
        answer.raise_for_status()
        return int(answer.json()["data"][0]["max_model_len"])

    async def complete(self, prompt: Sequence[int], max_tokens: int) -> Completion:
        """Raises RuntimeError with what the server said, if it refuses."""
        choice = await self._choice(
            prompt, max_tokens=max_tokens, temperature=0, return_token_ids=True
        )
        return Completion(list(choice["token_ids"]), str(choice["finish_reason"]))

    async def log_probability(self, ids: Sequence[int]) -> float:
        """Natural logarithm of all tokens but the first."""
        choice = await self._choice(ids, max_tokens=1, temperature=0, echo=True, logprobs=0)
        found = choice["logprobs"]["token_logprobs"][1 : len(ids)]
        return float(sum(found))

    async def _choice(self, prompt: Sequence[int], **options: Any) -> Any:
        body = {"model": self._model, "prompt": list(prompt), **options}
        async with self._slots:
            answer = await self._http.post("/v1/completions", json=body)
        if answer.status_code != 200:
            raise RuntimeError(f"HTTP {answer.status_code}: {answer.text[:300]}")
        return answer.json()["choices"][0]
