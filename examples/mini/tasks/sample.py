"""One task with its right answer: a chat request, and what the model should say.

Knows nothing of tokens or of how a conversation is spelled (examples/mini/chat.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

Message = Mapping[str, Any]
"""As in a chat-completions request."""


@dataclass(frozen=True)
class Call:
    """A tool call; all arguments are strings."""

    name: str
    arguments: Mapping[str, str]


@dataclass(frozen=True)
class Answer:
    """`reasoning` is only said when the sample asks for thinking."""

    content: str = ""
    reasoning: str = ""
    calls: Sequence[Call] = ()


@dataclass(frozen=True)
class Sample:
    task: str
    messages: Sequence[Message]
    answer: Answer
    thinking: bool
    tools: Sequence[Mapping[str, Any]] = ()
    schema: Mapping[str, Any] | None = None
    expected: str = field(default="")
    """What a right answer must contain, where its wording is free; else the whole answer counts."""


class MakeSample(Protocol):
    """A task: draws one sample."""

    def __call__(self, random: Random, /) -> Sample: ...


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}
