"""Scores a checkpoint without serving it: python -m examples.mini.score [FOLDER]

One forward over question and right answer: greedy decoding gives the answer exactly if each of
its tokens is the likeliest one after those before it. The served system is measured by eval.mini.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from examples.mini.batch import PackedBatch
from examples.mini.chat import ChatEncoder
from examples.mini.corpus import FOLDER, texts
from examples.mini.drafting import DraftNetwork, anchors
from examples.mini.export import restore
from examples.mini.network import Network, Settings
from examples.mini.tasks.agent import agent
from examples.mini.tasks.conversation import conversation
from examples.mini.tasks.functions import functions
from examples.mini.tasks.retrieval import prose, retrieval
from examples.mini.tasks.sample import Sample
from examples.mini.tasks.schema import schema
from model.load import token_map
from model.spec import ModelSpec

RETRIEVAL_TOKENS = (1024, 4096, 16384)


@dataclass(frozen=True)
class Question:
    prompt: Sequence[int]
    answer: Sequence[int]


class Scorer:
    def __init__(
        self, source: Path, device: torch.device, dtype: torch.dtype | None = None
    ) -> None:
        """`dtype`: what is computed in; None: bf16 on a GPU, float32 on a CPU."""
        self.spec = ModelSpec.load(FOLDER)
        parameters = restore(source)
        parameters.to(device)
        self._dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        self._w = parameters.prepared(parameters.stacks, self._dtype, quantised=True)
        self._network = Network(self.spec, token_map(FOLDER, self.spec), device)
        self._drafter = DraftNetwork(self.spec, device)
        self._device = device

    @torch.no_grad()
    def exact(
        self, questions: Sequence[Question], *, sparse: bool = True, keep: int = 0
    ) -> list[bool]:
        """Whether each answer is the greedy one. `keep`: prompt rows that a truncated prefill
        keeps.
        """
        found = []
        for question in questions:
            batch, size = self._alone(question, keep), len(question.answer)
            settings = Settings(self._dtype, sparse)
            logits = self._network(self._w, batch, settings).logits_TV
            begin = len(question.prompt) - 1
            greedy = logits[begin : begin + size].argmax(-1).tolist()
            found.append(greedy == list(question.answer))
        return found

    @torch.no_grad()
    def bits(self, ids: Sequence[int], window: int = 2048) -> float:
        """Of a text in all, in windows that do not see each other."""
        total = 0.0
        for start in range(0, len(ids), window):
            part = ids[start : start + window]
            logits = self._network(
                self._w, self._alone(Question(part, []), 0), Settings(self._dtype, True)
            ).logits_TV[: len(part) - 1]
            target = torch.tensor(part[1:], device=self._device)
            total += float(F.cross_entropy(logits.float(), target, reduction="sum")) / math.log(2)
            total += math.log2(self.spec.vocab_size)  # of its first token
        return total

    @torch.no_grad()
    def acceptance(self, questions: Sequence[Question]) -> float:
        """Accepted drafts over drafted ones, after anchors anywhere in right answers."""
        accepted = drafted = 0.0
        for question in questions:
            batch = self._alone(question, 0)
            outcome = self._network(self._w, batch, Settings(self._dtype, True))
            told = self._drafter.loss(self._w, batch, outcome, anchors(batch, 16))
            accepted += float(told.accepted.sum())
            drafted += float(told.drafted.sum())
        return accepted / max(drafted, 1)

    @torch.no_grad()
    def loads(self, questions: Sequence[Question]) -> float:
        """Mean over layers of the busiest expert's load over the mean."""
        totals: Tensor | None = None
        for question in questions:
            outcome = self._network(self._w, self._alone(question, 0), Settings(self._dtype, True))
            counts = torch.stack(list(outcome.loads.values())).float()
            totals = counts if totals is None else totals + counts
        assert totals is not None
        return float((totals.amax(1) / totals.mean(1)).mean())

    def _alone(self, question: Question, keep: int) -> PackedBatch:
        """Padded to whole tiles and pieces; what is behind the answer changes nothing."""
        ids = [*question.prompt, *question.answer]
        unit = 1024 if len(ids) > 1024 else 2 * self.spec.sliding_window
        length = -(-len(ids) // unit) * unit
        weights = np.zeros(length, np.float32)
        weights[len(question.prompt) - 1 : len(ids) - 1] = 1
        clip = max(0, len(question.prompt) - keep) if keep else 0
        padded = np.full(length, self.spec.pad_token_id)
        padded[: len(ids)] = ids
        zeros = torch.zeros(1, length, dtype=torch.int64)
        return PackedBatch(
            torch.from_numpy(padded)[None], zeros, zeros + clip, torch.from_numpy(weights)[None]
        ).to(self._device)


def questions(
    encoder: ChatEncoder, make: Callable[[Random], Sample], count: int, seed: str
) -> list[Question]:
    random = Random(f"held out {seed}")
    found = []
    for _ in range(count):
        encoded = encoder.encode(make(random))
        found.append(Question(encoded.prompt, encoded.answer))
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Score a checkpoint on held-out samples.")
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help="a checkpoint")
    parser.add_argument("--count", type=int, default=200, help="samples of each task")
    parser.add_argument("--long", type=int, default=100, help="samples of each retrieval length")
    parser.add_argument("--lengths", type=int, nargs="*", default=RETRIEVAL_TOKENS)
    parser.add_argument("--bytes", type=int, default=160_000, help="of held-out code")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for short texts")
    options = parser.parse_args(arguments)
    scorer, encoder = Scorer(options.folder, torch.device(options.device)), ChatEncoder(FOLDER)

    def told(name: str, value: float) -> None:
        print(json.dumps({name: round(value, 4)}), flush=True)

    for make in (conversation, functions, schema, agent):
        asked = questions(encoder, make, options.count, make.__name__)
        told(f"{make.__name__} exact", _mean(scorer.exact(asked)))
        told(f"{make.__name__} accepted", scorer.acceptance(asked[:50]))
        told(f"{make.__name__} load", scorer.loads(asked[:50]))
    for tokens in options.lengths:
        asked = questions(encoder, planted(tokens), options.long, f"retrieval {tokens}")
        told(f"retrieval {tokens}", _mean(scorer.exact(asked)))
        told(f"retrieval {tokens}, all rows", _mean(scorer.exact(asked, sparse=False)))
        told(f"retrieval {tokens}, keep 140", _mean(scorer.exact(asked, keep=140)))
        told(f"retrieval {tokens} accepted", scorer.acceptance(asked))
        told(f"retrieval {tokens} load", scorer.loads(asked))
    text = "".join(texts(held_out=True))[: options.bytes]
    bits = scorer.bits(encoder.tokenizer.encode(text))
    told("held-out code, bits a byte", bits / len(text.encode()))


def planted(tokens: int) -> Callable[[Random], Sample]:
    """A fact in prose of about so many tokens."""
    return lambda random: retrieval(random, prose, int(tokens * 3.2))


def _mean(found: Sequence[bool]) -> float:
    return sum(found) / len(found)


if __name__ == "__main__":
    main()
