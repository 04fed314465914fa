"""What is trained on when: shares of tasks, lengths of rows, and packing samples into rows.

Pure: random numbers in, arrays out. A run's place in the whole training goes from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

import numpy as np
import numpy.typing as npt

from examples.mini.chat import ChatEncoder
from examples.mini.corpus import Corpus
from examples.mini.tasks.agent import agent
from examples.mini.tasks.conversation import conversation
from examples.mini.tasks.copying import pairs, repeated_ids
from examples.mini.tasks.functions import functions, source
from examples.mini.tasks.retrieval import prose, retrieval
from examples.mini.tasks.sample import MakeSample, Sample
from examples.mini.tasks.schema import schema

_TEXT, _PROMPT, _ANSWER = 0.5, 0.1, 1.0  # how much predicting a token counts
_CHARACTERS = 2.8  # of a token of code, about


@dataclass(frozen=True)
class Document:
    """`weights` are of predicting each id; `kept` ids before the end are a prompt's kept rows."""

    ids: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]
    clip: int = 0


@dataclass(frozen=True)
class RowArrays:
    """Rows as batch.PackedBatch has them; small types, for the way between processes."""

    ids: npt.NDArray[np.uint16]
    starts: npt.NDArray[np.int32]
    clips: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]


def lengths(place: float) -> Mapping[int, float]:
    """Chances of row lengths."""
    if place < 0.35:
        return {2048: 1.0}
    if place < 0.6:
        return {2048: 0.6, 4096: 0.4}
    return {2048: 0.5, 4096: 0.3, 16384: 0.2}


def shares(place: float, length: int) -> Mapping[str, float]:
    """Of all tokens. Copying comes first: everything else is built on it."""
    if place < 0.08:
        return {
            "pairs": 0.25, "repeated": 0.1, "text": 0.3, "retrieval": 0.15, "schema": 0.1,
            "conversation": 0.05, "functions": 0.05,
        }  # fmt: skip
    if length > 8192:
        return {"retrieval": 0.7, "text": 0.2, "agent": 0.1}
    return {
        "text": 0.22, "source": 0.03, "pairs": 0.05, "repeated": 0.01, "conversation": 0.09,
        "functions": 0.1, "schema": 0.14, "agent": 0.2, "retrieval": 0.16,
    }  # fmt: skip


class Packer:
    """Draws documents so that tokens come in the shares asked for, and packs them."""

    def __init__(self, encoder: ChatEncoder, corpus: Corpus, random: Random) -> None:
        self._encoder, self._corpus, self._random = encoder, corpus, random
        self._given: dict[str, float] = {}
        self._waiting: list[Document] = []
        tasks: Mapping[str, MakeSample] = {
            "conversation": conversation,
            "functions": functions,
            "schema": schema,
            "agent": agent,
        }
        self._make: dict[str, Callable[[int], Document]] = {
            name: self._maker(make) for name, make in tasks.items()
        }
        self._make |= {
            "retrieval": self._retrieval,
            "text": self._text,
            "source": lambda room: self._plain(source(random), _ANSWER),
            "pairs": self._pairs,
            "repeated": self._repeated,
        }
        special = {*encoder.tokenizer.special_ids.values()}
        self._plain_ids = [i for i in range(encoder.tokenizer.vocab_size) if i not in special]

    def rows(self, count: int, length: int, place: float) -> RowArrays:
        """`count` rows of `length` positions."""
        arrays = RowArrays(
            np.full((count, length), self._encoder.tokenizer.eos_token_id, np.uint16),
            np.zeros((count, length), np.int32),
            np.zeros((count, length), np.int32),
            np.zeros((count, length), np.float32),
        )
        wanted = shares(place, length)
        for row in range(count):
            self._fill(arrays, row, wanted)
        return arrays

    def _fill(self, arrays: RowArrays, row: int, wanted: Mapping[str, float]) -> None:
        length, at = arrays.ids.shape[1], 0
        waiting, self._waiting = self._waiting, []
        while length - at >= 16:
            room = length - at
            document = waiting.pop() if waiting else self._draw(wanted, length)
            if len(document.ids) > room:
                if len(document.ids) <= length:
                    self._waiting.append(document)
                document = self._short(room)
            end = at + len(document.ids)
            arrays.ids[row, at:end] = document.ids
            arrays.weights[row, at : end - 1] = document.weights[1:]
            at_next = min(end + end % 2, length)
            arrays.starts[row, at:at_next] = at
            arrays.clips[row, at:at_next] = at + document.clip
            at = at_next
        arrays.starts[row, at:] = arrays.clips[row, at:] = at
        self._waiting += waiting

    def _short(self, room: int) -> Document:
        """Something for the end of a row."""
        name = self._random.choice(("conversation", "functions", "text"))
        document = self._make[name](room)
        if len(document.ids) > room:
            return self._text(room)
        self._given[name] = self._given.get(name, 0.0) + len(document.ids)
        return document

    def _draw(self, wanted: Mapping[str, float], length: int) -> Document:
        """Of the task that is furthest behind its share."""
        name = min(wanted, key=lambda name: self._given.get(name, 0.0) / wanted[name])
        document = self._make[name](length)
        self._given[name] = self._given.get(name, 0.0) + len(document.ids)
        if sum(self._given.values()) > 4e6:  # forget, for shares change
            self._given = {key: 0.0 for key in self._given}
        return document

    def _maker(self, make: MakeSample) -> Callable[[int], Document]:
        return lambda room: self._chat(make(self._random))

    def _chat(self, sample: Sample) -> Document:
        encoded = self._encoder.encode(sample)
        ids = np.array(encoded.prompt + encoded.answer, np.int64)
        weights = np.full(len(ids), _PROMPT, np.float32)
        weights[len(encoded.prompt) :] = _ANSWER
        clip = 0
        if self._random.random() < 0.25:  # served with a truncated prefill
            clip = max(0, len(encoded.prompt) - self._random.randint(70, 200))
            weights[: clip + 1] = 0
        return Document(ids, weights, clip)

    def _retrieval(self, room: int) -> Document:
        """Of any length up to the whole row, most often short."""
        random = self._random
        most = room - 150
        tokens = most if random.random() < 0.25 else int(40 * (most / 40) ** random.random())
        filler = prose if random.random() < 0.3 else self._corpus.filler
        per_token = _CHARACTERS if filler is self._corpus.filler else 3.3
        return self._chat(retrieval(random, filler, int(tokens * per_token)))

    def _text(self, room: int) -> Document:
        ids = self._corpus.window(self._random, room).astype(np.int64)
        return Document(ids, np.full(len(ids), _TEXT, np.float32))

    def _plain(self, text: str, weight: float) -> Document:
        ids = np.array(self._encoder.tokenizer.encode(text), np.int64)
        return Document(ids, np.full(len(ids), weight, np.float32))

    def _pairs(self, room: int) -> Document:
        return self._plain(pairs(self._random, self._random.randint(2, 30)), _TEXT)

    def _repeated(self, room: int) -> Document:
        length = self._random.randint(8, 200)
        ids = np.array(repeated_ids(self._random, self._plain_ids, length), np.int64)
        weights = np.full(2 * length, _ANSWER, np.float32)
        weights[:length] = 0
        return Document(ids, weights)
