"""The prompt as an answer that echoes it shows it: at once, or token by token as it is scored.

Knows nothing of the answer's own text.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.api.answer_text import Piece, ShownToken
from cluster.api.detokenizer import Detokenizer
from cluster.api.text import Tokenizer
from cluster.messages import TokenLogprobs


class PlainEcho:
    """Comes with the first piece of the answer. `text` may be empty: no echo."""

    def __init__(self, text: str) -> None:
        self.length = len(text)  # characters, as all of them
        self._text = text

    def feed(self, logprobs: Sequence[TokenLogprobs]) -> Piece:
        return Piece("")

    def rest(self) -> Piece:
        """What comes before the answer's first piece, in the same piece."""
        return Piece(self._text)


class ScoredEcho:
    """Tokens with their log-probabilities; the first has none, because nothing precedes it."""

    def __init__(self, token_ids: Sequence[int], tokenizer: Tokenizer) -> None:
        self.length = len(tokenizer.decode(token_ids))
        self._token_ids = token_ids
        self._detokenizer = Detokenizer(tokenizer)
        self._told = 0  # tokens
        self._shown = 0  # characters

    def feed(self, logprobs: Sequence[TokenLogprobs]) -> Piece:
        """The next tokens of the prompt; the very first goes with the second."""
        first = () if self._told else (None,)
        return self._tell((*first, *logprobs))

    def rest(self) -> Piece:
        """What no log-probabilities have brought: all of a prompt of one token."""
        return self._tell(() if self._told else (None,))

    def _tell(self, logprobs: Sequence[TokenLogprobs | None]) -> Piece:
        texts, tokens = [], []
        for own in logprobs:
            token_id = self._token_ids[self._told]
            self._told += 1
            text = self._detokenizer.feed((token_id,))
            if self._told == len(self._token_ids):
                text += self._detokenizer.finish()
            start, self._shown = self._shown, self._shown + len(text)
            tokens.append(ShownToken(token_id, start, self._shown, own))
            texts.append(text)
        return Piece("".join(texts), prompt=tokens)


Echo = PlainEcho | ScoredEcho
