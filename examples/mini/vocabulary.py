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

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.mini import corpus
from examples.mini.chat import DSML, answer_text, prompt_text
from examples.mini.tasks.agent import agent
from examples.mini.tasks.conversation import conversation
from examples.mini.tasks.functions import functions
from examples.mini.tasks.retrieval import prose, retrieval
from examples.mini.tasks.sample import Sample
from examples.mini.tasks.schema import schema
from model.compressed_vocab import compress_vocabulary
from model.tokenizer import Tokenizer as Loaded
from scripts.train_tokenizer import BAR, CONTROL, LAST, MARKUP, PROMPT, VOCAB_SIZE

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


def train(texts: Iterator[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(PROMPT) - len(MARKUP) - len(LAST),
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in CONTROL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    image, system, spare = LAST
    tokenizer.add_tokens([AddedToken(text, normalized=True) for text in PROMPT])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in MARKUP])
    tokenizer.add_tokens([AddedToken(image, normalized=False), AddedToken(system, normalized=True)])
    tokenizer.add_special_tokens([AddedToken(spare, normalized=False)])
    return tokenizer


def main(arguments: list[str]) -> None:
    target = Path(arguments[0] if arguments else FOLDER)
    target.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = json.loads(train(learned_from()).to_str())
    text = json.dumps(settings, ensure_ascii=True, separators=(",", ":"))
    (target / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    compressed = int(compress_vocabulary(Loaded.load(target)).max()) + 1
    print(f"{target}: {VOCAB_SIZE} ids, {compressed} when compressed")


if __name__ == "__main__":
    main(sys.argv[1:])
