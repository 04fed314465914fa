"""Scores tandem-mini as the engine computes it: python -m examples.mini.score_packed

The questions of examples.mini.score, one forward over question and right answer, but in chunks over
packed request state, on weights as they are stored, in bf16. Beside it the network that the weights
were trained in answers in float32: another implementation in another precision.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import torch

from engine.slice.state import Held
from examples.mini.chat import ChatEncoder
from examples.mini.corpus import FOLDER
from examples.mini.score import Question, Scorer, planted, questions
from examples.mini.tasks.agent import agent
from examples.mini.tasks.conversation import conversation
from examples.mini.tasks.functions import functions
from examples.mini.tasks.schema import schema
from kv_transfer.layout import Layout
from kv_transfer.state_memory import open_memory
from kv_transfer.state_view import view_of
from model.batch import Chunk, build_batch
from model.packed.load import load_packed
from model.packed.place_rows import chunk_rows
from model.state import state_fields

CHUNK, BLOCK_TOKENS = 4096, 128


class PackedScorer:
    """One request at a time, of up to `longest` tokens."""

    def __init__(self, device: torch.device, dtype: torch.dtype, longest: int) -> None:
        self._model = load_packed(FOLDER, weights="checkpoint", device=device, dtype=dtype)
        self.spec = self._model.spec
        blocks = -(-longest // BLOCK_TOKENS)
        layout = Layout(state_fields(self.spec), BLOCK_TOKENS)
        self._memory = open_memory(layout, blocks, 1, device)
        self._held = Held(tuple(range(blocks)), 0)

    def exact(self, question: Question) -> bool:
        """Whether the answer is the greedy one."""
        ids, begin = [*question.prompt, *question.answer], len(question.prompt) - 1
        logits = None
        for start in [*range(0, begin, CHUNK), begin]:
            stop = min(start + CHUNK, begin) if start < begin else len(ids) - 1
            logits = self._forward(Chunk(ids, start, stop - start, logits="all"), start == begin)
        assert logits is not None
        return bool(logits == list(question.answer))

    def _forward(self, chunk: Chunk, answers: bool) -> list[int] | None:
        if not answers:
            chunk = Chunk(chunk.token_ids, chunk.start, chunk.count, logits="none")
        batch = build_batch(
            [chunk],
            image_token_id=self.spec.image_token_id,
            ngram=self.spec.engram_max_ngram_size,
        )
        placed = chunk_rows(batch, [self._held], self.spec, self._model.options, self._model.device)
        view = view_of(self._memory)
        logits = self._model.forward(placed.rows, placed.shape, view, placed.extras)
        return [int(token) for token in logits.argmax(-1).tolist()] if answers else None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="examples.mini.score_packed", description=__doc__)
    add = parser.add_argument
    add("--count", type=int, default=100, help="samples of each short task")
    add("--long", type=int, default=200, help="samples of each length of retrieval")
    add("--lengths", type=int, nargs="*", default=(1024, 4096, 16384))
    add("--alone", action="store_true", help="without the network in float32")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--device", default="cuda", help="cuda, or cpu for short texts")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    torch.backends.cuda.matmul.allow_tf32 = False
    encoder = ChatEncoder(FOLDER)
    asked = {
        task.__name__: questions(encoder, task, options.count, task.__name__)
        for task in (conversation, functions, schema, agent)
    } | {
        f"retrieval {tokens}": questions(
            encoder, planted(tokens), options.long, f"retrieval {tokens}"
        )
        for tokens in options.lengths
    }
    longest = max(len(one.prompt) + len(one.answer) for some in asked.values() for one in some)
    packed = PackedScorer(device, getattr(torch, options.dtype), longest)
    network = None if options.alone else Scorer(FOLDER, device, torch.float32)
    for task, some in asked.items():
        ours = [packed.exact(question) for question in some]
        line: dict[str, object] = {"task": task, "samples": len(some), "right": sum(ours)}
        if network is not None:
            theirs = network.exact(some)
            same = sum(one == other for one, other in zip(ours, theirs, strict=True))
            line |= {"network in float32": sum(theirs), "same": same}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
