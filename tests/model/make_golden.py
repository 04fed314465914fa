"""Writes golden/*.npz from the oracle: `TANDEM_ORACLE=folder python -m tests.model.make_golden`.

The suite compares with these files where the oracle itself is not at hand. Weights are not part of
them: they follow from the seed (model/random_tensors.py).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.model.cases import BY_NAME
from tests.model.expectation import Expectation, expected

FOLDER = Path(__file__).with_name("golden")
NAMES = ("micro", "narrow", "other_layers", "other_sizes", "images", "fp8", "compact", "tiny")
ROWS = 6  # rows of logits kept, evenly spaced, the last among them


@dataclass(frozen=True)
class Golden:
    rows: Any  # int64, counted from the end: -1 is the last row
    logits: Any  # [rows, V] float32
    tokens: list[int]
    draft_tokens: list[int]
    draft_confidence: Any
    draft_logits: Any  # [1, V] of the last drafted token
    pieces: str  # digest_of the packed state after the prompt

    @classmethod
    def of(cls, want: Expectation) -> Golden:
        rows = np.linspace(-len(want.logits), -1, ROWS).round().astype(np.int64)
        return cls(
            rows,
            want.logits[rows].astype(np.float32),
            want.tokens,
            want.draft.tokens.tolist(),
            want.draft.confidence,
            want.draft.logits[-1:].astype(np.float32),
            digest_of(want.pieces),
        )

    @classmethod
    def load(cls, name: str) -> Golden:
        with np.load(FOLDER / f"{name}.npz") as stored:
            values = {key: stored[key] for key in stored.files}
        for key in ("tokens", "draft_tokens", "pieces"):
            values[key] = values[key].tolist()
        return cls(**values)


def digest_of(pieces: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name in sorted(pieces):
        digest.update(f"{name} {len(pieces[name])} ".encode() + pieces[name])
    return digest.hexdigest()


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in NAMES:
        assert name in BY_NAME
        np.savez_compressed(FOLDER / f"{name}.npz", **vars(Golden.of(expected(name))))


if __name__ == "__main__":
    main()
