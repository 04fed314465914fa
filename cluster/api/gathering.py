"""The pieces of one answer, put together for those who do not stream.

Each piece becomes JSON text as it comes: to write a long answer with its log-probabilities in one
go would hold up the loop for a second. Knows nothing of other answers.
"""

from __future__ import annotations

import json

from cluster.api.answer_text import Piece
from cluster.api.logprobs import logprobs_body
from cluster.api.openai import choice_text
from cluster.api.text import Tokenizer
from cluster.messages import FinishReason

_encode = json.JSONEncoder(separators=(",", ":")).encode


class Gathering:
    def __init__(self, tokenizer: Tokenizer, *, logprobs: bool, token_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._texts: list[str] = []
        self._ids: list[str] | None = [] if token_ids else None
        self._logprobs: dict[str, list[str]] | None = {} if logprobs else None
        self._finish: FinishReason | None = None

    def add(self, piece: Piece) -> None:
        self._texts.append(piece.text)
        self._finish = piece.finish
        if self._ids is not None:
            self._ids += [str(token.token_id) for token in piece.tokens]
        if self._logprobs is not None:
            told = logprobs_body((*piece.prompt, *piece.tokens), self._tokenizer)
            for name, values in told.items():
                parts = self._logprobs.setdefault(name, [])
                parts += [_encode(values)[1:-1]] if values else []

    def choice(self, index: int) -> str:
        """JSON text."""
        logprobs = None
        if self._logprobs is not None:
            lists = (f'"{name}":[{",".join(parts)}]' for name, parts in self._logprobs.items())
            logprobs = "{" + ",".join(lists) + "}"
        return choice_text(
            index,
            "".join(self._texts),
            finish=self._finish,
            logprobs=logprobs or "null",
            token_ids=self._ids,
        )
