"""The text of one answer as its tokens come: what may be shown, what is held back, where it ends.

The first stop string to be complete ends the answer; of several that are complete with the same
character the longest counts. Tokens are told in step with the text: one that may belong to a stop
string waits with its text, and goes with it. All of this is a function of the tokens alone, never
of how they are grouped: joined, the pieces of a stream are the whole answer. Knows no HTTP.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from cluster.api.detokenizer import Detokenizer
from cluster.api.stop_strings import StopStrings
from cluster.api.text import Tokenizer
from cluster.generation import Delta
from cluster.messages import FinishReason, TokenLogprobs


class ShownToken(NamedTuple):
    """`start`: characters of the text before it; `end`: including those that it completes."""

    token_id: int
    start: int
    end: int
    logprobs: TokenLogprobs | None


class Piece(NamedTuple):
    """What is new of an answer; `finish` comes with the last piece.

    `prompt` are tokens of an echoed prompt, whose text comes before that of the `tokens`.
    """

    text: str
    tokens: Sequence[ShownToken] = ()
    finish: FinishReason | None = None
    prompt: Sequence[ShownToken] = ()

    def after(self, echoed: Piece) -> Piece:
        """With what is left to be told of the prompt before it."""
        return Piece(echoed.text + self.text, self.tokens, self.finish, echoed.prompt)


class AnswerText:
    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: StopStrings,
        *,
        offset: int = 0,
        min_tokens: int = 0,
        show_stop: bool = False,
        tell_tokens: bool = True,
    ) -> None:
        """`offset` characters of an echoed prompt come before. A stop string counts only if it is
        complete after token number `min_tokens`. `show_stop`: the text includes what ended it.
        Without `tell_tokens` pieces are text only, which is much cheaper."""
        self.count = 0  # tokens taken: what the answer cost
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = stops
        self._min_tokens = min_tokens
        self._show_stop = show_stop
        self._tell_tokens = tell_tokens
        self._node = 0
        self._shown = offset  # characters that are out
        self._held = ""
        self._waiting: deque[ShownToken] = deque()
        self._ready: list[ShownToken] = []
        self._cut: int | None = None  # where a stop string ended the answer

    def feed(self, delta: Delta) -> Piece:
        """What these tokens make certain. After a piece with `finish` nothing may be fed."""
        if delta.finish is None and not self._stops:
            return self._feed_certain(delta)
        for place, token_id in enumerate(delta.token_ids):
            ends = delta.finish == "stop" and place + 1 == len(delta.token_ids)
            self._take(token_id, delta.logprobs[place] if delta.logprobs else None, silent=ends)
            if self._cut is not None:
                return self._show(self._cut, "stop")
        if delta.finish is None:
            return self._show(self._certain(), None)
        self._append(self._detokenizer.finish())
        if self._cut is not None:
            return self._show(self._cut, "stop")
        return self._show(self._end(), delta.finish)

    def _feed_certain(self, delta: Delta) -> Piece:
        """The same where nothing can be held back, as for most tokens; at half the cost."""
        self.count += len(delta.token_ids)
        if not self._tell_tokens:
            text = self._detokenizer.feed(delta.token_ids)
            self._shown += len(text)
            return Piece(text)
        texts, tokens = [], []
        for place, token_id in enumerate(delta.token_ids):
            text, start = self._detokenizer.feed((token_id,)), self._shown
            self._shown += len(text)
            texts.append(text)
            logprobs = delta.logprobs[place] if delta.logprobs else None
            tokens.append(ShownToken(token_id, start, self._shown, logprobs))
        return Piece("".join(texts), tokens)

    def _take(self, token_id: int, logprobs: TokenLogprobs | None, *, silent: bool) -> None:
        """`silent`: a stop token; it has a place in the answer, but its text is not of it."""
        self.count += 1
        start = self._end()
        if not silent or self._show_stop:
            self._append(self._detokenizer.feed((token_id,)))
        if self._tell_tokens:
            self._waiting.append(ShownToken(token_id, start, self._end(), logprobs))
            if self._cut is None:
                self._settle()

    def _append(self, text: str) -> None:
        if not self._stops:
            self._held += text
            return
        for place, character in enumerate(text):
            self._node = self._stops.step(self._node, character)
            found = self._stops.found[self._node]
            if found and self.count > self._min_tokens:
                self._held += text[: place + 1]
                self._cut = self._end() - (0 if self._show_stop else found)
                return
        self._held += text

    def _settle(self) -> None:
        """Tokens become ready one by one, so that grouping cannot matter."""
        certain = self._certain()
        while self._waiting and self._waiting[0].end <= certain:
            self._ready.append(self._waiting.popleft())

    def _show(self, upto: int, finish: FinishReason | None) -> Piece:
        """Out with the text before `upto`, and with the tokens that are ready."""
        length = upto - self._shown
        text, self._held = self._held[:length], self._held[length:]
        self._shown = upto
        if finish is not None:
            self._ready += [one for one in self._waiting if self._cut is None or one.start < upto]
        tokens, self._ready = self._ready, []
        return Piece(text, tokens, finish)

    def _end(self) -> int:
        return self._shown + len(self._held)

    def _certain(self) -> int:
        """Text before this can no longer be part of a stop string."""
        return self._end() - self._stops.depth[self._node]
