"""The held-out samples of each task, from seeds that training never used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from random import Random

from examples.mini.chat import ChatEncoder
from examples.mini.corpus import FOLDER, Corpus, texts
from examples.mini.tasks.agent import agent
from examples.mini.tasks.conversation import conversation
from examples.mini.tasks.functions import functions
from examples.mini.tasks.retrieval import prose, retrieval
from examples.mini.tasks.sample import MakeSample, Sample
from examples.mini.tasks.schema import schema

RETRIEVAL_TOKENS = (1024, 4096, 16384)
_CHARACTERS = 2.9  # of a token of code; prose has 3.4


def samples(make: MakeSample, name: str, count: int) -> list[Sample]:
    random = Random(f"held out {name}")
    return [make(random) for _ in range(count)]


def tasks() -> Mapping[str, MakeSample]:
    """By name; retrieval once for each length of its text in tokens."""
    made: dict[str, Callable[[Random], Sample]] = {
        "conversation": conversation,
        "functions": functions,
        "schema": schema,
        "agent": agent,
    }
    made |= {f"retrieval {tokens}": partial(_planted, tokens) for tokens in RETRIEVAL_TOKENS}
    return made


def _planted(tokens: int, random: Random) -> Sample:
    """A fact in sentences, or among lines of held-out files."""
    characters = tokens - 120  # for the question and other facts
    if random.random() < 0.5:
        return retrieval(random, prose, int(characters * 3.4))
    return retrieval(random, _held_out().filler, int(characters * _CHARACTERS))


@cache
def _held_out() -> Corpus:
    return Corpus.of(texts(held_out=True), ChatEncoder(FOLDER).tokenizer)
