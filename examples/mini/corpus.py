"""Text and code that every Python installation has: its standard library and pydoc's topics.

python -m examples.mini.corpus FILE writes it once, tokenised, for machines with another Python.
CPython's sources and documentation are under the PSF licence. Which files are held out follows
from their names alone, so it is the same wherever this runs.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt

from model.tokenizer import Tokenizer

FOLDER = Path(__file__).resolve().parents[2] / "deploy/models/mini"
_LEFT_OUT = ("test", "tests", "idlelib", "lib2to3", "site-packages", "turtledemo", "ensurepip")
_LEFT_OUT_FILES = ("topics.py",)  # of pydoc: read as text, below
_ENCODINGS = "encodings"  # tables of characters, not code
_HELD_OUT = 0.04


def files() -> Iterator[Path]:
    """Sources of the standard library, in the order of their names."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        if not {*parts} & {*_LEFT_OUT, _ENCODINGS} and path.name not in _LEFT_OUT_FILES:
            yield path


def is_held_out(path: Path) -> bool:
    library = Path(sysconfig.get_path("stdlib"))
    name = path.relative_to(library).as_posix()
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") < _HELD_OUT * 2**32


def texts(*, held_out: bool) -> list[str]:
    """Files; pydoc's topics are among those to train on."""
    found = [
        path.read_text(encoding="utf-8", errors="replace")
        for path in files()
        if is_held_out(path) == held_out
    ]
    if not held_out:
        from pydoc_data.topics import topics

        found += topics.values()
    return [text for text in found if len(text) > 200]


@dataclass(frozen=True)
class Corpus:
    """Token ids of all texts, and where each begins; the texts' lines, for long prompts."""

    ids: npt.NDArray[np.uint16]
    begins: npt.NDArray[np.int64]
    lines: Sequence[str]

    @classmethod
    def of(cls, found: Sequence[str], tokenizer: Tokenizer) -> Corpus:
        encoded = [tokenizer.encode(text) for text in found]
        sizes = np.array([len(ids) for ids in encoded])
        return cls(
            np.concatenate([np.array(ids, np.uint16) for ids in encoded]),
            sizes.cumsum() - sizes,
            [line for text in found for line in text.splitlines() if line.strip()],
        )

    @classmethod
    def load(cls, path: str | Path) -> Corpus:
        with np.load(path) as stored:
            lines = bytes(stored["lines"]).decode().split("\n")
            return cls(stored["ids"], stored["begins"], lines)

    def save(self, path: str | Path) -> None:
        lines = np.frombuffer("\n".join(self.lines).encode(), np.uint8)
        np.savez_compressed(path, ids=self.ids, begins=self.begins, lines=lines)

    def window(self, random: Random, length: int) -> npt.NDArray[np.uint16]:
        """Up to `length` ids from anywhere within one text."""
        start = random.randrange(len(self.ids))
        number = int(self.begins.searchsorted(start, "right"))
        end = int(self.begins[number]) if number < len(self.begins) else len(self.ids)
        if random.random() < 0.2:  # from the begin of a file, as prompts are
            start = int(self.begins[number - 1])
        return self.ids[start : min(end, start + length)]

    def filler(self, random: Random, characters: int) -> Sequence[str]:
        """Neighbouring lines."""
        start = random.randrange(len(self.lines))
        found: list[str] = []
        while characters > 0:
            line = self.lines[start % len(self.lines)]
            found.append(line)
            characters -= len(line) + 1
            start += 1
        return found


def main(arguments: list[str]) -> None:
    (target,) = arguments
    corpus = Corpus.of(texts(held_out=False), Tokenizer.load(FOLDER))
    corpus.save(target)
    print(f"{target}: {len(corpus.ids)} tokens in {len(corpus.begins)} texts")


if __name__ == "__main__":
    main(sys.argv[1:])
