"""Trains the tokenizer of the tiny model: python scripts/train_tokenizer.py [FOLDER]

Byte-level BPE, 2048 ids, learned from what every Python installation has: the sources of its
standard library and the help topics of pydoc. Special tokens have the spellings of DeepSeek-V4.1;
ids 0, 1, 2 and the last ones, as deploy/models/tiny/config.json says. One Python release always
gives the same file; another has other sources, so the file is committed.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 2048
FOLDER = Path(__file__).resolve().parent.parent / "deploy/models/tiny"

BAR, LOW = "\uff5c", "\u2581"  # the two unusual characters of DeepSeek's spellings
CONTROL = tuple(
    f"<{BAR}{name}{BAR}>"
    for name in (
        f"begin{LOW}of{LOW}sentence",
        f"end{LOW}of{LOW}sentence",
        f"{LOW}pad{LOW}",
    )
)
PROMPT = (
    *(f"<{BAR}fim{LOW}{part}{BAR}>" for part in ("hole", "begin", "end")),
    *(f"<{BAR}{name}{BAR}>" for name in ("User", "Assistant")),
    "<|EOT|>",
    "<think>",
    "</think>",
    f"{BAR}DSML{BAR}",
    *(
        f"<{BAR}{name}{BAR}>"
        for name in (
            "latest_reminder",
            "action",
            "query",
            "authority",
            "domain",
            "title",
            "read_url",
        )
    ),
)
MARKUP = tuple(
    f"<{BAR}{slash}{name}{BAR}>"
    for name in ("polygon", "point", "box", "ref")
    for slash in ("/", "")
)
LAST = (
    f"<{BAR}deepseek_image{BAR}>",
    f"<{BAR}System{BAR}>",
    f"<{BAR}place{LOW}holder{LOW}no{LOW}0{BAR}>",
)


def corpus() -> Iterator[str]:
    """Lines of the standard library's top-level modules and of pydoc's topics."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in [*sorted(library.glob("*.py")), library / "pydoc_data/topics.py"]:
        yield from path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)


def train(lines: Iterable[str], *, digits: str = r"\p{N}{1,3}") -> Tokenizer:
    """Learn merges, then add the special tokens above them; `digits` stay together, as V4.1's do.

    Flags are V4.1's: control and markup tokens are special, those that build prompts are not.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(digits), "isolated"),
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
    tokenizer.train_from_iterator(lines, trainer)
    image, system, spare = LAST
    tokenizer.add_tokens([AddedToken(text, normalized=True) for text in PROMPT])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in MARKUP])
    tokenizer.add_tokens([AddedToken(image, normalized=False), AddedToken(system, normalized=True)])
    tokenizer.add_special_tokens([AddedToken(spare, normalized=False)])
    return tokenizer


def main(arguments: list[str]) -> None:
    target = Path(arguments[0] if arguments else FOLDER) / "tokenizer.json"
    settings: dict[str, Any] = json.loads(train(corpus()).to_str())
    target.write_text(json.dumps(settings, ensure_ascii=True, indent=1) + "\n", encoding="utf-8")
    print(f"{target}: {VOCAB_SIZE} ids")


if __name__ == "__main__":
    main(sys.argv[1:])
