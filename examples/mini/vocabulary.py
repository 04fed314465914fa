"""Trains tandem-mini's tokenizer: python -m examples.mini.vocabulary [FOLDER]

Byte-level BPE, 2048 ids, learned from the standard library and from the tasks' own texts. Digits
stay single, so that numbers are copied digit by digit. Special tokens are those of the tiny model.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from examples.mini import corpus
from examples.mini.chat import DSML, answer_text, prompt_text
from examples.mini.tasks.agent import agent
from examples.mini.tasks.conversation import conversation
from examples.mini.tasks.functions import functions
from examples.mini.tasks.retrieval import prose, retrieval
from examples.mini.tasks.sample import Sample
from examples.mini.tasks.schema import schema
from model.compressed_vocab import compress_vocabulary
from model.tokenizer import Tokenizer
from scripts.train_tokenizer import BAR, VOCAB_SIZE, train

FOLDER = Path(__file__).resolve().parents[2] / "deploy/models/mini"
_SAMPLES = 2000  # of each task
_SPECIAL = re.compile(f"<{BAR}[^{BAR}]*{BAR}>|</?think>|{DSML}")


def learned_from() -> Iterator[str]:
    """Every third file of the library, and as much again of tasks."""
    yield from corpus.texts(held_out=False)[::3]
    random = Random("vocabulary")
    for make in (agent, conversation, functions, schema):
        for _ in range(_SAMPLES):
            yield from _texts(make(random))
    for _ in range(_SAMPLES):
        yield from _texts(retrieval(random, prose, 300))


def _texts(sample: Sample) -> Iterator[str]:
    """What a conversation spells, between special tokens."""
    yield from _SPECIAL.split(prompt_text(sample))
    yield sample.answer.reasoning
    yield from _SPECIAL.split(answer_text(sample.answer))


def main(arguments: list[str]) -> None:
    target = Path(arguments[0] if arguments else FOLDER)
    target.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = json.loads(train(learned_from(), digits=r"\p{N}").to_str())
    text = json.dumps(settings, ensure_ascii=True, separators=(",", ":"))
    (target / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    compressed = int(compress_vocabulary(Tokenizer.load(target)).max()) + 1
    print(f"{target}: {VOCAB_SIZE} ids, {compressed} when compressed")


if __name__ == "__main__":
    main(sys.argv[1:])
