"""Processes that make batches while the GPU works. Knows nothing of the network."""

from __future__ import annotations

import multiprocessing as mp
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_double
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from examples.mini.batch import PackedBatch
from examples.mini.chat import ChatEncoder
from examples.mini.corpus import Corpus
from examples.mini.mixture import Packer, RowArrays, lengths


@dataclass(frozen=True)
class FeedSettings:
    folder: Path  # of the tokenizer
    corpus: Path
    tokens: int  # of a batch
    workers: int
    seed: int


class Feed:
    """Batches for the place in training that `place` says; a few are made ahead.

    An error in a worker is raised here, by the next call.
    """

    def __init__(self, place: Any, batches: Any) -> None:
        self._place, self._batches = place, batches

    def next(self, place: float) -> PackedBatch:
        self._place.value = place
        made = self._batches.get(timeout=120)
        if isinstance(made, Exception):
            raise made
        return packed(made)

    def waiting(self) -> int:
        return int(self._batches.qsize())


@contextmanager
def feed(settings: FeedSettings, place: float) -> Iterator[Feed]:
    """Workers start before CUDA does: they are forked, and share the corpus."""
    context = mp.get_context("fork")
    shared, batches = context.Value(c_double, place), context.Queue(settings.workers + 4)
    corpus, stop = Corpus.load(settings.corpus), context.Event()
    workers = [
        context.Process(
            target=_work, args=(settings, corpus, number, shared, batches, stop), daemon=True
        )
        for number in range(settings.workers)
    ]
    for worker in workers:
        worker.start()
    try:
        yield Feed(shared, batches)
    finally:
        stop.set()
        for worker in workers:
            worker.terminate()


def _work(
    settings: FeedSettings, corpus: Corpus, number: int, place: Any, batches: Any, stop: Any
) -> None:
    torch.set_num_threads(1)
    random = Random(f"{settings.seed} {number} {place.value}")
    packer = Packer(ChatEncoder(settings.folder), corpus, random)
    while not stop.is_set():
        made: RowArrays | Exception
        try:
            made = _rows(packer, random, settings.tokens, float(place.value))
        except Exception as error:  # whatever it is, training must hear of it
            made = error
        while not stop.is_set():
            try:
                batches.put(made, timeout=1)
                break
            except queue.Full:
                continue


def _rows(packer: Packer, random: Random, tokens: int, place: float) -> RowArrays:
    chances = lengths(place)
    length = random.choices(list(chances), list(chances.values()))[0]
    return packer.rows(max(1, tokens // length), length, place)


def packed(rows: RowArrays) -> PackedBatch:
    return PackedBatch(
        torch.from_numpy(rows.ids.astype(np.int64)),
        torch.from_numpy(rows.starts.astype(np.int64)),
        torch.from_numpy(rows.clips.astype(np.int64)),
        torch.from_numpy(rows.weights),
    )
