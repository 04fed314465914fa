"""One greedy answer over HTTP, whole or as a stream that a thread reads."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import httpx

PROMPT = "def add(a, b):"
STREAM = 80  # tokens of the longest stream of the default tier: 2 s on a quiet core
LONG_STREAM = 400  # of the long forms


def request_body(tokens: int) -> dict[str, Any]:
    return {
        "prompt": PROMPT,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "timeline": True,
    }


@dataclass
class Streaming:
    """One stream, read by a thread of its own."""

    url: str
    tokens: int
    first: threading.Event = field(default_factory=threading.Event)
    told: list[int] = field(default_factory=list)
    decoded_by: list[str] = field(default_factory=list)  # ranks, in order
    end: Future[str] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def result(self) -> list[int]:
        """All token ids; raises what ended the stream, if anything but its last token did."""
        assert self.end.result(90.0) == "length"
        return self.told

    def _read(self) -> None:
        finish = ""
        try:
            body = request_body(self.tokens) | {"stream": True}
            with httpx.stream("POST", self.url, json=body, timeout=90.0, verify=False) as answer:
                for line in answer.iter_lines():
                    if not line or line == "data: [DONE]":
                        continue
                    chunk = json.loads(line.removeprefix("data: "))
                    if "timeline" in chunk:
                        self.decoded_by = [
                            event["decode"]
                            for event in chunk["timeline"]["events"]
                            if event["event"] == "taken_over"
                        ]
                        continue
                    if "choices" not in chunk:
                        raise RuntimeError(line)
                    for choice in chunk["choices"]:
                        self.told += choice["token_ids"]
                        finish = choice["finish_reason"] or finish
                    self.first.set()
            self.end.set_result(finish)
        except Exception as error:
            self.end.set_exception(error)
