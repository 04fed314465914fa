"""Facts planted in a long text, and the question for one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from examples.mini.tasks.sample import Answer, Sample, user
from examples.mini.tasks.words import code_word, constant, digits, invented, person

Filler = Callable[[Random, int], Sequence[str]]
"""(random, characters) -> lines of text that are about something else"""

ATTRIBUTES = (
    "access code",
    "password",
    "locker number",
    "phone number",
    "secret word",
    "room number",
    "badge number",
    "licence key",
    "account number",
    "call sign",
)
_SENTENCES = (
    "A dry summer makes the river slow.",
    "The train was late again, and nobody was surprised.",
    "She put the letter on the table and closed the window.",
    "Old houses have thick walls and small windows.",
    "He counted the boxes twice before he signed the paper.",
    "The market opens early and ends at noon.",
    "It rained all night, so the road was closed.",
    "They talked about the harvest and the price of bread.",
    "A long bridge leads to the island.",
    "The quick brown fox jumps over the lazy dog.",
    "Nobody knew who had left the gate open.",
    "The museum shows maps that are three hundred years old.",
    "Two boats were waiting in the harbour.",
    "The teacher wrote the date on the board.",
    "In winter the lake is covered with ice.",
    "He fixed the old radio with a piece of wire.",
)


@dataclass(frozen=True)
class Fact:
    line: str
    question: str
    reply: str
    value: str


def prose(random: Random, characters: int) -> list[str]:
    lines: list[str] = []
    while characters > 0:
        lines.append(" ".join(random.choices(_SENTENCES, k=random.randint(1, 4))))
        characters -= len(lines[-1])
    return lines


def fact(random: Random) -> Fact:
    if random.random() < 0.3:
        name, value = constant(random), digits(random, 1, 5)
        return Fact(
            f"{name} = {value}",
            random.choice((f"What is the value of {name}?", f"Which value has {name}?")),
            f"{name} is {value}.",
            value,
        )
    attribute, value = random.choice(ATTRIBUTES), code_word(random)
    owner = person(random) if random.random() < 0.5 else invented(random)
    return Fact(
        f"The {attribute} of {owner} is {value}.",
        random.choice(
            (
                f"What is the {attribute} of {owner}?",
                f"Tell me the {attribute} of {owner}.",
                f"Which {attribute} has {owner}?",
            )
        ),
        f"The {attribute} of {owner} is {value}.",
        value,
    )


def retrieval(random: Random, filler: Filler, characters: int) -> Sample:
    """A text of about `characters`, with one to a handful of facts at random places."""
    asked, *others = [fact(random) for _ in range(random.choice((1, 1, 2, 3, 5, 8)))]
    lines = list(filler(random, characters))
    for one in (asked, *others):
        lines.insert(random.randint(0, len(lines)), one.line)
    text = "\n".join(lines)
    question = random.choice(
        (
            f"{text}\n\n{asked.question}",
            f"Here is a file:\n\n{text}\n\n{asked.question}",
            f"Read this text.\n\n{text}\n\n{asked.question}",
        )
    )
    return Sample(
        "retrieval",
        [user(question)],
        Answer(asked.reply, f"The text says: {asked.line}"),
        thinking=random.random() < 0.3,
        expected=asked.value,
    )
