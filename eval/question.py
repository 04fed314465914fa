"""One question of a set, whatever set it is from. Knows no files and no endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["integer", "choice", "exact"]


@dataclass(frozen=True)
class Question:
    """`prompt` is all that the model is told; `answer` what it should come to."""

    id: str
    prompt: str
    answer: str
    kind: Kind
