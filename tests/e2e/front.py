"""A cluster's front door for tests: the real HTTP server over the real caller, on loopback.

`ask` asks in each way there is, and insists that the answers agree.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from torch import Tensor

from cluster.http_client import HttpClient
from model.batch import ForwardBatch
from model.cache import Cache
from tests.cluster.fake_engine import serving
from tests.tiny import StateModel, TinyCluster

Json = dict[str, Any]
URL = "/v1/completions"


class Scripted(StateModel):
    """Says `script` after a prompt of `prompt_length` tokens, whoever asks; state still counts."""

    def __init__(self, script: list[int], prompt_length: int) -> None:
        super().__init__()
        self._script = script
        self._prompt_length = prompt_length

    def forward(self, batch: ForwardBatch, cache: Cache) -> Tensor:
        logits = super().forward(batch, cache)
        for row, position in zip(logits, batch.positions_T[batch.logit_rows], strict=True):
            place = int(position) + 1 - self._prompt_length
            if 0 <= place < len(self._script):
                row[self._script[place]] = 1000.0
        return logits


@dataclass
class Front:
    """`http` for raw requests, `client` for our own handle."""

    http: httpx.AsyncClient
    client: HttpClient

    async def whole(self, **body: Any) -> Json:
        """The answer, greedy and to its full length unless the body says otherwise."""
        answer = await self.http.post(URL, json=_complete(body))
        assert answer.status_code == 200, answer.text
        told: Json = answer.json()
        return told

    async def ask(self, **body: Any) -> Json:
        """The same, which the streamed one and the client's must equal."""
        whole = await self.whole(**body)
        body = _complete(body)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        stream = await self.http.post(URL, json=body | options)
        assert stream.status_code == 200, stream.text
        usage, choices = joined(stream.content, len(whole["choices"]))
        assert (usage, choices) == (whole["usage"], whole["choices"])
        told = await self.client.complete(body.pop("prompt"), **body)
        assert [(one.text, one.finish, one.logprobs) for one in told.choices] == [
            (one["text"], one["finish_reason"], one["logprobs"]) for one in whole["choices"]
        ]
        return whole

    async def refused(self, **body: Any) -> Json:
        """The error, in our shape, and the same whether a stream is asked for or not."""
        told = [await self.raw(json.dumps(body | {"stream": stream})) for stream in (False, True)]
        assert told[0] == told[1]
        assert told[0]["status"] == 400, told[0]
        return told[0]

    async def raw(self, body: str) -> Json:
        """Of any body: status, and either the error or None. Always valid JSON, never a 5xx."""
        answer = await self.http.post(URL, content=body.encode())
        assert answer.status_code < 500, (body, answer.text)
        if answer.status_code == 200:
            return {"status": 200, "error": None}
        error = answer.json()["error"]
        assert error["message"]
        return {"status": answer.status_code, "error": error}


def _complete(body: Json) -> Json:
    body = {"ignore_eos": True, "temperature": 0, "seed": 5, **body}
    return {name: value for name, value in body.items() if value is not None}


def joined(stream: bytes, count: int) -> tuple[Json, list[Json]]:
    """Usage and choices of a stream; each line of it is UTF-8 and JSON by itself."""
    *lines, usage, done, rest = stream.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    choices: list[Json] = [{"index": index, "text": "", "logprobs": None} for index in range(count)]
    for line in lines:
        for told in json.loads(line.decode("utf-8").removeprefix("data: "))["choices"]:
            choice = choices[told["index"]]
            assert choice.get("finish_reason") is None, "something came after the end"
            choice["text"] += told["text"]
            choice["finish_reason"] = told["finish_reason"]
            if "token_ids" in told:
                choice["token_ids"] = choice.get("token_ids", []) + told["token_ids"]
            for name, values in (told["logprobs"] or {}).items():
                lists = choice["logprobs"] = choice["logprobs"] or {}
                lists[name] = lists.get(name, []) + values
    return json.loads(usage.removeprefix(b"data: "))["usage"], choices


@asynccontextmanager
async def front_of(cluster: TinyCluster) -> AsyncIterator[Front]:
    async with (
        serving(cluster.caller, cluster.config) as url,
        httpx.AsyncClient(base_url=url, timeout=60.0, verify=False) as http,
        HttpClient(url) as client,
    ):
        yield Front(http, client)
